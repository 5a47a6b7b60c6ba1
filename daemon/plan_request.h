// ParsePlanRequest: the flags of `mlpo-ctl plan`. Pure.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "daemon/base/status.h"
#include "daemon/plan.h"

namespace mlpo {

// NAME=READ[/WRITE][UNIT][,KEY=VALUE]...: "nvme=6.9/5.3GB/s,capacity=7TB", "pfs=3.6". Speeds without a unit are GB/s;
// WRITE is as READ if it is left out. KEY is as in a [[path]]: duplex (also full, half), capacity, write_budget, share
// (a number, or equal: one of `nodes` parts); and rated, the bytes that may be written to the drive in its life.
Result<PlanPath> ParsePlanPath(std::string_view text, uint32_t nodes);

// Arguments behind "plan". If they ask for help, *output has it and the request is empty. -EINVAL says what is wrong.
Result<PlanRequest> ParsePlanRequest(const std::vector<std::string>& arguments, std::string* output);

}  // namespace mlpo
