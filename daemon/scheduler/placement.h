// Placement: what each path is worth, how much of a session's blocks it should hold, and where its extents are free.
//
// Path model: time(R, W) = max(R/r, W/w, d*(R/r + W/w)) for R bytes read and W written: d = 1/2 is full duplex, 1 half
// duplex. Every block written to a path is read back from it, so R = W, and a path is worth
//     e = 1 / max(1/r, 1/w, d*(1/r + 1/w))     bytes read and written per second,
// and holds the share e / sum(e). Paths without declared limits count as equal to the mean of those that have some.
// Owner: the data thread. No system calls.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include "daemon/scheduler/block.h"

namespace mlpo {

struct PathParameters {
  double read_bytes_per_s = 0;  // 0: not declared
  double write_bytes_per_s = 0;
  double duplex = 1;            // d
  uint64_t capacity_bytes = 0;  // of extents; 0: no limit of ours
};

// e of the model; 0 if the speeds are not declared.
double PathWorth(const PathParameters& path);
// Shares that sum to 1.
std::vector<double> PathShares(const std::vector<PathParameters>& paths);

// A session's extents on one path: all of one size, in one file. Freed ones are used again before the file grows, the
// lowest first: where the end of a file cannot be written (a limit, a full file system), its beginning still can.
class ExtentList {
 public:
  uint64_t Take() {
    ++in_use_;
    if (free_.empty()) return next_++;
    std::pop_heap(free_.begin(), free_.end(), std::greater<>());
    const uint64_t index = free_.back();
    free_.pop_back();
    return index;
  }
  void Give(uint64_t index) {
    --in_use_;
    free_.push_back(index);
    std::push_heap(free_.begin(), free_.end(), std::greater<>());
  }
  uint64_t in_use() const { return in_use_; }

 private:
  std::vector<uint64_t> free_;  // a heap, the lowest on top
  uint64_t next_ = 0;
  uint64_t in_use_ = 0;
};

}  // namespace mlpo
