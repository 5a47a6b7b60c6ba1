// `mlpo-daemon checkpoint list|verify|remove`: what `mlpo-ctl checkpoint` runs, as the user who asks and without a
// daemon. Blocks as long as the file system does.
#pragma once

#include <string>
#include <vector>

#include "daemon/checkpoint/part_set.h"

namespace mlpo {

// Whether an open file has the header of that working file; and of which it has one.
Status CheckWorkingHeader(int fd, const WorkingOrigin& origin);
Result<WorkingOrigin> ReadWorkingHeader(int fd);

// Arguments behind "checkpoint". Prints to stdout and returns the exit code: 0 fine, 1 failed or damaged, 64 wrong
// usage.
int CheckpointTool(const std::vector<std::string>& arguments);

}  // namespace mlpo
