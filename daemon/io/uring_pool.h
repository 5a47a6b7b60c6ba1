// UringPool: the pool's pieces as io_uring's registered buffers, registered once in a ring that carries nothing, from
// which the paths' rings clone them (IORING_REGISTER_CLONE_BUFFERS, Linux 6.12; piece by piece 6.13). So pages are
// pinned and counted once, whatever the number of paths, and a path's thread does not stop for it.
//
// Threads: Open and the destructor: the owner's; PieceReady: the pool's threads; Clone: each ring's own thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>

#include "daemon/base/status.h"

namespace mlpo {

class BufferPool;
class IoFaults;

class UringPool {
 public:
  // Registers the pieces that are ready. nullptr where the kernel cannot clone, or refuses the ring: each path's ring
  // then sees to itself. `pool` and `faults` (tests only) are borrowed for its life.
  static std::unique_ptr<UringPool> Open(const BufferPool* pool, IoFaults* faults = nullptr);
  // Whether Open would find a kernel that clones.
  static bool KernelClones();
  ~UringPool();
  UringPool(const UringPool&) = delete;
  UringPool& operator=(const UringPool&) = delete;

  // Registers a piece, before the paths' queues hear of it. A refusal is one warning; the piece is used without.
  void PieceReady(uint32_t piece);
  bool IsRegistered(uint32_t piece) const { return registered_[piece].load(std::memory_order_acquire); }
  // Whether the kernel clones single pieces into a ring that has some.
  bool clones_pieces() const { return clones_pieces_; }
  // Gives the ring `ring_fd`, which has no buffers yet, a table with all pieces that are registered. 0 or an errno.
  int CloneAll(int ring_fd) const;
  // One piece into a table that has some; those behind it that are registered come along.
  int ClonePiece(int ring_fd, uint32_t piece) const;

 private:
  struct Ring;
  explicit UringPool(const BufferPool* pool, IoFaults* faults);
  Status SetUp();
  Status TryClones();

  const BufferPool* const pool_;
  IoFaults* const faults_;
  std::unique_ptr<Ring> ring_;
  std::mutex mutex_;  // of registrations
  bool clones_pieces_ = false;
  bool warned_ = false;  // guarded by mutex_
  std::deque<std::atomic<bool>> registered_;
};

// Gives a ring an empty table of so many buffers (Linux 5.19). 0 or an errno.
int MakeTable(int ring_fd, uint32_t pieces);
// Puts a piece into the table, at its own number. 0 or an errno.
int RegisterPiece(int ring_fd, const BufferPool& pool, uint32_t piece);
// Warns that the pool is not registered, with the figure that is needed where RLIMIT_MEMLOCK is in the way.
void WarnNotRegistered(const BufferPool& pool, const std::string& path, int error, uint64_t need_bytes);

}  // namespace mlpo
