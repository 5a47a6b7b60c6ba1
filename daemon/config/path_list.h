// PathList: the storage paths while the sources of the configuration are read, later sources replacing earlier ones.
//
// Each problem goes to `report` as one line with its place. Belongs to one LoadConfig.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "daemon/config/config.h"
#include "daemon/config/toml_file.h"

namespace mlpo {

class PathList {
 public:
  explicit PathList(std::function<void(std::string problem)> report) : report_(std::move(report)) {}

  // The [[path]] tables of a file. None: the paths of earlier sources stay.
  void TakeTables(const std::vector<PathTable>& tables);
  // DIR or NAME=DIR of each --path. None: the paths of earlier sources stay. One with the name or directory of a path
  // of the files keeps its other settings.
  void TakeFlags(const std::vector<std::string>& flags);
  // Names those without a name, checks that they differ, and puts them with their origins into *config.
  void Finish(Config* config);

 private:
  // A path with the origins of its keys.
  struct Draft {
    PathConfig path;
    std::map<std::string, std::string> origins;
    std::string place;
  };

  Draft MakeDraft(const PathTable& table);
  void TakeFlag(const std::string& text, std::vector<Draft>* chosen);
  void Name();
  void Check(Config* config);

  const std::function<void(std::string)> report_;
  std::vector<Draft> drafts_;
};

}  // namespace mlpo
