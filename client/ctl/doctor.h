// Doctor: has the machine examined, by the daemon that runs or by mlpo-daemon --doctor, and shows the findings. Prints;
// the returns are exit codes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace mlpo::ctl {

struct DoctorOptions {
  std::vector<std::string> daemon_flags;  // not empty: of a daemon that does not run yet
  std::string socket;                     // "": where the client library looks
  bool json = false;
  int64_t timeout_ns = 60'000'000'000;
};

// The arguments after "doctor". False with *problem on wrong usage.
bool ParseDoctor(const std::vector<std::string>& arguments, DoctorOptions* options, std::string* problem);
int Doctor(const DoctorOptions& options);

}  // namespace mlpo::ctl
