// StatusReports: what is told of the daemon: snapshots (status and metrics), the doctor's report, traces, the counters
// file, metrics over HTTP and in a file.
//
// Owns these two files and the HTTP server; asks all other parts, and changes none. (That a path's state has changed is
// found here, and passed on to PathCommands.)
//
// Threads: main, where functions are called and `answer` is; they return at once. What only the data thread knows is
// asked for by posted functions. The lookout probes for the doctor and writes the metrics file; counters file and HTTP
// server have threads of their own, which take what main and data have left in LiveCounters.
#pragma once

#include <atomic>
#include <boost/asio/steady_timer.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "daemon/adam/worker_pool.h"
#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/base/status.h"
#include "daemon/config/config.h"
#include "daemon/control/counters_file.h"
#include "daemon/control/live_counters.h"
#include "daemon/control/metrics.h"
#include "daemon/data_loop.h"
#include "daemon/io/buffer_pool.h"
#include "daemon/io/path.h"
#include "daemon/io/path_queue.h"
#include "daemon/node_shares.h"
#include "daemon/path_commands.h"
#include "daemon/path_records.h"
#include "daemon/session/session_server.h"
#include "daemon/threads.h"
#include "daemon/types/snapshot.h"
#include "daemon/types/trace.h"

namespace mlpo {

class StatusReports {
 public:
  // Borrowed, as long as anything that was posted may be carried out.
  struct Parts {
    const Config* config = nullptr;
    Threads* threads = nullptr;
    DataLoop* loop = nullptr;
    SessionServer* sessions = nullptr;
    const BufferPool* pool = nullptr;
    const WorkerPool* workers = nullptr;
    std::vector<Path*> paths;
    std::vector<const PathQueue*> queues;  // per path
    const PathRecords* records = nullptr;
    PathCommands* commands = nullptr;
    const NodeShares* shares = nullptr;
    LiveCounters* live = nullptr;
    std::string socket;  // of sessions
    uint64_t arenas_limit_bytes = 0;
    int64_t started_ns = 0;
    std::function<const char*(const Snapshot&)> state_name;
  };

  explicit StatusReports(Parts parts);

  // ---- Start and end ----
  // What is told without the control socket: the counters file, and metrics over HTTP. `socket`: as resolved.
  Status ShowOutside(const std::string& socket);
  // Leaves for the counters file that this thread goes round its loop, and what only it knows. Again and again, from
  // the first call on; so is WriteMetrics, which is called if there is a metrics file.
  void StoreCounters();
  void WriteMetrics();
  void PoolGrown(const Status& status);
  // Ends the HTTP server and the counters file.
  void StopShowing();
  // After the lookout's end.
  void RemoveMetricsFile();

  // ---- What is asked for ----
  void TakeSnapshot(std::function<void(Snapshot)> answer);
  // What the machine is like for this daemon. Probes may take seconds.
  void Examine(std::function<void(std::string report)> answer);
  // Until the time has come or StopTrace. Takes the place of one that goes on, which is not answered.
  void RecordTrace(double seconds, std::function<void(Trace)> answer);
  void StopTrace() { trace_end_.cancel(); }

 private:
  uint64_t PoolBytes() const;
  void FillQuotas(Snapshot* snapshot) const;
  void FillPool(PoolSnapshot* pool) const;
  void FillFixed(Snapshot* snapshot) const;

  const Parts parts_;
  boost::asio::steady_timer trace_end_;
  uint64_t traces_ = 0;  // asked for
  boost::asio::steady_timer counters_due_;
  boost::asio::steady_timer metrics_due_;
  std::atomic<bool> metrics_written_{false};  // relaxed: set by the lookout, read after its end
  RateLimit metrics_failures_{60 * kNsPerS};
  std::unique_ptr<CountersFile> counters_;
  std::unique_ptr<MetricsHttp> metrics_http_;
};

}  // namespace mlpo
