#include "daemon/part_manifest.h"

#include <utility>

#include "daemon/base/check.h"

namespace mlpo {

TakenState StateOf(const Scheduler& scheduler, const StateSave& save, uint64_t extents_offset_bytes) {
  TakenState state;
  Manifest& manifest = state.manifest;
  for (const auto& [id, steps] : save.steps) {
    const SubgroupSpec& spec = scheduler.FindSubgroup(save.session_id, id)->spec;
    MLPO_CHECK(spec.tensors.size() == steps.size());
    PartSubgroup subgroup;
    subgroup.key = spec.key;
    subgroup.dtype = spec.dtype;
    subgroup.grad_dtype = spec.grad_dtype;
    subgroup.numel = spec.numel;
    for (size_t i = 0; i < steps.size(); ++i)
      subgroup.tensors.push_back({spec.tensors[i].name, spec.tensors[i].shard, steps[i]});
    manifest.subgroups.push_back(std::move(subgroup));
  }
  for (const Pin& pin : save.pins) {
    TakenState::Source& source = state.sources.emplace_back();
    source.subgroup = pin.place;
    source.block = pin.index;
    std::vector<PartBlock>& blocks = manifest.subgroups[source.subgroup].blocks;
    MLPO_CHECK(blocks.size() == pin.index);
    PartBlock& block = blocks.emplace_back();
    if (pin.index > 0) block.first = blocks[pin.index - 1].first + blocks[pin.index - 1].count;
    block.count = pin.count;
    block.stored = pin.parts & kPartMoments ? kStoredAll : pin.parts & kPartMaster ? kStoredMaster : kStoredNothing;
    MLPO_CHECK(StoredBytes(block) == pin.bytes);
    if (pin.extent.path == kNone) continue;
    source.path = pin.extent.path;
    source.file = pin.extent.file;
    source.offset = extents_offset_bytes + pin.extent.offset + pin.first_byte;
    source.bytes = pin.bytes;
    source.hashed = pin.hashed;
    source.hash = pin.hash;
  }
  state.old_files = save.old_files;
  state.places.resize(state.sources.size());
  return state;
}

PartBlock& BlockOf(Manifest& manifest, const Pin& pin) { return manifest.subgroups[pin.place].blocks[pin.index]; }

}  // namespace mlpo
