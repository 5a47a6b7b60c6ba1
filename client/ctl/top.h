// Top: what a daemon does, live: paths against what they can do, sessions and where their last steps' time went.
//
// On a terminal it is a full-screen view that is left by q or Ctrl-C and gives the terminal back as it was; elsewhere,
// and on one that knows no control sequences (TERM=dumb), frames follow each other as plain text. With --json a line of
// JSON a frame, as `status`. One thread; signals are blocked but for the waits.
#pragma once

#include "client/ctl/show.h"

namespace mlpo::ctl {

struct TopOptions {
  bool once = false;
  double interval_s = 1;
};

// Until it is left or the daemon goes. Prints; returns the exit code.
int Top(const Question& question, const TopOptions& options);

}  // namespace mlpo::ctl
