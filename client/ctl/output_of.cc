#include "client/ctl/output_of.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>

#include "client/ctl/child.h"
#include "client/ctl/exit_code.h"
#include "client/ctl/table.h"

namespace mlpo::ctl {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kMostBytes = size_t{64} << 20;

void Say(const std::string& text) { std::fprintf(stderr, "mlpo-ctl: %s\n", Safe(text).c_str()); }

}  // namespace

std::optional<std::string> OutputOf(const std::vector<std::string>& command,
                                    std::chrono::steady_clock::time_point deadline, int* exit_code) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) {
    Say(std::string("pipe: ") + ::strerror(errno));
    return std::nullopt;
  }
  SpawnOptions spawn;
  spawn.command = command;
  spawn.stdin_null = true;
  spawn.stdout_fd = ends[1];
  if (::sigprocmask(SIG_SETMASK, nullptr, &spawn.mask) != 0) ::sigemptyset(&spawn.mask);
  int error = 0;
  Child child = Child::Spawn(spawn, &error);
  ::close(ends[1]);
  std::string output;
  const auto left_ms = [&] {
    return std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
  };
  bool open = error == 0;
  while (open && left_ms() > 0 && output.size() < kMostBytes && !output.ends_with('\n')) {
    pollfd ready{ends[0], POLLIN, 0};
    if (::poll(&ready, 1, static_cast<int>(std::min<int64_t>(left_ms(), 1000))) <= 0) continue;
    char chunk[4096];
    const ssize_t got = ::read(ends[0], chunk, sizeof chunk);
    open = got > 0 || (got < 0 && errno == EINTR);
    if (got > 0) output.append(chunk, static_cast<size_t>(got));
  }
  ::close(ends[0]);
  if (error != 0) {
    Say("cannot start " + command[0] + ": " + ::strerror(error) + " (it is looked for beside mlpo-ctl, then in PATH)");
    return std::nullopt;
  }
  // A thread of it may hang with its path, and so its end: the report is there all the same, and has its own verdict.
  if (output.ends_with('\n')) {
    *exit_code = kFine;
    return output;
  }
  while (!child.Ended() && left_ms() > 0) {
    const timespec pause{0, 5'000'000};
    ::nanosleep(&pause, nullptr);
  }
  if (!child.Ended()) {
    child.Signal(SIGKILL);
    Say(command[0] + " " + command[1] + " does not end in time (--timeout S allows more): does a path hang?");
    *exit_code = kUnreachable;
    return std::nullopt;
  }
  *exit_code = child.code();
  return output;
}

}  // namespace mlpo::ctl
