// Storages: what sessions, and jobs' objects, have on the paths: their files, the room in these, and what of the
// capacity quotas that takes.
//
// A session's storage comes with its first subgroup, or with its first checkpoint if that is earlier; a job's with its
// first large object. It goes, with its files, when the data thread has nothing of the session or store any more, and
// no save needs the files: these may outlive the session.
//
// Threads: the table of storages, and each one's counts, are main's; files (ExtentStore) and shares are housekeeping's,
// in the order in which main has posted for them. Functions are called in main if nothing else is said, and so are
// `done` and `gone`; they return at once. The data thread is told of files and of room by posted functions. Reads and
// writes no file itself: that is the paths' keepers', by ExtentStore.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "daemon/base/status.h"
#include "daemon/checkpoint_runs.h"
#include "daemon/config/config.h"
#include "daemon/data_loop.h"
#include "daemon/io/extent_store.h"
#include "daemon/io/path.h"
#include "daemon/io/path_keeper.h"
#include "daemon/scheduler/path_model.h"
#include "daemon/session/session_server.h"
#include "daemon/threads.h"
#include "daemon/types/ids.h"
#include "daemon/types/session_identity.h"
#include "daemon/types/subgroup_spec.h"

namespace mlpo {

class Storages {
 public:
  static constexpr SessionId kBenchStorage = kStoreBit;  // of a calibration: no job's objects have this number

  // Borrowed, as long as anything that was posted may be carried out.
  struct Parts {
    const Config* config = nullptr;
    Threads* threads = nullptr;
    DataLoop* loop = nullptr;
    SessionServer* sessions = nullptr;
    std::vector<Path*> paths;
    std::vector<PathKeeper*> keepers;  // per path
    Policy policy = Policy::kAdaptive;
    std::function<std::vector<bool>()> used_paths;  // where new files are made and room is reserved
    std::function<void()> gone;                     // a storage is not there any more, or its session is not
  };
  // A session's storage, made by its first registration; or that of a job's objects, made by the first large one.
  struct Storage {
    std::unique_ptr<ExtentStore> store;  // housekeeping thread
    std::string owner;                   // for messages
    uint32_t uid = 0;                    // main: whose quota
    std::string job;
    uint64_t quota_bytes = 0;  // main: that count there
    uint64_t blocks = 0;       // main: asked for
    uint32_t saves = 0;        // main: that need the files, though the session may have gone
    bool gone = false;         // main: the session has
    bool going = false;        // main: its files are being removed, and its quota given back: nothing is added any more
  };
  using Map = std::map<SessionId, std::shared_ptr<Storage>>;

  // `parameters`: per path, what it can do as known now.
  Storages(Parts parts, const std::vector<PathParameters>& parameters);
  // All files, at the daemon's end: once no other thread, and no transfer, uses any of this.
  void Remove();

  // ---- Sessions and stores ----
  // See SessionHost.
  void PrepareStorage(const SessionIdentity& identity, const SubgroupSpec& spec, std::function<void(Status)> done);
  // Of a subgroup that PrepareStorage had made room for, and that the session will not have after all.
  void ReturnStorage(SessionId session, const SubgroupSpec& spec);
  uint32_t BlockCount(const SubgroupSpec& spec) const;
  // See SchedulerActions::MakeRoom; answered by DataLoop::RoomMade.
  void MakeRoom(SessionId store, const FileOwner& owner, uint64_t bytes, uint64_t ticket);
  // The data thread has nothing of the session or store any more.
  void OnGone(SessionId session);

  // ---- Checkpoints: see CheckpointRuns::Options ----
  void MakeRoomForCopy(const SessionIdentity& identity, std::vector<bool> next, CheckpointRuns::Options::RoomMade done);
  void UseNextFiles(SessionId session, bool used);
  void HoldFiles(SessionId session, bool needed);
  // See SchedulerActions::FileUnused.
  void RemoveLeft(SessionId session, PathIndex path, FileId file);

  // ---- Paths ----
  // The path can be used again.
  void UseAgain(PathIndex path);
  // Housekeeping thread. A file on the path for each of these that has none there.
  void AddFiles(PathIndex path, const std::vector<std::pair<SessionId, std::shared_ptr<Storage>>>& storages);
  // Housekeeping thread. What new sessions reserve where.
  const std::vector<double>& shares() const { return shares_; }
  void SetShares(const std::vector<PathParameters>& parameters);

  const Map& all() const { return storages_; }

  // ---- A calibration's ----
  void Add(SessionId id, std::shared_ptr<Storage> storage) { storages_[id] = std::move(storage); }
  void Erase(SessionId id) { storages_.erase(id); }
  // Housekeeping thread.
  Status MakeFiles(Storage& storage, const FileOwner& owner, const std::vector<bool>& uses);

 private:
  Status Reserve(Storage& storage, const SessionIdentity& identity, uint64_t blocks, const std::vector<bool>& uses);
  void RemoveFiles(SessionId session, std::shared_ptr<Storage> storage);
  Status TakeCapacity(Storage& storage, uint32_t uid, const std::string& job, uint64_t bytes);
  void GiveCapacity(Storage& storage, uint64_t bytes);
  void GiveBlocks(Storage& storage, uint64_t blocks);

  const Parts parts_;
  std::vector<double> shares_;  // per path; housekeeping thread
  Map storages_;
};

}  // namespace mlpo
