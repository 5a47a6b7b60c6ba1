// Checkpoint: what `mlpo-ctl checkpoint` does. Prints; the returns are exit codes.
//
// Directories are looked at as the user who asks, by mlpo-daemon's own tool and without a daemon; only `request` talks
// to one.
#pragma once

#include <string>

#include "client/ctl/show.h"

namespace mlpo::ctl {

struct CheckpointOptions {
  std::string action;     // list, verify, remove, request
  std::string directory;  // "": none given; likewise
  std::string tag;
  std::string job;
};

// Returns what is wrong with them, "" if nothing.
std::string CheckCheckpoint(const CheckpointOptions& options);
int Checkpoint(const Question& question, const CheckpointOptions& options);

}  // namespace mlpo::ctl
