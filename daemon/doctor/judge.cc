#include "daemon/doctor/judge.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "daemon/io/byte_text.h"
#include "daemon/io/path_queue.h"

namespace mlpo {
namespace {

constexpr uint64_t kStateBytes = 12;  // per parameter
constexpr uint64_t kMiB = 1u << 20;
constexpr uint64_t kFilesPerSession = 8;  // sockets, memfds, doorbell, pidfd; and a state file a path
constexpr uint32_t kGoodConnects = 4;
constexpr uint64_t kGoodNfsSize = kMiB;

const char* const kLevelNames[] = {"ok", "warning", "error"};

struct FileSystemAdvice {
  const char* type;
  Level level;
  const char* what;
  const char* advice;
};
constexpr FileSystemAdvice kFileSystems[] = {
    {"tmpfs", Level::kWarning, "is memory: state there takes the host's memory twice over",
     "use a directory on a drive, and give the memory to [memory] pool"},
    {"ramfs", Level::kWarning, "is memory: state there takes the host's memory twice over",
     "use a directory on a drive, and give the memory to [memory] pool"},
    {"overlay", Level::kWarning, "is a container's own layer, slow and gone with the container",
     "mount a directory of the host (a volume, hostPath) and use that"},
    {"zfs", Level::kWarning, "compresses and copies each write; O_DIRECT works since OpenZFS 2.3 only",
     "zfs set compression=off recordsize=1M DATASET, or use ext4 or xfs"},
    {"btrfs", Level::kWarning, "copies each write and sums it in a core",
     "chattr +C on <directory>/mlpo before the first start, or use ext4 or xfs"},
    {"cifs", Level::kWarning, "is made for office files", "use NFS with nconnect, or a local drive"},
    {"9p", Level::kWarning, "is a virtual machine's shared folder, slow and without real O_DIRECT",
     "give the machine a block device"},
    {"virtiofs", Level::kWarning, "is a virtual machine's shared folder", "give the machine a block device"},
    {"ecryptfs", Level::kWarning, "encrypts in a core and has no O_DIRECT", "use dm-crypt below ext4 or xfs"},
};

class Judgement {
 public:
  explicit Judgement(const Facts& facts) : f_(facts) {}

  std::vector<Finding> All() {
    Kernel();
    Uring();
    Socket();
    Memory();
    Memlock();
    HugePages();
    Cpu();
    Numa();
    Limits();
    if (f_.paths.empty())
      Add("path", Level::kError, "no path is configured",
          "give storage directories with --path DIR, or as [[path]] in the file");
    for (const PathFacts& path : f_.paths) OnePath(path);
    Devices();
    return std::move(findings_);
  }

 private:
  void Add(const char* check, Level level, std::string what, std::string advice = "") {
    findings_.push_back({check, path_, level, std::move(what), std::move(advice)});
  }
  void Ok(const char* check, std::string what) { Add(check, Level::kOk, std::move(what)); }

  void Kernel() {
    if (!f_.kernel_calls.ok())
      return Add("kernel", Level::kError, "Linux " + f_.kernel + ": " + f_.kernel_calls.message(),
                 "run Linux 5.10 or newer; in a container, allow the call in its seccomp profile");
    Ok("kernel", "Linux " + f_.kernel + " has pidfds and memfds that can be sealed for good");
  }

  std::string EnginesInUse() const {
    std::string names;
    for (const PathFacts& path : f_.paths)
      if (!path.engine.empty()) names += (names.empty() ? "" : ", ") + path.config.name + ": " + path.engine;
    return names.empty() ? "" : " (in use: " + names + ")";
  }

  void Uring() {
    if (f_.uring.ok()) return Ok("io_uring", "works" + EnginesInUse());
    const bool insisted = std::any_of(f_.paths.begin(), f_.paths.end(),
                                      [](const PathFacts& path) { return path.config.engine == "io_uring"; });
    const bool wanted = std::any_of(f_.paths.begin(), f_.paths.end(),
                                    [](const PathFacts& path) { return path.config.engine != "threads"; });
    if (!wanted && !f_.paths.empty())
      return Ok("io_uring", "is refused by the kernel, and not wanted: every path has engine = \"threads\"");
    std::string advice;
    if (f_.uring_disabled.value_or(0) == 2)
      advice = "sysctl kernel.io_uring_disabled=0";
    else if (f_.uring_disabled.value_or(0) == 1)
      advice = "sysctl kernel.io_uring_disabled=0, or put the daemon's group into kernel.io_uring_group";
    else if (f_.seccomp)
      advice =
          "a seccomp filter refuses it: allow io_uring_setup, io_uring_enter and io_uring_register in the profile "
          "(systemd: SystemCallFilter=@system-service; containers: a Localhost profile)";
    else if (f_.uring.os_errno() == ENOMEM)
      advice = "raise RLIMIT_MEMLOCK (LimitMEMLOCK=infinity in the unit, ulimit -l unlimited)";
    else
      advice = "run a kernel with CONFIG_IO_URING";
    if (insisted)
      return Add("io_uring", Level::kError,
                 "the kernel refuses it (" + f_.uring.message() + "), and a path has engine = \"io_uring\"",
                 advice + "; or set engine = \"auto\"");
    Add("io_uring", Level::kWarning,
        "the kernel refuses it (" + f_.uring.message() + "): paths use threads, with more CPU time per byte", advice);
  }

  void Socket() {
    if (!f_.socket.ok()) return Add("socket", Level::kError, f_.socket.status().message(), "give --socket PATH");
    if (!f_.socket_folder.ok())
      return Add("socket", Level::kError, f_.socket_folder.message(),
                 "use a folder of mode 0700 that belongs to the daemon: --socket PATH, or [daemon] socket");
    Ok("socket", f_.socket.value() + ": its folder is safe");
  }

  void Memory() {
    if (!f_.available.ok())
      return Add("memory", Level::kError, f_.available.status().message(), "mount /proc and /sys/fs/cgroup");
    const uint64_t left = f_.available.value();
    if (f_.running)
      return Ok("memory",
                "the pool is " + ByteText(f_.pool) + "; " + f_.available_what + " has " + ByteText(left) + " left");
    if (f_.pool < 3 * f_.buffer)
      return Add("memory", Level::kError,
                 "a pool of " + ByteText(f_.pool) + " has no room for three blocks of " + ByteText(f_.buffer),
                 "set [memory] pool or --memory to " + ByteText(3 * f_.buffer) + " or more, or lower [memory] block");
    // Pages set aside are not among what is left, and the pool takes them first.
    const uint64_t set_aside = f_.config.memory.huge_pages == "never" ? 0 : std::min(f_.pool, f_.huge_page_bytes);
    if (f_.pool - set_aside + f_.config.memory.arenas_bytes > left)
      return Add(
          "memory", Level::kError,
          "a pool of " + ByteText(f_.pool) +
              (f_.config.memory.arenas_bytes > 0 ? " and arenas of " + ByteText(f_.config.memory.arenas_bytes) + " do"
                                                 : std::string(" does")) +
              " not fit: " + f_.available_what + " has " + ByteText(left),
          "lower [memory] pool or --memory, or raise the limit (MemoryMax=, docker --memory)");
    Ok("memory", "a pool of " + ByteText(f_.pool) + " fits: " + f_.available_what + " has " + ByteText(left));
  }

  void Memlock() {
    const std::string limit = f_.memory_lock_limit ? ByteText(*f_.memory_lock_limit) : "unlimited";
    const std::string raise =
        "LimitMEMLOCK=infinity in the unit, ulimit -l unlimited in a shell, or memlock in "
        "/etc/security/limits.conf";
    // The rings count the pool once more, or each of them does.
    const uint64_t rings = f_.uring_clones ? f_.pool : f_.pool * std::max<size_t>(1, f_.paths.size());
    if (!f_.config.memory.lock)
      return Ok("memlock", "[memory] lock = false: the pool is not to be locked (RLIMIT_MEMLOCK is " + limit + ")");
    if (f_.running && !f_.pool_locked)
      return Add("memlock", Level::kWarning,
                 "the pool of " + ByteText(f_.pool) + " is not locked (RLIMIT_MEMLOCK is " + limit +
                     "): it may be swapped out",
                 raise);
    if (!f_.memory_lock_limit || f_.running) return Ok("memlock", "RLIMIT_MEMLOCK is " + limit);
    if (*f_.memory_lock_limit < f_.pool)
      return Add("memlock", Level::kWarning,
                 "RLIMIT_MEMLOCK is " + limit + " and the pool " + ByteText(f_.pool) +
                     ": it cannot be locked and may be swapped out, and io_uring has no registered buffers",
                 raise);
    if (*f_.memory_lock_limit < f_.pool + rings)
      return Add("memlock", Level::kWarning,
                 "RLIMIT_MEMLOCK is " + limit + ": too little to register the pool with io_uring (" +
                     ByteText(f_.pool + rings) + "), which costs CPU time",
                 raise);
    Ok("memlock", "RLIMIT_MEMLOCK is " + limit + ", enough for the pool");
  }

  void HugePages() {
    const std::string set_aside = "sysctl vm.nr_hugepages=" + std::to_string((f_.pool + 2 * kMiB - 1) / (2 * kMiB));
    if (f_.config.memory.huge_pages == "never") return Ok("huge_pages", "[memory] huge_pages = \"never\"");
    if (f_.running && f_.pool_huge) return Ok("huge_pages", "the pool is in huge pages");
    const bool enough = f_.huge_page_bytes >= f_.pool && f_.pool > 0;
    if (!f_.running && enough) return Ok("huge_pages", ByteText(f_.huge_page_bytes) + " are set aside");
    const bool transparent = f_.transparent == "always" || f_.transparent == "madvise";
    if (!f_.running && transparent) return Ok("huge_pages", "transparent ones: " + f_.transparent);
    const bool large = !f_.uring_clones && f_.pool * std::max<size_t>(1, f_.paths.size()) > kMaxSmallPageBytes;
    const bool required = f_.config.memory.huge_pages == "require" && !f_.running;
    Add("huge_pages", required ? Level::kError : Level::kWarning,
        std::string(f_.running ? "the pool is not in huge pages" : "the pool will not be in huge pages") +
            " (transparent ones: " + (f_.transparent.empty() ? "not in this kernel" : f_.transparent) +
            ", set aside: " + ByteText(f_.huge_page_bytes) + ")" +
            (large ? ", and is too large to be registered with io_uring without" : ""),
        (transparent ? "" : "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, or ") + set_aside +
            (f_.running ? ", then restart the daemon" : ""));
  }

  void Cpu() {
    const double granted = f_.cpu_quota ? std::min<double>(*f_.cpu_quota, f_.cores) : f_.cores;
    std::array<char, 96> text{};
    std::snprintf(text.data(), text.size(), f_.cpu_quota ? "%u cores, and %.2g CPUs by the cgroup's quota" : "%u cores",
                  f_.cores, f_.cpu_quota.value_or(0));
    if (f_.workers > 0 && f_.workers > granted && !f_.running) {
      const auto fitting = std::max(1u, static_cast<uint32_t>(granted));
      return Add(
          "cpu", Level::kWarning,
          "[adam] workers = " + std::to_string(f_.workers) + ", and there are " + text.data() +
              ": they would wait for one another",
          "set [adam] workers = " + std::to_string(fitting) + " or 0, or grant more (CPUQuota=, cpuset, taskset)");
    }
    if (granted < 2)
      return Add("cpu", Level::kWarning, std::string(text.data()) + ": Adam, I/O and the data thread share them",
                 "grant at least 2 (CPUQuota=, AllowedCPUs=, docker --cpus, srun --cpus-per-task)");
    const uint32_t workers = f_.workers > 0 ? f_.workers : f_.default_workers;
    if (workers < f_.needed_workers)
      return Add("cpu", Level::kWarning,
                 std::string(text.data()) + ": " + std::to_string(workers) +
                     " Adam workers, and what the paths can do takes " + std::to_string(f_.needed_workers) +
                     ": updates wait for them",
                 "grant more CPUs (CPUQuota=, AllowedCPUs=, docker --cpus), or raise [adam] workers");
    Ok("cpu", std::string(text.data()) + ": " + std::to_string(workers) + " Adam workers");
  }

  void Numa() {
    const bool all = !f_.numa_allowed || *f_.numa_allowed >= f_.numa_nodes;
    if (all && f_.numa_nodes > 1 && !f_.numa_policy.ok() && f_.config.memory.numa != "off")
      return Add("numa", Level::kWarning,
                 std::to_string(f_.numa_nodes) + " nodes, and memory cannot be asked for from one (" +
                     f_.numa_policy.message() + "): it is near the threads that touch it first",
                 "let mbind through (seccomp profile; docker --cap-add SYS_NICE)");
    if (all) return Ok("numa", std::to_string(f_.numa_nodes) + (f_.numa_nodes == 1 ? " node" : " nodes"));
    Add("numa", Level::kWarning,
        "memory from " + std::to_string(*f_.numa_allowed) + " of " + std::to_string(f_.numa_nodes) +
            " nodes only: trainers on the others reach across",
        "run the daemon outside the job's cpuset, or give it all nodes (AllowedMemoryNodes=, numactl "
        "--interleave=all)");
  }

  void Limits() {
    const uint64_t need = 64 + f_.config.daemon.max_sessions * (kFilesPerSession + f_.paths.size());
    if (f_.file_size)
      Add("limits", Level::kWarning, "RLIMIT_FSIZE is " + ByteText(*f_.file_size) + ": no file may grow beyond",
          "ulimit -f unlimited, or LimitFSIZE=infinity in the unit");
    if (f_.open_files < need)
      return Add("limits", Level::kWarning,
                 "RLIMIT_NOFILE is " + std::to_string(f_.open_files) + ", and " +
                     std::to_string(f_.config.daemon.max_sessions) + " sessions may need " + std::to_string(need),
                 "LimitNOFILE=" + std::to_string(need) + " in the unit, ulimit -n, or lower [daemon] max_sessions");
    if (!f_.file_size) Ok("limits", "open files and file sizes are not limited too tightly");
  }

  void OnePath(const PathFacts& path) {
    path_ = path.config.name;
    if (!path.usable.ok()) {
      Add("path", Level::kError, path.usable.message(), "mend this, or take the path out");
    } else {
      Ok("path", path.config.directory + ": what is written is read back");
      Direct(path);
      Space(path);
      FileSystem(path);
    }
    path_.clear();
  }

  void Direct(const PathFacts& path) {
    if (path.direct) return Ok("direct_io", "O_DIRECT works, alignment " + std::to_string(path.alignment));
    if (!path.config.direct) return Ok("direct_io", "direct = false: buffered I/O, as configured");
    Add("direct_io", Level::kWarning, "no O_DIRECT (" + path.not_direct + "): the page cache takes memory and CPU time",
        "use a file system with O_DIRECT (ext4, xfs, NFS, Lustre), or say so with direct = false");
  }

  void Space(const PathFacts& path) {
    const uint64_t room = path.free + path.taken;
    const uint64_t usable = path.config.capacity_bytes > 0 ? std::min(room, path.config.capacity_bytes) : room;
    std::array<char, 48> parameters{};
    std::snprintf(parameters.data(), parameters.size(), ", the state of %.3g G parameters",
                  static_cast<double>(usable) / kStateBytes / 1e9);
    if (room < f_.buffer)
      return Add("space", Level::kError, ByteText(room) + " are free: not even one block of " + ByteText(f_.buffer),
                 "free space in " + path.config.directory + ", or take the path out");
    if (path.config.capacity_bytes > room)
      return Add("space", Level::kWarning,
                 "capacity is " + ByteText(path.config.capacity_bytes) + ", and " + ByteText(room) + " are free",
                 "free space in " + path.config.directory + ", or lower its capacity");
    Ok("space", ByteText(usable) + parameters.data());
  }

  void FileSystem(const PathFacts& path) {
    for (const FileSystemAdvice& known : kFileSystems)
      if (path.type == known.type) return Add("file_system", known.level, path.type + " " + known.what, known.advice);
    if (path.type.starts_with("fuse"))
      return Add("file_system", Level::kWarning, path.type + " goes through a process for each transfer",
                 "use the file system's kernel client, or a local drive");
    if (path.type == "nfs" || path.type == "nfs4") return Nfs(path);
    if (path.type == "lustre") return Lustre(path);
    Ok("file_system", path.type.empty() ? "not known" : path.type);
  }

  static uint64_t Option(const std::string& options, const std::string& name, uint64_t missing) {
    const std::string list = "," + options + ",";
    const size_t at = list.find("," + name + "=");
    if (at == std::string::npos) return missing;
    try {
      return std::stoull(list.substr(at + name.size() + 2));
    } catch (const std::exception&) {
      return missing;
    }
  }

  void Nfs(const PathFacts& path) {
    const uint64_t connects = Option(path.options, "nconnect", 1);
    const uint64_t rsize = Option(path.options, "rsize", 0), wsize = Option(path.options, "wsize", 0);
    const bool soft = ("," + path.options + ",").find(",soft,") != std::string::npos;
    const bool good = connects >= kGoodConnects && rsize >= kGoodNfsSize && wsize >= kGoodNfsSize;
    const std::string seen =
        "nconnect=" + std::to_string(connects) + ",rsize=" + std::to_string(rsize) + ",wsize=" + std::to_string(wsize);
    if (soft)
      Add("nfs", Level::kWarning, "is mounted soft: a slow server fails transfers that would have succeeded",
          "mount with -o hard");
    if (!good)
      return Add("nfs", Level::kWarning, seen + ": one connection, or small requests, do not fill the network",
                 "mount with -o nconnect=8,rsize=1048576,wsize=1048576 (Linux 5.3; all mounts of this server at once)");
    if (!soft) Ok("nfs", seen);
  }

  void Lustre(const PathFacts& path) {
    const std::string set =
        "lfs setstripe -c -1 -S 16M " + path.config.directory + " (before the first start: new files)";
    if (!path.stripes)
      return Add("lustre", Level::kWarning, "the stripe count is the file system's default, often 1: one server only",
                 "lfs getstripe -d " + path.config.directory + "; " + set);
    if (*path.stripes == 1) return Add("lustre", Level::kWarning, "new files have 1 stripe: one server only", set);
    Ok("lustre", *path.stripes == 0xffffffffu ? "new files have stripes on all servers"
                                              : "new files have " + std::to_string(*path.stripes) + " stripes");
  }

  // Two paths on one drive gain nothing. By drive where the kernel tells, else by file system.
  void Devices() {
    if (!f_.distinct.ok())
      return Add("devices", Level::kError, f_.distinct.message(), "give each path a directory of its own");
    std::map<std::string, std::vector<std::string>> on;
    for (const PathFacts& path : f_.paths) {
      if (!path.usable.ok()) continue;
      for (const std::string& disk : path.disks) on[disk].push_back(path.config.name);
      if (path.disks.empty()) on["file system " + std::to_string(path.device)].push_back(path.config.name);
    }
    bool shared = false;
    for (const auto& [device, names] : on) {
      if (names.size() < 2) continue;
      shared = true;
      std::string list;
      for (const std::string& name : names) list += (list.empty() ? "" : " and ") + name;
      Add("devices", Level::kWarning, "the paths " + list + " share " + device + ": together they are as fast as one",
          "take all but one of them out, or move them to drives of their own");
    }
    if (!shared && f_.paths.size() > 1) Ok("devices", "no two paths share a drive");
  }

  const Facts& f_;
  std::string path_;  // whose findings are being made
  std::vector<Finding> findings_;
};

Level Worst(const std::vector<Finding>& findings) {
  Level worst = Level::kOk;
  for (const Finding& finding : findings) worst = std::max(worst, finding.level);
  return worst;
}

}  // namespace

std::vector<Finding> Judge(const Facts& facts) { return Judgement(facts).All(); }

std::vector<Finding> JudgeProblems(const std::vector<std::string>& problems) {
  std::vector<Finding> findings;
  for (const std::string& problem : problems)
    findings.push_back({"configuration", "", Level::kError, problem, "correct it; mlpo-daemon --check-config checks"});
  return findings;
}

std::string ReportJson(const std::vector<Finding>& findings, bool running) {
  using nlohmann::ordered_json;
  const char* const states[] = {"fine", "degraded", "failed"};
  ordered_json all = ordered_json::array();
  for (const Finding& finding : findings) {
    all.push_back({{"check", finding.check},
                   {"level", kLevelNames[static_cast<int>(finding.level)]},
                   {"path", finding.path},
                   {"what", finding.what},
                   {"advice", finding.advice}});
  }
  const ordered_json report = {{"state", states[static_cast<int>(Worst(findings))]},
                               {"examined_by", running ? "daemon" : "check"},
                               {"findings", std::move(all)}};
  return report.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
}

int ReportCode(const std::vector<Finding>& findings) {
  switch (Worst(findings)) {
    case Level::kOk:
      return 0;
    case Level::kWarning:
      return 2;
    case Level::kError:
      break;
  }
  return 1;
}

}  // namespace mlpo
