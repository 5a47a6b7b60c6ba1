// How shards of one tensor lie in each other: the runs of elements that two of them share, and whether many make up the
// whole tensor.
//
// A range of row-major elements is a handful of boxes (at most 2 * dimensions - 1), and in both kinds of shard an
// element's place is an affine function of its coordinates. So all that is ever compared are boxes. No state; any
// thread; shards have passed CheckShard.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "daemon/base/status.h"
#include "daemon/types/tensor_shard.h"

namespace mlpo {

// Whether a shard that comes from outside is one: dimensions, bounds, counts, nothing beyond 64 bits. EINVAL with
// `who`.
Status CheckShard(const TensorShard& shard, const std::string& who);

// For messages: "[6, 8]".
std::string ShapeText(const std::vector<uint64_t>& shape);
// For messages: "[0:3, 4:8) of [6, 8]" or "elements 12 to 40 of [6, 8]".
std::string ShardText(const TensorShard& shard);

// `count` elements that follow each other in both shards.
struct Run {
  uint64_t to = 0;  // the first one's place in the one shard
  uint64_t from = 0;
  uint64_t count = 0;
  bool operator==(const Run&) const = default;
};

// What the elements [first, end) of shard `to` have in common with shard `from` of the same whole tensor, in ascending
// order of both, each run as long as it can be.
void ForEachRun(const TensorShard& to, uint64_t first, uint64_t end, const TensorShard& from,
                const std::function<void(const Run&)>& visit);

// Orders shards, so that copies of each other are found among many.
struct ByShard {
  bool operator()(const TensorShard* a, const TensorShard* b) const { return *a < *b; }
};

// How many elements two shards of the same whole tensor have in common.
uint64_t CommonElements(const TensorShard& a, const TensorShard& b);

// Whether the shards, of which equal ones are copies of each other, have every element of their tensor exactly once.
// EINVAL with `who` and the elements that overlap, or how many are missing. All have the same global shape.
Status CheckTiling(const std::vector<const TensorShard*>& shards, const std::string& who);

}  // namespace mlpo
