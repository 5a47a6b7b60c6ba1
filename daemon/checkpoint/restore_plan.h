// RestorePlan: where each element of a rank's tensors is in the parts of a checkpoint, whatever ranks, packing and
// block sizes it was saved with.
//
// Tensors are found by name and global shape. Shards that several parts have alike are copies of each other: that of
// the rank's own part is taken, else that of the lowest rank; a rank of a run of another size takes none that differ. A
// plan keeps one source shard after another for each tensor; what comes of them for a block is computed when the block
// is filled, so that it needs no more memory however the tensors are cut. The plans of a session's subgroups are made
// together: so the parts are gone through once. Made in its restore's thread, immutable after that, read by any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "daemon/base/status.h"
#include "daemon/checkpoint/manifest.h"
#include "daemon/types/tensor_shard.h"

namespace mlpo {

// A tensor to be filled, and its place among the elements of its subgroup.
struct TargetTensor {
  std::string name;
  TensorShard shard;
  uint64_t first = 0;
};

// Elements [to, to + count) of the subgroup are elements [from, from + count) of a stored block. They lie in its arrays
// one behind the other: SourceOffset.
struct SourceRun {
  uint64_t to = 0;
  uint64_t count = 0;
  uint32_t part = 0;  // place in RestorePlan::parts()
  uint32_t subgroup = 0;
  uint32_t block = 0;
  uint64_t from = 0;
};

class RestorePlan {
 public:
  using Parts = std::vector<std::shared_ptr<const Manifest>>;

  // What is to be filled in each of a session's subgroups.
  using Subgroups = std::vector<std::vector<TargetTensor>>;

  // Whether one part has all of these tensors, each with just this shard: then the others need not be read. For the
  // same rank of the same world size.
  static bool Suffices(const Manifest& part, const Subgroups& subgroups);

  // A plan for each subgroup. `parts`: all of one complete attempt; or one that suffices. `rank` of `world_size`: who
  // restores. EINVAL names the tensor: it is not in the checkpoint, has another global shape there, is there in part
  // only, twice, or what should be copies of it are none.
  static Result<std::vector<RestorePlan>> Make(Parts parts, uint32_t rank, uint32_t world_size, Subgroups subgroups);

  // What elements [first, end) of the subgroup are filled with. Each is named once.
  void ForEachRun(uint64_t first, uint64_t end, const std::function<void(const SourceRun&)>& visit) const;

  const Parts& parts() const { return *parts_; }
  const std::vector<TargetTensor>& tensors() const { return tensors_; }
  // Updates that tensor i of tensors() has had.
  int64_t step(size_t i) const { return steps_[i]; }
  const PartBlock& block(const SourceRun& run) const {
    return parts()[run.part]->subgroups[run.subgroup].blocks[run.block];
  }
  // Whether array 0 (master), 1 or 2 (moments) of the run is stored at all; else it is zero.
  static bool IsStored(const PartBlock& block, uint32_t array) { return array < block.stored; }
  // Bytes in the block's file where the run's values of that array begin.
  static uint64_t SourceOffset(const PartBlock& block, uint32_t array, uint64_t from) {
    return block.offset + array * StoredArrayBytes(block.count) + from * 4;
  }

 private:
  struct Source {
    uint32_t part = 0;
    uint32_t subgroup = 0;
    uint32_t tensor = 0;  // of that subgroup
    uint64_t first = 0;   // element of that subgroup
  };

  RestorePlan() = default;
  const PartTensor& TensorOf(const Source& source) const {
    return parts()[source.part]->subgroups[source.subgroup].tensors[source.tensor];
  }
  bool AreCopies(const Source& a, const Source& b) const;
  Status Choose(const TargetTensor& tensor, uint32_t own, bool all, const std::vector<Source>& found);

  std::shared_ptr<const Parts> parts_;        // of all of the session's plans
  std::vector<TargetTensor> tensors_;         // in ascending order of `first`
  std::vector<std::vector<Source>> sources_;  // per tensor
  std::vector<int64_t> steps_;                // likewise
};

}  // namespace mlpo
