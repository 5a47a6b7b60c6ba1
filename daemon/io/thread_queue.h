// ThreadQueue: PathQueue with pread and pwrite in a few threads, for where io_uring is refused, or by setting.
//
// Its threads share one PieceTable under mutex_, which is not held over a system call. Submit: data thread. The
// destructor lets everything accepted end first.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "daemon/io/path_queue.h"
#include "daemon/io/piece_table.h"

namespace mlpo {

class ThreadQueue : public PathQueue {
 public:
  static Result<std::unique_ptr<PathQueue>> Start(const Options& options, const Path* path, const BufferPool* pool,
                                                  TransferResults* results);
  ~ThreadQueue() override;

  void Submit(const Transfer& transfer) override;
  void PieceReady(uint32_t) override {}
  const char* engine() const override { return "threads"; }
  bool registered_buffers() const override { return false; }

 private:
  ThreadQueue(const Options& options, const Path* path, const BufferPool* pool, TransferResults* results);
  void Run();
  int64_t Carry(const PieceTable::Operation& operation);

  const Path* const path_;
  const BufferPool* const pool_;
  TransferResults* const results_;
  IoFaults* const faults_;

  std::mutex mutex_;
  std::condition_variable work_;
  PieceTable table_;       // guarded by mutex_
  bool stopping_ = false;  // guarded by mutex_
  std::vector<std::thread> threads_;
};

}  // namespace mlpo
