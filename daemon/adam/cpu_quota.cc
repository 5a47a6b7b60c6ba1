#include "daemon/adam/cpu_quota.h"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <vector>

namespace mlpo {
namespace {

struct Hierarchy {
  bool unified = false;     // v2
  std::string mount_point;  // where it is mounted
  std::string mount_root;   // which of its cgroups is mounted there
  std::string cgroup;       // the process's, from the hierarchy's root
};

bool HasWord(const std::string& list, const std::string& word) {  // "cpu,cpuacct" has "cpu"
  std::istringstream words(list);
  for (std::string each; std::getline(words, each, ',');) {
    if (each == word) return true;
  }
  return false;
}

// Lines of mountinfo: id parent major:minor root mount-point options [fields...] - type source super-options
std::vector<Hierarchy> FindMounts(const std::string& root) {
  std::vector<Hierarchy> found;
  std::ifstream mounts(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(mounts, line);) {
    const size_t dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    std::istringstream before(line.substr(0, dash));
    std::istringstream after(line.substr(dash + 3));
    std::string id, parent, device, type, source, options;
    Hierarchy hierarchy;
    before >> id >> parent >> device >> hierarchy.mount_root >> hierarchy.mount_point;
    after >> type >> source >> options;
    hierarchy.unified = type == "cgroup2";
    if (hierarchy.unified || (type == "cgroup" && HasWord(options, "cpu"))) found.push_back(hierarchy);
  }
  return found;
}

// Lines of /proc/self/cgroup: id:controllers:path; v2's is "0::path".
std::optional<std::string> CgroupIn(const std::string& root, bool unified) {
  std::ifstream cgroups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(cgroups, line);) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (unified ? controllers.empty() && line[0] == '0' : HasWord(controllers, "cpu")) return line.substr(second + 1);
  }
  return std::nullopt;
}

std::optional<double> QuotaOf(const std::string& folder, bool unified) {
  std::string quota, period;
  if (unified) {
    std::ifstream(folder + "/cpu.max") >> quota >> period;
  } else {
    std::ifstream(folder + "/cpu.cfs_quota_us") >> quota;
    std::ifstream(folder + "/cpu.cfs_period_us") >> period;
  }
  double quota_us = 0, period_us = 0;
  std::istringstream(quota) >> quota_us;  // "max" leaves 0, v1's "no limit" is -1
  std::istringstream(period) >> period_us;
  if (quota_us <= 0 || period_us <= 0) return std::nullopt;
  return quota_us / period_us;
}

// The process's cgroup relative to what is mounted; "" if another part of the tree is.
std::string BelowMount(const Hierarchy& hierarchy) {
  if (hierarchy.mount_root == "/") return hierarchy.cgroup;
  const std::string& cgroup = hierarchy.cgroup;
  if (cgroup.compare(0, hierarchy.mount_root.size(), hierarchy.mount_root) != 0) return "";
  const std::string rest = cgroup.substr(hierarchy.mount_root.size());
  return rest.empty() || rest[0] == '/' ? rest : "";
}

}  // namespace

std::optional<double> ReadCpuQuota(const std::string& root) {
  std::optional<double> tightest;
  for (Hierarchy& hierarchy : FindMounts(root)) {
    const std::optional<std::string> cgroup = CgroupIn(root, hierarchy.unified);
    if (!cgroup) continue;
    hierarchy.cgroup = *cgroup;
    const std::string top = root + hierarchy.mount_point;
    std::string folder = top + BelowMount(hierarchy);
    while (folder.size() > top.size() && folder.back() == '/') folder.pop_back();
    while (true) {
      const std::optional<double> quota = QuotaOf(folder, hierarchy.unified);
      if (quota) tightest = std::min(tightest.value_or(*quota), *quota);
      if (folder.size() <= top.size()) break;
      folder.resize(folder.rfind('/'));
    }
  }
  return tightest;
}

}  // namespace mlpo
