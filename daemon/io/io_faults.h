// IoFaults: the seam through which tests make I/O fail. Only tests set it (PathQueue::Options::faults).
//
// Both back-ends ask it about every read and write, from their own threads: implementations must be thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "daemon/types/transfer.h"

namespace mlpo {

class IoFaults {
 public:
  virtual ~IoFaults() = default;

  // The errno with which a call fails when the queue starts or the pool grows, or 0 to really make it. `call`:
  // "io_uring_setup", "io_uring_enter", "io_uring_register" (of buffers), "io_uring_table" (of buffers, that grows),
  // "io_uring_clone" (of all buffers), "io_uring_clone_piece".
  virtual int SetupError(std::string_view /*call*/) { return 0; }
  // How many of `bytes` are really requested (fewer: a short transfer).
  virtual size_t RequestBytes(Direction /*direction*/, uint64_t /*offset*/, size_t bytes) { return bytes; }
  // What the queue sees instead of `result`: bytes or a negated errno.
  virtual int64_t Outcome(Direction /*direction*/, uint64_t /*offset*/, size_t /*bytes*/, int64_t result) {
    return result;
  }
  // What a read has brought, `bytes` of the file from `offset` on, before anybody sees it: may be changed.
  virtual void DataRead(uint64_t /*offset*/, std::byte* /*data*/, size_t /*bytes*/) {}
};

}  // namespace mlpo
