#include "daemon/checkpoint/attempt_table.h"

#include <cerrno>

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
  saves_[save] = {NewAttempt(random_bytes), rank.newest, {rank.rank}};
  // Those that all ranks have are kept until the job's next save, for a rank that is refused and asks again.
  std::erase_if(saves_, [&](const auto& other) {
    const bool all = other.second.ranks.size() == other.first.world_size;
    return all && other.first != save && other.first.uid == save.uid && other.first.job == save.job;
  });
  return saves_.at(save).attempt;
}

void AttemptTable::Return(const Save& save, uint32_t rank, const AttemptId& attempt) {
  const auto found = saves_.find(save);
  if (found != saves_.end() && found->second.attempt == attempt) found->second.ranks.erase(rank);
}

void AttemptTable::Forget(uint32_t uid, const std::string& job) {
  std::erase_if(saves_, [&](const auto& entry) { return entry.first.uid == uid && entry.first.job == job; });
}

}  // namespace mlpo
