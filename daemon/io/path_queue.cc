#include "daemon/io/path_queue.h"

#include <cerrno>

#include "daemon/base/log.h"
#include "daemon/io/thread_queue.h"
#include "daemon/io/uring_queue.h"
#include "proto/abi.h"

namespace mlpo {
namespace {

constexpr uint32_t kMaxPieceBytes = 8u << 20;  // far below the 0x7ffff000 bytes at which Linux cuts a read or write
constexpr uint32_t kMaxDepth = 4096;

}  // namespace

Result<std::unique_ptr<PathQueue>> PathQueue::Start(const Options& options, const Path* path, const BufferPool* pool,
                                                    TransferResults* results) {
  if (options.piece_bytes == 0 || options.piece_bytes % MLPO_ALIGN != 0 || options.piece_bytes > kMaxPieceBytes)
    return Status::Invalid("[scheduler] piece_bytes is " + std::to_string(options.piece_bytes) +
                           "; it must be a multiple of " + std::to_string(MLPO_ALIGN) + ", at most " +
                           std::to_string(kMaxPieceBytes));
  if (options.depth == 0 || options.depth > kMaxDepth)
    return Status::Invalid("a queue depth of " + std::to_string(options.depth) + " pieces; it must be 1 to " +
                           std::to_string(kMaxDepth));
  if (options.engine == "threads") return ThreadQueue::Start(options, path, pool, results);
  if (options.engine != "auto" && options.engine != "io_uring")
    return Status::Invalid("path " + path->name() + " has engine '" + options.engine +
                           "'; known: auto, io_uring, threads");
  Result<std::unique_ptr<PathQueue>> ring = UringQueue::Start(options, path, pool, results);
  if (ring.ok()) return ring;
  if (options.engine == "io_uring")
    return ring.status().Within("path " + path->name() +
                                " is set to engine io_uring, which the kernel refuses (engine "
                                "auto would use threads)");
  spdlog::warn("event=engine_threads path={} errno={} reason=\"{}\"", path->name(), ring.status().os_errno(),
               ring.status().message());
  return ThreadQueue::Start(options, path, pool, results);
}

}  // namespace mlpo
