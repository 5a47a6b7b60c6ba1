// RESTOREs whose checkpoints do not answer, on a fake tier in virtual time: what they hold of the pool.
#include <algorithm>
#include <cerrno>
#include <deque>
#include <vector>

#include "tests/support/fake_tier.h"
//
#include "tests/support/catch.h"

using namespace mlpo;
using mlpo::test::FakeTier;

namespace {

constexpr uint64_t kBlock = 1024;  // elements
constexpr int64_t kS = 1'000'000'000;

Scheduler::Options MakeOptions(uint32_t buffers) {
  Scheduler::Options options;
  options.buffers = buffers;
  options.block_elements = kBlock;
  options.extents_offset_bytes = 4096;
  options.no_path_timeout_ns = 5 * kS;
  options.paths.resize(1);
  return options;
}

void TrainStep(FakeTier& tier, SessionId session, uint32_t epoch) {
  tier.RunUntilAnswered(tier.Grad(session, 1, epoch));
  const uint64_t update = tier.Update(session, 1, epoch);
  tier.RunUntilAnswered(update);
  CHECK(tier.status(update) == 0);
}

}  // namespace

// Checkpoints may be on something that never answers: an eighth of the pool waits for it, and as much again of the same
// user; the others train, and restore theirs.
TEST_CASE("Restore.WhatHangsLeavesOthersThePool") {
  constexpr SessionId kRanks = 8, kTrains = 9, kRestores = 10;
  constexpr uint64_t kMost = 64 / 8;
  FakeTier tier(MakeOptions(64), {{2e6, 2e6}});
  for (SessionId rank = 1; rank <= kRanks; ++rank) {
    tier.AddSession(rank, "hangs", 1);
    tier.AddSubgroup(rank, 1, {20 * kBlock});
    tier.AddSubgroup(rank, 2, {20 * kBlock});
  }
  tier.AddSession(kTrains, "trains", 2);
  tier.AddSubgroup(kTrains, 1, {100 * kBlock});
  tier.AddSession(kRestores, "restores", 3);
  tier.AddSubgroup(kRestores, 1, {20 * kBlock});
  tier.WriteState(kTrains, 1, MLPO_PART_STATE);
  TrainStep(tier, kTrains, 1);
  tier.RunUntilQuiet();
  const int64_t before_ns = tier.now_ns();
  TrainStep(tier, kTrains, 2);
  const int64_t alone_ns = tier.now_ns() - before_ns;
  tier.restore_time = [](const Block& block) {
    return block.owner->session->id <= kRanks ? int64_t{10'000} * kS : kS / 100;
  };
  const auto held = [&] {
    uint64_t working = 0;
    for (SessionId rank = 1; rank <= kRanks; ++rank) {
      for (const SubgroupId id : {1u, 2u}) {
        const Subgroup* const subgroup = tier.scheduler().FindSubgroup(rank, id);
        if (subgroup == nullptr) continue;  // its session has ended
        for (const Block& block : subgroup->blocks) working += block.state == BlockState::kWorking ? 1 : 0;
      }
    }
    return working;
  };
  for (SessionId rank = 1; rank <= kRanks; ++rank) {
    REQUIRE(tier.scheduler().BeginRestore(rank, 5));
    for (const SubgroupId id : {1u, 2u}) tier.Restore(rank, id, 5);
  }
  const int64_t begin_ns = tier.now_ns();
  TrainStep(tier, kTrains, 3);
  CHECK(tier.now_ns() - begin_ns < 10 * alone_ns);
  tier.Wait(kS);
  CHECK(held() == kMost);
  REQUIRE(tier.scheduler().BeginRestore(kRestores, 5));
  const uint64_t restore = tier.Restore(kRestores, 1, 5);
  tier.RunUntilAnswered(restore);
  CHECK(tier.status(restore) == 0);
  CHECK(tier.now_ns() - begin_ns < Scheduler::kStalledNs + 10 * kS);
  tier.Wait(3 * Scheduler::kStalledNs);
  CHECK(held() == 2 * kMost);
  const int64_t later_ns = tier.now_ns();
  TrainStep(tier, kTrains, 4);
  CHECK(tier.now_ns() - later_ns < 10 * alone_ns);
  // When they answer all are restored, those of a session that has ended left out.
  tier.EndSession(1);
  tier.restore_time = nullptr;
  tier.RunUntilQuiet();
  CHECK(held() == 0);
  CHECK(tier.gone(1));
  CHECK(tier.steps_restored == 2 * static_cast<int>(kRanks - 1) + 1);
  CHECK(tier.violation() == "");
  CHECK(tier.scheduler().idle());
}

// The checkpoints answer, but the path does not that one user's blocks are on their way to or from.
TEST_CASE("Restore.WhatWaitsForAPathThatHangsHoldsNobodyUpForLong") {
  constexpr SessionId kHangs = 1, kRestores = 2;
  Scheduler::Options options = MakeOptions(12);  // a restore may want one block
  options.paths.resize(2);
  FakeTier tier(options, {{2e6, 2e6}, {2e6, 2e6}});
  tier.AddSession(kHangs, "hangs", 1);
  tier.AddSubgroup(kHangs, 1, {100 * kBlock});
  tier.AddSession(kRestores, "restores", 2);
  tier.AddSubgroup(kRestores, 1, {20 * kBlock});
  tier.WriteState(kHangs, 1, MLPO_PART_STATE);
  for (uint32_t epoch = 1; epoch <= 2; ++epoch) TrainStep(tier, kHangs, epoch);
  const auto in_flight = [&] {
    const std::deque<Block>& blocks = tier.scheduler().FindSubgroup(kHangs, 1)->blocks;
    return std::count_if(blocks.begin(), blocks.end(), [](const Block& block) {
      return block.state == BlockState::kFlushing || block.state == BlockState::kFetching;
    });
  };
  REQUIRE(in_flight() > 0);
  tier.ChangeSpeed(0, tier.now_ns(), {0, 0});
  tier.Wait(kS);
  REQUIRE(in_flight() > 0);
  REQUIRE(tier.scheduler().BeginRestore(kHangs, 5));
  const uint64_t hangs = tier.Restore(kHangs, 1, 5);
  tier.Wait(20 * kS);  // until it has come to one of these
  REQUIRE(tier.scheduler().BeginRestore(kRestores, 5));
  const uint64_t restore = tier.Restore(kRestores, 1, 5);
  tier.Wait(Scheduler::kStalledNs + 10 * kS);
  CHECK(tier.status(restore) == 0);
  CHECK(!tier.answered(hangs));
  tier.ChangeSpeed(0, tier.now_ns(), {2e6, 2e6});
  tier.RunUntilQuiet();
  CHECK(tier.status(hangs) == 0);
  CHECK(tier.violation() == "");
}

// Who has one block that fails and others that hang gets no more for it.
TEST_CASE("Restore.WhatHangsOfOneThatFailedCounts") {
  FakeTier tier(MakeOptions(64), std::vector<FakeTier::PathSpeed>(1));
  for (SubgroupId id = 1; id <= 40; ++id) tier.AddSubgroup(1, id, {8 * kBlock});
  REQUIRE(tier.scheduler().BeginRestore(1, 5));
  tier.restore_time = [](const Block& block) { return block.index == 0 ? kS : int64_t{10'000} * kS; };
  tier.restore_fault = [](const Block& block) { return block.index == 0 ? EIO : 0; };
  for (SubgroupId id = 1; id <= 40; ++id) tier.Restore(1, id, 5);
  tier.Wait(1000 * kS);
  PoolSnapshot pool;
  tier.scheduler().Fill(&pool);
  CHECK(pool.free_blocks >= 64 - 8);
  tier.EndSession(1);
  tier.RunUntilQuiet();
  CHECK(tier.gone(1));
  CHECK(tier.violation() == "");
}
