// AvailableMemoryUnder against trees of files as kernels write them.
#include "daemon/io/memory_limit.h"

#include <filesystem>
#include <fstream>
#include <string>

#include "daemon/io/buffer_pool.h"
#include "tests/support/catch.h"
#include "tests/unit/io_scratch.h"

namespace mlpo::test {
namespace {

constexpr uint64_t kMiB = 1 << 20;

class FakeRoot {
 public:
  explicit FakeRoot(uint64_t host_mib) {
    Write("/proc/meminfo", "MemTotal:       99999999 kB\nMemFree:  1 kB\nMemAvailable:   " +
                               std::to_string(host_mib * 1024) + " kB\nBuffers: 5 kB\n");
  }
  void Write(const std::string& name, const std::string& text) {
    const std::filesystem::path path = folder_.path() + name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }
  Result<uint64_t> Ask() { return AvailableMemoryUnder(folder_.path(), &what); }

  std::string what;

 private:
  ScratchFolder folder_;
};

constexpr char kV1Mounts[] =
    "22 27 0:21 / /proc rw - proc proc rw\n"
    "34 31 0:35 / /cg/cpu rw - cgroup cgroup rw,cpu\n"
    "35 31 0:32 / /cg/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n";
constexpr char kV2Mounts[] = "30 23 0:26 / /cg rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";

void V1Group(FakeRoot* root, const std::string& folder, uint64_t limit_mib, uint64_t usage_mib, uint64_t cache_mib) {
  root->Write(folder + "/memory.limit_in_bytes",
              (limit_mib == 0 ? "9223372036854771712" : std::to_string(limit_mib * kMiB)) + "\n");
  root->Write(folder + "/memory.usage_in_bytes", std::to_string(usage_mib * kMiB) + "\n");
  root->Write(folder + "/memory.stat", "cache 1\ninactive_file 7\ntotal_cache 3\ntotal_inactive_file " +
                                           std::to_string(cache_mib * kMiB) + "\ntotal_active_file 0\n");
}

void V2Group(FakeRoot* root, const std::string& folder, const std::string& max, const std::string& high,
             uint64_t usage_mib, uint64_t cache_mib) {
  root->Write(folder + "/memory.max", max + "\n");
  root->Write(folder + "/memory.high", high + "\n");
  root->Write(folder + "/memory.current", std::to_string(usage_mib * kMiB) + "\n");
  root->Write(folder + "/memory.stat",
              "anon 12\nfile 99\nactive_file " + std::to_string(cache_mib * kMiB) + "\ninactive_file 0\n");
}

TEST_CASE("MemoryLimit.WithoutCgroupsTheHostCounts") {
  FakeRoot root(1000);
  const Result<uint64_t> available = root.Ask();
  REQUIRE(available.ok());
  CHECK(available.value() == 1000 * kMiB);
  CHECK(root.what.find("MemAvailable") != std::string::npos);
}

TEST_CASE("MemoryLimit.V1GroupAndAncestors") {
  FakeRoot root(100'000);
  root.Write("/proc/self/mountinfo", kV1Mounts);
  root.Write("/proc/self/cgroup", "4:memory:/job/step\n3:cpuset:/\n0::/\n");
  V1Group(&root, "/cg/memory", 0, 50'000, 0);
  V1Group(&root, "/cg/memory/job", 4000, 1000, 0);
  SECTION("the group itself is the tighter one; page cache can be taken back") {
    V1Group(&root, "/cg/memory/job/step", 2000, 1500, 600);
    CHECK(root.Ask().value() == 1100 * kMiB);
    CHECK(root.what.find("/cg/memory/job/step") != std::string::npos);
  }
  SECTION("an ancestor is the tighter one") {
    V1Group(&root, "/cg/memory/job/step", 8000, 100, 0);
    CHECK(root.Ask().value() == 3000 * kMiB);
    CHECK(root.what.find("/cg/memory/job") != std::string::npos);
    CHECK(root.what.find("step") == std::string::npos);
  }
  SECTION("none of them limits: the host counts") {
    V1Group(&root, "/cg/memory/job", 0, 1000, 0);
    V1Group(&root, "/cg/memory/job/step", 0, 1000, 0);
    CHECK(root.Ask().value() == 100'000 * kMiB);
  }
  SECTION("more used than allowed leaves nothing, and does not wrap") {
    V1Group(&root, "/cg/memory/job/step", 1000, 1500, 0);
    CHECK(root.Ask().value() == 0);
  }
}

TEST_CASE("MemoryLimit.V2GroupAndAncestors") {
  FakeRoot root(100'000);
  root.Write("/proc/self/mountinfo", kV2Mounts);
  root.Write("/proc/self/cgroup", "0::/slice/unit\n");
  V2Group(&root, "/cg/slice", "max", "max", 1000, 0);
  SECTION("memory.max") {
    V2Group(&root, "/cg/slice/unit", std::to_string(3000 * kMiB), "max", 700, 200);
    CHECK(root.Ask().value() == 2500 * kMiB);
    CHECK(root.what.find("/cg/slice/unit") != std::string::npos);
  }
  SECTION("memory.high below memory.max") {
    V2Group(&root, "/cg/slice/unit", std::to_string(3000 * kMiB), std::to_string(2000 * kMiB), 700, 0);
    CHECK(root.Ask().value() == 1300 * kMiB);
  }
  SECTION("an ancestor") {
    V2Group(&root, "/cg/slice", std::to_string(1500 * kMiB), "max", 1000, 0);
    V2Group(&root, "/cg/slice/unit", "max", "max", 700, 0);
    CHECK(root.Ask().value() == 500 * kMiB);
  }
}

// A container sees its own group as the root of the mount; one in another namespace sees "/..".
TEST_CASE("MemoryLimit.GroupBelowTheMountsOwnRoot") {
  FakeRoot root(100'000);
  root.Write("/proc/self/mountinfo", "35 31 0:32 /docker/abc /cg\\040here/memory rw - cgroup cgroup rw,memory\n");
  V1Group(&root, "/cg here/memory", 500, 100, 0);
  SECTION("the same group") { root.Write("/proc/self/cgroup", "4:memory:/docker/abc\n"); }
  SECTION("outside of what is mounted") { root.Write("/proc/self/cgroup", "4:memory:/../other\n"); }
  SECTION("below it") {
    root.Write("/proc/self/cgroup", "4:memory:/docker/abc/in\n");
    V1Group(&root, "/cg here/memory/in", 450, 50, 0);
  }
  CHECK(root.Ask().value() == 400 * kMiB);
}

TEST_CASE("MemoryLimit.WhatCannotBeUnderstoodIsAnError") {
  FakeRoot root(100'000);
  root.Write("/proc/self/mountinfo", kV2Mounts);
  root.Write("/proc/self/cgroup", "0::/unit\n");
  SECTION("a limit that is no number") {
    V2Group(&root, "/cg/unit", "plenty", "max", 1, 0);
    const Result<uint64_t> available = root.Ask();
    REQUIRE_FALSE(available.ok());
    CHECK(available.status().message().find("/cg/unit/memory.max") != std::string::npos);
  }
  SECTION("no MemAvailable") {
    root.Write("/proc/meminfo", "MemTotal: 5 kB\n");
    CHECK_FALSE(root.Ask().ok());
  }
}

TEST_CASE("MemoryLimit.ThisMachineHasMemory") {
  std::string what;
  const Result<uint64_t> available = AvailableMemoryBytes(&what);
  INFO(available.status().message());
  REQUIRE(available.ok());
  const auto physical =
      static_cast<uint64_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  CHECK(available.value() > 0);
  CHECK(available.value() <= physical);
}

}  // namespace
}  // namespace mlpo::test
