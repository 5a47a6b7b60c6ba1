#include <utility>  // before Asio of Boost 1.74 in C++20

#include "daemon/daemon.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sysexits.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <mutex>
#include <system_error>

#include "daemon/adam/kernel.h"
#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/base/thread.h"
#include "daemon/scheduler/path_model.h"

namespace mlpo {
namespace {

constexpr int kFastStopSeconds = 10;
constexpr auto kSavesPatience = std::chrono::seconds(3);  // less than that
// What the service manager is told that a step of start or stop takes at most, and how fast a pool comes and goes.
constexpr int64_t kStepSeconds = 60;
constexpr uint64_t kPoolBytesPerS = 256u << 20;
constexpr uint64_t kFirstPiecesBytes = uint64_t{8} << 30;  // on as many nodes: READY comes after these
constexpr int64_t kBeatNs = 10 * kNsPerS;
constexpr uint32_t kPieceDepth = 64;

int64_t StepSeconds(uint64_t pool_bytes) { return kStepSeconds + static_cast<int64_t>(pool_bytes / kPoolBytesPerS); }

TurnRules TurnOf(const PathConfig& config) {
  return {config.turn_blocks, config.turn_direction == "one", config.exclusive};
}

Policy PolicyOf(const std::string& name) {
  return name == "proportional" ? Policy::kProportional : name == "ratio" ? Policy::kRatio : Policy::kAdaptive;
}

Order OrderOf(const std::string& name) {
  return name == "alternating" ? Order::kAlternating : name == "ascending" ? Order::kAscending : Order::kAdaptive;
}

}  // namespace

// ---- Start ----

Result<std::unique_ptr<Daemon>> Daemon::Create(Config config, const std::string& socket, ServiceManager* service) {
  std::unique_ptr<Daemon> daemon(new Daemon(std::move(config), service));
  daemon->started_ns_ = NowNs();
  Status status = SetTarget(daemon->config_.adam.target);
  if (status.ok()) status = daemon->OpenPaths();
  if (status.ok()) status = daemon->OpenPool();
  if (status.ok()) status = daemon->StartQueues();
  if (status.ok()) status = daemon->StartLoop();
  if (status.ok()) status = daemon->OpenSockets(socket);
  if (!status.ok()) return status;
  return daemon;
}

// For the service manager: the step that comes, and how long it may take; longer if it goes through the pool.
void Daemon::Doing(const std::string& what, uint64_t pool_bytes) {
  service_->Show(what);
  service_->Extend(StepSeconds(pool_bytes));
}

Status Daemon::OpenPaths() {
  for (const PathConfig& config : config_.paths) {
    Doing("opening path " + config.name);
    Result<std::unique_ptr<Path>> path = Path::Open(config, config.name, config_.daemon.node);
    if (!path.ok()) return path.status();
    paths_.push_back(std::move(*path));
    Result<std::unique_ptr<PathKeeper>> keeper = PathKeeper::Start(config.name);
    if (!keeper.ok()) return keeper.status();
    keepers_.push_back(std::move(*keeper));
  }
  PathRecords::Parts parts;
  parts.config = &config_;
  parts.threads = &threads_;
  parts.paths = Paths();
  parts.keepers = Keepers();
  parts.take_snapshot = [this](std::function<void(Snapshot)> answer) { reports_->TakeSnapshot(std::move(answer)); };
  records_ = std::make_unique<PathRecords>(std::move(parts));
  return Status();
}

Status Daemon::OpenPool() {
  std::string what;
  Result<uint64_t> available = AvailableMemoryBytes(&what);
  if (!available.ok()) return available.status();
  BufferPool::Options options;
  options.pool_bytes = config_.memory.pool_bytes > 0 ? config_.memory.pool_bytes : *available / 4;
  options.buffer_bytes = Scheduler::BufferBytes(config_.memory.block_elements);
  options.lock = config_.memory.lock;
  options.huge_pages = config_.memory.huge_pages == "never"     ? BufferPool::HugePages::kNever
                       : config_.memory.huge_pages == "require" ? BufferPool::HugePages::kRequire
                                                                : BufferPool::HugePages::kAuto;
  Result<Cores> cores = Cores::Load();
  if (!cores.ok()) return cores.status();
  cores_ = std::make_unique<Cores>(std::move(*cores));
  if (config_.memory.numa != "off") options.nodes = cores_->Nodes();
  std::erase_if(options.nodes, [](const NumaNode& node) { return !node.memory; });
  options.interleave = config_.memory.numa == "interleave";
  options.grow = true;
  Doing("making the first of a pool of " + std::to_string(options.pool_bytes) + " bytes",
        std::min(options.pool_bytes, kFirstPiecesBytes));
  Result<std::unique_ptr<BufferPool>> pool = BufferPool::Create(options);
  if (!pool.ok()) return pool.status();
  pool_ = std::move(*pool);
  available = AvailableMemoryBytes(&what);
  if (!available.ok()) return available.status();
  const uint64_t left = *available - std::min(*available, pool_->coming_bytes());
  arenas_limit_bytes_ = config_.memory.arenas_bytes > 0 ? config_.memory.arenas_bytes : left / 2;
  if (arenas_limit_bytes_ > left) {
    return Status(-ENOMEM, "[memory] arenas is " + std::to_string(arenas_limit_bytes_) +
                               " bytes, and beside the pool " + what + " has " + std::to_string(left) +
                               ": lower one of them");
  }
  return Status();
}

// While serving: the rest of the pool, piece by piece.
void Daemon::GrowPool() {
  const auto ready = [this](uint32_t piece) {  // in a thread of the pool's
    if (uring_pool_) uring_pool_->PieceReady(piece);
    for (const auto& queue : queues_) queue->PieceReady(piece);
    loop_->Post([this, piece] { loop_->AddPiece(piece); });
  };
  pool_->Grow(ready, [this](Status status) { threads_.PostMain([this, status] { reports_->PoolGrown(status); }); });
}

Status Daemon::StartQueues() {
  const bool uses_uring = std::any_of(config_.paths.begin(), config_.paths.end(),
                                      [](const PathConfig& path) { return path.engine != "threads"; });
  if (uses_uring) uring_pool_ = UringPool::Open(pool_.get());
  for (size_t i = 0; i < paths_.size(); ++i) {
    Doing("registering the pool with path " + paths_[i]->name(), std::min(pool_->pool_bytes(), kFirstPiecesBytes));
    PathQueue::Options options;
    options.index = static_cast<PathIndex>(i);
    options.engine = config_.paths[i].engine;
    options.piece_bytes = config_.scheduler.piece_bytes;
    options.depth = kPieceDepth;
    options.rings = static_cast<uint32_t>(paths_.size());
    options.shared = uring_pool_.get();
    Result<std::unique_ptr<PathQueue>> queue = PathQueue::Start(options, paths_[i].get(), pool_.get(), &transfers_);
    if (!queue.ok()) return queue.status();
    queues_.push_back(std::move(*queue));
  }
  WorkerPool::Options options;
  options.workers = config_.adam.workers;
  options.pin = config_.adam.pin;
  options.parameters_per_s = ParametersPerS(config_.paths);
  options.cores = cores_.get();
  Result<std::unique_ptr<WorkerPool>> workers = WorkerPool::Start(options, &done_jobs_);
  if (!workers.ok()) return workers.status();
  workers_ = std::move(*workers);
  cores_.reset();
  return Status();
}

Status Daemon::StartLoop() {
  Scheduler::Options options;
  options.buffers = pool_->piece(0).count;
  options.buffers_node = pool_->piece(0).node;
  options.block_elements = config_.memory.block_elements;
  options.extents_offset_bytes = Path::kFileHeaderBytes;
  options.queue_blocks = config_.scheduler.queue_blocks;
  options.no_path_timeout_ns = config_.scheduler.no_path_timeout_s * kNsPerS;
  options.hang_timeout_ns = config_.scheduler.hang_timeout_s * kNsPerS;
  const auto buffers = [this](uint64_t bytes) {
    return bytes == 0 ? 0 : std::max<uint64_t>(1, bytes / pool_->buffer_bytes());
  };
  options.user_buffers = buffers(config_.quota.user_pool_bytes);
  options.job_buffers = buffers(config_.quota.job_pool_bytes);
  options.policy = PolicyOf(config_.scheduler.policy);
  options.order = OrderOf(config_.scheduler.order);
  options.learn = config_.scheduler.learn;
  options.integrity = config_.scheduler.integrity;
  options.copy_buffers = config_.checkpoint.buffers;
  options.restore_buffers = 2 * config_.checkpoint.readers;  // one that is filled and one that waits, of each
  options.seed = std::hash<std::string>()(config_.daemon.node);
  options.paths = records_->parameters();
  for (const auto& path : paths_) {
    options.path_names.push_back(path->name());
    options.path_nodes.push_back(path->numa_node());
  }
  for (const PathConfig& path : config_.paths) options.turns.push_back(TurnOf(path));
  DataLoop::Parts parts;
  parts.pool = pool_.get();
  parts.workers = workers_.get();
  parts.done_jobs = &done_jobs_;
  for (const auto& queue : queues_) parts.queues.push_back(queue.get());
  parts.transfers = &transfers_;
  parts.live = &live_;
  DataLoop::Events events;
  events.broken = [this](SessionId session, std::string reason) {
    threads_.PostMain([this, session, reason = std::move(reason)] { sessions_->Break(session, reason); });
  };
  events.gone = [this](SessionId session) { threads_.PostMain([this, session] { storages_->OnGone(session); }); };
  events.hangs = [this](SessionId session) {
    threads_.PostMain([this, session] { sessions_->SessionHangs(session); });
  };
  events.evacuated = [this](PathIndex path) { threads_.PostMain([this, path] { path_commands_->Evacuated(path); }); };
  events.probe = [this](PathIndex path, uint64_t end) { path_commands_->Probe(path, end); };
  events.file_unused = [this](SessionId session, PathIndex path, FileId file) {
    threads_.PostMain([this, session, path, file] { storages_->RemoveLeft(session, path, file); });
  };
  events.make_room = [this](const ObjectStore& store, uint64_t bytes, uint64_t ticket) {
    const FileOwner owner{store.uid, store.job_name, kObjectsRank, store.id & ~kStoreBit};
    threads_.PostMain([this, id = store.id, owner, bytes, ticket] { storages_->MakeRoom(id, owner, bytes, ticket); });
  };
  loop_ = std::make_unique<DataLoop>(std::move(options), std::move(parts), std::move(events));
  for (uint32_t piece = 1; piece < pool_->piece_count(); ++piece) {
    if (pool_->IsReady(piece)) loop_->Post([this, piece] { loop_->AddPiece(piece); });
  }
  StartCheckpoints();
  return Status();
}

void Daemon::StartCheckpoints() {
  CheckpointRuns::Options options;
  options.main = &threads_.main;
  options.loop = loop_.get();
  for (size_t i = 0; i < paths_.size(); ++i)
    options.paths.push_back({paths_[i].get(), keepers_[i].get(), paths_[i]->directory(), config_.paths[i].persistent,
                             records_->parameters()[i].write_bytes_per_s});
  options.node = config_.daemon.node;
  const CheckpointConfig& config = config_.checkpoint;
  if (config.copy_share > 0) options.copy_share = config.copy_share;  // 0: the default
  options.writers = config.writers;
  options.readers = config.readers;
  options.buffer_bytes = pool_->buffer_bytes();
  options.make_room = [this](const SessionIdentity& identity, std::vector<bool> next,
                             CheckpointRuns::Options::RoomMade done) {
    storages_->MakeRoomForCopy(identity, std::move(next), std::move(done));
  };
  options.next_files_used = [this](SessionId session, bool used) { storages_->UseNextFiles(session, used); };
  options.hold_files = [this](SessionId session, bool needed) { storages_->HoldFiles(session, needed); };
  checkpoints_ = std::make_shared<CheckpointRuns>(std::move(options));
}

Status Daemon::OpenSockets(const std::string& socket) {
  std::optional<gid_t> group;
  std::optional<gid_t> admin;
  if (!config_.daemon.group.empty()) {
    Result<gid_t> gid = GroupByName(config_.daemon.group);
    if (!gid.ok()) return gid.status().Within("[daemon] group");
    group = *gid;
  }
  if (!config_.daemon.admin_group.empty()) {
    Result<gid_t> gid = GroupByName(config_.daemon.admin_group);
    if (!gid.ok()) return gid.status().Within("[daemon] admin_group");
    admin = *gid;
  }
  Result<BoundSocket> bound = BindUnixSocket(socket, SOCK_SEQPACKET, group ? 0660 : 0600, group);
  if (!bound.ok()) return bound.status();
  socket_ = std::move(*bound);
  SessionServer::Options options;
  options.block_elements = config_.memory.block_elements;
  options.arenas_limit_bytes = arenas_limit_bytes_;
  options.max_sessions = config_.daemon.max_sessions;
  const QuotaConfig& quota = config_.quota;
  options.user_limits = {quota.user_sessions, quota.user_requests, quota.user_arenas_bytes, quota.user_capacity_bytes};
  options.job_limits = {quota.job_sessions, quota.job_requests, quota.job_arenas_bytes, quota.job_capacity_bytes};
  options.flush_gradients = config_.scheduler.gradients == "flushed";
  options.group = config_.daemon.group;
  UniqueFd listener(::fcntl(socket_.fd(), F_DUPFD_CLOEXEC, 0));
  if (!listener) return Status::Errno(errno, "duplicating the session socket");
  sessions_ = std::make_unique<SessionServer>(threads_.main, std::move(listener), options, &hosting_);
  Connect();
  ControlOptions control;
  control.path = socket + ".ctl";
  control.admin_group = admin;  // who may see and command what is decided by credentials, not by the socket's mode
  ControlHandlers handlers;
  handlers.snapshot = [this](std::function<void(Snapshot)> answer) { reports_->TakeSnapshot(std::move(answer)); };
  handlers.drain = [this] { BeginDrain("asked by mlpo-ctl"); };
  handlers.bench = [this](const BenchRequest& request, std::function<void(Result<std::string>)> answer) {
    if (const Status ready = Ready(); !ready.ok()) return answer(ready);
    calibrations_->Bench(request, std::move(answer));
  };
  handlers.stop_bench = [this] { calibrations_->StopBench(); };
  handlers.path = [this](const PathCommand& command, std::function<void(Result<std::string>)> answer) {
    if (const Status ready = Ready(); !ready.ok()) return answer(ready);
    path_commands_->CommandPath(command, std::move(answer));
  };
  handlers.gc = [this](const GcRequest& request, std::function<void(Result<std::string>)> answer) {
    if (const Status ready = Ready(); !ready.ok()) return answer(ready);
    garbage_->CollectGarbage(request, std::move(answer));
  };
  handlers.share_figures = [this](uint32_t uid, const std::string& job,
                                  std::function<void(Result<std::string>)> answer) {
    node_shares_->Figures(uid, job, std::move(answer));
  };
  handlers.share = [this](const ShareRequest& request, const std::function<void(Result<std::string>)>& answer) {
    node_shares_->Tell(request, answer);
  };
  handlers.doctor = [this](std::function<void(std::string)> answer) { reports_->Examine(std::move(answer)); };
  handlers.trace = [this](double seconds, std::function<void(Trace)> answer) {
    reports_->RecordTrace(seconds, answer);
  };
  handlers.trace_stop = [this] { reports_->StopTrace(); };
  handlers.request_checkpoint = [this](std::optional<uint32_t> uid, std::optional<std::string> job,
                                       std::function<void(uint64_t)> answer) {
    loop_->Post([this, uid, job = std::move(job), answer = std::move(answer)] {
      threads_.PostMain([answer, asked = loop_->AskForCheckpoint(uid, job)] { answer(asked); });
    });
  };
  Result<std::unique_ptr<ControlServer>> server = ControlServer::Open(threads_.main, control, std::move(handlers));
  if (!server.ok()) return server.status();
  control_ = std::move(*server);
  return reports_->ShowOutside(socket);
}

// The parts between sessions, data loop and paths. None of these has begun: nothing is asked of a part that is not
// there.
void Daemon::Connect() {
  Storages::Parts storages;
  storages.config = &config_;
  storages.threads = &threads_;
  storages.loop = loop_.get();
  storages.sessions = sessions_.get();
  storages.paths = Paths();
  storages.keepers = Keepers();
  storages.policy = PolicyOf(config_.scheduler.policy);
  storages.used_paths = [this] { return path_commands_->UsedPaths(); };
  storages.gone = [this] { MaybeFinish(); };
  storages_ = std::make_unique<Storages>(std::move(storages), records_->parameters());
  PathCommands::Parts commands;
  commands.threads = &threads_;
  commands.loop = loop_.get();
  commands.storages = storages_.get();
  commands.records = records_.get();
  commands.paths = Paths();
  commands.keepers = Keepers();
  commands.buffer_bytes = pool_->buffer_bytes();
  path_commands_ = std::make_unique<PathCommands>(std::move(commands));
  NodeShares::Parts shares;
  shares.config = &config_;
  shares.threads = &threads_;
  shares.loop = loop_.get();
  shares.records = records_.get();
  shares.storages = storages_.get();
  shares.take_snapshot = [this](std::function<void(Snapshot)> answer) { reports_->TakeSnapshot(std::move(answer)); };
  node_shares_ = std::make_unique<NodeShares>(std::move(shares));
  CalibrationRuns::Parts calibrations;
  calibrations.threads = &threads_;
  calibrations.loop = loop_.get();
  calibrations.sessions = sessions_.get();
  calibrations.storages = storages_.get();
  calibrations.records = records_.get();
  calibrations.commands = path_commands_.get();
  calibrations.pool = pool_.get();
  calibrations.paths = Paths();
  calibrations.ended = [this] { MaybeFinish(); };
  calibrations_ = std::make_unique<CalibrationRuns>(std::move(calibrations));
  Garbage::Parts garbage;
  garbage.config = &config_;
  garbage.threads = &threads_;
  garbage.paths = Paths();
  garbage.keepers = Keepers();
  garbage.checkpoints = checkpoints_;
  garbage_ = std::make_unique<Garbage>(std::move(garbage));
  SessionHosting::Parts hosting;
  hosting.config = &config_;
  hosting.threads = &threads_;
  hosting.loop = loop_.get();
  hosting.checkpoints = checkpoints_.get();
  hosting.sessions = sessions_.get();
  hosting.storages = storages_.get();
  hosting.calibrations = calibrations_.get();
  hosting.shares = node_shares_.get();
  hosting.pool = pool_.get();
  hosting_.Connect(std::move(hosting));
  StatusReports::Parts reports;
  reports.config = &config_;
  reports.threads = &threads_;
  reports.loop = loop_.get();
  reports.sessions = sessions_.get();
  reports.pool = pool_.get();
  reports.workers = workers_.get();
  reports.paths = Paths();
  for (const auto& queue : queues_) reports.queues.push_back(queue.get());
  reports.records = records_.get();
  reports.commands = path_commands_.get();
  reports.shares = node_shares_.get();
  reports.live = &live_;
  reports.socket = socket_.path();
  reports.arenas_limit_bytes = arenas_limit_bytes_;
  reports.started_ns = started_ns_;
  reports.state_name = [this](const Snapshot& snapshot) { return StateName(snapshot); };
  reports_ = std::make_unique<StatusReports>(std::move(reports));
}

std::vector<Path*> Daemon::Paths() const {
  std::vector<Path*> paths;
  for (const auto& path : paths_) paths.push_back(path.get());
  return paths;
}

std::vector<PathKeeper*> Daemon::Keepers() const {
  std::vector<PathKeeper*> keepers;
  for (const auto& keeper : keepers_) keepers.push_back(keeper.get());
  return keepers;
}

// For commands that need all parts.
Status Daemon::Ready() const {
  return state_ == State::kReady ? Status() : Status(-ESHUTDOWN, "the daemon is not ready");
}

Daemon::~Daemon() {
  control_.reset();
  if (reports_) reports_->StopShowing();
  if (checkpoints_) checkpoints_->Stop();  // what it has posted to the loop and to main is not carried out any more
  threads_.housekeeping.join();
  threads_.lookout.join();
  if (reports_) reports_->RemoveMetricsFile();
  if (pool_) pool_->StopGrowing();
  queues_.clear();  // wait for what is in flight
  workers_.reset();
  if (storages_) storages_->Remove();
  keepers_.clear();  // and wait for what they have begun
}

// ---- Run ----

int Daemon::Run() {
  loop_->Start();
  boost::system::error_code error;
  signals_.add(SIGTERM, error);
  if (!error) signals_.add(SIGINT, error);
  if (error) {
    spdlog::error("event=start_failed reason=\"signals: {}\"", error.message());
    loop_->Stop();
    return EX_OSERR;
  }
  WaitForSignal();
  checkpoints_->CleanUp();
  sessions_->Start();
  state_ = State::kReady;
  reports_->StoreCounters();
  records_->StoreRecords();
  if (!config_.daemon.metrics_file.empty()) reports_->WriteMetrics();
  spdlog::info("event=ready socket={} node={} paths={} pool_bytes={} buffers={} workers={} adam={}", socket_.path(),
               config_.daemon.node, paths_.size(), pool_->pool_bytes(), pool_->count(), workers_->workers(),
               ActiveTarget());
  service_->Ready();
  if (service_->listens()) Beat();
  GrowPool();
  threads_.main.run();
  Doing("ending", pool_->ready_bytes());
  EndInTime();
  pool_->StopGrowing();
  loop_->Stop();
  threads_.PostHousekeeping([this] {  // behind what it may still save
    Snapshot snapshot;
    snapshot.paths.resize(paths_.size());
    loop_->Fill(&snapshot);
    records_->SaveRecords(snapshot);
  });
  threads_.housekeeping.join();
  spdlog::info("event=stopped exit_code={}", exit_code_);
  return exit_code_;
}

// From here on nothing but the operating system is waited for: files and transfers of a path that hangs, and the pool's
// memory. Not for ever: until the daemon's end this has a deadline.
void Daemon::EndInTime() {
  const int64_t seconds = StepSeconds(pool_->ready_bytes());
  try {
    end_deadline_ = std::jthread([seconds](const std::stop_token& ended) {
      SetThreadName("mlpo-end");
      std::mutex mutex;
      std::condition_variable_any never;
      std::unique_lock lock(mutex);
      never.wait_for(lock, ended, std::chrono::seconds(seconds), [] { return false; });
      if (ended.stop_requested()) return;
      spdlog::critical("event=stop_hangs seconds={}", seconds);
      FinishLogging();
      ::_exit(EX_TEMPFAIL);  // scratch files stay for the next start to remove
    });
  } catch (const std::system_error& error) {
    spdlog::warn("event=end_without_deadline errno={}", error.code().value());
  }
}

void Daemon::WaitForSignal() {
  signals_.async_wait([this](boost::system::error_code error, int signal) {
    if (error) return;
    if (state_ == State::kReady) {
      BeginDrain(signal == SIGTERM ? "SIGTERM" : "SIGINT");
    } else {
      StopFast();
    }
    WaitForSignal();
  });
}

// The service manager hears that we live as often as the data thread has answered this one. Paths and workers are not
// asked: a slow or hung device is theirs to wait for, and no reason to be killed.
void Daemon::Beat() {
  auto snapshot = std::make_shared<Snapshot>();
  snapshot->paths.resize(paths_.size());
  loop_->Post([this, snapshot] {
    loop_->Fill(snapshot.get());
    threads_.PostMain([this, snapshot] { TellProgress(*snapshot); });
  });
}

void Daemon::TellProgress(const Snapshot& snapshot) {
  service_->Alive();
  if (state_ != State::kReady) service_->Extend(kStepSeconds);
  std::string text = std::string(StateName(snapshot)) + ", sessions: " + std::to_string(snapshot.sessions.size());
  for (size_t i = 0; i < paths_.size(); ++i) {
    if (snapshot.paths[i].state != "healthy") text += ", path " + paths_[i]->name() + ": " + snapshot.paths[i].state;
  }
  service_->Show(text);
  const int64_t watchdog_ns = service_->watchdog_ns();
  next_beat_.expires_after(std::chrono::nanoseconds(watchdog_ns > 0 ? std::min(watchdog_ns / 4, kBeatNs) : kBeatNs));
  next_beat_.async_wait([this](boost::system::error_code error) {
    if (!error) Beat();
  });
}

void Daemon::BeginDrain(const char* why) {
  if (state_ != State::kReady) return;
  state_ = State::kDraining;
  calibrations_->BenchUnwanted(DataLoop::kStopping);
  service_->Stopping();
  service_->Extend(kStepSeconds);
  spdlog::info("event=drain why=\"{}\" sessions={}", why, sessions_->session_count());
  sessions_->StopAccepting();
  drain_deadline_.expires_after(std::chrono::seconds(config_.daemon.drain_timeout_s));
  drain_deadline_.async_wait([this](boost::system::error_code error) {
    if (error) return;
    spdlog::error("event=drain_timeout seconds={}", config_.daemon.drain_timeout_s);
    exit_code_ = EX_TEMPFAIL;
    StopFast();
  });
  loop_->Post([this] { loop_->Drain([this] { threads_.PostMain([this] { EndSessions(); }); }); });
}

// Drops what has not begun. What the kernel holds is still waited for, but not for ever.
void Daemon::StopFast() {
  spdlog::warn("event=fast_stop sessions={}", sessions_->session_count());
  EndSessions();
  loop_->Post([this] { loop_->FailSaves(Status(-ESHUTDOWN, "the daemon is stopping fast")); });
  drain_deadline_.expires_after(std::chrono::seconds(kFastStopSeconds));
  drain_deadline_.async_wait([](boost::system::error_code error) {
    if (error) return;
    spdlog::critical("event=stop_hangs seconds={}", kFastStopSeconds);
    FinishLogging();
    ::_exit(EX_TEMPFAIL);  // scratch files stay for the next start to remove
  });
}

void Daemon::EndSessions() {
  if (state_ == State::kEnding) return;
  state_ = State::kEnding;
  loop_->Post([this] { loop_->AnnounceEnd(); });
  sessions_->EndAll(Status(-ESHUTDOWN, "the daemon is stopping"));
  threads_.PostMain([this] { MaybeFinish(); });  // behind the ends of those that had no session yet
}

void Daemon::MaybeFinish() {
  if (state_ != State::kEnding || sessions_->session_count() > 0) return;
  const auto is_used = [](const auto& entry) { return !entry.second->gone; };
  const Storages::Map& storages = storages_->all();
  if (std::any_of(storages.begin(), storages.end(), is_used)) return;
  // What is left are files of saves whose sessions have ended. The drain has waited for those that move.
  if (!storages.empty() && !saves_waited_for_) {
    saves_deadline_.expires_after(kSavesPatience);
    saves_deadline_.async_wait([this](boost::system::error_code error) {
      if (error) return;
      saves_waited_for_ = true;
      spdlog::warn("event=checkpoints_left sessions={}", storages_->all().size());
      MaybeFinish();
    });
    return;
  }
  saves_deadline_.cancel();
  drain_deadline_.cancel();
  signals_.cancel();
  threads_.main.stop();
}

const char* Daemon::StateName(const Snapshot& snapshot) const {
  if (state_ == State::kStarting) return "starting";
  if (state_ != State::kReady) return "draining";
  for (const PathSnapshot& path : snapshot.paths) {
    if (path.state != "healthy") return "degraded";
  }
  return "ready";
}

}  // namespace mlpo
