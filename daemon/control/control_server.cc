#include "daemon/control/control_server.h"

#include <fcntl.h>
#include <unistd.h>

#include <utility>  // before Asio: Boost 1.74 needs it in C++20
//
#include <boost/asio/io_context.hpp>
#include <boost/asio/local/stream_protocol.hpp>
#include <boost/asio/steady_timer.hpp>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <vector>

#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/control/connection.h"
#include "daemon/control/json_rpc.h"
#include "daemon/control/status_json.h"
#include "daemon/control/trace_json.h"

namespace mlpo {

namespace asio = boost::asio;
using asio::local::stream_protocol;
using boost::system::error_code;

namespace {

constexpr size_t kMaxConnections = 64;
constexpr size_t kMaxOfOthers = 48;  // of all who are no administrators: these always get in
constexpr size_t kMaxOfOneUid = 8;
constexpr double kMaxTraceSeconds = 60;
constexpr size_t kTracePiece = 4096;                   // records an answer
constexpr auto kTraceKept = std::chrono::seconds(60);  // for who does not fetch it
constexpr auto kAcceptPause = std::chrono::milliseconds(100);
constexpr std::string_view kPathMethods = "paths_";

bool TakesParameters(const std::string& method) {
  return method == "bench" || method == "gc" || method == "checkpoint_request" || method == "share" ||
         method == "share_figures" || method.starts_with("trace_") || method.starts_with(kPathMethods);
}

}  // namespace

// What outlives the server while handlers are pending; `stopped_` makes those do nothing.
class ControlServer::Core : public std::enable_shared_from_this<ControlServer::Core> {
 public:
  Core(asio::io_context& io, const ControlOptions& options, ControlHandlers handlers, BoundSocket bound)
      : options_(options),
        handlers_(std::move(handlers)),
        bound_(std::move(bound)),
        acceptor_(io),
        pause_(io),
        answer_deadline_(io),
        trace_kept_(io) {}

  Status Start();
  void Stop();

 private:
  struct Waiter {
    std::weak_ptr<Connection> connection;
    RpcRequest request;
  };

  void Accept();
  void Admit(stream_protocol::socket socket);
  bool IsAdmin(const Peer& peer) const;
  bool HasRoomFor(const Peer& peer) const;
  void Handle(const std::shared_ptr<Connection>& connection, const std::string& line);
  void Drain(const std::shared_ptr<Connection>& connection, const RpcRequest& request);
  void Doctor(const std::shared_ptr<Connection>& connection, RpcRequest request);
  void Bench(const std::shared_ptr<Connection>& connection, RpcRequest request);
  void CommandPath(const std::shared_ptr<Connection>& connection, RpcRequest request);
  void CollectGarbage(const std::shared_ptr<Connection>& connection, RpcRequest request);
  std::function<void(Result<std::string>)> Later(const std::shared_ptr<Connection>& connection, RpcRequest request);
  void RequestCheckpoint(const std::shared_ptr<Connection>& connection, RpcRequest request);
  void ShareFigures(const std::shared_ptr<Connection>& connection, RpcRequest request);
  void Share(const std::shared_ptr<Connection>& connection, RpcRequest request);
  // The recording: one at a time, kept until it has been read, or for a minute.
  struct Recording {
    uint64_t number = 0;
    uint32_t uid = 0;  // who asked for it
    bool admin = false;
    std::optional<Trace> trace;  // once it has ended
    uint64_t next = 0;           // record that the next piece begins with
  };
  void StartTrace(const std::shared_ptr<Connection>& connection, const RpcRequest& request);
  void ReadTrace(const std::shared_ptr<Connection>& connection, const RpcRequest& request);
  void KeepTraceForAWhile();
  bool Refused(const std::shared_ptr<Connection>& connection, const RpcRequest& request);
  void AskForSnapshot();
  void AnswerAll(const Snapshot& snapshot);
  void FailAll(RpcError code, const std::string& message);
  static void Reply(const std::shared_ptr<Connection>& connection, const RpcRequest& request, std::string line);

  const ControlOptions options_;
  const ControlHandlers handlers_;
  BoundSocket bound_;
  stream_protocol::acceptor acceptor_;
  asio::steady_timer pause_;
  asio::steady_timer answer_deadline_;
  std::set<std::shared_ptr<Connection>> connections_;
  const Connection* bench_for_ = nullptr;  // who waits for a calibration
  bool benching_ = false;                  // one is under way; who asked for it may have gone
  // One snapshot at a time. Who asks while one is in the making waits for the next: the present one may have been
  // taken before what the peer wants to see.
  bool snapshot_asked_ = false;
  uint64_t snapshot_number_ = 0;
  std::vector<Waiter> asking_, next_;
  std::vector<Waiter> patients_;  // who wait for the doctor
  RateLimit refusals_{10 * kNsPerS};
  std::optional<Recording> recording_;
  uint64_t traces_ = 0;
  asio::steady_timer trace_kept_;
  bool stopped_ = false;
};

Status ControlServer::Core::Start() {
  // Asio owns a duplicate; the bound socket keeps the name and its lock.
  UniqueFd listening(::fcntl(bound_.fd(), F_DUPFD_CLOEXEC, 0));
  if (!listening) return Status::Errno(errno, "duplicating the control socket");
  error_code error;
  acceptor_.assign(stream_protocol(), listening.get(), error);
  if (error) return Status::Errno(error.value(), "control socket " + options_.path);
  listening.release();
  Accept();
  return Status();
}

void ControlServer::Core::Stop() {
  stopped_ = true;
  error_code ignored;  // closing cannot fail in a way that could be answered
  acceptor_.close(ignored);
  pause_.cancel(ignored);
  answer_deadline_.cancel(ignored);
  trace_kept_.cancel(ignored);
  const std::set<std::shared_ptr<Connection>> open = std::exchange(connections_, {});
  for (const auto& connection : open) connection->Close();
  bound_ = BoundSocket();
}

void ControlServer::Core::Accept() {
  acceptor_.async_accept([self = shared_from_this()](error_code error, stream_protocol::socket socket) {
    if (self->stopped_) return;
    if (!error) {
      self->Admit(std::move(socket));
      self->Accept();
      return;
    }
    if (error == asio::error::connection_aborted || error == asio::error::interrupted) {
      self->Accept();
      return;
    }
    // Out of descriptors or memory: try again later rather than spin.
    if (uint64_t suppressed = 0; self->refusals_.Allow(NowNs(), &suppressed))
      spdlog::warn("event=control_accept_failed error=\"{}\" suppressed={}", error.message(), suppressed);
    self->pause_.expires_after(kAcceptPause);
    self->pause_.async_wait([self](error_code cancelled) {
      if (!cancelled && !self->stopped_) self->Accept();
    });
  });
}

bool ControlServer::Core::IsAdmin(const Peer& peer) const {
  return peer.uid == 0 || peer.uid == ::geteuid() || (options_.admin_group && peer.InGroup(*options_.admin_group));
}

bool ControlServer::Core::HasRoomFor(const Peer& peer) const {
  if (IsAdmin(peer)) return connections_.size() < kMaxConnections;
  size_t same = 0, others = 0;
  for (const auto& connection : connections_) {
    same += connection->peer().uid == peer.uid ? 1 : 0;
    others += IsAdmin(connection->peer()) ? 0 : 1;
  }
  return connections_.size() < kMaxConnections && others < kMaxOfOthers && same < kMaxOfOneUid;
}

void ControlServer::Core::Admit(stream_protocol::socket socket) {
  Result<Peer> peer = PeerOf(socket.native_handle());
  const bool cloexec = ::fcntl(socket.native_handle(), F_SETFD, FD_CLOEXEC) == 0;  // Asio's accept leaves it open
  const bool room = peer.ok() && HasRoomFor(*peer);
  if (!room || !cloexec) {
    if (uint64_t suppressed = 0; refusals_.Allow(NowNs(), &suppressed))
      spdlog::warn("event=control_refused uid={} reason=\"{}\" suppressed={}",
                   peer.ok() ? std::to_string(peer->uid) : "unknown",
                   !peer.ok() ? peer.status().message()
                   : room     ? "FD_CLOEXEC"
                              : "too many connections",
                   suppressed);
    error_code ignored;  // it is closed anyway; without room in its buffer the peer sees the end only
    socket.non_blocking(true, ignored);
    socket.write_some(asio::buffer(RpcErrorLine("null", RpcError::kBusy, "too many control connections: try later")),
                      ignored);
    return;
  }
  std::weak_ptr<Core> weak = weak_from_this();
  Connection::Hooks hooks;
  hooks.request = [weak](const std::shared_ptr<Connection>& connection, std::string line) {
    if (const auto self = weak.lock(); self && !self->stopped_) self->Handle(connection, line);
  };
  hooks.closed = [weak](const Connection* closed) {
    const auto self = weak.lock();
    if (!self) return;
    if (self->bench_for_ == closed) {
      self->bench_for_ = nullptr;
      self->handlers_.stop_bench();
    }
    for (auto it = self->connections_.begin(); it != self->connections_.end(); ++it) {
      if (it->get() != closed) continue;
      self->connections_.erase(it);
      break;
    }
  };
  auto connection = std::make_shared<Connection>(std::move(socket), std::move(*peer),
                                                 std::chrono::nanoseconds(options_.idle_ns), std::move(hooks));
  connections_.insert(connection);
  connection->Start();
}

void ControlServer::Core::Reply(const std::shared_ptr<Connection>& connection, const RpcRequest& request,
                                std::string line) {
  connection->Answer(request.notification ? std::string() : std::move(line));
}

void ControlServer::Core::Handle(const std::shared_ptr<Connection>& connection, const std::string& line) {
  std::string refusal;
  std::optional<RpcRequest> request = ParseRpc(line, &refusal);
  if (!request) {
    connection->Answer(std::move(refusal));
  } else if (!request->params.empty() && !TakesParameters(request->method)) {
    Reply(connection, *request, RpcErrorLine(request->id, RpcError::kInvalidParams, "method takes no parameters"));
  } else if (request->method == "bench") {
    Bench(connection, std::move(*request));
  } else if (request->method.starts_with(kPathMethods)) {
    CommandPath(connection, std::move(*request));
  } else if (request->method == "gc") {
    CollectGarbage(connection, std::move(*request));
  } else if (request->method == "checkpoint_request") {
    RequestCheckpoint(connection, std::move(*request));
  } else if (request->method == "share_figures") {
    ShareFigures(connection, std::move(*request));
  } else if (request->method == "share") {
    Share(connection, std::move(*request));
  } else if (request->method == "drain") {
    Drain(connection, *request);
  } else if (request->method == "trace_start") {
    StartTrace(connection, *request);
  } else if (request->method == "trace_read" || request->method == "trace_stop") {
    ReadTrace(connection, *request);
  } else if (request->method == "doctor") {
    Doctor(connection, std::move(*request));
  } else if (request->method == "status" || request->method == "sessions" || request->method == "paths" ||
             request->method == "metrics" || request->method == "version") {
    (snapshot_asked_ ? next_ : asking_).push_back({connection, std::move(*request)});
    if (!snapshot_asked_) AskForSnapshot();
  } else {
    Reply(connection, *request,
          RpcErrorLine(request->id, RpcError::kNoMethod,
                       "no such method; known: status, sessions, paths, metrics, trace_start, trace_stop, trace_read, "
                       "checkpoint_request, share_figures, share, doctor, version, bench, gc, paths_disable, "
                       "paths_enable, paths_evacuate, drain"));
  }
}

// Whether the peer may not command the daemon; it has its answer then.
bool ControlServer::Core::Refused(const std::shared_ptr<Connection>& connection, const RpcRequest& request) {
  if (IsAdmin(connection->peer())) return false;
  Reply(connection, request,
        RpcErrorLine(request.id, RpcError::kNotPermitted,
                     request.method + " is for root, the daemon's user and members of its admin group"));
  return true;
}

// Whoever may ask for status may; sessions of others have no names for him.
void ControlServer::Core::StartTrace(const std::shared_ptr<Connection>& connection, const RpcRequest& request) {
  const nlohmann::json params = nlohmann::json::parse(request.params.empty() ? "{}" : request.params, nullptr, false);
  const auto seconds = params.find("seconds");
  if (seconds == params.end() || !seconds->is_number() || !(seconds->get<double>() > 0) ||
      seconds->get<double>() > kMaxTraceSeconds) {
    return Reply(connection, request,
                 RpcErrorLine(request.id, RpcError::kInvalidParams, "\"seconds\" is above 0 and at most 60"));
  }
  const bool admin = IsAdmin(connection->peer());
  // An administrator's takes the place of a user's, and of one that only waits to be read; so does the same user's.
  const bool ended = recording_ && recording_->trace;
  const bool gives_way =
      !recording_ || (admin && (ended || !recording_->admin)) || (ended && recording_->uid == connection->peer().uid);
  if (!gives_way) {
    return Reply(connection, request,
                 RpcErrorLine(request.id, RpcError::kBusy, "another trace is being recorded or read: try later"));
  }
  recording_.emplace();
  recording_->number = ++traces_;
  recording_->uid = connection->peer().uid;
  recording_->admin = admin;
  handlers_.trace(seconds->get<double>(), [weak = weak_from_this(), number = traces_](Trace trace) {
    const auto self = weak.lock();
    if (!self || self->stopped_ || !self->recording_ || self->recording_->number != number) return;
    self->recording_->trace = std::move(trace);
    self->KeepTraceForAWhile();
  });
  Reply(connection, request, RpcResultLine(request.id, "{\"trace\":" + std::to_string(traces_) + "}"));
}

void ControlServer::Core::KeepTraceForAWhile() {
  trace_kept_.expires_after(kTraceKept);
  trace_kept_.async_wait([weak = weak_from_this(), number = recording_->number](error_code error) {
    const auto self = weak.lock();
    if (!error && self && self->recording_ && self->recording_->number == number) self->recording_.reset();
  });
}

// A piece of it; {"state":"recording"} before its end. Each once: they cost the main thread time, and whoever reads
// keeps the recording.
void ControlServer::Core::ReadTrace(const std::shared_ptr<Connection>& connection, const RpcRequest& request) {
  const nlohmann::json params = nlohmann::json::parse(request.params.empty() ? "{}" : request.params, nullptr, false);
  const auto whole = [&](const char* name) {
    const auto found = params.find(name);
    return found != params.end() && found->is_number_unsigned() ? found->get<uint64_t>() : 0;
  };
  if (!recording_ || recording_->number != whole("trace") || recording_->uid != connection->peer().uid) {
    return Reply(connection, request, RpcErrorLine(request.id, RpcError::kInvalidParams, "there is no such trace"));
  }
  if (request.method == "trace_stop") {
    if (!recording_->trace) handlers_.trace_stop();
    return Reply(connection, request, RpcResultLine(request.id, "{}"));
  }
  if (!recording_->trace) return Reply(connection, request, RpcResultLine(request.id, "{\"state\":\"recording\"}"));
  const Trace& trace = *recording_->trace;
  const uint64_t from = recording_->next;
  if (whole("from") != from) {
    return Reply(connection, request,
                 RpcErrorLine(request.id, RpcError::kInvalidParams,
                              "pieces are read in order, once: \"from\" is " + std::to_string(from) + " now"));
  }
  const Viewer viewer = recording_->admin ? Viewer() : Viewer(recording_->uid);
  std::string piece = TraceJson(trace, viewer, from, kTracePiece);
  if (from + kTracePiece >= trace.records.size()) {
    recording_.reset();
  } else {
    recording_->next = from + kTracePiece;
    KeepTraceForAWhile();
  }
  Reply(connection, request, RpcResultLine(request.id, piece));
}

// One examination at a time: who asks meanwhile gets the same answer. It has deadlines of its own.
void ControlServer::Core::Doctor(const std::shared_ptr<Connection>& connection, RpcRequest request) {
  if (Refused(connection, request)) return;
  patients_.push_back({connection, std::move(request)});
  if (patients_.size() > 1) return;
  handlers_.doctor([weak = weak_from_this()](const std::string& report) {
    const auto self = weak.lock();
    if (!self || self->stopped_) return;
    for (const Waiter& waiter : std::exchange(self->patients_, {})) {
      const auto patient = waiter.connection.lock();
      if (patient && !patient->closed()) Reply(patient, waiter.request, RpcResultLine(waiter.request.id, report));
    }
  });
}

// Takes as long as it takes; who closes the connection ends it.
void ControlServer::Core::Bench(const std::shared_ptr<Connection>& connection, RpcRequest request) {
  if (Refused(connection, request)) return;
  BenchRequest wanted;
  if (const std::string wrong = ParseBench(request.params, &wanted); !wrong.empty())
    return Reply(connection, request, RpcErrorLine(request.id, RpcError::kInvalidParams, wrong));
  if (benching_)
    return Reply(connection, request, RpcErrorLine(request.id, RpcError::kBusy, "a calibration is under way"));
  spdlog::info("event=bench_requested uid={} pid={}", connection->peer().uid, connection->peer().pid);
  benching_ = true;
  bench_for_ = connection.get();
  connection->WatchForEnd();
  const Waiter waiter{connection, std::move(request)};
  handlers_.bench(wanted, [weak = weak_from_this(), waiter](Result<std::string> result) {
    const auto self = weak.lock();
    if (!self || self->stopped_) return;
    self->benching_ = false;
    self->bench_for_ = nullptr;
    const auto asker = waiter.connection.lock();
    if (!asker || asker->closed()) return;
    const std::string& id = waiter.request.id;
    Reply(
        asker, waiter.request,
        result.ok() ? RpcResultLine(id, *result) : RpcErrorLine(id, RpcError::kNotPossible, result.status().message()));
  });
}

void ControlServer::Core::CommandPath(const std::shared_ptr<Connection>& connection, RpcRequest request) {
  if (Refused(connection, request)) return;
  PathCommand command;
  command.name = request.method.substr(kPathMethods.size());
  if (command.name != "disable" && command.name != "enable" && command.name != "evacuate")
    return Reply(connection, request, RpcErrorLine(request.id, RpcError::kNoMethod, "no such method"));
  if (const std::string wrong = ParsePathCommand(request.params, &command); !wrong.empty())
    return Reply(connection, request, RpcErrorLine(request.id, RpcError::kInvalidParams, wrong));
  spdlog::info("event=path_command_requested uid={} pid={} command={}", connection->peer().uid, connection->peer().pid,
               command.name);
  handlers_.path(command, Later(connection, std::move(request)));
}

void ControlServer::Core::CollectGarbage(const std::shared_ptr<Connection>& connection, RpcRequest request) {
  if (Refused(connection, request)) return;
  GcRequest wanted;
  if (const std::string wrong = ParseGc(request.params, &wanted); !wrong.empty())
    return Reply(connection, request, RpcErrorLine(request.id, RpcError::kInvalidParams, wrong));
  spdlog::info("event=gc_requested uid={} pid={} dry_run={}", connection->peer().uid, connection->peer().pid,
               wanted.dry_run);
  handlers_.gc(wanted, Later(connection, std::move(request)));
}

// Answers the peer when it is called, if it is still there.
std::function<void(Result<std::string>)> ControlServer::Core::Later(const std::shared_ptr<Connection>& connection,
                                                                    RpcRequest request) {
  return [weak = weak_from_this(), waiter = Waiter{connection, std::move(request)}](Result<std::string> result) {
    const auto self = weak.lock();
    const auto asker = waiter.connection.lock();
    if (!self || self->stopped_ || !asker || asker->closed()) return;
    const std::string& id = waiter.request.id;
    Reply(
        asker, waiter.request,
        result.ok() ? RpcResultLine(id, *result) : RpcErrorLine(id, RpcError::kNotPossible, result.status().message()));
  };
}

// What the trainers do with it is theirs; it is no command to the daemon.
void ControlServer::Core::RequestCheckpoint(const std::shared_ptr<Connection>& connection, RpcRequest request) {
  std::optional<std::string> job;
  if (const std::string wrong = ParseCheckpointRequest(request.params, &job); !wrong.empty())
    return Reply(connection, request, RpcErrorLine(request.id, RpcError::kInvalidParams, wrong));
  const std::optional<uint32_t> uid =
      IsAdmin(connection->peer()) ? std::nullopt : std::optional<uint32_t>(connection->peer().uid);
  const Waiter waiter{connection, std::move(request)};
  handlers_.request_checkpoint(uid, job, [weak = weak_from_this(), waiter](uint64_t sessions) {
    const auto self = weak.lock();
    const auto asker = waiter.connection.lock();
    if (!self || self->stopped_ || !asker || asker->closed()) return;
    Reply(asker, waiter.request, RpcResultLine(waiter.request.id, "{\"sessions\":" + std::to_string(sessions) + "}"));
  });
}

// Of the peer's own jobs, whoever it is: a job's name alone is nobody's.
void ControlServer::Core::ShareFigures(const std::shared_ptr<Connection>& connection, RpcRequest request) {
  std::string job;
  if (const std::string wrong = ParseShareFigures(request.params, &job); !wrong.empty())
    return Reply(connection, request, RpcErrorLine(request.id, RpcError::kInvalidParams, wrong));
  handlers_.share_figures(connection->peer().uid, job, Later(connection, std::move(request)));
}

void ControlServer::Core::Share(const std::shared_ptr<Connection>& connection, RpcRequest request) {
  ShareRequest told;
  if (const std::string wrong = ParseShare(request.params, &told); !wrong.empty())
    return Reply(connection, request, RpcErrorLine(request.id, RpcError::kInvalidParams, wrong));
  told.uid = connection->peer().uid;
  handlers_.share(told, Later(connection, std::move(request)));
}

void ControlServer::Core::Drain(const std::shared_ptr<Connection>& connection, const RpcRequest& request) {
  if (Refused(connection, request)) return;
  spdlog::info("event=drain_requested uid={} pid={}", connection->peer().uid, connection->peer().pid);
  handlers_.drain();  // first: who reads the answer knows that it has begun
  Reply(connection, request, RpcResultLine(request.id, "{\"state\":\"draining\"}"));
}

void ControlServer::Core::AskForSnapshot() {
  snapshot_asked_ = true;
  const uint64_t number = ++snapshot_number_;
  answer_deadline_.expires_after(std::chrono::nanoseconds(options_.answer_ns));
  answer_deadline_.async_wait([weak = weak_from_this(), number](error_code error) {
    const auto self = weak.lock();
    if (error || !self || self->stopped_ || self->snapshot_number_ != number || !self->snapshot_asked_) return;
    self->FailAll(RpcError::kTimeout, "the daemon did not answer in time: it is very busy or stuck");
  });
  handlers_.snapshot([weak = weak_from_this(), number](Snapshot snapshot) {
    const auto self = weak.lock();
    // A late answer belongs to nobody any more: its waiters have had their error.
    if (!self || self->stopped_ || self->snapshot_number_ != number || !self->snapshot_asked_) return;
    self->AnswerAll(snapshot);
  });
}

void ControlServer::Core::AnswerAll(const Snapshot& snapshot) {
  answer_deadline_.cancel();
  snapshot_asked_ = false;
  for (const Waiter& waiter : std::exchange(asking_, {})) {
    const auto connection = waiter.connection.lock();
    if (!connection || connection->closed()) continue;
    const Viewer viewer = IsAdmin(connection->peer()) ? Viewer() : Viewer(connection->peer().uid);
    const std::string& method = waiter.request.method;
    const std::string result = method == "status"     ? StatusJson(snapshot, viewer)
                               : method == "sessions" ? SessionsJson(snapshot, viewer)
                               : method == "paths"    ? PathsJson(snapshot)
                               : method == "metrics"  ? MetricsJson(snapshot, viewer)
                                                      : VersionJson(snapshot);
    Reply(connection, waiter.request, RpcResultLine(waiter.request.id, result));
  }
  if (next_.empty()) return;
  asking_ = std::exchange(next_, {});
  AskForSnapshot();
}

void ControlServer::Core::FailAll(RpcError code, const std::string& message) {
  snapshot_asked_ = false;
  for (std::vector<Waiter>* waiters : {&asking_, &next_}) {
    for (const Waiter& waiter : std::exchange(*waiters, {})) {
      const auto connection = waiter.connection.lock();
      if (connection) Reply(connection, waiter.request, RpcErrorLine(waiter.request.id, code, message));
    }
  }
}

Result<std::unique_ptr<ControlServer>> ControlServer::Open(asio::io_context& io, const ControlOptions& options,
                                                           ControlHandlers handlers) {
  Result<BoundSocket> bound = BindUnixSocket(options.path, SOCK_STREAM, options.mode, options.group);
  if (!bound.ok()) return bound.status();
  auto core = std::make_shared<Core>(io, options, std::move(handlers), std::move(*bound));
  if (Status status = core->Start(); !status.ok()) return status;
  return std::unique_ptr<ControlServer>(new ControlServer(std::move(core)));
}

ControlServer::ControlServer(std::shared_ptr<Core> core) : core_(std::move(core)) {}

ControlServer::~ControlServer() { core_->Stop(); }

}  // namespace mlpo
