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

}  // namespace

TEST_CASE("SchedulerLimit.PathsAreAtTheirLimit") {
  if (All()) std::printf("%-8s %5s %4s %6s %7s\n", "profile", "ranks", "pool", "share", "reads");
  for (const Profile& profile : {kPaper, kHalf, kCrossed}) {
    for (uint64_t ranks : {1, 2, 4, 8}) {
      for (uint32_t buffers : {16u, 50u, 64u}) {
        const SimulatedResult result = SimulateTraining(Training(profile, ranks, buffers));
        CHECK(result.problem == "");
        if (All()) {
          std::printf("%-8s %5d %4u %6.3f %7.1f\n", profile.name, static_cast<int>(ranks), buffers, result.limit_share,
                      kBlocks - result.hits);
        }
      }
    }
  }
}
