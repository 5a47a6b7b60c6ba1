// Facts: what the doctor knows about the machine and the daemon on it; gathered by gather.h, judged by judge.h.
// Units: bytes unless the name says otherwise.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "daemon/base/status.h"
#include "daemon/config/config.h"

namespace mlpo {

struct PathFacts {
  PathConfig config;
  Status usable;  // of the start probe; what follows holds only if it is fine
  bool direct = false;
  uint32_t alignment = 1;
  std::string not_direct;  // why
  uint64_t free = 0;
  uint64_t taken = 0;               // by a running daemon's files: free for it too
  std::string type;                 // of the file system: ext4, nfs4, lustre; "" if not known
  std::string options;              // of the mount, "rw,vers=4.2,nconnect=8"
  uint64_t device = 0;              // st_dev
  std::vector<std::string> disks;   // whole drives below it: nvme0n1; empty if the kernel does not say
  std::optional<uint32_t> stripes;  // Lustre: of new files; 0xffff: all. Nothing if not known
  std::string engine;               // in use by a running daemon: io_uring, threads; "" without one
};

struct Facts {
  bool running = false;  // examined by a running daemon
  Config config;

  std::string kernel;  // "6.1.0-18-amd64"
  Status kernel_calls;

  Status uring;
  std::optional<int> uring_disabled;  // kernel.io_uring_disabled: 0, 1, 2
  bool seccomp = false;               // a filter is in force
  bool uring_clones = false;          // registered buffers: they count once, not once a path

  std::optional<uint64_t> memory_lock_limit;  // nothing: no limit
  Result<uint64_t> available = uint64_t{0};   // host and memory cgroup, whichever is tighter
  std::string available_what;                 // which
  uint64_t pool = 0;                          // configured, or a running daemon's
  uint64_t buffer = 0;
  bool pool_locked = false;      // a running daemon's
  bool pool_huge = false;        // a running daemon's
  uint64_t huge_page_bytes = 0;  // free ones set aside, of 2 MiB and 1 GiB
  std::string transparent;       // always, madvise, never; "" if the kernel has none

  uint32_t cores = 0;
  std::optional<double> cpu_quota;  // CPUs
  uint32_t workers = 0;             // configured, or a running daemon's; 0: chosen by the daemon
  uint32_t default_workers = 0;     // what it would choose
  uint32_t needed_workers = 0;      // for what the paths can have updated; 0: not known

  uint64_t open_files = 0;               // RLIMIT_NOFILE
  std::optional<uint64_t> file_size;     // RLIMIT_FSIZE; nothing: no limit
  uint32_t numa_nodes = 1;               // with memory
  std::optional<uint32_t> numa_allowed;  // nodes that we may take memory from; nothing if not known
  Status numa_policy;                    // of asking for memory of a node (mbind)

  Result<std::string> socket = std::string();  // where it is or would be
  Status socket_folder;

  std::vector<PathFacts> paths;
  Status distinct;  // no two of them are one place; holds only if all are usable
};

}  // namespace mlpo
