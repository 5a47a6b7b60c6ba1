#include "daemon/io/buffer_pool.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <optional>
#include <sstream>

#include "daemon/io/mount_info.h"
#include "tests/support/catch.h"
#include "tests/unit/io_child.h"
#include "tests/unit/io_scratch.h"

namespace mlpo::test {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kMlockIsReal = false;  // the sanitizers turn it into nothing
#else
constexpr bool kMlockIsReal = true;
#endif

BufferPool::Options Sized(uint64_t pool, uint64_t buffer) {
  BufferPool::Options options;
  options.pool_bytes = pool;
  options.buffer_bytes = buffer;
  return options;
}

// A value of /proc/self/status in KiB.
uint64_t StatusKib(const std::string& key) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with(key + ":")) return std::stoull(line.substr(key.size() + 1));
  return 0;
}

TEST_CASE("BufferPool.GivesDisjointAlignedBuffersInMemory") {
  const bool huge = GENERATE(true, false);
  BufferPool::Options options = Sized(50 << 20, 12 << 20);
  options.huge_pages = huge ? BufferPool::HugePages::kAuto : BufferPool::HugePages::kNever;
  const uint64_t before_kib = StatusKib("VmRSS");
  Result<std::unique_ptr<BufferPool>> pool = BufferPool::Create(options);
  INFO(pool.status().message());
  REQUIRE(pool.ok());
  const BufferPool& p = **pool;
  CHECK(p.count() == 4);  // whole ones
  CHECK(p.pool_bytes() == 48 << 20);
  if (!huge) CHECK_FALSE(p.huge_pages());
  for (BufferIndex i = 0; i < p.count(); ++i) {
    CHECK(reinterpret_cast<uintptr_t>(p.data(i)) % 4096 == 0);
    if (i > 0) CHECK(p.data(i) == p.data(i - 1) + p.buffer_bytes());
    std::vector<unsigned char> present(p.buffer_bytes() / 4096);
    REQUIRE(::mincore(p.data(i), p.buffer_bytes(), present.data()) == 0);
    CHECK(std::all_of(present.begin(), present.end(), [](unsigned char c) { return (c & 1) != 0; }));
    CHECK(std::all_of(p.data(i), p.data(i) + p.buffer_bytes(), [](std::byte b) { return b == std::byte{0}; }));
  }
  const bool hugetlb = StatusKib("HugetlbPages") > 0;
  if (!hugetlb) CHECK(StatusKib("VmRSS") >= before_kib + (40 << 10));
  if (p.locked() && !hugetlb && kMlockIsReal) CHECK(StatusKib("VmLck") >= (48u << 10));
}

TEST_CASE("C15_FewerThanThreeBuffersAreRefusedWithTheFigure") {
  for (uint64_t buffers : {0u, 1u, 2u}) {
    const Result<std::unique_ptr<BufferPool>> pool = BufferPool::Create(Sized(buffers * (1 << 20) + 4096, 1 << 20));
    REQUIRE_FALSE(pool.ok());
    CHECK(pool.status().code() == -EINVAL);
    CHECK(pool.status().message().find(std::to_string(3 << 20)) != std::string::npos);
  }
  CHECK(BufferPool::Create(Sized(3 << 20, 1 << 20)).ok());
}

TEST_CASE("BufferPool.RefusesBuffersOfOddSize") {
  CHECK(BufferPool::Create(Sized(1 << 20, 0)).status().code() == -EINVAL);
  CHECK(BufferPool::Create(Sized(1 << 20, 5000)).status().code() == -EINVAL);
  CHECK(BufferPool::Create(Sized(uint64_t{8} << 30, uint64_t{2} << 30)).status().code() == -EINVAL);
}

TEST_CASE("C15_MoreThanTheHostHasIsRefusedWithBothFigures") {
  std::string what;
  const Result<uint64_t> available = AvailableMemoryBytes(&what);
  REQUIRE(available.ok());
  const uint64_t need = (available.value() + (uint64_t{4} << 30)) / (64 << 20) * (64 << 20);
  const Result<std::unique_ptr<BufferPool>> pool = BufferPool::Create(Sized(need, 64 << 20));
  REQUIRE_FALSE(pool.ok());
  CHECK(pool.status().code() == -ENOMEM);
  CHECK(pool.status().message().find(std::to_string(need)) != std::string::npos);
  CHECK(pool.status().message().find(what) != std::string::npos);
}

TEST_CASE("BufferPool.PiecesHoldWholeBuffersAndAtMostOneGib") {
  std::string what;
  const uint64_t bytes = uint64_t{2100} << 20;
  if (AvailableMemoryBytes(&what).value() < 2 * bytes) {
    WARN("skipped: needs " << 2 * bytes << " bytes of memory");
    return;
  }
  BufferPool::Options options = Sized(bytes, 3 << 20);
  options.lock = false;
  Result<std::unique_ptr<BufferPool>> pool = BufferPool::Create(options);
  INFO(pool.status().message());
  REQUIRE(pool.ok());
  const BufferPool& p = **pool;
  CHECK_FALSE(p.locked());
  uint64_t total = 0;
  for (uint32_t i = 0; i < p.piece_count(); ++i) {
    CHECK(p.IsReady(i));
    CHECK(p.piece(i).memory.iov_len <= (uint64_t{1} << 30));
    total += p.piece(i).memory.iov_len;
  }
  CHECK(total == p.pool_bytes());
  CHECK(p.piece_count() == 3);
  for (BufferIndex i = 0; i < p.count(); ++i) {
    const iovec& piece = p.piece(p.piece_of(i)).memory;
    const auto* start = static_cast<const std::byte*>(piece.iov_base);
    REQUIRE(p.data(i) >= start);
    REQUIRE(p.data(i) + p.buffer_bytes() <= start + piece.iov_len);
  }
}

std::string CreateAndTell(const BufferPool::Options& options) {
  const Result<std::unique_ptr<BufferPool>> pool = BufferPool::Create(options);
  if (!pool.ok()) return std::to_string(pool.status().code()) + " " + pool.status().message();
  return std::string("made ") + (pool.value()->locked() ? "locked" : "unlocked");
}

TEST_CASE("BufferPool.WorksUnlockedWhereTheLimitIsTooSmall") {
  if (::geteuid() != 0) {
    WARN("skipped: needs root to become somebody whom RLIMIT_MEMLOCK binds");
    return;
  }
  if (!kMlockIsReal) {
    WARN("skipped: a sanitizer has replaced mlock");
    return;
  }
  const ChildReport report = InChild([] {
    const rlimit limit{64 << 10, 64 << 10};
    if (::setrlimit(RLIMIT_MEMLOCK, &limit) != 0 || ::setresuid(65534, 65534, 65534) != 0)
      return std::string("cannot lower rights");
    BufferPool::Options options = Sized(12 << 20, 1 << 20);
    options.huge_pages = BufferPool::HugePages::kNever;  // hugetlb pages would be locked by nature
    return CreateAndTell(options);
  });
  CHECK_FALSE(report.killed);
  CHECK(report.text == "made unlocked");
}

// The folder of this process' own v1 memory cgroup, where new ones may be made; or why not.
struct CgroupFolder {
  std::string folder, reason;
};
CgroupFolder OwnMemoryCgroup() {
  if (::geteuid() != 0) return {"", "making a memory cgroup needs root"};
  std::ifstream groups("/proc/self/cgroup"), mounts("/proc/self/mountinfo");
  std::stringstream mount_text;
  mount_text << mounts.rdbuf();
  std::string group, v2;
  for (std::string line; std::getline(groups, line);) {
    const size_t at = line.find(":memory:");
    if (at != std::string::npos) group = line.substr(at + 8);
    if (line.starts_with("0::")) v2 = line.substr(3);
  }
  for (const Mount& mount : ParseMountInfo(mount_text.str())) {
    const std::string of = mount.type == "cgroup2" ? v2 : group;
    if (of.empty() || (mount.type == "cgroup" && ("," + mount.options + ",").find(",memory,") == std::string::npos))
      continue;
    if (mount.type != "cgroup" && mount.type != "cgroup2") continue;
    const std::string folder = mount.point + (of == "/" ? "" : of) + "/mlpo-io-test-" + std::to_string(::getpid());
    if (::mkdir(folder.c_str(), 0755) != 0) continue;
    for (const char* limit : {"/memory.limit_in_bytes", "/memory.max"}) {
      if (::access((folder + limit).c_str(), W_OK) != 0) continue;
      if (std::ofstream(folder + limit) << (uint64_t{1} << 30) << std::flush) return {folder, ""};
    }
    ::rmdir(folder.c_str());
  }
  return {"", "no memory cgroup can be made here"};
}

TEST_CASE("C15_PoolBeyondTheMemoryCgroupIsRefusedAndNobodyIsKilled") {
  const CgroupFolder cgroup = OwnMemoryCgroup();
  if (cgroup.folder.empty()) {
    WARN("skipped: " << cgroup.reason);
    return;
  }
  const auto create = [&](uint64_t bytes) {
    return InChild([&]() -> std::string {
      if (!(std::ofstream(cgroup.folder + "/cgroup.procs") << ::getpid() << std::flush))
        return "cannot join the cgroup";
      return CreateAndTell(Sized(bytes, 12 << 20));
    });
  };
  const uint64_t two_gib = (uint64_t{2} << 30) / (12 << 20) * (12 << 20);
  const ChildReport refused = create(two_gib);
  const ChildReport fits = create(512 << 20);
  CHECK(::rmdir(cgroup.folder.c_str()) == 0);
  CHECK_FALSE(refused.killed);
  CHECK(refused.text.starts_with(std::to_string(-ENOMEM) + " "));
  CHECK(refused.text.find(std::to_string(two_gib)) != std::string::npos);
  const size_t at = refused.text.find(cgroup.folder + " has ");
  REQUIRE(at != std::string::npos);
  const uint64_t left = std::stoull(refused.text.substr(at + cgroup.folder.size() + 5));
  CHECK(left <= (uint64_t{1} << 30));
  CHECK(left > (uint64_t{900} << 20));
  CHECK_FALSE(fits.killed);
  CHECK(fits.text.starts_with("made "));
}

// The cgroup is made tighter when the pool has its first piece: it stays smaller, and says so; nobody is killed.
TEST_CASE("C15_ALimitThatComesWhileThePoolGrowsMakesItSmaller") {
  const CgroupFolder cgroup = OwnMemoryCgroup();
  if (cgroup.folder.empty()) {
    WARN("skipped: " << cgroup.reason);
    return;
  }
  const ChildReport report = InChild([&]() -> std::string {
    if (!(std::ofstream(cgroup.folder + "/cgroup.procs") << ::getpid() << std::flush)) return "cannot join the cgroup";
    BufferPool::Options options = Sized(768 << 20, 12 << 20);
    options.piece_bytes = 96 << 20;
    options.grow = true;
    Result<std::unique_ptr<BufferPool>> pool = BufferPool::Create(options);
    if (!pool.ok()) return pool.status().message();
    bool lowered = false;
    for (const char* limit : {"/memory.max", "/memory.limit_in_bytes"}) {
      if (::access((cgroup.folder + limit).c_str(), W_OK) == 0)
        lowered |= static_cast<bool>(std::ofstream(cgroup.folder + limit) << (400 << 20) << std::flush);
    }
    if (!lowered) return "cannot lower the limit";
    Status end;
    pool.value()->Grow([](uint32_t) {}, [&](Status status) { end = std::move(status); });
    for (int i = 0; i < 30'000 && pool.value()->growing(); ++i) ::usleep(1000);
    pool.value()->StopGrowing();
    return std::to_string(end.code()) + " " + std::to_string(pool.value()->ready_bytes() >> 20) + " " + end.message();
  });
  CHECK(::rmdir(cgroup.folder.c_str()) == 0);
  CHECK_FALSE(report.killed);
  INFO(report.text);
  REQUIRE(report.text.starts_with(std::to_string(-ENOMEM) + " "));
  CHECK(report.text.find(cgroup.folder + " has only") != std::string::npos);
  const int ready_mib = std::stoi(report.text.substr(report.text.find(' ') + 1));
  CHECK(ready_mib >= 96);
  CHECK(ready_mib < 400);
}

}  // namespace
}  // namespace mlpo::test
