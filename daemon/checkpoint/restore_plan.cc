#include "daemon/checkpoint/restore_plan.h"

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/base/plain_text.h"
#include "daemon/checkpoint/shard_runs.h"

namespace mlpo {
namespace {

constexpr uint32_t kNoRank = UINT32_MAX;

}  // namespace

bool RestorePlan::Suffices(const Manifest& part, const Subgroups& subgroups) {
  std::map<std::string_view, const TensorShard*> held;
  for (const PartSubgroup& subgroup : part.subgroups) {
    for (const PartTensor& tensor : subgroup.tensors) held[tensor.name] = &tensor.shard;
  }
  const auto has = [&](const TargetTensor& tensor) {
    const auto found = held.find(tensor.name);
    return found != held.end() && *found->second == tensor.shard;
  };
  return std::all_of(subgroups.begin(), subgroups.end(), [&](const std::vector<TargetTensor>& tensors) {
    return std::all_of(tensors.begin(), tensors.end(), has);
  });
}

Result<std::vector<RestorePlan>> RestorePlan::Make(Parts parts, uint32_t rank, uint32_t world_size,
                                                   Subgroups subgroups) {
  MLPO_CHECK(!parts.empty());
  const auto shared = std::make_shared<const Parts>(std::move(parts));
  const PartHead& head = shared->front()->head;
  const bool all = shared->size() == head.world_size;
  const uint32_t own = world_size == head.world_size ? rank : kNoRank;

  std::map<std::string, std::vector<Source>, std::less<>> wanted;
  for (const std::vector<TargetTensor>& tensors : subgroups) {
    for (const TargetTensor& tensor : tensors) wanted[tensor.name];
  }
  for (uint32_t p = 0; p < shared->size(); ++p) {
    const Manifest& part = *(*shared)[p];
    for (uint32_t s = 0; s < part.subgroups.size(); ++s) {
      uint64_t first = 0;
      for (uint32_t t = 0; t < part.subgroups[s].tensors.size(); ++t) {
        const PartTensor& tensor = part.subgroups[s].tensors[t];
        const auto found = wanted.find(tensor.name);
        if (found != wanted.end()) found->second.push_back({p, s, t, first});
        first += tensor.shard.count;
      }
    }
  }
  std::vector<RestorePlan> plans;
  for (std::vector<TargetTensor>& tensors : subgroups) {
    RestorePlan plan;
    plan.parts_ = shared;
    plan.tensors_ = std::move(tensors);
    std::sort(plan.tensors_.begin(), plan.tensors_.end(),
              [](const TargetTensor& a, const TargetTensor& b) { return a.first < b.first; });
    for (const TargetTensor& tensor : plan.tensors_) {
      const Status chosen = plan.Choose(tensor, own, all, wanted[tensor.name]);
      if (!chosen.ok()) return chosen.Within("checkpoint '" + head.tag + "'");
    }
    plans.push_back(std::move(plan));
  }
  return plans;
}

// Whether two shards that are alike have the same content, as far as it can be told without reading it: updates, and
// the hashes of blocks that are the tensor's alone, where both parts are cut alike.
bool RestorePlan::AreCopies(const Source& a, const Source& b) const {
  const PartTensor& tensor = TensorOf(a);
  if (tensor.step != TensorOf(b).step) return false;
  const Manifest &of_a = *parts()[a.part], &of_b = *parts()[b.part];
  const std::vector<PartBlock>& blocks_a = of_a.subgroups[a.subgroup].blocks;
  const std::vector<PartBlock>& blocks_b = of_b.subgroups[b.subgroup].blocks;
  if (!of_a.hashed || !of_b.hashed || a.first != b.first || blocks_a.size() != blocks_b.size()) return true;
  for (size_t i = 0; i < blocks_a.size(); ++i) {
    const PartBlock &block = blocks_a[i], &other = blocks_b[i];
    if (block.count != other.count) return true;
    const bool alone = block.first >= a.first && block.first + block.count <= a.first + tensor.shard.count;
    if (alone && (block.stored != other.stored || block.hash != other.hash)) return false;
  }
  return true;
}

// The sources of one tensor: of all that have its name, those that hold elements of it, each element once. `own`: whose
// part comes first, and needs no copies to be right; kNoRank: none does.
Status RestorePlan::Choose(const TargetTensor& tensor, uint32_t own, bool all, const std::vector<Source>& found) {
  const std::string who = "tensor '" + PlainText(tensor.name) + "'";
  if (found.empty()) return Status::Invalid(who + " is not in it: was it saved under another name?");
  std::vector<const TensorShard*> shards;
  std::map<uint32_t, std::set<const TensorShard*, ByShard>> of_part;
  for (const Source& source : found) {
    const TensorShard& shard = TensorOf(source).shard;
    if (shard.global_shape != tensor.shard.global_shape)
      return Status::Invalid(who + " has the global shape " + ShapeText(shard.global_shape) + " there, and " +
                             ShapeText(tensor.shard.global_shape) + " here");
    if (shard.count > 0 && !of_part[source.part].insert(&shard).second)
      return Status::Invalid(who + " is there twice in the part of rank " +
                             std::to_string(parts()[source.part]->head.rank) +
                             ": names must tell a rank's tensors apart");
    shards.push_back(&shard);
  }
  if (all) {
    const Status tiled = CheckTiling(shards, who);
    if (!tiled.ok()) return tiled;
  }
  std::vector<Source> order = found;
  const auto place = [&](const Source& source) {
    const uint32_t of = parts()[source.part]->head.rank;
    return std::make_pair(of != own, of);
  };
  std::stable_sort(order.begin(), order.end(), [&](const Source& a, const Source& b) { return place(a) < place(b); });
  // One that is just what is wanted is enough, were it in a part whose neighbours are cut otherwise.
  const auto same = [&](const Source& source) { return TensorOf(source).shard == tensor.shard; };
  std::stable_partition(order.begin(), order.end(), same);

  std::vector<Source> chosen;
  std::map<const TensorShard*, size_t, ByShard> by_shard;  // places in chosen
  uint64_t filled = 0;
  for (const Source& source : order) {
    const PartTensor& from = TensorOf(source);
    const uint32_t rank = parts()[source.part]->head.rank;
    const auto copy = by_shard.find(&from.shard);
    if (copy != by_shard.end()) {
      const uint32_t other = parts()[chosen[copy->second].part]->head.rank;
      if (other == own || AreCopies(chosen[copy->second], source)) continue;
      return Status::Invalid(who + ": ranks " + std::to_string(other) + " and " + std::to_string(rank) + " both hold " +
                             ShardText(from.shard) +
                             ", and it differs: they are no copies of each other; restore with as many ranks as saved");
    }
    if (filled == tensor.shard.count && filled > 0) continue;  // further copies still are looked at
    const uint64_t elements = CommonElements(tensor.shard, from.shard);
    if (elements == 0 && !same(source)) continue;
    if (!chosen.empty() && from.step != TensorOf(chosen.front()).step)
      return Status::Invalid(who + " has had " + std::to_string(TensorOf(chosen.front()).step) +
                             " updates in one part and " + std::to_string(from.step) + " in that of rank " +
                             std::to_string(rank) + ": its shards do not belong together");
    filled += elements;
    by_shard.emplace(&from.shard, chosen.size());
    chosen.push_back(source);
  }
  if (filled != tensor.shard.count)
    return Status::Invalid(who + ": of " + ShardText(tensor.shard) + " the parts hold " + std::to_string(filled) +
                           " elements of " + std::to_string(tensor.shard.count));
  steps_.push_back(chosen.empty() ? TensorOf(order.front()).step : TensorOf(chosen.front()).step);
  sources_.push_back(std::move(chosen));
  return Status();
}

void RestorePlan::ForEachRun(uint64_t first, uint64_t end, const std::function<void(const SourceRun&)>& visit) const {
  for (size_t t = 0; t < tensors_.size(); ++t) {
    const TargetTensor& tensor = tensors_[t];
    const uint64_t begin = std::max(first, tensor.first);
    const uint64_t stop = std::min(end, tensor.first + tensor.shard.count);
    if (begin >= stop) continue;
    for (const Source& source : sources_[t]) {
      const std::vector<PartBlock>& blocks = parts()[source.part]->subgroups[source.subgroup].blocks;
      const auto cut = [&](const Run& run) {
        uint64_t at = source.first + run.from, to = tensor.first + run.to, left = run.count;
        auto block = std::upper_bound(blocks.begin(), blocks.end(), at,
                                      [](uint64_t element, const PartBlock& b) { return element < b.first; }) -
                     1;
        for (; left > 0; ++block) {
          const uint64_t from = at - block->first;
          const uint64_t count = std::min(left, block->count - from);
          visit({to, count, source.part, source.subgroup, static_cast<uint32_t>(block - blocks.begin()), from});
          at += count;
          to += count;
          left -= count;
        }
      };
      mlpo::ForEachRun(tensor.shard, begin - tensor.first, stop - tensor.first, TensorOf(source).shard, cut);
    }
  }
}

}  // namespace mlpo
