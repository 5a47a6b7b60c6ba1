// Gather: looks at the machine as the daemon's start does: the same probes, limits and files, and nothing is left
// behind. A path that hangs costs its deadline and one thread, until it answers.
//
// Blocks for seconds at worst: not in the main or data thread. Not for two threads at once.
#pragma once

#include <string>
#include <vector>

#include "daemon/config/config.h"
#include "daemon/config/load.h"
#include "daemon/doctor/facts.h"

namespace mlpo {

// What a running daemon knows better than a look from outside.
struct RunningFacts {
  std::string socket;
  uint64_t pool = 0;
  bool pool_locked = false;
  bool pool_huge = false;
  uint32_t workers = 0;
  struct RunningPath {
    std::string engine;
    uint64_t taken = 0;
  };
  std::vector<RunningPath> paths;  // as the configuration's
};

// `running`: of the daemon in this process; nullptr: none runs here. `parameters_per_s`: that the paths can have
// updated; 0: not known.
Facts GatherFacts(const Config& config, const Environment& environment, const RunningFacts* running,
                  double parameters_per_s);

// Linux 5.10 or newer has what sessions are made of: pidfds, and memfds that can be sealed for good.
Status CheckKernel();

// ---- For tests: what is read below `root` instead of / ----

// Of "/proc/sys/kernel/io_uring_disabled".
std::optional<int> UringDisabled(const std::string& root);
// Of "/sys/kernel/mm/transparent_hugepage/enabled": the word in brackets.
std::string TransparentHugePages(const std::string& root);
// Free pages of the sizes that the pool takes (2 MiB, 1 GiB), in bytes.
uint64_t HugePageBytes(const std::string& root);
// NUMA nodes with memory, and those that this process may use ("Mems_allowed_list").
uint32_t NumaNodes(const std::string& root);
std::optional<uint32_t> NumaAllowed(const std::string& root);
// Names of the whole drives below a block device, through partitions, device mapper and md.
std::vector<std::string> DisksBelow(const std::string& root, unsigned major_number, unsigned minor_number);
// The stripe count in the value of Lustre's attribute "lustre.lov": the largest of a composite layout's components.
std::optional<uint32_t> LustreStripes(const std::string& attribute);

}  // namespace mlpo
