// TomlFile: a configuration file as a list of assignments, each with its place; what the keys mean is settings.h's.
//
// Every problem is reported, not only the first: the file's syntax up to the first syntax error, and the values before
// it. Pure but for ReadTomlFile, which reads one regular file of at most 1 MiB.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "daemon/config/settings.h"

namespace mlpo {

struct Assignment {
  std::string key;  // "memory.pool"; within a path "directory"
  RawValue value;
  std::string origin;  // "mlpo.toml:12"
};

struct PathTable {
  std::string origin;  // of its [[path]]
  std::vector<Assignment> values;
};

struct TomlFile {
  std::vector<Assignment> values;
  std::vector<PathTable> paths;
};

// `name` stands in origins and problems.
TomlFile ParseToml(std::string_view text, const std::string& name, std::vector<std::string>* problems);
// -ENOENT if there is no such file; other failures name it.
Result<std::string> ReadTomlFile(const std::string& name);

}  // namespace mlpo
