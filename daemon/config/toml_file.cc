#include "daemon/config/toml_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <utility>

#include "daemon/base/unique_fd.h"
#include "daemon/config/text.h"

#define TOML_EXCEPTIONS 0
#define TOML_HEADER_ONLY 1
#include <toml++/toml.h>

namespace mlpo {
namespace {

constexpr size_t kMaxFileBytes = 1u << 20;
constexpr const char* kTurn = "turn";  // of a path: {blocks = 4, direction = "one"}

// Those that settings stand in, as they are printed; paths have their own.
const std::vector<std::string>& Sections() {
  static const std::vector<std::string> sections = [] {
    std::vector<std::string> names;
    for (const Setting<Config>& setting : Settings()) {
      std::string section = setting.key.substr(0, setting.key.find('.'));
      if (names.empty() || names.back() != section) names.push_back(std::move(section));
    }
    return names;
  }();
  return sections;
}

std::string Place(const std::string& name, const toml::source_region& region) {
  return name + ":" + std::to_string(region.begin.line);
}

RawValue Raw(const toml::node& node) {
  RawValue raw;
  if (const auto* text = node.as_string()) raw.value = text->get();
  if (const auto* whole = node.as_integer()) raw.value = whole->get();
  if (const auto* number = node.as_floating_point()) raw.value = number->get();
  if (const auto* flag = node.as_boolean()) raw.value = flag->get();
  return raw;
}

std::vector<Assignment> Assignments(const toml::table& table, const std::string& prefix, const std::string& name) {
  std::vector<Assignment> values;
  for (const auto& [key, node] : table) {
    const std::string whole = prefix + std::string(key.str());
    const toml::table* group = whole == kTurn ? node.as_table() : nullptr;
    if (group == nullptr) {
      values.push_back({whole, Raw(node), Place(name, key.source())});
      continue;
    }
    for (Assignment& value : Assignments(*group, whole + ".", name)) values.push_back(std::move(value));
  }
  return values;
}

std::string UnknownSection(const std::string& section) {
  std::vector<std::string> known = Sections();
  known.push_back("path");
  const std::string nearest = NearestKey(section, known);
  std::string text = "unknown section [" + Printable(section) + "]";
  if (nearest.empty()) {
    text += "; known:";
    for (const std::string& name : Sections()) text += " [" + name + "]";
    return text + " [[path]]";
  }
  return text + "; did you mean " + (nearest == "path" ? "[[path]]?" : "[" + nearest + "]?");
}

void TakePaths(const toml::node& node, const std::string& name, const std::string& place, TomlFile* file,
               std::vector<std::string>* problems) {
  const toml::array* array = node.as_array();
  if (array == nullptr) {
    problems->push_back(place + ": each path is a [[path]] of its own, with two brackets");
    return;
  }
  for (const toml::node& element : *array) {
    if (const toml::table* table = element.as_table()) {
      file->paths.push_back({Place(name, table->source()), Assignments(*table, "", name)});
    } else {
      problems->push_back(Place(name, element.source()) + ": each path is a [[path]] table");
    }
  }
}

TomlFile Take(const toml::table& root, const std::string& name, std::vector<std::string>* problems) {
  TomlFile file;
  for (const auto& [key, node] : root) {
    const std::string section(key.str());
    const std::string place = Place(name, node.is_table() ? node.source() : key.source());
    if (section == "path") {
      TakePaths(node, name, place, &file, problems);
    } else if (const toml::table* table = node.as_table()) {
      if (std::find(Sections().begin(), Sections().end(), section) == Sections().end()) {
        problems->push_back(place + ": " + UnknownSection(section));
        continue;
      }
      for (Assignment& value : Assignments(*table, section + ".", name)) file.values.push_back(std::move(value));
    } else {
      file.values.push_back({section, Raw(node), place});  // in no section: the caller knows no such key
    }
  }
  // toml++ sorts by key; people read by line.
  auto by_line = [](const Assignment& a, const Assignment& b) {
    const auto line = [](const Assignment& v) { return std::stoul(v.origin.substr(v.origin.rfind(':') + 1)); };
    return line(a) < line(b);
  };
  std::stable_sort(file.values.begin(), file.values.end(), by_line);
  for (PathTable& path : file.paths) std::stable_sort(path.values.begin(), path.values.end(), by_line);
  return file;
}

// The text before line `line`, and the line itself.
std::pair<std::string_view, std::string_view> CutAtLine(std::string_view text, size_t line) {
  size_t at = 0;
  for (size_t i = 1; i < line && at < text.size(); ++i) {
    const size_t end = text.find('\n', at);
    at = end == std::string_view::npos ? text.size() : end + 1;
  }
  return {text.substr(0, at), text.substr(at, text.substr(at).find('\n'))};
}

// The section that the last header of `text` opens: "memory", "path"; "" at the top.
std::string OpenSection(std::string_view text) {
  std::string section;
  while (!text.empty()) {
    const size_t end = text.find('\n');
    std::string_view line = text.substr(0, end);
    while (!line.empty() && (line[0] == ' ' || line[0] == '\t')) line.remove_prefix(1);
    if (!line.empty() && line[0] == '[') {
      const size_t begin = line.find_first_not_of("[ \t");
      const size_t stop = line.find_first_of("] \t", begin);
      if (begin != std::string_view::npos && stop != std::string_view::npos)
        section = std::string(line.substr(begin, stop - begin));
    }
    text = end == std::string_view::npos ? std::string_view() : text.substr(end + 1);
  }
  return section;
}

// For "cannot redefine existing integer 'pool'" at a line: "memory.pool is set twice: here and in line 3". Nothing if
// the error is another. `before` is what was read up to that line.
std::optional<std::string> TwiceText(std::string_view description, const toml::table& before,
                                     std::string_view before_text) {
  if (description.find("cannot redefine existing") == std::string_view::npos) return std::nullopt;
  const size_t open = description.find('\''), close = description.rfind('\'');
  if (open == std::string_view::npos || close <= open) return std::nullopt;
  std::string key(description.substr(open + 1, close - open - 1));
  key.erase(std::remove_if(key.begin(), key.end(), [](char c) { return c == '"' || c == ' '; }), key.end());
  const bool is_section = description.find("existing table") != std::string_view::npos;
  const std::string section = is_section ? "" : OpenSection(before_text);
  const toml::table* table = &before;
  if (!section.empty()) {
    const toml::node* node = before.get(section);
    if (node != nullptr && node->is_array() && !node->as_array()->empty()) node = &node->as_array()->back();
    table = node == nullptr ? nullptr : node->as_table();
  }
  std::string text = is_section ? "section [" + key + "]" : (section.empty() ? key : section + "." + key);
  text += " is set twice: here";
  if (table != nullptr) {
    for (const auto& [name, node] : *table)
      if (name.str() == key)
        text += " and in line " + std::to_string(is_section ? node.source().begin.line : name.source().begin.line);
  }
  return text;
}

}  // namespace

TomlFile ParseToml(std::string_view whole, const std::string& name, std::vector<std::string>* problems) {
  std::string text(whole);
  for (;;) {
    const toml::parse_result parsed = toml::parse(text, name);
    if (parsed) return Take(parsed.table(), name, problems);
    const toml::parse_error& error = parsed.error();
    const std::string place = Place(name, error.source());
    const auto [before_text, line] = CutAtLine(text, error.source().begin.line);
    const std::string shown = " (" + Printable(line.substr(0, 80)) + ")";
    const toml::parse_result before = toml::parse(before_text, name);
    const auto twice = before ? TwiceText(error.description(), before.table(), before_text) : std::nullopt;
    problems->push_back(place + ": " + twice.value_or(Printable(error.description())) + shown);
    if (twice && !line.empty() && line.find('[') == std::string_view::npos && toml::parse(line)) {
      // The second of two keys, whole in its line: without it the rest can be read on.
      text.replace(before_text.size(), line.size(), line.size(), ' ');
      continue;
    }
    // What stands before the faulty line is taken all the same, so that its problems are listed too.
    return before ? Take(before.table(), name, problems) : TomlFile();
  }
}

Result<std::string> ReadTomlFile(const std::string& name) {
  UniqueFd fd(::open(name.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (!fd) return Status::Errno(errno, "configuration file " + name);
  struct stat st;
  if (::fstat(fd.get(), &st) != 0) return Status::Errno(errno, "configuration file " + name);
  if (!S_ISREG(st.st_mode)) return Status::Invalid("configuration file " + name + " is not a regular file");
  std::string text(kMaxFileBytes + 1, '\0');
  size_t filled = 0;
  while (filled < text.size()) {
    const ssize_t got = ::read(fd.get(), text.data() + filled, text.size() - filled);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return Status::Errno(errno, "reading configuration file " + name);
    if (got == 0) break;
    filled += static_cast<size_t>(got);
  }
  if (filled > kMaxFileBytes) return Status(-EFBIG, "configuration file " + name + " has more than 1 MiB");
  text.resize(filled);
  return text;
}

}  // namespace mlpo
