// Trace: has the daemon record for some seconds, and writes what it recorded as a file for Perfetto.
#pragma once

#include <string>

#include "client/ctl/show.h"

namespace mlpo::ctl {

struct TraceOptions {
  double seconds = 5;
  std::string output = "mlpo-trace.json";  // "-": stdout
};

// Ctrl-C ends the recording early. Prints; returns the exit code.
int RecordTrace(const Question& question, const TraceOptions& options);

}  // namespace mlpo::ctl
