// AttemptTable: gives all ranks of a job on this node the same attempt for one save, where the trainer does not say it.
//
// A rank that begins the same save again makes a new attempt: its first try failed, and the others have to begin again,
// too. So does one whose session is younger than the attempt: a job that has begun anew may save another state of the
// same step. Ranks that are late have it, whatever has become of the others' sessions: they may have saved, and ended.
// What no rank has any more is forgotten; and so is the oldest of a job that begins many saves of which some rank never
// takes part.
//
// Owner: the main thread. Randomness comes in as an argument.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <tuple>

#include "daemon/base/status.h"
#include "daemon/checkpoint/names.h"
#include "daemon/types/ids.h"

namespace mlpo {

class AttemptTable {
 public:
  static constexpr size_t kMostOfJob = 16;  // saves

  struct Save {
    uint32_t uid = 0;
    std::string job;
    std::string directory;
    std::string tag;
    uint64_t step = 0;
    uint32_t world_size = 1;
    auto operator<=>(const Save&) const = default;
  };

  // Who asks, and what there is.
  struct Rank {
    uint32_t rank = 0;
    SessionId session = 0;
    SessionId newest = 0;  // the number of the last session of anybody's
    uint32_t here = 0;     // how many ranks of the job are connected to this daemon
  };
  // EINVAL if it is the first of the save, and some ranks are elsewhere: no daemon can tell ranks on other nodes what
  // it has chosen.
  Result<AttemptId> Choose(const Save& save, const Rank& rank, const std::array<uint8_t, 16>& random_bytes);
  // The rank's save with it has not begun: if it asks again, it gets the same, as long as another rank has it.
  void Return(const Save& save, uint32_t rank, const AttemptId& attempt);
  // The job's last session has ended.
  void Forget(uint32_t uid, const std::string& job);
  size_t size() const { return saves_.size(); }  // for tests

 private:
  struct Entry {
    AttemptId attempt;
    SessionId newest = 0;      // session, when it was made
    std::set<uint32_t> ranks;  // that have it; one at least
    uint64_t number = 0;       // of those before it
  };
  void Shorten(const Save& newest);

  std::map<Save, Entry> saves_;
  uint64_t made_ = 0;
};

}  // namespace mlpo
