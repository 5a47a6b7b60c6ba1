// PathCommands: disables, evacuates and enables paths (mlpo-ctl paths), and knows which are used, by command and by
// what the data thread says of their health. What that asks of the others goes with it: room for what a path has,
// sessions' files that come and go, probes.
//
// Threads: what is known here is main's; functions are called in main, and `answer` is, if nothing else is said. They
// return at once. The scheduler decides, in the data thread, whether a path can be spared and when it is empty;
// sessions' files are made and removed in housekeeping; a path is taken back from the lookout, since that may take
// long. Whatever touches a path's file system is its keeper's.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "daemon/base/status.h"
#include "daemon/control/control_server.h"
#include "daemon/data_loop.h"
#include "daemon/io/path.h"
#include "daemon/io/path_keeper.h"
#include "daemon/path_records.h"
#include "daemon/storages.h"
#include "daemon/threads.h"
#include "daemon/types/ids.h"
#include "daemon/types/snapshot.h"

namespace mlpo {

class PathCommands {
 public:
  // Borrowed, as long as anything that was posted may be carried out.
  struct Parts {
    Threads* threads = nullptr;
    DataLoop* loop = nullptr;
    Storages* storages = nullptr;
    PathRecords* records = nullptr;
    std::vector<Path*> paths;
    std::vector<PathKeeper*> keepers;  // per path
    uint64_t buffer_bytes = 0;         // of the pool: what a probe writes
  };

  explicit PathCommands(Parts parts);

  // Where new files are made and room is reserved: paths that take what is written, by what was last heard of them. If
  // none does, all that are not disabled are asked, and say why.
  std::vector<bool> UsedPaths() const;
  bool IsDisabled(size_t path) const { return disabled_[path]; }
  // What the data thread has told last. Sessions get a file on a path that can be used again.
  void LogPathStates(const std::vector<PathSnapshot>& paths);
  // Answers when the command is in force, with JSON, or with why it is not.
  void CommandPath(const PathCommand& command, std::function<void(Result<std::string>)> answer);
  // See SchedulerActions::Evacuated.
  void Evacuated(PathIndex path);
  // Data thread. See SchedulerActions::StartProbe; answered by DataLoop::ProbeDone.
  void Probe(PathIndex path, uint64_t end);

 private:
  void Disable(PathIndex path, std::function<void(Result<std::string>)> answer);
  void Evacuate(PathIndex path, std::function<void(Result<std::string>)> answer);
  void Enable(PathIndex path, std::function<void(Result<std::string>)> answer);
  void Retaken(PathIndex path, const Status& taken, const std::function<void(Result<std::string>)>& answer);

  const Parts parts_;
  std::vector<std::string> path_states_;  // per path, as last logged
  std::vector<bool> disabled_;            // per path, by command
  std::vector<uint32_t> enabling_;        // per path: Enables under way
};

}  // namespace mlpo
