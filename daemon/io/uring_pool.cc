#include "daemon/io/uring_pool.h"

#include <liburing.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "daemon/base/log.h"
#include "daemon/io/buffer_pool.h"
#include "daemon/io/io_faults.h"
#include "daemon/io/memory_lock.h"

namespace mlpo {
namespace {

// As in the kernel's io_uring.h; liburing's may be older than the kernel.
constexpr unsigned kRegisterBuffers2 = 15, kRegisterBuffersUpdate = 16, kRegisterCloneBuffers = 30;
constexpr uint32_t kSparse = 1u << 0;
struct Resources {
  uint32_t count = 0;
  uint32_t flags = 0;
  uint64_t reserved = 0;
  uint64_t data = 0;
  uint64_t tags = 0;
};
struct ResourceUpdate {
  uint32_t offset = 0;
  uint32_t reserved = 0;
  uint64_t data = 0;
  uint64_t tags = 0;
  uint32_t count = 0;
  uint32_t reserved2 = 0;
};
constexpr uint32_t kReplace = 1u << 1;
struct CloneBuffers {
  uint32_t source_fd = 0;
  uint32_t flags = 0;
  uint32_t source_offset = 0;
  uint32_t target_offset = 0;
  uint32_t count = 0;  // 0: all
  uint32_t pad[3] = {};
};
static_assert(sizeof(CloneBuffers) == 32);

int Clone(int target_fd, const CloneBuffers& clone) {
  return ::syscall(SYS_io_uring_register, target_fd, kRegisterCloneBuffers, &clone, 1) < 0 ? errno : 0;
}

int SetupFault(IoFaults* faults, const char* call) { return faults == nullptr ? 0 : faults->SetupError(call); }

}  // namespace

struct UringPool::Ring {
  io_uring ring{};
  bool made = false;
  Status Make() {
    const int error = -::io_uring_queue_init(1, &ring, 0);
    made = error == 0;
    return made ? Status() : Status::Errno(error, "io_uring_setup");
  }
  ~Ring() {
    if (made) ::io_uring_queue_exit(&ring);
  }
};

std::unique_ptr<UringPool> UringPool::Open(const BufferPool* pool, IoFaults* faults) {
  std::unique_ptr<UringPool> shared(new UringPool(pool, faults));
  Status status = shared->SetUp();
  if (status.ok()) status = shared->TryClones();
  if (!status.ok()) {
    spdlog::info("event=pool_not_shared errno={} reason=\"{}\" text=\"each path registers the pool for itself\"",
                 status.os_errno(), status.message());
    return nullptr;
  }
  for (uint32_t piece = 0; piece < pool->piece_count(); ++piece) {
    if (pool->IsReady(piece)) shared->PieceReady(piece);
  }
  return shared;
}

bool UringPool::KernelClones() {
  Ring from, to;
  CloneBuffers clone;
  if (!from.Make().ok() || !to.Make().ok() || MakeTable(from.ring.ring_fd, 1) != 0) return false;
  clone.source_fd = static_cast<uint32_t>(from.ring.ring_fd);
  return Clone(to.ring.ring_fd, clone) == 0;
}

UringPool::UringPool(const BufferPool* pool, IoFaults* faults)
    : pool_(pool), faults_(faults), ring_(std::make_unique<Ring>()), registered_(pool->piece_count()) {}

UringPool::~UringPool() = default;

Status UringPool::SetUp() {
  if (const int error = SetupFault(faults_, "io_uring_setup"); error != 0)
    return Status::Errno(error, "io_uring_setup");
  const Status made = ring_->Make();
  if (!made.ok()) return made;
  const int error = MakeTable(ring_->ring.ring_fd, pool_->piece_count());
  return error == 0 ? Status() : Status::Errno(error, "io_uring_register of a table of buffers");
}

// With the empty table into a ring for it: what the kernel cannot do shows now.
Status UringPool::TryClones() {
  Ring other;
  const Status made = other.Make();
  if (!made.ok()) return made;
  if (const int error = CloneAll(other.ring.ring_fd); error != 0)
    return Status::Errno(error, "io_uring_register: cloning buffers (Linux 6.12)");
  clones_pieces_ = ClonePiece(other.ring.ring_fd, 0) == 0;
  return Status();
}

int UringPool::CloneAll(int ring_fd) const {
  if (const int error = SetupFault(faults_, "io_uring_clone"); error != 0) return error;
  CloneBuffers clone;
  clone.source_fd = static_cast<uint32_t>(ring_->ring.ring_fd);
  return Clone(ring_fd, clone);
}

int UringPool::ClonePiece(int ring_fd, uint32_t piece) const {
  if (const int error = SetupFault(faults_, "io_uring_clone_piece"); error != 0) return error;
  CloneBuffers clone;
  clone.source_fd = static_cast<uint32_t>(ring_->ring.ring_fd);
  clone.flags = kReplace;
  clone.source_offset = clone.target_offset = piece;
  // With all behind it, of which ours has at least as many: Linux 6.13 to early 6.18 lose what lies above the range.
  clone.count = pool_->piece_count() - piece;
  return Clone(ring_fd, clone);
}

void UringPool::PieceReady(uint32_t piece) {
  const std::lock_guard lock(mutex_);
  int error = SetupFault(faults_, "io_uring_register");
  if (error == 0) error = RegisterPiece(ring_->ring.ring_fd, *pool_, piece);
  if (error == 0) return registered_[piece].store(true, std::memory_order_release);
  if (!std::exchange(warned_, true)) WarnNotRegistered(*pool_, "all", error, pool_->pool_bytes());
}

int MakeTable(int ring_fd, uint32_t pieces) {
  Resources empty;
  empty.count = pieces;
  empty.flags = kSparse;
  return ::syscall(SYS_io_uring_register, ring_fd, kRegisterBuffers2, &empty, sizeof empty) < 0 ? errno : 0;
}

int RegisterPiece(int ring_fd, const BufferPool& pool, uint32_t piece) {
  ResourceUpdate update;
  update.offset = piece;
  update.data = reinterpret_cast<uintptr_t>(&pool.piece(piece).memory);
  update.count = 1;
  const long done = ::syscall(SYS_io_uring_register, ring_fd, kRegisterBuffersUpdate, &update, sizeof update);
  if (done < 0) return errno;
  return done == 1 ? 0 : EIO;
}

void WarnNotRegistered(const BufferPool& pool, const std::string& path, int error, uint64_t need_bytes) {
  const std::optional<uint64_t> limit = MemoryLockLimit();
  if (error == ENOMEM && limit) {
    spdlog::warn(
        "event=buffers_not_registered path={} errno={} need_bytes={} limit_bytes={} advice=\"works, with more CPU "
        "time per byte; raise RLIMIT_MEMLOCK to at least {} bytes (LimitMEMLOCK= in the unit, ulimit -l in KiB)\"",
        path, error, need_bytes, *limit, need_bytes);
  } else {
    spdlog::warn(
        "event=buffers_not_registered path={} errno={} pool_bytes={} advice=\"works, with more CPU time per byte\"",
        path, error, pool.pool_bytes());
  }
}

}  // namespace mlpo
