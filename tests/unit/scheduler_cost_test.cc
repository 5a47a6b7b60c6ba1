// What the scheduler costs: real time in its calls per block that is updated, in trainings without a disk on eight
// paths. Timings of shared machines are no verdict, so the bounds here are wide: that cost does not grow with the
// number of blocks, and is not far off. MLPO_LONG=1 goes to a million blocks and means it: under 5 us. Prints a line a
// size.
#include <cstdio>
#include <cstdlib>
#include <ctime>

#include "tests/support/simulated_training.h"
//
#include "tests/support/catch.h"

using namespace mlpo;
using namespace mlpo::test;

namespace {

double Seconds(clockid_t clock) {
  timespec time;
  ::clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) / 1e9;
}

// CPU time, in microseconds a block. Reading that clock takes too long for each call: what share of the whole run is
// the scheduler's comes from the clock on the wall.
double Cost(uint64_t blocks, uint64_t sessions) {
  SimulatedTraining training;
  training.speeds.assign(8, {6e6, 4e6, 0.75});
  training.options = SimulatedOptions(static_cast<uint32_t>(blocks / 10), training.speeds);
  training.work.block_ns = 100;
  training.barrier = true;
  training.steps = 3;
  for (uint64_t i = 0; i < sessions; ++i) {
    training.ranks.push_back(
        {blocks / sessions, static_cast<uint32_t>(std::max<uint64_t>(1, blocks / sessions / 1000))});
  }
  double cpu_s = 0, wall_s = 0;
  uint64_t updates = 0;
  training.prepare = [&](FakeTier& tier) {
    tier.MeasureScheduler();
    cpu_s = Seconds(CLOCK_THREAD_CPUTIME_ID);
    wall_s = Seconds(CLOCK_MONOTONIC);
    updates = tier.updates();
  };
  FakeTier tier(training.options, training.speeds, training.work);
  CHECK(SimulateTraining(training, tier).problem == "");
  cpu_s = Seconds(CLOCK_THREAD_CPUTIME_ID) - cpu_s;
  wall_s = Seconds(CLOCK_MONOTONIC) - wall_s;
  const double share = static_cast<double>(tier.scheduler_ns()) / 1e9 / wall_s;
  const double cost_us = share * cpu_s * 1e6 / static_cast<double>(tier.updates() - updates);
  std::printf("%8llu blocks, %3llu sessions, 8 paths: %.2f us a block\n", static_cast<unsigned long long>(blocks),
              static_cast<unsigned long long>(sessions), cost_us);
  return cost_us;
}

}  // namespace

TEST_CASE("SchedulerCost.DoesNotGrowWithTheNumberOfBlocks") {
  const char* wanted = std::getenv("MLPO_LONG");
  const bool all = wanted != nullptr && std::string(wanted) == "1";
  for (const uint64_t sessions : {8, 64}) {
    const double small = Cost(10'000, sessions);
    const double large = Cost(50'000, sessions);
    CHECK(large < 20);
    CHECK(large < 3 * small);
    if (!all) continue;
    CHECK(Cost(100'000, sessions) < 5);
    CHECK(Cost(1'000'000, sessions) < 5);
  }
}
