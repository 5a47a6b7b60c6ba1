// Monotonic time in nanoseconds, and deadlines.
#pragma once

#include <time.h>

#include <cstdint>

namespace mlpo::client {

inline constexpr int64_t kNsPerMs = 1'000'000;
inline constexpr int64_t kNsPerS = 1'000'000'000;

inline int64_t NowNs() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * kNsPerS + now.tv_nsec;
}

inline timespec ToTimespec(int64_t ns) {
  timespec out;
  out.tv_sec = static_cast<time_t>(ns / kNsPerS);
  out.tv_nsec = static_cast<long>(ns % kNsPerS);
  return out;
}

struct Deadline {
  int64_t at_ns = INT64_MAX;

  // INT64_MAX needs no look at the clock. A negative time-out is one of 0; what would pass the end of time never comes.
  static Deadline In(int64_t timeout_ns) {
    if (timeout_ns == INT64_MAX) return {};
    if (timeout_ns < 0) timeout_ns = 0;
    const int64_t now_ns = NowNs();
    return {timeout_ns > INT64_MAX - now_ns ? INT64_MAX : now_ns + timeout_ns};
  }
  bool Passed() const { return at_ns != INT64_MAX && NowNs() >= at_ns; }
  int64_t LeftNs() const {
    if (at_ns == INT64_MAX) return INT64_MAX;
    const int64_t left_ns = at_ns - NowNs();
    return left_ns > 0 ? left_ns : 0;
  }
  // For poll(): rounded up, at most `most_ms`.
  int PollMs(int most_ms) const {
    const int64_t left_ns = LeftNs();
    return left_ns > most_ms * kNsPerMs ? most_ms : static_cast<int>((left_ns + kNsPerMs - 1) / kNsPerMs);
  }
};

}  // namespace mlpo::client
