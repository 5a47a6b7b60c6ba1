// OutputOf: what mlpo-daemon says when it is asked to look or to do something instead of serving.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

namespace mlpo::ctl {

// The line that the program says on its stdout, or all until it ends, at most 64 MiB; nothing after a message.
// `command`: the program, what it is to do as its first flag, and others. *exit_code: 0 if there is a line, else the
// program's.
std::optional<std::string> OutputOf(const std::vector<std::string>& command,
                                    std::chrono::steady_clock::time_point deadline, int* exit_code);

}  // namespace mlpo::ctl
