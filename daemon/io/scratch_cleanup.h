// Removes what dead sessions of this <uid>/<node> left on a path.
//
// Removed is only <client uid>-<job>/<rank>-<generation>/state whose valid header says the same node, daemon uid,
// client uid, job, rank and generation as its place; then the two folders if they are empty. Everything else stays,
// and is reported. Main thread at start, with the lock of <uid>/<node> held.
#pragma once

#include <cstdint>
#include <string>

#include "daemon/base/status.h"

namespace mlpo {

struct CleanupResult {
  uint32_t removed = 0;  // files
  uint64_t bytes = 0;    // of storage given back
  uint32_t kept = 0;     // entries in our layout that are not ours to remove
};

Result<CleanupResult> RemoveDeadScratch(int node_fd, const std::string& node, const std::string& shown);

}  // namespace mlpo
