#include "daemon/base/checksum.h"

#include <xxhash.h>

#ifdef MLPO_XXH_DISPATCH
#define XXH_DISPATCH_DISABLE_REPLACE
#include <xxh_x86dispatch.h>
#endif

namespace mlpo {

#ifdef MLPO_XXH_DISPATCH

uint64_t Checksum(const void* data, size_t bytes) {
  // The library chooses its functions in the first call that is long enough, without a lock: not in two threads at
  // once.
  static const bool chosen = [] {
    constexpr char kLong[1024] = {};
    (void)XXH3_64bits_dispatch(kLong, sizeof kLong);
    return true;
  }();
  (void)chosen;
  return XXH3_64bits_dispatch(data, bytes);
}

#else

uint64_t Checksum(const void* data, size_t bytes) { return XXH3_64bits(data, bytes); }

#endif

}  // namespace mlpo
