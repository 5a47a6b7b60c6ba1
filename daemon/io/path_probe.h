// The start probe: proves by real I/O that a folder's file system stores what is written, and whether O_DIRECT works
// there with our alignment. Some file systems accept O_DIRECT and ignore it (tmpfs), some accept it and fail later.
//
// Main thread at start. Units: bytes.
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

// What Path::Open would find, without its lock, and leaving nothing behind: the probe in a folder of its own, inside
// the deepest that is there of <directory>/mlpo/<our uid>/<node>. Any thread.
Result<ProbeResult> CheckPath(const std::string& directory, const std::string& node, bool want_direct);

}  // namespace mlpo
