// CheckpointRuns: carries the checkpoints and restores of sessions through the threads.
//
// A save: files of the part (its thread), room for what training writes meanwhile (housekeeping, by `make_room`), TAKE
// (data), what is handed over or cloned (its thread), writing of the rest (data, path queues, the part's writers),
// commit (its thread), SAVED (data).
//
// Blocks on a persistent path of the part's own file system are not copied: they are cloned, where it can (reflink), or
// the session's file there becomes one of the part's, and the session goes on in another. What of this fails is copied.
// A restore: finding and reading manifests (its thread), RESTORE (data, its readers).
//
// Begin and Restore: the main thread, where `done` is called, too, at most once: not if it hangs. Each save and each
// restore has threads of its own: whatever hangs in somebody's directory, or in files that a client has passed and
// serves itself, holds up that one and nothing else. Nor does the daemon's end wait for it: these threads, and this
// object with them, stay until they come back, and find then that Stop has been called. How many of a user's may stay
// so has a limit: threads have one, too.
#pragma once

#include <boost/asio/io_context.hpp>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "daemon/base/loose_threads.h"
#include "daemon/base/status.h"
#include "daemon/checkpoint/attempt_table.h"
#include "daemon/checkpoint/part_files.h"
#include "daemon/checkpoint/part_reader.h"
#include "daemon/checkpoint/part_set.h"
#include "daemon/checkpoint/restore_plan.h"
#include "daemon/data_loop.h"
#include "daemon/io/path.h"
#include "daemon/io/path_keeper.h"
#include "daemon/part_manifest.h"
#include "daemon/types/checkpoint.h"
#include "daemon/types/gc_report.h"
#include "daemon/types/session_identity.h"
#include "daemon/types/subgroup_spec.h"

namespace mlpo {

class CheckpointRuns : public std::enable_shared_from_this<CheckpointRuns> {
 public:
  struct Options {
    boost::asio::io_context* main = nullptr;  // borrowed, as the loop is
    DataLoop* loop = nullptr;
    struct Place {
      Path* path = nullptr;
      PathKeeper* keeper = nullptr;  // its: whatever looks at its file system asks it, as that may hang
      std::string directory;         // its
      bool persistent = false;
      double write_bytes_per_s = 0;  // as declared or measured; 0: not known
    };
    std::vector<Place> paths;
    std::string node;           // of the working files
    double copy_share = 0.05;   // [checkpoint] copy_share
    uint32_t writers = 2;       // threads a part
    uint32_t readers = 4;       // threads a restore
    uint64_t buffer_bytes = 0;  // of the pool
    // Makes room on the paths for a second copy of the session's state; on those of `next` in a file of its own.
    // `done`, in the main thread, is told these: per path, kNone where there is none; empty, if the session has none at
    // all.
    using RoomMade = std::function<void(Result<std::vector<FileId>>)>;
    std::function<void(const SessionIdentity&, std::vector<bool> next, RoomMade done)> make_room;
    // The session goes on in these, or never will.
    std::function<void(SessionId, bool used)> next_files_used;
    // A save of the session needs its files: until the second call.
    std::function<void(SessionId, bool needed)> hold_files;
  };
  struct Save {
    std::string directory;
    std::string tag;
    uint64_t step = 0;
    AttemptId attempt;  // zero: chosen here
    bool overwrite = false;
    uint64_t bytes = 0;            // that the state has at most
    uint32_t ranks_here = 0;       // of the job, connected to this daemon
    SessionId newest_session = 0;  // the last that anybody has
    PassedFiles files;             // of a client of another user: its session has to see it to its end
  };
  struct Source {
    std::string directory;
    std::optional<std::string> tag;  // nullopt: the newest that is complete
    AttemptId attempt;               // of the tag; zero: the one that counts
    PassedFiles files;               // instead of both
  };
  struct Begun {
    AttemptId attempt;
    uint32_t handle = 0;
  };
  struct Found {
    AttemptId attempt;
    std::string tag;
    uint64_t step = 0;
    uint32_t world_size = 1;
    uint32_t handle = 0;
  };

  // Owned by a shared_ptr: its threads have it, too.
  explicit CheckpointRuns(Options options);
  // Nothing is posted to main and data any more from the return on, and no path is used. Waits a little for steps that
  // are being carried out, and for those on the paths themselves until they end.
  void Stop();

  void Begin(const SessionIdentity& identity, const Save& save, std::function<void(Result<Begun>)> done);
  // `subgroups`: of the session, as registered.
  void Restore(const SessionIdentity& identity, const Source& source, std::vector<SubgroupSpec> subgroups,
               std::function<void(Result<Found>)> done);
  // `last`: its job has no other here.
  void SessionEnded(const SessionIdentity& identity, bool last);

  // What earlier daemons left, by the journals of all paths: these are read before it returns, and so before any save
  // begins; the rest has a thread of its own. Once, at the start.
  void CleanUp();
  // The same by command: what is recorded of saves that are not under way. May hang: not in a thread that others need.
  GcReport CollectGarbage(bool dry_run);

 private:
  struct Run;
  // Has threads that may hang: there is one as long as anything of the save, or of the restore, is in one of them.
  struct Ticket {
    const uint32_t uid;
    const SessionId session;
    bool ended = false;  // the session has; main thread
  };
  // How the blocks of a path get into a part.
  enum class Way : uint8_t { kCopied, kCloned, kHandedOver };

  // What a restore reads from: parts, and how to open their files.
  struct Parts {
    FoundAttempt attempt;
    RestorePlan::Parts parts;
    PartFileOpener open;
  };

  // While it lives, and is true, the paths are there.
  class OnPaths;
  // A manifest that a client has passed; as long as it lives, its file's bytes count as its user's.
  struct PassedManifest;

  // A key that is in one of the sets below as long as this lives. Any thread.
  template <class T>
  class Entry {
   public:
    Entry(std::shared_ptr<CheckpointRuns> runs, std::set<T> CheckpointRuns::*set, T key)
        : runs_(std::move(runs)), set_(set), key_(std::move(key)) {}
    ~Entry() {
      const std::lock_guard lock(runs_->mutex_);
      (runs_.get()->*set_).erase(key_);
    }
    Entry(const Entry&) = delete;
    Entry& operator=(const Entry&) = delete;

   private:
    const std::shared_ptr<CheckpointRuns> runs_;
    std::set<T> CheckpointRuns::*const set_;
    const T key_;
  };

  static AttemptTable::Save SaveOf(const Run& run);
  Result<std::shared_ptr<Ticket>> TakeTicket(const SessionIdentity& identity);
  // nullptr: somebody has put it there before.
  template <class T>
  std::unique_ptr<Entry<T>> Enter(std::set<T> CheckpointRuns::*set, const T& key);
  Status Enter(Run& run);
  void Step(const std::shared_ptr<Run>& run, std::function<void()> work);
  void ToMain(std::function<void()> work);
  void ToData(std::function<void()> work);
  static Result<UniqueFd> OpenJournal(const Path& path, bool make, std::string* shown);
  static Status NoAnswer(const Path& path);
  Result<UniqueFd> OpenJournalFor(const JournalRecord& record, std::string* shown);
  static Result<Parts> FindParts(const SessionIdentity& identity, const Source& source,
                                 const std::vector<std::vector<TargetTensor>>& subgroups);
  Result<std::shared_ptr<PassedManifest>> CountManifest(uint32_t uid, uint64_t bytes, const std::string& shown);
  Result<Parts> PassedParts(const PassedFiles& files, uint32_t uid);
  Result<std::unique_ptr<PartFiles>> MakeFiles(Run& run);
  void BeginFiles(const std::shared_ptr<Run>& run);
  Status ChooseWays(Run& run);
  void BeginTaking(const std::shared_ptr<Run>& run);
  void Taken(const std::shared_ptr<Run>& run, const std::shared_ptr<TakenState>& state);
  // What is to be copied, by whom, and what is not; for the log.
  struct Placed {
    std::shared_ptr<PartWriter> writer;  // nullptr: nothing is
    uint64_t copied_bytes = 0;
    uint64_t cloned_bytes = 0;
    uint64_t handed_over_bytes = 0;
  };
  Result<Placed> Place(Run& run, TakenState& state);
  Result<std::vector<uint32_t>> HandOver(Run& run, TakenState& state) const;
  bool Clone(const Run& run, const TakenState& state) const;
  void BeginRestoring(const std::shared_ptr<Run>& run, const Source& source, const std::vector<SubgroupSpec>& subgroups,
                      const std::function<void(Result<Found>)>& done);
  void Copied(const std::shared_ptr<Run>& run, const Failure& failure, std::shared_ptr<Manifest> manifest);
  void DropNext(const std::shared_ptr<Run>& run);
  void End(const std::shared_ptr<Run>& run, const Status& status);

  const Options options_;
  AttemptTable attempts_;                                // main thread
  uint32_t next_handle_ = 1;                             // main thread
  std::vector<std::weak_ptr<Ticket>> tickets_;           // main thread
  std::multimap<SessionId, std::weak_ptr<Run>> passed_;  // main thread: saves into files that a client has passed

  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopped_ = false;                               // guarded by mutex_
  uint32_t steps_ = 0;                                 // likewise: posted, and not carried out
  uint32_t on_paths_ = 0;                              // likewise: threads that use the paths
  std::set<SessionId> saving_;                         // likewise: sessions with a save that has not ended
  std::set<std::pair<AttemptId, uint32_t>> recorded_;  // likewise: attempts and ranks that are saved into our journal
  std::map<uint32_t, uint64_t> manifest_bytes_;        // likewise: by user, of files that its clients have passed
};

}  // namespace mlpo
