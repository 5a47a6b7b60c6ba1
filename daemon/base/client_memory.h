// CopyClientMemory: memcpy to or from memory that a client shares with us.
//
// A client may write there meanwhile, or have two requests use the same bytes at once: what they hold then is its own
// business. ThreadSanitizer knows no such owner, so that in its builds these copies are out of its sight.
#pragma once

#include <cstddef>
#include <cstring>

namespace mlpo {

#if defined(__SANITIZE_THREAD__)
__attribute__((no_sanitize("thread"), noinline)) inline void CopyClientMemory(void* to, const void* from,
                                                                              size_t bytes) {
  // Volatile, or it would become a call of memcpy, which is watched.
  auto* target = static_cast<volatile std::byte*>(to);
  const auto* source = static_cast<const volatile std::byte*>(from);
  for (size_t i = 0; i < bytes; ++i) target[i] = source[i];
}
#else
inline void CopyClientMemory(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }
#endif

}  // namespace mlpo
