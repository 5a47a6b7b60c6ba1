#include "daemon/config/path_list.h"

#include <algorithm>
#include <filesystem>
#include <set>
#include <utility>

#include "daemon/base/name.h"
#include "daemon/config/settings.h"
#include "daemon/config/text.h"

namespace mlpo {
namespace {

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

}  // namespace

PathList::Draft PathList::MakeDraft(const PathTable& table) {
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
      report_(value.origin + ": unknown key path." + Printable(value.key) +
              (nearest.empty() ? "" : "; did you mean " + nearest + "?"));
    } else if (Status status = setting->set(value.value, &draft.path); !status.ok()) {
      report_(value.origin + ": path." + value.key + " " + status.message());
      draft.origins[value.key] = value.origin;
    } else {
      draft.origins[value.key] = value.origin;
    }
  }
  if (draft.origins["directory"] == "default") report_(draft.place + ": a [[path]] needs a directory");
  return draft;
}

void PathList::TakeTables(const std::vector<PathTable>& tables) {
  if (!tables.empty()) drafts_.clear();
  for (const PathTable& table : tables) drafts_.push_back(MakeDraft(table));
}

// DIR or NAME=DIR. DIR may be relative to the working directory; one with '=' in it is given as ./DIR.
void PathList::TakeFlag(const std::string& text, std::vector<Draft>* chosen) {
  const size_t equals = text.find('=');
  std::string name, directory = text;
  if (equals != std::string::npos && text.find('/') > equals) {
    name = text.substr(0, equals);
    directory = text.substr(equals + 1);
    if (!IsName(name)) {
      report_("command line --path: \"" + Printable(name) + "\" is not a name: " + kNameRule);
      return;
    }
  }
  if (directory.empty()) {
    report_("command line --path: the directory must not be empty");
    return;
  }
  std::error_code error;
  const std::string absolute = std::filesystem::absolute(directory, error).string();
  if (error) {
    report_("command line --path " + Printable(text) + ": " + error.message());
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
      report_("command line --path: " + setting.key + " " + status.message());
      return;
    }
    draft.origins[setting.key] = draft.place;
  }
  chosen->push_back(std::move(draft));
}

void PathList::TakeFlags(const std::vector<std::string>& flags) {
  if (flags.empty()) return;
  std::vector<Draft> chosen;
  for (const std::string& text : flags) TakeFlag(text, &chosen);
  drafts_ = std::move(chosen);
}

// Paths without a name get their directory's last component, with -2, -3, ... where it is taken.
void PathList::Name() {
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

void PathList::Check(Config* config) {
  std::map<std::string, std::string> directories, names;
  for (const Draft& draft : drafts_) {
    if (draft.path.directory.empty()) continue;  // reported already
    const auto [directory, new_directory] = directories.emplace(Normal(draft.path.directory), draft.place);
    if (!new_directory)
      report_(draft.place + ": directory " + draft.path.directory + " is already a path (" + directory->second +
              "); each path needs a directory of its own");
    const auto [name, new_name] = names.emplace(draft.path.name, draft.place);
    if (!new_name) report_(draft.place + ": path name " + draft.path.name + " is already taken (" + name->second + ")");
    if (draft.path.exclusive && draft.path.turn_blocks > 0)
      report_(draft.place + ": exclusive is a turn of a session's whole queue: leave out turn.blocks");
    if (draft.path.turn_direction == "one" && draft.path.turn_blocks == 0)
      report_(draft.place + ": turn.direction = \"one\" needs turn.blocks: how many blocks before the other direction");
    config->paths.push_back(draft.path);
    for (const auto& [key, origin] : draft.origins) config->origins["path." + draft.path.name + "." + key] = origin;
  }
}

void PathList::Finish(Config* config) {
  Name();
  Check(config);
}

}  // namespace mlpo
