// Flags: the command line of mlpo-daemon, as it was given. Pure.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "daemon/base/status.h"

namespace mlpo {

struct Flags {
  std::string config;
  std::optional<std::string> socket;
  std::optional<std::string> memory;
  std::vector<std::string> paths;
  bool check_config = false;
  bool print_config = false;
  bool doctor = false;
  bool gc = false;
  bool dry_run = false;   // of gc
  std::string gc_node;    // "": the configuration's own
  bool answered = false;  // --help or --version: *output has the answer
};

// -EINVAL with the problem and where help is.
Result<Flags> ParseFlags(int argc, const char* const* argv, std::string* output);

}  // namespace mlpo
