// Child: a process that we started, and how it ended. One thread.
#pragma once

#include <signal.h>
#include <sys/types.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace mlpo::ctl {

struct SpawnOptions {
  std::vector<std::string> command;                              // looked up in PATH unless it has a slash
  std::vector<std::pair<std::string, std::string>> environment;  // set besides ours
  bool die_with_us = false;  // SIGTERM when this process ends; and a process group of its own, out of Ctrl-C's way
  bool stdin_null = false;
  bool stdout_to_stderr = false;
  int stdout_fd = -1;  // its stdout, if not -1
  sigset_t mask{};     // its signal mask
};

// mlpo-daemon beside our own binary, else from PATH.
std::string DaemonBinary();
// This process goes on as that program, which is looked up in PATH unless it has a slash. Where it cannot, it says why
// and returns our exit code.
int BecomeProgram(std::vector<std::string> command);

class Child {
 public:
  // Starts it; `error` is an errno if it could not be executed, else 0.
  static Child Spawn(const SpawnOptions& options, int* error);

  pid_t pid() const { return pid_; }
  // Looks without waiting whether it has ended.
  bool Ended();
  // After Ended(): its exit code, or 128 + signal.
  int code() const;
  std::string HowItEnded() const;  // "exit code 3", "signal 9 (Killed)"
  // Nothing if it has ended: its number may be another's by then.
  void Signal(int signal);

 private:
  pid_t pid_ = -1;
  bool ended_ = false;
  int wait_status_ = 0;
};

}  // namespace mlpo::ctl
