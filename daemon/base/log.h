// Logging through spdlog: key=value, one line an event, nothing per request at info or above.
//
// Under systemd (JOURNAL_STREAM names our stderr) lines carry "<N>" priorities and no time; else an ISO time.
// Use spdlog::info(...) and so on directly. RateLimit gates what a peer could make us repeat.
//
// Whoever logs only puts the line into spdlog's queue; one thread, mlpo-log, writes it. Where stderr takes nothing (a
// pipe that nobody reads, a file on a busy disk) that thread waits, and nobody else. Once the queue is full the oldest
// lines are dropped, and in front of the next that is written event=log_lines_dropped says how many. exit, a failed
// check and signals that end the process wait until the queue is written, but not for long; _exit does not.
// A forked child has no such thread and writes its lines itself.
#pragma once

#include <spdlog/spdlog.h>

#include <atomic>
#include <cstdint>
#include <string>

namespace mlpo {

// Sets up the default logger on stderr. `level`: trace, debug, info, warning, error. Once in a process, before it has
// other threads and handlers of signals.
void StartLogging(const std::string& level);

// Waits until what was logged is written: for two seconds at most. For whoever calls _exit. Any thread, and a handler
// of signals.
void FinishLogging();

// Lines that nobody will see, since the start: the queue was full, or stderr gave an error.
uint64_t LogLinesDropped();

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
