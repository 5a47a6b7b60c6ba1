// Config: every setting of the daemon, typed, in bytes, seconds and elements.
//
// Sources, later over earlier: defaults, TOML file, MLPO_SECTION__KEY variables, command line. LoadConfig keeps where
// each value came from for --print-config. Immutable once loaded.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "daemon/base/status.h"

namespace mlpo {

struct DaemonConfig {
  std::string socket;       // "": see ResolveSocket
  std::string node;         // "": host name
  std::string admin_group;  // "": root and the daemon's uid only
  std::string group;        // group that may connect; "": the daemon's uid and root only
  std::string log_level = "info";
  uint32_t max_sessions = 1024;
  int64_t drain_timeout_s = 300;    // SIGTERM: how long accepted work may take
  std::string metrics_file;         // "": none; totals and paths as Prometheus text, for a textfile collector
  int64_t metrics_interval_s = 15;  // between two writes of it
  std::string metrics_listen;       // "": none; else an address of this host, as "127.0.0.1:9464"
};

struct MemoryConfig {
  uint64_t pool_bytes = 0;             // 0: a quarter of what host and memory cgroup have
  uint64_t arenas_bytes = 0;           // all sessions' arenas together; 0: half of what is left after the pool
  uint64_t block_elements = 1u << 20;  // parameters a block; a multiple of 1024
  std::string huge_pages = "auto";     // auto, never, require
  std::string numa = "auto";           // auto: an equal part of the pool on each node; interleave, off
  bool lock = true;                    // mlock the pool where the limit allows
};

struct AdamConfig {
  uint32_t workers = 0;         // 0: cores of the affinity mask and cgroup quota, at most 16
  bool pin = true;              // bind workers to cores
  std::string target = "auto";  // auto, scalar, avx2, avx512: instruction set of the kernel
};

struct SchedulerConfig {
  std::string policy = "adaptive";  // adaptive, proportional, ratio: which path holds how much
  std::string order = "adaptive";   // adaptive, alternating, ascending: of a step's blocks, and which stay in memory
  bool learn = true;                // paths' speeds, from what they do
  uint32_t queue_blocks = 0;        // in flight per path and direction; 0: as measured, else by the path's speed
  int64_t no_path_timeout_s = 30;   // no path can take a block for so long: requests fail
  int64_t hang_timeout_s = 600;     // a path has not answered for so long: requests that wait for it fail; 0: never
  uint32_t piece_bytes = 2u << 20;  // size of one read or write, 1-8 MiB
  // delayed: a gradient stays in its slot until UPDATE upcasts it. flushed: GRAD upcasts it, and it is written to the
  // paths and read back like state: for comparison.
  std::string gradients = "delayed";
  bool integrity = true;  // blocks' checksums are formed before they are written, and compared when they are used again
};

// What one user, and one job of a user, may have. 0: no limit.
struct QuotaConfig {
  uint64_t user_sessions = 0;
  uint64_t user_requests = 0;  // in flight: ring entries of all sessions
  uint64_t user_arenas_bytes = 0;
  uint64_t user_capacity_bytes = 0;  // on all paths together
  uint64_t user_pool_bytes = 0;      // kept in it; what is in motion comes on top
  uint64_t job_sessions = 0;
  uint64_t job_requests = 0;
  uint64_t job_arenas_bytes = 0;
  uint64_t job_capacity_bytes = 0;
  uint64_t job_pool_bytes = 0;
};

struct CheckpointConfig {
  double copy_share = 0.05;  // of what the target can write: copies go at least so fast, whatever training wants
  uint32_t buffers = 4;      // of the pool that copies may have, of all checkpoints together
  uint32_t writers = 2;      // threads that write one part
  uint32_t readers = 4;      // threads that read parts, of one rank's restore
};

// What part of a path's speed is this node's, where other nodes use the path as well.
enum class ShareRule : uint8_t {
  kFixed,     // PathConfig::share
  kEqual,     // by the ranks that are here, of all that the job has
  kMeasured,  // the same at first; then as the trainers' nodes tell each other what they see of it
};

struct PathConfig {
  std::string name;  // "": last component of the directory, made unique
  std::string directory;
  bool persistent = false;
  uint64_t capacity_bytes = 0;  // 0: what the file system has
  std::string engine = "auto";  // auto, io_uring, threads
  bool direct = true;           // false: buffered I/O
  double read_limit = 0;        // declared bytes/s; 0: not declared
  double write_limit = 0;
  double duplex = 0;                // d of the path model; 0: not declared
  uint64_t write_budget_bytes = 0;  // a day; 0: none
  ShareRule share_rule = ShareRule::kFixed;
  double share = 1;                     // kFixed: of what is declared or was measured, above 0 and at most 1; else 1
  double weight = 1;                    // policy "ratio"
  uint32_t turn_blocks = 0;             // of one session after another; 0: no turns
  std::string turn_direction = "both";  // one: only reads or only writes in a turn
  bool exclusive = false;               // a turn is a session's whole queue
};

struct Config {
  DaemonConfig daemon;
  MemoryConfig memory;
  AdamConfig adam;
  SchedulerConfig scheduler;
  QuotaConfig quota;
  CheckpointConfig checkpoint;
  std::vector<PathConfig> paths;

  // "memory.pool" -> "mlpo.toml:12" | "environment MLPO_MEMORY__POOL" | "command line --memory" | "default"
  std::map<std::string, std::string> origins;
};

}  // namespace mlpo
