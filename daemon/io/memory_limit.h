// How much memory this process may still take, read from the kernel's files; with another root for tests.
//
// The host's share is MemAvailable. A memory cgroup's is its limit less what is used and cannot be reclaimed; each
// ancestor counts too, v1 and v2 alike. No state; any thread. Units: bytes.
#pragma once

#include <cstdint>
#include <string>

#include "daemon/base/status.h"

namespace mlpo {

// AvailableMemoryBytes (buffer_pool.h) with `root` in front of /proc and of every mount point; "" is this machine.
// A file that is not there is no limit; one that cannot be read or understood is an error that names it.
Result<uint64_t> AvailableMemoryUnder(const std::string& root, std::string* what);

}  // namespace mlpo
