#include "daemon/io/thread_queue.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "daemon/base/clock.h"
#include "daemon/io/io_faults.h"
#include "proto/abi.h"

namespace mlpo {
namespace {

// A thread keeps one piece in flight: enough of them for the device, few enough for the node.
uint32_t ThreadCount(uint32_t depth) { return std::clamp(depth / 4, 2u, 8u); }

}  // namespace

ThreadQueue::ThreadQueue(const Options& options, const Path* path, const BufferPool* pool, TransferResults* results)
    : path_(path),
      pool_(pool),
      results_(results),
      faults_(options.faults),
      table_({options.index, path->name(), options.piece_bytes, options.depth,
              path->direct_io() ? static_cast<uint32_t>(MLPO_ALIGN) : 1u}) {}

Result<std::unique_ptr<PathQueue>> ThreadQueue::Start(const Options& options, const Path* path, const BufferPool* pool,
                                                      TransferResults* results) {
  std::unique_ptr<ThreadQueue> queue(new ThreadQueue(options, path, pool, results));
  for (uint32_t i = 0; i < ThreadCount(options.depth); ++i) {
    try {
      queue->threads_.emplace_back([raw = queue.get()] { raw->Run(); });
    } catch (const std::system_error& e) {  // the limit on threads: fewer do as well, none does not
      if (queue->threads_.empty())
        return Status::Errno(e.code().value(), "starting the I/O threads of path " + path->name());
      spdlog::warn("event=io_threads path={} threads={} errno={}", path->name(), i, e.code().value());
      break;
    }
  }
  return std::unique_ptr<PathQueue>(std::move(queue));
}

ThreadQueue::~ThreadQueue() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadQueue::Submit(const Transfer& transfer) {
  MLPO_CHECK(transfer.buffer < pool_->count() && transfer.buffer_offset <= pool_->buffer_bytes() &&
             transfer.bytes <= pool_->buffer_bytes() - transfer.buffer_offset);
  MLPO_CHECK(transfer.offset >= Path::kFileHeaderBytes);
  std::optional<TransferResult> ended;
  {
    std::lock_guard lock(mutex_);
    ended = table_.Add(transfer, path_->descriptor(transfer.file),
                       pool_->data(transfer.buffer) + transfer.buffer_offset, NowNs());
  }
  if (ended) {
    results_->Put(*ended);
  } else {
    work_.notify_one();  // a thread that takes work wakes the next one if there is more
  }
}

int64_t ThreadQueue::Carry(const PieceTable::Operation& operation) {
  const auto offset = static_cast<off_t>(operation.offset);
  const size_t bytes = faults_ == nullptr
                           ? operation.bytes
                           : faults_->RequestBytes(operation.direction, operation.offset, operation.bytes);
  const ssize_t moved = operation.direction == Direction::kRead ? ::pread(operation.fd, operation.data, bytes, offset)
                                                                : ::pwrite(operation.fd, operation.data, bytes, offset);
  const int64_t result = moved < 0 ? -errno : moved;
  if (faults_ == nullptr) return result;
  if (operation.direction == Direction::kRead && result > 0)
    faults_->DataRead(operation.offset, operation.data, static_cast<size_t>(result));
  return faults_->Outcome(operation.direction, operation.offset, operation.bytes, result);
}

void ThreadQueue::Run() {
  SetThreadName("io-" + path_->name());
  TakeShortTurns();
  std::unique_lock lock(mutex_);
  while (true) {
    const int64_t now = NowNs();
    const std::optional<PieceTable::Operation> operation = table_.Next(now);
    if (!operation) {
      if (stopping_ && table_.idle()) break;
      const int64_t retry_ns = table_.next_retry_ns();
      if (retry_ns == INT64_MAX) {
        work_.wait(lock);  // idle, or others carry what is left: each of them wakes us at the end
      } else {
        work_.wait_for(lock, std::chrono::nanoseconds(std::max<int64_t>(retry_ns - now, 1)));
      }
      continue;
    }
    const bool more = table_.HasWork(now);
    lock.unlock();
    if (more) work_.notify_one();
    const int64_t result = Carry(*operation);
    lock.lock();
    const std::optional<TransferResult> ended = table_.Complete(operation->token, result, NowNs());
    const bool last = stopping_ && table_.idle();
    if (!ended) continue;
    lock.unlock();
    results_->Put(*ended);
    if (last) work_.notify_all();
    lock.lock();
  }
}

}  // namespace mlpo
