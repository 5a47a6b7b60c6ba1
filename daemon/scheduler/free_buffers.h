// FreeBuffers: which buffers of the pool nobody has, by the NUMA node that each is on.
//
// Nodes are numbers that are only compared; -1 is "not known". Owner: the data thread. No system calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "daemon/types/ids.h"

namespace mlpo {

class FreeBuffers {
 public:
  // Buffers [first, first + count) on `node`, which were not here before, and are free.
  void Add(BufferIndex first, uint32_t count, int node);
  void Give(BufferIndex buffer);
  // One on `node` if there is one, else one of the node with most; the last given first, which caches may still hold.
  // Not if empty().
  BufferIndex Take(int node);

  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  uint32_t added() const { return added_; }  // free or not
  int NodeOf(BufferIndex buffer) const { return groups_[group_of_[buffer]].node; }

 private:
  struct Group {
    int node = -1;
    std::vector<BufferIndex> free;
  };

  std::vector<Group> groups_;       // a node each
  std::vector<uint16_t> group_of_;  // by buffer
  size_t size_ = 0;
  uint32_t added_ = 0;
};

}  // namespace mlpo
