#include "daemon/scheduler/free_buffers.h"

#include <algorithm>

#include "daemon/base/check.h"

namespace mlpo {

void FreeBuffers::Add(BufferIndex first, uint32_t count, int node) {
  auto group = std::find_if(groups_.begin(), groups_.end(), [node](const Group& g) { return g.node == node; });
  if (group == groups_.end()) group = groups_.insert(group, Group{node, {}});
  const auto number = static_cast<uint16_t>(group - groups_.begin());
  if (group_of_.size() < first + count) group_of_.resize(first + count);
  std::fill_n(group_of_.begin() + first, count, number);
  for (uint32_t i = count; i > 0; --i) group->free.push_back(first + i - 1);
  size_ += count;
  added_ += count;
}

void FreeBuffers::Give(BufferIndex buffer) {
  groups_[group_of_[buffer]].free.push_back(buffer);
  ++size_;
}

BufferIndex FreeBuffers::Take(int node) {
  MLPO_CHECK(size_ > 0);
  Group* from = nullptr;
  for (Group& group : groups_) {
    if (group.free.empty()) continue;
    if (group.node == node) {
      from = &group;
      break;
    }
    if (from == nullptr || group.free.size() > from->free.size()) from = &group;
  }
  const BufferIndex buffer = from->free.back();
  from->free.pop_back();
  --size_;
  return buffer;
}

}  // namespace mlpo
