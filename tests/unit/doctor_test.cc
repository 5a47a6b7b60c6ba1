// The doctor's judgement of given facts, and what it reads from given files.
#include <filesystem>
#include <fstream>

#include "daemon/doctor/gather.h"
#include "daemon/doctor/judge.h"
#include "daemon/io/block_device.h"
#include "tests/support/catch.h"
#include "tests/support/scratch_dir.h"

using mlpo::Facts;
using mlpo::Finding;
using mlpo::Level;
using mlpo::PathFacts;
namespace fs = std::filesystem;

namespace {

constexpr uint64_t kGiB = uint64_t{1} << 30;

// A machine without fault: 8 cores, a pool of 4 GiB on two drives.
Facts Healthy() {
  Facts facts;
  facts.kernel = "6.1.0";
  facts.available = 16 * kGiB;
  facts.available_what = "the host (MemAvailable)";
  facts.config.memory.pool_bytes = facts.pool = 4 * kGiB;
  facts.buffer = 12u << 20;
  facts.transparent = "madvise";
  facts.cores = facts.default_workers = 8;
  facts.open_files = 65536;
  facts.numa_allowed = 1;
  facts.socket = std::string("/run/mlpo/mlpo.sock");
  for (const char* name : {"a", "b"}) {
    PathFacts path;
    path.config.name = name;
    path.config.directory = std::string("/mnt/") + name;
    path.direct = true;
    path.alignment = 512;
    path.free = 1000 * kGiB;
    path.type = "xfs";
    path.disks = {std::string("nvme") + name};
    facts.paths.push_back(path);
  }
  return facts;
}

// The findings that are not fine.
std::vector<Finding> Faults(const Facts& facts) {
  std::vector<Finding> faults;
  for (const Finding& finding : mlpo::Judge(facts))
    if (finding.level != Level::kOk) faults.push_back(finding);
  return faults;
}

// The one fault, whose advice is not empty.
Finding OnlyFault(const Facts& facts) {
  const std::vector<Finding> faults = Faults(facts);
  for (const Finding& finding : faults) UNSCOPED_INFO(finding.check << ": " << finding.what);
  REQUIRE(faults.size() == 1);
  CHECK(!faults[0].advice.empty());
  return faults[0];
}

bool Has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

void Write(const fs::path& file, const std::string& text) {
  fs::create_directories(file.parent_path());
  std::ofstream(file) << text;
}

template <class Number>
void Append(std::string* bytes, Number number) {
  bytes->append(reinterpret_cast<const char*>(&number), sizeof number);
}

// struct lov_user_md_v1 of lustre_user.h: magic, pattern, object id and group, stripe size, count, offset.
std::string PlainLayout(uint16_t stripes, uint32_t magic = 0x0bd10bd0) {
  std::string bytes;
  Append<uint32_t>(&bytes, magic);
  Append<uint32_t>(&bytes, 1);
  bytes.append(16, '\0');
  Append<uint32_t>(&bytes, 1u << 20);
  Append<uint16_t>(&bytes, stripes);
  Append<uint16_t>(&bytes, 0xffff);
  return bytes;
}

// struct lov_comp_md_v1 with one entry a layout.
std::string CompositeLayout(const std::vector<std::string>& layouts) {
  std::string bytes;
  Append<uint32_t>(&bytes, 0x0bd60bd0);
  Append<uint32_t>(&bytes, 0);  // size
  Append<uint32_t>(&bytes, 0);
  Append<uint16_t>(&bytes, 0);
  Append<uint16_t>(&bytes, static_cast<uint16_t>(layouts.size()));
  bytes.append(16, '\0');
  size_t at = bytes.size() + 48 * layouts.size();
  for (const std::string& layout : layouts) {
    bytes.append(24, '\0');  // id, flags, extent
    Append<uint32_t>(&bytes, static_cast<uint32_t>(at));
    bytes.append(20, '\0');
    at += layout.size();
  }
  for (const std::string& layout : layouts) bytes += layout;
  return bytes;
}

}  // namespace

TEST_CASE("Doctor.AHealthyMachineHasNoFault") {
  for (const Finding& finding : Faults(Healthy())) FAIL(finding.check << ": " << finding.what);
  CHECK(mlpo::ReportCode(mlpo::Judge(Healthy())) == 0);
  Facts running = Healthy();
  running.running = running.pool_locked = running.pool_huge = true;
  for (const Finding& finding : Faults(running)) FAIL(finding.check << ": " << finding.what);
}

TEST_CASE("Doctor.IoUringRefusedNamesTheCause") {
  struct {
    std::optional<int> sysctl;
    bool seccomp;
    int error;
    const char* advice;
  } const cases[] = {{2, true, EPERM, "kernel.io_uring_disabled=0"},
                     {1, false, EPERM, "io_uring_group"},
                     {0, true, EPERM, "seccomp"},
                     {std::nullopt, true, ENOSYS, "seccomp"},
                     {std::nullopt, false, ENOMEM, "RLIMIT_MEMLOCK"},
                     {std::nullopt, false, ENOSYS, "CONFIG_IO_URING"}};
  for (const auto& given : cases) {
    Facts facts = Healthy();
    facts.uring = mlpo::Status::Errno(given.error, "io_uring_setup");
    facts.uring_disabled = given.sysctl;
    facts.seccomp = given.seccomp;
    const Finding fault = OnlyFault(facts);
    INFO(fault.advice);
    CHECK(fault.check == "io_uring");
    CHECK(fault.level == Level::kWarning);
    CHECK(Has(fault.advice, given.advice));
    facts.paths[1].config.engine = "io_uring";
    CHECK(OnlyFault(facts).level == Level::kError);
    for (PathFacts& path : facts.paths) path.config.engine = "threads";
    CHECK(Faults(facts).empty());
  }
}

TEST_CASE("Doctor.LockedMemory") {
  Facts facts = Healthy();
  facts.memory_lock_limit = 8u << 20;
  CHECK(Has(OnlyFault(facts).what, "may be swapped out"));
  facts.memory_lock_limit = 5 * kGiB;  // the pool, and not once more for each of two rings
  CHECK(Has(OnlyFault(facts).what, std::to_string(12 * kGiB)));
  facts.memory_lock_limit = 8 * kGiB;
  facts.uring_clones = true;  // once for all rings
  CHECK(Faults(facts).empty());
  facts.uring_clones = false;
  facts.memory_lock_limit = 12 * kGiB;
  CHECK(Faults(facts).empty());
  facts.memory_lock_limit = 8u << 20;
  facts.config.memory.lock = false;
  CHECK(Faults(facts).empty());
  facts = Healthy();
  facts.running = facts.pool_huge = true;
  CHECK(OnlyFault(facts).check == "memlock");
}

TEST_CASE("Doctor.MemoryOfHostAndCgroup") {
  Facts facts = Healthy();
  facts.available = 3 * kGiB;
  facts.available_what = "the memory cgroup /job";
  Finding fault = OnlyFault(facts);
  CHECK(fault.level == Level::kError);
  CHECK(Has(fault.what, "the memory cgroup /job"));
  facts = Healthy();
  facts.config.memory.arenas_bytes = 13 * kGiB;
  CHECK(Has(OnlyFault(facts).what, "arenas"));
  facts = Healthy();
  facts.pool = 30u << 20;  // two and a half buffers
  CHECK(OnlyFault(facts).level == Level::kError);
  facts = Healthy();
  facts.available = mlpo::Status(-EACCES, "reading /proc/meminfo");
  CHECK(OnlyFault(facts).check == "memory");
}

TEST_CASE("Doctor.PagesSetAsideAreNotTakenFromWhatIsLeft") {
  Facts facts = Healthy();
  facts.pool = 40 * kGiB;
  facts.huge_page_bytes = 41 * kGiB;
  CHECK(Faults(facts).empty());
  facts.config.memory.arenas_bytes = 17 * kGiB;
  CHECK(OnlyFault(facts).check == "memory");
  facts.config.memory.arenas_bytes = 0;
  facts.config.memory.huge_pages = "never";
  CHECK(OnlyFault(facts).check == "memory");
  facts.config.memory.huge_pages = "auto";
  facts.huge_page_bytes = 20 * kGiB;  // and 20 of other memory
  CHECK(OnlyFault(facts).check == "memory");
}

TEST_CASE("Doctor.HugePages") {
  Facts facts = Healthy();
  facts.transparent = "never";
  Finding fault = OnlyFault(facts);
  CHECK(fault.check == "huge_pages");
  CHECK(Has(fault.advice, "vm.nr_hugepages=2048"));
  facts.config.memory.huge_pages = "require";
  CHECK(OnlyFault(facts).level == Level::kError);
  facts.huge_page_bytes = 4 * kGiB;
  CHECK(Faults(facts).empty());
  facts = Healthy();
  facts.running = facts.pool_locked = true;
  facts.pool = 40 * kGiB;
  fault = OnlyFault(facts);
  CHECK(Has(fault.what, "too large to be registered"));
}

TEST_CASE("Doctor.CpuNumaAndLimits") {
  Facts facts = Healthy();
  facts.cpu_quota = 2.5;
  CHECK(Faults(facts).empty());
  facts.workers = 4;
  CHECK(Has(OnlyFault(facts).advice, "workers = 2 or 0"));
  facts.workers = 0;
  facts.cpu_quota = 0.5;
  CHECK(OnlyFault(facts).check == "cpu");
  facts = Healthy();
  facts.needed_workers = 8;
  CHECK(Faults(facts).empty());
  facts.needed_workers = 12;
  CHECK(Has(OnlyFault(facts).what, "8 Adam workers, and what the paths can do takes 12"));
  facts = Healthy();
  facts.numa_policy = mlpo::Status(-EPERM, "mbind: no");
  CHECK(Faults(facts).empty());  // one node
  facts.numa_nodes = 2;
  CHECK(Has(OnlyFault(facts).what, "1 of 2"));
  facts.numa_allowed = 2;
  CHECK(Has(OnlyFault(facts).what, "mbind: no"));
  facts.config.memory.numa = "off";
  CHECK(Faults(facts).empty());
  facts = Healthy();
  facts.open_files = 1024;
  CHECK(Has(OnlyFault(facts).advice, "LimitNOFILE="));
  facts = Healthy();
  facts.file_size = 1000;
  CHECK(Has(OnlyFault(facts).what, "RLIMIT_FSIZE"));
}

TEST_CASE("Doctor.KernelSocketAndPaths") {
  Facts facts = Healthy();
  facts.kernel_calls = mlpo::Status::Errno(ENOSYS, "pidfd_open");
  CHECK(OnlyFault(facts).level == Level::kError);
  facts = Healthy();
  facts.socket_folder = mlpo::Status(-EPERM, "folder /tmp/x can be written by others");
  CHECK(OnlyFault(facts).level == Level::kError);
  facts = Healthy();
  facts.paths[1].usable = mlpo::Status(-EROFS, "mounted read-only");
  Finding fault = OnlyFault(facts);
  CHECK(fault.level == Level::kError);
  CHECK(fault.path == "b");
  facts = Healthy();
  facts.paths[0].direct = false;
  facts.paths[0].not_direct = "open with O_DIRECT is refused";
  CHECK(OnlyFault(facts).check == "direct_io");
  facts.paths[0].config.direct = false;
  CHECK(Faults(facts).empty());
  facts = Healthy();
  facts.paths.clear();
  CHECK(OnlyFault(facts).level == Level::kError);
}

TEST_CASE("Doctor.Space") {
  Facts facts = Healthy();
  facts.paths[0].config.capacity_bytes = 2000 * kGiB;
  CHECK(OnlyFault(facts).level == Level::kWarning);
  facts.paths[0].taken = 1000 * kGiB;  // by a running daemon's own files
  CHECK(Faults(facts).empty());
  facts.paths[0] = Healthy().paths[0];
  facts.paths[0].free = 1u << 20;
  CHECK(OnlyFault(facts).level == Level::kError);
}

TEST_CASE("Doctor.FileSystems") {
  Facts facts = Healthy();
  for (const char* type : {"tmpfs", "overlay", "btrfs", "zfs", "fuse.sshfs", "9p"}) {
    facts.paths[1].type = type;
    const Finding fault = OnlyFault(facts);
    CHECK(fault.check == "file_system");
    CHECK(Has(fault.what, type));
    CHECK(fault.path == "b");
  }
  facts.paths[1].type = "nfs4";
  facts.paths[1].options = "rw,vers=4.2,rsize=1048576,wsize=1048576,hard,proto=tcp,nconnect=8";
  CHECK(Faults(facts).empty());
  for (const char* options : {"rw,rsize=1048576,wsize=1048576,hard", "rw,rsize=65536,wsize=1048576,nconnect=8",
                              "rw,rsize=1048576,wsize=1048576,nconnect=8,soft", "rw,nconnect=x,rsize=,wsize"}) {
    facts.paths[1].options = options;
    CHECK(OnlyFault(facts).check == "nfs");
  }
  facts.paths[1].type = "lustre";
  for (const auto& stripes : {std::optional<uint32_t>(), std::optional<uint32_t>(1)}) {
    facts.paths[1].stripes = stripes;
    CHECK(Has(OnlyFault(facts).advice, "lfs setstripe -c -1"));
  }
  for (const uint32_t stripes : {2u, 0xffffffffu}) {
    facts.paths[1].stripes = stripes;
    CHECK(Faults(facts).empty());
  }
}

TEST_CASE("Doctor.SharedDrives") {
  Facts facts = Healthy();
  facts.paths[1].disks = {"nvmeb", "nvmea"};  // a stripe over two drives, one of them the other path's
  const Finding fault = OnlyFault(facts);
  CHECK(fault.check == "devices");
  CHECK(Has(fault.what, "a and b share nvmea"));
  for (PathFacts& path : facts.paths) {  // no block device: by file system
    path.disks.clear();
    path.device = 77;
  }
  CHECK(OnlyFault(facts).check == "devices");
  facts.paths[1].device = 78;
  CHECK(Faults(facts).empty());
}

TEST_CASE("Doctor.ReportSaysTheWorst") {
  Facts facts = Healthy();
  facts.file_size = 1;
  CHECK(mlpo::ReportCode(mlpo::Judge(facts)) == 2);
  CHECK(Has(mlpo::ReportJson(mlpo::Judge(facts), true), R"({"state":"degraded","examined_by":"daemon")"));
  facts.paths.clear();
  CHECK(mlpo::ReportCode(mlpo::Judge(facts)) == 1);
  CHECK(mlpo::ReportCode(mlpo::JudgeProblems({"mlpo.toml:1: no"})) == 1);
}

TEST_CASE("Doctor.FilesOfTheKernel") {
  const ScratchDir dir;
  const std::string root = dir / "root";
  CHECK(mlpo::UringDisabled(root) == std::nullopt);
  CHECK(mlpo::TransparentHugePages(root).empty());
  CHECK(mlpo::HugePageBytes(root) == 0);
  CHECK(mlpo::NumaNodes(root) == 1);
  CHECK(mlpo::NumaAllowed(root) == std::nullopt);
  Write(root + "/proc/sys/kernel/io_uring_disabled", "2\n");
  Write(root + "/sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n");
  Write(root + "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "3\n");
  Write(root + "/sys/kernel/mm/hugepages/hugepages-1048576kB/free_hugepages", "2\n");
  Write(root + "/sys/devices/system/node/has_memory", "0-2,4\n");
  Write(root + "/proc/self/status", "Name:\tx\nMems_allowed:\t3\nMems_allowed_list:\t0-1\n");
  CHECK(mlpo::UringDisabled(root) == 2);
  CHECK(mlpo::TransparentHugePages(root) == "never");
  CHECK(mlpo::HugePageBytes(root) == (3u << 21) + 2 * kGiB);
  CHECK(mlpo::NumaNodes(root) == 4);
  CHECK(mlpo::NumaAllowed(root) == 2u);
  for (const char* bad : {"", "x", "3-1", "0-99999999", "-1"}) {
    Write(root + "/sys/devices/system/node/has_memory", bad);
    CHECK(mlpo::NumaNodes(root) == 1);
  }
}

// A file system on a logical volume over two partitions of one drive and a whole other drive.
TEST_CASE("Doctor.DrivesBelowADevice") {
  const ScratchDir dir;
  const std::string root = dir / "root", devices = root + "/sys/devices";
  Write(devices + "/pci/nvme0n1/nvme0n1p1/partition", "1");
  Write(devices + "/pci/nvme0n1/nvme0n1p2/partition", "2");
  fs::create_directories(devices + "/pci/nvme1n1/slaves");
  fs::create_directories(devices + "/virtual/dm-0/slaves");
  fs::create_directories(root + "/sys/dev/block");
  const auto link = [&](const std::string& to, const std::string& from) { fs::create_symlink(to, from); };
  link(devices + "/pci/nvme0n1/nvme0n1p1", devices + "/virtual/dm-0/slaves/nvme0n1p1");
  link(devices + "/pci/nvme0n1/nvme0n1p2", devices + "/virtual/dm-0/slaves/nvme0n1p2");
  link(devices + "/pci/nvme1n1", devices + "/virtual/dm-0/slaves/nvme1n1");
  link("../../devices/virtual/dm-0", root + "/sys/dev/block/253:0");
  link("../../devices/pci/nvme0n1/nvme0n1p1", root + "/sys/dev/block/259:1");
  using Names = std::vector<std::string>;
  CHECK(mlpo::DisksBelow(root, 253, 0) == Names{"nvme0n1", "nvme1n1"});
  CHECK(mlpo::DisksBelow(root, 259, 1) == Names{"nvme0n1"});
  CHECK(mlpo::DisksBelow(root, 0, 44).empty());
  // The NUMA node is what all drives say.
  CHECK(mlpo::DriveNode(root, 259, 1) == -1);
  Write(devices + "/pci/nvme0n1/numa_node", "1");
  CHECK(mlpo::DriveNode(root, 259, 1) == 1);
  CHECK(mlpo::DriveNode(root, 253, 0) == -1);
  Write(devices + "/pci/numa_node", "1");  // of the other drive's controller
  CHECK(mlpo::DriveNode(root, 253, 0) == 1);
  Write(devices + "/pci/nvme1n1/numa_node", "0");
  CHECK(mlpo::DriveNode(root, 253, 0) == -1);
  CHECK(mlpo::DriveNode(root, 0, 44) == -1);
  link(devices + "/virtual/dm-0", devices + "/virtual/dm-0/slaves/loop");  // a circle ends
  CHECK(mlpo::DisksBelow(root, 253, 0) == Names{"nvme0n1", "nvme1n1"});
}

TEST_CASE("Doctor.LustreStripeCount") {
  CHECK(mlpo::LustreStripes(PlainLayout(4)) == 4u);
  CHECK(mlpo::LustreStripes(PlainLayout(8, 0x0bd30bd0)) == 8u);
  CHECK(mlpo::LustreStripes(PlainLayout(0xffff)) == 0xffffffffu);
  CHECK(mlpo::LustreStripes(PlainLayout(0)) == std::nullopt);
  const std::string composite = CompositeLayout({PlainLayout(1), PlainLayout(16), PlainLayout(4)});
  CHECK(mlpo::LustreStripes(composite) == 16u);
  CHECK(mlpo::LustreStripes(PlainLayout(4, 0x12345678)) == std::nullopt);
  // Cut anywhere: no byte beyond the end is read.
  for (size_t bytes = 0; bytes < composite.size(); ++bytes) {
    const std::optional<uint32_t> stripes = mlpo::LustreStripes(composite.substr(0, bytes));
    CHECK((!stripes || *stripes == 1 || *stripes == 16));
  }
}
