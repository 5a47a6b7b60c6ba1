// Saves of what is on persistent paths: files are cloned, or left to the checkpoint, while the session goes on in
// others; and paths that are evacuated meanwhile.
#include <cerrno>
#include <optional>
#include <utility>
#include <vector>

#include "tests/unit/scheduler_saves.h"

using namespace mlpo;
using namespace mlpo::test;

TEST_CASE("C20_WhatIsOnPersistentPathsIsHandedOverOrClonedAndNeverTouchedAgain") {
  for (const bool integrity : {false, true}) {
    for (const uint32_t buffers : {1u, 3u, 40u}) {
      for (const int way : {0, 1, 2}) {  // both handed over; one handed over, one copied; one cloned, one handed over
        INFO("integrity " << integrity << " buffers " << buffers << " way " << way);
        Scheduler::Options options = MakeOptions(buffers, 2);
        options.integrity = integrity;
        FakeTier tier(options, std::vector<FakeTier::PathSpeed>(2));
        for (int id = 1; id <= 3; ++id) tier.AddSubgroup(1, static_cast<SubgroupId>(id), {5 * kBlock + 7});
        for (int id = 1; id <= 3; ++id) tier.WriteState(1, static_cast<SubgroupId>(id));
        for (uint32_t epoch = 1; epoch <= 2; ++epoch) TrainStep(tier, 1, 3, epoch);
        const std::vector<bool> hands_over{way != 2, way != 1}, clones{way == 2, false};
        uint32_t epoch = 2;
        std::vector<std::pair<uint64_t, Versions>> saves;
        for (uint32_t handle = 1; handle <= 3; ++handle) {
          const Versions taken = Now(tier, 1, 3, 6);
          const uint64_t save = tier.BeginSave(1, handle, Pace(), hands_over, clones);
          REQUIRE(save != 0);
          const uint64_t take = tier.Take(1, handle), saved = tier.Saved(1, handle);
          for (int step = 0; step < 3; ++step) TrainStep(tier, 1, 3, ++epoch);
          tier.RunUntilAnswered(saved);
          CHECK(tier.status(take) == 0);
          CHECK(tier.status(saved) == 0);
          CHECK(tier.save(save).left);
          saves.emplace_back(save, taken);
        }
        for (const auto& [save, taken] : saves) CHECK(IsInPart(tier, save, taken));
        CHECK(tier.HandedOverIsUnchanged());
        // Three steps later every block has been updated: nothing needs the files that were left.
        tier.RunUntilQuiet();
        CHECK(tier.files_unused() >= (way == 0 ? 4u : 2u));
        CHECK(CheckpointBytes(tier) == 0);
        CHECK(tier.scratch_bytes() <= 18 * kBlockBytes);
        tier.EndSession(1);
        tier.RunUntilQuiet();
        CHECK(tier.scratch_bytes() == 0);
        CHECK(tier.violation() == "");
        CHECK(tier.scheduler().idle());
      }
    }
  }
}

// Extents that blocks had in earlier steps go back to the file system, which the session cannot use any more.
TEST_CASE("Saves.AFileThatIsHandedOverKeepsWhatIsInUseAndNothingElse") {
  for (const bool kept : {false, true}) {
    INFO("gradients are kept " << kept);
    FakeTier tier(KeptOptions(4, 2), std::vector<FakeTier::PathSpeed>(2));
    tier.AddSubgroup(1, 1, {20 * kLargeBlock}, kept ? std::optional(MLPO_BFLOAT16) : std::nullopt);
    tier.WriteState(1, 1, MLPO_PART_STATE);
    const uint32_t blocks = Scheduler::BlockCount(tier.scheduler().FindSubgroup(1, 1)->spec, kLargeBlock);
    for (uint32_t epoch = 1; epoch <= 4; ++epoch) TrainStep(tier, 1, 1, epoch);
    const Versions taken = Now(tier, 1, 1, blocks);
    const uint64_t save = tier.BeginSave(1, 1, Pace(), {true, true});
    const uint64_t take = tier.Take(1, 1);
    tier.RunUntilAnswered(take);
    REQUIRE(tier.status(take) == 0);
    RunUntilCopied(tier, save);
    if (!kept) CHECK(tier.left_bytes() == tier.completion(take).value);
    CHECK(IsInPart(tier, save, taken));
    for (uint32_t epoch = 5; epoch <= 7; ++epoch) TrainStep(tier, 1, 1, epoch);
    CHECK(tier.HandedOverIsUnchanged());
    CHECK(tier.violation() == "");
  }
}

TEST_CASE("Saves.ASessionMayEndWhileItLeavesItsFiles") {
  for (const uint32_t buffers : {3u, 12u, 60u}) {
    INFO("buffers " << buffers);
    FakeTier tier(MakeOptions(buffers, 1), {{1e6, 1e6}});
    for (SubgroupId id = 1; id <= 2; ++id) tier.AddSubgroup(1, id, {20 * kBlock});
    for (SubgroupId id = 1; id <= 2; ++id) tier.WriteState(1, id, MLPO_PART_STATE);
    TrainStep(tier, 1, 2, 1);
    const Versions taken = Now(tier, 1, 2, 20);
    const uint64_t save = tier.BeginSave(1, 1, Pace(), {true});
    const uint64_t take = tier.Take(1, 1);
    // The first subgroup is pinned and goes on, into the file that is about to be left, while the other is flushed.
    tier.Grad(1, 1, 2);
    tier.Update(1, 1, 2);
    tier.RunUntilAnswered(take);
    CHECK(tier.status(take) == 0);
    tier.EndSession(1);
    tier.RunUntilQuiet();
    CHECK(tier.gone(1));
    CHECK(tier.save(save).copied);
    CHECK(tier.save(save).failure.status == 0);
    CHECK(IsInPart(tier, save, taken));
    CHECK(tier.HandedOverIsUnchanged());
    CHECK(tier.violation() == "");
    CHECK(tier.scheduler().idle());
    CHECK(tier.scratch_bytes() == 0);
  }
}

TEST_CASE("Saves.StepsAfterAHandOverPlaceBlocksAsBefore") {
  Scheduler::Options options = MakeOptions(32, 2);
  options.paths = {{345e6, 265e6, 0.5, 0}, {180e6, 180e6, 0.5, 0}};
  FakeTier tier(options, {{345e6, 265e6}, {180e6, 180e6}});
  for (int id = 1; id <= 8; ++id) tier.AddSubgroup(1, static_cast<SubgroupId>(id), {64 * kBlock});
  for (int id = 1; id <= 8; ++id) tier.WriteState(1, static_cast<SubgroupId>(id), MLPO_PART_STATE);
  uint32_t epoch = 0;
  const auto steps_ns = [&](int count) {
    const int64_t begin_ns = tier.now_ns();
    for (int i = 0; i < count; ++i) TrainStep(tier, 1, 8, ++epoch);
    return static_cast<double>(tier.now_ns() - begin_ns) / count;
  };
  (void)steps_ns(4);
  const double usual_ns = steps_ns(4);
  const uint64_t save = tier.BeginSave(1, 1, Pace(), {true, true});
  tier.RunUntilAnswered(tier.Take(1, 1));
  CHECK(steps_ns(4) <= 1.15 * usual_ns);
  CHECK(tier.save(save).copied);
  CHECK(tier.HandedOverIsUnchanged());
  CHECK(tier.violation() == "");
}

TEST_CASE("Saves.KeptGradientsAreNotWrittenToAFileThatWasHandedOver") {
  for (const uint32_t buffers : {2u, 3u, 6u}) {
    INFO("buffers " << buffers);
    FakeTier tier(KeptOptions(buffers, 2), std::vector<FakeTier::PathSpeed>(2));
    tier.AddSubgroup(1, 1, {8 * kLargeBlock}, MLPO_BFLOAT16);
    tier.WriteState(1, 1, MLPO_PART_STATE);
    TrainStep(tier, 1, 1, 1);
    const uint32_t blocks = Scheduler::BlockCount(tier.scheduler().FindSubgroup(1, 1)->spec, kLargeBlock);
    const Versions taken = Now(tier, 1, 1, blocks);
    const uint64_t save = tier.BeginSave(1, 1, Pace(), {true, true});
    tier.RunUntilAnswered(tier.Take(1, 1));
    for (uint32_t epoch = 2; epoch <= 4; ++epoch) TrainStep(tier, 1, 1, epoch);
    RunUntilCopied(tier, save);
    CHECK(IsInPart(tier, save, taken));
    CHECK(tier.HandedOverIsUnchanged());
    tier.RunUntilQuiet();
    CHECK(tier.violation() == "");
  }
}

// Extents that blocks share with a file that is a checkpoint's now: the blocks leave, the file stays as it is.
TEST_CASE("Saves.WhatIsInAFileThatWasHandedOverCanBeEvacuated") {
  for (const uint32_t buffers : {1u, 6u, 60u}) {
    INFO("buffers " << buffers);
    FakeTier tier(MakeOptions(buffers, 2), std::vector<FakeTier::PathSpeed>(2));
    tier.AddSubgroup(1, 1, {20 * kBlock});
    tier.WriteState(1, 1, MLPO_PART_STATE);
    TrainStep(tier, 1, 1, 1);
    const Versions taken = Now(tier, 1, 1, 20);
    const uint64_t save = tier.BeginSave(1, 1, Pace(), {true, false});
    tier.RunUntilAnswered(tier.Take(1, 1));
    RunUntilCopied(tier, save);
    tier.scheduler().EvacuatePath(0, tier.now_ns());
    PathSnapshot path;
    for (int i = 0; i < 30 && !path.evacuated; ++i) {
      tier.Wait(kS);
      tier.scheduler().Fill(0, &path, tier.now_ns());
    }
    REQUIRE(path.evacuated);
    CHECK(path.scratch_bytes == 0);
    CHECK(tier.files_unused() == 1);
    CHECK(tier.HandedOverIsUnchanged());
    CHECK(IsInPart(tier, save, taken));
    const uint64_t read = tier.Submit(1, MLPO_OP_READ_STATE, 1, 0, MLPO_PART_STATE, 0, 20 * kBlock);
    tier.RunUntilAnswered(read);
    CHECK(tier.status(read) == 0);
    TrainStep(tier, 1, 1, 2);
    CHECK(tier.violation() == "");
  }
}

TEST_CASE("Saves.AnEvacuationEndsAfterTheCopies") {
  FakeTier tier(MakeOptions(8, 2), std::vector<FakeTier::PathSpeed>(2));
  tier.AddSubgroup(1, 1, {20 * kBlock});
  tier.WriteState(1, 1, MLPO_PART_STATE);
  TrainStep(tier, 1, 1, 1);
  const Versions taken = Now(tier, 1, 1, 20);
  tier.part_write_ns = kS;
  const uint64_t save = tier.BeginSave(1, 1, Pace());
  tier.RunUntilAnswered(tier.Take(1, 1));
  tier.scheduler().EvacuatePath(0, tier.now_ns());
  PathSnapshot path;
  bool before = false;
  for (int i = 0; i < 120 && !path.evacuated; ++i) {
    tier.Wait(kS);
    tier.scheduler().Fill(0, &path, tier.now_ns());
    before |= path.evacuated && path.checkpoint_bytes > 0;
  }
  CHECK(path.evacuated);
  CHECK_FALSE(before);
  RunUntilCopied(tier, save);
  CHECK(tier.save(save).failure.status == 0);
  CHECK(IsInPart(tier, save, taken));
  CHECK(tier.violation() == "");
}

// The state is pinned, and training goes on; but a block is still being written to the file that is to be left.
TEST_CASE("Saves.AFileThatCannotBeLeftIsGivenUpWithItsPath") {
  constexpr FakeTier::PathSpeed kGoes{1e6, 1e6};
  Scheduler::Options options = MakeOptions(8, 2);
  options.hang_timeout_ns = 60 * kS;
  FakeTier tier(options, {kGoes, kGoes});
  for (SubgroupId id = 1; id <= 2; ++id) tier.AddSubgroup(1, id, {20 * kBlock});
  for (SubgroupId id = 1; id <= 2; ++id) tier.WriteState(1, id, MLPO_PART_STATE);
  TrainStep(tier, 1, 2, 1);
  SaveAll(tier, 1);
  // The second subgroup is pinned behind a read that takes 12 s. Meanwhile the first goes on, and is written.
  const std::vector<const Block*> away = AwayOn(*tier.scheduler().FindSubgroup(1, 2), 1);
  REQUIRE_FALSE(away.empty());
  tier.ChangeSpeed(0, tier.now_ns(), {1e6, 0});
  tier.ChangeSpeed(1, tier.now_ns(), {1e3, 1e6});
  const uint64_t save = tier.BeginSave(1, 2, Pace(), {true, false});
  REQUIRE(save != 0);
  tier.Submit(1, MLPO_OP_READ_STATE, 2, 0, MLPO_PART_STATE, away.front()->first, away.front()->count);
  const uint64_t take = tier.Take(1, 2), saved = tier.Saved(1, 2);
  tier.Grad(1, 1, 2);
  tier.Update(1, 1, 2);
  tier.RunUntilAnswered(take);
  REQUIRE(tier.status(take) == 0);
  REQUIRE(tier.counts(0).in_flight > 0);
  for (int i = 0; i < 120 && !tier.answered(saved); ++i) tier.Wait(kS);
  CHECK_FALSE(tier.save(save).taken);
  REQUIRE(tier.answered(saved));
  CHECK(tier.status(saved) == MLPO_E_IO);
  CHECK(tier.completion(saved).failure.os_errno == ETIMEDOUT);
  for (PathIndex path = 0; path < 2; ++path) tier.ChangeSpeed(path, tier.now_ns(), kGoes);
  tier.RunUntilQuiet();
  tier.EndSession(1);
  tier.RunUntilQuiet();
  CHECK(tier.gone(1));
  CHECK(tier.scratch_bytes() == 0);
  CHECK(CheckpointBytes(tier) == 0);
  CHECK(tier.violation() == "");
  CHECK(tier.scheduler().idle());
}
