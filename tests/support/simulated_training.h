// SimulateTraining: ranks that train on a FakeTier as real ones do, each step: backward pass, GRAD of every subgroup,
// UPDATE of every subgroup, wait for all. Times are virtual; what the paths allow is computed beside them.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "tests/support/fake_tier.h"

namespace mlpo::test {

constexpr uint32_t kNoStep = std::numeric_limits<uint32_t>::max();

struct SimulatedRank {
  uint64_t blocks = 64;
  uint32_t subgroups = 1;
  std::string job = "job";
  int64_t start_ns = 0;     // begins its first step so much later than the others
  int64_t backward_ns = 0;  // before the gradients of each step
  // Steps from 1. A rank that stops has sent the gradients of that step and is never heard of again, nor waited for.
  uint32_t stop_step = kNoStep;
  uint32_t pause_step = kNoStep;  // before this step it waits
  int64_t pause_ns = 0;
  uint32_t end_step = kNoStep;  // its session ends in the middle of this step's updates
};

struct SimulatedTraining {
  Scheduler::Options options;
  std::vector<FakeTier::PathSpeed> speeds;
  FakeTier::Work work;
  std::vector<SimulatedRank> ranks;
  uint32_t steps = 6;
  uint32_t warm_up = 1;              // steps that do not count, as step 1 of mlpo-bench train
  int64_t end_after_ns = 1'000'000;  // of end_step's updates
  bool barrier = false;  // the ranks of a job update when all have their gradients: a trainer that clips by norm
  std::function<void(FakeTier&)> prepare;  // faults, jitter, changes of speed: before step 1
  // After each rank's step: for changes in the middle.
  std::function<void(FakeTier&, size_t rank, uint32_t step)> on_step;
};

struct SimulatedResult {
  bool finished = false;  // every rank that was to made all its steps; else `problem` says what did not
  std::string problem;    // a broken rule, or a request that failed
  double period_s = 0;    // end of the warm-up to the last rank's end of the last step, by the steps between
  double ideal_s = 0;     // max((blocks - buffers) * block bytes / sum(e), Adam alone); e from `speeds`
  double limit_share = 0;
  double makespan_s = 0;  // from the start of step 1 to the last rank's last end
  struct Path {
    double read_bytes = 0;  // a step, the warm-up left out
    double written_bytes = 0;
  };
  std::vector<Path> paths;
  double hits = 0;                               // blocks a step that were updated without a read
  std::vector<std::vector<double>> step_ends_s;  // by rank; from the start of step 1
};

// Blocks of 12 KiB: with speeds in kB/s where real ones have MB/s, times are as with blocks of 12 MiB. Every path's
// speeds are declared.
Scheduler::Options SimulatedOptions(uint32_t buffers, const std::vector<FakeTier::PathSpeed>& speeds);

SimulatedResult SimulateTraining(const SimulatedTraining& training);
// The same on a tier that the caller keeps and may look at.
SimulatedResult SimulateTraining(const SimulatedTraining& training, FakeTier& tier);

}  // namespace mlpo::test
