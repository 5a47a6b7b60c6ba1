// Saves that cannot go on, or are given up: they hold up nobody, keep little, and end in time.
#include <cerrno>
#include <set>
#include <string>
#include <vector>

#include "tests/unit/scheduler_saves.h"

using namespace mlpo;
using namespace mlpo::test;

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
