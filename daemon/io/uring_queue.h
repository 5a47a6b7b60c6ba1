// UringQueue: PathQueue with one thread that owns one io_uring. The only place that sees liburing.
//
// Submit (data thread) puts transfers into inbox_; the thread polls inbox_'s eventfd through the ring, so that it
// sleeps in one place for completions and for new work alike. Everything else belongs to the thread: the ring is made,
// used and freed by it (SINGLE_ISSUER). The destructor posts the end behind all accepted transfers and joins.
#pragma once

#include <liburing.h>

#include <atomic>
#include <future>
#include <memory>
#include <optional>
#include <thread>
#include <variant>
#include <vector>

#include "daemon/io/path_queue.h"
#include "daemon/io/piece_table.h"

namespace mlpo {

class UringQueue : public PathQueue {
 public:
  // Fails with the kernel's errno where io_uring cannot be set up, entered, or given the pool for another reason than
  // RLIMIT_MEMLOCK (that one is a warning with the figure, and the buffers are not registered).
  static Result<std::unique_ptr<PathQueue>> Start(const Options& options, const Path* path, const BufferPool* pool,
                                                  TransferResults* results);
  ~UringQueue() override;

  void Submit(const Transfer& transfer) override;
  void PieceReady(uint32_t piece) override;
  const char* engine() const override { return "io_uring"; }
  bool registered_buffers() const override { return registered_.load(std::memory_order_relaxed); }

 private:
  UringQueue(const Options& options, const Path* path, const BufferPool* pool, TransferResults* results);

  void Run(std::promise<Status> started);
  Status SetUp();
  Status MakeRing();
  void BoundWorkers();
  Status TryRing();
  Status RegisterPool();
  bool ClonePool();
  Status RegisterForItself();
  void AddPiece(uint32_t piece);
  bool TooManySmallPages() const;
  int FaultAt(const char* call) const;

  void WatchInbox();
  void TakeInbox();
  void IssuePieces();
  void Prepare(const PieceTable::Operation& operation);
  void Wait();
  void ReapCompletions();
  void HandleCompletion(uint64_t token, int64_t result);

  const Options options_;
  const Path* const path_;
  const BufferPool* const pool_;
  TransferResults* const results_;
  struct End {};
  struct NewPiece {
    uint32_t piece;
  };
  using Message = std::variant<Transfer, NewPiece, End>;
  MessageQueue<Message> inbox_;
  std::atomic<bool> registered_{false};  // relaxed: for status only

  // The thread's own.
  io_uring ring_{};
  bool ring_made_ = false;
  bool watching_ = false;  // a poll of the inbox is in the ring
  bool stopping_ = false;
  bool has_table_ = false;  // of buffers, that takes further pieces
  PieceTable table_;
  std::vector<bool> piece_usable_;  // registered in this ring
  std::vector<Message> taken_;      // keeps its storage between rounds
  RateLimit enter_errors_;

  std::thread thread_;  // last: everything above outlives it
};

}  // namespace mlpo
