// RESTORE on a fake tier: what state there is before, while and after it is filled, and when it fails.
#include <cerrno>
#include <utility>
#include <vector>

#include "tests/unit/scheduler_saves.h"

using namespace mlpo;
using namespace mlpo::test;

TEST_CASE("Restore.ReplacesStateWhereverItIsAndReadsNothing") {
  FakeTier tier(MakeOptions(6, 2), std::vector<FakeTier::PathSpeed>(2));
  for (SubgroupId id = 1; id <= 2; ++id) tier.AddSubgroup(1, id, {10 * kBlock});
  for (SubgroupId id = 1; id <= 2; ++id) tier.WriteState(1, id, MLPO_PART_STATE);
  TrainStep(tier, 1, 2, 1);
  tier.RunUntilQuiet();
  const uint64_t refused = tier.Restore(1, 1, 5);
  CHECK(tier.status(refused) == -EBADF);
  REQUIRE(tier.scheduler().BeginRestore(1, 5));
  CHECK(!tier.scheduler().BeginRestore(1, 5));
  const uint64_t reads = tier.counts(0).reads + tier.counts(1).reads;
  const uint64_t one = tier.Restore(1, 1, 5), two = tier.Restore(1, 2, 5);
  tier.RunUntilAnswered(one);
  tier.RunUntilAnswered(two);
  CHECK(tier.status(one) == 0);
  CHECK(tier.status(two) == 0);
  CHECK(tier.completion(one).value == 1);  // the epoch is the session's own
  CHECK(tier.counts(0).reads + tier.counts(1).reads == reads);
  CHECK(tier.steps_restored == 2);
  const uint64_t end = tier.Restore(1, 0, 5);
  CHECK(tier.status(end) == 0);
  CHECK(tier.restores_ended == std::vector<std::pair<SessionId, uint32_t>>{{1, 5}});
  TrainStep(tier, 1, 2, 2);
  tier.RunUntilQuiet();
  CHECK(tier.violation() == "");
  CHECK(tier.scheduler().idle());
}

TEST_CASE("Restore.OneThatFailsLeavesNoStateThatAnybodyCouldUse") {
  FakeTier tier(MakeOptions(6, 2), std::vector<FakeTier::PathSpeed>(2));
  tier.AddSubgroup(1, 1, {10 * kBlock});
  tier.WriteState(1, 1, MLPO_PART_STATE);
  TrainStep(tier, 1, 1, 1);
  REQUIRE(tier.scheduler().BeginRestore(1, 5));
  const auto status = [&](uint64_t request) {
    tier.RunUntilAnswered(request);
    return tier.status(request);
  };
  tier.RunUntilAnswered(tier.Grad(1, 1, 2));
  CHECK(status(tier.Restore(1, 1, 5)) == MLPO_E_SLOT_BUSY);
  CHECK(status(tier.Submit(1, MLPO_OP_DISCARD, 1, 0, 0, 0, 0)) == 0);
  tier.restore_fault = [](const Block& block) { return block.index == 4 ? EIO : 0; };
  const uint64_t failed = tier.Restore(1, 1, 5);
  CHECK(status(failed) == MLPO_E_IO);
  CHECK(tier.completion(failed).failure.block == 4);
  CHECK(status(tier.Submit(1, MLPO_OP_READ_STATE, 1, 0, MLPO_PART_STATE, 0, 10 * kBlock)) == MLPO_E_TORN);
  CHECK(status(tier.Grad(1, 1, 2)) == MLPO_E_TORN);
  CHECK(status(tier.Update(1, 1, 2)) == MLPO_E_TORN);
  tier.restore_fault = nullptr;
  CHECK(status(tier.Restore(1, 1, 5)) == 0);
  TrainStep(tier, 1, 1, 2);
  // Or its state is written.
  tier.restore_fault = [](const Block& block) { return block.index == 0 ? EIO : 0; };
  CHECK(status(tier.Restore(1, 1, 5)) == MLPO_E_IO);
  CHECK(status(tier.WriteState(1, 1, MLPO_PART_MASTER)) == 0);
  CHECK(status(tier.Grad(1, 1, 3)) == MLPO_E_TORN);
  CHECK(status(tier.WriteState(1, 1, MLPO_PART_STATE)) == 0);
  TrainStep(tier, 1, 1, 3);
  tier.EndSession(1);
  tier.RunUntilQuiet();
  CHECK(tier.restores_ended.size() == 1);
  CHECK(tier.violation() == "");
}

// A slot may have its gradient and the parameters in the same bytes: a window that opened while the RESTORE waits would
// have its gradient written over after its statistics were formed.
TEST_CASE("Restore.NoWindowOpensBehindOneThatWaits") {
  FakeTier tier(MakeOptions(40, 1), {{1e6, 1e6}});
  tier.AddSubgroup(1, 1, {20 * kBlock});
  tier.WriteState(1, 1, MLPO_PART_STATE);
  TrainStep(tier, 1, 1, 1);
  REQUIRE(tier.scheduler().BeginRestore(1, 5));
  REQUIRE(tier.BeginSave(1, 1, Pace()) != 0);
  const uint64_t take = tier.Take(1, 1);  // flushes 20 blocks, 12 ms each
  const uint64_t restore = tier.Restore(1, 1, 5);
  const uint64_t stat = tier.Submit(1, MLPO_OP_STAT, 1, 0, 0, 0, 0);
  CHECK(tier.completion(stat).detail == MLPO_SLOT_BUSY);
  const uint64_t early = tier.Grad(1, 1, 2);
  REQUIRE(tier.answered(early));
  CHECK(tier.status(early) == MLPO_E_SLOT_BUSY);
  CHECK_FALSE(tier.answered(take));
  tier.RunUntilAnswered(restore);
  CHECK(tier.status(take) == 0);
  CHECK(tier.status(restore) == 0);
  TrainStep(tier, 1, 1, 2);
  CHECK(tier.violation() == "");
}
