#include "daemon/config/flags.h"

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>

#include "daemon/base/name.h"
#include "daemon/config/load.h"
#include "daemon/config/settings.h"

namespace mlpo {

Result<Flags> ParseFlags(int argc, const char* const* argv, std::string* output) try {
  Flags flags;
  std::string socket, memory;
  CLI::App app(
      "Offload daemon: keeps optimizer state on several storage paths for the trainers of one node.\n"
      "Settings come from flags, then MLPO_SECTION__KEY variables, then the configuration file.",
      "mlpo-daemon");
  app.add_option("--config", flags.config, "TOML file, instead of /etc/mlpo/mlpo.toml and the user's own");
  CLI::Option* socket_given = app.add_option("--socket", socket, "socket to listen on (default: $MLPO_SOCKET)");
  app.add_option("--path", flags.paths, "storage directory, DIR or NAME=DIR; may be repeated")
      ->type_name("DIR")
      ->allow_extra_args(false);
  CLI::Option* memory_given = app.add_option("--memory", memory, "size of the block buffers, such as 64GiB");
  memory_given->type_name("SIZE");
  app.add_flag("--check-config", flags.check_config, "check the configuration and exit: 0 or 78");
  app.add_flag("--print-config", flags.print_config, "print the configuration with the origin of each value and exit");
  app.add_flag("--doctor", flags.doctor,
               "look whether this machine is in order for the configuration, print the findings as JSON and exit: 0 "
               "fine, 1 it would not work, 2 it would work badly (mlpo-ctl doctor shows them)");
  app.add_flag("--gc", flags.gc,
               "remove what dead daemons of this user and node left on the paths, print a report as JSON and exit: 0 "
               "done, 1 something failed, 2 something is not ours to remove (mlpo-ctl gc shows it)");
  CLI::Option* gc_node = app.add_option("--gc-node", flags.gc_node, "with --gc: of another node, whose daemon is gone");
  CLI::Option* dry_run = app.add_flag("--dry-run", flags.dry_run, "with --gc: remove nothing");
  bool version = false;
  app.add_flag("--version", version, "print the version and exit");
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    *output = app.help();
    flags.answered = true;
    return flags;
  } catch (const CLI::ParseError& error) {
    return Status::Invalid(std::string(error.what()) + " (mlpo-daemon --help shows the flags)");
  }
  if (version) {
    *output = std::string("mlpo-daemon ") + DaemonVersion() + "\n";
    flags.answered = true;
  }
  if (app.count("--config") != 0 && flags.config.empty())
    return Status::Invalid("--config: the file's name must not be empty");
  if (!flags.gc && (gc_node->count() != 0 || dry_run->count() != 0))
    return Status::Invalid("--gc-node and --dry-run go with --gc");
  if (gc_node->count() != 0 && !IsName(flags.gc_node))
    return Status::Invalid("--gc-node: not a node's name: " + std::string(kNameRule));
  if (socket_given->count() != 0) flags.socket = socket;
  if (memory_given->count() != 0) flags.memory = memory;
  return flags;
} catch (const std::exception& error) {
  return Status::Invalid(std::string("command line: ") + error.what());
}

}  // namespace mlpo
