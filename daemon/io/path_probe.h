// Probes: prove by real I/O that a folder's file system stores what is written.
//
// The one at start also tells whether O_DIRECT works there with our alignment: some file systems accept it and ignore
// it (tmpfs), some accept it and fail later. The one of a block proves a path that has failed before it is used again.
// Main thread at start; ProbeBlock may hang as the path does, and is for a thread that nobody waits for. Units: bytes.
#pragma once

#include <cstdint>
#include <string>

#include "daemon/base/status.h"

namespace mlpo {

struct ProbeResult {
  bool direct = false;
  uint32_t alignment = 1;  // of offsets, lengths and memory, as the kernel says or as probed; 1 if buffered
  int error = 0;           // why not direct: errno, 0 if it is not an errno
  std::string reason;      // why not direct; "" if direct
};

// Writes random bytes to a nameless file in `folder_fd`, syncs, reads back, compares. An error means that not even
// buffered I/O works. `shown` names the folder in messages.
Result<ProbeResult> ProbeFolder(int folder_fd, const std::string& shown, bool want_direct);

// Writes `bytes` of new random content to a file of its own, from end - bytes on or from 0 if that is less; syncs,
// reads it back from storage, compares. `direct`: with O_DIRECT. bytes and end: multiples of MLPO_ALIGN. EIO also if
// something else is read than was written; ENOSPC, EFBIG and the like as they come. Nothing is left behind.
Status ProbeBlock(int folder_fd, const std::string& shown, bool direct, uint64_t bytes, uint64_t end);

// What Path::Open would find, without its lock, and leaving nothing behind: the probe in a folder of its own, inside
// the deepest that is there of <directory>/mlpo/<our uid>/<node>. Any thread.
Result<ProbeResult> CheckPath(const std::string& directory, const std::string& node, bool want_direct);

}  // namespace mlpo
