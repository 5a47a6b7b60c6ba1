// Clock: monotonic time in nanoseconds. Policy code takes `now_ns` as an argument instead.
#pragma once

#include <chrono>
#include <cstdint>

namespace mlpo {

inline int64_t NowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

inline constexpr int64_t kNsPerMs = 1'000'000;
inline constexpr int64_t kNsPerS = 1'000'000'000;

inline double Seconds(int64_t ns) { return static_cast<double>(ns) / kNsPerS; }

}  // namespace mlpo
