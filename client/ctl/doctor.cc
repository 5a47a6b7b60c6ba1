#include "client/ctl/doctor.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>

#include "client/ctl/child.h"
#include "client/ctl/exit_code.h"
#include "client/ctl/table.h"
#include "mlpo/client.h"

namespace mlpo::ctl {
namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::json;

void Say(const std::string& text) { std::fprintf(stderr, "mlpo-ctl: %s\n", Safe(text).c_str()); }

std::string Text(const json& object, const char* name) {
  const auto found = object.find(name);
  return found != object.end() && found->is_string() ? Safe(found->get<std::string>()) : "";
}

void PrintFindings(const json& report) {
  std::printf("examined by %s\n",
              Text(report, "examined_by") == "daemon" ? "the running daemon" : "mlpo-daemon --doctor");
  for (const json& finding : report.value("findings", json::array())) {
    if (!finding.is_object()) continue;
    const std::string path = Text(finding, "path");
    std::printf("  %-7s  %-13s  %s%s\n", Text(finding, "level").c_str(), Text(finding, "check").c_str(),
                path.empty() ? "" : (path + ": ").c_str(), Text(finding, "what").c_str());
    if (const std::string advice = Text(finding, "advice"); !advice.empty())
      std::printf("  %-7s  %-13s  -> %s\n", "", "", advice.c_str());
  }
}

int Show(const std::string& text, bool as_json) {
  const json report = json::parse(text, nullptr, /*allow_exceptions=*/false);
  const std::string state = report.is_object() ? Text(report, "state") : "";
  const int code = state == "fine" ? kFine : state == "degraded" ? kDegraded : kFailed;
  if (code == kFailed && state != "failed") {
    Say("the findings are no report of a doctor");
    return kFailed;
  }
  if (as_json)
    std::printf("%s\n", report.dump(-1, ' ', false, json::error_handler_t::replace).c_str());
  else
    PrintFindings(report);
  return code;
}

// The line that the program says on its stdout, or all until it ends, at most 1 MiB; nothing after a message.
std::optional<std::string> OutputOf(const std::vector<std::string>& command, Clock::time_point deadline,
                                    int* exit_code) {
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
  while (open && left_ms() > 0 && output.size() < (1u << 20) && !output.ends_with('\n')) {
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
    Say(command[0] + " --doctor does not end in time (--timeout S allows more): does a path hang?");
    *exit_code = kUnreachable;
    return std::nullopt;
  }
  *exit_code = child.code();
  return output;
}

int Check(const DoctorOptions& options, Clock::time_point deadline) {
  std::vector<std::string> command = {DaemonBinary(), "--doctor"};
  command.insert(command.end(), options.daemon_flags.begin(), options.daemon_flags.end());
  if (!options.socket.empty()) command.insert(command.end(), {"--socket", options.socket});
  int code = kFailed;
  const std::optional<std::string> output = OutputOf(command, deadline, &code);
  if (!output) return code;
  if (output->empty()) return code == 0 ? kFailed : code;  // wrong flags: it has said why
  return Show(*output, options.json);
}

}  // namespace

bool ParseDoctor(const std::vector<std::string>& arguments, DoctorOptions* options, std::string* problem) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    const size_t equals = argument.starts_with("--") ? argument.find('=') : std::string::npos;
    const std::string name = argument.substr(0, equals);
    if (name == "--json" && equals == std::string::npos) {
      options->json = true;
    } else if (name == "--socket" || name == "--timeout") {
      if (equals == std::string::npos && i + 1 == arguments.size()) {
        *problem = name + " needs a value";
        return false;
      }
      const std::string value = equals == std::string::npos ? arguments[++i] : argument.substr(equals + 1);
      double seconds = 0;
      const char* end = value.data() + value.size();
      const auto [at, error] = std::from_chars(value.data(), end, seconds);
      if (name == "--socket") {
        options->socket = value;
      } else if (error == std::errc() && at == end && seconds >= 0.001 && seconds <= 86400) {
        options->timeout_ns = static_cast<int64_t>(seconds * 1e9);
      } else {
        *problem = "--timeout takes seconds from 0.001 to 86400, not \"" + value + "\"";
        return false;
      }
    } else {
      options->daemon_flags.push_back(argument);
    }
  }
  return true;
}

int Doctor(const DoctorOptions& options) {
  const auto deadline = Clock::now() + std::chrono::nanoseconds(options.timeout_ns);
  if (!options.daemon_flags.empty()) return Check(options, deadline);
  char* text = nullptr;
  const int code = mlpo_control(options.socket.empty() ? nullptr : options.socket.c_str(), "doctor", nullptr,
                                options.timeout_ns, &text);
  if (code == 0) {
    const std::string answer = text;
    mlpo_free(text);
    return Show(answer, options.json);
  }
  if (code == -ENOENT || code == -ECONNREFUSED) return Check(options, deadline);
  Say(mlpo_last_error());
  if (code == -ETIMEDOUT) Say("the daemon runs but does not answer: mlpo-ctl status shows which thread is stuck");
  return code == -EPROTO ? kFailed : kUnreachable;
}

}  // namespace mlpo::ctl
