// Trace: what happened on paths, in workers and in sessions during some seconds. Recorded by the data thread, told by
// control/.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "daemon/types/ids.h"
#include "daemon/types/step_record.h"

namespace mlpo {

enum class TraceKind : uint8_t {
  kRead,  // a transfer in a slot of a path; bytes
  kWrite,
  kWork,    // a worker on one job; op: what it is of
  kWindow,  // of a subgroup, from its first GRAD to its UPDATE
  kUpdate,  // of a subgroup, from its submission to its completion
  kStep,    // of a session; bytes: its index in Trace::steps
  kPool,    // at begin_ns: block: free buffers, place: clean ones, bytes: dirty ones
};

struct TraceRecord {
  TraceKind kind = TraceKind::kPool;
  uint8_t op = 0;         // MLPO_OP_*; of work: NOP stands for checksums
  uint16_t slot = 0;      // of the path and direction
  uint32_t place = 0;     // path or worker
  int32_t error = 0;      // errno or MLPO_E_*
  uint32_t subgroup = 0;  // or an object's handle; 0: none
  uint32_t block = 0;
  SessionId session = 0;  // or a store
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
  uint64_t bytes = 0;
};

struct Trace {
  struct Session {
    std::string job;
    uint32_t rank = 0;
    uint32_t uid = 0;
  };
  int64_t began_ns = 0;
  int64_t ended_ns = 0;
  std::vector<TraceRecord> records;  // in order of their ends, but for those of workers
  uint64_t dropped = 0;              // older ones that there was no room for
  std::vector<StepRecord> steps;
  std::map<SessionId, Session> sessions;
  std::map<std::pair<SessionId, SubgroupId>, std::string> subgroups;  // keys
  std::vector<std::string> paths;
  uint32_t workers = 0;
};

}  // namespace mlpo
