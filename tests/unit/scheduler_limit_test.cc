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
        CHECK(result.limit_share >= (profile.name == kCrossed.name ? 0.945 : 0.965));
        CHECK(result.limit_share <= 1.0);
        // All but what the pool holds is read once, and one block a path, for which there is time between the steps.
        CHECK(reads >= kBlocks - buffers - 0.5);
        CHECK(reads <= kBlocks - buffers + 2 + 0.5);
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
