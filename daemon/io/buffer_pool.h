// BufferPool: all block buffers of the daemon, of one size, in locked memory where the limit allows.
//
// The pool is made of pieces of at most 1 GiB, each on one NUMA node, a node's pieces made by threads of that node.
// With Options::grow, Create makes the first piece of each node only and Grow the others, while the daemon serves; a
// piece that is ready stays so for the pool's life. Which buffer is free is the scheduler's business.
//
// Threads: Create, Grow, StopGrowing and the destructor: the owner's. Everything else: any, about pieces that are ready
// (the callback of Grow, or IsReady, says so). Units: bytes.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "daemon/base/status.h"
#include "daemon/io/pool_memory.h"
#include "daemon/types/ids.h"
#include "daemon/types/numa_node.h"

namespace mlpo {

class BufferPool {
 public:
  enum class HugePages {
    kNever,
    kAuto,     // hugetlb pages of 1 GiB or 2 MiB as far as they are set aside, then transparent ones
    kRequire,  // the same; an error if most of what Create makes is not in huge pages
  };
  struct Options {
    uint64_t pool_bytes = 0;    // as many whole buffers as fit are made
    uint64_t buffer_bytes = 0;  // a multiple of MLPO_ALIGN
    bool lock = true;           // mlock; too small a limit is one warning that names the figure needed
    HugePages huge_pages = HugePages::kAuto;
    std::vector<NumaNode> nodes;  // that have memory: each gets an equal part; empty: wherever the kernel takes it
    bool interleave = false;      // instead, each piece over all of them, page by page
    bool grow = false;            // leave all but the first pieces to Grow
    uint64_t piece_bytes = uint64_t{1} << 30;  // at most; as io_uring registers them. Smaller in tests
    PoolMemory* memory = nullptr;              // tests only; borrowed
  };
  struct Piece {
    iovec memory = {};
    BufferIndex first = 0;  // its buffers are [first, first + count)
    uint32_t count = 0;
    int node = -1;  // where it is; -1: not known, or on several
  };

  // Refused (ENOMEM, with both figures) if host or memory cgroup do not have pool_bytes, and (EINVAL) if fewer than
  // three buffers fit.
  static Result<std::unique_ptr<BufferPool>> Create(const Options& options);
  ~BufferPool();
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  // Makes the pieces that Create has left, in threads of its own, which call `ready` for each. `ended` is called once,
  // by the last of them: with an error if the pool stays smaller, because memory has gone elsewhere meanwhile.
  void Grow(std::function<void(uint32_t piece)> ready, std::function<void(Status)> ended);
  // Waits for the threads, which make no further piece; `ended` has been called then, if Grow has been.
  void StopGrowing();

  uint32_t count() const { return count_; }  // buffers, ready or to come
  uint64_t buffer_bytes() const { return buffer_bytes_; }
  uint64_t pool_bytes() const { return static_cast<uint64_t>(count_) * buffer_bytes_; }
  std::byte* data(BufferIndex buffer) const {
    return base_ + buffer / buffers_per_piece_ * stride_bytes_ + buffer % buffers_per_piece_ * buffer_bytes_;
  }

  uint32_t piece_count() const { return static_cast<uint32_t>(pieces_.size()); }
  uint32_t piece_of(BufferIndex buffer) const { return buffer / buffers_per_piece_; }
  bool IsReady(uint32_t piece) const { return pieces_[piece].ready.load(std::memory_order_acquire); }
  const Piece& piece(uint32_t piece) const { return pieces_[piece].piece; }

  // Of the pieces that are ready.
  uint64_t ready_bytes() const { return ready_bytes_.load(std::memory_order_relaxed); }
  uint64_t huge_bytes() const { return huge_bytes_.load(std::memory_order_relaxed); }  // looked up at start and end
  bool huge_pages() const { return huge_bytes() > ready_bytes() / 2; }
  bool locked() const { return options_.lock && !lock_refused_.load(std::memory_order_relaxed); }
  // Whether Grow still goes on, or has yet to be called.
  bool growing() const { return growing_.load(std::memory_order_relaxed); }
  // Before Grow: what it will take from the host.
  uint64_t coming_bytes() const;

 private:
  struct PieceState {
    Piece piece;
    uint64_t mapped_bytes = 0;
    bool hugetlb = false;            // its maker's alone until it is ready
    std::atomic<bool> ready{false};  // release: what is said of the piece, and its memory
  };
  struct Run;

  BufferPool() = default;
  Status Plan(const Options& options);
  Status Map();
  Status MapPiece(PieceState& state);
  Status Advise(const PieceState& state);
  Status MakePieces(std::vector<uint32_t> pieces);
  void StartRun(Run& run, std::vector<uint32_t> pieces);
  void Work(Run& run, uint32_t group);
  Status MakePiece(PieceState& state);
  int Fill(PieceState& state, Status* refused);
  Status Admit(uint64_t bytes);
  void Leave(uint64_t bytes);
  int WhereIs(const PieceState& state) const;
  void LockPiece(const PieceState& state);
  void CountHugePages();
  void LogMade(const char* event) const;
  uint32_t GroupOf(uint32_t piece) const;

  Options options_;
  PoolMemory kernel_;
  PoolMemory* memory_ = &kernel_;
  std::byte* map_ = nullptr;  // with what alignment costs
  uint64_t map_bytes_ = 0;
  std::byte* base_ = nullptr;
  uint64_t buffer_bytes_ = 0;
  uint64_t stride_bytes_ = 0;  // from piece to piece
  uint32_t count_ = 0;
  uint32_t buffers_per_piece_ = 1;
  std::deque<PieceState> pieces_;

  std::atomic<uint64_t> ready_bytes_{0};
  std::atomic<uint64_t> huge_bytes_{0};
  std::atomic<uint64_t> hugetlb_bytes_{0};  // of these
  std::atomic<bool> growing_{false};
  std::atomic<bool> stop_{false};
  std::atomic<bool> policy_refused_{false}, lock_refused_{false}, hugetlb_refused_{false};  // warned of once

  std::mutex admission_;
  std::condition_variable left_;
  uint64_t filling_bytes_ = 0;  // guarded by admission_: admitted and maybe not in the kernel's figures yet

  std::unique_ptr<Run> growth_;
};

// What this process may still take: the smaller of the host's available memory and what its memory cgroup (v1 or v2,
// and its ancestors) leaves. `what` gets the name of the tighter one, for messages.
Result<uint64_t> AvailableMemoryBytes(std::string* what);

}  // namespace mlpo
