// Cores: which cores the process may use, and which worker goes where.
//
// Owner: WorkerPool::Start, which lets go of it when the workers run. Errors: Load fails only where hwloc cannot read
// the machine at all; that binding is refused is the caller's to log.
#pragma once

#include <hwloc.h>
#include <pthread.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "daemon/base/status.h"

namespace mlpo {

class Cores {
 public:
  // The machine, restricted to the affinity mask of the calling thread (cpusets are part of that).
  static Result<Cores> Load();

  uint32_t count() const;  // at least 1
  struct FreeBitmap {
    void operator()(hwloc_bitmap_t bitmap) const { hwloc_bitmap_free(bitmap); }
  };
  using CpuSet = std::unique_ptr<hwloc_bitmap_s, FreeBitmap>;
  // `workers` sets of CPUs, one core each, spread evenly over packages, nodes and caches; cores are shared where there
  // are more workers than cores. Empty if hwloc cannot.
  std::vector<CpuSet> Spread(uint32_t workers) const;
  // Binds a running thread; 0 or an errno.
  int Bind(pthread_t thread, const CpuSet& set) const;

 private:
  struct DestroyTopology {
    void operator()(hwloc_topology_t topology) const { hwloc_topology_destroy(topology); }
  };
  std::unique_ptr<hwloc_topology, DestroyTopology> topology_;
};

}  // namespace mlpo
