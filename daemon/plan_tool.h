// `mlpo-daemon plan FLAGS`: what `mlpo-ctl plan` runs and shows. No daemon is needed.
#pragma once

#include <string>
#include <vector>

namespace mlpo {

// Arguments behind "plan". Prints a line of JSON, or help, to stdout, and returns the exit code: 0 fine, 1 it does not
// fit, 2 it works badly, 64 wrong usage.
int PlanTool(const std::vector<std::string>& arguments);

}  // namespace mlpo
