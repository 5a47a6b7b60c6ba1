#include "client/ctl/checkpoint.h"

#include <cstdio>
#include <filesystem>
#include <system_error>
#include <utility>
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
  std::vector<std::string> command = {DaemonBinary(), "checkpoint", options.action, directory};
  if (!options.tag.empty()) command.push_back(options.tag);
  if (question.json) command.push_back("--json");
  return BecomeProgram(std::move(command));
}

}  // namespace mlpo::ctl
