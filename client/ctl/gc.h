// Gc: has what dead daemons left removed, by the daemon that runs or by mlpo-daemon --gc, and shows the report. Prints;
// the returns are exit codes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace mlpo::ctl {

struct GcOptions {
  std::vector<std::string> daemon_flags;  // not empty: of a daemon that does not run
  std::string socket;                     // "": where the client library looks
  std::string node;                       // "": the daemon's own
  bool dry_run = false;
  bool json = false;
  int64_t timeout_ns = 300'000'000'000;
};

// The arguments after "gc". False with *problem on wrong usage.
bool ParseGc(const std::vector<std::string>& arguments, GcOptions* options, std::string* problem);
int Gc(const GcOptions& options);

}  // namespace mlpo::ctl
