// Logging through spdlog: key=value, one line an event, nothing per request at info or above.
//
// Under systemd (JOURNAL_STREAM names our stderr) lines carry "<N>" priorities and no time; else an ISO time.
// Use spdlog::info(...) and so on directly. RateLimited gates what a peer could make us repeat.
#pragma once

#include <spdlog/spdlog.h>

#include <atomic>
#include <cstdint>
#include <string>

namespace mlpo {

// Sets up the default logger on stderr. `level`: trace, debug, info, warning, error.
void StartLogging(const std::string& level);

// True at most once per `interval_ns`; counts what it held back. Thread-safe.
class RateLimit {
 public:
  explicit RateLimit(int64_t interval_ns) : interval_ns_(interval_ns) {}
  // *suppressed: how many calls were refused since the last that was not.
  bool Allow(int64_t now_ns, uint64_t* suppressed);

 private:
  const int64_t interval_ns_;
  std::atomic<int64_t> next_ns_{INT64_MIN};  // relaxed: only decides who logs
  std::atomic<uint64_t> suppressed_{0};      // relaxed: a count
};

}  // namespace mlpo
