#include "daemon/doctor/gather.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/utsname.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <future>
#include <map>
#include <numeric>
#include <sstream>
#include <system_error>
#include <thread>
#include <utility>

#include "daemon/adam/cores.h"
#include "daemon/adam/cpu_quota.h"
#include "daemon/base/mapped_region.h"
#include "daemon/base/unix_socket.h"
#include "daemon/io/block_device.h"
#include "daemon/io/buffer_pool.h"
#include "daemon/io/memory_lock.h"
#include "daemon/io/mount_info.h"
#include "daemon/io/path.h"
#include "daemon/io/path_probe.h"
#include "daemon/io/path_queue.h"
#include "daemon/io/pool_memory.h"
#include "daemon/io/uring_pool.h"

namespace mlpo {
namespace {

namespace fs = std::filesystem;

constexpr auto kPathDeadline = std::chrono::seconds(5);
constexpr uint64_t kHugePage = 2u << 20, kGiantPage = 1u << 30;

std::string ReadText(const std::string& file) {
  std::ifstream in(file);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

std::optional<uint64_t> Limit(__rlimit_resource_t which) {
  rlimit limit{};
  if (::getrlimit(which, &limit) != 0) return 0;
  if (limit.rlim_cur == RLIM_INFINITY) return std::nullopt;
  return limit.rlim_cur;
}

// The value behind "Name:" in a file of such lines.
std::string Field(const std::string& text, const std::string& name) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with(name + ":")) continue;
    const size_t begin = line.find_first_not_of(" \t", name.size() + 1);
    return begin == std::string::npos ? "" : line.substr(begin);
  }
  return "";
}

// How many numbers a list such as "0-3,8" has; nothing if it is none.
std::optional<uint32_t> CountInList(const std::string& list) {
  std::istringstream parts(list);
  uint32_t count = 0;
  for (std::string part; std::getline(parts, part, ',');) {
    uint32_t first = 0, last = 0;
    char dash = 0;
    std::istringstream in(part);
    if (!(in >> first)) return std::nullopt;
    last = first;
    if (in >> dash && (dash != '-' || !(in >> last))) return std::nullopt;
    if (last < first || last > 65535) return std::nullopt;
    count += last - first + 1;
  }
  return count > 0 ? std::optional<uint32_t>(count) : std::nullopt;
}

// The mount that `name`, resolved, is on.
std::optional<Mount> MountOf(const std::string& name) {
  std::optional<Mount> found;
  for (const Mount& mount : ParseMountInfo(ReadText("/proc/self/mountinfo"))) {
    const bool inside = mount.point == "/" || name == mount.point || name.starts_with(mount.point + "/");
    // The longest is the one we are on; of equal ones the later is on top.
    if (inside && (!found || mount.point.size() >= found->point.size())) found = mount;
  }
  return found;
}

// Whether memory can be asked for from a node, by asking for a page of this one.
Status TryNumaPolicy(int node) {
  constexpr uint64_t kPage = 4096;
  void* page = ::mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return Status::Errno(errno, "mapping a page");
  const int error = PoolMemory().Prefer(static_cast<std::byte*>(page), kPage, node);
  ::munmap(page, kPage);
  return error == 0 ? Status() : Status::Errno(error, "mbind");
}

// Everything about one path; may hang with it.
PathFacts LookAtPath(const PathConfig& config, const std::string& node) {
  PathFacts facts;
  facts.config = config;
  Result<ProbeResult> probe = CheckPath(config.directory, node, config.direct);
  if (!probe.ok()) {
    facts.usable = probe.status();
  } else {
    facts.direct = probe->direct;
    facts.alignment = probe->alignment;
    facts.not_direct = probe->reason;
    if (probe->error != 0) facts.not_direct += ": " + std::generic_category().message(probe->error);
  }
  struct stat st;
  if (::stat(config.directory.c_str(), &st) != 0) return facts;  // usable says why
  facts.device = st.st_dev;
  facts.disks = DisksBelow("", major(st.st_dev), minor(st.st_dev));
  struct statvfs space;
  if (::statvfs(config.directory.c_str(), &space) == 0)
    facts.free = static_cast<uint64_t>(space.f_bavail) * space.f_frsize;
  char resolved[PATH_MAX];
  if (::realpath(config.directory.c_str(), resolved) != nullptr) {
    if (const std::optional<Mount> mount = MountOf(resolved)) {
      facts.type = mount->type;
      facts.options = mount->options;
    }
  }
  if (facts.type == "lustre") {
    std::string layout(64 << 10, '\0');
    const ssize_t got = ::getxattr(config.directory.c_str(), "lustre.lov", layout.data(), layout.size());
    layout.resize(got > 0 ? static_cast<size_t>(got) : 0);
    facts.stripes = LustreStripes(layout);
  }
  return facts;
}

PathFacts NotLookedAt(const PathConfig& config, int error, const std::string& why) {
  PathFacts facts;
  facts.config = config;
  facts.usable = Status(-error, "path " + config.directory + " " + why);
  return facts;
}

// All paths at once, each in a thread of its own. One that hangs is left to itself, and is not joined by another before
// it has come back.
std::vector<PathFacts> LookAtPaths(const std::vector<PathConfig>& configs, const std::string& node) {
  static std::map<std::string, std::shared_future<PathFacts>> looks;  // by directory; those of earlier calls hang
  const std::string hangs = "has not answered for " + std::to_string(kPathDeadline.count()) +
                            " s: is its device or server gone? (dmesg, mount)";
  std::map<std::string, std::shared_future<PathFacts>> earlier = std::exchange(looks, {});
  std::map<std::string, int> refused;
  for (const PathConfig& config : configs) {
    const auto before = earlier.find(config.directory);
    if (before != earlier.end() && before->second.wait_for(std::chrono::seconds(0)) != std::future_status::ready) {
      looks.insert(*before);
      continue;
    }
    std::packaged_task<PathFacts()> look([config, node] { return LookAtPath(config, node); });
    looks.emplace(config.directory, look.get_future());
    try {
      std::thread(std::move(look)).detach();
    } catch (const std::system_error& error) {
      looks.erase(config.directory);
      refused[config.directory] = error.code().value();
    }
  }
  const auto deadline = std::chrono::steady_clock::now() + kPathDeadline;
  std::vector<PathFacts> all;
  for (const PathConfig& config : configs) {
    if (const auto error = refused.find(config.directory); error != refused.end())
      all.push_back(NotLookedAt(config, error->second, "was not looked at: no thread for it"));
    else if (looks.at(config.directory).wait_until(deadline) == std::future_status::ready)
      all.push_back(looks.at(config.directory).get());
    else
      all.push_back(NotLookedAt(config, ETIMEDOUT, hangs));
  }
  return all;
}

template <class Number>
Number At(const std::string& bytes, size_t offset) {
  Number number = 0;
  if (offset + sizeof number <= bytes.size()) std::memcpy(&number, bytes.data() + offset, sizeof number);
  return number;
}

}  // namespace

Status CheckKernel() {
  UniqueFd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
  if (!pidfd) return Status::Errno(errno, "pidfd_open (Linux 5.10 or newer is needed)");
  Result<UniqueFd> memfd = CreateSealedMemfd("mlpo-probe", 4096);
  if (!memfd.ok()) return memfd.status();
  return SealFutureWrites(memfd->get());
}

std::optional<int> UringDisabled(const std::string& root) {
  int value = 0;
  std::ifstream file(root + "/proc/sys/kernel/io_uring_disabled");
  if (!(file >> value)) return std::nullopt;
  return value;
}

std::string TransparentHugePages(const std::string& root) {
  const std::string text = ReadText(root + "/sys/kernel/mm/transparent_hugepage/enabled");
  const size_t open = text.find('['), close = text.find(']');
  return open == std::string::npos || close == std::string::npos ? "" : text.substr(open + 1, close - open - 1);
}

uint64_t HugePageBytes(const std::string& root) {
  uint64_t pages = 0, giant = 0;
  std::ifstream(root + "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages") >> pages;
  std::ifstream(root + "/sys/kernel/mm/hugepages/hugepages-1048576kB/free_hugepages") >> giant;
  return pages * kHugePage + giant * kGiantPage;
}

uint32_t NumaNodes(const std::string& root) {
  const std::string nodes = root + "/sys/devices/system/node/";
  const std::optional<uint32_t> with_memory = CountInList(ReadText(nodes + "has_memory"));
  return with_memory.value_or(CountInList(ReadText(nodes + "online")).value_or(1));
}

std::optional<uint32_t> NumaAllowed(const std::string& root) {
  return CountInList(Field(ReadText(root + "/proc/self/status"), "Mems_allowed_list"));
}

std::vector<std::string> DisksBelow(const std::string& root, unsigned major_number, unsigned minor_number) {
  std::vector<std::string> names;
  for (const fs::path& drive : DrivesBelow(root, major_number, minor_number)) names.push_back(drive.filename());
  std::sort(names.begin(), names.end());
  return names;
}

// As lustre_user.h has it: lov_user_md_v1 and _v3 begin alike, the stripe count at 28; lov_comp_md_v1 is a header of 32
// bytes and entries of 48, with the place of a component's lov_user_md at 24.
std::optional<uint32_t> LustreStripes(const std::string& layout) {
  constexpr uint32_t kV1 = 0x0bd10bd0, kV3 = 0x0bd30bd0, kComposite = 0x0bd60bd0;
  const auto plain = [&](size_t at) -> uint32_t {
    const auto magic = At<uint32_t>(layout, at);
    if (magic != kV1 && magic != kV3) return 0;
    const auto count = At<uint16_t>(layout, at + 28);
    return count == 0xffff ? 0xffffffffu : count;
  };
  uint32_t most = plain(0);
  if (At<uint32_t>(layout, 0) == kComposite) {
    const auto entries = At<uint16_t>(layout, 14);
    for (size_t i = 0; i < entries; ++i) most = std::max(most, plain(At<uint32_t>(layout, 32 + 48 * i + 24)));
  }
  if (most == 0) return std::nullopt;  // the file system's default
  return most;
}

Facts GatherFacts(const Config& config, const Environment& environment, const RunningFacts* running,
                  double parameters_per_s) {
  Facts facts;
  facts.config = config;
  facts.running = running != nullptr;
  utsname kernel{};
  if (::uname(&kernel) == 0) facts.kernel = kernel.release;
  facts.kernel_calls = CheckKernel();
  facts.uring = ProbeUring();
  facts.uring_clones = UringPool::KernelClones();
  facts.uring_disabled = UringDisabled("");
  const std::string self = ReadText("/proc/self/status");
  facts.seccomp = Field(self, "Seccomp") == "2";
  facts.memory_lock_limit = MemoryLockLimit();
  facts.available = AvailableMemoryBytes(&facts.available_what);
  facts.buffer = config.memory.block_elements * 12;
  facts.pool = config.memory.pool_bytes;
  if (facts.pool == 0 && facts.available.ok()) facts.pool = facts.available.value() / 4;
  facts.huge_page_bytes = HugePageBytes("");
  facts.transparent = TransparentHugePages("");
  Result<Cores> cores = Cores::Load();
  facts.cores = cores.ok() ? cores->count() : std::max(1u, std::thread::hardware_concurrency());
  facts.cpu_quota = ReadCpuQuota();
  if (cores.ok()) {
    std::vector<uint32_t> of_groups;
    for (const Cores::Group& group : cores->Groups()) of_groups.push_back(group.cores);
    const std::vector<uint32_t> workers = SplitWorkers(of_groups, {0, parameters_per_s, facts.cpu_quota});
    facts.default_workers = std::accumulate(workers.begin(), workers.end(), 0u);
  }
  facts.needed_workers = WorkersFor(parameters_per_s);
  facts.workers = config.adam.workers;
  facts.open_files = Limit(RLIMIT_NOFILE).value_or(UINT64_MAX);
  facts.file_size = Limit(RLIMIT_FSIZE);
  facts.numa_nodes = NumaNodes("");
  facts.numa_allowed = NumaAllowed("");
  int with_memory = 0;
  if (cores.ok()) {
    const std::vector<NumaNode> nodes = cores->Nodes();
    const auto first = std::find_if(nodes.begin(), nodes.end(), [](const NumaNode& node) { return node.memory; });
    if (first != nodes.end()) with_memory = first->id;
  }
  facts.numa_policy = TryNumaPolicy(with_memory);
  facts.socket = running != nullptr ? Result<std::string>(running->socket) : ResolveSocket(config, environment);
  if (facts.socket.ok()) facts.socket_folder = CheckSocketFolder(facts.socket.value());
  facts.paths = LookAtPaths(config.paths, config.daemon.node);
  const bool all_usable =
      std::all_of(facts.paths.begin(), facts.paths.end(), [](const PathFacts& path) { return path.usable.ok(); });
  if (all_usable) facts.distinct = CheckDistinctPaths(config.paths);
  if (running != nullptr) {
    facts.pool = running->pool;
    facts.pool_locked = running->pool_locked;
    facts.pool_huge = running->pool_huge;
    facts.workers = running->workers;
    for (size_t i = 0; i < facts.paths.size() && i < running->paths.size(); ++i) {
      facts.paths[i].engine = running->paths[i].engine;
      facts.paths[i].taken = running->paths[i].taken;
    }
  }
  return facts;
}

}  // namespace mlpo
