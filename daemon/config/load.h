// LoadConfig: from command line, environment and files to a Config, or to everything that is wrong with them.
//
// Later sources win: defaults, /etc/mlpo/mlpo.toml, $XDG_CONFIG_HOME/mlpo/mlpo.toml ($HOME/.config without it) - or
// instead of these two the file of --config - then MLPO_SECTION__KEY variables (and $MLPO_SOCKET for daemon.socket),
// then flags. A source with paths replaces the paths of earlier ones; a --path whose name or directory is that of an
// earlier
// [[path]] keeps its other settings. Main thread; never throws, prints or exits.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "daemon/config/config.h"

namespace mlpo {

using Environment = std::map<std::string, std::string>;
Environment ReadEnvironment();  // of this process

struct LoadOutcome {
  std::optional<Config> config;  // run the daemon with it; else leave with exit_code
  int exit_code = 0;             // sysexits: 0 asked for output only, 64 wrong usage, 78 wrong configuration
  std::string output;            // for stdout
  std::string errors;            // for stderr, one line a problem
  bool gc = false;               // with a config: remove what dead daemons left instead
  bool dry_run = false;          // or only say what
  std::string gc_node;           // "": of the configuration's node
  bool doctor = false;           // examine the machine for `config` instead; without one, for `problems`
  std::vector<std::string> problems;
};

// node is never empty in the outcome, and each path has a name. `system_file`: for tests.
LoadOutcome LoadConfig(int argc, const char* const* argv, const Environment& environment,
                       const std::string& system_file = "/etc/mlpo/mlpo.toml");

// TOML that loads back to the same Config, each line with its origin as a comment.
std::string PrintConfig(const Config& config);

// Where the daemon listens: daemon.socket, else <run_folder>/<uid>/mlpo.sock if we own that folder, else
// $XDG_RUNTIME_DIR/mlpo/mlpo.sock (its folder is made, mode 0700, if missing), else -ENOENT with what to do.
Result<std::string> ResolveSocket(const Config& config, const Environment& environment,
                                  const std::string& run_folder = "/run/mlpo");

const char* DaemonVersion();  // "0.1.0"

}  // namespace mlpo
