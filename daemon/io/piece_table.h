// PieceTable: what both back-ends know about the transfers of one path. It cuts transfers into pieces, says what to
// issue next, takes what came back, resumes short pieces and says when a transfer has ended. No system calls.
//
// A piece is in one of `depth` slots. Its token is (generation << 32 | slot); the generation changes with every issue,
// so that a completion can be taken only for the very request that it answers. Token 0 is never used.
//
// Answers to what a read or write returned:
//   all bytes         the piece is done
//   fewer, not 0      resumed behind the last whole `alignment`; without progress kMaxAttempts times: EIO
//   0                 EIO: the end of the file, or a write that is not taken
//   EINTR, EAGAIN     again, EAGAIN after a growing pause; kMaxAttempts times: that errno
//   another errno     the transfer fails with it
// The first failure stops the transfer's further pieces; it ends when all issued ones have come back.
//
// Not thread-safe: owned by one thread, or guarded by its owner's lock. Units: bytes, nanoseconds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "daemon/base/log.h"
#include "daemon/types/transfer.h"

namespace mlpo {

class PieceTable {
 public:
  static constexpr int kMaxAttempts = 16;

  struct Options {
    PathIndex path = 0;
    std::string path_name;     // for messages
    uint32_t piece_bytes = 0;  // a multiple of MLPO_ALIGN
    uint32_t depth = 0;
    uint32_t alignment = 1;  // of a resumed request: MLPO_ALIGN with O_DIRECT
  };
  // One read or write to make.
  struct Operation {
    uint64_t token = 0;
    Direction direction = Direction::kRead;
    int fd = -1;
    BufferIndex buffer = 0;
    std::byte* data = nullptr;
    size_t bytes = 0;
    uint64_t offset = 0;
  };

  explicit PieceTable(Options options);

  // Takes a transfer on `fd`, to or from `data`. A result if it ends at once (no bytes, or fd < 0: EBADF).
  std::optional<TransferResult> Add(const Transfer& transfer, int fd, std::byte* data, int64_t now_ns);
  // The next operation to issue; nullopt if there is none, all slots are taken, or retries wait for their time.
  std::optional<Operation> Next(int64_t now_ns);
  // `result` of the operation with this token: bytes or a negated errno. The transfer's result if that was its last.
  std::optional<TransferResult> Complete(uint64_t token, int64_t result, int64_t now_ns);

  // The operation that a token was given for; nullptr if it is not in flight.
  const Operation* Find(uint64_t token) const;
  // When the first waiting retry may be issued; INT64_MAX if none waits.
  int64_t next_retry_ns() const;
  // True if Next() would give something now.
  bool HasWork(int64_t now_ns) const;
  bool idle() const { return active_ == 0; }
  uint32_t in_flight() const { return in_flight_; }

 private:
  static constexpr uint32_t kEnd = 0xffffffffu;
  enum class SlotState : uint8_t { kFree, kIssued, kWaiting };

  struct Active {  // a transfer
    Transfer transfer;
    int fd = -1;
    std::byte* data = nullptr;
    uint64_t cut_bytes = 0;   // given to pieces so far
    uint64_t done_bytes = 0;  // of ended pieces
    uint32_t pieces = 0;      // not ended
    int error = 0;
    bool uncut = false;      // in the list of those with bytes left to cut
    int64_t started_ns = 0;  // when its first piece was issued
    uint32_t next = kEnd;    // in the list of uncut or of free entries
  };
  struct Slot {
    SlotState state = SlotState::kFree;
    uint32_t generation = 0;
    uint32_t active = kEnd;
    uint64_t start = 0;  // of the piece in its transfer
    uint64_t bytes = 0;
    uint64_t done = 0;
    int attempts = 0;  // without progress
    int64_t not_before_ns = 0;
    Operation operation;
  };

  uint32_t TakeActive();
  void LeaveUncut(Active& active);
  Operation Issue(uint32_t slot_index, int64_t now_ns);
  void Retry(Slot& slot, int64_t not_before_ns);
  void Fail(Slot& slot, int error, const char* reason, int64_t now_ns);
  std::optional<TransferResult> EndPiece(uint32_t slot_index, int64_t now_ns);

  const Options options_;
  std::vector<Slot> slots_;
  std::vector<uint32_t> free_slots_;
  std::vector<Active> actives_;
  uint32_t free_active_ = kEnd;
  uint32_t uncut_head_ = kEnd, uncut_tail_ = kEnd;  // oldest first
  uint32_t active_ = 0;
  uint32_t in_flight_ = 0;
  uint32_t waiting_ = 0;
  RateLimit log_limit_;
};

}  // namespace mlpo
