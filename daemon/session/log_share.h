// LogShare: how much each user's sessions write to the log: a client that is refused again and again, or comes and
// goes, must not fill it.
//
// A user has kMostLines at once, and gets kLinesPerS of them back a second: enough for all ranks of a job to begin, to
// be refused, or to die together. What was left out is counted.
//
// Owner: the main thread. No system calls.
#pragma once

#include <cstdint>
#include <map>

namespace mlpo {

class LogShare {
 public:
  static constexpr uint32_t kMostLines = 256;
  static constexpr uint32_t kLinesPerS = 4;

  // Whether a line may be written for a user. *suppressed: how many have not been since the last that was.
  bool Allow(uint32_t uid, int64_t now_ns, uint64_t* suppressed);

 private:
  struct Lines {
    double left = kMostLines;
    int64_t at_ns = 0;  // when it was so
    uint64_t suppressed = 0;
  };
  std::map<uint32_t, Lines> users_;
};

}  // namespace mlpo
