// AttemptTable: gives all ranks of a job on this node the same attempt for one save, where the trainer does not say it.
//
// A rank that begins the same save again makes a new attempt: its first try failed, and the others have to begin again,
// too. Owner: the main thread. Randomness comes in as an argument.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <tuple>

#include "daemon/base/status.h"
#include "daemon/checkpoint/names.h"

namespace mlpo {

class AttemptTable {
 public:
  struct Save {
    uint32_t uid = 0;
    std::string job;
    std::string directory;
    std::string tag;
    uint64_t step = 0;
    uint32_t world_size = 1;
    auto operator<=>(const Save&) const = default;
  };

  // `here`: how many ranks of the job are connected to this daemon. EINVAL if some are elsewhere: no daemon can tell
  // ranks on other nodes what it has chosen.
  Result<AttemptId> Choose(const Save& save, uint32_t rank, uint32_t here, const std::array<uint8_t, 16>& random_bytes);
  // The rank's save with it has not begun: if it asks again, it gets the same.
  void Return(const Save& save, uint32_t rank, const AttemptId& attempt);
  // A session of the job has ended. Its ranks may come again with another state of the same step: no part of theirs is
  // to have the attempt of one before.
  void Forget(uint32_t uid, const std::string& job);
  size_t size() const { return saves_.size(); }

 private:
  struct Entry {
    AttemptId attempt;
    std::set<uint32_t> ranks;  // that have it
  };
  std::map<Save, Entry> saves_;
};

}  // namespace mlpo
