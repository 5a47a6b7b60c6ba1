#include "daemon/scheduler/placement.h"

#include <algorithm>
#include <iterator>

namespace mlpo {

double PathWorth(const PathParameters& path) {
  if (path.read_bytes_per_s <= 0 || path.write_bytes_per_s <= 0) return 0;
  const double r = 1 / path.read_bytes_per_s;
  const double w = 1 / path.write_bytes_per_s;
  return 1 / std::max({r, w, path.duplex * (r + w)});
}

std::vector<double> PathShares(const std::vector<PathParameters>& paths) {
  std::vector<double> worths;
  double sum = 0;
  int declared = 0;
  for (const PathParameters& path : paths) {
    worths.push_back(PathWorth(path));
    sum += worths.back();
    declared += worths.back() > 0;
  }
  const double undeclared = declared > 0 ? sum / declared : 1;
  sum = 0;
  for (double& worth : worths) {
    if (worth <= 0) worth = undeclared;
    sum += worth;
  }
  for (double& worth : worths) worth /= sum;
  return worths;
}

uint64_t ExtentMap::Take(uint64_t bytes) {
  bytes_in_use_ += bytes;
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    const auto [offset, room] = *it;
    if (room < bytes) continue;
    free_.erase(it);
    if (room > bytes) free_[offset + bytes] = room - bytes;
    return offset;
  }
  end_ += bytes;
  return end_ - bytes;
}

void ExtentMap::Give(uint64_t offset, uint64_t bytes) {
  bytes_in_use_ -= bytes;
  auto after = free_.lower_bound(offset);
  if (after != free_.end() && after->first == offset + bytes) {
    bytes += after->second;
    after = free_.erase(after);
  }
  if (after != free_.begin()) {
    auto before = std::prev(after);
    if (before->first + before->second == offset) {
      offset = before->first;
      bytes += before->second;
      free_.erase(before);
    }
  }
  if (offset + bytes == end_) {
    end_ = offset;
  } else {
    free_[offset] = bytes;
  }
}

}  // namespace mlpo
