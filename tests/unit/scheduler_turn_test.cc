// Turns on a path: who may use it when, in the rules themselves and in what a scheduler starts.
#include <algorithm>

#include "daemon/scheduler/turn.h"
#include "tests/support/simulated_training.h"
//
#include "tests/support/catch.h"

using namespace mlpo;
using namespace mlpo::test;

namespace {

constexpr Direction kRead = Direction::kRead;
constexpr Direction kWrite = Direction::kWrite;

// Four ranks on one path. Returns what was started there once all are under way.
std::vector<Transfer> Started(TurnRules rules) {
  SimulatedTraining training;
  training.speeds = {{300e3, 200e3, 1}};
  training.options = SimulatedOptions(40, training.speeds);
  training.options.turns = {rules};
  training.ranks.assign(4, {64, 2});
  training.steps = 3;
  std::vector<Transfer> started;
  training.prepare = [&](FakeTier& tier) {
    tier.on_transfer = [&](const Transfer& transfer) { started.push_back(transfer); };
  };
  const SimulatedResult result = SimulateTraining(training);
  CHECK(result.problem == "");
  return started;
}

// Transfers a session had on average before another one's came.
double MeanRun(const std::vector<Transfer>& started) {
  size_t runs = 1;
  for (size_t i = 1; i < started.size(); ++i) runs += started[i].file != started[i - 1].file;
  return static_cast<double>(started.size()) / static_cast<double>(runs);
}

}  // namespace

TEST_CASE("Turn.IsHeldForItsBlocks") {
  Turn turn(TurnRules{2, false, false});
  CHECK(turn.Allows(1, kRead));
  const uint64_t first = turn.Started(1, kRead, 9);
  CHECK_FALSE(turn.Allows(2, kRead));
  CHECK(turn.Allows(1, kWrite));
  turn.Started(1, kWrite, 9);
  CHECK(turn.Allows(2, kRead));  // both are begun: the next turn may begin while they end
  const uint64_t second = turn.Started(2, kRead, 9);
  CHECK_FALSE(turn.Allows(1, kRead));
  turn.Ended(first, kRead);  // is not the holder's
  CHECK_FALSE(turn.Yield());
  turn.Ended(second, kRead);
  CHECK(turn.Yield());  // it has a block left, and did not begin it
  CHECK(turn.Allows(1, kRead));
}

TEST_CASE("Turn.OneDirectionWaitsForTheOthersEnd") {
  Turn turn(TurnRules{1, true, false});
  const uint64_t read = turn.Started(1, kRead, 1);
  CHECK_FALSE(turn.Allows(1, kWrite));
  CHECK(turn.Allows(2, kRead));
  turn.Ended(read, kRead);
  CHECK(turn.Allows(1, kWrite));
}

TEST_CASE("Turn.ExclusiveIsWhatWasQueued") {
  Turn turn(TurnRules{0, false, true});
  for (int i = 0; i < 5; ++i) {
    CHECK(turn.Allows(1, kRead));
    turn.Started(1, kRead, 5);
    if (i < 4) CHECK_FALSE(turn.Allows(2, kRead));
  }
  CHECK(turn.Allows(2, kRead));  // what came to 1's queue meanwhile does not count: nobody starves
}

TEST_CASE("Scheduler.TurnsAreHeld") {
  const double free = MeanRun(Started({}));
  const double held = MeanRun(Started({8, false, false}));
  const double exclusive = MeanRun(Started({0, false, true}));
  CAPTURE(free, held, exclusive);
  CHECK(free < 3);
  CHECK(held > 5);
  CHECK(exclusive > 10);
}

TEST_CASE("Scheduler.OneDirectionAtATime") {
  // On a path that mixing makes slow, reads and writes one after another reach what d = 1 would.
  SimulatedTraining training;
  training.speeds = {{300e3, 200e3, 2}};
  training.options = SimulatedOptions(40, training.speeds);
  training.options.turns = {{4, true, false}};
  training.ranks = {{128, 8}};
  int reads = 0, writes = 0, mixed = 0;
  training.prepare = [&](FakeTier& tier) {
    tier.on_transfer = [&](const Transfer& transfer) {
      (transfer.direction == kRead ? reads : writes)++;
      mixed += reads > 0 && writes > 0;
    };
    tier.on_transfer_end = [&](const Transfer& transfer) { (transfer.direction == kRead ? reads : writes)--; };
  };
  const SimulatedResult result = SimulateTraining(training);
  CHECK(result.problem == "");
  CHECK(mixed == 0);
  CHECK(result.limit_share > 1.8);  // the limit counts them as mixed: twice as long
}

TEST_CASE("Scheduler.ASessionThatEndsInItsTurnGivesItBack") {
  Scheduler::Options options = SimulatedOptions(6, {{1e6, 1e6, 1}});
  options.turns = {{0, false, true}};
  FakeTier tier(options, {{1e6, 1e6, 1}});
  for (SessionId session : {1, 2}) {
    tier.AddSubgroup(session, 1, {30 * 1024});
    tier.WriteState(session, 1, MLPO_PART_STATE);
  }
  tier.RunUntilQuiet();
  for (SessionId session : {1, 2}) tier.Grad(session, 1, 1);
  tier.RunUntilQuiet();
  FileId last = 0;
  tier.on_transfer = [&](const Transfer& transfer) { last = transfer.file; };
  tier.Update(1, 1, 1);
  const uint64_t kept = tier.Update(2, 1, 1);
  for (int i = 0; i < 10; ++i) tier.Step();
  REQUIRE(last == 1);
  tier.EndSession(1);
  tier.RunUntilAnswered(kept);
  CHECK(tier.status(kept) == 0);
  CHECK(tier.gone(1));
  CHECK(tier.violation() == "");
}
