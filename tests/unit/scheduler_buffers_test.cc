// Which buffer is taken, and a pool that grows while the scheduler works with it.
#include <set>
#include <vector>

#include "daemon/scheduler/free_buffers.h"
#include "tests/support/catch.h"
#include "tests/support/fake_tier.h"

namespace mlpo::test {
namespace {

constexpr uint64_t kBlock = 4096;

Scheduler::Options TwoPathsOnTwoNodes(uint32_t buffers) {
  Scheduler::Options options;
  options.buffers = buffers;
  options.buffers_node = 0;
  options.block_elements = kBlock;
  options.extents_offset_bytes = 4096;
  options.no_path_timeout_ns = 5'000'000'000;
  options.paths.resize(2);
  options.path_nodes = {0, 1};
  return options;
}

void TrainStep(FakeTier& tier, uint32_t epoch) {
  tier.RunUntilAnswered(tier.Grad(1, 1, epoch));
  const uint64_t update = tier.Update(1, 1, epoch);
  tier.RunUntilAnswered(update);
  REQUIRE(tier.status(update) == 0);
}

}  // namespace

TEST_CASE("FreeBuffers.OwnNodeFirstThenWhereMostAreFree") {
  FreeBuffers free;
  free.Add(0, 2, 0);
  free.Add(10, 5, 1);  // numbers need not be without gaps
  free.Add(20, 3, 4);
  CHECK(free.size() == 10);
  CHECK(free.added() == 10);
  CHECK(free.NodeOf(1) == 0);
  CHECK(free.NodeOf(14) == 1);
  CHECK(free.NodeOf(22) == 4);
  CHECK(free.NodeOf(free.Take(4)) == 4);
  CHECK(free.NodeOf(free.Take(0)) == 0);
  CHECK(free.NodeOf(free.Take(0)) == 0);
  CHECK(free.NodeOf(free.Take(0)) == 1);   // none left on 0: node 1 has 5, node 4 has 2
  CHECK(free.NodeOf(free.Take(-1)) == 1);  // not known where
  CHECK(free.NodeOf(free.Take(7)) == 1);   // no buffer has ever been there
  std::set<BufferIndex> rest;
  while (!free.empty()) rest.insert(free.Take(-1));
  CHECK(rest.size() == 4);
  free.Give(0);
  CHECK(free.Take(4) == 0);
  CHECK(free.empty());
}

TEST_CASE("FreeBuffers.OneNodeIsAStack") {
  FreeBuffers free;
  free.Add(0, 3, -1);
  CHECK(free.Take(-1) == 0);
  CHECK(free.Take(0) == 1);
  free.Give(0);
  CHECK(free.Take(-1) == 0);  // the last one given may still be in a cache
}

TEST_CASE("Scheduler.AFetchTakesABufferOnItsPathsNode") {
  FakeTier tier(TwoPathsOnTwoNodes(3), std::vector<FakeTier::PathSpeed>(2));
  tier.AddSubgroup(1, 1, {60 * kBlock});
  tier.WriteState(1, 1, MLPO_PART_STATE);
  tier.RunUntilQuiet();
  tier.AddBuffers(40, 0);
  tier.AddBuffers(40, 1);
  size_t reads[2] = {}, elsewhere = 0;
  tier.on_transfer = [&](const Transfer& transfer) {
    if (transfer.direction != Direction::kRead) return;
    ++reads[transfer.path];
    elsewhere += (transfer.buffer < 43 ? 0u : 1u) != transfer.path;
  };
  TrainStep(tier, 1);  // reads some 30 blocks of each path into free buffers
  CHECK(reads[0] >= 25);
  CHECK(reads[1] >= 25);
  CHECK(elsewhere == 0);
  CHECK(tier.violation() == "");
}

TEST_CASE("Scheduler.ThePoolGrowsWhileItWorks") {
  FakeTier tier(TwoPathsOnTwoNodes(3), std::vector<FakeTier::PathSpeed>(2));
  tier.AddSubgroup(1, 1, {60 * kBlock});
  tier.WriteState(1, 1, MLPO_PART_STATE);
  tier.RunUntilQuiet();
  TrainStep(tier, 1);
  const uint64_t small = tier.counts(0).reads + tier.counts(1).reads;
  CHECK(small >= 57);
  // In the middle of a step: some of its blocks wait for a buffer.
  tier.RunUntilAnswered(tier.Grad(1, 1, 2));
  const uint64_t update = tier.Update(1, 1, 2);
  for (int i = 0; i < 10; ++i) tier.Step();
  REQUIRE_FALSE(tier.answered(update));
  std::set<BufferIndex> used;
  tier.on_transfer = [&](const Transfer& transfer) { used.insert(transfer.buffer); };
  tier.AddBuffers(30, 0);
  tier.AddBuffers(40, 1);
  tier.RunUntilAnswered(update);
  CHECK(tier.status(update) == 0);
  CHECK(*used.rbegin() >= 3);
  // All of it fits now: a further step reads what the small pool had to drop, the ones after it nothing.
  for (uint32_t epoch = 3; epoch <= 4; ++epoch) TrainStep(tier, epoch);
  tier.RunUntilQuiet();
  const uint64_t before = tier.counts(0).reads + tier.counts(1).reads;
  TrainStep(tier, 5);
  CHECK(tier.counts(0).reads + tier.counts(1).reads == before);
  PoolSnapshot pool;
  tier.scheduler().Fill(&pool);
  CHECK(pool.buffers == 73);
  CHECK(pool.cached_blocks + pool.free_blocks == 73);
  CHECK(tier.violation() == "");
}

}  // namespace mlpo::test
