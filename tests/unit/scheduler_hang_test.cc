// A path that hangs costs what lies on it, not what the others could do meanwhile.
#include <utility>

#include "tests/support/simulated_training.h"
//
#include "tests/support/catch.h"

using namespace mlpo;
using namespace mlpo::test;

namespace {

constexpr int64_t kSecond = 1'000'000'000;
constexpr uint64_t kBlock = 1024;
constexpr double kBlockBytes = 12 * kBlock;

struct Hang {
  const char* name;
  FakeTier::PathSpeed speed;  // while it hangs
};

// Path 0 is the faster one, so it has the larger share. The pool is no more than what the paths need.
constexpr FakeTier::PathSpeed kFast = {345e3, 265e3, 0.5};
constexpr FakeTier::PathSpeed kSlow = {180e3, 180e3, 0.5};
constexpr Hang kHangs[] = {{"writes", {345e3, 0, 0.5}}, {"reads", {0, 265e3, 0.5}}, {"both", {0, 0, 0.5}}};

void Begin(FakeTier& tier, SubgroupId subgroups, uint64_t blocks) {
  for (SubgroupId id = 1; id <= subgroups; ++id) tier.AddSubgroup(1, id, {blocks / subgroups * kBlock});
  for (SubgroupId id = 1; id <= subgroups; ++id) tier.WriteState(1, id, MLPO_PART_STATE);
  tier.RunUntilQuiet();
}

std::vector<uint64_t> BeginStep(FakeTier& tier, SubgroupId subgroups, uint32_t epoch) {
  for (SubgroupId id = 1; id <= subgroups; ++id) tier.Grad(1, id, epoch);
  tier.RunUntilQuiet();
  std::vector<uint64_t> updates;
  for (SubgroupId id = 1; id <= subgroups; ++id) updates.push_back(tier.Update(1, id, epoch));
  return updates;
}

void EndStep(FakeTier& tier, const std::vector<uint64_t>& updates) {
  for (const uint64_t update : updates) {
    tier.RunUntilAnswered(update);
    REQUIRE(tier.status(update) == 0);
  }
}

std::string StateOf(FakeTier& tier, PathIndex path) {
  PathSnapshot snapshot;
  tier.scheduler().Fill(path, &snapshot, tier.now_ns());
  return snapshot.state;
}

}  // namespace

TEST_CASE("Hang.TheOtherPathGoesOnAtItsSpeed") {
  constexpr SubgroupId kSubgroups = 40;
  for (const auto& [buffers, order] : std::vector<std::pair<uint32_t, Order>>{
           {8, Order::kAdaptive}, {17, Order::kAdaptive}, {60, Order::kAdaptive}, {17, Order::kAscending}}) {
    for (const Hang& hang : kHangs) {
      CAPTURE(buffers, order, hang.name);
      const std::vector<FakeTier::PathSpeed> speeds = {kFast, kSlow};
      Scheduler::Options options = SimulatedOptions(buffers, speeds);
      options.order = order;
      FakeTier tier(options, speeds, {3'500'000, 300'000, 2});
      Begin(tier, kSubgroups, 4000);
      for (uint32_t epoch = 1; epoch <= 2; ++epoch) EndStep(tier, BeginStep(tier, kSubgroups, epoch));
      const std::vector<uint64_t> updates = BeginStep(tier, kSubgroups, 3);
      tier.Wait(10 * kSecond);
      tier.ChangeSpeed(0, tier.now_ns(), hang.speed);
      tier.Wait(10 * kSecond);  // it is noticed
      CHECK(StateOf(tier, 0) == "suspect");
      const uint64_t before = tier.updates();
      const uint64_t writes_before = tier.counts(0).writes;
      tier.Wait(50 * kSecond);
      const double done = static_cast<double>(tier.updates() - before);
      const double could = 50 * kSlow.write_bytes_per_s / kBlockBytes;
      INFO("updates of blocks while it hangs: " << done << ", of " << could);
      CHECK(done >= 0.95 * could);
      CHECK(tier.counts(0).writes == writes_before);
      tier.ChangeSpeed(0, tier.now_ns(), kFast);
      EndStep(tier, updates);
      CHECK(StateOf(tier, 0) == "healthy");
      // As before: the path is as much used as it was. (In a given order what has gone to the other one is read in one
      // go.)
      EndStep(tier, BeginStep(tier, kSubgroups, 4));
      const int64_t start_ns = tier.now_ns();
      EndStep(tier, BeginStep(tier, kSubgroups, 5));
      const double step_s = static_cast<double>(tier.now_ns() - start_ns) / 1e9;
      const double worth = kFast.write_bytes_per_s + kSlow.write_bytes_per_s;
      if (order == Order::kAdaptive) CHECK(step_s <= (4000 - buffers) * kBlockBytes / worth / 0.95);
      CHECK(tier.violation() == "");
    }
  }
}

// Who comes after it is told not to wait, once; the session goes when its I/O comes back.
TEST_CASE("Hang.AnEndedSessionWhoseIoHangsIsNotWaitedFor") {
  for (const bool hangs : {true, false}) {
    CAPTURE(hangs);
    const std::vector<FakeTier::PathSpeed> speeds = {kFast, kSlow};
    FakeTier tier(SimulatedOptions(8, speeds), speeds, {3'500'000, 300'000, 2});
    Begin(tier, 4, 400);
    EndStep(tier, BeginStep(tier, 4, 1));
    BeginStep(tier, 4, 2);
    tier.Wait(kSecond);
    const FakeTier::PathSpeed slow = {2e3, 2e3, 0.5};  // six seconds a block: it moves
    for (PathIndex path = 0; path < 2; ++path)
      tier.ChangeSpeed(path, tier.now_ns(), hangs ? FakeTier::PathSpeed{0, 0, 0.5} : slow);
    REQUIRE(tier.counts(0).in_flight + tier.counts(1).in_flight > 0);
    tier.EndSession(1);
    tier.Wait(8 * kSecond);
    CHECK(tier.hanging.empty());
    tier.Wait(4 * kSecond);
    CHECK(tier.hanging == (hangs ? std::vector<SessionId>{1} : std::vector<SessionId>{}));
    tier.Wait(20 * kSecond);
    CHECK(tier.hanging.size() == (hangs ? 1 : 0));
    CHECK(tier.gone(1) == !hangs);
    for (PathIndex path = 0; path < 2; ++path) tier.ChangeSpeed(path, tier.now_ns(), speeds[path]);
    tier.RunUntilQuiet();
    CHECK(tier.gone(1));
    CHECK(tier.violation() == "");
  }
}
