// SessionIdentity: who a session is.
#pragma once

#include <cstdint>
#include <string>

#include "daemon/types/ids.h"

namespace mlpo {

struct SessionIdentity {
  SessionId id = 0;
  std::string job;  // with uid: the job
  uint32_t rank = 0;
  uint32_t world_size = 1;
  uint64_t generation = 0;  // tells this session's files from those of an earlier one of the same rank
  uint32_t uid = 0;
  int32_t pid = 0;  // for display: 0 from another pid namespace
  int32_t numa_node = -1;
  uint64_t features = 0;  // in force, MLPO_FEATURE_*
};

}  // namespace mlpo
