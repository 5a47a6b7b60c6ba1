#include "client/ctl/run.h"

#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <system_error>

#include "client/ctl/child.h"
#include "client/ctl/exit_code.h"
#include "client/ctl/table.h"
#include "mlpo/client.h"

namespace mlpo::ctl {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kForwarded[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT};
constexpr auto kFastStop = std::chrono::seconds(30);  // after the second SIGTERM, before SIGKILL

void Say(const std::string& text) { std::fprintf(stderr, "mlpo-ctl: %s\n", Safe(text).c_str()); }

// A folder of our own for the socket, gone with everything in it at the end.
class SocketFolder {
 public:
  SocketFolder() {
    const char* runtime = std::getenv("XDG_RUNTIME_DIR");
    struct stat st;
    const bool ours = runtime != nullptr && runtime[0] == '/' && ::stat(runtime, &st) == 0 && S_ISDIR(st.st_mode) &&
                      st.st_uid == ::geteuid() && ::strlen(runtime) < 60;
    for (const std::string& base :
         ours ? std::vector<std::string>{runtime, "/tmp"} : std::vector<std::string>{"/tmp"}) {
      std::string pattern = base + "/mlpo-run-XXXXXX";
      if (::mkdtemp(pattern.data()) != nullptr) {
        path_ = pattern;
        return;
      }
      Say("making a folder for the socket: " + pattern + ": " + ::strerror(errno));
    }
  }
  SocketFolder(const SocketFolder&) = delete;
  SocketFolder& operator=(const SocketFolder&) = delete;
  ~SocketFolder() {
    if (path_.empty()) return;
    std::error_code error;
    std::filesystem::remove_all(path_, error);
    if (error) Say("removing " + path_ + ": " + error.message());
  }
  bool ok() const { return !path_.empty(); }
  std::string socket() const { return path_ + "/mlpo.sock"; }

 private:
  std::string path_;
};

// Signals come here instead of interrupting us.
class Signals {
 public:
  Signals() {
    ::sigemptyset(&taken_);
    ::sigaddset(&taken_, SIGCHLD);
    for (const int signal : kForwarded) ::sigaddset(&taken_, signal);
    if (::sigprocmask(SIG_BLOCK, &taken_, &before_) == 0) fd_ = ::signalfd(-1, &taken_, SFD_CLOEXEC | SFD_NONBLOCK);
  }
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;
  // They stay blocked: one that comes after the last Wait() must not end us before the folder is gone.
  ~Signals() {
    if (fd_ >= 0) ::close(fd_);
  }
  bool ok() const { return fd_ >= 0; }
  const sigset_t& before() const { return before_; }

  struct Signal {
    int number = 0;
    bool from_terminal = false;  // the whole foreground process group has it already
  };
  // The next signal other than SIGCHLD, or nothing after a SIGCHLD or at the deadline.
  std::optional<Signal> Wait(Clock::time_point deadline) {
    signalfd_siginfo info;
    if (::read(fd_, &info, sizeof info) != sizeof info) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
      pollfd ready{fd_, POLLIN, 0};
      if (left < 0 || ::poll(&ready, 1, static_cast<int>(std::min<int64_t>(left + 1, 60'000))) <= 0) return {};
      if (::read(fd_, &info, sizeof info) != sizeof info) return {};
    }
    if (info.ssi_signo == SIGCHLD) return {};
    return Signal{static_cast<int>(info.ssi_signo), info.ssi_code == SI_KERNEL};
  }

 private:
  sigset_t taken_, before_;
  int fd_ = -1;
};

std::string StateOf(const std::string& socket) {
  char* text = nullptr;
  if (mlpo_control(socket.c_str(), "status", nullptr, 2'000'000'000, &text) != 0) return "";
  const auto answer = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  mlpo_free(text);
  if (!answer.is_object()) return "";
  const auto state = answer.find("state");
  return state != answer.end() && state->is_string() ? state->get<std::string>() : "";
}

class PrivateDaemon {
 public:
  PrivateDaemon(const RunOptions& options, Signals* signals, std::string socket)
      : options_(options), signals_(signals), socket_(std::move(socket)) {}

  // 0 when it serves; else the exit code for us, after a message.
  int Start();
  // Drains it and waits for its end.
  void Stop();
  bool Ended() { return child_.Ended(); }
  const Child& child() const { return child_; }

 private:
  int FailStart(const std::string& why, int code) {
    Say(why);
    Stop();
    return code;
  }

  const RunOptions& options_;
  Signals* const signals_;
  const std::string socket_;
  Child child_;
};

int PrivateDaemon::Start() {
  SpawnOptions spawn;
  spawn.command = {DaemonBinary()};
  spawn.command.insert(spawn.command.end(), options_.daemon_flags.begin(), options_.daemon_flags.end());
  spawn.command.insert(spawn.command.end(), {"--socket", socket_});
  spawn.die_with_us = spawn.stdin_null = spawn.stdout_to_stderr = true;
  spawn.mask = signals_->before();
  int error = 0;
  child_ = Child::Spawn(spawn, &error);
  if (error != 0) {
    Say("cannot start " + spawn.command[0] + ": " + ::strerror(error) +
        " (it is looked for beside mlpo-ctl, then in PATH)");
    return kFailed;
  }
  const auto deadline = Clock::now() + std::chrono::seconds(options_.ready_timeout_s);
  for (;;) {
    if (child_.Ended()) {
      Say("mlpo-daemon ended before it was ready: " + child_.HowItEnded() + "; what it said is above");
      return child_.code() == 0 ? kFailed : child_.code();
    }
    const std::string state = StateOf(socket_);
    if (state == "ready" || state == "degraded") return 0;
    if (Clock::now() >= deadline)
      return FailStart("mlpo-daemon is not ready after " + std::to_string(options_.ready_timeout_s) +
                           " s (--ready-timeout S allows more)",
                       kUnreachable);
    const auto signal = signals_->Wait(std::min(deadline, Clock::now() + std::chrono::milliseconds(20)));
    if (signal) return FailStart("stopped before the daemon was ready", 128 + signal->number);
  }
}

void PrivateDaemon::Stop() {
  if (child_.Ended()) return;
  child_.Signal(SIGTERM);
  auto deadline = Clock::now() + std::chrono::seconds(options_.stop_timeout_s);
  int asked = 1;
  while (!child_.Ended()) {
    const auto signal = signals_->Wait(deadline);
    if (child_.Ended()) break;
    if (!signal && Clock::now() < deadline) continue;
    // Somebody is impatient, or it takes too long: first a fast stop, then the end.
    if (asked == 1) {
      Say("mlpo-daemon still drains: stopping it fast");
      child_.Signal(SIGTERM);
    } else {
      Say("mlpo-daemon does not stop: killing it");
      child_.Signal(SIGKILL);
    }
    ++asked;
    deadline = Clock::now() + kFastStop;
  }
  if (child_.code() != 0) Say("mlpo-daemon ended with " + child_.HowItEnded());
}

// Runs the command; its exit code.
int RunCommand(const RunOptions& options, const std::string& socket, Signals* signals, PrivateDaemon* daemon) {
  SpawnOptions spawn;
  spawn.command = options.command;
  spawn.environment = {{"MLPO_SOCKET", socket}};
  const char* job = std::getenv("MLPO_JOB");
  if (job == nullptr || *job == '\0') spawn.environment.push_back({"MLPO_JOB", "run-" + std::to_string(::getpid())});
  spawn.stdout_to_stderr = options.json;
  spawn.mask = signals->before();
  int error = 0;
  Child command = Child::Spawn(spawn, &error);
  if (error != 0) {
    Say("cannot run " + options.command[0] + ": " + ::strerror(error));
    return error == ENOENT ? 127 : 126;
  }
  bool daemon_lost = false;
  while (!command.Ended()) {
    if (!daemon_lost && daemon->Ended()) {
      daemon_lost = true;
      Say("mlpo-daemon ended during the run (" + daemon->child().HowItEnded() + "); the command goes on without it");
    }
    const auto signal = signals->Wait(Clock::now() + std::chrono::seconds(60));
    if (signal && !signal->from_terminal) command.Signal(signal->number);
  }
  return command.code();
}

bool TakeSeconds(const std::string& name, const std::string& text, int64_t* seconds, std::string* problem) {
  const char* end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data(), end, *seconds);
  if (error == std::errc() && at == end && *seconds >= 1 && *seconds <= 1'000'000) return true;
  *problem = name + " takes whole seconds from 1 to 1000000, not \"" + text + "\"";
  return false;
}

}  // namespace

bool ParseRun(const std::vector<std::string>& arguments, RunOptions* options, std::string* problem) {
  size_t i = 0;
  for (; i < arguments.size() && arguments[i] != "--"; ++i) {
    const std::string& argument = arguments[i];
    if (argument == "--json") {
      options->json = true;
    } else if (argument == "--ready-timeout" || argument == "--stop-timeout") {
      int64_t* seconds = argument == "--ready-timeout" ? &options->ready_timeout_s : &options->stop_timeout_s;
      const bool has_value = i + 1 < arguments.size() && arguments[i + 1] != "--";
      if (!TakeSeconds(argument, has_value ? arguments[i + 1] : "", seconds, problem)) return false;
      ++i;
    } else if (argument == "--socket" || argument.starts_with("--socket=")) {
      *problem = "run makes a socket of its own: --socket is not for it";
      return false;
    } else {
      options->daemon_flags.push_back(argument);
    }
  }
  if (i < arguments.size())
    options->command.assign(arguments.begin() + static_cast<std::ptrdiff_t>(i) + 1, arguments.end());
  if (!options->command.empty()) return true;
  *problem = "run needs a command: mlpo-ctl run [daemon flags] -- CMD [ARGUMENTS]";
  return false;
}

int Run(const RunOptions& options) {
  SocketFolder folder;
  Signals signals;
  if (!folder.ok()) return kFailed;
  if (!signals.ok()) {
    Say(std::string("signalfd: ") + ::strerror(errno));
    return kFailed;
  }
  PrivateDaemon daemon(options, &signals, folder.socket());
  int code = daemon.Start();
  const bool started = code == 0;
  if (started) {
    code = RunCommand(options, folder.socket(), &signals, &daemon);
    daemon.Stop();
  }
  if (options.json) {
    const nlohmann::ordered_json report = {
        {"exit_code", code}, {"daemon_started", started}, {"daemon_exit_code", daemon.child().code()}};
    std::printf("%s\n", report.dump().c_str());
  }
  return code;
}

}  // namespace mlpo::ctl
