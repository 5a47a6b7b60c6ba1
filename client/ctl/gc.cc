#include "client/ctl/gc.h"

#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>

#include "client/ctl/answer.h"
#include "client/ctl/child.h"
#include "client/ctl/exit_code.h"
#include "client/ctl/output_of.h"
#include "client/ctl/table.h"
#include "mlpo/client.h"

namespace mlpo::ctl {
namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::json;

void Say(const std::string& text) { std::fprintf(stderr, "mlpo-ctl: %s\n", Safe(text).c_str()); }

void PrintItems(const json& report, const char* name, const char* word, bool bytes) {
  for (const json& item : Member(report, name, json::value_t::array)) {
    if (!item.is_object()) continue;
    std::printf("%s %s (%s%s)\n", word, Text(item, "file").c_str(),
                bytes ? (Bytes(Number(item, "bytes")) + ", ").c_str() : "", Text(item, "why").c_str());
  }
}

int Show(const std::string& text, bool as_json) {
  const json report = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!report.is_object() || !report.contains("removed")) {
    Say("the answer is no report of gc");
    return kFailed;
  }
  const json removed = Member(report, "removed", json::value_t::array);
  const json kept = Member(report, "kept", json::value_t::array);
  const json failed = Member(report, "failed", json::value_t::array);
  const bool dry_run = Flag(report, "dry_run");
  if (as_json) {
    std::printf("%s\n", report.dump(-1, ' ', false, json::error_handler_t::replace).c_str());
  } else {
    PrintItems(report, "removed", dry_run ? "would remove" : "removed", true);
    PrintItems(report, "kept", "kept", false);
    PrintItems(report, "failed", "failed", false);
    std::printf("%s %zu files, %s; %zu kept, %zu failed\n", dry_run ? "would remove" : "removed", removed.size(),
                Bytes(Number(report, "bytes")).c_str(), kept.size(), failed.size());
  }
  return !failed.empty() ? kFailed : !kept.empty() ? kDegraded : kFine;
}

// Without a daemon: with these flags, or the configuration that it would have.
int Collect(const GcOptions& options) {
  std::vector<std::string> command = {DaemonBinary(), "--gc"};
  if (options.dry_run) command.push_back("--dry-run");
  if (!options.node.empty()) command.insert(command.end(), {"--gc-node", options.node});
  command.insert(command.end(), options.daemon_flags.begin(), options.daemon_flags.end());
  int code = kFailed;
  const auto deadline = Clock::now() + std::chrono::nanoseconds(options.timeout_ns);
  const std::optional<std::string> output = OutputOf(command, deadline, &code);
  if (!output) return code;
  if (output->empty()) return code == 0 ? kFailed : code;  // wrong flags: it has said why
  return Show(*output, options.json);
}

}  // namespace

bool ParseGc(const std::vector<std::string>& arguments, GcOptions* options, std::string* problem) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    const size_t equals = argument.starts_with("--") ? argument.find('=') : std::string::npos;
    const std::string name = argument.substr(0, equals);
    if (argument == "--json") {
      options->json = true;
    } else if (argument == "--dry-run") {
      options->dry_run = true;
    } else if (name == "--socket" || name == "--timeout" || name == "--node") {
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
      } else if (name == "--node") {
        options->node = value;
      } else if (error == std::errc() && at == end && seconds >= 0.001 && seconds <= 86400) {
        options->timeout_ns = static_cast<int64_t>(seconds * 1e9);
      } else {
        *problem = "--timeout takes seconds from 0.001 to 86400, not \"" + value + "\"";
        return false;
      }
      if (name == "--node" && value.empty()) {
        *problem = "--node needs the name of a node";
        return false;
      }
    } else {
      options->daemon_flags.push_back(argument);
    }
  }
  return true;
}

int Gc(const GcOptions& options) {
  if (!options.daemon_flags.empty()) return Collect(options);
  json params = {{"dry_run", options.dry_run}};
  if (!options.node.empty()) params["node"] = options.node;
  const std::string asked = params.dump(-1, ' ', false, json::error_handler_t::replace);
  char* text = nullptr;
  const int code = mlpo_control(options.socket.empty() ? nullptr : options.socket.c_str(), "gc", asked.c_str(),
                                options.timeout_ns, &text);
  if (code == 0) {
    const std::string answer = text;
    mlpo_free(text);
    return Show(answer, options.json);
  }
  if (code == -ENOENT || code == -ECONNREFUSED) return Collect(options);
  Say(mlpo_last_error());
  return Unreachable(code);
}

}  // namespace mlpo::ctl
