#include "client/ctl/checkpoint.h"

#include <string.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <system_error>
#include <vector>

#include "client/ctl/child.h"
#include "client/ctl/exit_code.h"

namespace mlpo::ctl {

std::string CheckCheckpoint(const CheckpointOptions& options) {
  const bool request = options.action == "request";
  if (!request && options.action != "list" && options.action != "verify" && options.action != "remove")
    return "checkpoint: \"" + options.action + "\" is none of list, verify, remove, request";
  if (request) {
    return options.directory.empty() ? "" : "checkpoint request takes no directory: the trainer has its own";
  }
  if (!options.job.empty()) return "checkpoint: --job is for request";
  if (options.directory.empty()) return "checkpoint " + options.action + " needs the directory of checkpoints";
  if (options.action == "remove" && options.tag.empty()) return "checkpoint remove needs a tag: which one is to go";
  if (options.action == "list" && !options.tag.empty()) return "checkpoint list takes a directory only";
  return "";
}

int Checkpoint(const Question& question, const CheckpointOptions& options) {
  if (options.action == "request") return RequestCheckpoint(question, options.job);
  std::error_code error;
  const std::string directory = std::filesystem::absolute(options.directory, error).string();
  if (error) {
    std::fprintf(stderr, "mlpo-ctl: %s: %s\n", options.directory.c_str(), error.message().c_str());
    return kFailed;
  }
  const std::string program = DaemonBinary();
  std::vector<std::string> command = {program, "checkpoint", options.action, directory};
  if (!options.tag.empty()) command.push_back(options.tag);
  if (question.json) command.push_back("--json");
  std::vector<char*> arguments;
  for (std::string& word : command) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  ::execvp(program.c_str(), arguments.data());
  std::fprintf(stderr, "mlpo-ctl: cannot start %s: %s (it is looked for beside mlpo-ctl, then in PATH)\n",
               program.c_str(), ::strerror(errno));
  return kFailed;
}

}  // namespace mlpo::ctl
