#include <utility>  // before Asio of Boost 1.74 in C++20

#include "daemon/daemon.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sysexits.h>
#include <unistd.h>

#include <algorithm>
#include <boost/asio/post.hpp>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <future>
#include <mutex>
#include <random>
#include <system_error>

#include "daemon/adam/kernel.h"
#include "daemon/base/clock.h"
#include "daemon/base/loose_threads.h"
#include "daemon/base/thread.h"
#include "daemon/checkpoint/folders.h"
#include "daemon/checkpoint/journal.h"
#include "daemon/checkpoint_tool.h"
#include "daemon/config/load.h"
#include "daemon/control/status_json.h"
#include "daemon/doctor/gather.h"
#include "daemon/doctor/judge.h"
#include "daemon/io/scratch_cleanup.h"
#include "daemon/scheduler/path_model.h"
#include "proto/abi.h"
#include "proto/counters.h"

namespace mlpo {
namespace {

constexpr int kFastStopSeconds = 10;
constexpr auto kSavesPatience = std::chrono::seconds(3);  // less than that
// What the service manager is told that a step of start or stop takes at most, and how fast a pool comes and goes.
constexpr int64_t kStepSeconds = 60;
constexpr uint64_t kPoolBytesPerS = 256u << 20;
constexpr uint64_t kFirstPiecesBytes = uint64_t{8} << 30;  // on as many nodes: READY comes after these
constexpr int64_t kBeatNs = 10 * kNsPerS;
constexpr auto kCountersPeriod = std::chrono::milliseconds(500);
constexpr uint32_t kPieceDepth = 64;
constexpr double kSecondsPerDay = 86400;
constexpr double kStateBytesPerParameter = 12;
constexpr auto kRecordsPeriod = std::chrono::seconds(60);
constexpr SessionId kBenchStorage = kStoreBit;       // no job's objects have this number
constexpr uint64_t kBenchBytes = uint64_t{1} << 30;  // of a path's file, and in flight
constexpr char kNobodyAsks[] = "who asked for it has gone";
constexpr auto kRecordPatience = std::chrono::seconds(5);
constexpr auto kRetakePatience = std::chrono::seconds(60);
constexpr auto kGcPatience = std::chrono::seconds(60);
constexpr auto kProbePatience = std::chrono::seconds(10);  // after it, nothing else is asked of the path's file system
constexpr double kSharedDevice = 0.9;  // together, paths on devices of their own reach more of what each did alone

int64_t StepSeconds(uint64_t pool_bytes) { return kStepSeconds + static_cast<int64_t>(pool_bytes / kPoolBytesPerS); }

// Declared speeds go over measured ones.
PathParameters ParametersOf(const PathConfig& config, const PathRecord& record) {
  PathParameters path;
  if (const auto& measured = record.calibration) {
    path.read_bytes_per_s = measured->read_bytes_per_s;
    path.write_bytes_per_s = measured->write_bytes_per_s;
    path.duplex = measured->duplex;
    path.duplex_known = true;
    path.read_depth_bytes = measured->read_depth_bytes;
    path.write_depth_bytes = measured->write_depth_bytes;
    path.origin = SpeedOrigin::kCalibrated;
  }
  if (config.read_limit > 0) path.read_bytes_per_s = config.read_limit;
  if (config.write_limit > 0) path.write_bytes_per_s = config.write_limit;
  if (config.duplex > 0) {
    path.duplex = config.duplex;
    path.duplex_known = true;
  }
  if (config.read_limit > 0 || config.write_limit > 0) path.origin = SpeedOrigin::kDeclared;
  path.capacity_bytes = config.capacity_bytes;
  path.weight = config.weight;
  path.write_budget_bytes_per_s = static_cast<double>(config.write_budget_bytes) / kSecondsPerDay;
  return path;
}

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

double ParametersPerS(const std::vector<PathConfig>& paths) {
  double bytes_per_s = 0;
  for (const PathConfig& path : paths) {
    const double worth = PathWorth(ParametersOf(path, PathRecord()));
    if (worth <= 0) return 0;
    bytes_per_s += worth;
  }
  return bytes_per_s / kStateBytesPerParameter;
}

GcReport CollectGarbageOf(const Config& config, const std::string& node, bool dry_run) {
  GcReport all;
  all.dry_run = dry_run;
  CleanupOptions options;
  options.dry_run = dry_run;
  options.journal = [](int node_fd, bool dry, GcReport* report) {
    const std::string shown = std::string("the journal ") + kJournalFolder;
    Result<UniqueFd> journal = OpenFolder(node_fd, kJournalFolder, shown);
    if (journal.status().os_errno() == ENOENT) return Status();
    if (!journal.ok()) return journal.status();
    const Result<JournalRest> rest = FindRest(std::move(*journal), shown, nullptr, /*alone=*/!dry);
    if (!rest.ok()) return rest.status();
    for (const std::string& reason : rest.value().strange) report->kept.push_back({shown, 0, reason});
    RemoveRest(rest.value(), CheckWorkingHeader, dry, report);
    return Status();
  };
  for (const PathConfig& path : config.paths) {
    const Result<GcReport> report = CleanNode(path.directory, node.empty() ? config.daemon.node : node, options);
    if (report.ok()) {
      all.Add(report.value());
    } else {
      all.failed.push_back({path.directory, 0, report.status().message()});
    }
  }
  return all;
}

template <class F>
void Daemon::PostMain(F&& f) {
  boost::asio::post(io_, std::forward<F>(f));
}
template <class F>
void Daemon::PostHousekeeping(F&& f) {
  boost::asio::post(housekeeping_, std::forward<F>(f));
}

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
    records_.push_back((*path)->record());
    written_before_.push_back(records_.back().written_bytes);
    parameters_.push_back(ParametersOf(config, records_.back()));
    paths_.push_back(std::move(*path));
    Result<std::unique_ptr<PathKeeper>> keeper = PathKeeper::Start(config.name);
    if (!keeper.ok()) return keeper.status();
    keepers_.push_back(std::move(*keeper));
    path_states_.push_back("healthy");
    disabled_.push_back(false);
    enabling_.push_back(0);
  }
  shares_ = PathShares(parameters_, PolicyOf(config_.scheduler.policy));
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
  pool_->Grow(ready, [this](Status status) { PostMain([this, status] { PoolGrown(status); }); });
}

void Daemon::PoolGrown(const Status& status) {
  if (!status.ok()) spdlog::warn("event=pool_smaller bytes={} reason=\"{}\"", PoolBytes(), status.message());
  live_.Update([this](Snapshot* snapshot) { FillPool(&snapshot->pool); });
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
  options.paths = parameters_;
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
    PostMain([this, session, reason = std::move(reason)] { sessions_->Break(session, reason); });
  };
  events.gone = [this](SessionId session) { PostMain([this, session] { OnGone(session); }); };
  events.evacuated = [this](PathIndex path) { PostMain([this, path] { Evacuated(path); }); };
  events.probe = [this](PathIndex path, uint64_t end) { Probe(path, end); };
  events.file_unused = [this](SessionId session, PathIndex path, FileId file) {
    PostMain([this, session, path, file] { RemoveLeft(session, path, file); });
  };
  events.make_room = [this](const ObjectStore& store, uint64_t bytes, uint64_t ticket) {
    const FileOwner owner{store.uid, store.job_name, kObjectsRank, store.id & ~kStoreBit};
    PostMain([this, id = store.id, owner, bytes, ticket] { MakeRoom(id, owner, bytes, ticket); });
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
  options.main = &io_;
  options.loop = loop_.get();
  for (size_t i = 0; i < paths_.size(); ++i)
    options.paths.push_back(
        {paths_[i].get(), paths_[i]->directory(), config_.paths[i].persistent, parameters_[i].write_bytes_per_s});
  options.node = config_.daemon.node;
  const CheckpointConfig& config = config_.checkpoint;
  if (config.copy_share > 0) options.copy_share = config.copy_share;  // 0: the default
  options.writers = config.writers;
  options.readers = config.readers;
  options.buffer_bytes = pool_->buffer_bytes();
  options.make_room = [this](const SessionIdentity& identity, std::vector<bool> next,
                             CheckpointRuns::Options::RoomMade done) {
    MakeRoomForCopy(identity, std::move(next), std::move(done));
  };
  options.next_files_used = [this](SessionId session, bool used) { UseNextFiles(session, used); };
  options.hold_files = [this](SessionId session, bool needed) { HoldFiles(session, needed); };
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
  sessions_ = std::make_unique<SessionServer>(io_, std::move(listener), options, this);
  ControlOptions control;
  control.path = socket + ".ctl";
  control.admin_group = admin;  // who may see and command what is decided by credentials, not by the socket's mode
  ControlHandlers handlers;
  handlers.snapshot = [this](std::function<void(Snapshot)> answer) { TakeSnapshot(std::move(answer)); };
  handlers.drain = [this] { BeginDrain("asked by mlpo-ctl"); };
  handlers.bench = [this](const BenchRequest& request, std::function<void(Result<std::string>)> answer) {
    Bench(request, std::move(answer));
  };
  handlers.stop_bench = [this] { StopBench(); };
  handlers.path = [this](const PathCommand& command, std::function<void(Result<std::string>)> answer) {
    CommandPath(command, std::move(answer));
  };
  handlers.gc = [this](const GcRequest& request, std::function<void(Result<std::string>)> answer) {
    CollectGarbage(request, std::move(answer));
  };
  handlers.doctor = [this](std::function<void(std::string)> answer) { Examine(std::move(answer)); };
  handlers.trace = [this](double seconds, std::function<void(Trace)> answer) { RecordTrace(seconds, answer); };
  handlers.trace_stop = [this] { trace_end_.cancel(); };
  handlers.request_checkpoint = [this](std::optional<uint32_t> uid, std::optional<std::string> job,
                                       std::function<void(uint64_t)> answer) {
    loop_->Post([this, uid, job = std::move(job), answer = std::move(answer)] {
      PostMain([answer, asked = loop_->AskForCheckpoint(uid, job)] { answer(asked); });
    });
  };
  Result<std::unique_ptr<ControlServer>> server = ControlServer::Open(io_, control, std::move(handlers));
  if (!server.ok()) return server.status();
  control_ = std::move(*server);
  return ShowOutside(socket);
}

// What is told without the control socket: the counters file, and metrics over HTTP.
Status Daemon::ShowOutside(const std::string& socket) {
  Snapshot fixed;
  FillFixed(&fixed);
  fixed.state = StateName(fixed);
  live_.Prepare(std::move(fixed), started_ns_);
  Result<std::unique_ptr<CountersFile>> counters = CountersFile::Open(socket + MLPO_COUNTERS_SUFFIX, &live_);
  if (!counters.ok()) return counters.status();
  counters_ = std::move(*counters);
  if (config_.daemon.metrics_listen.empty()) return Status();
  MetricsHttp::Ask ask = [this](std::function<void(Snapshot)> answer) {
    PostMain([this, answer = std::move(answer)] { TakeSnapshot(answer); });
  };
  Result<std::unique_ptr<MetricsHttp>> http = MetricsHttp::Open(config_.daemon.metrics_listen, std::move(ask), &live_);
  if (!http.ok()) return http.status();
  metrics_http_ = std::move(*http);
  return Status();
}

Daemon::~Daemon() {
  control_.reset();
  metrics_http_.reset();
  counters_.reset();
  if (checkpoints_) checkpoints_->Stop();  // what it has posted to the loop and to main is not carried out any more
  housekeeping_.join();
  lookout_.join();
  // A collector would go on showing what was.
  const std::string& metrics = config_.daemon.metrics_file;
  if (metrics_written_ && ::unlink(metrics.c_str()) != 0 && errno != ENOENT)
    spdlog::warn("event=remove_failed file={} errno={}", metrics, errno);
  if (pool_) pool_->StopGrowing();
  queues_.clear();  // wait for what is in flight
  workers_.reset();
  for (auto& [id, storage] : storages_) {
    if (!storage->store) continue;
    Status removed = storage->store->Remove();
    if (!removed.ok()) spdlog::warn("event=remove_failed reason=\"{}\"", removed.message());
  }
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
  StoreCounters();
  StoreRecords();
  if (!config_.daemon.metrics_file.empty()) WriteMetrics();
  spdlog::info("event=ready socket={} node={} paths={} pool_bytes={} buffers={} workers={} adam={}", socket_.path(),
               config_.daemon.node, paths_.size(), pool_->pool_bytes(), pool_->count(), workers_->workers(),
               ActiveTarget());
  service_->Ready();
  if (service_->listens()) Beat();
  GrowPool();
  io_.run();
  Doing("ending", pool_->ready_bytes());
  EndInTime();
  pool_->StopGrowing();
  loop_->Stop();
  PostHousekeeping([this] { SaveRecords(); });  // behind what it may still save
  housekeeping_.join();
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
      ::_exit(EX_TEMPFAIL);  // scratch files stay for the next start to remove
    });
  } catch (const std::system_error& error) {
    spdlog::warn("event=end_without_deadline errno={}", error.code().value());
  }
}

// Leaves for the counters file that this thread goes round its loop, and what only it knows.
void Daemon::StoreCounters() {
  live_.BeatMain(NowNs());
  std::vector<PathSnapshot> paths;
  live_.Update([&](Snapshot* snapshot) {
    snapshot->state = StateName(*snapshot);
    snapshot->protocol_errors = sessions_->protocol_errors();
    snapshot->arenas_bytes = sessions_->arenas_bytes();
    paths = snapshot->paths;
  });
  LogPathStates(paths);
  counters_due_.expires_after(kCountersPeriod);
  counters_due_.async_wait([this](boost::system::error_code error) {
    if (!error) StoreCounters();
  });
}

void Daemon::LogPathStates(const std::vector<PathSnapshot>& paths) {
  for (size_t i = 0; i < paths.size(); ++i) {
    const PathSnapshot& path = paths[i];
    if (path.state.empty() || path.state == path_states_[i]) continue;  // empty: the data thread has told nothing yet
    const auto level = path.state == "healthy" ? spdlog::level::info : spdlog::level::warn;
    spdlog::log(level, "event=path_state path={} state={} before={} errno={}", path.name, path.state, path_states_[i],
                path.error);
    path_states_[i] = path.state;
    if (path.state == "healthy") UseAgain(static_cast<PathIndex>(i));
  }
}

// Sessions that came while it could not be used get a file there, too.
void Daemon::UseAgain(PathIndex path) {
  std::vector<std::pair<SessionId, std::shared_ptr<Storage>>> storages(storages_.begin(), storages_.end());
  PostHousekeeping([this, path, storages = std::move(storages)] { AddFiles(path, storages); });
}

void Daemon::AddFiles(PathIndex path, const std::vector<std::pair<SessionId, std::shared_ptr<Storage>>>& storages) {
  std::vector<bool> only(paths_.size());
  only[path] = true;
  for (const auto& [id, storage] : storages) {
    if (!storage->store) continue;
    (void)storage->store->AddMissing(only);
    // One that it had is told, too: the scheduler may have given it up since.
    const FileId file = storage->store->files()[path];
    if (file != kNone) loop_->Post([this, session = id, path, file] { loop_->SetFile(session, path, file); });
  }
}

// How much has been written to each path, for the next daemon. Now and then, and after the data thread's end.
void Daemon::StoreRecords() {
  records_due_.expires_after(kRecordsPeriod);
  records_due_.async_wait([this](boost::system::error_code error) {
    if (error) return;
    for (size_t i = 0; i < keepers_.size(); ++i) {
      if (keepers_[i]->stuck()) continue;  // or they would pile up
      keepers_[i]->Post(
          [path = paths_[i].get()] {
            const Status beat = path->Beat();
            if (!beat.ok()) spdlog::warn("event=beat_failed path={} reason=\"{}\"", path->name(), beat.message());
          },
          kRecordPatience);
    }
    TakeSnapshot([this](const Snapshot& snapshot) {
      PostHousekeeping([this, changed = TakeLifetimes(snapshot)] {
        for (const auto& [path, record] : changed) (void)SaveRecord(path, record);
        PostMain([this] { StoreRecords(); });
      });
    });
  });
}

// The records of paths that have been written to since.
std::vector<std::pair<size_t, PathRecord>> Daemon::TakeLifetimes(const Snapshot& snapshot) {
  std::vector<std::pair<size_t, PathRecord>> changed;
  for (size_t i = 0; i < records_.size(); ++i) {
    const uint64_t written = written_before_[i] + snapshot.paths[i].written_bytes;
    if (std::exchange(records_[i].written_bytes, written) != written) changed.emplace_back(i, records_[i]);
  }
  return changed;
}

void Daemon::SaveRecords() {
  Snapshot snapshot;
  snapshot.paths.resize(paths_.size());
  loop_->Fill(&snapshot);
  for (const auto& [path, record] : TakeLifetimes(snapshot)) (void)SaveRecord(path, record);
}

// "" or why it was not.
std::string Daemon::SaveRecord(size_t path, const PathRecord& record) {
  Path* const kept = paths_[path].get();
  const std::optional<Status> asked =
      keepers_[path]->Ask<Status>([kept, record] { return kept->SaveRecord(record); }, kRecordPatience);
  const Status saved = asked.value_or(Status(-ETIMEDOUT, "the file system does not answer"));
  if (saved.ok()) return "";
  spdlog::warn("event=record_not_saved path={} reason=\"{}\"", paths_[path]->name(), saved.message());
  return saved.message();
}

// Now, and again an interval after it is done; the file system may be slow.
void Daemon::WriteMetrics() {
  TakeSnapshot([this](Snapshot snapshot) {
    boost::asio::post(lookout_, [this, snapshot = std::move(snapshot)] {
      Status status = WriteMetricsFile(config_.daemon.metrics_file, MetricsText(snapshot, kNobody));
      if (status.ok()) metrics_written_.store(true, std::memory_order_relaxed);
      uint64_t suppressed = 0;
      if (!status.ok() && metrics_failures_.Allow(NowNs(), &suppressed))
        spdlog::warn("event=metrics_not_written suppressed={} reason=\"{}\"", suppressed, status.message());
      PostMain([this] {
        metrics_due_.expires_after(std::chrono::seconds(config_.daemon.metrics_interval_s));
        metrics_due_.async_wait([this](boost::system::error_code error) {
          if (!error) WriteMetrics();
        });
      });
    });
  });
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
    PostMain([this, snapshot] { TellProgress(*snapshot); });
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
  BenchUnwanted(DataLoop::kStopping);
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
  loop_->Post([this] { loop_->Drain([this] { PostMain([this] { EndSessions(); }); }); });
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
    ::_exit(EX_TEMPFAIL);  // scratch files stay for the next start to remove
  });
}

void Daemon::EndSessions() {
  if (state_ == State::kEnding) return;
  state_ = State::kEnding;
  loop_->Post([this] { loop_->AnnounceEnd(); });
  sessions_->EndAll(Status(-ESHUTDOWN, "the daemon is stopping"));
  PostMain([this] { MaybeFinish(); });  // behind the ends of those that had no session yet
}

void Daemon::MaybeFinish() {
  if (state_ != State::kEnding || sessions_->session_count() > 0) return;
  const auto is_used = [](const auto& entry) { return !entry.second->gone; };
  if (std::any_of(storages_.begin(), storages_.end(), is_used)) return;
  // What is left are files of saves whose sessions have ended. The drain has waited for those that move.
  if (!storages_.empty() && !saves_waited_for_) {
    saves_deadline_.expires_after(kSavesPatience);
    saves_deadline_.async_wait([this](boost::system::error_code error) {
      if (error) return;
      saves_waited_for_ = true;
      spdlog::warn("event=checkpoints_left sessions={}", storages_.size());
      MaybeFinish();
    });
    return;
  }
  saves_deadline_.cancel();
  drain_deadline_.cancel();
  signals_.cancel();
  io_.stop();
}

// ---- Sessions ----

void Daemon::SessionReady(const SessionIdentity& identity, std::shared_ptr<Areas> areas) {
  BenchUnwanted(DataLoop::kSessionComesFirst);
  loop_->Post([this, identity, areas = std::move(areas)] { loop_->AddSession(identity, areas); });
}

// Where new files are made and room is reserved: paths that take what is written, by what was last heard of them. If
// none does, all that are not disabled are asked, and say why.
std::vector<bool> Daemon::UsedPaths() const {
  std::vector<bool> uses(paths_.size());
  bool any = false;
  for (size_t i = 0; i < uses.size(); ++i) {
    uses[i] = !disabled_[i] && (path_states_[i] == "healthy" || path_states_[i] == "full");
    any |= uses[i];
  }
  for (size_t i = 0; i < uses.size() && !any; ++i) uses[i] = !disabled_[i];
  return uses;
}

Status Daemon::MakeFiles(Storage& storage, const FileOwner& owner, const std::vector<bool>& uses) {
  std::vector<ExtentStore::Place> places;
  for (size_t i = 0; i < paths_.size(); ++i) places.push_back({paths_[i].get(), keepers_[i].get()});
  Result<std::unique_ptr<ExtentStore>> store = ExtentStore::Create(std::move(places), owner, uses);
  if (!store.ok()) return store.status();
  storage.store = std::move(*store);
  return Status();
}

Status Daemon::Reserve(Storage& storage, const SessionIdentity& identity, uint64_t blocks,
                       const std::vector<bool>& uses) {
  const bool unused = storage.extents == 0;
  std::vector<std::pair<PathIndex, FileId>> added;
  if (!storage.store) {
    Status made = MakeFiles(storage, {identity.uid, identity.job, identity.rank, identity.generation}, uses);
    if (!made.ok()) return made;
    storage.owner = "rank " + std::to_string(identity.rank) + " of job '" + identity.job + "'";
  } else {
    added = storage.store->AddMissing(uses);
  }
  Status status =
      storage.store->Reserve(shares_, storage.extents + blocks, Scheduler::BufferBytes(config_.memory.block_elements),
                             "the session's state", uses);
  if (unused) {  // a path that did not answer in time may have none any more
    loop_->Post([this, id = identity.id, files = storage.store->files()] { loop_->SetFiles(id, files); });
  } else {
    for (const auto& [path, file] : added)
      loop_->Post([this, id = identity.id, on = path, made = file] { loop_->SetFile(id, on, made); });
  }
  if (status.ok()) storage.extents += blocks;
  return status;
}

void Daemon::MakeRoom(SessionId store, const FileOwner& owner, uint64_t bytes, uint64_t ticket) {
  std::shared_ptr<Storage>& storage = storages_[store];
  if (!storage) storage = std::make_shared<Storage>();
  const uint64_t more = bytes - std::min(bytes, storage->quota_bytes);
  if (const Status taken = TakeCapacity(*storage, owner.client_uid, owner.job, more); !taken.ok())
    return loop_->Post([this, store, bytes, ticket, taken] { loop_->RoomMade(store, bytes, ticket, {}, taken); });
  PostHousekeeping([this, storage, store, owner, bytes, more, ticket, uses = UsedPaths()] {
    Status status;
    if (!storage->store) {
      status = MakeFiles(*storage, owner, uses);
      storage->owner = "job '" + owner.job + "'";
    } else {
      (void)storage->store->AddMissing(uses);  // RoomMade tells of all files
    }
    if (status.ok()) {
      status =
          storage->store->Reserve(shares_, bytes / MLPO_ALIGN, MLPO_ALIGN, "what job '" + owner.job + "' keeps", uses);
    }
    std::vector<FileId> files;
    if (status.ok()) files = storage->store->files();
    if (!status.ok()) PostMain([this, storage, more] { GiveCapacity(*storage, more); });
    loop_->Post([this, store, bytes, ticket, files, status] { loop_->RoomMade(store, bytes, ticket, files, status); });
  });
}

void Daemon::Probe(PathIndex path, uint64_t end) {
  const auto probe = [this, path, end] {
    const Status probed = paths_[path]->Probe(pool_->buffer_bytes(), end);
    if (!probed.ok()) {
      spdlog::warn("event=probe_failed path={} code={} reason=\"{}\"", paths_[path]->name(), probed.code(),
                   probed.message());
    }
    const int error = probed.ok() ? 0 : probed.os_errno() != 0 ? probed.os_errno() : EIO;
    loop_->Post([this, path, error] { loop_->ProbeDone(path, error); });
  };
  keepers_[path]->Post(probe, kProbePatience);
}

uint32_t Daemon::BlockCount(const SubgroupSpec& spec) const {
  return Scheduler::BlockCount(spec, config_.memory.block_elements);
}

void Daemon::PrepareStorage(const SessionIdentity& identity, const SubgroupSpec& spec,
                            std::function<void(Status)> done) {
  std::shared_ptr<Storage>& storage = storages_[identity.id];
  if (!storage) storage = std::make_shared<Storage>();
  const uint64_t blocks = BlockCount(spec);
  const uint64_t bytes = blocks * Scheduler::BufferBytes(config_.memory.block_elements);
  const Status taken = TakeCapacity(*storage, identity.uid, identity.job, bytes);
  if (!taken.ok()) return PostMain([done = std::move(done), taken] { done(taken); });
  storage->blocks += blocks;
  PostHousekeeping([this, storage, identity, blocks, bytes, uses = UsedPaths(), done = std::move(done)] {
    Status status = Reserve(*storage, identity, blocks, uses);
    PostMain([this, storage, blocks, bytes, done, status] {
      if (!status.ok()) {
        GiveCapacity(*storage, bytes);
        storage->blocks -= blocks;
      }
      done(status);
    });
  });
}

// Of the quotas. It goes back when the storage goes, at the latest.
Status Daemon::TakeCapacity(Storage& storage, uint32_t uid, const std::string& job, uint64_t bytes) {
  Status taken = sessions_->quotas().Take(uid, job, Quota::kCapacity, bytes);
  if (!taken.ok()) return taken;
  storage.uid = uid;
  storage.job = job;
  storage.quota_bytes += bytes;
  return taken;
}

void Daemon::GiveCapacity(Storage& storage, uint64_t bytes) {
  sessions_->quotas().Give(storage.uid, storage.job, Quota::kCapacity, bytes);
  storage.quota_bytes -= bytes;
}

void Daemon::AllocateArena(uint64_t bytes, int numa_node, std::shared_ptr<std::atomic<bool>> cancelled,
                           std::function<void(Result<std::shared_ptr<Memfd>>)> done) {
  const int node = config_.memory.numa == "off" ? -1 : numa_node;
  PostHousekeeping([this, bytes, node, cancelled = std::move(cancelled), done = std::move(done)] {
    Result<std::shared_ptr<Memfd>> memfd = Memfd::Create(bytes, node, *cancelled);
    PostMain([done, memfd] { done(memfd); });
  });
}

void Daemon::AddSubgroup(SessionId session, SubgroupSpec spec, std::function<void()> done) {
  loop_->Post([this, session, spec = std::move(spec), done = std::move(done)] {
    loop_->AddSubgroup(session, spec);
    PostMain(done);
  });
}

void Daemon::SetStaging(SessionId session, std::byte* data, uint64_t bytes, std::function<void()> done) {
  loop_->Post([this, session, data, bytes, done = std::move(done)] {
    loop_->SetStaging(session, data, bytes);
    PostMain(done);
  });
}

void Daemon::SessionEnded(const SessionIdentity& identity) {
  checkpoints_->SessionEnded(identity, sessions_->RanksOf(identity.uid, identity.job) == 0);
  loop_->Post([this, id = identity.id] { loop_->EndSession(id); });
}

// ---- Checkpoints ----

void Daemon::BeginCheckpoint(const SessionIdentity& identity, const CheckpointRequest& request,
                             std::function<void(Result<CheckpointBegun>)> done) {
  CheckpointRuns::Save save;
  save.directory = request.directory;
  save.tag = request.tag;
  save.step = request.step;
  save.attempt = AttemptId{request.attempt};
  save.overwrite = request.overwrite;
  const auto state = storages_.find(identity.id);
  save.bytes = state == storages_.end() ? 0 : state->second->blocks * pool_->buffer_bytes();
  save.ranks_here = request.ranks_here;
  save.newest_session = request.newest_session;
  save.files = request.files;
  checkpoints_->Begin(identity, save, [bytes = save.bytes, done](Result<CheckpointRuns::Begun> begun) {
    if (!begun.ok()) return done(begun.status());
    CheckpointBegun answer;
    answer.attempt = begun->attempt.bytes;
    answer.handle = begun->handle;
    answer.bytes = bytes;
    done(answer);
  });
}

void Daemon::BeginRestore(const SessionIdentity& identity, const RestoreRequest& request,
                          std::function<void(Result<RestoreBegun>)> done) {
  loop_->Post([this, identity, request, done = std::move(done)] {
    PostMain([this, identity, request, done, specs = loop_->Specs(identity.id)]() mutable {
      const std::optional<std::string> tag = request.tag.empty() ? std::nullopt : std::optional(request.tag);
      checkpoints_->Restore(
          identity, {request.directory, tag, AttemptId{request.attempt}, request.files}, std::move(specs),
          [done](Result<CheckpointRuns::Found> found) {
            if (!found.ok()) return done(found.status());
            done(RestoreBegun{found->attempt.bytes, found->tag, found->step, found->world_size, found->handle});
          });
    });
  });
}

// Of each block a second extent: the state as it is saved stays while training writes another.
void Daemon::MakeRoomForCopy(const SessionIdentity& identity, std::vector<bool> next,
                             CheckpointRuns::Options::RoomMade done) {
  const auto found = storages_.find(identity.id);
  if (found == storages_.end()) return done(std::vector<FileId>());  // no subgroups, no state
  const FileOwner owner{identity.uid, identity.job, identity.rank, sessions_->NextGeneration()};
  const std::shared_ptr<Storage> storage = found->second;
  // The room stays the session's, for its next checkpoint; and so does its quota.
  const uint64_t both = 2 * storage->blocks * Scheduler::BufferBytes(config_.memory.block_elements);
  const uint64_t more = both - std::min(both, storage->quota_bytes);
  const Status taken = TakeCapacity(*storage, identity.uid, identity.job, more);
  if (!taken.ok()) return done(taken.Within("a checkpoint needs as much room again as the state has"));
  std::vector<bool> uses = UsedPaths();
  for (size_t i = 0; i < next.size(); ++i) next[i] = next[i] && uses[i];
  PostHousekeeping([this, storage, next = std::move(next), owner, more, uses, done = std::move(done)] {
    Status status;
    std::vector<FileId> files;
    if (storage->store) {
      storage->store->MakeNext(next, owner);
      status = storage->store->ReserveForCopy(shares_, uses);
      const std::vector<FileId>& made = storage->store->next_files();
      const bool any = std::any_of(made.begin(), made.end(), [](FileId file) { return file != kNone; });
      if (!status.ok() && any) {
        // Where the session stays in its files, what an earlier copy has had reserved there may do: all is copied.
        const Status dropped = storage->store->DropNext();
        if (!dropped.ok()) spdlog::warn("event=remove_failed reason=\"{}\"", dropped.message());
        status = storage->store->ReserveForCopy(shares_, uses);
      }
      files = storage->store->next_files();
    }
    PostMain([this, storage, more, done, status, files = std::move(files)]() mutable {
      if (status.ok()) return done(std::move(files));
      GiveCapacity(*storage, more);
      done(status);
    });
  });
}

// Of the session's files on persistent paths: those that were made for this are its own now, or never will be.
void Daemon::UseNextFiles(SessionId session, bool used) {
  const auto found = storages_.find(session);
  if (found == storages_.end()) return;
  PostHousekeeping([storage = found->second, used] {
    if (!storage->store) return;
    if (used) return storage->store->UseNext();
    const Status dropped = storage->store->DropNext();
    if (!dropped.ok()) spdlog::warn("event=remove_failed reason=\"{}\"", dropped.message());
  });
}

void Daemon::RemoveLeft(SessionId session, PathIndex path, FileId file) {
  const auto found = storages_.find(session);
  if (found == storages_.end()) return;  // it has ended: all its files go
  PostHousekeeping([storage = found->second, path, file] {
    const Status removed = storage->store ? storage->store->RemoveLeft(path, file) : Status();
    if (!removed.ok()) spdlog::warn("event=remove_failed reason=\"{}\"", removed.message());
  });
}

// Also of one that has no files yet: it may get some before its state is taken.
void Daemon::HoldFiles(SessionId session, bool needed) {
  if (needed && sessions_->Find(session) != nullptr && !storages_.contains(session))
    storages_[session] = std::make_shared<Storage>();
  const auto found = storages_.find(session);
  if (found == storages_.end()) return;  // it has ended
  Storage& storage = *found->second;
  storage.saves += needed ? 1 : -1;
  if (storage.saves > 0 || !storage.gone) return;
  RemoveFiles(session, found->second);
}

void Daemon::OnGone(SessionId session) {
  auto it = storages_.find(session);
  std::shared_ptr<Storage> storage = it == storages_.end() ? nullptr : it->second;
  if (storage && storage->saves > 0) {
    // The rank may come again at once: its files have another generation.
    storage->gone = true;
    if (!IsStore(session)) sessions_->SessionGone(session);
    return;
  }
  RemoveFiles(session, std::move(storage));
}

void Daemon::RemoveFiles(SessionId session, std::shared_ptr<Storage> storage) {
  // Behind anything that housekeeping still does for this session.
  PostHousekeeping([this, session, storage] {
    if (storage && storage->store) {
      Status removed = storage->store->Remove();
      if (!removed.ok()) spdlog::warn("event=remove_failed session={} reason=\"{}\"", session, removed.message());
    }
    PostMain([this, session, storage] {
      const bool told = storage && storage->gone;
      if (storage) GiveCapacity(*storage, storage->quota_bytes);
      storages_.erase(session);
      if (!told && !IsStore(session)) sessions_->SessionGone(session);
      MaybeFinish();
    });
  });
}

void Daemon::Dispose(std::shared_ptr<void> memory) {
  PostHousekeeping([memory = std::move(memory)]() mutable { memory.reset(); });
}

// ---- Status ----

const char* Daemon::StateName(const Snapshot& snapshot) const {
  if (state_ == State::kStarting) return "starting";
  if (state_ != State::kReady) return "draining";
  for (const PathSnapshot& path : snapshot.paths) {
    if (path.state != "healthy") return "degraded";
  }
  return "ready";
}

void Daemon::FillQuotas(Snapshot* snapshot) const {
  for (const QuotaBook::Entry& entry : sessions_->quotas().Entries()) {
    QuotaSnapshot quota;
    quota.uid = entry.uid;
    quota.job = entry.job;
    for (size_t i = 0; i < kQuotas; ++i) quota.amounts.push_back({kQuotaNames[i], entry.used[i], entry.limits[i]});
    uint64_t blocks = 0;
    for (const PoolUseSnapshot& use : snapshot->pool_use) {
      if (use.uid == quota.uid && (quota.job.empty() || use.job == quota.job)) blocks += use.blocks;
    }
    const uint64_t limit = quota.job.empty() ? config_.quota.user_pool_bytes : config_.quota.job_pool_bytes;
    quota.amounts.push_back({"pool", blocks * pool_->buffer_bytes(), limit});
    snapshot->quotas.push_back(std::move(quota));
  }
}

// What it is to be, or what it has become.
uint64_t Daemon::PoolBytes() const { return pool_->growing() ? pool_->pool_bytes() : pool_->ready_bytes(); }

void Daemon::FillPool(PoolSnapshot* pool) const {
  pool->bytes = PoolBytes();
  pool->buffer_bytes = pool_->buffer_bytes();
  pool->locked = pool_->locked();
  pool->huge_pages = pool_->huge_pages();
  pool->huge_bytes = pool_->huge_bytes();
  pool->growing = pool_->growing();
  std::map<int, uint64_t> on;
  for (uint32_t piece = 0; piece < pool_->piece_count(); ++piece) {
    if (pool_->IsReady(piece) && pool_->piece(piece).node >= 0)
      on[pool_->piece(piece).node] += pool_->piece(piece).count;
  }
  pool->nodes.clear();
  for (const auto& [node, buffers] : on) pool->nodes.push_back({node, buffers});
}

void Daemon::FillFixed(Snapshot* snapshot) const {
  snapshot->version = DaemonVersion();
  snapshot->node = config_.daemon.node;
  snapshot->socket = socket_.path();
  snapshot->pid = ::getpid();
  snapshot->uptime_s = static_cast<double>(NowNs() - started_ns_) / kNsPerS;
  snapshot->adam_target = ActiveTarget();
  snapshot->adam_workers = workers_->workers();
  snapshot->protocol_errors = sessions_->protocol_errors();
  snapshot->arenas_bytes = sessions_->arenas_bytes();
  snapshot->arenas_limit_bytes = arenas_limit_bytes_;
  FillPool(&snapshot->pool);
  for (size_t i = 0; i < paths_.size(); ++i) {
    PathSnapshot path;
    path.name = paths_[i]->name();
    path.directory = paths_[i]->directory();
    path.direct_io = paths_[i]->direct_io();
    path.engine = queues_[i]->engine();
    path.registered_buffers = queues_[i]->registered_buffers();
    snapshot->paths.push_back(std::move(path));
  }
}

// What the machine is like for this daemon. Probes may take seconds.
void Daemon::Examine(std::function<void(std::string)> answer) {
  RunningFacts running;
  running.socket = socket_.path();
  running.pool = PoolBytes();
  running.pool_locked = pool_->locked();
  running.pool_huge = pool_->huge_pages();
  running.workers = workers_->workers();
  for (size_t i = 0; i < paths_.size(); ++i)
    running.paths.push_back({queues_[i]->engine(), paths_[i]->ReservedBytes()});
  boost::asio::post(lookout_, [this, running = std::move(running), answer = std::move(answer)] {
    std::string report =
        ReportJson(Judge(GatherFacts(config_, {}, &running, ParametersPerS(config_.paths))), /*running=*/true);
    PostMain([answer, report = std::move(report)] { answer(report); });
  });
}

// ---- Paths, by command ----

void Daemon::CommandPath(const PathCommand& command, std::function<void(Result<std::string>)> answer) {
  if (state_ != State::kReady) return answer(Status(-ESHUTDOWN, "the daemon is not ready"));
  std::string known;
  for (size_t i = 0; i < paths_.size(); ++i) {
    known += (i > 0 ? ", " : "") + paths_[i]->name();
    if (command.path != paths_[i]->name() && command.path != paths_[i]->directory()) continue;
    spdlog::info("event=path_command path={} command={}", paths_[i]->name(), command.name);
    const auto path = static_cast<PathIndex>(i);
    if (command.name == "enable") return Enable(path, std::move(answer));
    if (enabling_[path] > 0)  // which would undo it
      return answer(Status(-EBUSY, "path " + paths_[i]->name() + " is being enabled: ask again when that has ended"));
    return command.name == "disable" ? Disable(path, std::move(answer)) : Evacuate(path, std::move(answer));
  }
  answer(Status::Invalid("no path '" + command.path + "'; there are: " + known));
}

void Daemon::Disable(PathIndex path, std::function<void(Result<std::string>)> answer) {
  loop_->Post([this, path, answer = std::move(answer)] {
    const std::string needed = loop_->WhyNeeded(path);
    if (needed.empty()) loop_->DisablePath(path);
    PostMain([this, path, needed, answer] {
      if (!needed.empty()) return answer(Status(-EBUSY, "path " + paths_[path]->name() + " is needed: " + needed));
      disabled_[path] = true;
      answer(std::string("{\"state\":\"disabled\"}"));
    });
  });
}

// The others are asked for room for all that sessions have, before anything is moved.
void Daemon::Evacuate(PathIndex path, std::function<void(Result<std::string>)> answer) {
  std::vector<std::shared_ptr<Storage>> storages;
  for (const auto& [id, storage] : storages_) storages.push_back(storage);
  std::vector<bool> uses = UsedPaths();
  uses[path] = false;
  PostHousekeeping([this, path, storages, uses, answer = std::move(answer)] {
    std::string full;
    for (const auto& storage : storages) {
      if (!storage->store || !full.empty()) continue;
      const Status room = storage->store->ReserveAgain(shares_, uses);
      if (!room.ok()) full = "without it " + storage->owner + " has no place: " + room.message();
    }
    loop_->Post([this, path, full, answer] {
      const std::string needed = full.empty() ? loop_->WhyNeeded(path) : full;
      const uint64_t bytes = needed.empty() ? loop_->EvacuatePath(path) : 0;
      PostMain([this, path, needed, bytes, answer] {
        if (!needed.empty())
          return answer(Status(-ENOSPC, "path " + paths_[path]->name() + " is not evacuated: " + needed));
        disabled_[path] = true;
        answer("{\"state\":\"disabled\",\"total_bytes\":" + std::to_string(bytes) + "}");
      });
    });
  });
}

// Nothing is there any more: its files go, and nothing keeps the file system from being unmounted.
void Daemon::Evacuated(PathIndex path) {
  if (enabling_[path] > 0) return;  // which was asked for before this was known: it stays as it is
  std::vector<std::shared_ptr<Storage>> storages;
  for (const auto& [id, storage] : storages_) {
    if (id != kBenchStorage) storages.push_back(storage);  // a calibration uses its files past the scheduler
  }
  PathRecord record = records_[path];
  PostHousekeeping([this, path, storages, record] {
    for (const auto& storage : storages) {
      if (!storage->store) continue;
      const Status removed = storage->store->RemoveOn(path);
      if (!removed.ok())
        spdlog::warn("event=remove_failed path={} reason=\"{}\"", paths_[path]->name(), removed.message());
    }
    (void)SaveRecord(path, record);
    Path* const kept = paths_[path].get();
    const std::optional<Status> released =
        keepers_[path]->Ask<Status>([kept] { return kept->Release(); }, ExtentStore::kPatience);
    const Status status = released.value_or(Status(-ETIMEDOUT, "its file system does not answer"));
    if (status.ok()) {
      spdlog::info("event=evacuated path={}", kept->name());
    } else {
      spdlog::warn("event=evacuated path={} still_open=\"{}\"", kept->name(), status.message());
    }
  });
}

// Behind what an evacuation still has housekeeping do. What may take long is nothing that housekeeping, and with it
// each session that begins or ends, is to wait for.
void Daemon::Enable(PathIndex path, std::function<void(Result<std::string>)> answer) {
  ++enabling_[path];
  PostHousekeeping([this, path, answer = std::move(answer)] {
    boost::asio::post(lookout_, [this, path, answer] {
      Path* const kept = paths_[path].get();
      const std::optional<Status> asked =
          keepers_[path]->Ask<Status>([kept] { return kept->Retake(); }, kRetakePatience);
      const Status taken = asked.value_or(Status(
          -ETIMEDOUT, "the file system of path " + kept->name() + " (" + kept->directory() + ") does not answer"));
      PostMain([this, path, taken, answer] { Retaken(path, taken, answer); });
    });
  });
}

// Sessions have their files there before the scheduler uses it.
void Daemon::Retaken(PathIndex path, const Status& taken, const std::function<void(Result<std::string>)>& answer) {
  if (!taken.ok()) {
    --enabling_[path];
    return answer(taken);
  }
  std::vector<std::pair<SessionId, std::shared_ptr<Storage>>> storages(storages_.begin(), storages_.end());
  PostHousekeeping([this, path, storages = std::move(storages), answer] {
    AddFiles(path, storages);
    loop_->Post([this, path, answer] {
      loop_->EnablePath(path);
      PostMain([this, path, answer] {
        --enabling_[path];
        disabled_[path] = false;
        answer(std::string("{\"state\":\"probing\"}"));
      });
    });
  });
}

// ---- Garbage ----

// Each path's keeper looks at its own, so that none removes what another thread is making. The lookout only waits.
void Daemon::CollectGarbage(const GcRequest& request, std::function<void(Result<std::string>)> answer) {
  if (state_ != State::kReady) return answer(Status(-ESHUTDOWN, "the daemon is not ready"));
  const bool own = request.node.empty() || request.node == config_.daemon.node;
  boost::asio::post(lookout_, [this, request, own, answer = std::move(answer)] {
    GcReport all;
    all.dry_run = request.dry_run;
    for (size_t i = 0; i < paths_.size(); ++i) {
      Path* const path = paths_[i].get();
      const auto look = [path, request, own]() -> Result<GcReport> {
        if (own) return path->CollectGarbage(request.dry_run);
        CleanupOptions options;
        options.dry_run = request.dry_run;
        return CleanNode(path->directory(), request.node, options);
      };
      const std::optional<Result<GcReport>> report = keepers_[i]->Ask<Result<GcReport>>(look, kGcPatience);
      if (report && report->ok()) {
        all.Add(report->value());
      } else {
        all.failed.push_back(
            {path->directory(), 0, report ? report->status().message() : "its file system does not answer in time"});
      }
    }
    if (own) all.Add(RestsOfSaves(request.dry_run));
    spdlog::info("event=gc node={} dry_run={} removed={} bytes={} kept={} failed={}",
                 own ? config_.daemon.node : request.node, request.dry_run, all.removed.size(), all.removed_bytes(),
                 all.kept.size(), all.failed.size());
    PostMain([answer, text = GcJson(all)] { answer(text); });
  });
}

// Of saves that were cut, in directories of checkpoints, which may hang. In the lookout.
GcReport Daemon::RestsOfSaves(bool dry_run) {
  GcReport failed;
  const auto fail = [&failed](const std::string& why) {
    failed.failed.push_back({"the daemon's journal of checkpoints", 0, why});
    return failed;
  };
  const Result<std::shared_ptr<LooseThreads>> thread = LooseThreads::Start("ckpt-gc", 1);
  if (!thread.ok()) return fail(thread.status().message());
  const auto found = std::make_shared<std::promise<GcReport>>();
  std::future<GcReport> report = found->get_future();
  thread.value()->Post([found, runs = checkpoints_, dry_run] { found->set_value(runs->CollectGarbage(dry_run)); });
  if (report.wait_for(kGcPatience) != std::future_status::ready) return fail("a directory does not answer in time");
  return report.get();
}

// ---- Calibration ----

// One calibration, on its way through the threads: files (housekeeping), buffers (data), their content (housekeeping),
// measuring (data), saving (housekeeping), answer (main).
struct Daemon::BenchRun {
  Calibration::Options options;
  std::shared_ptr<Storage> storage = std::make_shared<Storage>();
  uint32_t buffers = 0;
  FileOwner owner;
  // Why it is not to go on; kept by main. Relaxed: looked at between steps until it measures; then the loop ends it.
  std::atomic<const char*> unwanted{nullptr};
  std::vector<PathMeasurement> results;
  std::string error;
  std::vector<BenchSnapshot> shown;
  std::function<void(Result<std::string>)> answer;
};

void Daemon::Bench(const BenchRequest& request, std::function<void(Result<std::string>)> answer) {
  if (state_ != State::kReady) return answer(Status(-ESHUTDOWN, "the daemon is not ready"));
  if (sessions_->session_count() > 0 || !storages_.empty()) {
    return answer(Status(-EBUSY, "sessions are connected (" + std::to_string(sessions_->session_count()) +
                                     "): measuring needs the paths for itself; ask when no trainer runs"));
  }
  auto run = std::make_shared<BenchRun>();
  run->answer = std::move(answer);
  for (size_t i = 0; i < paths_.size(); ++i) {
    const auto named = [&](const std::string& text) {
      return text == paths_[i]->name() || text == paths_[i]->directory();
    };
    const bool asked = std::any_of(request.paths.begin(), request.paths.end(), named);
    if (asked && disabled_[i])
      return run->answer(Status(-EBUSY, "path " + paths_[i]->name() + " is disabled: mlpo-ctl paths enable it first"));
    if (asked || (request.paths.empty() && !disabled_[i])) run->options.paths.push_back(static_cast<PathIndex>(i));
  }
  for (const std::string& text : request.paths) {
    std::string known;
    bool found = false;
    for (const auto& path : paths_) {
      found |= text == path->name() || text == path->directory();
      known += (known.empty() ? "" : ", ") + path->name();
    }
    if (!found) return run->answer(Status::Invalid("no path '" + text + "'; there are: " + known));
  }
  Calibration::Options& options = run->options;
  options.block_bytes = pool_->buffer_bytes();
  options.offset_bytes = Path::kFileHeaderBytes;
  options.file_blocks = std::max<uint64_t>(4, kBenchBytes / options.block_bytes);
  options.measure_ns = static_cast<int64_t>(request.seconds * kNsPerS);
  options.warm_up_ns = options.measure_ns * 2 / 5;
  options.deadline_ns = options.warm_up_ns + options.measure_ns + 20 * kNsPerS;
  options.max_depth_bytes = kBenchBytes;
  // Not the whole pool, which may have stayed smaller than planned: a session that connects while a path hangs can
  // work.
  const uint64_t ready = pool_->ready_bytes() / pool_->buffer_bytes();
  run->buffers = static_cast<uint32_t>(std::min<uint64_t>(2 * options.paths.size() * options.file_blocks,
                                                          std::max<uint64_t>(2 * options.paths.size(), ready / 2)));
  run->owner = {::geteuid(), "calibration", 0, static_cast<uint64_t>(NowNs())};
  bench_ = run;
  storages_[kBenchStorage] = run->storage;
  PostHousekeeping([this, run] {
    std::vector<double> shares(paths_.size());
    std::vector<bool> uses(paths_.size());
    for (const PathIndex path : run->options.paths) {
      shares[path] = 1.0 / static_cast<double>(run->options.paths.size());
      uses[path] = true;
    }
    Status status = MakeFiles(*run->storage, run->owner, uses);
    if (status.ok()) {
      status = run->storage->store->Reserve(shares, run->options.file_blocks * run->options.paths.size(),
                                            run->options.block_bytes, "the calibration", uses);
      run->options.files = run->storage->store->files();
      for (const PathIndex path : run->options.paths) {
        if (status.ok() && run->options.files[path] == kNone)
          status = Status(-EIO, "path " + paths_[path]->name() + " cannot be used now: mlpo-ctl paths says why");
      }
    }
    if (!status.ok()) run->error = status.message();
    loop_->Post([this, run] { LendToBench(run); });
  });
}

void Daemon::StopBench() {
  BenchUnwanted(kNobodyAsks);
  loop_->Post([this] { loop_->CancelCalibration(kNobodyAsks); });
}

// The first reason is told.
void Daemon::BenchUnwanted(const char* why) {
  const auto run = bench_.lock();
  if (run && run->unwanted.load(std::memory_order_relaxed) == nullptr)
    run->unwanted.store(why, std::memory_order_relaxed);
}

void Daemon::LendToBench(const std::shared_ptr<BenchRun>& run) {
  if (const char* why = run->unwanted.load(std::memory_order_relaxed)) run->error = why;
  if (run->error.empty()) {
    run->options.buffers = loop_->LendBuffers(run->buffers);
    if (run->options.buffers.size() < 2 * run->options.paths.size()) {
      run->error = "the pool has " + std::to_string(run->options.buffers.size()) + " free buffers, and " +
                   std::to_string(run->options.paths.size()) + " paths need two each: name fewer paths, or enlarge it";
      loop_->GiveBack(run->options.buffers);
    }
  }
  if (!run->error.empty()) return PostMain([this, run] { EndBench(run); });
  PostHousekeeping([this, run] {
    // What cannot be compressed, nor found twice. Gigabytes: whoever has come meanwhile does not wait for the rest.
    std::mt19937_64 random(static_cast<uint64_t>(NowNs()));
    for (const BufferIndex buffer : run->options.buffers) {
      if (run->unwanted.load(std::memory_order_relaxed) != nullptr) break;
      auto* words = reinterpret_cast<uint64_t*>(pool_->data(buffer));
      for (uint64_t i = 0; i < pool_->buffer_bytes() / sizeof(uint64_t); ++i) words[i] = random();
    }
    loop_->Post([this, run] {
      if (const char* why = run->unwanted.load(std::memory_order_relaxed)) {
        loop_->GiveBack(run->options.buffers);
        run->error = why;
        return PostMain([this, run] { EndBench(run); });
      }
      loop_->Calibrate(run->options, [this, run](const Calibration& ended) {
        run->results = ended.results();
        run->error = ended.error();
        if (ended.failed_path() != kNone)
          run->error = "path " + paths_[ended.failed_path()]->name() + ": " + run->error;
        PostMain([this, run] { EndBench(run); });
      });
    });
  });
}

// Takes over what was measured, then saves it.
void Daemon::EndBench(const std::shared_ptr<BenchRun>& run) {
  for (const PathMeasurement& result : run->results) written_before_[result.path] += result.written_bytes;
  if (!run->error.empty()) run->results.clear();
  for (const PathMeasurement& result : run->results) {
    // Where paths share a bottleneck, each is worth what it has of it when all are busy.
    const double together = result.together_bytes_per_s / result.mixed_bytes_per_s;
    const double scale = together < kSharedDevice ? together : 1;
    PathRecord::Calibration measured;
    measured.read_bytes_per_s = result.read_bytes_per_s * scale;
    measured.write_bytes_per_s = result.write_bytes_per_s * scale;
    measured.duplex = result.duplex;
    measured.read_depth_bytes = result.read_depth_bytes;
    measured.write_depth_bytes = result.write_depth_bytes;
    measured.unix_s =
        std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
    records_[result.path].calibration = measured;
    parameters_[result.path] = ParametersOf(config_.paths[result.path], records_[result.path]);
    BenchSnapshot shown;
    shown.name = paths_[result.path]->name();
    shown.read_bytes_per_s = result.read_bytes_per_s;
    shown.write_bytes_per_s = result.write_bytes_per_s;
    shown.duplex = result.duplex;
    shown.mixed_bytes_per_s = result.mixed_bytes_per_s;
    shown.together_bytes_per_s = result.together_bytes_per_s;
    shown.read_depth_bytes = result.read_depth_bytes;
    shown.write_depth_bytes = result.write_depth_bytes;
    shown.speeds_from = Name(parameters_[result.path].origin);
    run->shown.push_back(std::move(shown));
    loop_->Post(
        [this, path = result.path, parameters = parameters_[result.path]] { loop_->SetPath(path, parameters); });
    spdlog::info("event=calibrated path={} read_bytes_per_s={:.0f} write_bytes_per_s={:.0f} duplex={:.2f} from={}",
                 run->shown.back().name, measured.read_bytes_per_s, measured.write_bytes_per_s, measured.duplex,
                 run->shown.back().speeds_from);
  }
  PostHousekeeping([this, run, records = records_, parameters = parameters_] {
    shares_ = PathShares(parameters, PolicyOf(config_.scheduler.policy));
    if (run->storage->store) {
      Status removed = run->storage->store->Remove();
      if (!removed.ok()) spdlog::warn("event=remove_failed reason=\"{}\"", removed.message());
    }
    for (size_t i = 0; i < run->results.size(); ++i) {
      run->shown[i].not_saved = SaveRecord(run->results[i].path, records[run->results[i].path]);
    }
    PostMain([this, run] {
      storages_.erase(kBenchStorage);
      run->answer(run->error.empty() ? Result<std::string>(BenchJson(run->shown)) : Status(-ECANCELED, run->error));
      MaybeFinish();
    });
  });
}

// Until the time has come or trace_end_ is cancelled. Takes the place of one that goes on, which is not answered.
void Daemon::RecordTrace(double seconds, std::function<void(Trace)> answer) {
  loop_->Post([this] { loop_->StartTrace(); });
  trace_end_.expires_after(std::chrono::nanoseconds(static_cast<int64_t>(seconds * kNsPerS)));
  trace_end_.async_wait([this, number = ++traces_, answer = std::move(answer)](boost::system::error_code) {
    if (number != traces_) return;
    loop_->Post([this, answer] {
      PostMain([answer, trace = std::make_shared<Trace>(loop_->StopTrace())] { answer(std::move(*trace)); });
    });
  });
}

void Daemon::TakeSnapshot(std::function<void(Snapshot)> answer) {
  auto snapshot = std::make_shared<Snapshot>();
  FillFixed(snapshot.get());
  loop_->Post([this, snapshot, answer = std::move(answer)] {
    loop_->Fill(snapshot.get());
    PostMain([this, snapshot, answer] {
      for (SessionSnapshot& session : snapshot->sessions) {
        const ClientConnection* connection = sessions_->Find(session.id);
        if (connection != nullptr) session.arena_bytes = connection->arena_bytes();
      }
      for (size_t i = 0; i < paths_.size(); ++i) {
        snapshot->paths[i].lifetime_written_bytes = written_before_[i] + snapshot->paths[i].written_bytes;
      }
      snapshot->state = StateName(*snapshot);
      FillQuotas(snapshot.get());
      answer(std::move(*snapshot));
    });
  });
}

}  // namespace mlpo
