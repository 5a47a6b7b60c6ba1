#include "daemon/scheduler/placement.h"

#include <iterator>

#include "daemon/base/check.h"

namespace mlpo {

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

uint64_t ExtentMap::Next(uint64_t bytes) const {
  for (const auto& [offset, room] : free_) {
    if (room >= bytes) return offset;
  }
  return end_;
}

void ExtentMap::Forget() {
  MLPO_CHECK(bytes_in_use_ == 0);
  free_.clear();
  end_ = written_end_ = 0;
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
