// ControlServer: answers questions about the daemon on its control socket (JSON-RPC 2.0, one request a line).
//
// Methods: status, sessions, paths, metrics, version; trace_start, trace_stop and trace_read; checkpoint_request, of
// the peer's own sessions, or all for administrators; share_figures and share, of a job of the peer's own that has
// sessions here; drain, doctor, bench, gc, paths_disable, paths_enable and paths_evacuate, for administrators. Root,
// the daemon's uid and members of the admin group see and command everything; everyone else sees totals, paths, pool
// and the sessions of its own uid (SO_PEERCRED decides, at connect). Peers are not trusted: requests are at most 64 KiB
// and answered one at a time, so that one who does not read costs one answer's memory; idle connections are closed;
// connections are limited, per uid too; at most one snapshot is in the making for all of them.
//
// Owner: the main thread, which runs the io_context; everything here happens there, the handlers are called there and
// `snapshot` answers there. The io_context outlives the server; an answer that comes after the server is dropped.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "daemon/base/status.h"
#include "daemon/base/unix_socket.h"
#include "daemon/types/node_figures.h"
#include "daemon/types/snapshot.h"
#include "daemon/types/trace.h"

namespace boost::asio {
class io_context;
}

namespace mlpo {

// What mlpo-ctl bench asks for.
struct BenchRequest {
  std::vector<std::string> paths;  // names or directories; none: all
  double seconds = 0.7;            // of each measurement
};

// What mlpo-ctl paths disable, enable and evacuate ask for.
struct PathCommand {
  std::string name;  // one of these
  std::string path;  // name or directory
};

// What mlpo-ctl gc asks for.
struct GcRequest {
  bool dry_run = false;
  std::string node;  // "": the daemon's own
};

// What a trainer tells of a path that nodes share: what each of them has told its own.
struct ShareRequest {
  uint32_t uid = 0;  // the peer's
  std::string job;
  std::string path;                // its name
  std::vector<NodeFigures> nodes;  // busy_s: since the last time
  size_t me = 0;                   // among them
};

struct ControlHandlers {
  std::function<void(std::function<void(Snapshot)>)> snapshot;                  // answers now or later
  std::function<void()> drain;                                                  // begins to drain; may be called again
  std::function<void(std::function<void(std::string json)>)> doctor = nullptr;  // examines the machine; answers later
  // Measures the paths; answers later, with JSON or an error. One at a time; stop_bench ends it soon, with an error.
  std::function<void(const BenchRequest&, std::function<void(Result<std::string> json)>)> bench = nullptr;
  std::function<void()> stop_bench = nullptr;
  std::function<void(const GcRequest&, std::function<void(Result<std::string> json)>)> gc = nullptr;  // answers later
  // Answers when the command is in force, with JSON, or with why it is not.
  std::function<void(const PathCommand&, std::function<void(Result<std::string> json)>)> path = nullptr;
  // Records for so long, or until trace_stop; answers later. One at a time.
  std::function<void(double seconds, std::function<void(Trace)>)> trace = nullptr;
  std::function<void()> trace_stop = nullptr;
  // Asks trainers for a checkpoint: sessions of this user (nullopt: of all), of this job (nullopt: of all). Answers
  // later, with how many there are.
  std::function<void(std::optional<uint32_t> uid, std::optional<std::string> job, std::function<void(uint64_t)>)>
      request_checkpoint = nullptr;
  // What this node has to tell the others of a job of this user, and what they have told.
  std::function<void(uint32_t uid, const std::string& job, std::function<void(Result<std::string> json)>)>
      share_figures = nullptr;
  std::function<void(const ShareRequest&, std::function<void(Result<std::string> json)>)> share = nullptr;
};

struct ControlOptions {
  std::string path;                    // "<socket>.ctl"
  mode_t mode = 0666;                  // credentials decide what a peer sees; the folder's mode who reaches the socket
  std::optional<gid_t> group;          // the socket file's group
  std::optional<gid_t> admin_group;    // sees and commands everything
  int64_t idle_ns = 30'000'000'000;    // between requests, and for an answer to be read
  int64_t answer_ns = 10'000'000'000;  // for a snapshot; then the peer gets an error
};

class ControlServer {
 public:
  // Binds (errors as BindUnixSocket's) and begins to accept as soon as the io_context runs.
  static Result<std::unique_ptr<ControlServer>> Open(boost::asio::io_context& io, const ControlOptions& options,
                                                     ControlHandlers handlers);
  // Stops accepting, closes all connections and removes the socket.
  ~ControlServer();
  ControlServer(const ControlServer&) = delete;
  ControlServer& operator=(const ControlServer&) = delete;

 private:
  class Core;
  explicit ControlServer(std::shared_ptr<Core> core);

  std::shared_ptr<Core> core_;
};

}  // namespace mlpo
