#include "daemon/adam/cores.h"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cmath>
#include <numeric>

namespace mlpo {
namespace {

constexpr uint32_t kFewestWorkers = 4, kMostWorkers = 16;  // of a group, by default

uint32_t CoresInside(hwloc_topology_t topology, hwloc_const_cpuset_t cpus) {
  int count = hwloc_get_nbobjs_inside_cpuset_by_type(topology, cpus, HWLOC_OBJ_CORE);
  if (count <= 0) count = hwloc_bitmap_weight(cpus);  // no cores known: some VMs
  return count > 0 ? static_cast<uint32_t>(count) : 1;
}

}  // namespace

Result<Cores> Cores::Load() {
  hwloc_topology_t topology = nullptr;
  if (hwloc_topology_init(&topology) != 0) return Status::Errno(errno, "cannot set up hwloc");
  const CpuSet allowed(hwloc_bitmap_alloc());
  if (!allowed || hwloc_topology_load(topology) != 0) {
    const int error = errno;
    hwloc_topology_destroy(topology);
    return Status::Errno(error, "hwloc cannot read the machine's topology");
  }
  if (hwloc_get_cpubind(topology, allowed.get(), HWLOC_CPUBIND_THREAD) != 0) {
    const int error = errno;
    hwloc_topology_destroy(topology);
    return Status::Errno(error, "cannot read the affinity mask");
  }
  return Loaded(topology, allowed);
}

Result<Cores> Cores::Synthetic(const std::string& description, const std::string& cpus) {
  hwloc_topology_t topology = nullptr;
  if (hwloc_topology_init(&topology) != 0) return Status::Errno(errno, "cannot set up hwloc");
  const CpuSet allowed(cpus.empty() ? hwloc_bitmap_alloc_full() : hwloc_bitmap_alloc());
  if (!allowed || hwloc_topology_set_synthetic(topology, description.c_str()) != 0 ||
      hwloc_topology_load(topology) != 0 ||
      (!cpus.empty() && hwloc_bitmap_list_sscanf(allowed.get(), cpus.c_str()) != 0)) {
    hwloc_topology_destroy(topology);
    return Status::Invalid("not a synthetic topology: " + description + ", CPUs " + cpus);
  }
  return Loaded(topology, allowed);
}

Result<Cores> Cores::Loaded(hwloc_topology_t topology, const CpuSet& allowed) {
  Cores cores;
  cores.topology_.reset(topology);
  // CPUs that went offline since stay in the mask: what is left of it must not be empty.
  hwloc_bitmap_and(allowed.get(), allowed.get(), hwloc_topology_get_topology_cpuset(topology));
  if (!hwloc_bitmap_iszero(allowed.get()) && hwloc_topology_restrict(topology, allowed.get(), 0) != 0) {
    return Status::Errno(errno, "hwloc cannot restrict the topology to the affinity mask");
  }
  return cores;
}

uint32_t Cores::count() const {
  return CoresInside(topology_.get(), hwloc_topology_get_topology_cpuset(topology_.get()));
}

std::vector<NumaNode> Cores::Nodes() const {
  std::vector<NumaNode> nodes;
  for (hwloc_obj_t object = nullptr;
       (object = hwloc_get_next_obj_by_type(topology_.get(), HWLOC_OBJ_NUMANODE, object)) != nullptr;) {
    NumaNode node;
    node.id = static_cast<int>(object->os_index);
    node.memory = object->attr->numanode.local_memory > 0;
    for (int cpu = -1; (cpu = hwloc_bitmap_next(object->cpuset, cpu)) != -1;) node.cpus.push_back(cpu);
    nodes.push_back(std::move(node));
  }
  std::sort(nodes.begin(), nodes.end(), [](const NumaNode& a, const NumaNode& b) { return a.id < b.id; });
  return nodes;
}

std::vector<Cores::Group> Cores::Groups() const {
  std::vector<Group> groups;
  std::vector<int> without;
  const auto add = [&](hwloc_const_cpuset_t cpus) -> Group& {
    Group group;
    group.cpus.reset(hwloc_bitmap_dup(cpus));
    MLPO_CHECK(group.cpus != nullptr);
    group.cores = CoresInside(topology_.get(), cpus);
    groups.push_back(std::move(group));
    return groups.back();
  };
  for (hwloc_obj_t node = nullptr;
       (node = hwloc_get_next_obj_by_type(topology_.get(), HWLOC_OBJ_NUMANODE, node)) != nullptr;) {
    const int id = static_cast<int>(node->os_index);
    if (hwloc_bitmap_iszero(node->cpuset)) {
      without.push_back(id);
      continue;
    }
    // The same CPUs may have memory of two kinds, each a node, or one that others share a part of.
    auto known = std::find_if(groups.begin(), groups.end(), [node](const Group& group) {
      return hwloc_bitmap_intersects(group.cpus.get(), node->cpuset);
    });
    (known != groups.end() ? *known : add(node->cpuset)).nodes.push_back(id);
  }
  if (groups.empty()) add(hwloc_topology_get_topology_cpuset(topology_.get()));
  for (size_t i = 0; i < without.size(); ++i) groups[i % groups.size()].nodes.push_back(without[i]);
  return groups;
}

std::vector<Cores::CpuSet> Cores::Spread(const Group& group, uint32_t workers) const {
  std::vector<hwloc_obj_t> roots(static_cast<size_t>(hwloc_bitmap_weight(group.cpus.get())));
  const int count = hwloc_get_largest_objs_inside_cpuset(topology_.get(), group.cpus.get(), roots.data(),
                                                         static_cast<int>(roots.size()));
  std::vector<hwloc_cpuset_t> raw(workers, nullptr);
  if (count <= 0 || hwloc_distrib(topology_.get(), roots.data(), static_cast<unsigned>(count), raw.data(), workers,
                                  INT_MAX, 0) != 0) {
    return {};
  }
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

uint32_t WorkersFor(double parameters_per_s) {
  return static_cast<uint32_t>(std::min(1e6, std::ceil(1.5 * parameters_per_s / kParametersPerWorkerPerS)));
}

std::vector<uint32_t> SplitWorkers(const std::vector<uint32_t>& cores_of_groups, const WorkerWishes& wishes) {
  std::vector<uint32_t> workers(cores_of_groups.size());
  // Which group has most workers for its cores, or has least.
  const auto load = [&](size_t i, uint32_t more) { return double(workers[i] + more) / cores_of_groups[i]; };
  if (wishes.workers > 0) {
    for (uint32_t i = 0; i < wishes.workers; ++i) {
      size_t least = 0;
      for (size_t group = 1; group < workers.size(); ++group) {
        if (load(group, 1) < load(least, 1)) least = group;
      }
      ++workers[least];
    }
    return workers;
  }
  uint32_t each = kMostWorkers;
  if (wishes.parameters_per_s > 0) {
    const auto groups = static_cast<uint32_t>(workers.size());
    each = std::clamp((WorkersFor(wishes.parameters_per_s) + groups - 1) / groups, kFewestWorkers, kMostWorkers);
  }
  for (size_t i = 0; i < workers.size(); ++i) workers[i] = std::min(each, cores_of_groups[i]);
  const double quota = std::max(1.0, std::floor(wishes.cpu_quota.value_or(UINT32_MAX)));
  while (std::accumulate(workers.begin(), workers.end(), 0.0) > quota) {
    --*std::max_element(workers.begin(), workers.end());
  }
  return workers;
}

}  // namespace mlpo
