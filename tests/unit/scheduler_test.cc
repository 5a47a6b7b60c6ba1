// The scheduler on a fake tier in virtual time: nothing lost, nothing stuck, and as fast as its paths.
#include <cmath>
#include <map>

#include "tests/support/fake_tier.h"
//
#include "tests/support/catch.h"

using namespace mlpo;
using mlpo::test::FakeTier;

namespace {

constexpr uint64_t kBlock = 1024;  // elements: parts of 4 KiB, blocks of 12 KiB

Scheduler::Options MakeOptions(uint32_t buffers, size_t paths) {
  Scheduler::Options options;
  options.buffers = buffers;
  options.block_elements = kBlock;
  options.extents_offset_bytes = 4096;
  options.no_path_timeout_ns = 5'000'000'000;
  options.paths.resize(paths);
  return options;
}

// One step of all subgroups: every update submitted at once.
void TrainStep(FakeTier& tier, SessionId session, int subgroups, uint32_t epoch) {
  std::vector<uint64_t> grads;
  for (int id = 1; id <= subgroups; ++id) grads.push_back(tier.Grad(session, id, epoch));
  for (uint64_t grad : grads) tier.RunUntilAnswered(grad);
  std::vector<uint64_t> updates;
  for (int id = 1; id <= subgroups; ++id) updates.push_back(tier.Update(session, id, epoch));
  for (uint64_t update : updates) {
    tier.RunUntilAnswered(update);
    CHECK(tier.status(update) == 0);
  }
}

// Gives the tier a subgroup of 20 blocks on storage, and an update of it whose sixth read fails. Returns the update.
uint64_t FailAnUpdateInTheMiddle(FakeTier& tier) {
  tier.AddSubgroup(1, 1, {20 * kBlock});
  tier.WriteState(1, 1, MLPO_PART_STATE);
  tier.RunUntilQuiet();
  tier.SetFault(
      0, [reads = 0](const Transfer& t) mutable { return t.direction == Direction::kRead && ++reads == 6 ? EIO : 0; });
  tier.Grad(1, 1, 1);
  tier.RunUntilQuiet();
  const uint64_t update = tier.Update(1, 1, 1);
  tier.RunUntilAnswered(update);
  return update;
}

}  // namespace

TEST_CASE("Scheduler.TrainsWithAnyNumberOfBuffersAndPaths") {
  for (uint32_t buffers : {1u, 2u, 3u, 4u, 7u, 64u}) {
    for (size_t paths : {1u, 2u, 5u}) {
      FakeTier tier(MakeOptions(buffers, paths), std::vector<FakeTier::PathSpeed>(paths));
      for (int id = 1; id <= 3; ++id) tier.AddSubgroup(1, id, {5 * kBlock + 7, 0, 3});
      for (int id = 1; id <= 3; ++id) tier.WriteState(1, id);
      tier.RunUntilQuiet();
      for (uint32_t epoch = 1; epoch <= 3; ++epoch) TrainStep(tier, 1, 3, epoch);
      tier.RunUntilQuiet();
      INFO("buffers " << buffers << " paths " << paths);
      CHECK(tier.violation() == "");
      CHECK(tier.updates() == 3 * 3 * 6);
      CHECK(tier.scheduler().idle());
    }
  }
}

TEST_CASE("Scheduler.EveryBlockIsReadAndWrittenOnceAStepLessWhatStays") {
  FakeTier tier(MakeOptions(16, 2), std::vector<FakeTier::PathSpeed>(2));
  tier.AddSubgroup(1, 1, {64 * kBlock});
  tier.WriteState(1, 1, MLPO_PART_STATE);
  for (uint32_t epoch = 1; epoch <= 4; ++epoch) TrainStep(tier, 1, 1, epoch);
  tier.RunUntilQuiet();
  const uint64_t reads = tier.counts(0).reads + tier.counts(1).reads;
  // 16 of 64 blocks stay, but for the low-water mark's worth that is freed and fetched ahead.
  CHECK(reads <= 4 * (64 - 16) + 8 + 8);
  CHECK(reads >= 3 * (64 - 16));
}

TEST_CASE("Scheduler.CachedBlocksGoFirst") {
  FakeTier tier(MakeOptions(8, 1), {{1e6, 1e6}});
  tier.AddSubgroup(1, 1, {32 * kBlock});
  tier.WriteState(1, 1, MLPO_PART_STATE);
  TrainStep(tier, 1, 1, 1);
  tier.RunUntilQuiet();
  PoolSnapshot pool;
  tier.scheduler().Fill(&pool);
  const uint64_t cached = pool.cached_blocks;
  REQUIRE(cached >= 4);
  tier.Grad(1, 1, 2);
  tier.RunUntilQuiet();
  const size_t worked_before = tier.worked().size();
  const uint64_t reads_before = tier.counts(0).reads;
  tier.Update(1, 1, 2);
  // All that is cached is worked on before the first read can end (12 ms each).
  const int64_t start_ns = tier.now_ns();
  while (tier.now_ns() < start_ns + 5'000'000 && tier.Step()) {
  }
  CHECK(tier.worked().size() - worked_before >= cached);
  CHECK(tier.counts(0).reads > reads_before);  // and reading has begun meanwhile
}

TEST_CASE("Scheduler.SharesFollowDeclaredSpeeds") {
  Scheduler::Options options = MakeOptions(16, 2);
  options.paths = {{345e6, 265e6, 0.5, 0}, {180e6, 180e6, 0.5, 0}};
  FakeTier tier(options, {{345e6, 265e6}, {180e6, 180e6}});
  tier.AddSubgroup(1, 1, {256 * kBlock});
  tier.WriteState(1, 1, MLPO_PART_STATE);
  for (uint32_t epoch = 1; epoch <= 4; ++epoch) TrainStep(tier, 1, 1, epoch);
  PathSnapshot fast, slow;
  tier.scheduler().Fill(0, &fast, 0);
  tier.scheduler().Fill(1, &slow, 0);
  const double share =
      static_cast<double>(fast.scratch_bytes) / static_cast<double>(fast.scratch_bytes + slow.scratch_bytes);
  CHECK(share == Approx(265.0 / 445).margin(0.03));
}

TEST_CASE("Scheduler.AStepTakesWhatThePathsAllow") {
  struct Case {
    std::vector<PathParameters> paths;
    uint32_t buffers;
    double limit_share;
  };
  const std::vector<Case> cases = {
      {{{345e6, 265e6, 0.5, 0}}, 16, 0.93},
      {{{345e6, 265e6, 0.5, 0}, {180e6, 180e6, 0.5, 0}}, 16, 0.9},
      {{{345e6, 265e6, 0.5, 0}, {180e6, 180e6, 0.5, 0}}, 64, 0.93},
      {{{337e6, 120e6, 0.5, 0}, {173e6, 343e6, 0.5, 0}}, 64, 0.93},  // one reads fast, the other writes fast
      {{{345e6, 265e6, 0.5, 0}, {180e6, 180e6, 0.5, 0}, {100e6, 100e6, 0.5, 0}}, 64, 0.93},
  };
  for (const Case& c : cases) {
    Scheduler::Options options = MakeOptions(c.buffers, c.paths.size());
    options.paths = c.paths;
    std::vector<FakeTier::PathSpeed> speeds;
    double worth = 0;
    for (const PathParameters& path : c.paths) {
      speeds.push_back({path.read_bytes_per_s, path.write_bytes_per_s});
      worth += PathWorth(path);
    }
    FakeTier tier(options, speeds);
    constexpr int kBlocks = 256;
    tier.AddSubgroup(1, 1, {kBlocks * kBlock});
    tier.WriteState(1, 1, MLPO_PART_STATE);
    for (uint32_t epoch = 1; epoch <= 2; ++epoch) TrainStep(tier, 1, 1, epoch);
    const int64_t start_ns = tier.now_ns();
    constexpr int kSteps = 4;
    for (uint32_t epoch = 3; epoch < 3 + kSteps; ++epoch) TrainStep(tier, 1, 1, epoch);
    const double period_s = static_cast<double>(tier.now_ns() - start_ns) / 1e9 / kSteps;
    const double bytes = static_cast<double>((kBlocks - c.buffers) * Scheduler::BufferBytes(kBlock));
    const double limit_share = bytes / worth / period_s;
    INFO("paths " << c.paths.size() << " buffers " << c.buffers << " limit_share " << limit_share);
    CHECK(limit_share >= c.limit_share);
    CHECK(limit_share <= 1.03);  // above it, the model or the tier is wrong
    CHECK(tier.violation() == "");
  }
}

TEST_CASE("Scheduler.OnePathCannotTakeThePool") {
  // A path that hardly moves: the other one's share of buffers is never in its hands.
  FakeTier tier(MakeOptions(12, 2), {{1e3, 1e3}, {1e9, 1e9}});
  tier.AddSubgroup(1, 1, {64 * kBlock});
  tier.WriteState(1, 1, MLPO_PART_STATE);
  for (int i = 0; i < 3000 && tier.Step(); ++i) {
  }
  CHECK(tier.counts(0).most_in_flight <= 4);
  CHECK(tier.counts(1).most_in_flight <= 4);
}

TEST_CASE("Scheduler.SessionsShareTheBuffers") {
  FakeTier tier(MakeOptions(4, 1), {{1e6, 1e6}});
  for (SessionId session = 1; session <= 3; ++session) {
    tier.AddSubgroup(session, 1, {20 * kBlock});
    tier.WriteState(session, 1, MLPO_PART_STATE);
  }
  tier.RunUntilQuiet();
  std::vector<uint64_t> updates;
  for (SessionId session = 1; session <= 3; ++session) tier.Grad(session, 1, 1);
  tier.RunUntilQuiet();
  for (SessionId session = 1; session <= 3; ++session) updates.push_back(tier.Update(session, 1, 1));
  int64_t first = 0;
  while (tier.Step()) {
    for (uint64_t update : updates) {
      if (first == 0 && tier.answered(update)) first = tier.now_ns();
    }
  }
  // They end close together rather than one after another.
  for (uint64_t update : updates) CHECK(tier.status(update) == 0);
  CHECK(tier.violation() == "");
  CHECK(static_cast<double>(tier.now_ns()) < 1.3 * static_cast<double>(first));
}

TEST_CASE("Scheduler.PriorityGoesFirst") {
  FakeTier tier(MakeOptions(3, 1), {{1e6, 1e6}});
  for (int id = 1; id <= 3; ++id) tier.AddSubgroup(1, id, {8 * kBlock});
  for (int id = 1; id <= 3; ++id) tier.WriteState(1, id, MLPO_PART_STATE);
  tier.RunUntilQuiet();
  for (int id = 1; id <= 3; ++id) tier.Grad(1, id, 1);
  tier.RunUntilQuiet();
  const uint64_t late = tier.Update(1, 1, 1, 9);
  const uint64_t middle = tier.Update(1, 2, 1, 5);
  const uint64_t early = tier.Update(1, 3, 1, 1);
  tier.RunUntilAnswered(early);
  CHECK_FALSE(tier.answered(middle));
  tier.RunUntilAnswered(middle);
  CHECK_FALSE(tier.answered(late));
}

TEST_CASE("Scheduler.EpochsRefuseWhatIsRepeatedOrReordered") {
  FakeTier tier(MakeOptions(4, 1), {{}});
  tier.AddSubgroup(1, 1, {2 * kBlock});
  CHECK(tier.status(tier.Grad(1, 1, 2)) == MLPO_E_EPOCH);
  CHECK(tier.status(tier.Grad(1, 1, 0)) == MLPO_E_EPOCH);
  const uint64_t grad = tier.Grad(1, 1, 1);
  tier.RunUntilAnswered(grad);
  CHECK(tier.completion(grad).flags == (MLPO_COMPLETION_ALL_FINITE | MLPO_COMPLETION_WINDOW_COMPLETE));
  const uint64_t update = tier.Update(1, 1, 1);
  CHECK(tier.status(tier.Update(1, 1, 1)) == MLPO_E_SLOT_BUSY);
  CHECK(tier.status(tier.Grad(1, 1, 2)) == MLPO_E_SLOT_BUSY);
  tier.RunUntilAnswered(update);
  CHECK(tier.completion(update).value == 1);
  CHECK(tier.status(tier.Update(1, 1, 1)) == MLPO_E_EPOCH);
  const uint64_t uncovered = tier.Update(1, 1, 2);
  CHECK(tier.status(uncovered) == MLPO_E_COVERAGE);
}

TEST_CASE("Scheduler.NonFiniteGradientIsRefusedUnlessFlagged") {
  FakeTier tier(MakeOptions(4, 1), {{}});
  tier.AddSubgroup(1, 1, {2 * kBlock});
  tier.chunk_finite = false;
  tier.Grad(1, 1, 1);
  tier.RunUntilQuiet();
  CHECK(tier.status(tier.Update(1, 1, 1)) == MLPO_E_NOT_FINITE);
  const uint64_t discard = tier.Submit(1, MLPO_OP_DISCARD, MLPO_ALL_SUBGROUPS, 0, MLPO_DISCARD_OVERFLOW, 0, 0);
  CHECK(tier.status(discard) == 0);
  SessionSnapshot snapshot;
  tier.scheduler().Fill(1, &snapshot, tier.now_ns());
  CHECK(snapshot.skipped_steps == 1);
  CHECK(snapshot.epoch == 0);
  tier.chunk_finite = true;
  TrainStep(tier, 1, 1, 1);
  CHECK(tier.violation() == "");
}

TEST_CASE("Scheduler.FailedWritesGoElsewhereAndThePathComesBack") {
  FakeTier tier(MakeOptions(6, 2), std::vector<FakeTier::PathSpeed>(2));
  tier.AddSubgroup(1, 1, {40 * kBlock});
  tier.WriteState(1, 1, MLPO_PART_STATE);
  tier.RunUntilQuiet();
  TrainStep(tier, 1, 1, 1);
  bool full = true;
  tier.SetFault(0, [&](const Transfer& t) { return full && t.direction == Direction::kWrite ? ENOSPC : 0; });
  TrainStep(tier, 1, 1, 2);
  TrainStep(tier, 1, 1, 3);
  PathSnapshot snapshot;
  tier.scheduler().Fill(0, &snapshot, 0);
  CHECK(snapshot.state == "full");
  CHECK(snapshot.write_errors > 0);
  full = false;
  tier.Wait(3'000'000'000);
  TrainStep(tier, 1, 1, 4);
  TrainStep(tier, 1, 1, 5);
  tier.scheduler().Fill(0, &snapshot, 0);
  CHECK(snapshot.state == "healthy");
  CHECK(snapshot.scratch_bytes > 0);
  CHECK(tier.violation() == "");
}

TEST_CASE("Scheduler.AFailedReadFailsTheUpdateAndTheSameUpdateGoesOn") {
  FakeTier tier(MakeOptions(4, 1), {{}});
  const uint64_t failed = FailAnUpdateInTheMiddle(tier);
  const Failure& failure = tier.completion(failed).failure;
  CHECK(failure.status == MLPO_E_IO);
  CHECK(failure.os_errno == EIO);
  CHECK(failure.path == 0);
  CHECK(failure.text.find("path 'path'") != std::string::npos);
  tier.RunUntilQuiet();
  const uint64_t done_before = tier.updates();
  CHECK(done_before > 0);
  CHECK(done_before < 20);
  CHECK(tier.status(tier.Grad(1, 1, 1)) == MLPO_E_TORN);
  CHECK(tier.status(tier.Submit(1, MLPO_OP_DISCARD, 1, 0, 0, 0, 0)) == MLPO_E_TORN);
  const uint64_t again = tier.Update(1, 1, 1);
  tier.RunUntilAnswered(again);
  CHECK(tier.status(again) == 0);
  CHECK(tier.updates() == 20);  // each block once
  TrainStep(tier, 1, 1, 2);
  CHECK(tier.violation() == "");
}

// Nobody has asked for them: what could not be read ahead is left until somebody does, also when probes have found the
// path well meanwhile, and others are read ahead.
TEST_CASE("Scheduler.AReadAheadThatFailsIsNotRepeated") {
  FakeTier tier(MakeOptions(8, 2), std::vector<FakeTier::PathSpeed>(2));
  tier.AddSubgroup(1, 1, {40 * kBlock});
  tier.WriteState(1, 1, MLPO_PART_STATE);
  tier.RunUntilQuiet();
  TrainStep(tier, 1, 1, 1);
  tier.Wait(100'000'000'000);  // steps of 100 s: no next use is overdue meanwhile
  TrainStep(tier, 1, 1, 2);
  std::map<std::pair<PathIndex, uint64_t>, int> reads;
  tier.on_transfer = [&](const Transfer& t) { reads[{t.path, t.offset}] += t.direction == Direction::kRead; };
  for (const PathIndex path : {0, 1}) {
    tier.SetFault(path, [](const Transfer& t) { return t.id != 0 && t.direction == Direction::kRead ? EIO : 0; });
  }
  for (int i = 0; i < 10'000 && tier.Step(); ++i) {
  }
  tier.Wait(60'000'000'000);
  CHECK(reads.size() >= 4);
  int most = 0;
  for (const auto& [place, count] : reads) most = std::max(most, count);
  CHECK(most == 1);
  CHECK(tier.scheduler().idle());
  for (const PathIndex path : {0, 1}) tier.SetFault(path, nullptr);
  TrainStep(tier, 1, 1, 3);
  CHECK(tier.updates() == 120);
  CHECK(tier.violation() == "");
}

TEST_CASE("Scheduler.WritingAllStateMakesATornSubgroupWhole") {
  FakeTier tier(MakeOptions(4, 1), {{}});
  FailAnUpdateInTheMiddle(tier);
  tier.RunUntilQuiet();
  tier.Submit(1, MLPO_OP_WRITE_STATE, 1, 0, MLPO_PART_STATE, 0, 10 * kBlock);
  tier.RunUntilQuiet();
  CHECK(tier.status(tier.Grad(1, 1, 1)) == MLPO_E_TORN);
  tier.Submit(1, MLPO_OP_WRITE_STATE, 1, 0, MLPO_PART_STATE, 5 * kBlock, 15 * kBlock);
  tier.RunUntilQuiet();
  TrainStep(tier, 1, 1, 1);
  CHECK(tier.violation() == "");
}

TEST_CASE("Scheduler.NoPathLeftIsAnErrorWithinItsTime") {
  FakeTier tier(MakeOptions(4, 1), {{}});
  tier.AddSubgroup(1, 1, {20 * kBlock});
  tier.WriteState(1, 1, MLPO_PART_STATE);
  tier.RunUntilQuiet();
  bool full = true;
  tier.SetFault(0, [&](const Transfer& t) { return full && t.direction == Direction::kWrite ? EFBIG : 0; });
  tier.Grad(1, 1, 1);
  tier.RunUntilQuiet();
  const uint64_t stuck = tier.Update(1, 1, 1);
  tier.Wait(20'000'000'000);
  REQUIRE(tier.answered(stuck));
  CHECK(tier.completion(stuck).failure.status == MLPO_E_IO);
  CHECK(tier.completion(stuck).failure.os_errno == EFBIG);
  CHECK(tier.completion(stuck).failure.text.find("'path' is full") != std::string::npos);
  CHECK(tier.completion(stuck).failure.text.find("LimitFSIZE=") != std::string::npos);
  full = false;
  tier.Wait(3'000'000'000);
  const uint64_t again = tier.Update(1, 1, 1);
  tier.RunUntilAnswered(again);
  CHECK(tier.status(again) == 0);
  CHECK(tier.violation() == "");
}

TEST_CASE("Scheduler.AnEndedSessionIsGoneWhenNothingIsInFlight") {
  FakeTier tier(MakeOptions(6, 2), std::vector<FakeTier::PathSpeed>(2, {1e6, 1e6}));
  for (SessionId session : {1, 2}) {
    tier.AddSubgroup(session, 1, {30 * kBlock});
    tier.WriteState(session, 1, MLPO_PART_STATE);
  }
  tier.RunUntilQuiet();
  for (SessionId session : {1, 2}) tier.Grad(session, 1, 1);
  tier.RunUntilQuiet();
  const uint64_t dropped = tier.Update(1, 1, 1);
  const uint64_t kept = tier.Update(2, 1, 1);
  for (int i = 0; i < 20; ++i) tier.Step();
  tier.scheduler().EndSession(1, tier.now_ns());
  CHECK_FALSE(tier.gone(1));
  tier.RunUntilAnswered(kept);
  CHECK(tier.gone(1));
  CHECK_FALSE(tier.answered(dropped));
  CHECK(tier.status(kept) == 0);
  tier.scheduler().EndSession(2, tier.now_ns());
  tier.RunUntilQuiet();
  CHECK(tier.gone(2));
  PoolSnapshot pool;
  tier.scheduler().Fill(&pool);
  CHECK(pool.free_blocks == 6);
  PathSnapshot path;
  tier.scheduler().Fill(0, &path, 0);
  CHECK(path.scratch_bytes == 0);
  CHECK(tier.violation() == "");
}
