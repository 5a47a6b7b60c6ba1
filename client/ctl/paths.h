// Paths: mlpo-ctl paths disable, enable and evacuate. Prints; the returns are exit codes.
#pragma once

#include <string>

#include "client/ctl/show.h"

namespace mlpo::ctl {

struct PathOrder {
  std::string command;   // disable, enable, evacuate
  std::string path;      // name or directory
  double wait_s = 3600;  // how long to watch an evacuation; 0: not at all
};

int CommandPath(const Question& question, const PathOrder& order);

}  // namespace mlpo::ctl
