// Numbers that name things inside the daemon.
#pragma once

#include <cstdint>

namespace mlpo {

using SessionId = uint64_t;   // never reused in a daemon's life; 0 is none
using SubgroupId = uint32_t;  // handle within a session; 0 is none
using PathIndex = uint32_t;
using BufferIndex = uint32_t;
using FileId = uint32_t;  // a session's file on one path, as that path's queue knows it

inline constexpr uint32_t kNone = 0xffffffffu;

// A job's objects have files and blocks as a session has; their store is named like one, out of numbers of its own.
inline constexpr SessionId kStoreBit = uint64_t{1} << 63;
inline constexpr bool IsStore(SessionId id) { return (id & kStoreBit) != 0; }

}  // namespace mlpo
