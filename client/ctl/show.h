// Show: asks the daemon and shows its answer, as JSON or for people. Prints; the returns are exit codes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace mlpo::ctl {

struct Question {
  std::string socket;  // "": where the client library looks
  bool json = false;
  int64_t timeout_ns = 15'000'000'000;
};

int ShowStatus(const Question& question);
int ShowPaths(const Question& question);
int ShowSessions(const Question& question);
int ShowMetrics(const Question& question);
int RequestDrain(const Question& question);
// Of trainers; `job`: "" is every one that the asker may ask.
int RequestCheckpoint(const Question& question, const std::string& job);
// `paths`: names or directories, none: all. `seconds`: of each measurement.
int Bench(const Question& question, const std::vector<std::string>& paths, double seconds);

}  // namespace mlpo::ctl
