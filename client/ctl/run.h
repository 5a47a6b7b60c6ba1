// Run: a command with a daemon of its own for as long as it takes.
//
// The daemon gets a socket in a new folder of mode 0700, the command MLPO_SOCKET and (unless it is set) MLPO_JOB. The
// daemon drains when the command has ended, and also when this process is killed (PR_SET_PDEATHSIG). One thread;
// signals are read from a signalfd, so that no wait can miss one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace mlpo::ctl {

struct RunOptions {
  std::vector<std::string> daemon_flags;
  std::vector<std::string> command;  // not empty
  bool json = false;                 // one object about the run on stdout; the command's stdout goes to stderr
  int64_t ready_timeout_s = 300;     // for the daemon's start
  int64_t stop_timeout_s = 900;      // for its drain; then it is stopped fast, and killed in the end
};

// The arguments after "run". False with *problem on wrong usage.
bool ParseRun(const std::vector<std::string>& arguments, RunOptions* options, std::string* problem);

// The command's exit code (128 + signal if one ended it); the daemon's if that did not start; 126 and 127 as a shell if
// the command could not be started; kFailed for a failure of our own.
int Run(const RunOptions& options);

}  // namespace mlpo::ctl
