#include "daemon/io/memory_limit.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <sstream>
#include <string_view>
#include <vector>

#include "daemon/io/buffer_pool.h"
#include "daemon/io/mount_info.h"

namespace mlpo {
namespace {

constexpr uint64_t kUnlimited = std::numeric_limits<uint64_t>::max();
// v1 writes "no limit" as the largest multiple of the page size in an int64.
constexpr uint64_t kV1Unlimited = uint64_t{1} << 62;

// The text of a file; nullopt if it is not there.
Result<std::optional<std::string>> ReadFile(const std::string& path) {
  std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(path.c_str(), "re"), std::fclose);
  if (file == nullptr) {
    if (errno == ENOENT) return std::optional<std::string>();
    return Status::Errno(errno, "opening " + path + " to learn the memory limit");
  }
  std::string text;
  char chunk[4096];
  size_t got;
  while ((got = std::fread(chunk, 1, sizeof chunk, file.get())) > 0) text.append(chunk, got);
  if (std::ferror(file.get())) return Status::Errno(errno, "reading " + path + " to learn the memory limit");
  return std::optional<std::string>(std::move(text));
}

std::optional<uint64_t> ParseNumber(std::string_view text) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end == text.data()) return std::nullopt;
  return value;
}

// The number after `key` at the start of a line ("inactive_file 4096", "MemAvailable:  12 kB").
std::optional<uint64_t> KeyedNumber(const std::string& text, std::string_view key) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::string_view view = line;
    if (!view.starts_with(key)) continue;
    view.remove_prefix(key.size());
    if (view.empty() || view.front() != ' ') continue;
    view.remove_prefix(std::min(view.find_first_not_of(' '), view.size()));
    return ParseNumber(view);
  }
  return std::nullopt;
}

// A file with one number in it; kUnlimited for "max" and for a file that is not there.
Result<uint64_t> NumberFile(const std::string& path) {
  Result<std::optional<std::string>> text = ReadFile(path);
  if (!text.ok()) return text.status();
  if (!text.value() || text.value()->starts_with("max")) return kUnlimited;
  const std::optional<uint64_t> value = ParseNumber(**text);
  if (!value) return Status(-EINVAL, path + " has no number but '" + **text + "'");
  return *value;
}

struct Hierarchy {
  bool v2 = false;
  std::string mount_point;  // without the test's root
  std::string mount_root;   // the cgroup that is seen there
  std::string group;        // this process' cgroup, from the hierarchy's root
};

// This process' cgroup in the v1 memory hierarchy and in v2, where each is mounted.
std::vector<Hierarchy> FindHierarchies(const std::string& cgroup_text, const std::string& mountinfo_text) {
  std::optional<std::string> v1_group, v2_group;
  std::istringstream groups(cgroup_text);
  for (std::string line; std::getline(groups, line);) {  // 4:memory:/a/b or 0::/a/b
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    if (line.starts_with("0::")) v2_group = line.substr(second + 1);
    if (controllers.find(",memory,") != std::string::npos) v1_group = line.substr(second + 1);
  }
  std::vector<Hierarchy> found;
  for (const Mount& mount : ParseMountInfo(mountinfo_text)) {
    const bool v1_memory = mount.type == "cgroup" && ("," + mount.options + ",").find(",memory,") != std::string::npos;
    if (v1_memory && v1_group) found.push_back({false, mount.point, mount.root, *v1_group});
    if (mount.type == "cgroup2" && v2_group) found.push_back({true, mount.point, mount.root, *v2_group});
  }
  return found;
}

// What one cgroup leaves: limit - usage + what the kernel can take back from its page cache.
Result<uint64_t> GroupLeaves(const std::string& folder, bool v2) {
  Result<uint64_t> limit = NumberFile(folder + (v2 ? "/memory.max" : "/memory.limit_in_bytes"));
  if (!limit.ok()) return limit;
  uint64_t bound = *limit;
  if (v2) {  // beyond memory.high every allocation is throttled: as good as a limit
    Result<uint64_t> high = NumberFile(folder + "/memory.high");
    if (!high.ok()) return high;
    bound = std::min(bound, *high);
  }
  if (bound >= kV1Unlimited) return kUnlimited;
  Result<uint64_t> usage = NumberFile(folder + (v2 ? "/memory.current" : "/memory.usage_in_bytes"));
  if (!usage.ok()) return usage;
  if (*usage == kUnlimited) return Status(-ENOENT, folder + " has a memory limit but does not tell its usage");
  Result<std::optional<std::string>> stat = ReadFile(folder + "/memory.stat");
  if (!stat.ok()) return stat.status();
  uint64_t cache = 0;
  if (stat.value()) {
    const std::string prefix = v2 ? "" : "total_";  // v1's total_ counts the groups below, as usage does
    cache = KeyedNumber(**stat, prefix + "inactive_file").value_or(0) +
            KeyedNumber(**stat, prefix + "active_file").value_or(0);
  }
  const uint64_t held = *usage - std::min(*usage, cache);
  return bound - std::min(bound, held);
}

}  // namespace

Result<uint64_t> AvailableMemoryUnder(const std::string& root, std::string* what) {
  Result<std::optional<std::string>> meminfo = ReadFile(root + "/proc/meminfo");
  if (!meminfo.ok()) return meminfo.status();
  const std::optional<uint64_t> host_kib =
      meminfo.value() ? KeyedNumber(**meminfo, "MemAvailable:") : std::optional<uint64_t>();
  if (!host_kib) return Status(-ENOENT, root + "/proc/meminfo has no MemAvailable; is /proc mounted?");
  uint64_t available = *host_kib * 1024;
  *what = "the host (MemAvailable)";

  Result<std::optional<std::string>> groups = ReadFile(root + "/proc/self/cgroup");
  if (!groups.ok()) return groups.status();
  Result<std::optional<std::string>> mounts = ReadFile(root + "/proc/self/mountinfo");
  if (!mounts.ok()) return mounts.status();
  for (const Hierarchy& hierarchy : FindHierarchies(groups->value_or(""), mounts->value_or(""))) {
    // Below the mount's own root; a group outside it (another cgroup namespace) is seen as the mount point itself.
    std::string below;
    if (hierarchy.mount_root == "/") {
      below = hierarchy.group;
    } else if (hierarchy.group.starts_with(hierarchy.mount_root + "/")) {
      below = hierarchy.group.substr(hierarchy.mount_root.size());
    }
    if (below.starts_with("/..") || below == "/") below.clear();
    while (true) {  // the group and its ancestors up to the mount point
      const std::string folder = hierarchy.mount_point + below;
      Result<uint64_t> leaves = GroupLeaves(root + folder, hierarchy.v2);
      if (!leaves.ok()) return leaves;
      if (*leaves < available) {
        available = *leaves;
        *what = "the memory cgroup " + folder;
      }
      if (below.empty()) break;
      below.resize(below.rfind('/'));
    }
  }
  return available;
}

Result<uint64_t> AvailableMemoryBytes(std::string* what) { return AvailableMemoryUnder("", what); }

}  // namespace mlpo
