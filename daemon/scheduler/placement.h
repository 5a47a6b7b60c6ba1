// Placement: what each path is worth, how much of a session's blocks it should hold, and where its extents are free.
//
// Path model: time(R, W) = max(R/r, W/w, d*(R/r + W/w)) for R bytes read and W written: d = 1/2 is full duplex, 1 half
// duplex. Every block written to a path is read back from it, so R = W, and a path is worth
//     e = 1 / max(1/r, 1/w, d*(1/r + 1/w))     bytes read and written per second,
// and holds the share e / sum(e). Paths without declared limits count as equal to the mean of those that have some.
// Owner: the data thread. No system calls.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

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

// A session's extents on one path, in one file. Freed ones are used again before the file grows, the lowest that is
// large enough first: where the end of a file cannot be written (a limit, a full file system), its beginning still can.
class ExtentMap {
 public:
  // The offset of `bytes` > 0 of it.
  uint64_t Take(uint64_t bytes);
  void Give(uint64_t offset, uint64_t bytes);
  uint64_t bytes_in_use() const { return bytes_in_use_; }

 private:
  std::map<uint64_t, uint64_t> free_;  // offset to bytes, below end_; neighbours are one
  uint64_t end_ = 0;                   // beyond the last extent in use
  uint64_t bytes_in_use_ = 0;
};

}  // namespace mlpo
