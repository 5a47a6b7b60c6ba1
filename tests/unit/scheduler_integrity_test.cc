// Checksums in the scheduler: nothing is written without them and nothing wrong is used, as the tier's own books say;
// no pass over memory that could have been saved; and what is read again, lost, torn and made whole when bytes are
// wrong.
#include <algorithm>
#include <cerrno>

#include "tests/support/fake_tier.h"
//
#include "tests/support/catch.h"

using namespace mlpo;
using mlpo::test::FakeTier;

namespace {

constexpr uint64_t kBlock = 1024;              // elements: one piece an array
constexpr uint64_t kLastPiece = 65536 - 2000;  // of the large ones, which have three
constexpr uint64_t kLarge = 2 * 65536 + kLastPiece;
constexpr uint64_t kLastPieceBytes = (kLastPiece + 1023) / 1024 * 4096;
static_assert(kLastPieceBytes == 63 * 4096);

Scheduler::Options MakeOptions(uint32_t buffers, size_t paths, uint64_t block = kBlock) {
  Scheduler::Options options;
  options.buffers = buffers;
  options.block_elements = block;
  options.extents_offset_bytes = 4096;
  options.no_path_timeout_ns = 5'000'000'000;
  options.integrity = true;
  options.paths.resize(paths);
  return options;
}

void TrainStep(FakeTier& tier, SubgroupId subgroups, uint32_t epoch) {
  for (SubgroupId id = 1; id <= subgroups; ++id) tier.Grad(1, id, epoch);
  tier.RunUntilQuiet();
  std::vector<uint64_t> updates;
  for (SubgroupId id = 1; id <= subgroups; ++id) updates.push_back(tier.Update(1, id, epoch));
  tier.RunUntilQuiet();
  for (const uint64_t update : updates) REQUIRE(tier.status(update) == 0);
}

PathSnapshot PathOf(const FakeTier& tier, PathIndex path = 0) {
  PathSnapshot snapshot;
  const_cast<FakeTier&>(tier).scheduler().Fill(path, &snapshot, tier.now_ns());
  return snapshot;
}

// From now on the n-th read of the path (from 1) is wrong; `twice`: and so is what of it is read again.
void FlipRead(FakeTier& tier, int n, bool twice, PathIndex path = 0) {
  tier.SetFlip(path,
               [n, twice, reads = 0](const Transfer&, bool again) mutable { return again ? twice : ++reads == n; });
}

// The state of so many large blocks on a path, and the gradient of an update of them.
void PutAway(FakeTier& tier, uint64_t blocks, std::optional<mlpo_dtype> kept_as = std::nullopt) {
  tier.AddSubgroup(1, 1, {blocks * kLarge}, kept_as);
  tier.WriteState(1, 1, MLPO_PART_STATE);
  tier.RunUntilQuiet();
  tier.Grad(1, 1, 1);
  tier.RunUntilQuiet();
}

}  // namespace

TEST_CASE("SchedulerIntegrity.NothingIsWrittenWithoutChecksums") {
  for (const uint32_t buffers : {1u, 2u, 5u, 16u, 64u}) {
    for (const auto kept_as :
         {std::optional<mlpo_dtype>(), std::optional(MLPO_FLOAT32), std::optional(MLPO_BFLOAT16)}) {
      constexpr uint64_t kOf = 28672;  // as in scheduler_grads_test: a kept gradient fits, too
      FakeTier tier(MakeOptions(buffers, 2, kOf), std::vector<FakeTier::PathSpeed>(2));
      for (SubgroupId id = 1; id <= 3; ++id) tier.AddSubgroup(1, id, {7 * kOf + 11, 3}, kept_as);
      for (SubgroupId id = 1; id <= 3; ++id) tier.WriteState(1, id);
      tier.RunUntilQuiet();
      for (uint32_t epoch = 1; epoch <= 4; ++epoch) TrainStep(tier, 3, epoch);
      const uint64_t written = tier.Flush(1, 1, "thing", 40 * 12 * kOf + 5, 1 << 20);
      tier.RunUntilQuiet();
      INFO("buffers " << buffers);
      CHECK(tier.status(written) == 0);
      CHECK(tier.violation() == "");
      CHECK(tier.wrong_checksums().empty());
    }
  }
}

TEST_CASE("SchedulerIntegrity.WhatStaysInMemoryHasNoChecksums") {
  FakeTier tier(MakeOptions(64, 1), {{}});
  tier.AddSubgroup(1, 1, {20 * kBlock});
  tier.WriteState(1, 1, MLPO_PART_STATE);
  for (uint32_t epoch = 1; epoch <= 5; ++epoch) TrainStep(tier, 1, epoch);
  CHECK(tier.counts(0).writes == 0);
  CHECK(tier.passes() == 0);
}

// A quarter of the state stays in memory. What goes to a path was read from one in the same step: its checksums are
// formed behind its update. Passes are for what is flushed at the beginning of a step, when only blocks that had stayed
// have been updated: as many as are to be free, which two paths make eight, and one or so a path.
TEST_CASE("SchedulerIntegrity.StepsNeedHardlyAPass") {
  FakeTier tier(MakeOptions(64, 2), std::vector<FakeTier::PathSpeed>(2));
  tier.AddSubgroup(1, 1, {256 * kBlock});
  tier.WriteState(1, 1, MLPO_PART_STATE);
  for (uint32_t epoch = 1; epoch <= 3; ++epoch) TrainStep(tier, 1, epoch);
  const uint64_t passes = tier.passes();
  const uint64_t writes = tier.counts(0).writes + tier.counts(1).writes;
  for (uint32_t epoch = 4; epoch <= 13; ++epoch) TrainStep(tier, 1, epoch);
  const uint64_t written = tier.counts(0).writes + tier.counts(1).writes - writes;
  INFO("passes " << tier.passes() - passes << " writes " << written);
  CHECK(written > 10 * 190);
  CHECK(tier.passes() > passes);
  CHECK(tier.passes() - passes <= 10 * 10);
  CHECK(tier.violation() == "");
}

TEST_CASE("SchedulerIntegrity.WhatWasWrongOnTheWayIsReadAgainAlone") {
  FakeTier tier(MakeOptions(3, 1, kLarge), {{}});
  PutAway(tier, 8);
  FlipRead(tier, 3, false);
  std::vector<uint64_t> sizes;
  tier.on_transfer = [&](const Transfer& t) {
    if (t.direction == Direction::kRead) sizes.push_back(t.bytes);
  };
  const uint64_t update = tier.Update(1, 1, 1);
  tier.RunUntilQuiet();
  CHECK(tier.status(update) == 0);
  CHECK(tier.updates() == 8);
  CHECK(std::count(sizes.begin(), sizes.end(), kLastPieceBytes) == 1);
  CHECK(PathOf(tier).checksum_mismatches == 1);
  CHECK(PathOf(tier).checksum_errors == 0);
  CHECK(tier.wrong_checksums() == std::vector<std::pair<uint64_t, bool>>{{1, false}});
  TrainStep(tier, 1, 2);
  CHECK(tier.violation() == "");
}

// The other pieces of the block have been updated: neither its extent nor its buffer is whole any more.
TEST_CASE("SchedulerIntegrity.ABlockThatStaysWrongTearsItsSubgroup") {
  const bool unreadable = GENERATE(false, true);  // the second time
  FakeTier tier(MakeOptions(3, 1, kLarge), {{}});
  PutAway(tier, 8);
  tier.AddSubgroup(1, 2, {4 * kLarge});
  FlipRead(tier, 3, true);
  if (unreadable) tier.SetFault(0, [](const Transfer& t) { return t.bytes == kLastPieceBytes ? EIO : 0; });
  const uint64_t update = tier.Update(1, 1, 1);
  tier.RunUntilQuiet();
  REQUIRE(tier.status(update) == MLPO_E_IO);
  const Failure failure = tier.completion(update).failure;
  CHECK(failure.os_errno == (unreadable ? EIO : EBADMSG));
  CHECK(failure.path == 0);
  REQUIRE(failure.block < 8);
  CHECK(failure.first == failure.block * kLarge + 2 * 65536);
  CHECK(failure.count == kLastPiece);
  CHECK(failure.text.find("master in block " + std::to_string(failure.block) + " of subgroup 'subgroup1'") == 0);
  CHECK(failure.text.find("path 'path'") != std::string::npos);
  CHECK(PathOf(tier).checksum_errors == 1);
  tier.SetFlip(0, nullptr);
  tier.SetFault(0, nullptr);

  // Until all of it has been written it is torn, and what is lost is not given out.
  CHECK(tier.status(tier.Submit(1, MLPO_OP_DISCARD, 1, 0, 0, 0, 0)) == MLPO_E_TORN);
  const uint64_t same = tier.Update(1, 1, 1);
  tier.RunUntilQuiet();
  CHECK(tier.status(same) == MLPO_E_IO);
  CHECK(tier.completion(same).failure.block == failure.block);
  const auto read = [&](uint32_t block) {
    return tier.Submit(1, MLPO_OP_READ_STATE, 1, 0, MLPO_PART_STATE, block * kLarge + 5, 3);
  };
  const uint64_t lost = read(failure.block), other = read(failure.block == 0 ? 1 : failure.block - 1);
  tier.RunUntilQuiet();
  CHECK(tier.status(lost) == MLPO_E_IO);
  CHECK(tier.status(other) == 0);
  const uint64_t others_grad = tier.Grad(1, 2, 1), others_update = tier.Update(1, 2, 1);
  tier.RunUntilQuiet();
  CHECK(tier.status(others_grad) == 0);
  CHECK(tier.status(others_update) == 0);

  // In pieces that meet no block's borders.
  for (const uint64_t first : {uint64_t{0}, 3 * kLarge + 17}) {
    const uint64_t end = first == 0 ? 3 * kLarge + 17 : 8 * kLarge;
    const uint64_t write = tier.Submit(1, MLPO_OP_WRITE_STATE, 1, 0, MLPO_PART_STATE, first, end - first);
    tier.RunUntilQuiet();
    CHECK(tier.status(write) == 0);
    const uint64_t again = read(failure.block);
    tier.RunUntilQuiet();
    CHECK(tier.status(again) == (end == 8 * kLarge ? 0 : MLPO_E_IO));
  }
  TrainStep(tier, 1, 1);
  CHECK(tier.violation() == "");
}

// Records of errors are short: the key is what is cut, not what to do.
TEST_CASE("SchedulerIntegrity.WithALongKeyItIsSaidWhatToDo") {
  FakeTier tier(MakeOptions(3, 1, kLarge), {{}});
  tier.key = std::string(240, 'k');
  PutAway(tier, 8);
  FlipRead(tier, 3, true);
  const uint64_t update = tier.Update(1, 1, 1);
  tier.RunUntilQuiet();
  REQUIRE(tier.status(update) == MLPO_E_IO);
  const std::string& text = tier.completion(update).failure.text;
  CAPTURE(text);
  CHECK(text.size() < sizeof mlpo_error_record::text);
  CHECK(text.find("of subgroup 'kkkk") != std::string::npos);
  CHECK(text.find("k1' is not what was written to path 'path' (wrong checksum)") != std::string::npos);
  CHECK(text.find(": restore it, or write all of its state; the subgroup is torn") != std::string::npos);
}

// Blocks of one piece: nothing of the bad one has been changed, so that the same update may find it well.
TEST_CASE("SchedulerIntegrity.ABlockOfWhichNothingWasChangedMayBeTriedAgain") {
  FakeTier tier(MakeOptions(4, 1), {{}});
  tier.AddSubgroup(1, 1, {20 * kBlock});
  tier.WriteState(1, 1, MLPO_PART_STATE);
  tier.RunUntilQuiet();
  tier.Grad(1, 1, 1);
  tier.RunUntilQuiet();
  FlipRead(tier, 6, true);
  const uint64_t failed = tier.Update(1, 1, 1);
  tier.RunUntilQuiet();
  CHECK(tier.completion(failed).failure.os_errno == EBADMSG);
  CHECK(tier.updates() < 20);
  tier.SetFlip(0, nullptr);
  const uint64_t same = tier.Update(1, 1, 1);
  tier.RunUntilQuiet();
  CHECK(tier.status(same) == 0);
  CHECK(tier.updates() == 20);  // each once
  CHECK(tier.violation() == "");
}

TEST_CASE("SchedulerIntegrity.ReadingStateThatIsWrongIsAnErrorAndChangesNothing") {
  FakeTier tier(MakeOptions(2, 1, kLarge), {{}});
  PutAway(tier, 6);
  FlipRead(tier, 2, true);
  const uint64_t wrong = tier.Submit(1, MLPO_OP_READ_STATE, 1, 0, MLPO_PART_STATE, 0, 6 * kLarge);
  tier.RunUntilQuiet();
  CHECK(tier.completion(wrong).failure.os_errno == EBADMSG);
  tier.SetFlip(0, nullptr);
  const uint64_t right = tier.Submit(1, MLPO_OP_READ_STATE, 1, 0, MLPO_PART_STATE, 0, 6 * kLarge);
  tier.RunUntilQuiet();
  CHECK(tier.status(right) == 0);
  const uint64_t update = tier.Update(1, 1, 1);
  tier.RunUntilQuiet();
  CHECK(tier.status(update) == 0);
  CHECK(tier.violation() == "");
}

// What is found wrong while it lies there can be written over in pieces that meet no block's borders, though each of
// them would have to keep the rest of some block; and until that is done the rest is not given out.
TEST_CASE("SchedulerIntegrity.WritingAllStateMakesLostBlocksWhole") {
  const uint64_t block_elements = GENERATE(kBlock, kLarge);
  const bool all = GENERATE(false, true);  // blocks are wrong, or one
  FakeTier tier(MakeOptions(3, 1, block_elements), {{}});
  tier.AddSubgroup(1, 1, {9 * block_elements});
  tier.WriteState(1, 1, MLPO_PART_STATE);
  tier.RunUntilQuiet();
  const Block* away = nullptr;
  for (const Block& block : tier.scheduler().FindSubgroup(1, 1)->blocks) {
    if (block.state == BlockState::kAway && block.index > 0) away = &block;
  }
  REQUIRE(away != nullptr);
  const uint64_t bad = 4096 + away->extent.offset;
  tier.SetFlip(0, [=](const Transfer& t, bool again) { return again || all || t.offset == bad; });
  const auto read = [&] {
    const uint64_t request = tier.Submit(1, MLPO_OP_READ_STATE, 1, 0, MLPO_PART_STATE, away->first, 1);
    tier.RunUntilQuiet();
    return tier.status(request);
  };
  const uint64_t half = away->first + away->count / 2, numel = 9 * block_elements;
  const auto write = [&](uint64_t first, uint64_t end) {
    const uint64_t request = tier.Submit(1, MLPO_OP_WRITE_STATE, 1, 0, MLPO_PART_STATE, first, end - first);
    tier.RunUntilQuiet();
    return tier.status(request);
  };
  CHECK(read() == MLPO_E_IO);
  CHECK(read() == MLPO_E_IO);
  CHECK(write(0, half) == 0);
  CHECK(read() == MLPO_E_IO);
  tier.SetFlip(0, nullptr);
  CHECK(write(half, half + 5) == 0);
  CHECK(read() == MLPO_E_IO);
  CHECK(write(half + 5, numel) == 0);
  CHECK(read() == 0);
  for (uint32_t epoch = 1; epoch <= 2; ++epoch) TrainStep(tier, 1, epoch);
  CHECK(tier.violation() == "");
}

// What had been written of a block before it was lost is lost with it.
TEST_CASE("SchedulerIntegrity.WhatIsLostWhileAllIsWrittenMustBeWrittenAgain") {
  FakeTier tier(MakeOptions(3, 1), {{}});
  tier.AddSubgroup(1, 1, {12 * kBlock});
  tier.WriteState(1, 1, MLPO_PART_STATE);
  tier.RunUntilQuiet();
  const auto state = [&](uint16_t op, uint64_t first, uint64_t end) {
    const uint64_t request = tier.Submit(1, op, 1, 0, MLPO_PART_STATE, first, end - first);
    tier.RunUntilQuiet();
    return tier.status(request);
  };
  const auto read = [&](uint64_t block) { return state(MLPO_OP_READ_STATE, block * kBlock, (block + 1) * kBlock); };
  for (uint64_t block = 0; block < 4; ++block) REQUIRE(read(block) == 0);
  tier.SetFlip(0, [](const Transfer&, bool) { return true; });
  REQUIRE(read(11) == MLPO_E_IO);
  tier.SetFlip(0, nullptr);

  // The front half of block 4 goes to the path, and is not what was written when the rear half is.
  const uint64_t half = 4 * kBlock + kBlock / 2;
  CHECK(state(MLPO_OP_WRITE_STATE, 0, half) == 0);
  for (uint64_t block = 6; block < 11; ++block) REQUIRE(read(block) == 0);
  const Block& lost = tier.scheduler().FindSubgroup(1, 1)->blocks[4];
  REQUIRE(lost.state == BlockState::kAway);
  tier.SetFlip(0,
               [bad = 4096 + lost.extent.offset](const Transfer& t, bool again) { return again || t.offset == bad; });
  CHECK(state(MLPO_OP_WRITE_STATE, half, 5 * kBlock) == 0);
  tier.SetFlip(0, nullptr);
  CHECK(state(MLPO_OP_WRITE_STATE, 5 * kBlock, 12 * kBlock) == 0);
  CHECK(read(4) == MLPO_E_IO);
  CHECK(read(3) == 0);
  CHECK(state(MLPO_OP_WRITE_STATE, half - 1, half) == 0);
  CHECK(read(4) == MLPO_E_IO);
  CHECK(state(MLPO_OP_WRITE_STATE, 4 * kBlock, half) == 0);
  CHECK(read(4) == 0);
  for (uint32_t epoch = 1; epoch <= 2; ++epoch) TrainStep(tier, 1, epoch);
  CHECK(tier.violation() == "");
}

// So is what had been written as a whole, and was wrong when it was read once more.
TEST_CASE("SchedulerIntegrity.WhatIsReadWrongWhileAllIsWrittenMustBeWrittenAgain") {
  FakeTier tier(MakeOptions(3, 1), {{}});
  tier.AddSubgroup(1, 1, {12 * kBlock});
  tier.WriteState(1, 1, MLPO_PART_STATE);
  tier.RunUntilQuiet();
  const Subgroup& subgroup = *tier.scheduler().FindSubgroup(1, 1);
  const auto state = [&](uint16_t op, uint64_t first, uint64_t end) {
    const uint64_t request = tier.Submit(1, op, 1, 0, MLPO_PART_STATE, first, end - first);
    tier.RunUntilQuiet();
    return tier.status(request);
  };
  const auto read = [&](uint64_t block) { return state(MLPO_OP_READ_STATE, block * kBlock, (block + 1) * kBlock); };
  for (uint64_t block = 0; block < 4; ++block) REQUIRE(read(block) == 0);
  tier.SetFlip(0, [](const Transfer&, bool) { return true; });
  REQUIRE(read(11) == MLPO_E_IO);
  tier.SetFlip(0, nullptr);
  CHECK(state(MLPO_OP_WRITE_STATE, 0, 5 * kBlock) == 0);
  for (uint64_t block = 6; block < 11; ++block) REQUIRE(read(block) == 0);
  REQUIRE(subgroup.blocks[4].state == BlockState::kAway);
  tier.SetFlip(0, [](const Transfer&, bool) { return true; });
  CHECK(read(4) == MLPO_E_IO);
  tier.SetFlip(0, nullptr);
  CHECK(state(MLPO_OP_WRITE_STATE, 5 * kBlock, 12 * kBlock) == 0);
  CHECK(subgroup.damaged == 1);
  CHECK(state(MLPO_OP_WRITE_STATE, 4 * kBlock, 5 * kBlock) == 0);
  CHECK(subgroup.damaged == 0);
  for (uint32_t epoch = 1; epoch <= 2; ++epoch) TrainStep(tier, 1, epoch);
  CHECK(tier.violation() == "");
}

// Writing one part of a block does not make it whole: what is there of the others stays, as it may be right yet.
TEST_CASE("SchedulerIntegrity.AWriteOfOnePartGivesUpNothing") {
  FakeTier tier(MakeOptions(3, 1), {{}});
  tier.AddSubgroup(1, 1, {12 * kBlock});
  tier.WriteState(1, 1, MLPO_PART_STATE);
  tier.RunUntilQuiet();
  std::vector<const Block*> away;
  for (const Block& block : tier.scheduler().FindSubgroup(1, 1)->blocks) {
    if (block.state == BlockState::kAway) away.push_back(&block);
  }
  REQUIRE(away.size() >= 2);
  const auto state = [&](uint16_t op, uint32_t parts, const Block& block) {
    const uint64_t request = tier.Submit(1, op, 1, 0, parts, block.first + 5, 7);
    tier.RunUntilQuiet();
    return tier.status(request);
  };
  tier.SetFlip(0, [](const Transfer&, bool) { return true; });
  CHECK(state(MLPO_OP_READ_STATE, MLPO_PART_STATE, *away[0]) == MLPO_E_IO);
  for (int i = 0; i < 2; ++i) {
    CHECK(state(MLPO_OP_WRITE_STATE, MLPO_PART_MASTER, *away[1]) == MLPO_E_IO);
    CHECK_FALSE(away[1]->damaged);
  }
  tier.SetFlip(0, nullptr);
  CHECK(state(MLPO_OP_READ_STATE, MLPO_PART_STATE, *away[1]) == 0);
  CHECK(state(MLPO_OP_WRITE_STATE, MLPO_PART_MASTER, *away[1]) == 0);
  for (uint32_t epoch = 1; epoch <= 2; ++epoch) TrainStep(tier, 1, epoch);
  CHECK(tier.violation() == "");
}

// The state beside it has been compared, and is right.
TEST_CASE("SchedulerIntegrity.AWriteGivesUpAGradientThatAloneIsWrong") {
  constexpr uint64_t kOf = 28672;
  FakeTier tier(MakeOptions(3, 1, kOf), {{}});
  tier.AddSubgroup(1, 1, {12 * kOf}, MLPO_BFLOAT16);
  tier.WriteState(1, 1, MLPO_PART_STATE);
  tier.RunUntilQuiet();
  tier.Grad(1, 1, 1);
  tier.RunUntilQuiet();
  std::vector<const Block*> away;
  for (const Block& block : tier.scheduler().FindSubgroup(1, 1)->blocks) {
    if (block.state == BlockState::kAway && block.grad_saved) away.push_back(&block);
  }
  REQUIRE(away.size() >= 2);
  const auto state = [&](uint16_t op, uint32_t parts, const Block& block) {
    const uint64_t request = tier.Submit(1, op, 1, 0, parts, block.first + 5, 7);
    tier.RunUntilQuiet();
    return tier.status(request);
  };
  tier.SetFlip(0, [](const Transfer&, bool) { return true; });
  REQUIRE(state(MLPO_OP_READ_STATE, MLPO_PART_STATE, *away[0]) == MLPO_E_IO);
  // Of the read of both, the gradient is asked about first.
  tier.SetFlip(0, [at = 4096 + away[1]->extent.offset, asked = 0](const Transfer& t, bool again) mutable {
    return again ? t.buffer_offset == 0 : t.offset == at && ++asked == 1;
  });
  CHECK(state(MLPO_OP_WRITE_STATE, GENERATE(uint32_t{MLPO_PART_MASTER}, uint32_t{MLPO_PART_STATE}), *away[1]) == 0);
  CHECK(PathOf(tier).checksum_errors == 2);
  CHECK_FALSE(away[1]->damaged);
  tier.SetFlip(0, nullptr);
  CHECK(state(MLPO_OP_READ_STATE, MLPO_PART_STATE, *away[1]) == 0);

  // Not without its gradient.
  const uint64_t update = tier.Update(1, 1, 1);
  tier.RunUntilQuiet();
  CHECK(tier.status(update) == MLPO_E_IO);
  CHECK(tier.completion(update).failure.text.find("the gradient of block " + std::to_string(away[1]->index)) == 0);
  CHECK(tier.updates() == 0);
  CHECK(tier.status(tier.Submit(1, MLPO_OP_DISCARD, 1, 0, 0, 0, 0)) == 0);
  for (uint32_t epoch = 1; epoch <= 2; ++epoch) TrainStep(tier, 1, epoch);
  CHECK(tier.scheduler().FindSubgroup(1, 1)->damaged == 0);
  CHECK(tier.violation() == "");
}

// The first one to find out is told, whatever it wants; what it found may have been the way, and the bytes be there
// yet.
TEST_CASE("SchedulerIntegrity.AWriteThatFindsOutFailsAndLeavesTheBlockAsItIs") {
  FakeTier tier(MakeOptions(2, 1, kLarge), {{}});
  PutAway(tier, 6);
  const auto write_all = [&] {
    int worst = 0;
    for (uint64_t at = 0; at < 6 * kLarge; at += kLarge) {
      const uint64_t request = tier.Submit(1, MLPO_OP_WRITE_STATE, 1, 0, MLPO_PART_MASTER, at, 7);
      tier.RunUntilQuiet();
      worst = std::min(worst, tier.status(request));
    }
    return worst;
  };
  FlipRead(tier, 2, true);
  CHECK(write_all() == MLPO_E_IO);
  tier.SetFlip(0, nullptr);
  CHECK(write_all() == 0);
  const uint64_t update = tier.Update(1, 1, 1);
  tier.RunUntilQuiet();
  CHECK(tier.status(update) == 0);
  CHECK(tier.violation() == "");
}

TEST_CASE("SchedulerIntegrity.KeptGradientsAreComparedToo") {
  const bool twice = GENERATE(false, true);
  constexpr uint64_t kOf = 28672;
  FakeTier tier(MakeOptions(3, 1, kOf), {{}});
  tier.AddSubgroup(1, 1, {12 * kOf}, MLPO_BFLOAT16);
  tier.WriteState(1, 1, MLPO_PART_STATE);
  tier.RunUntilQuiet();
  tier.Grad(1, 1, 1);
  tier.RunUntilQuiet();
  // Of a read that brings both, the gradient is asked about first.
  tier.SetFlip(0, [twice, asked = 0](const Transfer& t, bool again) mutable {
    return again ? twice : t.buffer_offset == 0 && ++asked == 1;
  });
  const uint64_t update = tier.Update(1, 1, 1);
  tier.RunUntilQuiet();
  CHECK(tier.status(update) == (twice ? MLPO_E_IO : 0));
  CHECK(PathOf(tier).checksum_mismatches == 1);
  if (twice) {
    const Failure& failure = tier.completion(update).failure;
    CAPTURE(failure.text);
    CHECK(failure.os_errno == EBADMSG);
    CHECK(failure.text.find("gradient in block " + std::to_string(failure.block) + " of subgroup") == 0);
    CHECK(failure.text.find(": repeat it, or discard the gradient") != std::string::npos);
  }
  tier.SetFlip(0, nullptr);
  if (twice) {
    const uint64_t same = tier.Update(1, 1, 1);
    tier.RunUntilQuiet();
    CHECK(tier.status(same) == 0);
  }
  TrainStep(tier, 1, 2);
  CHECK(tier.violation() == "");
}

// A READ_STATE has no use for the gradient that is read with the state: who has, compares it then.
TEST_CASE("SchedulerIntegrity.AReadingOfStateDoesNotVouchForTheGradient") {
  constexpr uint64_t kOf = 28672;
  FakeTier tier(MakeOptions(3, 1, kOf), {{}});
  tier.AddSubgroup(1, 1, {12 * kOf}, MLPO_BFLOAT16);
  tier.WriteState(1, 1, MLPO_PART_STATE);
  tier.RunUntilQuiet();
  tier.Grad(1, 1, 1);
  tier.RunUntilQuiet();
  const Block* away = nullptr;
  for (const Block& block : tier.scheduler().FindSubgroup(1, 1)->blocks) {
    if (block.state == BlockState::kAway && block.grad_saved) away = &block;
  }
  REQUIRE(away != nullptr);
  FlipRead(tier, 1, false);  // what is asked first is the gradient
  const uint64_t read = tier.Submit(1, MLPO_OP_READ_STATE, 1, 0, MLPO_PART_STATE, away->first, 1);
  tier.RunUntilQuiet();
  CHECK(tier.status(read) == 0);
  CHECK(PathOf(tier).checksum_mismatches == 0);
  REQUIRE(away->buffer != kNone);
  const uint64_t update = tier.Update(1, 1, 1);
  tier.RunUntilQuiet();
  CHECK(tier.status(update) == 0);
  CHECK(PathOf(tier).checksum_mismatches == 1);
  CHECK(tier.violation() == "");
}

// Workers have just found it wrong, or it is being read again, and that fails: nobody wants it any more, and the write
// that needed the block goes on. If the gradient was all that the block had, its extent goes, too, but not before.
TEST_CASE("SchedulerIntegrity.AWrongGradientMayBeDiscardedMeanwhile") {
  const bool state = GENERATE(false, true);  // the block has some
  const bool again = GENERATE(false, true);  // it is being read again
  constexpr uint64_t kOf = 28672;
  FakeTier tier(MakeOptions(3, 1, kOf), {{}});
  tier.AddSubgroup(1, 1, {12 * kOf}, MLPO_BFLOAT16);
  if (state) tier.WriteState(1, 1, MLPO_PART_STATE);
  tier.RunUntilQuiet();
  tier.Grad(1, 1, 1);
  tier.RunUntilQuiet();
  const Block* away = nullptr;
  for (const Block& block : tier.scheduler().FindSubgroup(1, 1)->blocks) {
    if (block.state == BlockState::kAway && block.grad_saved) away = &block;
  }
  REQUIRE(away != nullptr);
  FlipRead(tier, 1, false);  // what is asked first is the gradient
  const uint64_t write = tier.Submit(1, MLPO_OP_WRITE_STATE, 1, 0, MLPO_PART_MASTER, away->first + 5, 3);
  const auto reached = [&] { return again ? away->wrong != nullptr : away->state == BlockState::kWorking; };
  while (!reached() && tier.Step()) {
  }
  REQUIRE(reached());
  if (again) tier.SetFault(0, [](const Transfer& t) { return t.id != 0 && t.direction == Direction::kRead ? EIO : 0; });
  const uint64_t discard = tier.Submit(1, MLPO_OP_DISCARD, 1, 0, 0, 0, 0);
  tier.RunUntilAnswered(write);
  CHECK(tier.status(discard) == 0);
  CHECK(tier.status(write) == 0);
  CHECK(PathOf(tier).checksum_mismatches == (again ? 1 : 0));
  CHECK(PathOf(tier).checksum_errors == 0);
  tier.SetFault(0, nullptr);
  tier.RunUntilQuiet();
  for (const Block& block : tier.scheduler().FindSubgroup(1, 1)->blocks) {
    if (block.nonzero == 0) CHECK(block.extent.path == kNone);
  }
  for (uint32_t epoch = 1; epoch <= 2; ++epoch) TrainStep(tier, 1, epoch);
  CHECK(tier.violation() == "");
}

TEST_CASE("SchedulerIntegrity.ObjectsAreComparedToo") {
  FakeTier tier(MakeOptions(3, 1, kLarge), {{}});
  tier.AddSession(1);
  const uint64_t block = 12 * ((kLarge + 1023) / 1024 * 1024), bytes = 7 * block + 100;
  const uint64_t written = tier.Flush(1, 1, "thing", bytes, block / 3);
  tier.RunUntilQuiet();
  REQUIRE(tier.status(written) == 0);
  tier.Open(1, MLPO_OP_FETCH, 2, "thing");
  tier.RunUntilQuiet();
  const auto fetch = [&] {
    int worst = 0;
    for (uint64_t at = 0; at < bytes; at += block) {
      const uint64_t piece = tier.Piece(1, MLPO_OP_FETCH, 2, at, std::min(block, bytes - at));
      tier.RunUntilQuiet();
      worst = std::min(worst, tier.status(piece));
    }
    return worst;
  };
  FlipRead(tier, 3, false);
  CHECK(fetch() == 0);
  CHECK(PathOf(tier).checksum_mismatches == 1);
  FlipRead(tier, 3, true);
  CHECK(fetch() == MLPO_E_IO);
  CHECK(PathOf(tier).checksum_errors == 1);
  tier.SetFlip(0, nullptr);
  CHECK(fetch() == 0);
  CHECK(tier.violation() == "");
}

// A path that brings wrong bytes, twice, gets nothing new before a probe of it was good, as one whose reads fail.
TEST_CASE("SchedulerIntegrity.APathThatIsWrongTwiceIsProbedBeforeItIsWrittenTo") {
  FakeTier tier(MakeOptions(4, 2), std::vector<FakeTier::PathSpeed>(2));
  tier.AddSubgroup(1, 1, {30 * kBlock});
  tier.WriteState(1, 1, MLPO_PART_STATE);
  tier.RunUntilQuiet();
  const Block* bad = nullptr;
  for (const Block& block : tier.scheduler().FindSubgroup(1, 1)->blocks) {
    if (block.state == BlockState::kAway && block.extent.path == 0) bad = &block;
  }
  REQUIRE(bad != nullptr);
  const auto read = [&] {
    const uint64_t request = tier.Submit(1, MLPO_OP_READ_STATE, 1, 0, MLPO_PART_STATE, bad->first, 1);
    tier.RunUntilAnswered(request);
    return tier.status(request);
  };
  FlipRead(tier, 1, false);
  CHECK(read() == 0);
  CHECK(PathOf(tier).state == "healthy");
  tier.RunUntilQuiet();
  for (SubgroupId id = 2; bad->state != BlockState::kAway; ++id) {  // others take its buffer
    REQUIRE(id < 9);
    tier.AddSubgroup(1, id, {8 * kBlock});
    tier.WriteState(1, id, MLPO_PART_STATE);
    tier.RunUntilQuiet();
  }
  FlipRead(tier, 1, true);
  CHECK(read() == MLPO_E_IO);
  CHECK(PathOf(tier).state == "suspect");
  CHECK(PathOf(tier).error == EBADMSG);
  const uint64_t writes = tier.counts(0).writes;
  tier.AddSubgroup(1, 9, {20 * kBlock});
  const uint64_t written = tier.WriteState(1, 9, MLPO_PART_STATE);
  tier.SetFault(0, [](const Transfer& t) { return t.id == 0 ? EIO : 0; });
  tier.RunUntilAnswered(written);
  CHECK(tier.status(written) == 0);
  CHECK(tier.counts(0).writes == writes);
  tier.SetFault(0, nullptr);
  tier.Wait(70'000'000'000);
  CHECK(PathOf(tier).state == "healthy");
  CHECK(read() == 0);
  TrainStep(tier, 1, 1);
  CHECK(tier.violation() == "");
}

// What is read again is in flight as anything else: a session that ends waits for it.
TEST_CASE("SchedulerIntegrity.SessionsEndWhileABlockIsReadAgain") {
  FakeTier tier(MakeOptions(3, 1, kLarge), {{}});
  PutAway(tier, 8);
  FlipRead(tier, 3, false);
  bool again = false;
  tier.on_transfer = [&](const Transfer& t) { again |= t.bytes == kLastPieceBytes; };
  tier.Update(1, 1, 1);
  while (!again && tier.Step()) {
  }
  REQUIRE(again);
  tier.EndSession(1);
  CHECK_FALSE(tier.gone(1));
  tier.RunUntilQuiet();
  CHECK(tier.gone(1));
  CHECK(tier.scratch_bytes() == 0);
  PoolSnapshot pool;
  tier.scheduler().Fill(&pool);
  CHECK(pool.free_blocks == 3);
  CHECK(tier.scheduler().idle());
  CHECK(tier.violation() == "");
}

// The pass over a block that is to be written is work in flight, too.
TEST_CASE("SchedulerIntegrity.SessionsEndAndGradientsAreDiscardedDuringAPass") {
  const bool end = GENERATE(false, true);
  constexpr uint64_t kOf = 28672;
  FakeTier tier(MakeOptions(2, 1, kOf), {{1e9, 1e9}}, FakeTier::Work{1'000'000, 0, 1});
  tier.AddSubgroup(1, 1, {12 * kOf}, MLPO_BFLOAT16);
  const uint64_t passes = tier.passes();
  tier.WriteState(1, 1, MLPO_PART_STATE);
  tier.Grad(1, 1, 1);
  while (tier.passes() == passes && tier.Step()) {
  }
  REQUIRE(tier.passes() > passes);
  CHECK_FALSE(tier.scheduler().idle());
  if (end) {
    tier.EndSession(1);
    CHECK_FALSE(tier.gone(1));
    tier.RunUntilQuiet();
    CHECK(tier.gone(1));
    CHECK(tier.scratch_bytes() == 0);
  } else {
    for (int i = 0; i < 40; ++i) {
      for (int steps = 0; steps < 25 && tier.Step(); ++steps) {
      }
      tier.Submit(1, MLPO_OP_DISCARD, 1, 0, 0, 0, 0);
      tier.Grad(1, 1, 1);
    }
    tier.RunUntilQuiet();
    const uint64_t update = tier.Update(1, 1, 1);
    tier.RunUntilQuiet();
    CHECK(tier.status(update) == 0);
    TrainStep(tier, 1, 2);
  }
  CHECK(tier.violation() == "");
}

// The pass waits for workers, and with it the write, but not the path: where reads and writes come in turns, its turn
// begins with the transfer.
TEST_CASE("SchedulerIntegrity.AWriteThatWaitsForItsPassHoldsNoTurn") {
  Scheduler::Options options = MakeOptions(8, 1);
  options.turns = {{4, true, false}};  // of 4 blocks, in one direction
  FakeTier tier(options, {{1e9, 1e9}}, FakeTier::Work{10'000'000, 0, 1});
  tier.AddSubgroup(1, 1, {40 * kBlock});
  uint32_t reads = 0, writes = 0;
  bool both = false, read_during_pass = false;
  tier.on_transfer = [&](const Transfer& t) {
    const bool read = t.direction == Direction::kRead;
    ++(read ? reads : writes);
    both |= reads > 0 && writes > 0;
    read_during_pass |= read && tier.passes() > tier.counts(0).writes;
  };
  tier.on_transfer_end = [&](const Transfer& t) { --(t.direction == Direction::kRead ? reads : writes); };
  const uint64_t write = tier.WriteState(1, 1, MLPO_PART_STATE);
  tier.RunUntilQuiet();
  const uint64_t read = tier.Submit(1, MLPO_OP_READ_STATE, 1, 0, MLPO_PART_STATE, 0, 40 * kBlock);
  tier.RunUntilQuiet();
  CHECK(tier.status(write) == 0);
  CHECK(tier.status(read) == 0);
  CHECK(read_during_pass);
  CHECK_FALSE(both);
  CHECK(tier.passes() <= 40);  // one a block, even if its turn had passed
  CHECK(tier.violation() == "");
}

// Writes fail, and blocks go elsewhere with the checksums that they have.
TEST_CASE("SchedulerIntegrity.AFailedWriteNeedsNoSecondPass") {
  FakeTier tier(MakeOptions(6, 2), std::vector<FakeTier::PathSpeed>(2));
  tier.AddSubgroup(1, 1, {40 * kBlock});
  tier.SetFault(0, [](const Transfer& t) { return t.direction == Direction::kWrite ? EIO : 0; });
  tier.WriteState(1, 1, MLPO_PART_STATE);
  tier.RunUntilQuiet();
  CHECK(PathOf(tier, 0).write_errors > 0);
  CHECK(tier.passes() <= 40);
  CHECK(tier.counts(0).writes + tier.counts(1).writes > tier.passes());
  for (uint32_t epoch = 1; epoch <= 3; ++epoch) TrainStep(tier, 1, epoch);
  CHECK(tier.violation() == "");
}
