// Plans against closed forms worked out by hand: the testbed's bounds (tests/bench/README.md), a large model, paths
// that are full, slow writers, several nodes; and flags, right and wrong.
#include "daemon/plan.h"

#include <string>
#include <utility>
#include <vector>

#include "daemon/plan_request.h"
#include "tests/support/catch.h"

using namespace mlpo;

namespace {

constexpr double kBlock = 12 * 1024 * 1024;  // bytes of 1 Mi parameters
constexpr uint64_t kMiB = 1u << 20;

PlanPath PathOf(const std::string& text, uint32_t nodes = 1) {
  Result<PlanPath> path = ParsePlanPath(text, nodes);
  INFO(text << ": " << path.status().message());
  REQUIRE(path.ok());
  return *path;
}

// 256 blocks.
PlanRequest Testbed(uint64_t pool_bytes, const std::vector<std::string>& paths) {
  PlanRequest request;
  request.parameters = 256 * kMiB;
  request.pool_bytes = pool_bytes;
  for (const std::string& path : paths) request.paths.push_back(PathOf(path));
  return request;
}

std::vector<const Finding*> FindingsOf(const Plan& plan, const std::string& check) {
  std::vector<const Finding*> found;
  for (const Finding& finding : plan.findings)
    if (finding.check == check) found.push_back(&finding);
  return found;
}
bool HasOne(const Plan& plan, const std::string& check, Level level, const std::string& path = "") {
  const std::vector<const Finding*> found = FindingsOf(plan, check);
  return found.size() == 1 && found[0]->level == level && found[0]->path == path && !found[0]->advice.empty();
}

Result<PlanRequest> Parse(std::vector<std::string> arguments) {
  std::string output;
  return ParsePlanRequest(arguments, &output);
}
// What is needed, and these.
Result<PlanRequest> ParseWith(std::vector<std::string> more) {
  more.insert(more.end(), {"--params", "1B", "--path", "p=1", "--memory", "1GiB"});
  return Parse(std::move(more));
}

const char* const kNvme = "nvme=345/265MB/s,duplex=full";
const char* const kPfs = "pfs=180MB/s,duplex=full";

}  // namespace

TEST_CASE("Plan.TheTestbedsBounds") {
  // Stock writes gradient, master parameter and both moments in FP32 to nvme alone.
  const double stock_s = 16.0 * 256 * kMiB / 265e6;

  const Plan alone = MakePlan(Testbed(200 * kMiB, {kNvme}));
  CHECK(alone.buffers == 16);
  CHECK(alone.bytes == 240 * kBlock);
  CHECK(alone.transfer_s == Approx(240 * kBlock / 265e6));
  CHECK(stock_s / alone.transfer_s == Approx(1.42).epsilon(0.003));
  CHECK(std::string(alone.paths[0].limit) == "writing");

  const Plan both = MakePlan(Testbed(200 * kMiB, {kNvme, kPfs}));
  CHECK(both.transfer_s == Approx(240 * kBlock / (265e6 + 180e6)));
  CHECK(stock_s / both.transfer_s == Approx(2.39).epsilon(0.003));
  CHECK(both.paths[0].share == Approx(265.0 / 445));
  CHECK(both.paths[1].share == Approx(180.0 / 445));
  CHECK(both.paths[0].time_s == Approx(both.paths[1].time_s));  // neither waits for the other

  const Plan quarter = MakePlan(Testbed(64 * 12 * kMiB, {kNvme, kPfs}));
  CHECK(quarter.cached_share == 0.25);
  CHECK(quarter.transfer_s == Approx(192 * kBlock / 445e6));
  CHECK(stock_s / quarter.transfer_s == Approx(2.98).epsilon(0.003));
  CHECK(quarter.ideal_s == quarter.transfer_s);
  CHECK(quarter.findings.empty());
}

TEST_CASE("Plan.DirectionsThatHinderEachOther") {
  const double half = 1 / (1 / 345e6 + 1 / 265e6);
  const Plan shared = MakePlan(Testbed(200 * kMiB, {"nvme=345/265MB/s", kPfs}));  // half duplex if nothing is said
  CHECK(shared.paths[0].worth_bytes_per_s == Approx(half));
  CHECK(std::string(shared.paths[0].limit) == "both");
  CHECK(shared.transfer_s == Approx(240 * kBlock / (half + 180e6)));
  const Plan mixed = MakePlan(Testbed(200 * kMiB, {"nvme=345/265MB/s,duplex=2"}));
  CHECK(mixed.transfer_s == Approx(240 * kBlock / (half / 2)));
  // One reads fast, the other writes fast: each is worth its slower direction.
  const Plan crossed = MakePlan(Testbed(200 * kMiB, {"a=337.5/120MB/s,duplex=full", "b=173/343MB/s,duplex=0.5"}));
  CHECK(crossed.transfer_s == Approx(240 * kBlock / (120e6 + 173e6)));
  CHECK(std::string(crossed.paths[0].limit) == "writing");
  CHECK(std::string(crossed.paths[1].limit) == "reading");
}

TEST_CASE("Plan.SeventyBillionOnFourRanks") {
  Result<PlanRequest> request = Parse(
      {"--params", "70B", "--ranks", "4", "--path", "nvme=6.9/5.3GB/s", "--path", "pfs=3.6", "--memory", "400GiB"});
  INFO(request.status().message());
  REQUIRE(request.ok());
  const Plan plan = MakePlan(*request);
  CHECK(plan.parameters == 70'000'000'000);
  CHECK(plan.blocks == 4 * 16690);  // 17.5e9 / 1048576 = 16689.3 of each rank
  CHECK(plan.buffers == 34133);     // 400 GiB / 12 MiB = 34133.3
  CHECK(plan.state_bytes == 66760ull * 12582912);
  CHECK(plan.arena_bytes == Approx(140e9));  // a slot of 2 bytes a parameter, for gradient and parameter
  const double worth = 1 / (1 / 6.9e9 + 1 / 5.3e9) + 1.8e9;
  CHECK(plan.transfer_s == Approx((66760 - 34133) * kBlock / worth));
  CHECK(plan.transfer_s == Approx(85.57).epsilon(0.001));
  CHECK(plan.workers == 4);  // 0.4e9 parameters a second and half as much again take 2; there are at least 4
  CHECK(plan.adam_s == Approx(70e9 / (4 * 0.3e9)));
  CHECK(plan.ideal_s == plan.transfer_s);
  CHECK(plan.findings.empty());
}

TEST_CASE("Plan.AllInMemoryTakesAsLongAsAdam") {
  PlanRequest request = Testbed(260 * 12 * kMiB, {kNvme});
  request.workers = 2;
  const Plan plan = MakePlan(request);
  CHECK(plan.cached_share == 1);
  CHECK(plan.bytes == 0);
  CHECK(plan.transfer_s == 0);
  CHECK(plan.ideal_s == Approx(256 * 1048576 / 0.6e9));
  CHECK(plan.paths[0].share == 1);
  CHECK(plan.findings.empty());
  request.pool_bytes *= 2;
  CHECK(HasOne(MakePlan(request), "pool", Level::kWarning));
}

TEST_CASE("Plan.AdamThatIsSlowerThanThePaths") {
  PlanRequest request = Testbed(64 * 12 * kMiB, {"a=10GB/s,duplex=full"});
  request.workers = 1;
  const Plan plan = MakePlan(request);
  CHECK(plan.transfer_s == Approx(192 * kBlock / 10e9));  // 0.24 s
  CHECK(plan.ideal_s == Approx(256 * 1048576 / 0.3e9));   // 0.89 s
  REQUIRE(HasOne(plan, "adam", Level::kWarning));
  CHECK(FindingsOf(plan, "adam")[0]->advice.find("workers to 4,") != std::string::npos);
  // As many as are proposed are enough.
  request.workers = 4;
  CHECK(MakePlan(request).findings.empty());
}

TEST_CASE("Plan.APathThatIsTooSmallIsFilledAndTheOthersTakeTheRest") {
  PlanRequest request = Testbed(64 * 12 * kMiB, {"a=1GB/s,duplex=full,capacity=580MiB", "b=1GB/s,duplex=full"});
  const Plan plan = MakePlan(request);  // 580 MiB are 48 blocks
  CHECK(plan.paths[0].bytes == 48 * kBlock);
  CHECK(plan.paths[1].bytes == 144 * kBlock);
  CHECK(plan.transfer_s == Approx(144 * kBlock / 1e9));
  CHECK(plan.paths[0].state_bytes == 48 * kBlock);
  CHECK(plan.paths[0].reserve_bytes == 48 * kBlock);
  CHECK(plan.paths[1].state_bytes == 208 * kBlock);
  CHECK(plan.paths[1].reserve_bytes == 260 * kBlock);
  CHECK(HasOne(plan, "path", Level::kWarning, "a"));
  CHECK(FindingsOf(plan, "space").empty());  // of b nothing is known

  request.paths[1].speeds.capacity_bytes = 300 * 12 * kMiB;
  CHECK(HasOne(MakePlan(request), "space", Level::kWarning));  // no room for a checkpoint
  request.paths[1].speeds.capacity_bytes = 464 * 12 * kMiB;    // 512 blocks together
  CHECK(FindingsOf(MakePlan(request), "space").empty());
  request.paths[1].speeds.capacity_bytes = 207 * 12 * kMiB;  // 255
  CHECK(HasOne(MakePlan(request), "space", Level::kError));
}

TEST_CASE("Plan.WhatADriveMayBeWritten") {
  // 43.2 TB a day are 0.5 GB/s.
  PlanRequest request = Testbed(64 * 12 * kMiB, {"a=1GB/s,duplex=full,write_budget=43.2TB/day,rated=1PB"});
  const Plan plan = MakePlan(request);
  CHECK(plan.paths[0].worth_bytes_per_s == Approx(0.5e9));
  CHECK(std::string(plan.paths[0].limit) == "writing");
  CHECK(plan.paths[0].steps_to_rating == Approx(1e15 / (192 * kBlock)));
  CHECK(plan.paths[0].days_to_rating == Approx(1e15 / 0.5e9 / 86400));  // 23
  REQUIRE(HasOne(plan, "wear", Level::kWarning, "a"));
  CHECK(FindingsOf(plan, "wear")[0]->advice.find("\"2739GB/day\"") != std::string::npos);  // 1 PB / 365
  request.paths[0].rated_bytes *= 1000;
  CHECK(MakePlan(request).findings.empty());
}

TEST_CASE("Plan.APathThatIsHardlyWorthIt") {
  const Plan plan = MakePlan(Testbed(64 * 12 * kMiB, {"a=9.9GB/s,duplex=full", "b=100MB/s,duplex=full"}));
  CHECK(HasOne(plan, "path", Level::kWarning, "b"));  // 1 %
}

TEST_CASE("Plan.ArenasByTypesOfGradientAndParameter") {
  PlanRequest request = Testbed(64 * 12 * kMiB, {kNvme});
  const auto bytes_each = [&](mlpo_dtype dtype, mlpo_dtype grad) {
    request.dtype = dtype;
    request.grad_dtype = grad;
    return static_cast<double>(MakePlan(request).arena_bytes) / static_cast<double>(request.parameters);
  };
  // Types of one size share their place.
  CHECK(bytes_each(MLPO_BFLOAT16, MLPO_BFLOAT16) == Approx(2));
  CHECK(bytes_each(MLPO_FLOAT32, MLPO_FLOAT32) == Approx(4));
  CHECK(bytes_each(MLPO_BFLOAT16, MLPO_FLOAT32) == Approx(6));
}

TEST_CASE("Plan.MemoryOfTheNode") {
  PlanRequest request = Testbed(0, {kNvme, kPfs});  // arenas take 512 MiB
  request.node_memory_bytes = 4096 * kMiB;
  const Plan fits = MakePlan(request);
  CHECK(fits.pool_bytes == 1024 * kMiB);
  CHECK(fits.findings.empty());
  request.pool_bytes = 3200 * kMiB;  // 896 are left, of which half are too few
  CHECK(HasOne(MakePlan(request), "arenas", Level::kWarning));
  request.arenas_bytes = 513 * kMiB;
  CHECK(MakePlan(request).findings.empty());
  request.arenas_bytes = 512 * kMiB;  // there is a header, too
  CHECK(HasOne(MakePlan(request), "arenas", Level::kError));
  request.arenas_bytes = 0;
  request.pool_bytes = 3600 * kMiB;
  const Plan tight = MakePlan(request);
  CHECK(HasOne(tight, "memory", Level::kError));
  request.node_memory_bytes = 500 * kMiB;
  request.pool_bytes = 200 * kMiB;
  CHECK(HasOne(MakePlan(request), "memory", Level::kError));
}

TEST_CASE("Plan.PoolsOfAFewBlocks") {
  CHECK(HasOne(MakePlan(Testbed(35 * kMiB, {kNvme})), "pool", Level::kError));
  CHECK(HasOne(MakePlan(Testbed(36 * kMiB, {kNvme})), "pool", Level::kWarning));
  PlanRequest small = Testbed(36 * kMiB, {kNvme});
  small.block_elements = 1u << 16;  // 48 blocks of 768 KiB
  CHECK(FindingsOf(MakePlan(small), "pool").empty());
}

TEST_CASE("Plan.NodesHaveEqualPartsOfModelAndSharedPaths") {
  Result<PlanRequest> request =
      Parse({"--params", "40B", "--ranks", "16", "--nodes", "4", "--memory", "30GiB", "--path",
             "nvme=4GB/s,duplex=full", "--path", "pfs=8GB/s,duplex=full,share=equal"});
  INFO(request.status().message());
  REQUIRE(request.ok());
  const Plan plan = MakePlan(*request);
  CHECK(plan.parameters == 10'000'000'000);
  CHECK(plan.paths[0].share == Approx(4.0 / 6));
  CHECK(plan.paths[1].worth_bytes_per_s == Approx(2e9));
  // 4 ranks of 2.5e9: 2385 blocks each; 2560 stay.
  CHECK(plan.transfer_s == Approx((4 * 2385 - 2560) * kBlock / 6e9));
  CHECK(plan.arena_bytes == Approx(20e9));
}

TEST_CASE("Plan.SpeedsAsPeopleWriteThem") {
  const auto speeds = [](const std::string& text) {
    const PlanPath path = PathOf("p=" + text);
    return std::pair(path.speeds.read_bytes_per_s, path.speeds.write_bytes_per_s);
  };
  CHECK(speeds("6.9/5.3GB/s") == std::pair(6.9e9, 5.3e9));
  CHECK(speeds("6.9/5.3GB") == std::pair(6.9e9, 5.3e9));
  CHECK(speeds("6.9GB/s/5.3GB/s") == std::pair(6.9e9, 5.3e9));
  CHECK(speeds("6.9/5.3") == std::pair(6.9e9, 5.3e9));
  CHECK(speeds("3.6") == std::pair(3.6e9, 3.6e9));
  CHECK(speeds("345MB/s") == std::pair(345e6, 345e6));
  CHECK(speeds("345MB/s/0.265GB/s") == std::pair(345e6, 265e6));
  CHECK(speeds("2GiB/s") == std::pair(2147483648.0, 2147483648.0));
  CHECK(speeds("8/4,share=0.25") == std::pair(2e9, 1e9));
  CHECK(PathOf("p=8,share=equal", 4).speeds.read_bytes_per_s == 2e9);
  CHECK(PathOf("p=8").speeds.duplex == 1);
  CHECK(PathOf("p=8,duplex=full").speeds.duplex == 0.5);
  CHECK(PathOf("p=8,duplex=half").speeds.duplex == 1);
  CHECK(PathOf("p=8,duplex=1.5").speeds.duplex == 1.5);
  const PlanPath all = PathOf("nvme.0=6.9/5.3GB/s,capacity=7TB,write_budget=40TB/day,rated=7PB,duplex=0.7");
  CHECK(all.name == "nvme.0");
  CHECK(all.speeds.capacity_bytes == 7'000'000'000'000);
  CHECK(all.speeds.write_budget_bytes_per_s == Approx(40e12 / 86400));
  CHECK(all.rated_bytes == 7'000'000'000'000'000);
}

TEST_CASE("Plan.WrongPathsAreRefusedAndSayWhatIsAllowed") {
  const auto refused = [](const std::string& text, const std::string& says) {
    const Result<PlanPath> path = ParsePlanPath(text, 1);
    INFO(text << ": " << path.status().message());
    CHECK(path.status().code() == -EINVAL);
    CHECK(path.status().message().find(says) != std::string::npos);
    CHECK(path.status().message().find("--path") == 0);
  };
  refused("nvme", "NAME=READ");
  refused("/nvme0/scratch", "NAME=READ");
  refused("a/b=3", "name");
  refused("=3", "name");
  refused("p=", "READ[/WRITE]");
  refused("p=/5GB/s", "READ[/WRITE]");
  refused("p=1/2/3GB/s", "READ[/WRITE]");
  refused("p=1/GB/s", "no speed");
  refused("p=fast", "no speed");
  refused("p=-3", "no speed");
  refused("p=3e9", "no speed");
  refused("p=nan", "no speed");
  refused("p=0", "no speed");
  refused("p=3Gb/s", "no speed");
  refused("p=3GB/h", "no speed");
  refused("p=345000000", "would be GB/s");
  refused("p=6.9GB/5.3", "behind the last");
  refused("p=6,9GB/s", "KEY=VALUE");
  refused("p=3,duplex", "KEY=VALUE");
  refused("p=3,duplex=both", "duplex");
  refused("p=3,duplex=0.4", "0.5 to 2");
  refused("p=3,size=1TB", "capacity");
  refused("p=3,capacity=1XB", "GiB");
  refused("p=3,capacity=1TB,capacity=2TB", "twice");
  refused("p=3,share=0", "equal");
  refused("p=3,share=1.5", "equal");
  refused("p=3,rated=0", "above 0");
  refused("p=3,write_budget=40TB/week", "/day");
}

TEST_CASE("Plan.WrongFlagsAreRefusedAndSayWhatIsAllowed") {
  REQUIRE(ParseWith({}).ok());
  const auto refused = [](const Result<PlanRequest>& request, const std::string& says) {
    INFO(says << ": " << request.status().message());
    CHECK(request.status().code() == -EINVAL);
    CHECK(request.status().message().find(says) != std::string::npos);
  };
  refused(Parse({"--path", "p=1", "--memory", "1GiB"}), "--params");
  refused(Parse({"--params", "1B", "--memory", "1GiB"}), "--path");
  refused(Parse({"--params", "1B", "--path", "p=1"}), "--memory");
  refused(Parse({"--params", "70b", "--path", "p=1", "--memory", "1GiB"}), "70b");
  refused(Parse({"--params", "0", "--path", "p=1", "--memory", "1GiB"}), "--params");
  refused(Parse({"--params", "1B", "--path", "p=1", "--memory", "1Gib"}), "--memory");
  refused(Parse({"--params", "1B", "--path", "p=1", "--memory", "0"}), "--memory");
  refused(ParseWith({"--path", "p=2"}), "another path of that name");
  refused(ParseWith({"--ranks", "0"}), "ranks");
  refused(ParseWith({"--ranks", "6", "--nodes", "4"}), "--nodes");
  refused(ParseWith({"--ranks", "2000000000"}), "ranks");
  refused(ParseWith({"--dtype", "int8"}), "dtype");
  refused(ParseWith({"--block", "1000"}), "--block");
  refused(ParseWith({"--block", "1GiB"}), "--block");
  refused(ParseWith({"--workers", "0"}), "workers");
  refused(ParseWith({"--node-memory", "many"}), "--node-memory");
  refused(ParseWith({"--arenas", "half"}), "--arenas");
  refused(ParseWith({"--pool", "1GiB"}), "--pool");
  refused(ParseWith({"extra"}), "extra");
  Result<PlanRequest> all =
      ParseWith({"--block", "512Ki", "--dtype", "float32", "--workers", "9", "--node-memory", "1TB"});
  REQUIRE(all.ok());
  CHECK(all->block_elements == 524288);
  CHECK(all->dtype == MLPO_FLOAT32);
  CHECK(all->grad_dtype == MLPO_FLOAT32);
  CHECK(all->workers == 9);
  CHECK(all->node_memory_bytes == 1'000'000'000'000);
}

TEST_CASE("Plan.TheLargestThatIsAcceptedDoesNotOverflow") {
  Result<PlanRequest> request =
      Parse({"--params", "1000T", "--ranks", "1000000", "--path", "p=1000", "--memory", "1GiB", "--dtype", "float32"});
  INFO(request.status().message());
  REQUIRE(request.ok());
  const Plan plan = MakePlan(*request);
  CHECK(static_cast<double>(plan.state_bytes) == Approx(12e15).epsilon(0.01));
  CHECK(static_cast<double>(plan.arena_bytes) == Approx(4e15).epsilon(0.01));
  CHECK_FALSE(Parse({"--params", "1001T", "--path", "p=1", "--memory", "1GiB"}).ok());
}
