// BufferPool: all block buffers of the daemon, of one size, in locked memory where the limit allows.
//
// Owner: daemon.cc creates it before the threads and frees it after them; immutable in between, so every thread may
// ask. Which buffer is free is the scheduler's business. Units: bytes.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "daemon/base/status.h"
#include "daemon/types/ids.h"

namespace mlpo {

class BufferPool {
 public:
  struct Options {
    uint64_t pool_bytes = 0;    // as many whole buffers as fit are made
    uint64_t buffer_bytes = 0;  // a multiple of MLPO_ALIGN
    bool lock = true;           // mlock; too small a limit is one warning that names the figure needed
    bool huge_pages = true;     // hugetlb where there are pages, else MADV_HUGEPAGE
  };

  // Maps, populates and locks. Refused (ENOMEM, with both figures) if host or memory cgroup do not have pool_bytes, and
  // (EINVAL) if fewer than three buffers fit.
  static Result<std::unique_ptr<BufferPool>> Create(const Options& options);
  ~BufferPool();
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  uint32_t count() const { return count_; }
  uint64_t buffer_bytes() const { return buffer_bytes_; }
  uint64_t pool_bytes() const { return static_cast<uint64_t>(count_) * buffer_bytes_; }
  std::byte* data(BufferIndex buffer) const { return base_ + static_cast<uint64_t>(buffer) * buffer_bytes_; }
  bool locked() const { return locked_; }
  bool huge_pages() const { return huge_pages_; }
  // The pool in pieces of at most 1 GiB, for registration with io_uring. No buffer lies in two pieces.
  const std::vector<iovec>& pieces() const { return pieces_; }
  // The piece that holds a buffer.
  uint32_t piece_of(BufferIndex buffer) const { return buffer / buffers_per_piece_; }

 private:
  BufferPool() = default;

  std::byte* base_ = nullptr;
  uint64_t mapped_bytes_ = 0;
  uint64_t buffer_bytes_ = 0;
  uint32_t count_ = 0;
  uint32_t buffers_per_piece_ = 1;
  bool locked_ = false;
  bool huge_pages_ = false;
  std::vector<iovec> pieces_;
};

// What this process may still take: the smaller of the host's available memory and what its memory cgroup (v1 or v2,
// and its ancestors) leaves. `what` gets the name of the tighter one, for messages.
Result<uint64_t> AvailableMemoryBytes(std::string* what);

}  // namespace mlpo
