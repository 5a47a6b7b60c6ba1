// Daemon: starts the parts, connects them and stops them; what each does is in its own file.
//
// Order of making: paths, pool, path queues, workers, data loop, checkpoints, session socket, the parts between these
// (Connect), control socket. Order of ending: sockets stop accepting; the data loop finishes what was accepted;
// sessions end and their files go; sockets, data loop, queues, workers, pool, paths.
//
// Owns all parts, and their state as a whole (starting, ready, draining, ending). All of it is the main thread's.
//
// Threads: main (this; Asio), data (data_loop.h), one a path queue, the workers, one for housekeeping (whatever may
// block on a file system or on memory), one for what nobody waits for (the doctor, the metrics file), one that writes
// the counters file, one that ends an end that hangs, some for each checkpoint. Main and these talk by posted
// functions.
#pragma once

#include <boost/asio/signal_set.hpp>
#include <boost/asio/steady_timer.hpp>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "daemon/adam/cores.h"
#include "daemon/adam/worker_pool.h"
#include "daemon/base/service_manager.h"
#include "daemon/base/unix_socket.h"
#include "daemon/calibration_runs.h"
#include "daemon/checkpoint_runs.h"
#include "daemon/config/config.h"
#include "daemon/control/control_server.h"
#include "daemon/control/live_counters.h"
#include "daemon/data_loop.h"
#include "daemon/garbage.h"
#include "daemon/io/buffer_pool.h"
#include "daemon/io/path.h"
#include "daemon/io/path_keeper.h"
#include "daemon/io/path_queue.h"
#include "daemon/io/uring_pool.h"
#include "daemon/node_shares.h"
#include "daemon/path_commands.h"
#include "daemon/path_records.h"
#include "daemon/session/session_server.h"
#include "daemon/session_hosting.h"
#include "daemon/status_reports.h"
#include "daemon/storages.h"
#include "daemon/threads.h"

namespace mlpo {

class Daemon {
 public:
  // `socket`: resolved. `service`: borrowed for the daemon's life. Errors say what could not be had and what to do;
  // nothing is left behind.
  static Result<std::unique_ptr<Daemon>> Create(Config config, const std::string& socket, ServiceManager* service);
  ~Daemon();

  // Serves until a signal or a drain request has been carried out. Returns the exit code.
  int Run();

 private:
  enum class State { kStarting, kReady, kDraining, kEnding };

  Daemon(Config config, ServiceManager* service) : config_(std::move(config)), service_(service) {}
  void Doing(const std::string& what, uint64_t pool_bytes = 0);
  Status OpenPaths();
  Status OpenPool();
  void GrowPool();
  Status StartQueues();
  Status StartLoop();
  Status OpenSockets(const std::string& socket);
  void StartCheckpoints();
  void Connect();
  std::vector<Path*> Paths() const;
  std::vector<PathKeeper*> Keepers() const;
  Status Ready() const;

  void EndInTime();
  void WaitForSignal();
  void Beat();
  void TellProgress(const Snapshot& snapshot);
  void BeginDrain(const char* why);
  void StopFast();
  void EndSessions();
  void MaybeFinish();
  const char* StateName(const Snapshot& snapshot) const;

  std::jthread end_deadline_;  // goes last: all below it ends by it
  const Config config_;
  ServiceManager* const service_;
  State state_ = State::kStarting;
  int64_t started_ns_ = 0;
  int exit_code_ = 0;

  Threads threads_;
  boost::asio::signal_set signals_{threads_.main};
  boost::asio::steady_timer drain_deadline_{threads_.main};
  boost::asio::steady_timer saves_deadline_{threads_.main};  // for saves whose sessions have ended, at the end
  bool saves_waited_for_ = false;
  boost::asio::steady_timer next_beat_{threads_.main};
  LiveCounters live_;

  std::vector<std::unique_ptr<Path>> paths_;
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
  std::unique_ptr<PathRecords> records_;
  std::shared_ptr<CheckpointRuns> checkpoints_;  // its threads may outlive the daemon
  BoundSocket socket_;
  SessionHosting hosting_;
  std::unique_ptr<SessionServer> sessions_;
  std::unique_ptr<ControlServer> control_;
  std::unique_ptr<Storages> storages_;
  std::unique_ptr<PathCommands> path_commands_;
  std::unique_ptr<NodeShares> node_shares_;
  std::unique_ptr<CalibrationRuns> calibrations_;
  std::unique_ptr<Garbage> garbage_;
  std::unique_ptr<StatusReports> reports_;
};

}  // namespace mlpo
