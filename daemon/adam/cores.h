// Cores: which cores and NUMA nodes the process may use, how many workers go to each node, and where each one sits.
//
// Owner: whoever starts the workers. Errors: Load fails only where hwloc cannot read the machine at all; that binding
// is refused is the caller's to log. No threads.
#pragma once

#include <hwloc.h>
#include <pthread.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "daemon/base/status.h"
#include "daemon/types/numa_node.h"

namespace mlpo {

class Cores {
 public:
  // The machine, restricted to the affinity mask of the calling thread (cpusets are part of that).
  static Result<Cores> Load();
  // A machine in hwloc's synthetic description ("node:2 core:50 pu:2"), restricted to the CPUs of a list ("0-9,40"; "":
  // all). Binding to its CPUs does nothing. For tests.
  static Result<Cores> Synthetic(const std::string& description, const std::string& cpus);

  uint32_t count() const;  // at least 1
  // The NUMA nodes that we may take memory from or run on, in the order of their numbers; one at least.
  std::vector<NumaNode> Nodes() const;

  struct FreeBitmap {
    void operator()(hwloc_bitmap_t bitmap) const { hwloc_bitmap_free(bitmap); }
  };
  using CpuSet = std::unique_ptr<hwloc_bitmap_s, FreeBitmap>;
  // CPUs that are near the same memory.
  struct Group {
    std::vector<int> nodes;  // whose memory that is; of nodes without CPUs each group has some
    CpuSet cpus;
    uint32_t cores = 0;  // at least 1
  };
  // One at least; all CPUs are in one, and all nodes.
  std::vector<Group> Groups() const;

  // `workers` sets of CPUs of the group, one core each, spread evenly over packages and caches; cores are shared where
  // there are more workers than cores. Empty if hwloc cannot.
  std::vector<CpuSet> Spread(const Group& group, uint32_t workers) const;
  // Binds a running thread; 0 or an errno.
  int Bind(pthread_t thread, const CpuSet& set) const;

 private:
  struct DestroyTopology {
    void operator()(hwloc_topology_t topology) const { hwloc_topology_destroy(topology); }
  };
  std::unique_ptr<hwloc_topology, DestroyTopology> topology_;

  static Result<Cores> Loaded(hwloc_topology_t topology, const CpuSet& allowed);
};

// Of one among many on a node's memory: well under what a core does alone (README.md).
inline constexpr double kParametersPerWorkerPerS = 0.3e9;

// What takes parameters_per_s with half as much again; 0 if that is 0.
uint32_t WorkersFor(double parameters_per_s);

// How many workers each of some groups of CPUs gets.
struct WorkerWishes {
  uint32_t workers = 0;             // that many in all; 0: the default below
  double parameters_per_s = 0;      // that have to be updated; 0: not known
  std::optional<double> cpu_quota;  // of the cgroup, in CPUs
};
// The default: what parameters_per_s needs with half as much again, 4 to 16 a group (16 if it is not known), within the
// group's cores and, all together, the quota; at least 1 in all. A number that is asked for is split by cores.
std::vector<uint32_t> SplitWorkers(const std::vector<uint32_t>& cores_of_groups, const WorkerWishes& wishes);

}  // namespace mlpo
