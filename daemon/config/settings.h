// Settings: the table of every key of the configuration: how its value is read, checked, stored and printed.
//
// A RawValue is what a source holds: a TOML value, or text from the environment or the command line. Setting<S> belongs
// to a struct S of config.h. Pure; the tables are built once and never change.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <variant>
#include <vector>

#include "daemon/config/config.h"

namespace mlpo {

struct RawValue {
  std::variant<std::monostate, std::string, int64_t, double, bool> value;  // monostate: a table, array or date
  bool untyped = false;  // text of the environment or command line: may stand for a number or boolean

  static RawValue Text(std::string text) { return {std::move(text), true}; }
};

template <class S>
struct Setting {
  std::string key;                                 // "memory.pool"; of a path just "directory"
  std::function<Status(const RawValue&, S*)> set;  // the error says what is allowed; *S is unchanged then
  std::function<std::string(const S&)> print;      // as a TOML value that `set` takes back
};

// In the order in which they are printed; keys are "<section>.<name>".
const std::vector<Setting<Config>>& Settings();
const std::vector<Setting<PathConfig>>& PathSettings();

// The known key nearest to `key`: the same name in another section, or few edits away; "" if none is near.
std::string NearestKey(const std::string& key, const std::vector<std::string>& known);

}  // namespace mlpo
