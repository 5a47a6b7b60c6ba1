// NodeShares: what part of the paths that other nodes use as well is this node's: by configuration ([[path]] share), by
// the ranks that are here of all that a job has, and by what the nodes' trainers tell each other. No daemon knows
// another one: what comes from other nodes is told by this node's own sessions, and is in force as long as they are
// connected.
//
// Two things follow. What a path's declared or measured speeds are for all nodes together, a part of it is this node's
// to begin with (PathRecords::SetPart); learning goes on from there. And with share = "measured" a path is granted so
// much and no more (SplitPath, PathModel::Grant), so that nodes with fast paths of their own leave it to the others.
//
// A path is everybody's here, so what sessions of one user have told is in force only while no other user has sessions.
//
// Threads: all of it is main's; `answer` is called there, now or later. The path model is told by posted functions.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "daemon/base/status.h"
#include "daemon/config/config.h"
#include "daemon/control/control_server.h"
#include "daemon/data_loop.h"
#include "daemon/path_records.h"
#include "daemon/storages.h"
#include "daemon/threads.h"
#include "daemon/types/session_identity.h"
#include "daemon/types/snapshot.h"

namespace mlpo {

class NodeShares {
 public:
  // Borrowed, as long as anything that was posted may be carried out.
  struct Parts {
    const Config* config = nullptr;
    Threads* threads = nullptr;
    DataLoop* loop = nullptr;
    PathRecords* records = nullptr;
    Storages* storages = nullptr;
    std::function<void(std::function<void(Snapshot)>)> take_snapshot;  // in main; so is what it calls
  };

  explicit NodeShares(Parts parts);

  void SessionReady(const SessionIdentity& identity);
  void SessionEnded(const SessionIdentity& identity);

  // What this node has to tell the others of a job, as JSON; no paths if none is "measured".
  void Figures(uint32_t uid, const std::string& job, std::function<void(Result<std::string>)> answer);
  // What they have all told, of one path.
  void Tell(const ShareRequest& request, const std::function<void(Result<std::string>)>& answer);

  void Fill(Snapshot* snapshot) const;

 private:
  struct Job {  // that has sessions here
    uint32_t ranks = 0;
    uint32_t world_size = 1;
    std::vector<uint32_t> nodes;  // per path: of what was told last
    std::vector<double> granted;  // per path: bytes/s; 0: nothing
  };

  bool SeveralUsers() const;
  void SetParts();
  void SetGrants();

  const Parts parts_;
  const std::string daemon_;  // another one for each daemon's life: ranks with one daemon are of one node
  bool any_measured_ = false;
  std::map<std::pair<uint32_t, std::string>, Job> jobs_;  // by uid and name
  std::vector<double> granted_;                           // per path, in force
};

}  // namespace mlpo
