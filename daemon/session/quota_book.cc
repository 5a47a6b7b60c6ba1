#include "daemon/session/quota_book.h"

#include <algorithm>
#include <limits>

#include "daemon/base/check.h"

namespace mlpo {
namespace {

constexpr std::array<const char*, kQuotas> kUnits = {"sessions", "ring entries", "bytes of arena",
                                                     "bytes on the paths"};

size_t At(Quota what) { return static_cast<size_t>(what); }

}  // namespace

uint64_t QuotaBook::Used(const Key& key, Quota what) const {
  const auto found = used_.find(key);
  return found == used_.end() ? 0 : found->second[At(what)];
}

uint64_t QuotaBook::Left(uint32_t uid, const std::string& job, Quota what) const {
  uint64_t left = std::numeric_limits<uint64_t>::max();
  for (const Key& key : {Key(uid, ""), Key(uid, job)}) {
    const uint64_t limit = LimitsOf(key)[At(what)];
    if (limit > 0) left = std::min(left, limit - std::min(limit, Used(key, what)));
  }
  return left;
}

Status QuotaBook::Take(uint32_t uid, const std::string& job, Quota what, uint64_t amount) {
  MLPO_CHECK(!job.empty());
  const Key keys[] = {Key(uid, ""), Key(uid, job)};
  for (const Key& key : keys) {
    const uint64_t limit = LimitsOf(key)[At(what)];
    const uint64_t used = Used(key, what);
    if (limit == 0 || amount <= limit - std::min(limit, used)) continue;
    const bool user = key.second.empty();
    return Status(MLPO_E_QUOTA, (user ? "user " + std::to_string(uid) : "job '" + job + "'") + " needs " +
                                    std::to_string(amount) + " " + kUnits[At(what)] + ", has " + std::to_string(used) +
                                    ", and may have " + std::to_string(limit) + " ([quota] " +
                                    (user ? "user_" : "job_") + kQuotaNames[At(what)] +
                                    "): end what is not needed, or have it raised");
  }
  if (amount == 0) return Status();
  for (const Key& key : keys) used_[key][At(what)] += amount;
  return Status();
}

void QuotaBook::Give(uint32_t uid, const std::string& job, Quota what, uint64_t amount) {
  if (amount == 0) return;
  for (const Key& key : {Key(uid, ""), Key(uid, job)}) {
    const auto found = used_.find(key);
    MLPO_CHECK(found != used_.end() && found->second[At(what)] >= amount);
    found->second[At(what)] -= amount;
    if (std::all_of(found->second.begin(), found->second.end(), [](uint64_t used) { return used == 0; }))
      used_.erase(found);
  }
}

std::vector<QuotaBook::Entry> QuotaBook::Entries() const {
  std::vector<Entry> entries;
  for (const auto& [key, used] : used_) entries.push_back({key.first, key.second, used, LimitsOf(key)});
  return entries;
}

}  // namespace mlpo
