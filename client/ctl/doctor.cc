#include "client/ctl/doctor.h"

#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>

#include "client/ctl/answer.h"
#include "client/ctl/child.h"
#include "client/ctl/exit_code.h"
#include "client/ctl/findings.h"
#include "client/ctl/output_of.h"
#include "client/ctl/table.h"
#include "mlpo/client.h"

namespace mlpo::ctl {
namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::json;

void Say(const std::string& text) { std::fprintf(stderr, "mlpo-ctl: %s\n", Safe(text).c_str()); }

int Show(const std::string& text, bool as_json) {
  const json report = json::parse(text, nullptr, /*allow_exceptions=*/false);
  const std::optional<int> code = CodeOfFindings(report);
  if (!code) {
    Say("the findings are no report of a doctor");
    return kFailed;
  }
  if (as_json) {
    std::printf("%s\n", report.dump(-1, ' ', false, json::error_handler_t::replace).c_str());
  } else {
    std::printf("examined by %s\n",
                Text(report, "examined_by") == "daemon" ? "the running daemon" : "mlpo-daemon --doctor");
    PrintFindings(report);
  }
  return *code;
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
