// Garbage: what dead daemons, and saves that were cut, have left on the paths and in directories of checkpoints. At the
// start each path's own Open has removed what was there; this is for mlpo-ctl gc and mlpo-daemon --gc.
//
// Owns nothing. The files are looked at and removed by the paths' keepers; another node's, and those in directories of
// checkpoints, in threads of their own. The lookout waits for them, with deadlines.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "daemon/base/status.h"
#include "daemon/checkpoint_runs.h"
#include "daemon/config/config.h"
#include "daemon/control/control_server.h"
#include "daemon/io/path.h"
#include "daemon/io/path_keeper.h"
#include "daemon/threads.h"
#include "daemon/types/gc_report.h"

namespace mlpo {

// What dead daemons left on these paths; `node`: "": of the configuration's own. For mlpo-daemon --gc, while no daemon
// runs there. Blocks as long as the file systems do.
GcReport CollectGarbageOf(const Config& config, const std::string& node, bool dry_run);

// Of a daemon that runs.
class Garbage {
 public:
  // Borrowed, as long as anything that was posted may be carried out.
  struct Parts {
    const Config* config = nullptr;
    Threads* threads = nullptr;
    std::vector<Path*> paths;
    std::vector<PathKeeper*> keepers;             // per path
    std::shared_ptr<CheckpointRuns> checkpoints;  // a thread that hangs keeps it
  };

  explicit Garbage(Parts parts) : parts_(std::move(parts)) {}

  // Main thread; answers there, with JSON. Any number at a time: one after the other.
  void CollectGarbage(const GcRequest& request, std::function<void(Result<std::string>)> answer);

 private:
  const Parts parts_;
};

}  // namespace mlpo
