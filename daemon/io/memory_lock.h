// Whether RLIMIT_MEMLOCK binds this process. No state; any thread.
#pragma once

#include <cstdint>
#include <optional>

namespace mlpo {

// The soft RLIMIT_MEMLOCK in bytes, or nullopt if nothing limits us: no limit is set, or we have CAP_IPC_LOCK in the
// initial user namespace (the kernel ignores it in another one).
std::optional<uint64_t> MemoryLockLimit();

}  // namespace mlpo
