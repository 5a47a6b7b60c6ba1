// Paths that are disabled, evacuated and enabled while they are in use, on a fake tier: it compares what each buffer
// and extent holds, and what an evacuated path held is gone for good.
#include <cerrno>
#include <random>

#include "tests/support/fake_tier.h"
//
#include "tests/support/catch.h"

using namespace mlpo;
using mlpo::test::FakeTier;

namespace {

constexpr uint64_t kBlock = 1024;
constexpr uint64_t kBlockBytes = 12 * kBlock;
constexpr int64_t kSecond = 1'000'000'000;

Scheduler::Options MakeOptions(uint32_t buffers, size_t paths) {
  Scheduler::Options options;
  options.buffers = buffers;
  options.block_elements = kBlock;
  options.extents_offset_bytes = 4096;
  options.no_path_timeout_ns = 5 * kSecond;
  options.paths.resize(paths);
  for (size_t i = 0; i < paths; ++i) options.path_names.push_back("path" + std::to_string(i));
  return options;
}

FakeTier MakeTier(uint32_t buffers, size_t paths) {
  return FakeTier(MakeOptions(buffers, paths), std::vector<FakeTier::PathSpeed>(paths));
}

PathSnapshot Look(FakeTier& tier, PathIndex path) {
  PathSnapshot snapshot;
  tier.scheduler().Fill(path, &snapshot, tier.now_ns());
  return snapshot;
}

void Begin(FakeTier& tier, SessionId session, uint64_t blocks) {
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

int ReadAll(FakeTier& tier, SessionId session) {
  const uint64_t read = tier.Submit(session, MLPO_OP_READ_STATE, 1, 0, MLPO_PART_STATE, 0, tier.Numel(session, 1));
  tier.RunUntilAnswered(read);
  return tier.status(read);
}

void Evacuate(FakeTier& tier, PathIndex path) { tier.scheduler().EvacuatePath(path, tier.now_ns()); }

// Whether it has ended within so many seconds.
bool Ends(FakeTier& tier, PathIndex path, int seconds = 20) {
  for (int i = 0; i < seconds && !Look(tier, path).evacuated; ++i) tier.Wait(kSecond);
  return Look(tier, path).evacuated;
}

}  // namespace

TEST_CASE("Evacuation.MovesWhatNobodyUses") {
  for (const uint32_t buffers : {1u, 2u, 6u, 100u}) {
    for (const size_t paths : {2u, 3u}) {
      CAPTURE(buffers, paths);
      FakeTier tier = MakeTier(buffers, paths);
      Begin(tier, 1, 60);
      Begin(tier, 2, 7);
      const uint64_t bytes = Look(tier, 0).scratch_bytes;
      Evacuate(tier, 0);
      CHECK(Look(tier, 0).state == "disabled");
      CHECK(Look(tier, 0).evacuation_bytes == bytes);
      CHECK(tier.scheduler().ailing() == (bytes > 0));
      const uint64_t writes = tier.counts(0).writes;
      REQUIRE(Ends(tier, 0));
      CHECK(Look(tier, 0).scratch_bytes == 0);
      CHECK(Look(tier, 0).unreadable_blocks == 0);
      CHECK(tier.evacuated == std::vector<PathIndex>{0});
      CHECK(tier.counts(0).writes == writes);
      CHECK_FALSE(tier.scheduler().ailing());
      CHECK(ReadAll(tier, 1) == 0);
      CHECK(ReadAll(tier, 2) == 0);
      for (uint32_t epoch = 1; epoch <= 2; ++epoch) Train(tier, 1, epoch);
      CHECK(tier.counts(0).writes == writes);
      CHECK(tier.violation() == "");
    }
  }
}

TEST_CASE("Evacuation.WhileTraining") {
  for (const Order order : {Order::kAdaptive, Order::kAlternating}) {
    for (const int steps_before : {0, 3, 40, 200}) {
      CAPTURE(static_cast<int>(order), steps_before);
      Scheduler::Options options = MakeOptions(8, 3);
      options.order = order;
      FakeTier tier(options, std::vector<FakeTier::PathSpeed>(3, {1e6, 1e6}), 1'000'000);
      Begin(tier, 1, 90);
      Train(tier, 1, 1);
      tier.RunUntilAnswered(tier.Grad(1, 1, 2));
      const uint64_t update = tier.Update(1, 1, 2);
      for (int i = 0; i < steps_before; ++i) tier.Step();
      Evacuate(tier, 1);
      tier.RunUntilAnswered(update);
      CHECK(tier.status(update) == 0);
      for (uint32_t epoch = 3; epoch <= 5; ++epoch) Train(tier, 1, epoch);
      CHECK(Ends(tier, 1));
      Train(tier, 1, 6);
      CHECK(tier.updates() == 6 * 90);
      CHECK(tier.violation() == "");
    }
  }
}

// A background read of one block at a time: a step takes no longer than with the path disabled alone, or little.
TEST_CASE("Evacuation.HoldsTrainingUpByLittle") {
  int64_t took_ns[2] = {};
  for (const bool evacuate : {false, true}) {
    FakeTier tier(MakeOptions(12, 2), std::vector<FakeTier::PathSpeed>(2, {1e6, 1e6}), 100'000);
    Begin(tier, 1, 60);
    Begin(tier, 2, 60);  // what lies there and is not used
    for (uint32_t epoch = 1; epoch <= 2; ++epoch) Train(tier, 1, epoch);
    evacuate ? Evacuate(tier, 0) : tier.scheduler().DisablePath(0, tier.now_ns());
    const int64_t start_ns = tier.now_ns();
    for (uint32_t epoch = 3; epoch <= 6; ++epoch) Train(tier, 1, epoch);
    took_ns[evacuate] = tier.now_ns() - start_ns;
    CHECK(tier.violation() == "");
  }
  INFO("disabled: " << took_ns[0] << " ns, evacuated: " << took_ns[1]);
  // 60 blocks more to write beside 4 * 60 or so.
  CHECK(static_cast<double>(took_ns[1]) <= 1.35 * static_cast<double>(took_ns[0]));
}

TEST_CASE("Evacuation.OfObjects") {
  FakeTier tier = MakeTier(4, 2);
  tier.AddSession(1);
  const uint64_t bytes = 20 * kBlockBytes + 5000;
  const uint64_t commit = tier.Flush(1, 1, "a", bytes, kBlockBytes / 2);
  tier.RunUntilAnswered(commit);
  REQUIRE(tier.status(commit) == 0);
  tier.RunUntilQuiet();
  REQUIRE(Look(tier, 1).scratch_bytes > 0);
  Evacuate(tier, 1);
  REQUIRE(Ends(tier, 1));
  tier.Open(1, MLPO_OP_FETCH, 2, "a");
  const uint64_t read = tier.Piece(1, MLPO_OP_FETCH, 2, 0, bytes);
  tier.RunUntilAnswered(read);
  CHECK(tier.status(read) == 0);
  tier.EndSession(1);
  tier.RunUntilQuiet();
  CHECK(tier.scratch_bytes() == 0);
  CHECK(tier.violation() == "");
}

TEST_CASE("Evacuation.OfKeptGradients") {
  SubgroupSpec spec;
  spec.kept_as = MLPO_BFLOAT16;
  const uint64_t block = 4 * kBlock;  // one of kBlock has no room for a gradient
  const uint64_t cut = Scheduler::BlockElements(spec, block);
  REQUIRE(cut > 0);
  for (const uint32_t buffers : {3u, 20u}) {
    CAPTURE(buffers);
    Scheduler::Options options = MakeOptions(buffers, 2);
    options.block_elements = block;
    FakeTier tier(options, std::vector<FakeTier::PathSpeed>(2));
    tier.AddSubgroup(1, 1, {30 * cut}, MLPO_BFLOAT16);
    tier.WriteState(1, 1, MLPO_PART_STATE);
    tier.RunUntilQuiet();
    Train(tier, 1, 1);
    tier.RunUntilAnswered(tier.Grad(1, 1, 2));
    Evacuate(tier, 0);
    CHECK(Ends(tier, 0));
    const uint64_t update = tier.Update(1, 1, 2);
    tier.RunUntilAnswered(update);
    CHECK(tier.status(update) == 0);
    Train(tier, 1, 3);
    CHECK(tier.violation() == "");
  }
}

TEST_CASE("Evacuation.WaitsForAPathThatTakesTheBlocks") {
  FakeTier tier = MakeTier(6, 2);
  Begin(tier, 1, 60);
  bool full = true;
  tier.SetFault(1, [&](const Transfer& t) { return full && t.direction == Direction::kWrite ? ENOSPC : 0; });
  Evacuate(tier, 0);
  tier.Wait(30 * kSecond);
  CHECK(Look(tier, 0).scratch_bytes > 0);
  CHECK(Look(tier, 1).state == "full");
  CHECK_FALSE(Look(tier, 0).evacuated);
  full = false;
  CHECK(Ends(tier, 0));
  CHECK(ReadAll(tier, 1) == 0);
  CHECK(tier.violation() == "");
}

TEST_CASE("Evacuation.WhatCannotBeReadStaysAndIsCounted") {
  FakeTier tier = MakeTier(6, 2);
  Begin(tier, 1, 60);
  uint64_t bad = 0;
  for (const Block& block : tier.scheduler().FindSubgroup(1, 1)->blocks) {
    if (block.state == BlockState::kAway && block.extent.path == 0) bad = 4096 + block.extent.offset;
  }
  REQUIRE(bad != 0);
  int reads = 0;
  bool broken = true;
  tier.SetFault(0, [&](const Transfer& t) {
    if (t.id == 0 || t.direction == Direction::kWrite || t.offset != bad || !broken) return 0;
    ++reads;
    return EIO;
  });
  Evacuate(tier, 0);
  tier.Wait(100 * kSecond);
  CHECK(Look(tier, 0).scratch_bytes == kBlockBytes);
  CHECK(Look(tier, 0).unreadable_blocks == 1);
  CHECK((reads >= 2 && reads <= 10));
  CHECK(Look(tier, 0).state == "disabled");
  broken = false;
  CHECK(Ends(tier, 0, 70));
  CHECK(ReadAll(tier, 1) == 0);
  CHECK(tier.violation() == "");
}

// With checksums, what was read is compared before it is written elsewhere: once its extent is given back, a bit that
// flipped on the way would be wrong for good.
TEST_CASE("Evacuation.WhatWasWrongOnTheWayIsReadAgainAndMoves") {
  Scheduler::Options options = MakeOptions(6, 2);
  options.integrity = true;
  FakeTier tier(options, std::vector<FakeTier::PathSpeed>(2));
  Begin(tier, 1, 60);
  int reads = 0;
  tier.SetFlip(0, [&](const Transfer&, bool again) { return !again && ++reads % 7 == 1; });
  Evacuate(tier, 0);
  CHECK(Ends(tier, 0));
  CHECK(reads > 14);
  CHECK(Look(tier, 0).checksum_mismatches == static_cast<uint64_t>((reads + 6) / 7));
  CHECK(Look(tier, 0).checksum_errors == 0);
  CHECK(Look(tier, 0).error == 0);
  CHECK(ReadAll(tier, 1) == 0);
  for (uint32_t epoch = 1; epoch <= 2; ++epoch) Train(tier, 1, epoch);
  CHECK(Look(tier, 1).checksum_mismatches == 0);
  CHECK(tier.violation() == "");
}

TEST_CASE("Evacuation.WhatIsWrongStaysAndIsCountedAndNotGivenOut") {
  Scheduler::Options options = MakeOptions(6, 2);
  options.integrity = true;
  FakeTier tier(options, std::vector<FakeTier::PathSpeed>(2));
  Begin(tier, 1, 60);
  const Block* bad = nullptr;
  for (const Block& block : tier.scheduler().FindSubgroup(1, 1)->blocks) {
    if (block.state == BlockState::kAway && block.extent.path == 0) bad = &block;
  }
  REQUIRE(bad != nullptr);
  tier.SetFlip(0, [at = 4096 + bad->extent.offset](const Transfer& t, bool) { return t.offset == at; });
  Evacuate(tier, 0);
  tier.Wait(100 * kSecond);
  CHECK(Look(tier, 0).scratch_bytes == kBlockBytes);
  CHECK(Look(tier, 0).unreadable_blocks == 1);
  CHECK(Look(tier, 0).checksum_errors >= 1);
  CHECK(Look(tier, 0).checksum_errors <= 8);
  CHECK(Look(tier, 0).error == EBADMSG);
  CHECK(bad->extent.path == 0);
  const uint64_t read = tier.Submit(1, MLPO_OP_READ_STATE, 1, 0, MLPO_PART_STATE, bad->first, bad->count);
  tier.RunUntilAnswered(read);
  REQUIRE(tier.status(read) == MLPO_E_IO);
  CHECK(tier.completion(read).failure.os_errno == EBADMSG);
  CHECK(tier.completion(read).failure.block == bad->index);
  tier.SetFlip(0, nullptr);  // it was the cable
  CHECK(Ends(tier, 0, 70));
  CHECK(ReadAll(tier, 1) == 0);
  CHECK(tier.scheduler().FindSubgroup(1, 1)->damaged == 0);
  CHECK(tier.violation() == "");
}

TEST_CASE("Evacuation.EndsWithTheSessions") {
  FakeTier tier(MakeOptions(6, 2), std::vector<FakeTier::PathSpeed>(2, {1e5, 1e5}));
  Begin(tier, 1, 60);
  Evacuate(tier, 0);
  tier.Wait(kSecond);
  REQUIRE_FALSE(Look(tier, 0).evacuated);
  tier.EndSession(1);
  CHECK(Ends(tier, 0));
  CHECK(tier.gone(1));
  CHECK(tier.violation() == "");
}

TEST_CASE("Evacuation.EnablingEndsItAndThePathIsProbedAndUsedAgain") {
  for (const bool all : {false, true}) {
    CAPTURE(all);
    FakeTier tier(MakeOptions(6, 2), std::vector<FakeTier::PathSpeed>(2, {1e6, 1e6}));
    Begin(tier, 1, 60);
    Evacuate(tier, 0);
    if (all) REQUIRE(Ends(tier, 0));
    if (!all) tier.Wait(100'000'000);
    const uint64_t writes = tier.counts(0).writes;
    tier.EnablePath(0);
    CHECK(Look(tier, 0).state == "probing");
    CHECK(Look(tier, 0).evacuation_bytes == 0);
    tier.Wait(kSecond);
    CHECK(Look(tier, 0).state == "healthy");
    CHECK(tier.counts(0).probes == 1);
    for (uint32_t epoch = 1; epoch <= 3; ++epoch) Train(tier, 1, epoch);
    CHECK(tier.counts(0).writes > writes);
    CHECK(Look(tier, 0).scratch_bytes >= 20 * kBlockBytes);
    Evacuate(tier, 0);
    CHECK(Ends(tier, 0));
    CHECK(ReadAll(tier, 1) == 0);
    CHECK(tier.violation() == "");
  }
}

// Room is made, and files with it, by a thread that takes its time.
TEST_CASE("Evacuation.FilesThatAreToldOfAfterItsEndAreNoneAnyMore") {
  FakeTier tier = MakeTier(20, 2);
  tier.AddSession(1);
  constexpr uint64_t kBytes = 60 * kBlockBytes;
  const uint64_t open = tier.Open(1, MLPO_OP_FLUSH, 7, "object", kBytes);
  Evacuate(tier, 0);
  REQUIRE(Look(tier, 0).evacuated);
  REQUIRE_FALSE(tier.answered(open));
  tier.RunUntilAnswered(open);
  REQUIRE(tier.status(open) == 0);
  tier.EnablePath(0);
  tier.Wait(5 * kSecond);
  REQUIRE(Look(tier, 0).state == "healthy");
  const uint64_t writes = tier.counts(0).writes;
  for (uint64_t at = 0; at < kBytes; at += kBlockBytes) tier.Piece(1, MLPO_OP_FLUSH, 7, at, kBlockBytes);
  const uint64_t commit = tier.Commit(1, 7);
  tier.RunUntilAnswered(commit);
  CHECK(tier.status(commit) == 0);
  tier.RunUntilQuiet();
  CHECK(tier.counts(0).writes > writes);
  CHECK(tier.violation() == "");
}

// A daemon that drains has other things to do.
TEST_CASE("Evacuation.CanBeEndedWithoutUsingThePathAgain") {
  FakeTier tier(MakeOptions(6, 2), std::vector<FakeTier::PathSpeed>(2, {1e6, 1e6}));
  Begin(tier, 1, 60);
  Evacuate(tier, 0);
  tier.Wait(50'000'000);
  tier.scheduler().EndEvacuations();
  tier.RunUntilQuiet();
  CHECK(tier.scheduler().idle());
  CHECK(Look(tier, 0).scratch_bytes > 0);
  CHECK(Look(tier, 0).state == "disabled");
  CHECK_FALSE(tier.scheduler().ailing());
  CHECK(ReadAll(tier, 1) == 0);
  CHECK(tier.violation() == "");
}

TEST_CASE("Disabling.LeavesWhatIsThereToBeRead") {
  FakeTier tier = MakeTier(6, 2);
  Begin(tier, 1, 60);
  const uint64_t writes = tier.counts(0).writes;
  tier.scheduler().DisablePath(0, tier.now_ns());
  tier.Wait(20 * kSecond);
  CHECK(Look(tier, 0).scratch_bytes > 0);
  CHECK(ReadAll(tier, 1) == 0);
  CHECK(tier.counts(0).writes == writes);
  CHECK(tier.counts(0).probes == 0);
  CHECK(tier.evacuated.empty());
  for (uint32_t epoch = 1; epoch <= 2; ++epoch) Train(tier, 1, epoch);  // each block has a new place after an update
  CHECK(Look(tier, 0).scratch_bytes == 0);
  CHECK(tier.violation() == "");
}

TEST_CASE("Disabling.TheLastPathIsNeeded") {
  FakeTier one = MakeTier(6, 1);
  CHECK(one.scheduler().WhyNeeded(0) == "it is the only path");
  FakeTier tier = MakeTier(6, 2);
  CHECK(tier.scheduler().WhyNeeded(0) == "");
  CHECK(tier.scheduler().WhyNeeded(1) == "");
  tier.scheduler().DisablePath(1, tier.now_ns());
  CHECK(tier.scheduler().WhyNeeded(0) == "no other path takes what is written: 'path1' is disabled");
  CHECK(tier.scheduler().WhyNeeded(1) == "");
}

// Sessions and objects that come and go, commands and failures at any moment.
TEST_CASE("Evacuation.RandomCommands") {
  for (uint64_t seed = 1; seed <= 150; ++seed) {
    CAPTURE(seed);
    std::mt19937_64 random(seed);
    const auto below = [&](uint64_t n) { return random() % n; };
    const size_t paths = 2 + below(3);
    Scheduler::Options options = MakeOptions(static_cast<uint32_t>(1 + below(12)), paths);
    options.integrity = seed % 2 == 0;
    FakeTier tier(options, std::vector<FakeTier::PathSpeed>(paths, {1e7, 5e6}),
                  1 + static_cast<int64_t>(below(100'000)));
    const uint64_t rate = below(2) == 0 ? 0 : 50;
    bool calm = false;
    for (PathIndex i = 0; i < paths; ++i) {
      tier.SetFault(i, [&, rate](const Transfer&) { return !calm && rate > 0 && random() % rate == 0 ? EIO : 0; });
      if (options.integrity)
        tier.SetFlip(i, [&](const Transfer&, bool again) { return !calm && !again && random() % 20 == 0; });
    }
    std::vector<SessionId> alive;
    SessionId next = 1;
    for (int i = 0; i < 200; ++i) {
      if (alive.size() < 3) {
        tier.AddSubgroup(next, 1, {1 + below(20 * kBlock)});
        tier.WriteState(next, 1, MLPO_PART_STATE);
        alive.push_back(next++);
      }
      const SessionId session = alive[below(alive.size())];
      const auto path = static_cast<PathIndex>(below(paths));
      switch (below(8)) {
        case 0:
          if (tier.scheduler().WhyNeeded(path).empty()) Evacuate(tier, path);
          break;
        case 1:
          if (tier.scheduler().WhyNeeded(path).empty()) tier.scheduler().DisablePath(path, tier.now_ns());
          break;
        case 2:
        case 3:
          tier.EnablePath(path);
          break;
        case 4:
          tier.Flush(session, 1, "a", below(8 * kBlockBytes), kBlockBytes);
          break;
        case 5:
          if (below(4) == 0) {
            tier.EndSession(session);
            std::erase(alive, session);
          }
          break;
        default: {
          const uint32_t epoch = tier.scheduler().FindSubgroup(session, 1)->epoch + 1;
          tier.Grad(session, 1, epoch);
          tier.Update(session, 1, epoch);
        }
      }
      for (uint64_t steps = below(60); steps > 0 && tier.Step(); --steps) {
      }
    }
    calm = true;
    for (PathIndex i = 0; i < paths; ++i) tier.EnablePath(i);
    tier.Wait(100 * kSecond);
    Evacuate(tier, 0);
    CHECK(Ends(tier, 0, 100));
    for (const SessionId session : alive) CHECK(ReadAll(tier, session) == 0);
    for (const SessionId session : alive) tier.EndSession(session);
    tier.RunUntilQuiet();
    CHECK(tier.scratch_bytes() == 0);
    PoolSnapshot pool;
    tier.scheduler().Fill(&pool);
    CHECK(pool.free_blocks == pool.buffers);
    CHECK(tier.violation() == "");
  }
}
