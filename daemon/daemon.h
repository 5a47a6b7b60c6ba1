// Daemon: wires the parts and lives in the main thread.
//
// Order of making: paths, pool, path queues, workers, data loop, sockets. Order of ending: sockets stop accepting; the
// data loop finishes what was accepted; sessions end and their files go; sockets, data loop, queues, workers, pool,
// paths.
//
// Threads: main (this; Asio), data (data_loop.h), one a path queue, the workers, one for housekeeping (whatever may
// block on a file system or on memory), one for what nobody waits for (the doctor, the metrics file), one that writes
// the counters file, one that ends an end that hangs, some for each checkpoint. Main and these talk by posted
// functions.
#pragma once

#include <atomic>
#include <boost/asio/io_context.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/thread_pool.hpp>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "daemon/adam/cores.h"
#include "daemon/adam/worker_pool.h"
#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/base/service_manager.h"
#include "daemon/base/unix_socket.h"
#include "daemon/checkpoint_runs.h"
#include "daemon/config/config.h"
#include "daemon/control/control_server.h"
#include "daemon/control/counters_file.h"
#include "daemon/control/live_counters.h"
#include "daemon/control/metrics.h"
#include "daemon/data_loop.h"
#include "daemon/io/buffer_pool.h"
#include "daemon/io/extent_store.h"
#include "daemon/io/path.h"
#include "daemon/io/path_keeper.h"
#include "daemon/io/path_queue.h"
#include "daemon/io/uring_pool.h"
#include "daemon/session/session_host.h"
#include "daemon/session/session_server.h"

namespace mlpo {

// What the paths can have updated by their declared limits, in parameters a second; 0: not all have declared theirs.
double ParametersPerS(const std::vector<PathConfig>& paths);

// What dead daemons left on these paths; `node`: "": of the configuration's own. For mlpo-daemon --gc, while no daemon
// runs there.
GcReport CollectGarbageOf(const Config& config, const std::string& node, bool dry_run);

class Daemon : public SessionHost {
 public:
  // `socket`: resolved. `service`: borrowed for the daemon's life. Errors say what could not be had and what to do;
  // nothing is left behind.
  static Result<std::unique_ptr<Daemon>> Create(Config config, const std::string& socket, ServiceManager* service);
  ~Daemon() override;

  // Serves until a signal or a drain request has been carried out. Returns the exit code.
  int Run();

 private:
  enum class State { kStarting, kReady, kDraining, kEnding };
  // A session's storage, made by its first registration; or that of a job's objects, made by the first large one.
  struct Storage {
    std::unique_ptr<ExtentStore> store;  // housekeeping thread
    uint64_t extents = 0;                // housekeeping thread: registered blocks
    std::string owner;                   // for messages
    uint32_t uid = 0;                    // main: whose quota
    std::string job;
    uint64_t quota_bytes = 0;  // main: that count there
    uint64_t blocks = 0;       // main: asked for
    uint32_t saves = 0;        // main: that need the files, though the session may have gone
    bool gone = false;         // main: the session has
  };

  Daemon(Config config, ServiceManager* service) : config_(std::move(config)), service_(service) {}
  void Doing(const std::string& what, uint64_t pool_bytes = 0);
  Status OpenPaths();
  Status OpenPool();
  void GrowPool();
  void PoolGrown(const Status& status);
  uint64_t PoolBytes() const;
  Status StartQueues();
  Status StartLoop();
  Status OpenSockets(const std::string& socket);
  std::vector<bool> UsedPaths() const;
  Status MakeFiles(Storage& storage, const FileOwner& owner, const std::vector<bool>& uses);
  Status Reserve(Storage& storage, const SessionIdentity& identity, uint64_t blocks, const std::vector<bool>& uses);
  void StartCheckpoints();
  void MakeRoomForCopy(const SessionIdentity& identity, std::vector<bool> next, CheckpointRuns::Options::RoomMade done);
  void UseNextFiles(SessionId session, bool used);
  void RemoveLeft(SessionId session, PathIndex path, FileId file);
  void HoldFiles(SessionId session, bool needed);
  void RemoveFiles(SessionId session, std::shared_ptr<Storage> storage);
  void CollectGarbage(const GcRequest& request, std::function<void(Result<std::string>)> answer);
  GcReport RestsOfSaves(bool dry_run);
  // mlpo-ctl paths
  void CommandPath(const PathCommand& command, std::function<void(Result<std::string>)> answer);
  void Disable(PathIndex path, std::function<void(Result<std::string>)> answer);
  void Evacuate(PathIndex path, std::function<void(Result<std::string>)> answer);
  void Enable(PathIndex path, std::function<void(Result<std::string>)> answer);
  void Retaken(PathIndex path, const Status& taken, const std::function<void(Result<std::string>)>& answer);
  void Evacuated(PathIndex path);
  void UseAgain(PathIndex path);
  void AddFiles(PathIndex path, const std::vector<std::pair<SessionId, std::shared_ptr<Storage>>>& storages);
  void MakeRoom(SessionId store, const FileOwner& owner, uint64_t bytes, uint64_t ticket);
  void Probe(PathIndex path, uint64_t end);  // data thread

  void EndInTime();
  void StoreCounters();
  void LogPathStates(const std::vector<PathSnapshot>& paths);
  void WriteMetrics();
  Status ShowOutside(const std::string& socket);
  void WaitForSignal();
  void Beat();
  void TellProgress(const Snapshot& snapshot);
  void BeginDrain(const char* why);
  void StopFast();
  void EndSessions();
  void MaybeFinish();
  void Bench(const BenchRequest& request, std::function<void(Result<std::string>)> answer);
  struct BenchRun;
  void StopBench();
  void BenchUnwanted(const char* why);                     // a constant
  void LendToBench(const std::shared_ptr<BenchRun>& run);  // data thread
  void EndBench(const std::shared_ptr<BenchRun>& run);
  void StoreRecords();
  void SaveRecords();
  std::string SaveRecord(size_t path, const PathRecord& record);
  std::vector<std::pair<size_t, PathRecord>> TakeLifetimes(const Snapshot& snapshot);
  void RecordTrace(double seconds, std::function<void(Trace)> answer);
  void Examine(std::function<void(std::string report)> answer);
  void TakeSnapshot(std::function<void(Snapshot)> answer);
  Status TakeCapacity(Storage& storage, uint32_t uid, const std::string& job, uint64_t bytes);
  void GiveCapacity(Storage& storage, uint64_t bytes);
  void FillQuotas(Snapshot* snapshot) const;
  void FillPool(PoolSnapshot* pool) const;
  void FillFixed(Snapshot* snapshot) const;
  const char* StateName(const Snapshot& snapshot) const;

  // SessionHost
  void SessionReady(const SessionIdentity& identity, std::shared_ptr<Areas> areas) override;
  uint32_t BlockCount(const SubgroupSpec& spec) const override;
  void PrepareStorage(const SessionIdentity& identity, const SubgroupSpec& spec,
                      std::function<void(Status)> done) override;
  void AllocateArena(uint64_t bytes, int numa_node, std::shared_ptr<std::atomic<bool>> cancelled,
                     std::function<void(Result<std::shared_ptr<Memfd>>)> done) override;
  void AddSubgroup(SessionId session, SubgroupSpec spec, std::function<void()> done) override;
  void SetStaging(SessionId session, std::byte* data, uint64_t bytes, std::function<void()> done) override;
  void BeginCheckpoint(const SessionIdentity& identity, const CheckpointRequest& request,
                       std::function<void(Result<CheckpointBegun>)> done) override;
  void BeginRestore(const SessionIdentity& identity, const RestoreRequest& request,
                    std::function<void(Result<RestoreBegun>)> done) override;
  void SessionEnded(const SessionIdentity& identity) override;
  void Dispose(std::shared_ptr<void> memory) override;
  void OnGone(SessionId session);

  template <class F>
  void PostMain(F&& f);
  template <class F>
  void PostHousekeeping(F&& f);

  std::jthread end_deadline_;  // goes last: all below it ends by it
  const Config config_;
  ServiceManager* const service_;
  State state_ = State::kStarting;
  int64_t started_ns_ = 0;
  int exit_code_ = 0;

  boost::asio::io_context io_;
  boost::asio::thread_pool housekeeping_{1};
  boost::asio::thread_pool lookout_{1};  // doctor, gc, metrics file, paths taken back: no session waits
  boost::asio::signal_set signals_{io_};
  boost::asio::steady_timer drain_deadline_{io_};
  boost::asio::steady_timer saves_deadline_{io_};  // for saves whose sessions have ended, at the end
  bool saves_waited_for_ = false;
  boost::asio::steady_timer next_beat_{io_};
  boost::asio::steady_timer trace_end_{io_};
  uint64_t traces_ = 0;  // asked for
  boost::asio::steady_timer counters_due_{io_};
  boost::asio::steady_timer metrics_due_{io_};
  std::atomic<bool> metrics_written_{false};  // relaxed: set by lookout_, read after its end
  RateLimit metrics_failures_{60 * kNsPerS};
  LiveCounters live_;

  std::vector<std::unique_ptr<Path>> paths_;
  std::vector<PathParameters> parameters_;  // per path, as known at the start
  std::vector<double> shares_;              // what new sessions reserve; housekeeping thread
  std::vector<PathRecord> records_;         // per path, as last saved
  std::vector<uint64_t> written_before_;    // per path, by earlier daemons
  boost::asio::steady_timer records_due_{io_};
  std::weak_ptr<BenchRun> bench_;  // the one under way
  uint64_t arenas_limit_bytes_ = 0;
  std::unique_ptr<Cores> cores_;  // until the workers run
  std::unique_ptr<BufferPool> pool_;
  std::unique_ptr<UringPool> uring_pool_;
  DoneJobs done_jobs_;
  TransferResults transfers_;
  std::unique_ptr<WorkerPool> workers_;
  std::vector<std::unique_ptr<PathQueue>> queues_;
  std::unique_ptr<DataLoop> loop_;
  std::vector<std::unique_ptr<PathKeeper>> keepers_;  // per path; they end before what they post to
  std::vector<std::string> path_states_;              // per path, as last logged
  std::vector<bool> disabled_;                        // per path, by command
  std::vector<uint32_t> enabling_;                    // per path: Enables under way
  std::shared_ptr<CheckpointRuns> checkpoints_;       // its threads may outlive the daemon
  BoundSocket socket_;
  std::unique_ptr<SessionServer> sessions_;
  std::unique_ptr<CountersFile> counters_;
  std::unique_ptr<MetricsHttp> metrics_http_;
  std::unique_ptr<ControlServer> control_;
  std::map<SessionId, std::shared_ptr<Storage>> storages_;
};

}  // namespace mlpo
