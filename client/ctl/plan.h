// Plan: what a model's optimizer state takes of a node, as mlpo-daemon's own code works it out; no daemon is asked.
// Prints; the returns are exit codes.
#pragma once

#include <string>
#include <vector>

namespace mlpo::ctl {

// The arguments after "plan", which are mlpo-daemon's to parse.
int PlanNode(const std::vector<std::string>& arguments);

}  // namespace mlpo::ctl
