// PieceTable against a scripted kernel: every answer that a read or write can have.
#include <array>
#include <set>

#include "daemon/base/clock.h"
#include "daemon/io/piece_table.h"
#include "proto/abi.h"
#include "tests/support/catch.h"

namespace mlpo::test {
namespace {

constexpr int kFd = 3;
constexpr uint64_t kPage = MLPO_ALIGN;

PieceTable Make(uint32_t pieces_pages, uint32_t depth, uint32_t alignment = MLPO_ALIGN) {
  return PieceTable({4, "test", static_cast<uint32_t>(pieces_pages * kPage), depth, alignment});
}

Transfer Write(uint64_t id, uint64_t offset, uint64_t bytes) {
  Transfer transfer;
  transfer.id = id;
  transfer.direction = Direction::kWrite;
  transfer.offset = offset;
  transfer.bytes = bytes;
  return transfer;
}

TEST_CASE("PieceTable.CutsInOrderUpToItsDepth") {
  PieceTable table = Make(2, 2);
  static std::byte memory[16 * MLPO_ALIGN];
  REQUIRE_FALSE(table.Add(Write(9, 10 * kPage, 5 * kPage), kFd, memory, 1));
  const auto a = table.Next(1), b = table.Next(1);
  REQUIRE((a && b));
  CHECK_FALSE(table.Next(1));  // depth
  CHECK(a->offset == 10 * kPage);
  CHECK(a->bytes == 2 * kPage);
  CHECK(a->data == memory);
  CHECK(a->fd == kFd);
  CHECK(b->offset == 12 * kPage);
  CHECK(b->data == memory + 2 * kPage);
  CHECK_FALSE(table.Complete(b->token, 2 * kPage, 2));
  const auto c = table.Next(2);
  REQUIRE(c);
  CHECK(c->offset == 14 * kPage);
  CHECK(c->bytes == kPage);
  CHECK_FALSE(table.Complete(c->token, kPage, 3));
  CHECK_FALSE(table.idle());
  const auto result = table.Complete(a->token, 2 * kPage, 4);
  REQUIRE(result);
  CHECK(result->id == 9);
  CHECK(result->path == 4);
  CHECK(result->error == 0);
  CHECK(result->bytes == 5 * kPage);
  CHECK(result->started_ns == 1);
  CHECK(result->finished_ns == 4);
  CHECK(table.idle());
}

TEST_CASE("PieceTable.ShortIsResumedFromTheLastWholeBlock") {
  const auto [alignment, returned, resumed] = GENERATE(table<uint32_t, int64_t, uint64_t>({
      {4096, 4096, 4096},
      {4096, 4096 + 512, 4096},
      {4096, 3 * 4096 + 4095, 3 * 4096},
      {1, 4097, 4097},
      {1, 1, 1},
  }));
  PieceTable pieces = Make(8, 2, alignment);
  static std::byte memory[16 * MLPO_ALIGN];
  REQUIRE_FALSE(pieces.Add(Write(1, kPage, 8 * kPage), kFd, memory, 1));
  const auto first = pieces.Next(1);
  REQUIRE(first);
  CHECK_FALSE(pieces.Complete(first->token, returned, 2));
  const auto rest = pieces.Next(2);
  REQUIRE(rest);
  CHECK(rest->token != first->token);
  CHECK(rest->offset == kPage + resumed);
  CHECK(rest->data == memory + resumed);
  CHECK(rest->bytes == 8 * kPage - resumed);
  const auto result = pieces.Complete(rest->token, static_cast<int64_t>(rest->bytes), 3);
  REQUIRE(result);
  CHECK(result->error == 0);
  CHECK(result->bytes == 8 * kPage);
}

TEST_CASE("PieceTable.ShortWithoutProgressEndsAsEio") {
  PieceTable table = Make(8, 2);
  static std::byte memory[16 * MLPO_ALIGN];
  REQUIRE_FALSE(table.Add(Write(1, 0, 8 * kPage), kFd, memory, 1));
  std::optional<TransferResult> result;
  int tries = 0;
  for (; !result && tries < 1000; ++tries) {
    const auto operation = table.Next(1);
    REQUIRE(operation);
    CHECK(operation->offset == 0);
    result = table.Complete(operation->token, 512, 1);
  }
  REQUIRE(result);
  CHECK(tries == PieceTable::kMaxAttempts);
  CHECK(result->error == EIO);
  CHECK(result->bytes == 0);
}

TEST_CASE("C10_EachFailureEndsTheTransferWithItsErrno") {
  const auto [returned, error] = GENERATE(table<int64_t, int>({
      {-EIO, EIO},
      {-ENOSPC, ENOSPC},
      {-EDQUOT, EDQUOT},
      {-EFBIG, EFBIG},
      {-EROFS, EROFS},
      {0, EIO},
      {3 * 4096, EIO},  // more than asked for
  }));
  PieceTable pieces = Make(2, 4);
  static std::byte memory[16 * MLPO_ALIGN];
  REQUIRE_FALSE(pieces.Add(Write(1, 0, 8 * kPage), kFd, memory, 1));
  const auto a = pieces.Next(1), b = pieces.Next(1);
  REQUIRE((a && b));
  CHECK_FALSE(pieces.Complete(a->token, returned, 2));  // b has not come back: the buffer is still the kernel's
  CHECK_FALSE(pieces.Next(2));                          // and no further piece is issued
  const auto result = pieces.Complete(b->token, 2 * kPage, 3);
  REQUIRE(result);
  CHECK(result->error == error);
  CHECK(result->bytes == 2 * kPage);
  CHECK(pieces.idle());
}

TEST_CASE("C11_PartOfAWriteThenNoSpaceIsNoSpace") {
  PieceTable table = Make(8, 1);
  static std::byte memory[16 * MLPO_ALIGN];
  REQUIRE_FALSE(table.Add(Write(1, 0, 8 * kPage), kFd, memory, 1));
  const auto part = table.Next(1);
  CHECK_FALSE(table.Complete(part->token, 3 * kPage + 100, 1));
  const auto rest = table.Next(1);
  REQUIRE(rest);
  const auto result = table.Complete(rest->token, -ENOSPC, 1);
  REQUIRE(result);
  CHECK(result->error == ENOSPC);
  CHECK(result->bytes == 3 * kPage);
}

TEST_CASE("PieceTable.EagainWaitsAndIsBounded") {
  PieceTable table = Make(8, 1);
  static std::byte memory[16 * MLPO_ALIGN];
  REQUIRE_FALSE(table.Add(Write(1, 0, kPage), kFd, memory, 1));
  int64_t now = 1;
  std::optional<TransferResult> result;
  int tries = 0;
  int64_t pause = 0;
  while (!result) {
    const auto operation = table.Next(now);
    REQUIRE(operation);
    REQUIRE(++tries <= PieceTable::kMaxAttempts);
    result = table.Complete(operation->token, -EAGAIN, now);
    if (result) break;
    CHECK_FALSE(table.Next(now));  // not at once
    CHECK_FALSE(table.HasWork(now));
    const int64_t next = table.next_retry_ns();
    CHECK(next - now >= pause);
    CHECK(next - now <= 200 * kNsPerMs);
    pause = next - now;
    now = next;
    CHECK(table.HasWork(now));
  }
  CHECK(tries == PieceTable::kMaxAttempts);
  CHECK(result->error == EAGAIN);
  CHECK(now < 5 * kNsPerS);
}

TEST_CASE("PieceTable.InterruptedIsRepeatedAtOnceAndSucceeds") {
  PieceTable table = Make(8, 1);
  static std::byte memory[16 * MLPO_ALIGN];
  REQUIRE_FALSE(table.Add(Write(1, 0, kPage), kFd, memory, 1));
  const auto first = table.Next(1);
  CHECK_FALSE(table.Complete(first->token, -EINTR, 1));
  const auto second = table.Next(1);
  REQUIRE(second);
  CHECK(second->offset == first->offset);
  const auto result = table.Complete(second->token, kPage, 2);
  REQUIRE(result);
  CHECK(result->error == 0);
}

TEST_CASE("C12_CompletionOfAnOlderRequestIsNotTaken") {
  PieceTable table = Make(2, 1);
  static std::byte memory[16 * MLPO_ALIGN];
  REQUIRE_FALSE(table.Add(Write(1, 0, 2 * kPage), kFd, memory, 1));
  const auto old = table.Next(1);
  REQUIRE(table.Complete(old->token, -EIO, 1));
  REQUIRE_FALSE(table.Add(Write(2, 0, kPage), kFd, memory, 1));
  const auto current = table.Next(1);
  REQUIRE(current);
  CHECK(current->token != old->token);
  CHECK(table.Find(old->token) == nullptr);
  CHECK_FALSE(table.Complete(old->token, kPage, 2));  // again, late
  CHECK_FALSE(table.Complete(0, kPage, 2));
  CHECK_FALSE(table.Complete(~uint64_t{0}, kPage, 2));
  CHECK(table.in_flight() == 1);
  const auto result = table.Complete(current->token, kPage, 3);
  REQUIRE(result);
  CHECK(result->id == 2);
  CHECK(result->error == 0);
}

TEST_CASE("PieceTable.FailureInTheMiddleOfTheQueueLeavesTheOthersWhole") {
  PieceTable table = Make(1, 3);
  static std::byte memory[16 * MLPO_ALIGN];
  for (uint64_t id = 1; id <= 3; ++id) REQUIRE_FALSE(table.Add(Write(id, id * 16 * kPage, 4 * kPage), kFd, memory, 1));
  // Fail the second one's first piece whenever it comes; everything else succeeds.
  std::set<uint64_t> ended;
  for (int round = 0; round < 100 && !table.idle(); ++round) {
    std::vector<PieceTable::Operation> issued;
    while (const auto operation = table.Next(1)) issued.push_back(*operation);
    for (const PieceTable::Operation& operation : issued) {
      const bool bad = operation.offset == 2 * 16 * kPage;
      const auto result = table.Complete(operation.token, bad ? -EIO : static_cast<int64_t>(operation.bytes), 2);
      if (!result) continue;
      CHECK(ended.insert(result->id).second);
      CHECK(result->error == (result->id == 2 ? EIO : 0));
      if (result->id != 2) CHECK(result->bytes == 4 * kPage);
    }
  }
  CHECK(ended == std::set<uint64_t>{1, 2, 3});
}

// Offsets beyond 2^32 and pieces of a transfer beyond 2 GiB: arithmetic only, nothing is touched.
TEST_CASE("C06_LargeTransfersDoNotWrap") {
  const uint64_t bytes = (uint64_t{2} << 30) + 2 * kPage;
  const uint64_t offset = (uint64_t{1} << 40) + kPage;
  PieceTable table({0, "test", 8u << 20, 7, MLPO_ALIGN});
  std::byte* const data = nullptr;
  REQUIRE_FALSE(table.Add(Write(1, offset, bytes), kFd, data, 1));
  uint64_t seen = 0;
  std::optional<TransferResult> result;
  while (const auto operation = table.Next(1)) {
    REQUIRE(operation->offset == offset + seen);
    REQUIRE(operation->bytes <= 0x7ffff000u);
    seen += operation->bytes;
    result = table.Complete(operation->token, static_cast<int64_t>(operation->bytes), 1);
  }
  CHECK(seen == bytes);
  REQUIRE(result);
  CHECK(result->bytes == bytes);
}

}  // namespace
}  // namespace mlpo::test
