// Reading the cgroup's CPU quota, in trees made for the test.
#include "daemon/adam/cpu_quota.h"

#include <filesystem>
#include <fstream>

#include "tests/support/catch.h"
#include "tests/support/scratch_dir.h"

namespace mlpo::testing {
namespace {

class Tree {
 public:
  void Put(const std::string& path, const std::string& text) {
    const std::filesystem::path file = root() + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream out(file);
    out << text;
    out.flush();
    REQUIRE(out.good());
  }
  std::string root() const { return dir_.path(); }

 private:
  ScratchDir dir_;
};

constexpr char kV2Mount[] = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";

TEST_CASE("CpuQuota.NoCgroupIsNoLimit", "[adam]") {
  const Tree tree;
  CHECK(!ReadCpuQuota(tree.root()));
}

TEST_CASE("CpuQuota.V2TakesTheTightestOnTheWayUp", "[adam]") {
  Tree tree;
  tree.Put("/proc/self/mountinfo", kV2Mount);
  tree.Put("/proc/self/cgroup", "0::/job.slice/rank.scope\n");
  tree.Put("/sys/fs/cgroup/job.slice/rank.scope/cpu.max", "max 100000\n");
  CHECK(!ReadCpuQuota(tree.root()));
  tree.Put("/sys/fs/cgroup/job.slice/cpu.max", "250000 100000\n");
  CHECK(ReadCpuQuota(tree.root()) == 2.5);
  tree.Put("/sys/fs/cgroup/job.slice/rank.scope/cpu.max", "400000 100000\n");
  CHECK(ReadCpuQuota(tree.root()) == 2.5);
  tree.Put("/sys/fs/cgroup/job.slice/rank.scope/cpu.max", "50000 50000\n");
  CHECK(ReadCpuQuota(tree.root()) == 1.0);
}

TEST_CASE("CpuQuota.V2InsideAContainerReadsTheMountedRoot", "[adam]") {
  Tree tree;
  tree.Put("/proc/self/mountinfo", kV2Mount);
  tree.Put("/proc/self/cgroup", "0::/\n");
  tree.Put("/sys/fs/cgroup/cpu.max", "300000 100000\n");
  CHECK(ReadCpuQuota(tree.root()) == 3.0);
}

TEST_CASE("CpuQuota.V1ReadsTheCpuControllerOnly", "[adam]") {
  Tree tree;
  tree.Put("/proc/self/mountinfo",
           "33 23 0:30 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
           "34 23 0:31 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n");
  tree.Put("/proc/self/cgroup", "4:cpuset:/other\n3:cpu,cpuacct:/job\n0::/\n");
  tree.Put("/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "-1\n");
  tree.Put("/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000\n");
  CHECK(!ReadCpuQuota(tree.root()));
  tree.Put("/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "150000\n");
  CHECK(ReadCpuQuota(tree.root()) == 1.5);
}

TEST_CASE("CpuQuota.V1WithAPartMountedFindsItsPlaceBelowIt", "[adam]") {
  Tree tree;
  tree.Put("/proc/self/mountinfo", "34 23 0:31 /docker/abc /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu\n");
  tree.Put("/proc/self/cgroup", "3:cpu:/docker/abc/inner\n");
  tree.Put("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "800000\n");
  tree.Put("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  CHECK(ReadCpuQuota(tree.root()) == 8.0);
  tree.Put("/sys/fs/cgroup/cpu/inner/cpu.cfs_quota_us", "200000\n");
  tree.Put("/sys/fs/cgroup/cpu/inner/cpu.cfs_period_us", "100000\n");
  CHECK(ReadCpuQuota(tree.root()) == 2.0);
}

TEST_CASE("CpuQuota.WhatIsNotANumberIsNoLimit", "[adam]") {
  Tree tree;
  tree.Put("/proc/self/mountinfo", std::string("rubbish\n") + kV2Mount);
  tree.Put("/proc/self/cgroup", "rubbish\n0::/a\n");
  tree.Put("/sys/fs/cgroup/a/cpu.max", "lots\n");
  CHECK(!ReadCpuQuota(tree.root()));
}

}  // namespace
}  // namespace mlpo::testing
