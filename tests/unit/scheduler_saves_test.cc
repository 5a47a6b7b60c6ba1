// A session's state on its way into a checkpoint, on a fake tier in virtual time: it is the state as it was when it was
// taken, whatever goes on meanwhile, and training hardly notices.
#include <algorithm>
#include <cerrno>
#include <string>
#include <vector>

#include "tests/unit/scheduler_saves.h"

using namespace mlpo;
using namespace mlpo::test;

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
