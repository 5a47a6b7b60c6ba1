// A child process for what changes a process for good: limits, uid, cgroup.
#pragma once

#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <string>

#include "tests/support/catch.h"

namespace mlpo::test {

// What a child process found; it ends without running what it inherited.
struct ChildReport {
  bool killed = false;
  std::string text;
};
template <class Body>
ChildReport InChild(Body body) {
  int pipe_fds[2];
  REQUIRE(::pipe(pipe_fds) == 0);
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    const std::string text = body();
    (void)!::write(pipe_fds[1], text.data(), text.size());
    ::_exit(0);
  }
  ::close(pipe_fds[1]);
  ChildReport report;
  pollfd event{pipe_fds[0], POLLIN, 0};
  if (::poll(&event, 1, 60'000) != 1) ::kill(child, SIGKILL);
  char chunk[512];
  for (ssize_t got; (got = ::read(pipe_fds[0], chunk, sizeof chunk)) > 0;)
    report.text.append(chunk, static_cast<size_t>(got));
  ::close(pipe_fds[0]);
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  report.killed = WIFSIGNALED(status);
  return report;
}

}  // namespace mlpo::test
