// Judge: facts to findings: what is in order, what is wrong, and what to do about it. Pure.
#pragma once

#include <string>
#include <vector>

#include "daemon/doctor/facts.h"

namespace mlpo {

enum class Level { kOk, kWarning, kError };  // warning: it works, with less speed or safety; error: it does not

struct Finding {
  std::string check;  // kernel, io_uring, memlock, memory, pool, huge_pages, cpu, numa, limits, socket, configuration,
                      // path, direct_io, space, file_system, nfs, lustre, devices
  std::string path;   // name of the path; "" for the machine
  Level level = Level::kOk;
  std::string what;
  std::string advice;  // the command or the key; "" if all is well
};

std::vector<Finding> Judge(const Facts& facts);

// What is wrong with the configuration itself, as findings.
std::vector<Finding> JudgeProblems(const std::vector<std::string>& problems);

// One line of JSON: {"state": fine | degraded | failed, "examined_by": daemon | check, "findings": [{"check", "level",
// "path", "what", "advice"}]}.
std::string ReportJson(const std::vector<Finding>& findings, bool running);

// 0 fine, 1 an error, 2 a warning.
int ReportCode(const std::vector<Finding>& findings);

}  // namespace mlpo
