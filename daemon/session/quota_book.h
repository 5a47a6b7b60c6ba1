// QuotaBook: what each user and each job has of what the daemon gives, and how much it may have.
//
// Counted are sessions, the sum of their ring entries (which bounds the requests in flight), arena memory and bytes on
// the paths. A limit of 0 is none. Whoever takes gives back the same; a user or job that has nothing is forgotten.
//
// Owner: the main thread. No system calls.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "daemon/base/status.h"

namespace mlpo {

enum class Quota : uint8_t { kSessions, kRequests, kArenas, kCapacity };
inline constexpr size_t kQuotas = 4;
// As in [quota]: "user_sessions", "job_sessions", ...
inline constexpr std::array<const char*, kQuotas> kQuotaNames = {"sessions", "requests", "arenas", "capacity"};

using QuotaAmounts = std::array<uint64_t, kQuotas>;  // by Quota

class QuotaBook {
 public:
  // A user's, or a job's: all that it has.
  struct Entry {
    uint32_t uid = 0;
    std::string job;  // "": the user's
    QuotaAmounts used{};
    QuotaAmounts limits{};
  };

  QuotaBook(const QuotaAmounts& user_limits, const QuotaAmounts& job_limits)
      : user_limits_(user_limits), job_limits_(job_limits) {}

  // MLPO_E_QUOTA with need, use, limit and its name if it is too much; then nothing has changed.
  Status Take(uint32_t uid, const std::string& job, Quota what, uint64_t amount);
  void Give(uint32_t uid, const std::string& job, Quota what, uint64_t amount);
  // The most that Take would give; UINT64_MAX: no limit.
  uint64_t Left(uint32_t uid, const std::string& job, Quota what) const;
  // In order of users, a user's before those of its jobs.
  std::vector<Entry> Entries() const;

 private:
  using Key = std::pair<uint32_t, std::string>;  // "" for the user: no job has that name

  uint64_t Used(const Key& key, Quota what) const;
  const QuotaAmounts& LimitsOf(const Key& key) const { return key.second.empty() ? user_limits_ : job_limits_; }

  const QuotaAmounts user_limits_;
  const QuotaAmounts job_limits_;
  std::map<Key, QuotaAmounts> used_;
};

}  // namespace mlpo
