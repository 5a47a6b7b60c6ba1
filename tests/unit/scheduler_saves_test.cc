// A session's state on its way into a checkpoint, on a fake tier in virtual time: it is the state as it was when it was
// taken, whatever goes on meanwhile, and training hardly notices.
#include <algorithm>
#include <cerrno>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/fake_tier.h"
//
#include "tests/support/catch.h"

using namespace mlpo;
using mlpo::test::FakeTier;

namespace {

constexpr uint64_t kBlock = 1024;  // elements: parts of 4 KiB, blocks of 12 KiB
constexpr uint64_t kBlockBytes = 12288;
constexpr int64_t kS = 1'000'000'000;

Scheduler::Options MakeOptions(uint32_t buffers, size_t paths) {
  Scheduler::Options options;
  options.buffers = buffers;
  options.block_elements = kBlock;
  options.extents_offset_bytes = 4096;
  options.no_path_timeout_ns = 5 * kS;
  options.paths.resize(paths);
  return options;
}

// Of blocks that have room for a kept gradient.
constexpr uint64_t kLargeBlock = 4 * kBlock;

Scheduler::Options KeptOptions(uint32_t buffers, size_t paths) {
  Scheduler::Options options = MakeOptions(buffers, paths);
  options.block_elements = kLargeBlock;
  return options;
}

CopyPace::Options Pace(double write_bytes_per_s = 200e6, uint64_t target = 0) {
  return {0.05, write_bytes_per_s, 2 * kBlockBytes, target};
}

void TrainStep(FakeTier& tier, SessionId session, int subgroups, uint32_t epoch) {
  std::vector<uint64_t> requests;
  for (int id = 1; id <= subgroups; ++id) requests.push_back(tier.Grad(session, id, epoch));
  for (uint64_t grad : requests) tier.RunUntilAnswered(grad);
  requests.clear();
  for (int id = 1; id <= subgroups; ++id) requests.push_back(tier.Update(session, id, epoch));
  for (uint64_t update : requests) {
    tier.RunUntilAnswered(update);
    CHECK(tier.status(update) == 0);
  }
}

using Versions = std::map<std::pair<SubgroupId, uint32_t>, uint64_t>;

Versions Now(FakeTier& tier, SessionId session, int subgroups, uint32_t blocks) {
  Versions versions;
  for (int id = 1; id <= subgroups; ++id)
    for (uint32_t block = 0; block < blocks; ++block)
      versions[{static_cast<SubgroupId>(id), block}] = tier.VersionOf(session, static_cast<SubgroupId>(id), block);
  return versions;
}

bool IsInPart(FakeTier& tier, uint64_t save, const Versions& versions) {
  for (const auto& [place, version] : versions)
    if (tier.InPart(save, place.first, place.second) != version) return false;
  return true;
}

void RunUntilCopied(FakeTier& tier, uint64_t save) {
  while (!tier.save(save).copied && tier.Step()) {
  }
}

// Afterwards all of its state is on the paths.
void SaveAll(FakeTier& tier, SessionId session) {
  const uint64_t save = tier.BeginSave(session, 1, Pace());
  REQUIRE(save != 0);
  tier.RunUntilAnswered(tier.Take(session, 1));
  RunUntilCopied(tier, save);
  tier.RunUntilQuiet();
}

std::vector<const Block*> AwayOn(const Subgroup& subgroup, PathIndex path) {
  std::vector<const Block*> away;
  for (const Block& block : subgroup.blocks) {
    if (block.state == BlockState::kAway && block.extent.path == path) away.push_back(&block);
  }
  return away;
}

uint64_t CheckpointBytes(FakeTier& tier) {
  uint64_t bytes = 0;
  for (PathIndex i = 0; i < tier.options().paths.size(); ++i) {
    PathSnapshot path;
    tier.scheduler().Fill(i, &path, tier.now_ns());
    bytes += path.checkpoint_bytes;
  }
  return bytes;
}

}  // namespace

TEST_CASE("C20_WhatIsSavedIsTheStateAsItWasTaken") {
  for (const uint32_t buffers : {1u, 2u, 3u, 8u, 64u}) {
    for (const size_t paths : {1u, 2u, 5u}) {
      INFO("buffers " << buffers << " paths " << paths);
      FakeTier tier(MakeOptions(buffers, paths), std::vector<FakeTier::PathSpeed>(paths));
      for (int id = 1; id <= 3; ++id) tier.AddSubgroup(1, static_cast<SubgroupId>(id), {5 * kBlock + 7, 0, 3});
      for (int id = 1; id <= 3; ++id) tier.WriteState(1, static_cast<SubgroupId>(id));
      for (uint32_t epoch = 1; epoch <= 2; ++epoch) TrainStep(tier, 1, 3, epoch);
      const Versions taken = Now(tier, 1, 3, 6);
      const uint64_t save = tier.BeginSave(1, 9, Pace());
      REQUIRE(save != 0);
      const uint64_t take = tier.Take(1, 9), saved = tier.Saved(1, 9);
      for (uint32_t epoch = 3; epoch <= 6; ++epoch) TrainStep(tier, 1, 3, epoch);
      tier.RunUntilAnswered(saved);
      CHECK(tier.status(take) == 0);
      CHECK(tier.completion(take).value == 3 * (5 * kBlockBytes + 12288));
      CHECK(tier.status(saved) == 0);
      CHECK(tier.completion(saved).value == 1);
      CHECK(tier.save(save).blocks == 18);
      CHECK(IsInPart(tier, save, taken));
      CHECK(CheckpointBytes(tier) == 0);
      // And the next one: nothing of the first is left.
      const Versions then = Now(tier, 1, 3, 6);
      const uint64_t second = tier.BeginSave(1, 10, Pace());
      const uint64_t again = tier.Take(1, 10);
      TrainStep(tier, 1, 3, 7);
      RunUntilCopied(tier, second);
      CHECK(tier.status(again) == 0);
      CHECK(IsInPart(tier, second, then));
      tier.RunUntilQuiet();
      CHECK(tier.violation() == "");
      CHECK(tier.scheduler().idle());
      PoolSnapshot pool;
      tier.scheduler().Fill(&pool);
      CHECK(pool.buffers == buffers);
    }
  }
}

TEST_CASE("Saves.WhatWasNeverUpdatedHasNoMomentsAndWhatWasNeverWrittenNothing") {
  FakeTier tier(MakeOptions(8, 2), std::vector<FakeTier::PathSpeed>(2));
  tier.AddSubgroup(1, 1, {4 * kBlock});
  tier.AddSubgroup(1, 2, {4 * kBlock});
  tier.WriteState(1, 1, MLPO_PART_MASTER);
  const uint64_t save = tier.BeginSave(1, 1, Pace());
  const uint64_t take = tier.Take(1, 1);
  RunUntilCopied(tier, save);
  CHECK(tier.completion(take).value == 4 * 4096);
  CHECK(tier.save(save).blocks == 8);
  CHECK(IsInPart(tier, save, Now(tier, 1, 1, 4)));
  for (uint32_t block = 0; block < 4; ++block) CHECK(tier.InPart(save, 2, block) == 0);
  CHECK(tier.violation() == "");
}

TEST_CASE("Saves.TakingStallsForAsLongAsTheDirtyBlocksNeedAndServesGradients") {
  Scheduler::Options options = MakeOptions(400, 2);
  options.paths = {{345e6, 265e6, 0.5, 0}, {180e6, 180e6, 0.5, 0}};
  FakeTier tier(options, {{345e6, 265e6}, {180e6, 180e6}});
  for (int id = 1; id <= 8; ++id) tier.AddSubgroup(1, static_cast<SubgroupId>(id), {64 * kBlock});
  for (int id = 1; id <= 8; ++id) tier.WriteState(1, static_cast<SubgroupId>(id), MLPO_PART_STATE);
  for (uint32_t epoch = 1; epoch <= 4; ++epoch) TrainStep(tier, 1, 8, epoch);
  PoolSnapshot pool;
  tier.scheduler().Fill(&pool);
  REQUIRE(pool.dirty_blocks > 100);
  const double need_s = static_cast<double>(pool.dirty_blocks * kBlockBytes) / (265e6 + 180e6);
  REQUIRE(tier.BeginSave(1, 1, Pace()) != 0);
  const int64_t begin_ns = tier.now_ns();
  const uint64_t take = tier.Take(1, 1);
  const uint64_t grad = tier.Grad(1, 5, 5);
  tier.RunUntilAnswered(grad);
  CHECK(tier.status(grad) == 0);
  CHECK(!tier.answered(take));
  tier.RunUntilAnswered(take);
  const double took_s = static_cast<double>(tier.now_ns() - begin_ns) / 1e9;
  CHECK(took_s <= 1.1 * need_s);
  CHECK(tier.violation() == "");
}

TEST_CASE("Saves.StepsDuringACopyTakeLittleLonger") {
  Scheduler::Options options = MakeOptions(64, 2);
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
  const double usual_ns = steps_ns(6);
  // The target writes 265 MB/s, of which 5 % are 13 MB/s: 6.3 MB take at most half a second.
  const uint64_t save = tier.BeginSave(1, 1, Pace(265e6));
  const uint64_t take = tier.Take(1, 1);
  tier.RunUntilAnswered(take);
  const int64_t begin_ns = tier.now_ns();
  const double during_ns = steps_ns(6);
  CHECK(!tier.save(save).copied);
  CHECK(during_ns <= 1.15 * usual_ns);
  CheckpointSnapshot shown;
  tier.scheduler().Fill(save, &shown, tier.now_ns());
  CHECK(shown.phase == "copying");
  CHECK(shown.bytes == tier.completion(take).value);
  CHECK(shown.copied_bytes > 0);
  CHECK(shown.bound_s > 0);
  CHECK(shown.bound_s <= 1.01 * static_cast<double>(shown.bytes - shown.copied_bytes) / (0.05 * 265e6));
  CHECK(shown.left_s <= shown.bound_s);
  while (!tier.save(save).copied && tier.now_ns() < begin_ns + 10 * kS) (void)steps_ns(1);
  const double bound_s = static_cast<double>(tier.completion(take).value) / (0.05 * 265e6);
  CHECK(static_cast<double>(tier.now_ns() - begin_ns) / 1e9 <= 1.1 * bound_s);
  CHECK(tier.save(save).failure.status == 0);
  CHECK(tier.violation() == "");
}

// The trainer does something else for long, and has left every buffer dirty: something is flushed for the copies.
TEST_CASE("Saves.CopiesEndWhileTrainingPausesWithAllBuffersDirty") {
  for (const uint32_t buffers : {1u, 2u, 8u}) {
    CAPTURE(buffers);
    Scheduler::Options options = MakeOptions(buffers, 2);
    options.order = Order::kAlternating;  // which reads nothing ahead, so nothing is flushed for that
    FakeTier tier(options, {{1e6, 1e6}, {1e6, 1e6}});
    tier.AddSubgroup(1, 1, {20 * kBlock});
    tier.WriteState(1, 1, MLPO_PART_STATE);
    for (uint32_t epoch = 1; epoch <= 3; ++epoch) TrainStep(tier, 1, 1, epoch);
    tier.RunUntilQuiet();
    const Versions taken = Now(tier, 1, 1, 20);
    const uint64_t save = tier.BeginSave(1, 1, Pace());
    tier.place_ns = 5 * kS;  // the step ends before copying begins
    tier.RunUntilAnswered(tier.Take(1, 1));
    const uint64_t saved = tier.Saved(1, 1);
    TrainStep(tier, 1, 1, 4);
    tier.Wait(kS);
    PoolSnapshot pool;
    tier.scheduler().Fill(&pool);
    REQUIRE(pool.dirty_blocks == buffers);
    REQUIRE(!tier.answered(saved));
    tier.Wait(20 * kS);
    REQUIRE(tier.answered(saved));
    CHECK(tier.status(saved) == 0);
    CHECK(IsInPart(tier, save, taken));
    CHECK(tier.violation() == "");
  }
}

// As before, and then no path takes anything any more: no buffer will come.
TEST_CASE("Saves.CopiesForWhichNoBufferComesFailInTime") {
  Scheduler::Options options = MakeOptions(8, 2);
  options.order = Order::kAlternating;
  FakeTier tier(options, {{1e6, 1e6}, {1e6, 1e6}});
  tier.AddSubgroup(1, 1, {20 * kBlock});
  tier.WriteState(1, 1, MLPO_PART_STATE);
  for (uint32_t epoch = 1; epoch <= 3; ++epoch) TrainStep(tier, 1, 1, epoch);
  tier.RunUntilQuiet();
  const uint64_t save = tier.BeginSave(1, 1, Pace());
  tier.place_ns = 5 * kS;
  tier.RunUntilAnswered(tier.Take(1, 1));
  const uint64_t saved = tier.Saved(1, 1);
  TrainStep(tier, 1, 1, 4);
  tier.Wait(kS);
  for (PathIndex path = 0; path < 2; ++path)
    tier.SetFault(path, [](const Transfer& t) { return t.direction == Direction::kWrite ? EROFS : 0; });
  tier.Wait(6 * kS);  // copying has begun
  PoolSnapshot pool;
  tier.scheduler().Fill(&pool);
  REQUIRE(pool.dirty_blocks == options.buffers);
  REQUIRE_FALSE(tier.answered(saved));
  tier.Wait(2 * options.no_path_timeout_ns);
  REQUIRE(tier.answered(saved));
  CHECK(tier.status(saved) == MLPO_E_IO);
  CHECK(tier.completion(saved).failure.os_errno == EROFS);
  const std::string& why = tier.completion(saved).failure.text;
  CAPTURE(why);
  CHECK(why.find("waits for a buffer") != std::string::npos);
  CHECK(why.find("'path' is read_only") != std::string::npos);
  CHECK(tier.save(save).copied);
  CHECK(tier.scheduler().idle());
  CHECK(CheckpointBytes(tier) == 0);
  // Training has lost nothing, and the next one is saved.
  for (PathIndex path = 0; path < 2; ++path) tier.SetFault(path, nullptr);
  tier.place_ns = 1000;
  tier.Wait(10 * kS);
  TrainStep(tier, 1, 1, 5);
  const Versions taken = Now(tier, 1, 1, 20);
  const uint64_t again = tier.BeginSave(1, 2, Pace());
  tier.RunUntilAnswered(tier.Take(1, 2));
  RunUntilCopied(tier, again);
  CHECK(IsInPart(tier, again, taken));
  CHECK(tier.violation() == "");
}

TEST_CASE("Saves.AFailedCopyFailsTheCheckpointAndNotTheTraining") {
  for (const bool reading : {true, false}) {
    INFO("reading " << reading);
    FakeTier tier(MakeOptions(4, 2), std::vector<FakeTier::PathSpeed>(2));
    tier.AddSubgroup(1, 1, {20 * kBlock});
    tier.WriteState(1, 1, MLPO_PART_STATE);
    TrainStep(tier, 1, 1, 1);
    tier.RunUntilQuiet();
    const uint64_t save = tier.BeginSave(1, 1, Pace());
    const uint64_t take = tier.Take(1, 1), saved = tier.Saved(1, 1);
    tier.RunUntilAnswered(take);
    CHECK(tier.status(take) == 0);
    if (reading) {
      tier.SetFault(0, [](const Transfer& t) { return t.direction == Direction::kRead ? EIO : 0; });
    } else {
      tier.part_fault = [](const Pin& pin) { return pin.index == 7 ? ENOSPC : 0; };
    }
    tier.RunUntilAnswered(saved);
    tier.SetFault(0, nullptr);
    CHECK(tier.status(saved) == (reading ? MLPO_E_IO : -ENOSPC));
    CHECK(tier.completion(saved).failure.os_errno == (reading ? EIO : ENOSPC));
    CHECK(tier.save(save).failure.status != 0);
    CHECK(CheckpointBytes(tier) == 0);
    for (uint32_t epoch = 2; epoch <= 3; ++epoch) TrainStep(tier, 1, 1, epoch);
    tier.RunUntilQuiet();
    CHECK(tier.violation() == "");
    CHECK(tier.scheduler().idle());
  }
}

TEST_CASE("Saves.CopiesGoOnWithoutTheirSession") {
  FakeTier tier(MakeOptions(4, 2), std::vector<FakeTier::PathSpeed>(2));
  tier.AddSubgroup(1, 1, {20 * kBlock});
  tier.WriteState(1, 1, MLPO_PART_STATE);
  TrainStep(tier, 1, 1, 1);
  const Versions taken = Now(tier, 1, 1, 20);
  const uint64_t save = tier.BeginSave(1, 1, Pace());
  tier.part_write_ns = kS / 10;
  tier.RunUntilAnswered(tier.Take(1, 1));
  TrainStep(tier, 1, 1, 2);
  tier.EndSession(1);
  tier.Wait(kS / 100);
  CHECK(tier.gone(1));
  CHECK(!tier.save(save).copied);
  CHECK(!tier.scheduler().idle());
  tier.RunUntilQuiet();
  CHECK(tier.save(save).copied);
  CHECK(tier.save(save).failure.status == 0);
  CHECK(IsInPart(tier, save, taken));
  CHECK(tier.violation() == "");
  CHECK(tier.scheduler().idle());
  CHECK(tier.scratch_bytes() == 0);
  CHECK(CheckpointBytes(tier) == 0);
}

TEST_CASE("Saves.ASessionThatEndsBeforeItsStateIsTakenTakesTheSaveWithIt") {
  FakeTier tier(MakeOptions(40, 1), {{1e6, 1e6}});
  tier.AddSubgroup(1, 1, {20 * kBlock});
  tier.WriteState(1, 1, MLPO_PART_STATE);
  TrainStep(tier, 1, 1, 1);
  const uint64_t save = tier.BeginSave(1, 1, Pace());
  const uint64_t take = tier.Take(1, 1);
  tier.Wait(kS / 50);  // some are flushed, 12 ms each
  REQUIRE(!tier.answered(take));
  tier.EndSession(1);
  tier.RunUntilQuiet();
  CHECK(tier.gone(1));
  CHECK(!tier.answered(take));
  CHECK(tier.save(save).copied);
  CHECK(tier.save(save).failure.status == -ESHUTDOWN);
  CHECK(!tier.save(save).taken);
  CHECK(tier.violation() == "");
  CHECK(tier.scheduler().idle());
  CHECK(tier.scratch_bytes() == 0);
}

TEST_CASE("Saves.AreRefusedWhereTheStateIsNoOne") {
  FakeTier tier(MakeOptions(8, 1), std::vector<FakeTier::PathSpeed>(1));
  tier.AddSubgroup(1, 1, {4 * kBlock});
  tier.AddSubgroup(1, 2, {4 * kBlock});
  const auto status = [&](uint64_t request) {
    tier.RunUntilAnswered(request);
    return tier.status(request);
  };
  CHECK(status(tier.Take(1, 1)) == -EBADF);
  REQUIRE(tier.BeginSave(1, 1, Pace()) != 0);
  CHECK(tier.BeginSave(1, 2, Pace()) == 0);  // one at a time
  CHECK(status(tier.Take(1, 2)) == -EBADF);
  CHECK(status(tier.Submit(1, MLPO_OP_SNAPSHOT, 0, 0, 7, 1, 0)) == -EINVAL);
  tier.RunUntilAnswered(tier.Grad(1, 2, 1));
  const uint64_t open = tier.Take(1, 1);
  CHECK(status(open) == MLPO_E_SLOT_BUSY);
  CHECK(tier.completion(open).failure.text.find("subgroup2") != std::string::npos);
  // Behind an UPDATE it is taken.
  const uint64_t update = tier.Update(1, 2, 1), take = tier.Take(1, 1);
  CHECK(status(update) == 0);
  CHECK(status(take) == 0);
  CHECK(status(tier.Take(1, 1)) == -EBUSY);
  const uint64_t saved = tier.Saved(1, 1);
  CHECK(status(tier.Saved(1, 1)) != 0);
  CHECK(status(saved) == 0);
  CHECK(status(tier.Saved(1, 1)) == 0);  // and again
  // Given up by the client.
  REQUIRE(tier.BeginSave(1, 3, Pace()) != 0);
  CHECK(status(tier.Submit(1, MLPO_OP_SNAPSHOT, 0, 0, MLPO_SNAPSHOT_ABANDON, 3, 0)) == 0);
  CHECK(status(tier.Saved(1, 3)) == -ECANCELED);
  tier.RunUntilQuiet();
  CHECK(tier.violation() == "");
  CHECK(tier.scheduler().idle());
}

TEST_CASE("Saves.WithoutAPathToFlushToItFailsInTime") {
  FakeTier tier(MakeOptions(40, 2), std::vector<FakeTier::PathSpeed>(2));
  tier.AddSubgroup(1, 1, {20 * kBlock});
  tier.WriteState(1, 1, MLPO_PART_STATE);
  TrainStep(tier, 1, 1, 1);
  for (PathIndex path = 0; path < 2; ++path)
    tier.SetFault(path, [](const Transfer& t) { return t.direction == Direction::kWrite ? EIO : 0; });
  REQUIRE(tier.BeginSave(1, 1, Pace()) != 0);
  const uint64_t take = tier.Take(1, 1);
  const int64_t begin_ns = tier.now_ns();
  for (int i = 0; i < 100 && !tier.answered(take); ++i) tier.Wait(kS);
  REQUIRE(tier.answered(take));
  CHECK(tier.status(take) == MLPO_E_IO);
  CHECK(tier.now_ns() - begin_ns < 60 * kS);
  for (PathIndex path = 0; path < 2; ++path) tier.SetFault(path, nullptr);
  TrainStep(tier, 1, 1, 2);
  CHECK(tier.violation() == "");
}

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

TEST_CASE("Saves.AWrongBlockIsReadOnceMoreAndThenNotSaved") {
  for (const bool heals : {true, false}) {
    INFO("heals " << heals);
    Scheduler::Options options = MakeOptions(4, 1);
    options.integrity = true;
    FakeTier tier(options, std::vector<FakeTier::PathSpeed>(1));
    tier.AddSubgroup(1, 1, {20 * kBlock});
    tier.WriteState(1, 1, MLPO_PART_STATE);
    TrainStep(tier, 1, 1, 1);
    tier.RunUntilQuiet();
    const Versions taken = Now(tier, 1, 1, 20);
    const uint64_t save = tier.BeginSave(1, 1, Pace());
    const uint64_t take = tier.Take(1, 1), saved = tier.Saved(1, 1);
    tier.RunUntilAnswered(take);
    REQUIRE(tier.status(take) == 0);
    int flips = 0;
    tier.SetFlip(0, [&](const Transfer&, bool) { return flips++ < (heals ? 1 : 1000); });
    tier.RunUntilAnswered(saved);
    PathSnapshot path;
    tier.scheduler().Fill(0, &path, tier.now_ns());
    CHECK(path.checksum_mismatches >= 1);
    if (heals) {
      CHECK(tier.status(saved) == 0);
      CHECK(path.checksum_errors == 0);
      CHECK(IsInPart(tier, save, taken));
    } else {
      CHECK(tier.status(saved) == MLPO_E_IO);
      CHECK(tier.completion(saved).failure.os_errno == EBADMSG);
      CHECK(path.checksum_errors == 1);
    }
    tier.SetFlip(0, nullptr);
    tier.RunUntilQuiet();
    CHECK(tier.violation() == "");
    CHECK(tier.scheduler().idle());
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

// A client may serve the files that it passes itself.
TEST_CASE("Saves.OneThatHangsHoldsUpNoOther") {
  FakeTier tier(MakeOptions(40, 2), std::vector<FakeTier::PathSpeed>(2));
  for (const SessionId session : {SessionId{1}, SessionId{2}}) {
    tier.AddSubgroup(session, 1, {20 * kBlock});
    tier.WriteState(session, 1, MLPO_PART_STATE);
    TrainStep(tier, session, 1, 1);
  }
  tier.part_write_ns = 3600 * kS;
  REQUIRE(tier.BeginSave(1, 1, Pace()) != 0);
  tier.RunUntilAnswered(tier.Take(1, 1));
  const uint64_t hangs = tier.Saved(1, 1);
  tier.Wait(kS);
  tier.part_write_ns = 1000;
  const Versions taken = Now(tier, 2, 1, 20);
  const uint64_t save = tier.BeginSave(2, 1, Pace());
  tier.RunUntilAnswered(tier.Take(2, 1));
  const uint64_t saved = tier.Saved(2, 1);
  for (int i = 0; i < 120 && !tier.answered(saved); ++i) tier.Wait(kS);
  REQUIRE(tier.answered(saved));
  CHECK(tier.status(saved) == 0);
  CHECK(IsInPart(tier, save, taken));
  CHECK_FALSE(tier.answered(hangs));
  for (const SessionId session : {SessionId{1}, SessionId{2}}) TrainStep(tier, session, 1, 2);
  // A daemon that stops does not wait for it either.
  tier.Wait(100 * kS);
  tier.scheduler().GiveUpStalled(Scheduler::kStalledNs, tier.now_ns());
  REQUIRE(tier.answered(hangs));
  CHECK(tier.status(hangs) == -ETIMEDOUT);
  CHECK(tier.scheduler().idle());
  CHECK(tier.violation() == "");
}

// The ranks of a node save to one target at the same time: what they press with is its share of that once.
TEST_CASE("Saves.StepsOfManyRanksThatSaveToOneTargetTakeLittleLonger") {
  constexpr SessionId kRanks = 8;
  Scheduler::Options options = MakeOptions(64, 2);
  options.paths = {{345e6, 265e6, 0.5, 0}, {180e6, 180e6, 0.5, 0}};
  FakeTier tier(options, {{345e6, 265e6}, {180e6, 180e6}});
  for (SessionId rank = 1; rank <= kRanks; ++rank) tier.AddSubgroup(rank, 1, {64 * kBlock});
  for (SessionId rank = 1; rank <= kRanks; ++rank) tier.WriteState(rank, 1, MLPO_PART_STATE);
  uint32_t epoch = 0;
  const auto step = [&] {
    ++epoch;
    std::vector<uint64_t> requests;
    for (SessionId rank = 1; rank <= kRanks; ++rank) requests.push_back(tier.Grad(rank, 1, epoch));
    for (const uint64_t grad : requests) tier.RunUntilAnswered(grad);
    requests.clear();
    for (SessionId rank = 1; rank <= kRanks; ++rank) requests.push_back(tier.Update(rank, 1, epoch));
    for (const uint64_t update : requests) tier.RunUntilAnswered(update);
  };
  const auto steps_ns = [&](int count) {
    const int64_t begin_ns = tier.now_ns();
    for (int i = 0; i < count; ++i) step();
    return static_cast<double>(tier.now_ns() - begin_ns) / count;
  };
  (void)steps_ns(4);
  const double usual_ns = steps_ns(6);
  tier.part_path = 0;  // the target is a folder of that device
  std::vector<uint64_t> saves, takes;
  for (SessionId rank = 1; rank <= kRanks; ++rank) {
    saves.push_back(tier.BeginSave(rank, 1, Pace(265e6, 7)));
    takes.push_back(tier.Take(rank, 1));
  }
  uint64_t bytes = 0;
  for (const uint64_t take : takes) {
    tier.RunUntilAnswered(take);
    REQUIRE(tier.status(take) == 0);
    bytes += tier.completion(take).value;
  }
  const int64_t begin_ns = tier.now_ns();
  const double during_ns = steps_ns(6);
  CHECK(during_ns <= 1.15 * usual_ns);
  // Each tells when all of them will have ended.
  std::vector<CheckpointSnapshot> shown(saves.size());
  uint64_t left = 0;
  for (size_t i = 0; i < saves.size(); ++i) {
    tier.scheduler().Fill(saves[i], &shown[i], tier.now_ns());
    if (shown[i].phase == "copying") left += shown[i].bytes - shown[i].copied_bytes;
  }
  CHECK(left > 0);
  for (size_t i = 0; i < saves.size(); ++i) {
    if (shown[i].phase == "copying") CHECK(shown[i].bound_s == Approx(static_cast<double>(left) / (0.05 * 265e6)));
  }
  const auto all_copied = [&] {
    return std::all_of(saves.begin(), saves.end(), [&](uint64_t save) { return tier.save(save).copied; });
  };
  while (!all_copied() && tier.now_ns() < begin_ns + 30 * kS) step();
  REQUIRE(all_copied());
  CHECK(static_cast<double>(tier.now_ns() - begin_ns) / 1e9 <= 1.1 * static_cast<double>(bytes) / (0.05 * 265e6));
  for (const uint64_t save : saves) CHECK(tier.save(save).failure.status == 0);
  tier.RunUntilQuiet();
  CHECK(tier.violation() == "");
}

// One that saves a lot does not keep another from saving little.
TEST_CASE("Saves.CopiesOfSeveralAreMadeInTurn") {
  FakeTier tier(MakeOptions(80, 2), std::vector<FakeTier::PathSpeed>(2));
  tier.AddSession(1, "one", 1000);
  tier.AddSession(2, "two", 1001);
  tier.AddSubgroup(1, 1, {60 * kBlock});
  tier.AddSubgroup(2, 1, {10 * kBlock});
  for (SessionId session = 1; session <= 2; ++session) {
    tier.WriteState(session, 1, MLPO_PART_STATE);
    TrainStep(tier, session, 1, 1);
  }
  tier.part_write_ns = kS / 10;
  const uint64_t large = tier.BeginSave(1, 1, Pace());
  tier.RunUntilAnswered(tier.Take(1, 1));
  tier.Wait(kS / 20);
  CHECK(tier.part_writes == 4);  // as long as nobody else has anything to copy
  const uint64_t small = tier.BeginSave(2, 1, Pace());
  tier.RunUntilAnswered(tier.Take(2, 1));
  RunUntilCopied(tier, small);
  CHECK_FALSE(tier.save(large).copied);
  RunUntilCopied(tier, large);
  tier.RunUntilQuiet();
  CHECK(tier.save(small).failure.status == 0);
  CHECK(tier.save(large).failure.status == 0);
  CHECK(tier.violation() == "");
}

// A user whose targets hang, one save after another, does not get the pool.
TEST_CASE("Saves.WhatHangsOfOneUserTakesAFewBuffersAndNoMore") {
  FakeTier tier(MakeOptions(80, 2), std::vector<FakeTier::PathSpeed>(2));
  constexpr SessionId kHung = 5;
  for (SessionId session = 1; session <= kHung + 1; ++session) {
    tier.AddSession(session, "job" + std::to_string(session), session <= kHung ? 1000 : 1001);
    tier.AddSubgroup(session, 1, {10 * kBlock});
    tier.WriteState(session, 1, MLPO_PART_STATE);
    TrainStep(tier, session, 1, 1);
  }
  std::set<uint64_t> hung;
  tier.part_write_time = [&](uint64_t save) { return hung.contains(save) ? 36'000 * kS : 1000; };
  for (SessionId session = 1; session <= kHung; ++session) {
    const uint64_t save = tier.BeginSave(session, 1, Pace());
    hung.insert(save);
    tier.RunUntilAnswered(tier.Take(session, 1));
    for (int i = 0; i < 70; ++i) tier.Wait(kS);
  }
  CHECK(tier.part_writes == 8);  // twice the four that copies have
  // What waits for one of these is told so.
  CHECK_FALSE(tier.save(1).copied);
  CHECK(tier.save(kHung).copied);
  CHECK(tier.save(kHung).failure.status == -ETIMEDOUT);
  CHECK(tier.save(kHung).failure.text.find("have 8 buffers of the pool") != std::string::npos);
  const uint64_t save = tier.BeginSave(kHung + 1, 1, Pace());
  tier.RunUntilAnswered(tier.Take(kHung + 1, 1));
  const uint64_t saved = tier.Saved(kHung + 1, 1);
  tier.Wait(kS);
  REQUIRE(tier.answered(saved));
  CHECK(tier.status(saved) == 0);
  CHECK(tier.save(save).copied);
  CHECK(tier.violation() == "");
}

// Nor do several users together, however small it is.
TEST_CASE("Saves.WhatHangsOfSeveralUsersLeavesHalfOfThePool") {
  for (const uint32_t buffers : {3u, 8u}) {
    CAPTURE(buffers);
    FakeTier tier(MakeOptions(buffers, 2), std::vector<FakeTier::PathSpeed>(2));
    constexpr SessionId kHung = 8;
    for (SessionId session = 1; session <= kHung + 1; ++session) {
      tier.AddSession(session, "job" + std::to_string(session), static_cast<uint32_t>(1000 + session));
      tier.AddSubgroup(session, 1, {10 * kBlock});
      tier.WriteState(session, 1, MLPO_PART_STATE);
      TrainStep(tier, session, 1, 1);
    }
    tier.part_write_ns = 36'000 * kS;
    for (SessionId session = 1; session <= kHung; ++session) {
      REQUIRE(tier.BeginSave(session, 1, Pace()) == session);
      tier.RunUntilAnswered(tier.Take(session, 1));
      for (int i = 0; i < 70; ++i) tier.Wait(kS);
    }
    CHECK(tier.part_writes == std::max(1u, buffers / 2));
    CHECK_FALSE(tier.save(1).copied);
    CHECK(tier.save(kHung).copied);
    CHECK(tier.save(kHung).failure.status == -ETIMEDOUT);
    const int64_t begin_ns = tier.now_ns();
    for (uint32_t epoch = 2; epoch <= 4; ++epoch) TrainStep(tier, kHung + 1, 1, epoch);
    CHECK(tier.now_ns() - begin_ns < kS);
    CHECK(tier.violation() == "");
  }
}

TEST_CASE("Saves.WhatIsGivenUpKeepsOnlyWhatIsInFlight") {
  FakeTier tier(MakeOptions(40, 2), std::vector<FakeTier::PathSpeed>(2));
  tier.AddSubgroup(1, 1, {20 * kBlock});
  tier.WriteState(1, 1, MLPO_PART_STATE);
  TrainStep(tier, 1, 1, 1);
  tier.part_write_ns = 100 * kS;
  const uint64_t save = tier.BeginSave(1, 1, Pace());
  tier.RunUntilAnswered(tier.Take(1, 1));
  TrainStep(tier, 1, 1, 2);  // what is pinned is the checkpoint's alone now
  tier.Wait(kS);
  REQUIRE(tier.part_writes == 4);
  CHECK(CheckpointBytes(tier) == 20 * kBlockBytes);
  const uint64_t abandoned = tier.Submit(1, MLPO_OP_SNAPSHOT, 0, 0, MLPO_SNAPSHOT_ABANDON, 1, 0);
  CHECK(tier.status(abandoned) == 0);
  CHECK(CheckpointBytes(tier) == 4 * kBlockBytes);
  CHECK_FALSE(tier.save(save).copied);
  TrainStep(tier, 1, 1, 3);
  tier.RunUntilQuiet();
  CHECK(tier.save(save).copied);
  CHECK(CheckpointBytes(tier) == 0);
  CHECK(tier.violation() == "");
  CHECK(tier.scheduler().idle());
}

// While what is pinned gets its place in the part, by a thread that may take long.
TEST_CASE("Saves.MayBeGivenUpOrLoseTheirSessionBeforeCopyingBegins") {
  for (const bool hands_over : {false, true}) {
    for (const bool ends : {false, true}) {
      INFO("hands over " << hands_over << " session ends " << ends);
      FakeTier tier(MakeOptions(8, 2), std::vector<FakeTier::PathSpeed>(2));
      tier.AddSubgroup(1, 1, {20 * kBlock});
      tier.WriteState(1, 1, MLPO_PART_STATE);
      TrainStep(tier, 1, 1, 1);
      const Versions taken = Now(tier, 1, 1, 20);
      tier.place_ns = kS;
      const std::vector<bool> next = hands_over ? std::vector<bool>{true, false} : std::vector<bool>{};
      const uint64_t save = tier.BeginSave(1, 1, Pace(), next);
      tier.RunUntilAnswered(tier.Take(1, 1));
      tier.Wait(kS / 10);
      REQUIRE(tier.save(save).taken);
      if (ends) {
        tier.EndSession(1);  // it goes on by itself
        tier.RunUntilQuiet();
        CHECK(tier.save(save).failure.status == 0);
        CHECK(IsInPart(tier, save, taken));
      } else {
        const uint64_t saved = tier.Saved(1, 1);
        CHECK(tier.status(tier.Submit(1, MLPO_OP_SNAPSHOT, 0, 0, MLPO_SNAPSHOT_ABANDON, 1, 0)) == 0);
        tier.RunUntilAnswered(saved);
        CHECK(tier.status(saved) == -ECANCELED);
        CHECK(tier.save(save).failure.status == -ECANCELED);
        // The next one begins while the first is still being placed.
        const Versions then = Now(tier, 1, 1, 20);
        const uint64_t second = tier.BeginSave(1, 2, Pace());
        REQUIRE(second != 0);
        tier.RunUntilAnswered(tier.Take(1, 2));
        TrainStep(tier, 1, 1, 2);
        tier.RunUntilQuiet();
        CHECK(tier.save(second).failure.status == 0);
        CHECK(IsInPart(tier, second, then));
        CHECK(CheckpointBytes(tier) == 0);
        tier.EndSession(1);
        tier.RunUntilQuiet();
      }
      CHECK(tier.HandedOverIsUnchanged());
      CHECK(tier.scratch_bytes() == 0);
      CHECK(tier.violation() == "");
      CHECK(tier.scheduler().idle());
    }
  }
}

TEST_CASE("Saves.OneThatIsBeingMadeDurableIsNotGivenUp") {
  FakeTier tier(MakeOptions(8, 1), std::vector<FakeTier::PathSpeed>(1));
  tier.AddSubgroup(1, 1, {4 * kBlock});
  tier.WriteState(1, 1, MLPO_PART_STATE);
  const uint64_t save = tier.BeginSave(1, 1, Pace());
  tier.Take(1, 1);
  const uint64_t saved = tier.Saved(1, 1);
  RunUntilCopied(tier, save);
  REQUIRE_FALSE(tier.answered(saved));
  CHECK(tier.status(tier.Submit(1, MLPO_OP_SNAPSHOT, 0, 0, MLPO_SNAPSHOT_ABANDON, 1, 0)) == -EALREADY);
  tier.RunUntilAnswered(saved);
  CHECK(tier.status(saved) == 0);
}

// Room was made for what there was when it began.
TEST_CASE("Saves.SubgroupsThatComeBeforeTheTakeNeedANewBeginning") {
  FakeTier tier(MakeOptions(40, 1), std::vector<FakeTier::PathSpeed>(1));
  tier.AddSubgroup(1, 1, {4 * kBlock});
  tier.WriteState(1, 1, MLPO_PART_STATE);
  REQUIRE(tier.BeginSave(1, 1, Pace()) != 0);
  tier.AddSubgroup(1, 2, {4 * kBlock});
  tier.WriteState(1, 2, MLPO_PART_STATE);
  const uint64_t take = tier.Take(1, 1);
  tier.RunUntilAnswered(take);
  CHECK(tier.status(take) == -ESTALE);
  CHECK(tier.status(tier.Submit(1, MLPO_OP_SNAPSHOT, 0, 0, MLPO_SNAPSHOT_ABANDON, 1, 0)) == 0);
  tier.RunUntilQuiet();
  const Versions taken = Now(tier, 1, 2, 4);
  const uint64_t save = tier.BeginSave(1, 2, Pace());
  REQUIRE(save != 0);
  tier.Take(1, 2);
  RunUntilCopied(tier, save);
  CHECK(IsInPart(tier, save, taken));
  CHECK(tier.violation() == "");
}

// Whatever is patient with the path: training waits for the TAKE.
TEST_CASE("Saves.ATakeThatWaitsForAPathThatHangsFailsInTimeAndAlone") {
  constexpr FakeTier::PathSpeed kGoes{1e6, 1e6}, kHangs{1e6, 0};
  for (const bool all : {false, true}) {
    INFO("all paths hang " << all);
    FakeTier tier(MakeOptions(100, 2), {kGoes, kGoes});
    for (SessionId session = 1; session <= 2; ++session) {
      tier.AddSubgroup(session, 1, {20 * kBlock});
      tier.WriteState(session, 1, MLPO_PART_STATE);
      TrainStep(tier, session, 1, 1);
    }
    tier.ChangeSpeed(0, tier.now_ns(), kHangs);
    if (all) tier.ChangeSpeed(1, tier.now_ns(), kHangs);
    REQUIRE(tier.BeginSave(1, 1, Pace()) != 0);
    const uint64_t take = tier.Take(1, 1), saved = tier.Saved(1, 1);
    const int64_t begin_ns = tier.now_ns();
    for (int i = 0; i < 60 && !tier.answered(take); ++i) tier.Wait(kS);
    REQUIRE(tier.answered(take));
    CHECK(tier.status(take) == MLPO_E_IO);
    CHECK(tier.completion(take).failure.os_errno == ETIMEDOUT);
    CHECK(tier.now_ns() - begin_ns < 30 * kS);
    tier.Wait(kS);
    REQUIRE(tier.answered(saved));
    CHECK(tier.status(saved) == MLPO_E_IO);
    TrainStep(tier, 2, 1, 2);  // in memory
    tier.ChangeSpeed(0, tier.now_ns(), kGoes);
    if (all) tier.ChangeSpeed(1, tier.now_ns(), kGoes);
    tier.RunUntilQuiet();
    TrainStep(tier, 1, 1, 2);
    const Versions taken = Now(tier, 1, 1, 20);
    const uint64_t save = tier.BeginSave(1, 2, Pace());
    REQUIRE(save != 0);
    tier.RunUntilAnswered(tier.Take(1, 2));
    RunUntilCopied(tier, save);
    CHECK(IsInPart(tier, save, taken));
    CHECK(tier.violation() == "");
  }
}

// It is none of the state: what an UPDATE that failed has left is still the open window's.
TEST_CASE("Saves.AGradientThatItsPathDoesNotTakeHoldsUpNeitherTakeNorCopies") {
  constexpr FakeTier::PathSpeed kGoes{1e6, 1e6}, kHangs{1e6, 0};  // writes do, reads go on
  FakeTier tier(KeptOptions(6, 1), {kGoes});
  tier.AddSubgroup(1, 1, {20 * kLargeBlock}, MLPO_BFLOAT16);
  tier.WriteState(1, 1, MLPO_PART_STATE);
  TrainStep(tier, 1, 1, 1);
  SaveAll(tier, 1);
  const Subgroup& subgroup = *tier.scheduler().FindSubgroup(1, 1);
  const std::vector<const Block*> away = AwayOn(subgroup, 0);
  REQUIRE(away.size() >= 2);
  tier.ChangeSpeed(0, tier.now_ns(), kHangs);
  const uint64_t grad = tier.Submit(1, MLPO_OP_GRAD, 1, 2, MLPO_PIECE_VALUE, away.front()->first, away.front()->count);
  tier.RunUntilAnswered(grad);
  REQUIRE(tier.status(grad) == 0);
  tier.Wait(6 * kS);
  REQUIRE(tier.counts(0).in_flight == 1);  // and it is known to hang
  const Versions taken = Now(tier, 1, 1, static_cast<uint32_t>(subgroup.blocks.size()));
  const uint64_t save = tier.BeginSave(1, 2, Pace());
  REQUIRE(save != 0);
  const uint64_t read =
      tier.Submit(1, MLPO_OP_READ_STATE, 1, 0, MLPO_PART_STATE, away.back()->first, away.back()->count);
  const uint64_t update = tier.Update(1, 1, 2);
  const uint64_t take = tier.Take(1, 2), saved = tier.Saved(1, 2);
  for (int i = 0; i < 60 && !tier.answered(saved); ++i) tier.Wait(kS);
  CHECK(tier.status(read) == 0);
  REQUIRE(tier.answered(update));
  CHECK(tier.status(update) != 0);  // most of its gradient is missing
  CHECK(tier.status(take) == 0);
  REQUIRE(tier.answered(saved));
  CHECK(tier.status(saved) == 0);
  CHECK(IsInPart(tier, save, taken));
  CHECK(tier.counts(0).in_flight == 1);  // still
  tier.ChangeSpeed(0, tier.now_ns(), kGoes);
  tier.RunUntilQuiet();
  CHECK(tier.status(tier.Submit(1, MLPO_OP_DISCARD, 1, 0, 0, 0, 0)) == 0);
  TrainStep(tier, 1, 1, 2);
  CHECK(tier.violation() == "");
}

// Those that read, or have all in memory, go on without a path that is written to.
TEST_CASE("Saves.ATakeThatNoPathTakesFailsInTimeWhileOthersGoOn") {
  FakeTier tier(MakeOptions(60, 2), std::vector<FakeTier::PathSpeed>(2, {1e6, 1e6}));
  tier.AddSubgroup(2, 1, {80 * kBlock});
  tier.WriteState(2, 1, MLPO_PART_STATE);
  TrainStep(tier, 2, 1, 1);
  SaveAll(tier, 2);
  tier.AddSubgroup(1, 1, {20 * kBlock});
  tier.WriteState(1, 1, MLPO_PART_STATE);
  TrainStep(tier, 1, 1, 1);
  uint64_t read = 0, times = 0;
  bool goes_on = true;
  const auto reads = [&] { read = tier.Submit(2, MLPO_OP_READ_STATE, 1, 0, MLPO_PART_STATE, 0, 80 * kBlock); };
  tier.on_complete = [&](const Completion& completion) {
    if (completion.user_data != read) return;
    CHECK(completion.failure.status == 0);
    ++times;
    if (goes_on) reads();
  };
  reads();
  for (PathIndex path = 0; path < 2; ++path)
    tier.SetFault(path, [](const Transfer& t) { return t.direction == Direction::kWrite ? EIO : 0; });
  REQUIRE(tier.BeginSave(1, 1, Pace()) != 0);
  const uint64_t take = tier.Take(1, 1);
  const int64_t begin_ns = tier.now_ns();
  for (int i = 0; i < 100 && !tier.answered(take); ++i) tier.Wait(kS);
  REQUIRE(tier.answered(take));
  CHECK(tier.status(take) == MLPO_E_IO);
  CHECK(tier.now_ns() - begin_ns < 30 * kS);
  CHECK(times > 5);
  goes_on = false;
  for (PathIndex path = 0; path < 2; ++path) tier.SetFault(path, nullptr);
  TrainStep(tier, 1, 1, 2);
  tier.RunUntilQuiet();
  CHECK(tier.violation() == "");
  CHECK(tier.scheduler().idle());
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

// What is queued in front of a TAKE may hang: who gives it up hears of it at once.
TEST_CASE("Saves.ATakeThatIsGivenUpIsAnsweredAtOnce") {
  FakeTier tier(MakeOptions(40, 1), {{1e6, 1e6}});
  tier.AddSubgroup(1, 1, {20 * kBlock});
  tier.WriteState(1, 1, MLPO_PART_STATE);
  TrainStep(tier, 1, 1, 1);
  REQUIRE(tier.BeginSave(1, 1, Pace()) != 0);
  const uint64_t read = tier.Submit(1, MLPO_OP_READ_STATE, 1, 0, MLPO_PART_STATE, 0, 20 * kBlock);
  const uint64_t take = tier.Take(1, 1);
  REQUIRE_FALSE(tier.answered(read));
  CHECK(tier.status(tier.Submit(1, MLPO_OP_SNAPSHOT, 0, 0, MLPO_SNAPSHOT_ABANDON, 1, 0)) == 0);
  REQUIRE(tier.answered(take));
  CHECK(tier.status(take) == -ECANCELED);
  tier.RunUntilQuiet();
  CHECK(tier.status(read) == 0);
  CHECK(tier.violation() == "");
  CHECK(tier.scheduler().idle());
}

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

TEST_CASE("Saves.KeptGradientsStayOutOfIt") {
  FakeTier tier(KeptOptions(3, 2), std::vector<FakeTier::PathSpeed>(2));
  tier.AddSubgroup(1, 1, {8 * kLargeBlock}, MLPO_BFLOAT16);
  tier.WriteState(1, 1, MLPO_PART_STATE);
  TrainStep(tier, 1, 1, 1);
  const uint32_t blocks = Scheduler::BlockCount(tier.scheduler().FindSubgroup(1, 1)->spec, kLargeBlock);
  const Versions taken = Now(tier, 1, 1, blocks);
  const uint64_t save = tier.BeginSave(1, 1, Pace());
  tier.Take(1, 1);
  TrainStep(tier, 1, 1, 2);
  TrainStep(tier, 1, 1, 3);
  RunUntilCopied(tier, save);
  CHECK(tier.save(save).failure.status == 0);
  CHECK(IsInPart(tier, save, taken));
  tier.RunUntilQuiet();
  CHECK(tier.violation() == "");
}
