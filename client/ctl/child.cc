#include "client/ctl/child.h"

#include <fcntl.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <system_error>

#include "client/ctl/exit_code.h"

namespace mlpo::ctl {
namespace {

// In the child, between fork and exec. We have one thread, so everything is allowed here.
[[noreturn]] void Become(const SpawnOptions& options, pid_t parent, int report_fd) {
  auto fail = [&](int error) {
    // The parent reads what did not work; if even that is lost it still sees the exit code.
    const ssize_t ignored = ::write(report_fd, &error, sizeof error);
    static_cast<void>(ignored);
    ::_exit(127);
  };
  if (options.die_with_us) {
    if (::setpgid(0, 0) != 0 || ::prctl(PR_SET_PDEATHSIG, SIGTERM) != 0) fail(errno);
    if (::getppid() != parent) ::_exit(1);  // it died before we asked to be told
    ::unsetenv("NOTIFY_SOCKET");            // the private daemon is not the service that we may be part of
  }
  if (options.stdin_null) {
    const int null = ::open("/dev/null", O_RDONLY);
    if (null < 0 || ::dup2(null, STDIN_FILENO) < 0) fail(errno);
    if (null > STDERR_FILENO) ::close(null);
  }
  if (options.stdout_fd >= 0 && ::dup2(options.stdout_fd, STDOUT_FILENO) < 0) fail(errno);
  if (options.stdout_to_stderr && ::dup2(STDERR_FILENO, STDOUT_FILENO) < 0) fail(errno);
  for (const auto& [name, value] : options.environment)
    if (::setenv(name.c_str(), value.c_str(), 1) != 0) fail(errno);
  if (::sigprocmask(SIG_SETMASK, &options.mask, nullptr) != 0) fail(errno);
  std::vector<char*> argv;
  for (const std::string& argument : options.command) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  ::execvp(argv[0], argv.data());
  fail(errno);
  ::_exit(127);
}

}  // namespace

std::string DaemonBinary() {
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  if (!error) {
    const std::string beside = self.parent_path() / "mlpo-daemon";
    if (::access(beside.c_str(), X_OK) == 0) return beside;
  }
  return "mlpo-daemon";
}

int BecomeProgram(std::vector<std::string> command) {
  std::vector<char*> arguments;
  for (std::string& word : command) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  ::execvp(arguments[0], arguments.data());
  std::fprintf(stderr, "mlpo-ctl: cannot start %s: %s (it is looked for beside mlpo-ctl, then in PATH)\n", arguments[0],
               ::strerror(errno));
  return kFailed;
}

Child Child::Spawn(const SpawnOptions& options, int* error) {
  Child child;
  int report[2];
  if (::pipe2(report, O_CLOEXEC) != 0) {
    *error = errno;
    return child;
  }
  const pid_t parent = ::getpid();
  child.pid_ = ::fork();
  if (child.pid_ == 0) Become(options, parent, report[1]);
  *error = child.pid_ < 0 ? errno : 0;
  ::close(report[1]);
  int failure = 0;
  ssize_t got = 0;
  do {
    got = child.pid_ < 0 ? 0 : ::read(report[0], &failure, sizeof failure);
  } while (got < 0 && errno == EINTR);
  ::close(report[0]);
  if (got == sizeof failure) {
    *error = failure;
    while (::waitpid(child.pid_, &child.wait_status_, 0) < 0 && errno == EINTR) {
    }
    child.ended_ = true;
  }
  return child;
}

bool Child::Ended() {
  if (ended_ || pid_ < 0) return true;
  const pid_t got = ::waitpid(pid_, &wait_status_, WNOHANG);
  if (got == pid_ || (got < 0 && errno == ECHILD)) ended_ = true;
  return ended_;
}

int Child::code() const { return WIFSIGNALED(wait_status_) ? 128 + WTERMSIG(wait_status_) : WEXITSTATUS(wait_status_); }

std::string Child::HowItEnded() const {
  if (!WIFSIGNALED(wait_status_)) return "exit code " + std::to_string(WEXITSTATUS(wait_status_));
  const int signal = WTERMSIG(wait_status_);
  return "signal " + std::to_string(signal) + " (" + ::strsignal(signal) + ")";
}

void Child::Signal(int signal) {
  if (!Ended()) ::kill(pid_, signal);
}

}  // namespace mlpo::ctl
