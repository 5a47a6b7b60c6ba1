#include "daemon/checkpoint_tool.h"

#include <sysexits.h>

#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>

#include "daemon/checkpoint/inspect.h"
#include "daemon/io/file_header.h"

namespace mlpo {
namespace {

using nlohmann::json;

constexpr char kUsage[] =
    "Shows and removes checkpoints in a directory, as the user who asks; no daemon is needed.\n"
    "Usage: mlpo-daemon checkpoint list DIR [--json]\n"
    "       mlpo-daemon checkpoint verify DIR [TAG] [--json]    reads all of it; default: the newest complete one\n"
    "       mlpo-daemon checkpoint remove DIR TAG [--json]      whatever is under that tag, complete or not\n"
    "Exit codes: 0 fine, 1 failed or damaged, 64 wrong usage.\n";

// Names in a directory are anybody's: nothing of them commands a terminal.
std::string Safe(const std::string& text) {
  std::string safe;
  for (const char c : text) safe += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? '?' : c;
  return safe;
}

void PrintList(const json& report) {
  for (const json& found : report.at("checkpoints")) {
    std::string line = found.at("tag").get<std::string>() + "  " + found.at("state").get<std::string>();
    if (found.contains("step")) {
      line += "  step " + std::to_string(found.at("step").get<uint64_t>()) + "  " +
              std::to_string(found.at("parts").get<uint64_t>()) + " of " +
              std::to_string(found.at("world_size").get<uint64_t>()) + " parts  " +
              std::to_string(found.at("bytes").get<uint64_t>()) + " bytes  job " + found.at("job").get<std::string>();
    }
    if (found.contains("attempt")) line += "  " + found.at("attempt").get<std::string>();
    std::printf("%s\n", Safe(line).c_str());
    for (const json& problem : found.at("problems")) std::printf("    %s\n", Safe(problem.get<std::string>()).c_str());
  }
}

void PrintVerified(const json& report) {
  for (const json& problem : report.at("problems")) std::printf("%s\n", Safe(problem.get<std::string>()).c_str());
  std::printf("checkpoint '%s' of step %llu, %llu bytes: %s\n", report.at("tag").get<std::string>().c_str(),
              static_cast<unsigned long long>(report.at("step").get<uint64_t>()),
              static_cast<unsigned long long>(report.at("bytes").get<uint64_t>()),
              report.at("ok").get<bool>() ? "right" : "damaged");
}

void PrintRemoved(const json& report) {
  for (const json& kept : report.at("kept")) std::printf("left: %s\n", Safe(kept.get<std::string>()).c_str());
  std::printf("%llu files removed\n", static_cast<unsigned long long>(report.at("removed").get<uint64_t>()));
}

}  // namespace

Status CheckWorkingHeader(int fd, const WorkingOrigin& origin) {
  FileIdentity identity;
  identity.node = origin.node;
  identity.daemon_uid = origin.daemon_uid;
  identity.owner = {origin.client_uid, origin.job, origin.rank, origin.generation};
  return CheckFileHeader(fd, identity);
}

Result<WorkingOrigin> ReadWorkingHeader(int fd) {
  const Result<FileIdentity> found = ReadFileHeader(fd);
  if (!found.ok()) return found.status();
  const FileIdentity& identity = found.value();
  const FileOwner& owner = identity.owner;
  return WorkingOrigin{identity.node, identity.daemon_uid, owner.client_uid, owner.job, owner.rank, owner.generation};
}

int CheckpointTool(const std::vector<std::string>& arguments) {
  bool as_json = false;
  std::vector<std::string> words;
  for (const std::string& argument : arguments) {
    if (argument == "--help" || argument == "-h") {
      std::fputs(kUsage, stdout);
      return EX_OK;
    }
    if (argument == "--json") {
      as_json = true;
    } else {
      words.push_back(argument);
    }
  }
  const std::string command = words.empty() ? "" : words[0];
  const bool known = (command == "list" && words.size() == 2) ||
                     (command == "verify" && (words.size() == 2 || words.size() == 3)) ||
                     (command == "remove" && words.size() == 3);
  if (!known) {
    std::fputs(kUsage, stderr);
    return EX_USAGE;
  }
  bool right = true;
  const std::optional<std::string> tag = words.size() > 2 ? std::optional(words[2]) : std::nullopt;
  const Result<std::string> report = command == "list" ? ListCheckpoints(words[1], CheckWorkingHeader)
                                     : command == "verify"
                                         ? VerifyCheckpoint(words[1], tag, CheckWorkingHeader, &right)
                                         : RemoveCheckpoint(words[1], words[2], ReadWorkingHeader, &right);
  if (!report.ok()) {
    std::fprintf(stderr, "mlpo-daemon: %s\n", Safe(report.status().message()).c_str());
    return 1;
  }
  if (as_json) {
    std::printf("%s\n", report.value().c_str());
  } else {
    const json parsed = json::parse(report.value());
    (command == "list" ? PrintList : command == "verify" ? PrintVerified : PrintRemoved)(parsed);
  }
  return std::fflush(stdout) == 0 && right ? EX_OK : 1;
}

}  // namespace mlpo
