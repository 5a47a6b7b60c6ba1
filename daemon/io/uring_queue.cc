#include "daemon/io/uring_queue.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <system_error>

#include "daemon/base/clock.h"
#include "daemon/io/io_faults.h"
#include "daemon/io/memory_lock.h"
#include "daemon/io/uring_pool.h"
#include "proto/abi.h"

namespace mlpo {
namespace {

constexpr uint64_t kInboxToken = 0;  // no piece has it
constexpr int64_t kEnterPauseNs = kNsPerMs;

// From the best mode for one thread that submits and reaps to what Linux 5.10 has. A mode that the kernel does not
// know is EINVAL.
constexpr unsigned kModes[] = {
#if defined(IORING_SETUP_SINGLE_ISSUER) && defined(IORING_SETUP_DEFER_TASKRUN)
    IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN,
#endif
#if defined(IORING_SETUP_COOP_TASKRUN)
    IORING_SETUP_COOP_TASKRUN,
#endif
    0,
};

__kernel_timespec Timespec(int64_t ns) { return {ns / kNsPerS, ns % kNsPerS}; }

Status SetUpRing(unsigned entries, io_uring* ring) {
  int error = 0;
  for (const unsigned mode : kModes) {
    error = -::io_uring_queue_init(entries, ring, mode);
    if (error == 0) return Status();
    if (error != EINVAL) break;  // else step down
  }
  return Status::Errno(error, "io_uring_setup");
}

// A seccomp filter may let the ring be made and refuse to enter it.
Status EnterRing(io_uring* ring) {
  io_uring_sqe* sqe = ::io_uring_get_sqe(ring);
  MLPO_CHECK(sqe != nullptr);
  ::io_uring_prep_nop(sqe);
  ::io_uring_sqe_set_data64(sqe, kInboxToken);
  int rc;
  do {
    rc = ::io_uring_submit_and_wait(ring, 1);
  } while (rc == -EINTR);
  io_uring_cqe* cqe = nullptr;
  if (rc >= 0) rc = ::io_uring_peek_cqe(ring, &cqe);
  if (rc < 0) return Status::Errno(-rc, "io_uring_enter");
  const int error = cqe->res < 0 ? -cqe->res : 0;
  ::io_uring_cqe_seen(ring, cqe);
  return error == 0 ? Status() : Status::Errno(error, "io_uring_enter");
}

}  // namespace

Status ProbeUring() {
  io_uring ring{};
  const Status made = SetUpRing(1, &ring);
  if (!made.ok()) return made;
  const Status entered = EnterRing(&ring);
  ::io_uring_queue_exit(&ring);
  return entered;
}

UringQueue::UringQueue(const Options& options, const Path* path, const BufferPool* pool, TransferResults* results)
    : options_(options),
      path_(path),
      pool_(pool),
      results_(results),
      table_({options.index, path->name(), options.piece_bytes, options.depth,
              path->direct_io() ? static_cast<uint32_t>(MLPO_ALIGN) : 1u}),
      piece_usable_(pool->piece_count()),
      enter_errors_(kNsPerS) {}

Result<std::unique_ptr<PathQueue>> UringQueue::Start(const Options& options, const Path* path, const BufferPool* pool,
                                                     TransferResults* results) {
  std::unique_ptr<UringQueue> queue(new UringQueue(options, path, pool, results));
  std::promise<Status> started;
  std::future<Status> status = started.get_future();
  try {
    queue->thread_ =
        std::thread([raw = queue.get(), promise = std::move(started)]() mutable { raw->Run(std::move(promise)); });
  } catch (const std::system_error& e) {
    return Status::Errno(e.code().value(), "starting the I/O thread of path " + path->name());
  }
  const Status set_up = status.get();
  if (!set_up.ok()) {
    queue->thread_.join();
    return set_up;
  }
  return std::unique_ptr<PathQueue>(std::move(queue));
}

UringQueue::~UringQueue() {
  if (!thread_.joinable()) return;  // the set-up failed
  inbox_.Put(End{});
  thread_.join();
}

void UringQueue::Submit(const Transfer& transfer) {
  MLPO_CHECK(transfer.buffer < pool_->count() && transfer.buffer_offset <= pool_->buffer_bytes() &&
             transfer.bytes <= pool_->buffer_bytes() - transfer.buffer_offset);
  MLPO_CHECK(transfer.offset >= Path::kFileHeaderBytes);
  inbox_.Put(transfer);
}

void UringQueue::PieceReady(uint32_t piece) { inbox_.Put(NewPiece{piece}); }

int UringQueue::FaultAt(const char* call) const {
  return options_.faults == nullptr ? 0 : options_.faults->SetupError(call);
}

Status UringQueue::SetUp() {
  const Status made = MakeRing();
  if (!made.ok()) return made;
  const Status tried = TryRing();
  if (!tried.ok()) return tried;
  return RegisterPool();
}

Status UringQueue::MakeRing() {
  if (const int error = FaultAt("io_uring_setup"); error != 0) return Status::Errno(error, "io_uring_setup");
  const Status made = SetUpRing(options_.depth + 1, &ring_);  // + 1: the poll of the inbox
  if (!made.ok()) return made;
  ring_made_ = true;
  BoundWorkers();
  return Status();
}

// Buffered writes run in kernel threads that take a core each; without a bound as many as four times the cores.
void UringQueue::BoundWorkers() {
  unsigned workers[2] = {std::clamp(options_.depth / 4, 2u, 8u), 0};  // for files; 0: the others as they are
  const int rc = ::io_uring_register_iowq_max_workers(&ring_, workers);
  if (rc < 0) spdlog::debug("event=io_workers_not_bounded path={} errno={}", path_->name(), -rc);  // before Linux 5.15
}

Status UringQueue::TryRing() {
  if (const int error = FaultAt("io_uring_enter"); error != 0) return Status::Errno(error, "io_uring_enter");
  return EnterRing(&ring_);
}

Status UringQueue::RegisterPool() {
  const Status status = ClonePool() ? Status() : RegisterForItself();
  if (!status.ok()) return status;
  bool all = true;
  for (uint32_t piece = 0; piece < pool_->piece_count(); ++piece) all &= piece_usable_[piece] || !pool_->IsReady(piece);
  registered_ = all;
  return Status();
}

bool UringQueue::ClonePool() {
  if (options_.shared == nullptr) return false;
  if (const int error = options_.shared->CloneAll(ring_.ring_fd); error != 0) {
    spdlog::warn("event=pool_not_cloned path={} errno={}", path_->name(), error);
    return false;
  }
  has_table_ = true;
  for (uint32_t piece = 0; piece < pool_->piece_count(); ++piece)
    piece_usable_[piece] = options_.shared->IsRegistered(piece);
  return true;
}

bool UringQueue::TooManySmallPages() const {
  return !pool_->huge_pages() && pool_->pool_bytes() > kMaxSmallPageBytes / std::max(1u, options_.rings);
}

Status UringQueue::RegisterForItself() {
  if (TooManySmallPages()) {
    spdlog::warn(
        "event=buffers_not_registered path={} pool_bytes={} rings={} reason=\"without huge pages this costs "
        "more than it gives; set huge pages aside (vm.nr_hugepages) for a pool of this size\"",
        path_->name(), pool_->pool_bytes(), options_.rings);
    return Status();
  }
  int error = FaultAt("io_uring_register");
  if (error == 0) {
    has_table_ = FaultAt("io_uring_table") == 0 && MakeTable(ring_.ring_fd, pool_->piece_count()) == 0;
    std::vector<iovec> ready;  // the first ones
    for (uint32_t piece = 0; piece < pool_->piece_count() && pool_->IsReady(piece) && error == 0; ++piece) {
      ready.push_back(pool_->piece(piece).memory);
      if (has_table_) error = RegisterPiece(ring_.ring_fd, *pool_, piece);
    }
    // Before Linux 5.19 a table cannot grow: pieces that come later are used without.
    if (!has_table_) error = -::io_uring_register_buffers(&ring_, ready.data(), static_cast<unsigned>(ready.size()));
    if (error == 0) std::fill_n(piece_usable_.begin(), ready.size(), true);
  }
  if (error == 0) return Status();
  has_table_ = false;
  if (error != ENOMEM || !MemoryLockLimit()) return Status::Errno(error, "io_uring_register of the pool");
  WarnNotRegistered(*pool_, path_->name(), error, pool_->pool_bytes() * std::max(1u, options_.rings));
  return Status();
}

// The pool has grown. A piece that cannot be registered is used without; that is said once.
void UringQueue::AddPiece(uint32_t piece) {
  int error = EOPNOTSUPP;
  if (has_table_ && options_.shared != nullptr && !options_.shared->IsRegistered(piece)) {
    registered_ = false;
    return;  // has been told
  }
  if (has_table_ && options_.shared != nullptr && options_.shared->clones_pieces())
    error = options_.shared->ClonePiece(ring_.ring_fd, piece);
  if (has_table_ && error != 0 && !TooManySmallPages()) error = RegisterPiece(ring_.ring_fd, *pool_, piece);
  piece_usable_[piece] = error == 0;
  if (error == 0 || !registered_.exchange(false)) return;
  WarnNotRegistered(*pool_, path_->name(), error, pool_->pool_bytes() * std::max(1u, options_.rings));
}

void UringQueue::Run(std::promise<Status> started) {
  SetThreadName("io-" + path_->name());
  TakeShortTurns();
  const Status set_up = SetUp();
  if (set_up.ok()) {
    started.set_value(set_up);
    while (!stopping_ || !table_.idle()) {
      if (!watching_ && !stopping_) WatchInbox();
      IssuePieces();
      Wait();
      ReapCompletions();
    }
  }
  if (ring_made_) ::io_uring_queue_exit(&ring_);
  if (!set_up.ok()) started.set_value(set_up);
}

void UringQueue::WatchInbox() {
  io_uring_sqe* sqe = ::io_uring_get_sqe(&ring_);
  if (sqe == nullptr) return;  // the kernel has not taken what is there yet; next round
  ::io_uring_prep_poll_add(sqe, inbox_.event_fd(), POLLIN);
  ::io_uring_sqe_set_data64(sqe, kInboxToken);
  watching_ = true;
}

void UringQueue::TakeInbox() {
  taken_.clear();
  inbox_.TakeAll(&taken_);
  for (const Message& message : taken_) {
    if (const auto* transfer = std::get_if<Transfer>(&message)) {
      const std::optional<TransferResult> ended =
          table_.Add(*transfer, path_->descriptor(transfer->file),
                     pool_->data(transfer->buffer) + transfer->buffer_offset, NowNs());
      if (ended) results_->Put(*ended);
    } else if (const auto* grown = std::get_if<NewPiece>(&message)) {
      AddPiece(grown->piece);
    } else {
      stopping_ = true;
    }
  }
}

void UringQueue::IssuePieces() {
  // Each piece in flight has at most one entry in the ring, so that all fit; unless the kernel has not taken the last
  // ones yet.
  while (::io_uring_sq_space_left(&ring_) > 0) {
    const std::optional<PieceTable::Operation> operation = table_.Next(NowNs());
    if (!operation) return;
    Prepare(*operation);
  }
}

void UringQueue::Prepare(const PieceTable::Operation& operation) {
  io_uring_sqe* sqe = ::io_uring_get_sqe(&ring_);
  MLPO_CHECK(sqe != nullptr);
  const size_t asked = options_.faults == nullptr
                           ? operation.bytes
                           : options_.faults->RequestBytes(operation.direction, operation.offset, operation.bytes);
  const auto bytes = static_cast<unsigned>(asked);
  const uint32_t piece = pool_->piece_of(operation.buffer);
  if (operation.direction == Direction::kRead) {
    if (piece_usable_[piece]) {
      ::io_uring_prep_read_fixed(sqe, operation.fd, operation.data, bytes, operation.offset, static_cast<int>(piece));
    } else {
      ::io_uring_prep_read(sqe, operation.fd, operation.data, bytes, operation.offset);
    }
  } else {
    if (piece_usable_[piece]) {
      ::io_uring_prep_write_fixed(sqe, operation.fd, operation.data, bytes, operation.offset, static_cast<int>(piece));
    } else {
      ::io_uring_prep_write(sqe, operation.fd, operation.data, bytes, operation.offset);
    }
  }
  ::io_uring_sqe_set_data64(sqe, operation.token);
}

// Sleeps until something has completed, new work has come, or a retry is due.
void UringQueue::Wait() {
  int rc;
  const int64_t retry_ns = table_.next_retry_ns();
  if (retry_ns == INT64_MAX) {
    rc = ::io_uring_submit_and_wait(&ring_, 1);
  } else {
    __kernel_timespec pause = Timespec(std::max<int64_t>(retry_ns - NowNs(), 1));
    io_uring_cqe* first = nullptr;
    rc = ::io_uring_submit_and_wait_timeout(&ring_, &first, 1, &pause, nullptr);
  }
  if (rc >= 0 || rc == -EINTR || rc == -ETIME) return;
  // EAGAIN, EBUSY: the kernel is out of memory or completions wait to be reaped, which comes next. Anything else was
  // not so at start. Transfers in flight cannot be given up while the kernel may use their buffers: keep trying.
  uint64_t suppressed = 0;
  if (rc != -EAGAIN && rc != -EBUSY && enter_errors_.Allow(NowNs(), &suppressed))
    spdlog::error("event=io_uring_enter_failed path={} errno={} suppressed={}", path_->name(), -rc, suppressed);
  if (::io_uring_cq_ready(&ring_) == 0) {
    timespec pause{0, kEnterPauseNs};
    ::nanosleep(&pause, nullptr);
  }
}

void UringQueue::ReapCompletions() {
  io_uring_cqe* cqe = nullptr;
  while (::io_uring_peek_cqe(&ring_, &cqe) == 0) {
    const uint64_t token = cqe->user_data;
    const int64_t result = cqe->res;
    ::io_uring_cqe_seen(&ring_, cqe);
    HandleCompletion(token, result);
  }
}

void UringQueue::HandleCompletion(uint64_t token, int64_t result) {
  if (token == kInboxToken) {
    watching_ = false;  // also after an error: the next round polls again
    TakeInbox();
    return;
  }
  if (token == LIBURING_UDATA_TIMEOUT) return;  // liburing's own, before Linux 5.11
  if (options_.faults != nullptr) {
    const PieceTable::Operation* operation = table_.Find(token);
    if (operation != nullptr && operation->direction == Direction::kRead && result > 0)
      options_.faults->DataRead(operation->offset, operation->data, static_cast<size_t>(result));
    if (operation != nullptr)
      result = options_.faults->Outcome(operation->direction, operation->offset, operation->bytes, result);
  }
  const std::optional<TransferResult> ended = table_.Complete(token, result, NowNs());
  if (ended) results_->Put(*ended);
}

}  // namespace mlpo
