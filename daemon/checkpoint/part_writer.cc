#include "daemon/checkpoint/part_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/base/thread.h"
#include "daemon/checkpoint/block_hash.h"
#include "proto/abi.h"

namespace mlpo {
namespace {

constexpr uint64_t kPieceBytes = 2u << 20;  // of one write(2)

bool SetDirect(int fd, bool direct) {
  const int flags = ::fcntl(fd, F_GETFL);
  return flags >= 0 && ::fcntl(fd, F_SETFL, direct ? flags | O_DIRECT : flags & ~O_DIRECT) == 0;
}

}  // namespace

Result<std::unique_ptr<PartWriter>> PartWriter::Start(int fd, bool direct, uint32_t threads, const std::string& shown,
                                                      std::function<void(const Written&)> done) {
  MLPO_CHECK(threads > 0);
  UniqueFd own(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!own) return Status::Errno(errno, "duplicating the descriptor of " + shown);
  const bool takes_it = direct && SetDirect(own.get(), true);
  const auto shared = std::make_shared<Shared>(std::move(own), takes_it, shown, std::move(done));
  std::unique_ptr<PartWriter> writer(new PartWriter(shared));
  for (uint32_t i = 0; i < threads; ++i) {
    try {
      writer->threads_.emplace_back([shared] { shared->Run(); });
    } catch (const std::system_error& e) {  // the limit on threads: fewer do as well, none does not
      if (writer->threads_.empty()) return Status::Errno(e.code().value(), "starting the threads that write " + shown);
      break;
    }
  }
  return writer;
}

PartWriter::~PartWriter() {
  {
    std::lock_guard lock(shared_->mutex);
    shared_->stopping = true;
  }
  shared_->work.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void PartWriter::Leave() {
  {
    std::lock_guard lock(shared_->mutex);
    shared_->left = shared_->stopping = true;
    shared_->jobs.clear();
  }
  shared_->work.notify_all();
  for (std::thread& thread : threads_) thread.detach();
  threads_.clear();
}

const std::string& PartWriter::shown() const { return shared_->shown; }

void PartWriter::Write(uint64_t id, const std::byte* data, uint32_t arrays, uint64_t array_bytes, uint64_t offset) {
  MLPO_CHECK(arrays > 0 && array_bytes > 0 && array_bytes % MLPO_ALIGN == 0 && offset % MLPO_ALIGN == 0);
  {
    std::lock_guard lock(shared_->mutex);
    MLPO_CHECK(!shared_->stopping);
    shared_->jobs.push_back({id, data, arrays, arrays * array_bytes, offset});
  }
  shared_->work.notify_one();
}

void PartWriter::Shared::Run() {
  SetThreadName("ckpt-write");
  std::unique_lock lock(mutex);
  while (true) {
    if (jobs.empty()) {
      if (stopping) return;
      work.wait(lock);  // until there is work, or the end
      continue;
    }
    const Job job = jobs.front();
    jobs.pop_front();
    lock.unlock();
    Written result;
    result.id = job.id;
    result.hash = BlockHash(job.data, job.arrays, job.bytes / job.arrays);
    result.started_ns = NowNs();
    result.error = Carry(job, &result.bytes);
    result.finished_ns = NowNs();
    lock.lock();
    if (left) return;
    done(result);
  }
}

// The file said yes to O_DIRECT and no to a write: then without, for all. False if that was done before.
bool PartWriter::Shared::GiveUpDirect() {
  std::lock_guard lock(mutex);
  if (!direct) return false;
  direct = false;
  spdlog::info("event=checkpoint_buffered part={} reason=\"O_DIRECT is refused\"", shown);
  return SetDirect(fd.get(), false);
}

int PartWriter::Shared::Carry(const Job& job, uint64_t* written) {
  bool retried = false;
  while (*written < job.bytes) {
    const uint64_t bytes = std::min(kPieceBytes, job.bytes - *written);
    const ssize_t put = ::pwrite(fd.get(), job.data + *written, bytes, static_cast<off_t>(job.offset + *written));
    if (put > 0) {
      *written += static_cast<uint64_t>(put);
      continue;
    }
    if (put == 0) return ENOSPC;
    if (errno == EINTR) continue;
    // Also where another thread has given it up meanwhile: once more, without. A short direct write may leave an offset
    // that O_DIRECT does not take: likewise.
    const int error = errno;
    if (error != EINVAL || retried) return error;
    retried = true;
    (void)GiveUpDirect();
  }
  bool buffered;
  {
    std::lock_guard lock(mutex);
    buffered = !direct;
  }
  if (!buffered) return 0;
  const auto offset = static_cast<off_t>(job.offset), bytes = static_cast<off_t>(job.bytes);
  constexpr unsigned kNow = SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
  if (::sync_file_range(fd.get(), offset, bytes, kNow) != 0) {
    // What it reports it reports once: fdatasync would say that all is well.
    const int error = errno;
    const bool cannot = error == EINVAL || error == ENOSYS || error == ESPIPE || error == EOPNOTSUPP;
    if (!cannot) return error;
  }
  (void)::posix_fadvise(fd.get(), offset, bytes, POSIX_FADV_DONTNEED);  // advice
  return 0;
}

}  // namespace mlpo
