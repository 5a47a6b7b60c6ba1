#include "daemon/adam/cores.h"

#include <cerrno>
#include <climits>

namespace mlpo {

Result<Cores> Cores::Load() {
  hwloc_topology_t topology = nullptr;
  if (hwloc_topology_init(&topology) != 0) return Status::Errno(errno, "cannot set up hwloc");
  Cores cores;
  cores.topology_.reset(topology);
  if (hwloc_topology_load(topology) != 0) return Status::Errno(errno, "hwloc cannot read the machine's topology");
  const CpuSet allowed(hwloc_bitmap_alloc());
  if (!allowed) return Status::Errno(ENOMEM, "cannot read the affinity mask");
  if (hwloc_get_cpubind(topology, allowed.get(), HWLOC_CPUBIND_THREAD) != 0) {
    return Status::Errno(errno, "cannot read the affinity mask");
  }
  // CPUs that went offline since stay in the mask: what is left of it must not be empty.
  hwloc_bitmap_and(allowed.get(), allowed.get(), hwloc_topology_get_topology_cpuset(topology));
  if (!hwloc_bitmap_iszero(allowed.get()) && hwloc_topology_restrict(topology, allowed.get(), 0) != 0) {
    return Status::Errno(errno, "hwloc cannot restrict the topology to the affinity mask");
  }
  return cores;
}

uint32_t Cores::count() const {
  int count = hwloc_get_nbobjs_by_type(topology_.get(), HWLOC_OBJ_CORE);
  if (count <= 0) count = hwloc_get_nbobjs_by_type(topology_.get(), HWLOC_OBJ_PU);  // no cores known: some VMs
  return count > 0 ? static_cast<uint32_t>(count) : 1;
}

std::vector<Cores::CpuSet> Cores::Spread(uint32_t workers) const {
  std::vector<hwloc_cpuset_t> raw(workers, nullptr);
  hwloc_obj_t root = hwloc_get_root_obj(topology_.get());
  if (hwloc_distrib(topology_.get(), &root, 1, raw.data(), workers, INT_MAX, 0) != 0) return {};
  std::vector<CpuSet> sets;
  for (hwloc_cpuset_t bitmap : raw) {
    CpuSet set(bitmap);
    // Wider than a core where there are fewer workers than cores: take its first core, with all hardware threads.
    hwloc_obj_t core = hwloc_get_next_obj_inside_cpuset_by_type(topology_.get(), bitmap, HWLOC_OBJ_CORE, nullptr);
    if (core != nullptr) {
      hwloc_bitmap_copy(bitmap, core->cpuset);
    } else {
      hwloc_bitmap_singlify(bitmap);
    }
    sets.push_back(std::move(set));
  }
  return sets;
}

int Cores::Bind(pthread_t thread, const CpuSet& set) const {
  return hwloc_set_thread_cpubind(topology_.get(), thread, set.get(), 0) == 0 ? 0 : errno;
}

}  // namespace mlpo
