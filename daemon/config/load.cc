#include "daemon/config/load.h"

#include <sysexits.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <utility>
#include <vector>

#include "daemon/config/flags.h"
#include "daemon/config/settings.h"
#include "daemon/config/text.h"
#include "daemon/config/toml_file.h"
#include "daemon/config/units.h"

extern char** environ;

namespace mlpo {
namespace {

constexpr const char* kNoPath =
    "no path: give at least one storage directory with --path DIR, or as a [[path]] with its directory in the file";

// The last component of a directory, as a name.
std::string NameOf(const std::string& directory) {
  std::string name = std::filesystem::path(directory).lexically_normal().filename().string();
  if (name.empty()) name = std::filesystem::path(directory).parent_path().filename().string();
  for (char& c : name)
    if (!IsName(std::string("_") + c)) c = '_';
  if (name.empty()) return "root";
  if (!IsName(name)) name = "_" + name;
  return name.substr(0, 100);
}

std::string Normal(const std::string& directory) {
  std::string normal = std::filesystem::path(directory).lexically_normal().string();
  while (normal.size() > 1 && normal.back() == '/') normal.pop_back();
  return normal;
}

class Loader {
 public:
  explicit Loader(const Environment& environment) : environment_(environment) {
    for (const Setting<Config>& setting : Settings()) config_.origins[setting.key] = "default";
  }

  void TakeFiles(const std::string& given, const std::string& system_file);
  void TakeEnvironment();
  void TakeFlags(const Flags& flags);
  void Finish(bool paths_needed);

  Config& config() { return config_; }
  const std::vector<std::string>& problems() const { return problems_; }
  bool only_usage() const { return usage_problems_ == problems_.size(); }

 private:
  // A path while it is put together: origins by its own keys.
  struct Draft {
    PathConfig path;
    std::map<std::string, std::string> origins;
    std::string place;
  };

  void TakeFile(const std::string& name, const std::string& text);
  void Set(const std::string& key, const RawValue& raw, const std::string& origin, const std::string& shown_as);
  Draft MakeDraft(const PathTable& table);
  void TakePathFlag(const std::string& text, std::vector<Draft>* chosen);
  void NamePaths();
  void CheckPaths();
  void CheckPool();
  void FillNode();
  void Problem(std::string text) { problems_.push_back(std::move(text)); }
  void UsageProblem(std::string text) {
    ++usage_problems_;
    Problem(std::move(text));
  }

  const Environment& environment_;
  Config config_;
  std::vector<Draft> drafts_;
  std::vector<std::string> problems_;
  size_t usage_problems_ = 0;
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

Loader::Draft Loader::MakeDraft(const PathTable& table) {
  Draft draft;
  draft.place = table.origin;
  std::vector<std::string> known;
  for (const Setting<PathConfig>& setting : PathSettings()) {
    known.push_back(setting.key);
    draft.origins[setting.key] = "default";
  }
  for (const Assignment& value : table.values) {
    const auto setting = std::find_if(PathSettings().begin(), PathSettings().end(),
                                      [&](const Setting<PathConfig>& s) { return s.key == value.key; });
    if (setting == PathSettings().end()) {
      const std::string nearest = NearestKey(value.key, known);
      Problem(value.origin + ": unknown key path." + Printable(value.key) +
              (nearest.empty() ? "" : "; did you mean " + nearest + "?"));
    } else if (Status status = setting->set(value.value, &draft.path); !status.ok()) {
      Problem(value.origin + ": path." + value.key + " " + status.message());
      draft.origins[value.key] = value.origin;
    } else {
      draft.origins[value.key] = value.origin;
    }
  }
  if (draft.origins["directory"] == "default") Problem(draft.place + ": a [[path]] needs a directory");
  return draft;
}

void Loader::TakeFile(const std::string& name, const std::string& text) {
  const TomlFile file = ParseToml(text, name, &problems_);
  for (const Assignment& value : file.values) Set(value.key, value.value, value.origin, value.key);
  if (!file.paths.empty()) drafts_.clear();
  for (const PathTable& table : file.paths) drafts_.push_back(MakeDraft(table));
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

// DIR or NAME=DIR. DIR may be relative to the working directory; one with '=' in it is given as ./DIR.
void Loader::TakePathFlag(const std::string& text, std::vector<Draft>* chosen) {
  const size_t equals = text.find('=');
  std::string name, directory = text;
  if (equals != std::string::npos && text.find('/') > equals) {
    name = text.substr(0, equals);
    directory = text.substr(equals + 1);
    if (!IsName(name)) {
      UsageProblem("command line --path: \"" + Printable(name) + "\" is not a name: " + kNameRule);
      return;
    }
  }
  if (directory.empty()) {
    UsageProblem("command line --path: the directory must not be empty");
    return;
  }
  std::error_code error;
  const std::string absolute = std::filesystem::absolute(directory, error).string();
  if (error) {
    UsageProblem("command line --path " + Printable(text) + ": " + error.message());
    return;
  }
  Draft draft;
  for (const Setting<PathConfig>& setting : PathSettings()) draft.origins[setting.key] = "default";
  const auto same = std::find_if(drafts_.begin(), drafts_.end(), [&](const Draft& d) {
    return name.empty() ? Normal(d.path.directory) == Normal(absolute) : d.path.name == name;
  });
  if (same != drafts_.end()) draft = *same;
  draft.place = "command line --path";
  for (const Setting<PathConfig>& setting : PathSettings()) {
    const bool is_name = setting.key == "name" && !name.empty();
    if (!is_name && setting.key != "directory") continue;
    if (Status status = setting.set(RawValue::Text(is_name ? name : Normal(absolute)), &draft.path); !status.ok()) {
      UsageProblem("command line --path: " + setting.key + " " + status.message());
      return;
    }
    draft.origins[setting.key] = draft.place;
  }
  chosen->push_back(std::move(draft));
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
  usage_problems_ += problems_.size() - before;
  if (flags.paths.empty()) return;
  std::vector<Draft> chosen;
  for (const std::string& text : flags.paths) TakePathFlag(text, &chosen);
  drafts_ = std::move(chosen);
}

// Paths without a name get their directory's last component, with -2, -3, ... where it is taken.
void Loader::NamePaths() {
  std::set<std::string> taken;
  for (const Draft& draft : drafts_) taken.insert(draft.path.name);
  for (Draft& draft : drafts_) {
    if (!draft.path.name.empty() || draft.path.directory.empty()) continue;
    const std::string base = NameOf(draft.path.directory);
    std::string name = base;
    for (int i = 2; !taken.insert(name).second; ++i) name = base + "-" + std::to_string(i);
    draft.path.name = name;
  }
}

void Loader::CheckPaths() {
  std::map<std::string, std::string> directories, names;
  for (const Draft& draft : drafts_) {
    if (draft.path.directory.empty()) continue;  // reported already
    const auto [directory, new_directory] = directories.emplace(Normal(draft.path.directory), draft.place);
    if (!new_directory)
      Problem(draft.place + ": directory " + draft.path.directory + " is already a path (" + directory->second +
              "); each path needs a directory of its own");
    const auto [name, new_name] = names.emplace(draft.path.name, draft.place);
    if (!new_name) Problem(draft.place + ": path name " + draft.path.name + " is already taken (" + name->second + ")");
    config_.paths.push_back(draft.path);
    for (const auto& [key, origin] : draft.origins) config_.origins["path." + draft.path.name + "." + key] = origin;
  }
}

void Loader::CheckPool() {
  // A block is transferred as parameters and two moments in FP32; fewer than three buffers could not work at all.
  const uint64_t needed = 3 * 12 * config_.memory.block_elements;
  if (config_.memory.pool_bytes == 0 || config_.memory.pool_bytes >= needed) return;
  Problem(config_.origins["memory.pool"] + ": memory.pool is " + FormatSize(config_.memory.pool_bytes) +
          "; three blocks of " + FormatCount(config_.memory.block_elements) + " parameters need at least " +
          FormatSize(needed) + " (or make memory.block smaller)");
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
  NamePaths();
  CheckPaths();
  CheckPool();
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
  loader.Finish(!flags.print_config);
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
