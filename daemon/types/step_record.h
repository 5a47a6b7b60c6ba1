// StepRecord: where the time of one training step of a session went. Made by the scheduler, told by control/.
//
// A step of a session begins with the first GRAD or UPDATE after the step before, and ends with the last UPDATE to
// end: when each of its subgroups has been updated once, else when one that has been is given its next gradient. At
// each moment of a step exactly one part counts, so the parts add up to its time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace mlpo {

// In the order in which they go before each other: the first one that applies counts.
enum class StepPart : uint8_t {
  kAdam,       // workers have a block of an UPDATE
  kCopy,       // workers copy state or objects
  kFetchWait,  // blocks are wanted, and reads of the session are in flight or wait for their turn on a path
  kFlushWait,  // blocks are wanted, and only the end of a flush gives a buffer, or the block itself
  kGrad,       // workers look at gradients
  kIdle,       // the daemon has nothing to do for it: the trainer is
};
inline constexpr size_t kStepParts = 6;
inline constexpr std::array<const char*, kStepParts> kStepPartNames = {"adam",       "copy", "fetch_wait",
                                                                       "flush_wait", "grad", "idle"};

// Of one path. A direction is busy while a transfer of it is in flight; busy_ns: either is.
struct PathUse {
  uint64_t read_bytes = 0;
  uint64_t written_bytes = 0;
  int64_t read_busy_ns = 0;
  int64_t write_busy_ns = 0;
  int64_t busy_ns = 0;
};

// What is counted; of a step or of many.
struct StepSums {
  std::array<int64_t, kStepParts> parts_ns = {};
  uint64_t grads = 0;              // submissions
  uint64_t updates = 0;            // of subgroups
  uint64_t blocks = 0;             // that an UPDATE wanted; of these
  uint64_t cached_blocks = 0;      // were in memory since their last use
  uint64_t prefetched_blocks = 0;  // had been read, or were being read, before they were wanted
  uint64_t read_blocks = 0;        // had to be read; the rest was all zero

  int64_t part_ns(StepPart part) const { return parts_ns[static_cast<size_t>(part)]; }
};

struct StepRecord : StepSums {
  uint64_t number = 0;   // of the session's steps, from 1
  uint64_t epoch = 0;    // the highest that it brought a subgroup to
  bool skipped = false;  // its gradients were discarded, and nothing updated
  int64_t began_ns = 0;
  int64_t ended_ns = 0;   // the parts add up to ended_ns - began_ns. Of a step that has not ended: now
  int64_t period_ns = 0;  // from the end of the step before to the end of this one; of the first: its own time
  // What the session's subgroups moved in the period: flushes and prefetches between steps are the later one's.
  std::vector<PathUse> paths;
};

// How often a time was at most kBoundsS[i] and above the one before; the last: above them all.
struct TimeHistogram {
  static constexpr std::array<double, 13> kBoundsS = {0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000};
  std::array<uint64_t, kBoundsS.size() + 1> counts = {};
  void Add(int64_t ns) {
    size_t i = 0;
    while (i < kBoundsS.size() && static_cast<double>(ns) > kBoundsS[i] * 1e9) ++i;
    ++counts[i];
  }
};

// Of all steps of all sessions that have ended since the daemon's start.
struct StepTotals : StepSums {
  uint64_t ended = 0;  // with the skipped ones
  uint64_t skipped = 0;
  int64_t time_ns = 0;
  TimeHistogram times, fetch_waits, flush_waits;
};

}  // namespace mlpo
