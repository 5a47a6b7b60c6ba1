// Paths that fail, on a fake tier: what was written is never lost, nothing new goes to a path before it is proven, and
// what can go on does. The tier compares what each buffer and extent holds.
#include <algorithm>
#include <cerrno>
#include <map>

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

bool IsWrite(const Transfer& transfer) { return transfer.direction == Direction::kWrite; }

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

// Of blocks [first, first + count).
int Read(FakeTier& tier, SessionId session, uint64_t first, uint64_t count) {
  const uint64_t read = tier.Submit(session, MLPO_OP_READ_STATE, 1, 0, MLPO_PART_STATE, first * kBlock, count * kBlock);
  tier.RunUntilAnswered(read);
  return tier.status(read);
}

}  // namespace

TEST_CASE("C10_Scheduler.TheNthWriteFailsAndNothingIsLost") {
  for (const int error : {EIO, ENOSPC, EDQUOT, EROFS, ENODEV}) {
    for (const int n : {1, 2, 7, 60}) {
      for (const size_t paths : {1u, 2u}) {
        CAPTURE(error, n, paths);
        FakeTier tier = MakeTier(6, paths);
        int writes = 0;
        tier.SetFault(0, [&](const Transfer& t) { return t.id != 0 && IsWrite(t) && ++writes == n ? error : 0; });
        Begin(tier, 1, 40);
        for (uint32_t epoch = 1; epoch <= 4; ++epoch) Train(tier, 1, epoch);
        CHECK(writes >= n);  // maybe not more: the next one waits for a probe
        CHECK(Read(tier, 1, 0, 40) == 0);
        tier.Wait(10 * kSecond);
        CHECK(Look(tier, 0).write_errors == 1);
        CHECK(Look(tier, 0).probes == 1);
        CHECK(Look(tier, 0).failed_probes == 0);
        CHECK(Look(tier, 0).state == "healthy");
        Train(tier, 1, 5);
        CHECK(writes > n);
        CHECK(Read(tier, 1, 0, 40) == 0);
        CHECK(tier.updates() == 5 * 40);
        CHECK(tier.violation() == "");
      }
    }
  }
}

TEST_CASE("PathHealth.NothingIsWrittenBeforeAProbeIsGood") {
  for (const int error : {EIO, EROFS}) {
    CAPTURE(error);
    FakeTier tier = MakeTier(6, 2);
    Begin(tier, 1, 40);
    Train(tier, 1, 1);
    bool fails = true;
    tier.SetFault(0, [&](const Transfer& t) { return fails && IsWrite(t) ? error : 0; });
    Train(tier, 1, 2);
    REQUIRE(Look(tier, 0).state != "healthy");
    CHECK(Look(tier, 0).error == error);
    const uint64_t before = tier.counts(0).writes;
    for (uint32_t epoch = 3; epoch <= 6; ++epoch) {
      Train(tier, 1, epoch);
      tier.Wait(20 * kSecond);
    }
    CHECK(tier.counts(0).writes == before);
    CHECK(tier.counts(0).probes >= 4);
    CHECK(Look(tier, 0).state == (error == EIO ? "quarantined" : "read_only"));
    fails = false;
    tier.Wait(70 * kSecond);
    CHECK(Look(tier, 0).state == "healthy");
    CHECK(Look(tier, 0).error == 0);
    for (uint32_t epoch = 7; epoch <= 8; ++epoch) Train(tier, 1, epoch);
    CHECK(tier.counts(0).writes > before);
    CHECK(tier.violation() == "");
  }
}

// As a device whose end is gone: it takes what is written, and what is read back is something else.
TEST_CASE("PathHealth.ADeviceThatLosesWhatItTakesStaysOut") {
  FakeTier tier = MakeTier(6, 2);
  Begin(tier, 1, 40);
  Train(tier, 1, 1);
  bool lies = true;
  int writes = 0;
  tier.SetFault(0, [&](const Transfer& t) {
    if (!lies) return 0;
    if (t.id == 0) return IsWrite(t) ? 0 : EIO;
    return IsWrite(t) && ++writes == 1 ? EIO : 0;
  });
  Train(tier, 1, 2);
  const uint64_t before = tier.counts(0).writes;
  for (uint32_t epoch = 3; epoch <= 5; ++epoch) {
    Train(tier, 1, epoch);
    tier.Wait(10 * kSecond);
  }
  CHECK(tier.counts(0).writes == before);
  CHECK(Look(tier, 0).state == "quarantined");
  CHECK(Look(tier, 0).failed_probes == Look(tier, 0).probes);
  lies = false;
  tier.Wait(70 * kSecond);
  Train(tier, 1, 6);
  Train(tier, 1, 7);
  CHECK(tier.counts(0).writes > before);
  CHECK(tier.violation() == "");
}

// Blocks in the pool whose only copy is on a path that can no longer be read are kept, and go to the other one when
// their buffers are needed.
TEST_CASE("PathHealth.WhatIsInThePoolOutlivesItsPath") {
  FakeTier tier = MakeTier(120, 2);
  Begin(tier, 9, 110);  // what comes now goes first: it was used last
  Begin(tier, 2, 40);
  Begin(tier, 1, 40);
  tier.EndSession(9);
  tier.RunUntilQuiet();
  REQUIRE(Read(tier, 1, 0, 40) == 0);
  const Subgroup& kept = *tier.scheduler().FindSubgroup(1, 1);
  const Subgroup& other = *tier.scheduler().FindSubgroup(2, 1);
  const auto stored = [](const Block& block, BlockState state) {
    return block.state == state && block.extent.path == 0;
  };
  uint64_t at_stake = 0;
  for (const Block& block : kept.blocks) {
    REQUIRE(block.state != BlockState::kAway);
    at_stake += stored(block, BlockState::kClean);
  }
  REQUIRE(at_stake > 3);
  uint64_t lost = 0;
  while (lost < other.blocks.size() && !stored(other.blocks[lost], BlockState::kAway)) ++lost;
  REQUIRE(lost < other.blocks.size());

  tier.SetFault(0, [](const Transfer&) { return EIO; });
  CHECK(Read(tier, 2, lost, 1) == MLPO_E_IO);
  for (const Block& block : kept.blocks) CHECK_FALSE(stored(block, BlockState::kClean));
  const uint64_t writes = tier.counts(0).writes;
  Begin(tier, 3, 200);  // needs every buffer, several times
  CHECK(tier.counts(0).writes == writes);
  CHECK(Read(tier, 1, 0, 40) == 0);
  for (uint32_t epoch = 1; epoch <= 2; ++epoch) Train(tier, 1, epoch);
  CHECK(Read(tier, 2, lost, 1) == MLPO_E_IO);
  CHECK(Look(tier, 0).state != "healthy");
  tier.SetFault(0, nullptr);
  CHECK(Read(tier, 2, 0, 40) == 0);
  CHECK(tier.violation() == "");
}

// No file of the path grows any more: what has its place there goes on being written.
TEST_CASE("C11_PathHealth.AFullPathIsRewrittenWhereItWasWritten") {
  FakeTier tier = MakeTier(6, 2);
  std::map<FileId, uint64_t> ends;
  bool full = false;
  tier.SetFault(0, [&](const Transfer& t) {
    if (!IsWrite(t)) return 0;
    uint64_t& end = ends[t.file];
    if (full) return t.offset + t.bytes > end ? ENOSPC : 0;
    end = std::max(end, t.offset + t.bytes);
    return 0;
  });
  Begin(tier, 1, 60);
  for (uint32_t epoch = 1; epoch <= 2; ++epoch) Train(tier, 1, epoch);
  full = true;
  Begin(tier, 2, 30);
  REQUIRE(Look(tier, 0).state == "full");
  CHECK(Look(tier, 0).error == ENOSPC);
  const uint64_t written = tier.counts(0).done_written_bytes;
  for (uint32_t epoch = 3; epoch <= 6; ++epoch) Train(tier, 1, epoch);
  tier.Wait(10 * kSecond);
  CHECK(Look(tier, 0).state == "full");
  CHECK(Look(tier, 0).write_errors <= 8);
  CHECK(tier.counts(0).done_written_bytes - written >= 4 * 10 * kBlockBytes);
  full = false;
  tier.Wait(3 * kSecond);
  CHECK(Look(tier, 0).state == "healthy");
  for (uint32_t epoch = 7; epoch <= 8; ++epoch) Train(tier, 1, epoch);
  CHECK(tier.violation() == "");
}

// A limit of a file's length, below what has been written: what ends before it goes on being written.
TEST_CASE("C11_PathHealth.WhatEndsBelowAFilesLimitIsWritten") {
  FakeTier tier = MakeTier(6, 2);
  Begin(tier, 1, 60);
  for (uint32_t epoch = 1; epoch <= 2; ++epoch) Train(tier, 1, epoch);
  REQUIRE(Look(tier, 0).scratch_bytes >= 20 * kBlockBytes);
  bool limited = true;
  tier.SetFault(0, [&](const Transfer& t) {
    return limited && IsWrite(t) && t.offset + t.bytes > 4096 + 10 * kBlockBytes ? EFBIG : 0;
  });
  for (uint32_t epoch = 3; epoch <= 6; ++epoch) Train(tier, 1, epoch);
  CHECK(Look(tier, 0).state == "full");
  CHECK(Look(tier, 0).error == EFBIG);
  tier.Wait(10 * kSecond);
  const uint64_t errors = Look(tier, 0).write_errors, written = tier.counts(0).done_written_bytes;
  CHECK(errors <= 40);  // each place above the limit once
  for (uint32_t epoch = 7; epoch <= 8; ++epoch) Train(tier, 1, epoch);
  CHECK(Look(tier, 0).write_errors == errors);
  CHECK(tier.counts(0).done_written_bytes - written >= 2 * 6 * kBlockBytes);
  Begin(tier, 2, 14);  // whose file has been as long as that never
  CHECK(Look(tier, 0).write_errors == errors);
  const auto& blocks = tier.scheduler().FindSubgroup(2, 1)->blocks;
  CHECK(std::any_of(blocks.begin(), blocks.end(), [](const Block& block) { return block.extent.path == 0; }));
  limited = false;
  tier.Wait(3 * kSecond);
  CHECK(Look(tier, 0).state == "healthy");
  for (uint32_t epoch = 9; epoch <= 10; ++epoch) Train(tier, 1, epoch);
  CHECK(Look(tier, 0).scratch_bytes >= 20 * kBlockBytes);
  CHECK(tier.violation() == "");
}

TEST_CASE("C11_PathHealth.WhereNothingCanBeWrittenThatIsSoonKnown") {
  FakeTier tier = MakeTier(6, 2);
  Begin(tier, 1, 60);
  for (uint32_t epoch = 1; epoch <= 2; ++epoch) Train(tier, 1, epoch);
  tier.SetFault(0, [](const Transfer& t) { return IsWrite(t) ? ENOSPC : 0; });
  const uint64_t writes = tier.counts(0).writes;
  for (uint32_t epoch = 3; epoch <= 6; ++epoch) Train(tier, 1, epoch);
  // What was in flight, and one queue's worth of rewrites; then none.
  CHECK(tier.counts(0).writes - writes <= 20);
  CHECK(Look(tier, 0).state == "full");
  CHECK(tier.violation() == "");
}

// A request does not wait for ever for what lies on a path that hangs; others go on, and so does it when it is
// repeated.
TEST_CASE("PathHealth.WhoWaitsForAHangingPathFailsInTheEnd") {
  Scheduler::Options options = MakeOptions(6, 2);
  options.hang_timeout_ns = 600 * kSecond;
  options.path_names = {"stuck", "other"};
  FakeTier tier(options, {{1e6, 1e6}, {1e6, 1e6}});
  Begin(tier, 1, 60);
  Train(tier, 1, 1);
  tier.RunUntilAnswered(tier.Grad(1, 1, 2));
  const uint64_t update = tier.Update(1, 1, 2);
  tier.Wait(50'000'000);
  REQUIRE_FALSE(tier.answered(update));
  tier.ChangeSpeed(0, tier.now_ns(), {0, 0, 0.5});
  tier.Wait(590 * kSecond);
  CHECK_FALSE(tier.answered(update));
  tier.Wait(20 * kSecond);
  REQUIRE(tier.answered(update));
  const Failure& failure = tier.completion(update).failure;
  CHECK(failure.status == MLPO_E_IO);
  CHECK(failure.os_errno == ETIMEDOUT);
  CHECK(failure.path == 0);
  CHECK(failure.text.find("path 'stuck' has not answered for 60") != std::string::npos);
  Begin(tier, 2, 3);
  Train(tier, 2, 1);
  // That it hangs is known: nobody waits for ten minutes once more.
  const uint64_t too_soon = tier.Update(1, 1, 2);
  tier.Wait(2 * kSecond);
  CHECK(tier.status(too_soon) == MLPO_E_IO);
  tier.ChangeSpeed(0, tier.now_ns(), {1e6, 1e6});
  tier.Wait(3 * kSecond);
  CHECK(Look(tier, 0).state == "healthy");
  const uint64_t again = tier.Update(1, 1, 2);
  tier.RunUntilAnswered(again);
  CHECK(tier.status(again) == 0);
  for (uint32_t epoch = 3; epoch <= 4; ++epoch) Train(tier, 1, epoch);
  CHECK(tier.updates() == 4 * 60 + 3);
  CHECK(tier.violation() == "");
}

// What can still be read is waited for, though writes have been hanging there for long.
TEST_CASE("PathHealth.ReadsGoOnWhereWritesHang") {
  Scheduler::Options options = MakeOptions(30, 2);
  options.hang_timeout_ns = 60 * kSecond;
  FakeTier tier(options, {{1e6, 1e6}, {1e6, 1e6}});
  Begin(tier, 2, 200);
  Begin(tier, 1, 60);
  for (uint32_t epoch = 1; epoch <= 4; ++epoch) Train(tier, 1, epoch);  // what it wants next is not session 2's
  tier.ChangeSpeed(0, tier.now_ns(), {1e6, 0, 0.5});
  tier.RunUntilAnswered(tier.Grad(1, 1, 5));
  tier.Update(1, 1, 5);
  tier.Wait(100 * kSecond);
  REQUIRE(Look(tier, 0).state == "suspect");
  CHECK(Read(tier, 2, 0, 200) == 0);
  tier.Wait(100 * kSecond);
  REQUIRE(Look(tier, 0).state == "quarantined");
  CHECK(Read(tier, 2, 0, 200) == 0);
  tier.ChangeSpeed(0, tier.now_ns(), {1e6, 1e6, 0.5});
  tier.Wait(10 * kSecond);
  CHECK(Look(tier, 0).state == "healthy");
  CHECK(tier.counts(0).probes > 0);
  CHECK(tier.violation() == "");
}

// Nor for a buffer, where what hangs is all that moves.
TEST_CASE("PathHealth.WhoWaitsForABufferThatAHangingPathHasFailsInTheEnd") {
  Scheduler::Options options = MakeOptions(6, 2);
  options.hang_timeout_ns = 60 * kSecond;
  options.path_names = {"stuck", "broken"};
  FakeTier tier(options, {{1e6, 1e6}, {1e6, 1e6}});
  Begin(tier, 1, 60);
  Train(tier, 1, 1);
  tier.RunUntilAnswered(tier.Grad(1, 1, 2));
  const uint64_t update = tier.Update(1, 1, 2);
  tier.Wait(50'000'000);
  tier.ChangeSpeed(0, tier.now_ns(), {0, 0, 0.5});
  tier.SetFault(1, [](const Transfer& t) { return IsWrite(t) ? EIO : 0; });
  tier.AddSubgroup(2, 1, {20 * kBlock});
  const uint64_t write = tier.WriteState(2, 1, MLPO_PART_STATE);  // nothing of it is on a path
  tier.Wait(55 * kSecond);
  CHECK_FALSE(tier.answered(write));
  tier.Wait(25 * kSecond);
  REQUIRE(tier.answered(write));
  CHECK(tier.status(write) == MLPO_E_IO);
  CHECK(tier.completion(write).failure.text.find("no path can take a block") != std::string::npos);
  CHECK(tier.status(update) == MLPO_E_IO);
  tier.ChangeSpeed(0, tier.now_ns(), {1e6, 1e6});
  tier.SetFault(1, nullptr);
  tier.Wait(100 * kSecond);
  const uint64_t again = tier.Update(1, 1, 2), written = tier.WriteState(2, 1, MLPO_PART_STATE);
  tier.RunUntilAnswered(again);
  tier.RunUntilAnswered(written);
  CHECK(tier.status(again) == 0);
  CHECK(tier.status(written) == 0);
  CHECK(tier.violation() == "");
}

// A path that has hung for minutes is proven before it is written to; a hiccup is not.
TEST_CASE("PathHealth.AfterALongHangAProbeComesFirst") {
  for (const int64_t seconds : {60, 300}) {
    CAPTURE(seconds);
    FakeTier tier(MakeOptions(6, 2), {{1e6, 1e6}, {1e6, 1e6}});
    Begin(tier, 1, 60);
    Train(tier, 1, 1);
    tier.RunUntilAnswered(tier.Grad(1, 1, 2));
    const uint64_t update = tier.Update(1, 1, 2);
    tier.Wait(20'000'000);
    tier.ChangeSpeed(0, tier.now_ns(), {0, 0, 0.5});
    tier.Wait(seconds * kSecond);
    CHECK(Look(tier, 0).state == (seconds > 120 ? "quarantined" : "suspect"));
    CHECK(tier.counts(0).probes == 0);
    tier.ChangeSpeed(0, tier.now_ns(), {1e6, 1e6});
    tier.RunUntilAnswered(update);
    CHECK(tier.status(update) == 0);
    tier.Wait(2 * kSecond);
    CHECK((tier.counts(0).probes > 0) == (seconds > 120));
    CHECK(Look(tier, 0).state == "healthy");
    for (uint32_t epoch = 3; epoch <= 4; ++epoch) Train(tier, 1, epoch);
    CHECK(tier.violation() == "");
  }
}
