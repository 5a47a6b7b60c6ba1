// Snapshot: what the daemon tells about itself; made by the data thread, turned into JSON by control/.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "daemon/types/ids.h"
#include "daemon/types/step_record.h"

namespace mlpo {

struct SessionSnapshot {
  SessionId id = 0;
  std::string job;
  uint32_t rank = 0;
  uint32_t world_size = 0;
  int32_t pid = 0;
  uint32_t uid = 0;
  uint64_t generation = 0;
  uint64_t epoch = 0;  // the smallest of its subgroups; 0 without subgroups
  uint64_t subgroups = 0;
  uint64_t parameters = 0;
  uint64_t skipped_steps = 0;
  uint64_t arena_bytes = 0;
  uint64_t requests_in_flight = 0;
  uint64_t submissions = 0;        // accepted so far
  std::optional<StepRecord> step;  // the one that goes on
  std::vector<StepRecord> steps;   // the last ones that ended, the latest last
};

struct PathSnapshot {
  std::string name;
  std::string directory;
  std::string state;   // healthy, suspect, quarantined, probing, full, read_only, disabled
  std::string engine;  // io_uring, threads
  bool direct_io = false;
  bool registered_buffers = false;
  uint64_t read_bytes = 0;  // since start
  uint64_t written_bytes = 0;
  double read_bytes_per_s = 0;  // over the last seconds
  double write_bytes_per_s = 0;
  uint64_t scratch_bytes = 0;  // of extents in use
  uint64_t checkpoint_bytes = 0;
  uint64_t read_errors = 0;
  uint64_t write_errors = 0;
  uint64_t checksum_mismatches = 0;  // pieces of blocks that were read and were not what had been written
  uint64_t checksum_errors = 0;      // blocks of which that was so when read again, too
  uint32_t in_flight = 0;            // transfers
  int error = 0;                     // errno that the state is from; 0: none
  int64_t state_since_ns = 0;        // monotonic; 0: the start
  uint64_t probes = 0;               // since start
  uint64_t failed_probes = 0;
  bool evacuating = false;         // mlpo-ctl paths evacuate
  bool evacuated = false;          // it is done
  uint64_t evacuation_bytes = 0;   // that were to be moved; scratch_bytes are left
  uint64_t unreadable_blocks = 0;  // that stay, therefore
  int64_t read_busy_ns = 0;        // time with a read in flight, since start
  int64_t write_busy_ns = 0;
  int64_t busy_ns = 0;    // with either
  double read_limit = 0;  // bytes/s that it is taken to do alone, see speeds_from; 0: not known
  double write_limit = 0;
  double duplex = 0;  // d of the path model
  double worth_bytes_per_s = 0;
  double share = 0;                // of 1
  std::string node_share = "1";    // [[path]] share, as it is written
  double node_part = 1;            // of what is declared or was measured of it, for this node
  uint32_t nodes = 0;              // that have last told each other what they see of it; 0: none
  double seen_bytes_per_s = 0;     // worth by its own speeds, without what it is granted
  double granted_bytes_per_s = 0;  // at most, by what the nodes have told; 0: no limit
  std::string speeds_from;         // default, declared, calibrated, learned
  uint32_t read_queue_blocks = 0;  // that may be in flight
  uint32_t write_queue_blocks = 0;
  uint64_t lifetime_written_bytes = 0;  // by all daemons of this user and node
};

// What mlpo-ctl bench measured of a path.
struct BenchSnapshot {
  std::string name;
  double read_bytes_per_s = 0;
  double write_bytes_per_s = 0;
  double duplex = 0;
  double mixed_bytes_per_s = 0;     // both at once, added up
  double together_bytes_per_s = 0;  // the same while all measured paths were busy
  uint64_t read_depth_bytes = 0;
  uint64_t write_depth_bytes = 0;
  std::string speeds_from;  // what the daemon goes by now
  std::string not_saved;    // why it will not be known at the next start; "": it will
};

// A rank's part that is being saved.
struct CheckpointSnapshot {
  std::string job;
  uint32_t uid = 0;
  uint32_t rank = 0;
  std::string directory;
  std::string tag;
  uint64_t step = 0;
  std::string phase;          // begun, taking, taken, copying, committing
  uint64_t bytes = 0;         // to be copied; before that is known, of the state
  uint64_t copied_bytes = 0;  // of these
  double bytes_per_s = 0;     // over the last seconds
  double left_s = 0;          // as it goes now
  double bound_s = 0;         // at most; 0: not known yet
};

// Of all parts since the start.
struct CheckpointTotals {
  uint64_t begun = 0;
  uint64_t saved = 0;
  uint64_t failed = 0;
  uint64_t copied_bytes = 0;
};

struct PoolNode {
  int id = 0;
  uint64_t buffers = 0;
};

struct PoolSnapshot {
  uint64_t bytes = 0;
  uint64_t buffer_bytes = 0;
  uint64_t buffers = 0;
  uint64_t cached_blocks = 0;  // clean and dirty
  uint64_t dirty_blocks = 0;
  uint64_t free_blocks = 0;
  bool locked = false;
  bool huge_pages = false;      // most of it
  uint64_t huge_bytes = 0;      // of what is ready
  bool growing = false;         // buffers are still to come
  std::vector<PoolNode> nodes;  // where the buffers are; empty on a machine of one node
};

// Buffers of the pool that have a job's blocks.
struct PoolUseSnapshot {
  uint32_t uid = 0;
  std::string job;
  uint64_t blocks = 0;
};

// What a user, or one job of a user, has of what is limited by [quota], and may have.
struct QuotaSnapshot {
  uint32_t uid = 0;
  std::string job;  // "": the user's, of all jobs
  struct Amount {
    const char* name = "";  // sessions, requests, arenas, capacity, pool
    uint64_t used = 0;
    uint64_t limit = 0;  // 0: none
  };
  std::vector<Amount> amounts;
};

struct Snapshot {
  std::string state;  // starting, ready, degraded, draining
  std::string version;
  std::string node;
  std::string socket;
  int32_t pid = 0;
  double uptime_s = 0;
  int64_t taken_ns = 0;     // when the data thread gave its part
  std::string adam_target;  // instruction set in use
  uint32_t adam_workers = 0;
  uint64_t protocol_errors = 0;  // sessions ended for breaking the protocol
  uint64_t lost_wakeups = 0;     // work found by a time-out: 0 unless there is a bug
  uint64_t log_lines_dropped = 0;
  uint64_t arenas_bytes = 0;
  uint64_t arenas_limit_bytes = 0;
  uint64_t total_sessions = 0;  // of all users; `sessions` may be left empty beside it
  uint64_t total_parameters = 0;
  int64_t workers_busy_ns = 0;  // time in which the Adam workers had something to do, since start
  StepTotals steps;
  CheckpointTotals checkpoint_totals;
  std::vector<CheckpointSnapshot> checkpoints;
  std::vector<SessionSnapshot> sessions;
  std::vector<PoolUseSnapshot> pool_use;
  std::vector<QuotaSnapshot> quotas;  // of those who have something; like `sessions`
  std::vector<PathSnapshot> paths;
  PoolSnapshot pool;
};

}  // namespace mlpo
