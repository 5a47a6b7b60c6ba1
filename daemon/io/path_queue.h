// PathQueue: carries out the transfers of one path in a thread of its own.
//
// A transfer is cut into pieces of piece_bytes, all in flight together up to the queue's depth; short transfers are
// resumed where they stopped; EINTR and EAGAIN are tried again; any other error ends the transfer once all of its
// pieces have come back. Threads: Submit from the data thread; results go to a queue that the data thread reads.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "daemon/base/status.h"
#include "daemon/base/thread.h"
#include "daemon/io/buffer_pool.h"
#include "daemon/io/path.h"
#include "daemon/types/transfer.h"

namespace mlpo {

class IoFaults;
class UringPool;

using TransferResults = MessageQueue<TransferResult>;

// Whether this process can set up and enter an io_uring: the kernel's errno if not.
Status ProbeUring();

// A pool of 4 KiB pages that each ring has to register for itself is registered only up to so many bytes, all rings
// together: each GiB costs 6 MiB of kernel memory and 21 ms.
inline constexpr uint64_t kMaxSmallPageBytes = uint64_t{64} << 30;

class PathQueue {
 public:
  struct Options {
    PathIndex index = 0;
    std::string engine = "auto";      // auto: io_uring, and threads where the kernel refuses it, whatever the errno
    uint32_t piece_bytes = 2u << 20;  // 1-8 MiB
    uint32_t depth = 32;              // pieces in flight
    uint32_t rings = 1;               // queues on the same pool: each one's registration costs the kernel memory
    UringPool* shared = nullptr;      // the pool's one registration; nullptr: the ring makes its own. Borrowed
    IoFaults* faults = nullptr;       // tests only; borrowed
  };

  // `path`, `pool` and `results` are borrowed and must outlive the queue. With engine "io_uring" a refusal is an error.
  static Result<std::unique_ptr<PathQueue>> Start(const Options& options, const Path* path, const BufferPool* pool,
                                                  TransferResults* results);
  virtual ~PathQueue() = default;  // waits for everything in flight, then ends the thread

  virtual void Submit(const Transfer& transfer) = 0;
  // The pool has grown by a piece; its buffers may be in transfers already. Thread-safe.
  virtual void PieceReady(uint32_t piece) = 0;
  virtual const char* engine() const = 0;       // io_uring, threads
  virtual bool registered_buffers() const = 0;  // of all pieces that it knows to be ready
};

}  // namespace mlpo
