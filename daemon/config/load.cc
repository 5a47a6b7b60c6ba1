#include "daemon/config/load.h"

#include <sysexits.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <utility>
#include <vector>

#include "daemon/base/name.h"
#include "daemon/config/flags.h"
#include "daemon/config/path_list.h"
#include "daemon/config/settings.h"
#include "daemon/config/text.h"
#include "daemon/config/toml_file.h"
#include "daemon/config/units.h"

extern char** environ;

namespace mlpo {
namespace {

constexpr const char* kNoPath =
    "no path: give at least one storage directory with --path DIR, or as a [[path]] with its directory in the file";

class Loader {
 public:
  explicit Loader(const Environment& environment) : environment_(environment) {
    for (const Setting<Config>& setting : Settings()) config_.origins[setting.key] = "default";
  }

  Loader(const Loader&) = delete;  // paths_ reports to this one
  Loader& operator=(const Loader&) = delete;

  void TakeFiles(const std::string& given, const std::string& system_file);
  void TakeEnvironment();
  void TakeFlags(const Flags& flags);
  void Finish(bool paths_needed);

  Config& config() { return config_; }
  const std::vector<std::string>& problems() const { return problems_; }
  bool only_usage() const { return usage_problems_ == problems_.size(); }

 private:
  void TakeFile(const std::string& name, const std::string& text);
  void Set(const std::string& key, const RawValue& raw, const std::string& origin, const std::string& shown_as);
  void CheckPool();
  void CheckGradients();
  void FillNode();
  void Problem(std::string text) { problems_.push_back(std::move(text)); }

  const Environment& environment_;
  Config config_;
  std::vector<std::string> problems_;
  size_t usage_problems_ = 0;
  PathList paths_{[this](std::string text) { Problem(std::move(text)); }};
};

std::vector<std::string> KnownKeys() {
  std::vector<std::string> keys;
  for (const Setting<Config>& setting : Settings()) keys.push_back(setting.key);
  return keys;
}

// "MLPO_MEMORY__POOL" for "memory.pool".
std::string VariableOf(std::string key) {
  const size_t dot = key.find('.');
  key.replace(dot, 1, "__");
  for (char& c : key) c = c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c;
  return "MLPO_" + key;
}

void Loader::Set(const std::string& key, const RawValue& raw, const std::string& origin, const std::string& shown_as) {
  for (const Setting<Config>& setting : Settings()) {
    if (setting.key != key) continue;
    if (Status status = setting.set(raw, &config_); !status.ok())
      Problem(origin + ": " + shown_as + " " + status.message());
    else
      config_.origins[key] = origin;
    return;
  }
  std::string text = origin + ": unknown key " + Printable(key);
  const std::string nearest = NearestKey(key, KnownKeys());
  if (!nearest.empty()) text += "; did you mean " + nearest + "?";
  if (key.find('.') == std::string::npos) text += " (it stands in no section)";
  Problem(text);
}

void Loader::TakeFile(const std::string& name, const std::string& text) {
  const TomlFile file = ParseToml(text, name, &problems_);
  for (const Assignment& value : file.values) Set(value.key, value.value, value.origin, value.key);
  paths_.TakeTables(file.paths);
}

void Loader::TakeFiles(const std::string& given, const std::string& system_file) {
  std::vector<std::string> names;
  auto variable = [&](const char* name) {
    const auto found = environment_.find(name);
    return found == environment_.end() ? std::string() : found->second;
  };
  if (!given.empty()) {
    names = {given};
  } else {
    names = {system_file};
    std::string folder = variable("XDG_CONFIG_HOME");
    if (folder.empty() && !variable("HOME").empty()) folder = variable("HOME") + "/.config";
    if (!folder.empty() && folder[0] == '/') names.push_back(folder + "/mlpo/mlpo.toml");
  }
  for (const std::string& name : names) {
    Result<std::string> text = ReadTomlFile(name);
    const int error = text.status().os_errno();
    if (text.ok()) {
      TakeFile(name, *text);
    } else if (!given.empty() || (error != ENOENT && error != ENOTDIR)) {
      Problem(text.status().message());
    }
  }
}

void Loader::TakeEnvironment() {
  if (const auto socket = environment_.find("MLPO_SOCKET"); socket != environment_.end() && !socket->second.empty())
    Set("daemon.socket", RawValue::Text(socket->second), "environment MLPO_SOCKET", "daemon.socket");
  for (const auto& [name, value] : environment_) {
    if (!name.starts_with("MLPO_")) continue;
    const size_t separator = name.find("__", 5);
    if (separator == std::string::npos) continue;  // the clients'
    const std::string origin = "environment " + Printable(name);
    std::string key = name.substr(5, separator - 5) + "." + name.substr(separator + 2);
    for (char& c : key) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
    const std::vector<std::string> known = KnownKeys();
    if (key.starts_with("path.")) {
      Problem(origin + ": paths are given with --path or as [[path]] in the file, not in the environment");
    } else if (std::find(known.begin(), known.end(), key) == known.end()) {
      const std::string nearest = NearestKey(key, known);
      Problem(origin + ": unknown setting" + (nearest.empty() ? "" : "; did you mean " + VariableOf(nearest) + "?"));
    } else {
      Set(key, RawValue::Text(value), origin, key);
    }
  }
}

void Loader::TakeFlags(const Flags& flags) {
  const size_t before = problems_.size();
  if (flags.memory) Set("memory.pool", RawValue::Text(*flags.memory), "command line --memory", "memory.pool");
  if (flags.socket) {
    std::error_code error;
    std::string absolute = *flags.socket;
    if (!absolute.empty()) absolute = std::filesystem::absolute(absolute, error).string();
    if (error || absolute.empty())
      Problem("command line --socket: " + (error ? error.message() : std::string("the path must not be empty")));
    else
      Set("daemon.socket", RawValue::Text(absolute), "command line --socket", "daemon.socket");
  }
  paths_.TakeFlags(flags.paths);
  usage_problems_ += problems_.size() - before;
}

void Loader::CheckPool() {
  // A block is transferred as parameters and two moments in FP32; fewer than three buffers could not work at all.
  const uint64_t needed = 3 * 12 * config_.memory.block_elements;
  if (config_.memory.pool_bytes == 0 || config_.memory.pool_bytes >= needed) return;
  Problem(config_.origins["memory.pool"] + ": memory.pool is " + FormatSize(config_.memory.pool_bytes) +
          "; three blocks of " + FormatCount(config_.memory.block_elements) + " parameters need at least " +
          FormatSize(needed) + " (or make memory.block smaller)");
}

// The smallest block keeps no gradient: nothing of its buffer's three pages is left.
void Loader::CheckGradients() {
  constexpr uint64_t kLeast = 2048;
  if (config_.scheduler.gradients != "flushed" || config_.memory.block_elements >= kLeast) return;
  Problem(config_.origins["scheduler.gradients"] +
          ": scheduler.gradients \"flushed\" needs a memory.block of at least " + FormatCount(kLeast) + ", not " +
          FormatCount(config_.memory.block_elements));
}

void Loader::FillNode() {
  if (!config_.daemon.node.empty()) return;
  std::vector<char> host(256, '\0');
  if (::gethostname(host.data(), host.size() - 1) != 0 || !IsName(host.data())) {
    Problem("daemon.node: the host name \"" + Printable(host.data()) + "\" is not a name (" + kNameRule +
            "): set daemon.node or MLPO_DAEMON__NODE");
    return;
  }
  config_.daemon.node = host.data();
  config_.origins["daemon.node"] = "host name";
}

void Loader::Finish(bool paths_needed) {
  paths_.Finish(&config_);
  CheckPool();
  CheckGradients();
  FillNode();
  if (paths_needed && config_.paths.empty() && problems_.empty()) Problem(kNoPath);
}

std::string Lines(const std::vector<std::string>& problems) {
  std::string text;
  for (const std::string& problem : problems) text += "mlpo-daemon: " + problem + "\n";
  return text;
}

}  // namespace

Environment ReadEnvironment() {
  Environment environment;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const size_t equals = text.find('=');
    if (equals != std::string::npos) environment.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return environment;
}

const char* DaemonVersion() { return MLPO_VERSION; }

LoadOutcome LoadConfig(int argc, const char* const* argv, const Environment& environment,
                       const std::string& system_file) {
  LoadOutcome outcome;
  const Result<Flags> parsed = ParseFlags(argc, argv, &outcome.output);
  if (!parsed.ok()) {
    outcome.exit_code = EX_USAGE;
    outcome.errors = Lines({parsed.status().message()});
    return outcome;
  }
  const Flags& flags = parsed.value();
  if (flags.answered) return outcome;
  Loader loader(environment);
  loader.TakeFiles(flags.config, system_file);
  loader.TakeEnvironment();
  loader.TakeFlags(flags);
  loader.Finish(!flags.print_config && !flags.doctor);
  outcome.doctor = flags.doctor;
  outcome.gc = flags.gc;
  outcome.dry_run = flags.dry_run;
  outcome.gc_node = flags.gc_node;
  if (flags.doctor && !loader.problems().empty()) {
    outcome.problems = loader.problems();
    return outcome;
  }
  if (!loader.problems().empty()) {
    outcome.exit_code = loader.only_usage() ? EX_USAGE : EX_CONFIG;
    outcome.errors = Lines(loader.problems());
    return outcome;
  }
  if (flags.print_config) {
    outcome.output = PrintConfig(loader.config());
  } else if (flags.check_config) {
    outcome.output = "configuration is valid, paths: " + std::to_string(loader.config().paths.size()) + "\n";
  }
  if (!flags.print_config && !flags.check_config) outcome.config = std::move(loader.config());
  return outcome;
}

std::string PrintConfig(const Config& config) {
  std::string out = "# mlpo-daemon " + std::string(DaemonVersion()) + "\n", section;
  auto line = [&](const std::string& name, const std::string& value, const std::string& key) {
    const auto origin = config.origins.find(key);
    out += name + " = " + value + "  # " + (origin == config.origins.end() ? "default" : Printable(origin->second));
    out += "\n";
  };
  for (const Setting<Config>& setting : Settings()) {
    const size_t dot = setting.key.find('.');
    if (setting.key.substr(0, dot) != section) {
      section = setting.key.substr(0, dot);
      out += "\n[" + section + "]\n";
    }
    line(setting.key.substr(dot + 1), setting.print(config), setting.key);
  }
  for (const PathConfig& path : config.paths) {
    out += "\n[[path]]\n";
    for (const Setting<PathConfig>& setting : PathSettings())
      line(setting.key, setting.print(path), "path." + path.name + "." + setting.key);
  }
  return out;
}

}  // namespace mlpo
