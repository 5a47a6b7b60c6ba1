// What jobs and users may keep of the pool, on a fake tier: they keep no more between uses, others have the rest, and
// nothing is lost or waits.
#include <algorithm>

#include "tests/support/fake_tier.h"
//
#include "tests/support/catch.h"

using namespace mlpo;
using mlpo::test::FakeTier;

namespace {

constexpr uint64_t kBlock = 1024;
constexpr uint64_t kBlockBytes = 12 * kBlock;

Scheduler::Options MakeOptions(uint32_t buffers) {
  Scheduler::Options options;
  options.buffers = buffers;
  options.block_elements = kBlock;
  options.extents_offset_bytes = 4096;
  options.no_path_timeout_ns = 5'000'000'000;
  options.paths.resize(2);
  return options;
}

FakeTier MakeTier(const Scheduler::Options& options) {
  return FakeTier(options, std::vector<FakeTier::PathSpeed>(2, {1e9, 1e9}));
}

void Begin(FakeTier& tier, SessionId session, const std::string& job, uint64_t blocks) {
  tier.AddSession(session, job);
  tier.AddSubgroup(session, 1, {blocks * kBlock});
  tier.WriteState(session, 1, MLPO_PART_STATE);
  tier.RunUntilQuiet();
}

void Train(FakeTier& tier, SessionId session, uint32_t epoch) {
  tier.RunUntilAnswered(tier.Grad(session, 1, epoch));
  const uint64_t update = tier.Update(session, 1, epoch);
  tier.RunUntilAnswered(update);
  REQUIRE(tier.status(update) == 0);
}

// Blocks of a session that have a buffer, by looking at each; and what the scheduler counts for its job.
uint64_t Held(FakeTier& tier, SessionId session) {
  uint64_t held = 0;
  for (const Block& block : tier.scheduler().FindSubgroup(session, 1)->blocks) held += block.buffer != kNone;
  return held;
}
uint64_t Counted(FakeTier& tier, const std::string& job) {
  std::vector<PoolUseSnapshot> jobs;
  tier.scheduler().Fill(&jobs);
  for (const PoolUseSnapshot& use : jobs) {
    if (use.job == job) return use.blocks;
  }
  return 0;
}

}  // namespace

TEST_CASE("PoolQuota.AJobKeepsNoMoreAndOthersHaveTheRest") {
  for (const uint64_t quota : {1, 3, 10}) {
    CAPTURE(quota);
    Scheduler::Options options = MakeOptions(40);
    options.job_buffers = quota;
    FakeTier tier = MakeTier(options);
    Begin(tier, 1, "large", 60);
    CHECK(Held(tier, 1) <= quota);
    CHECK(Counted(tier, "large") == Held(tier, 1));
    Begin(tier, 2, "small", quota);
    for (uint32_t epoch = 1; epoch <= 4; ++epoch) {
      Train(tier, 1, epoch);
      Train(tier, 2, epoch);
      tier.RunUntilQuiet();
      CHECK(Held(tier, 1) <= quota);
      CHECK(Held(tier, 2) == quota);  // it keeps all that it has
    }
    PoolSnapshot pool;
    tier.scheduler().Fill(&pool);
    CHECK(pool.free_blocks == 40 - Held(tier, 1) - Held(tier, 2));
    CHECK(tier.updates() == 4 * (60 + quota));
    CHECK(tier.violation() == "");
  }
}

TEST_CASE("PoolQuota.AUsersIsThatOfAllItsJobs") {
  Scheduler::Options options = MakeOptions(40);
  options.user_buffers = 12;
  FakeTier tier = MakeTier(options);
  Begin(tier, 1, "a", 30);
  Begin(tier, 2, "b", 30);
  for (uint32_t epoch = 1; epoch <= 3; ++epoch) {
    for (const SessionId session : {1, 2}) Train(tier, session, epoch);
    tier.RunUntilQuiet();
    CHECK(Held(tier, 1) + Held(tier, 2) <= 12);
  }
  CHECK(Counted(tier, "a") + Counted(tier, "b") == Held(tier, 1) + Held(tier, 2));
  tier.EndSession(1);
  tier.RunUntilQuiet();
  CHECK(Counted(tier, "a") == 0);
  for (uint32_t epoch = 4; epoch <= 5; ++epoch) Train(tier, 2, epoch);
  tier.RunUntilQuiet();
  CHECK(Held(tier, 2) <= 12);
  CHECK(tier.violation() == "");
}

TEST_CASE("PoolQuota.WithoutOneTheWholePoolIsKept") {
  FakeTier tier = MakeTier(MakeOptions(40));
  Begin(tier, 1, "a", 60);
  Train(tier, 1, 1);
  tier.RunUntilQuiet();
  CHECK(Held(tier, 1) >= 30);
  CHECK(Counted(tier, "a") == Held(tier, 1));
}

TEST_CASE("PoolQuota.OfObjects") {
  Scheduler::Options options = MakeOptions(40);
  options.job_buffers = 5;
  FakeTier tier = MakeTier(options);
  tier.AddSession(1, "a");
  const uint64_t bytes = 30 * kBlockBytes + 100;
  const uint64_t commit = tier.Flush(1, 1, "object", bytes, kBlockBytes / 2);
  tier.RunUntilAnswered(commit);
  REQUIRE(tier.status(commit) == 0);
  tier.RunUntilQuiet();
  CHECK(Counted(tier, "a") <= 5);
  tier.Open(1, MLPO_OP_FETCH, 2, "object");
  for (uint64_t at = 0; at < bytes; at += kBlockBytes / 2) {
    const uint64_t read = tier.Piece(1, MLPO_OP_FETCH, 2, at, std::min(kBlockBytes / 2, bytes - at));
    tier.RunUntilAnswered(read);
    CHECK(tier.status(read) == 0);
  }
  tier.RunUntilQuiet();
  CHECK(Counted(tier, "a") <= 5);
  tier.EndSession(1);
  tier.RunUntilQuiet();
  PoolSnapshot pool;
  tier.scheduler().Fill(&pool);
  CHECK(pool.free_blocks == 40);
  CHECK(tier.violation() == "");
}
