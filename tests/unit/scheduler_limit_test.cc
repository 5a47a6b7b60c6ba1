// How near the scheduler comes to what the paths allow, in virtual time: profiles of measured nodes, one to eight
// ranks, pools from a sixteenth to a quarter of the state. MLPO_LONG=1 does all of them and prints a table.
#include <cstdio>
#include <cstdlib>

#include "tests/support/simulated_training.h"
//
#include "tests/support/catch.h"

using namespace mlpo;
using namespace mlpo::test;

namespace {

constexpr uint64_t kBlocks = 256;  // of the whole state: 268 M parameters

struct Profile {
  const char* name;
  std::vector<FakeTier::PathSpeed> paths;
};

const Profile kPaper{"paper", {{345e3, 265e3, 0.5}, {180e3, 180e3, 0.5}}};
const Profile kHalf{"half", {{345e3, 265e3, 1}, {180e3, 180e3, 0.5}}};
const Profile kCrossed{"crossed", {{337.5e3, 120e3, 0.5}, {173e3, 343e3, 0.5}}};

SimulatedTraining Training(const Profile& profile, uint64_t ranks, uint32_t buffers) {
  SimulatedTraining training;
  training.speeds = profile.paths;
  training.options = SimulatedOptions(buffers, profile.paths);
  training.work = {3'500'000, 300'000, 2};
  training.barrier = true;
  training.steps = 7;
  training.warm_up = 2;
  for (uint64_t i = 0; i < ranks; ++i) {
    SimulatedRank rank;
    rank.blocks = kBlocks / ranks;
    rank.subgroups = static_cast<uint32_t>(rank.blocks / 16);
    rank.backward_ns = 60'000'000;
    training.ranks.push_back(rank);
  }
  return training;
}

bool All() {
  const char* wanted = std::getenv("MLPO_LONG");
  return wanted != nullptr && std::string(wanted) == "1";
}

uint64_t Reads(const FakeTier& tier) { return tier.counts(0).reads + tier.counts(1).reads; }
uint64_t Writes(const FakeTier& tier) { return tier.counts(0).writes + tier.counts(1).writes; }

// A step whose updates come one by one, each after its gradient, as in the backward pass.
void StepInBackward(FakeTier& tier, int subgroups, uint32_t epoch) {
  for (int i = 1; i <= subgroups; ++i) {
    const auto id = static_cast<SubgroupId>(i);
    tier.Grad(1, id, epoch);
    tier.Wait(50'000'000);
    const uint64_t update = tier.Update(1, id, epoch);
    tier.RunUntilAnswered(update);
    CHECK(tier.status(update) == 0);
  }
}

}  // namespace

TEST_CASE("SchedulerLimit.PathsAreAtTheirLimit") {
  if (All()) std::printf("%-8s %5s %4s %6s %7s\n", "profile", "ranks", "pool", "share", "reads");
  for (const Profile& profile : {kPaper, kHalf, kCrossed}) {
    for (uint64_t ranks : {1, 2, 4, 8}) {
      for (uint32_t buffers : {16u, 50u, 64u}) {
        const SimulatedResult result = SimulateTraining(Training(profile, ranks, buffers));
        const double reads = kBlocks - result.hits;
        INFO(profile.name << ", ranks " << ranks << ", buffers " << buffers << ": limit_share " << result.limit_share
                          << ", reads " << reads);
        CHECK(result.problem == "");
        CHECK(result.limit_share >= (profile.name == kCrossed.name ? 0.955 : 0.965));
        CHECK(result.limit_share <= 1.0);
        // All but what the pool holds is read once, and one block a path, for which there is time between the steps, or
        // whose buffer was on its way when the last read began.
        CHECK(reads >= kBlocks - buffers - 0.5);
        CHECK(reads <= kBlocks - buffers + 3);
        if (All()) {
          std::printf("%-8s %5d %4u %6.3f %7.1f\n", profile.name, static_cast<int>(ranks), buffers, result.limit_share,
                      reads);
        }
      }
    }
  }
}

TEST_CASE("SchedulerLimit.BetweenStepsThePoolIsMadeReadyOnce") {
  FakeTier tier(SimulatedOptions(16, kPaper.paths), kPaper.paths, {3'500'000, 300'000, 2});
  tier.AddSubgroup(1, 1, {64 * 1024});
  tier.WriteState(1, 1, MLPO_PART_STATE);
  tier.RunUntilQuiet();
  for (uint32_t epoch = 1; epoch <= 5; ++epoch) {
    tier.Grad(1, 1, epoch);
    tier.Wait(1'000'000);
    const uint64_t update = tier.Update(1, 1, epoch);
    tier.RunUntilAnswered(update);
    CHECK(tier.status(update) == 0);
    const uint64_t reads = Reads(tier), writes = Writes(tier);
    tier.Wait(1'000'000'000);
    CHECK(Reads(tier) - reads <= 2);
    CHECK(Writes(tier) - writes <= 2);
    const uint64_t ready = Reads(tier) + Writes(tier);
    tier.Wait(10'000'000'000);
    CHECK(Reads(tier) + Writes(tier) == ready);
  }
  CHECK(tier.violation() == "");
}

TEST_CASE("SchedulerLimit.AnOrderThatTheTrainerFixesKeepsAsMuch") {
  constexpr int kSubgroups = 16;
  constexpr uint64_t kEach = 4;
  for (const uint32_t buffers : {12u, 24u}) {
    FakeTier tier(SimulatedOptions(buffers, kPaper.paths), kPaper.paths, {3'500'000, 300'000, 2});
    for (int i = 1; i <= kSubgroups; ++i) {
      tier.AddSubgroup(1, static_cast<SubgroupId>(i), {kEach * 1024});
      tier.WriteState(1, static_cast<SubgroupId>(i), MLPO_PART_STATE);
    }
    tier.RunUntilQuiet();
    for (uint32_t epoch = 1; epoch <= 3; ++epoch) StepInBackward(tier, kSubgroups, epoch);
    const uint64_t before = Reads(tier);
    constexpr uint32_t kSteps = 4;
    for (uint32_t epoch = 4; epoch < 4 + kSteps; ++epoch) StepInBackward(tier, kSubgroups, epoch);
    const double reads = static_cast<double>(Reads(tier) - before) / kSteps;
    // What is used in a circle is read least often if the last used goes first: all but the pool, and what is in motion
    // where one step meets the next. Least recently used first would read all of it.
    INFO("buffers " << buffers << " reads " << reads);
    CHECK(reads >= kSubgroups * kEach - buffers);
    CHECK(reads <= kSubgroups * kEach - buffers + 8);
    CHECK(tier.violation() == "");
  }
}

TEST_CASE("SchedulerLimit.OrdersReadWhatTheirCachesMiss") {
  constexpr uint64_t kAll = 64;
  constexpr uint32_t kSubgroups = 8, kSteps = 4;
  for (const uint32_t buffers : {12u, 24u, 40u}) {
    for (const Order order : {Order::kAscending, Order::kAlternating, Order::kAdaptive}) {
      SimulatedTraining training = Training(kPaper, 1, buffers);
      training.options.order = order;
      training.ranks[0].blocks = kAll;
      training.ranks[0].subgroups = kSubgroups;
      training.warm_up = 3;
      training.steps = training.warm_up + kSteps;
      const SimulatedResult result = SimulateTraining(training);
      REQUIRE(result.problem == "");
      const double reads = kAll - result.hits;
      INFO("order " << static_cast<int>(order) << ", buffers " << buffers << ": reads " << reads);
      // Least recently used goes first: in a circle that is what is wanted next, so nothing stays long enough. Back and
      // forth, what was used last is wanted first: the pool, but for those that are free for what is in motion.
      const double in_motion = 8;
      if (order == Order::kAscending) CHECK(reads == Approx(kAll));
      if (order == Order::kAlternating) CHECK(reads >= kAll - buffers);
      if (order == Order::kAlternating) CHECK(reads <= kAll - buffers + in_motion);
      if (order == Order::kAdaptive) CHECK(reads <= kAll - buffers + 3);
    }
  }
}

TEST_CASE("SchedulerLimit.OrdersTakeBlocksAsTheySay") {
  for (const Order order : {Order::kAscending, Order::kAlternating}) {
    Scheduler::Options options = SimulatedOptions(6, kPaper.paths);
    options.order = order;
    options.queue_blocks = 1;
    FakeTier tier(options, {{1e9, 1e9}, {1e9, 1e9}}, {3'500'000, 0, 1});
    for (SubgroupId id = 1; id <= 3; ++id) tier.AddSubgroup(1, id, {8 * 1024});
    for (SubgroupId id = 1; id <= 3; ++id) tier.WriteState(1, id, MLPO_PART_STATE);
    tier.RunUntilQuiet();
    for (uint32_t epoch = 1; epoch <= 4; ++epoch) {
      for (SubgroupId id = 1; id <= 3; ++id) tier.Grad(1, id, epoch);
      tier.RunUntilQuiet();
      const size_t before = tier.worked().size();
      // The last one has a priority of its own.
      for (SubgroupId id = 1; id <= 3; ++id) tier.Update(1, id, epoch, id == 3 ? 0 : 1);
      tier.RunUntilQuiet();
      std::vector<std::pair<SubgroupId, uint32_t>> worked(tier.worked().begin() + static_cast<long>(before),
                                                          tier.worked().end());
      REQUIRE(worked.size() == 24);
      const bool backwards = order == Order::kAlternating && epoch % 2 == 0;
      // Reads of two paths overtake each other, and the first UPDATE begins before there are others: most pairs are in
      // order, not all.
      const auto place = [backwards](std::pair<SubgroupId, uint32_t> block) {
        const int in_step = static_cast<int>(block.first * 8 + block.second);
        return block.first == 3 ? (backwards ? 100 - in_step : in_step) - 1000 : backwards ? -in_step : in_step;
      };
      int right = 0;
      for (size_t i = 0; i < worked.size(); ++i) {
        for (size_t j = i + 1; j < worked.size(); ++j) right += place(worked[i]) < place(worked[j]);
      }
      INFO("order " << static_cast<int>(order) << ", epoch " << epoch);
      CHECK(right >= 24 * 23 / 2 * 3 / 4);
    }
    CHECK(tier.violation() == "");
  }
}
