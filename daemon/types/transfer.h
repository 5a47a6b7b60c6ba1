// Transfer: a block's way, or that of a part of it, between a pool buffer and a file on a path. Made by the scheduler,
// carried out by io/.
#pragma once

#include <cstddef>
#include <cstdint>

#include "daemon/types/ids.h"

namespace mlpo {

enum class Direction : uint8_t { kRead, kWrite };

struct Transfer {
  uint64_t id = 0;  // unique in the daemon's life; comes back in the result
  Direction direction = Direction::kRead;
  PathIndex path = 0;
  FileId file = 0;
  BufferIndex buffer = 0;
  uint64_t buffer_offset = 0;  // bytes in the buffer, a multiple of MLPO_ALIGN
  uint64_t offset = 0;         // bytes in the file, a multiple of MLPO_ALIGN
  uint64_t bytes = 0;          // a multiple of MLPO_ALIGN
};

// Every accepted transfer has exactly one result, after the kernel has let go of the buffer.
struct TransferResult {
  uint64_t id = 0;
  PathIndex path = 0;
  int error = 0;       // errno; 0: all bytes were transferred. EIO also for a read that met the end of the file
  uint64_t bytes = 0;  // transferred before the error
  int64_t started_ns = 0;
  int64_t finished_ns = 0;
};

}  // namespace mlpo
