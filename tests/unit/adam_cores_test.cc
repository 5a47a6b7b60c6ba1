// Where workers go on machines that are not here: hwloc's synthetic topologies, masks, quotas, odd nodes.
#include "daemon/adam/cores.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "tests/support/catch.h"

namespace mlpo::testing {
namespace {

Cores Machine(const std::string& description, const std::string& cpus = "") {
  Result<Cores> cores = Cores::Synthetic(description, cpus);
  INFO(cores.status().message());
  REQUIRE(cores.ok());
  return std::move(*cores);
}

std::set<int> CpusOf(const Cores::CpuSet& set) {
  std::set<int> cpus;
  for (int cpu = -1; (cpu = hwloc_bitmap_next(set.get(), cpu)) != -1;) cpus.insert(cpu);
  return cpus;
}

std::vector<uint32_t> Split(const Cores& cores, const WorkerWishes& wishes = {}) {
  std::vector<uint32_t> of_groups;
  for (const Cores::Group& group : cores.Groups()) of_groups.push_back(group.cores);
  return SplitWorkers(of_groups, wishes);
}

using Workers = std::vector<uint32_t>;
constexpr char kBigNode[] = "node:2 core:50 pu:2";  // 8 GPUs, 2 NUMA nodes, 100 cores

TEST_CASE("Cores.ABigNodeHasTwoGroupsWithTheirOwnCpus", "[adam]") {
  const Cores cores = Machine(kBigNode);
  CHECK(cores.count() == 100);
  const std::vector<NumaNode> nodes = cores.Nodes();
  REQUIRE(nodes.size() == 2);
  const std::vector<Cores::Group> groups = cores.Groups();
  REQUIRE(groups.size() == 2);
  for (int i = 0; i < 2; ++i) {
    CHECK(nodes[i].id == i);
    CHECK(nodes[i].memory);
    CHECK(nodes[i].cpus.size() == 100);
    CHECK(nodes[i].cpus.front() == 100 * i);
    CHECK(groups[i].nodes == std::vector<int>{i});
    CHECK(groups[i].cores == 50);
    // A core each, with both hardware threads, all different, all of the node.
    std::set<int> seen;
    for (const Cores::CpuSet& set : cores.Spread(groups[i], 16)) {
      const std::set<int> cpus = CpusOf(set);
      CHECK(cpus.size() == 2);
      CHECK(*cpus.begin() / 100 == i);
      seen.insert(cpus.begin(), cpus.end());
    }
    CHECK(seen.size() == 32);
    // More workers than cores share them evenly.
    std::vector<int> used(200);
    for (const Cores::CpuSet& set : cores.Spread(groups[i], 100))
      for (const int cpu : CpusOf(set)) ++used[cpu];
    CHECK(std::all_of(used.begin() + 100 * i, used.begin() + 100 * (i + 1), [](int n) { return n >= 1 && n <= 2; }));
  }
}

TEST_CASE("Cores.TheAffinityMaskDecidesWhoWorks", "[adam]") {
  {
    const Cores cores = Machine(kBigNode, "0-19,100-103");  // 10 cores and 2
    const std::vector<Cores::Group> groups = cores.Groups();
    REQUIRE(groups.size() == 2);
    CHECK(groups[0].cores == 10);
    CHECK(groups[1].cores == 2);
    CHECK(Split(cores) == Workers{10, 2});
    for (const Cores::CpuSet& set : cores.Spread(groups[1], 2)) {
      for (const int cpu : CpusOf(set)) CHECK((cpu >= 100 && cpu <= 103));
    }
  }
  {
    // Nothing of node 1: its memory is somebody's all the same.
    const Cores cores = Machine(kBigNode, "0-19");
    const std::vector<NumaNode> nodes = cores.Nodes();
    REQUIRE(nodes.size() == 2);
    CHECK(nodes[1].memory);
    CHECK(nodes[1].cpus.empty());
    const std::vector<Cores::Group> groups = cores.Groups();
    REQUIRE(groups.size() == 1);
    CHECK(groups[0].nodes == std::vector<int>{0, 1});
    CHECK(groups[0].cores == 10);
  }
  {
    const Cores cores = Machine(kBigNode, "7");  // one hardware thread
    CHECK(cores.count() == 1);
    CHECK(Split(cores) == Workers{1});
  }
}

TEST_CASE("Cores.CpusThatAreOfflineCountForNothing", "[adam]") {
  const Cores cores = Machine("node:2 core:4 pu:1", "2-5,90-99");  // the mask has what the machine no longer has
  CHECK(cores.count() == 4);
  CHECK(Split(cores) == Workers{2, 2});
}

TEST_CASE("Cores.NodesWithoutMemoryAreNoPlaceForThePool", "[adam]") {
  const Cores cores = Machine("pack:2 [numa(memory=0)] core:4 pu:1");
  const std::vector<NumaNode> nodes = cores.Nodes();
  REQUIRE(nodes.size() == 2);
  CHECK_FALSE(nodes[0].memory);
  CHECK_FALSE(nodes[1].memory);
  CHECK(Split(cores) == Workers{4, 4});
}

TEST_CASE("Cores.TwoKindsOfMemoryNearTheSameCoresAreOneGroup", "[adam]") {
  const Cores cores = Machine("pack:2 [numa(memory=256GB)] [numa(memory=64GB)] core:8 pu:1");  // DRAM and HBM
  CHECK(cores.Nodes().size() == 4);
  const std::vector<Cores::Group> groups = cores.Groups();
  REQUIRE(groups.size() == 2);
  for (const Cores::Group& group : groups) {
    CHECK(group.nodes.size() == 2);
    CHECK(group.cores == 8);
  }
  CHECK(Split(cores) == Workers{8, 8});
}

TEST_CASE("Cores.AMachineOfOneNode", "[adam]") {
  const Cores cores = Machine("core:2 pu:1");
  CHECK(cores.Nodes().size() == 1);
  CHECK(cores.Groups().size() == 1);
  CHECK(Split(cores) == Workers{2});
}

TEST_CASE("SplitWorkers.WhatThePathsNeedWithHalfAsMuchAgain", "[adam]") {
  const Workers two{50, 50};
  WorkerWishes wishes;
  CHECK(SplitWorkers(two, wishes) == Workers{16, 16});  // not known
  wishes.parameters_per_s = 1;
  CHECK(SplitWorkers(two, wishes) == Workers{4, 4});  // the fewest
  wishes.parameters_per_s = 2.4e9;                    // 8 workers' worth, and half as much: 12
  CHECK(SplitWorkers(two, wishes) == Workers{6, 6});
  wishes.parameters_per_s = 1e12;
  CHECK(SplitWorkers(two, wishes) == Workers{16, 16});  // the most
  CHECK(SplitWorkers({50, 3}, wishes) == Workers{16, 3});
}

TEST_CASE("SplitWorkers.WithinTheQuota", "[adam]") {
  for (const double quota : {0.5, 1.0, 1.9, 7.0, 12.5, 1e9}) {
    WorkerWishes wishes;
    wishes.cpu_quota = quota;
    const Workers split = SplitWorkers({50, 50}, wishes);
    const uint32_t all = std::accumulate(split.begin(), split.end(), 0u);
    INFO("quota " << quota);
    CHECK(all == std::clamp<uint32_t>(static_cast<uint32_t>(std::min(quota, 32.0)), 1, 32));
    CHECK(*std::max_element(split.begin(), split.end()) - *std::min_element(split.begin(), split.end()) <= 1);
  }
  // A group of its own that is small is not made smaller before the large one.
  WorkerWishes wishes;
  wishes.cpu_quota = 6;
  CHECK(SplitWorkers({16, 2}, wishes) == Workers{4, 2});
}

TEST_CASE("SplitWorkers.ANumberThatIsAskedForIsSplitByCores", "[adam]") {
  WorkerWishes wishes;
  wishes.workers = 6;
  CHECK(SplitWorkers({10, 5}, wishes) == Workers{4, 2});
  wishes.workers = 1;
  CHECK(SplitWorkers({5, 10}, wishes) == Workers{0, 1});
  wishes.workers = 40;  // more than there are cores
  const Workers many = SplitWorkers({4, 4}, wishes);
  CHECK(many == Workers{20, 20});
  wishes.cpu_quota = 2;  // is the user's to know
  CHECK(SplitWorkers({4, 4}, wishes) == Workers{20, 20});
}

TEST_CASE("Cores.NoTopologyIsAnError", "[adam]") {
  CHECK(Cores::Synthetic("nonsense:2", "").status().code() == -EINVAL);
  CHECK(Cores::Synthetic("core:2", "no list").status().code() == -EINVAL);
}

}  // namespace
}  // namespace mlpo::testing
