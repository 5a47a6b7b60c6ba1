#include "daemon/checkpoint/attempt_table.h"

#include <algorithm>
#include <cerrno>
#include <vector>

namespace mlpo {

Result<AttemptId> AttemptTable::Choose(const Save& save, const Rank& rank,
                                       const std::array<uint8_t, 16>& random_bytes) {
  const auto found = saves_.find(save);
  if (found != saves_.end() && rank.session <= found->second.newest && found->second.ranks.insert(rank.rank).second)
    return found->second.attempt;
  if (rank.here < save.world_size)
    return Status::Invalid("of " + std::to_string(save.world_size) + " ranks of job '" + save.job + "' " +
                           std::to_string(rank.here) +
                           " are on this node: give all ranks the same attempt= (16 random bytes of rank 0), so that "
                           "their parts belong together");
  saves_[save] = {NewAttempt(random_bytes), rank.newest, {rank.rank}, made_++};
  Shorten(save);
  return saves_.at(save).attempt;
}

// What its job has beside it. Those that all ranks have are kept until the job's next save, for a rank that is refused
// and asks again.
void AttemptTable::Shorten(const Save& newest) {
  using Entries = std::map<Save, Entry>;
  std::vector<Entries::iterator> others;
  for (auto it = saves_.begin(); it != saves_.end();) {
    const Save& save = it->first;
    const bool of_job = save != newest && save.uid == newest.uid && save.job == newest.job;
    if (of_job && it->second.ranks.size() == save.world_size) {
      it = saves_.erase(it);
      continue;
    }
    if (of_job) others.push_back(it);
    ++it;
  }
  if (others.size() < kMostOfJob) return;
  saves_.erase(*std::min_element(others.begin(), others.end(), [](Entries::iterator a, Entries::iterator b) {
    return a->second.number < b->second.number;
  }));
}

void AttemptTable::Return(const Save& save, uint32_t rank, const AttemptId& attempt) {
  const auto found = saves_.find(save);
  if (found == saves_.end() || found->second.attempt != attempt) return;
  found->second.ranks.erase(rank);
  if (found->second.ranks.empty()) saves_.erase(found);
}

void AttemptTable::Forget(uint32_t uid, const std::string& job) {
  std::erase_if(saves_, [&](const auto& entry) { return entry.first.uid == uid && entry.first.job == job; });
}

}  // namespace mlpo
