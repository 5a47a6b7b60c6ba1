#include "daemon/data_loop.h"

#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <tuple>

#include "daemon/base/check.h"
#include "daemon/base/client_memory.h"
#include "daemon/base/clock.h"
#include "daemon/scheduler/failure.h"

namespace mlpo {
namespace {

constexpr int64_t kSpinNs = 20'000;
constexpr int kLooks = 16;  // between two looks at the clock, well under kSpinNs
constexpr int64_t kTracePoolNs = 5 * kNsPerMs;
constexpr int64_t kTickNs = 100 * kNsPerMs;
constexpr int64_t kDrainPatienceNs = kNsPerS;
constexpr int kIdleSleepMs = 1000;
constexpr int kBusySleepMs = 100;
constexpr int64_t kSubmissionsPerTurn = 64;  // of one session, so that none waits for another's

constexpr uint64_t kCalibrationIds = uint64_t{1} << 63;  // transfers' ids from here on are a calibration's

constexpr char kBadCompletionIndex[] = "its completion index is impossible";

void Relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

DataLoop::LoopSession::LoopSession(const SessionIdentity& i, std::shared_ptr<Areas> a)
    : identity(i),
      areas(std::move(a)),
      reader(i.id, areas.get()),
      writer(areas->entries(), areas->completions(), areas->errors(), areas->daemon_lines(), areas->client_lines()) {}

DataLoop::DataLoop(Scheduler::Options options, Parts parts, Events events)
    : parts_(std::move(parts)),
      events_(std::move(events)),
      hang_timeout_ns_(options.hang_timeout_ns),
      scheduler_(std::move(options), this),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)) {
  MLPO_CHECK(epoll_);
  gate_->loop = this;
  Watch(messages_.event_fd(), EPOLLIN);
  Watch(parts_.transfers->event_fd(), EPOLLIN);
  Watch(parts_.done_jobs->event_fd(), EPOLLIN);
}

// What hangs in the files of a checkpoint stays there by itself, and has nothing of ours.
DataLoop::~DataLoop() {
  MLPO_CHECK(!thread_.joinable());
  {
    const std::lock_guard lock(gate_->mutex);
    gate_->loop = nullptr;
  }
  for (auto& [block, restoring] : restoring_) {
    while (!restoring.job->Abandon() && !restoring.job->done()) std::this_thread::yield();  // it copies a block
  }
  for (auto& [key, restore] : restores_) {
    restore.threads->Post([readers = std::move(restore.readers)]() mutable { readers.clear(); });
  }
  for (auto& [number, save] : saves_) {
    if (save.writer) save.writer->Leave();
  }
}

void DataLoop::Watch(int fd, uint32_t events) {
  epoll_event event = {};
  event.events = events;
  event.data.fd = fd;
  MLPO_CHECK(::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0);
}

void DataLoop::Start() {
  thread_ = std::thread([this] { Run(); });
}

void DataLoop::Stop() {
  Post([this] { stopped_ = true; });
  thread_.join();
}

void DataLoop::Post(std::function<void()> message) { messages_.Put(std::move(message)); }

// ---- The loop ----

void DataLoop::Run() {
  SetThreadName("mlpo-data");
  TakeShortTurns();
  int64_t last_work_ns = NowNs();
  while (!stopped_) {
    const int64_t now_ns = NowNs();
    // Looking is cheap and what comes is to be seen at once; a turn and the clock take several times as long.
    for (int i = 0; i < kLooks && !HasWork(); ++i) Relax();
    if (Turn(now_ns)) {
      last_work_ns = now_ns;
    } else if (now_ns - last_work_ns >= kSpinNs) {
      Sleep();
    }
  }
}

bool DataLoop::HasWork() const {
  if (parts_.transfers->Waits() || parts_.done_jobs->Waits() || messages_.Waits()) return true;
  for (const auto& [id, session] : sessions_) {
    if (session->reader.Waiting() != 0) return true;
  }
  return false;
}

bool DataLoop::Turn(int64_t now_ns) {
  bool worked = TakeQueues(now_ns);
  for (auto& [id, session] : sessions_) worked |= ReadRing(*session, now_ns);
  const bool wakes = now_ns >= scheduler_.wake_ns();
  const bool ticks = wakes || now_ns >= next_tick_ns_;
  if (ticks) {
    next_tick_ns_ = now_ns + kTickNs;
    if (wakes || !scheduler_.idle() || scheduler_.ailing()) scheduler_.Tick(now_ns);
    if (calibration_) calibration_->Tick(now_ns);
    GiveUpHanging(now_ns);
  }
  MaybeEndCalibration();
  if (worked && scheduler_.tracing() && now_ns >= next_trace_ns_) {
    next_trace_ns_ = now_ns + kTracePoolNs;
    scheduler_.TracePool(now_ns);
  }
  Publish();
  parts_.live->BeatData(now_ns);
  if (ticks) parts_.live->TryUpdate([&](Snapshot* snapshot) { FillTotals(snapshot, now_ns); });
  // What waits in the rings gets its refusal first; a client that goes on submitting does not hold the end up.
  if (drained_ && scheduler_.idle() && !calibration_ && (!worked || now_ns >= drain_patience_ns_))
    std::exchange(drained_, nullptr)();
  return worked;
}

bool DataLoop::TakeQueues(int64_t now_ns) {
  if (parts_.transfers->Waits()) parts_.transfers->TakeAll(&taken_transfers_);
  if (parts_.done_jobs->Waits()) parts_.done_jobs->TakeAll(&taken_jobs_);
  if (messages_.Waits()) messages_.TakeAll(&taken_messages_);
  const bool worked = !taken_transfers_.empty() || !taken_jobs_.empty() || !taken_messages_.empty();
  for (const TransferResult& result : taken_transfers_) {
    if (result.id >= kCalibrationIds) {
      calibration_->TransferDone(result, now_ns);
    } else {
      scheduler_.TransferDone(result, now_ns);
    }
  }
  for (Job* job : taken_jobs_) {
    const std::unique_ptr<SchedulerJob> done = std::move(jobs_.extract(job).mapped());
    TraceSpans(*done);
    done->Finish(scheduler_, now_ns);
  }
  taken_transfers_.clear();
  taken_jobs_.clear();
  for (const std::function<void()>& message : taken_messages_) message();
  taken_messages_.clear();
  return worked;
}

bool DataLoop::ReadRing(LoopSession& session, int64_t now_ns) {
  if (session.broken) return false;
  const int64_t waiting = session.reader.Waiting();
  if (waiting == 0) return false;
  if (waiting < 0) {
    Break(session, "its submission index is further from ours than the ring is long");
    return false;
  }
  const int64_t wanted = std::min(waiting, kSubmissionsPerTurn);
  const int64_t takes = std::min(wanted, session.writer.Room(wanted));
  if (takes < 0) Break(session, kBadCompletionIndex);
  if (takes <= 0) return false;
  Request request;
  for (int64_t i = 0; i < takes; ++i) {
    std::string wrong = session.reader.Next(&request);
    if (!wrong.empty()) {
      Break(session, std::move(wrong));
      break;
    }
    ++session.submissions;
    Accept(session, request, now_ns);
  }
  session.reader.Release();
  return true;
}

void DataLoop::Accept(LoopSession& session, const Request& request, int64_t now_ns) {
  session.writer.Accepted();
  if (!draining_) return scheduler_.Submit(request, now_ns);
  Completion completion;
  completion.session = request.session;
  completion.user_data = request.submission.user_data;
  completion.subgroup = request.submission.subgroup;
  completion.failure = Fail(-ESHUTDOWN, "the daemon is stopping");
  Complete(completion);
}

void DataLoop::Break(LoopSession& session, std::string reason) {
  session.broken = true;
  events_.broken(session.identity.id, std::move(reason));
}

void DataLoop::Publish() {
  for (LoopSession* session : to_publish_) session->writer.Publish();
  to_publish_.clear();
}

// What a client that rings sees to; one whose completions nobody takes has to wait.
bool DataLoop::RingHasWork(LoopSession& session) {
  return !session.broken && session.reader.WaitsBeforeSleep() && session.writer.Room(1) != 0;
}

void DataLoop::Sleep() {
  bool work = false;
  for (auto& [id, session] : sessions_) {
    SharedWords::Store(&session->areas->daemon_lines()->doorbell_wanted, 1, std::memory_order_seq_cst);
  }
  for (auto& [id, session] : sessions_) {
    if (!session->broken && !session->writer.IndexIsPossible()) Break(*session, kBadCompletionIndex);
    work |= RingHasWork(*session);
  }
  if (!work) {
    epoll_event events[64];
    const bool busy = !scheduler_.idle() || calibration_ || draining_;
    const int64_t wake_ms = std::max<int64_t>(0, (scheduler_.wake_ns() - NowNs()) / kNsPerMs + 1);
    const int backstop_ms = busy ? kBusySleepMs : kIdleSleepMs;
    const auto sleep_ms = static_cast<int>(std::min<int64_t>(wake_ms, backstop_ms));
    const int count = ::epoll_wait(epoll_.get(), events, 64, sleep_ms);
    MLPO_CHECK(count >= 0 || errno == EINTR);
    // A producer may ring after its message was taken. Turn() looks at every queue before we sleep again.
    for (int i = 0; i < count; ++i) {
      if (events[i].data.fd == messages_.event_fd()) messages_.ClearEvent();
      if (events[i].data.fd == parts_.transfers->event_fd()) parts_.transfers->ClearEvent();
      if (events[i].data.fd == parts_.done_jobs->event_fd()) parts_.done_jobs->ClearEvent();
    }
    if (count == 0 && sleep_ms == backstop_ms) {  // else the scheduler's time has come, and a ring may be on its way
      for (auto& [id, session] : sessions_) lost_wakeups_ += RingHasWork(*session);
    }
  }
  for (auto& [id, session] : sessions_) {
    SharedWords::Store(&session->areas->daemon_lines()->doorbell_wanted, 0, std::memory_order_relaxed);
  }
}

// ---- Messages from main ----

DataLoop::LoopSession* DataLoop::Find(SessionId session) {
  if (last_found_ != nullptr && last_found_->identity.id == session) return last_found_;
  auto it = sessions_.find(session);
  if (it == sessions_.end()) return nullptr;
  return last_found_ = it->second.get();
}

void DataLoop::AddPiece(uint32_t number) {
  const BufferPool::Piece& piece = parts_.pool->piece(number);
  scheduler_.AddBuffers(piece.first, piece.count, piece.node, NowNs());
}

void DataLoop::AddSession(const SessionIdentity& identity, std::shared_ptr<Areas> areas) {
  CancelCalibration(kSessionComesFirst);
  scheduler_.AddSession(identity);
  auto session = std::make_unique<LoopSession>(identity, std::move(areas));
  // Edge-triggered and never read: the client cannot make us block, and every write of it is seen.
  Watch(session->areas->doorbell_fd(), EPOLLIN | EPOLLET);
  if (draining_) session->writer.SetState(MLPO_SESSION_DRAINING);
  sessions_[identity.id] = std::move(session);
}

// Files are made in another thread: the session may have ended meanwhile.
void DataLoop::SetFiles(SessionId id, std::vector<FileId> files) {
  if (Find(id) != nullptr) scheduler_.SetFiles(id, std::move(files));
}

void DataLoop::AddSubgroup(SessionId id, const SubgroupSpec& spec) {
  scheduler_.AddSubgroup(id, spec);
  if (LoopSession* session = Find(id)) {
    session->reader.AddSubgroup(spec);
    session->parameters += spec.numel;
  }
}

void DataLoop::SetStaging(SessionId id, std::byte* data, uint64_t bytes) {
  LoopSession* session = Find(id);
  if (session == nullptr) return;
  staging_[id] = data;
  session->reader.SetStaging(data, bytes);
}

void DataLoop::EndSession(SessionId id) {
  auto it = sessions_.find(id);
  MLPO_CHECK(it != sessions_.end());
  MLPO_CHECK(::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, it->second->areas->doorbell_fd(), nullptr) == 0);
  Publish();
  last_found_ = nullptr;
  sessions_.erase(it);
  scheduler_.EndSession(id, NowNs());
}

void DataLoop::RoomMade(SessionId store, uint64_t bytes, uint64_t ticket, std::vector<FileId> files,
                        const Status& status) {
  Failure failure = status.ok() ? Failure() : Fail(status.code(), status.message());
  scheduler_.RoomMade(store, bytes, ticket, std::move(files), std::move(failure), NowNs());
}

void DataLoop::ProbeDone(PathIndex path, int error) { scheduler_.ProbeDone(path, error, NowNs()); }

uint64_t DataLoop::EvacuatePath(PathIndex path) {
  scheduler_.EvacuatePath(path, NowNs());
  if (draining_) scheduler_.EndEvacuations();  // it was asked for just before
  PathSnapshot snapshot;
  scheduler_.Fill(path, &snapshot, NowNs());
  return snapshot.evacuation_bytes;
}

// ---- Checkpoints ----

uint64_t DataLoop::BeginSave(SessionId session, uint32_t handle, const CopyPace::Options& pace,
                             std::vector<FileId> next_files, SaveEvents events) {
  const uint64_t save = scheduler_.BeginSave(session, handle, pace, std::move(next_files), NowNs());
  if (save != 0) saves_[save].events = std::move(events);
  return save;
}

void DataLoop::CopyState(uint64_t save, const std::shared_ptr<TakenState>& state, std::shared_ptr<PartWriter> writer) {
  const auto found = saves_.find(save);
  if (found == saves_.end()) return;
  found->second.manifest = std::move(state->manifest);
  found->second.writer = std::move(writer);
  scheduler_.CopyState(save, state->places, NowNs());
}

void DataLoop::PartWritten(const PartWriter::Written& written) {
  const auto found = part_writes_.find(written.id);
  MLPO_CHECK(found != part_writes_.end());
  const PartWrite write = found->second;
  part_writes_.erase(found);
  Manifest& manifest = saves_.at(write.save).manifest;
  Failure failure;
  if (written.error != 0) {
    const Pin& pin = *write.pin;
    const Status status =
        Status::Errno(written.error, "writing block " + std::to_string(pin.index) + " of subgroup " +
                                         std::to_string(pin.subgroup) + " to " + saves_.at(write.save).writer->shown());
    failure = Fail(status.code(), status.message());
    failure.os_errno = written.error;
  } else {
    BlockOf(manifest, *write.pin).hash = written.hash;
  }
  scheduler_.PartWritten(write.save, *write.pin, write.buffer, written.hash, std::move(failure),
                         written.finished_ns - written.started_ns, NowNs());
}

std::shared_ptr<PartWriter> DataLoop::ReleaseWriter(uint64_t save) {
  const auto found = saves_.find(save);
  return found == saves_.end() ? nullptr : std::exchange(found->second.writer, nullptr);
}

void DataLoop::FailSave(uint64_t save, const Status& status) {
  scheduler_.FailSave(save, Fail(status.code(), status.message()), NowNs());
}

void DataLoop::FailSaves(const Status& status) {
  std::vector<uint64_t> saves;
  for (const auto& [save, known] : saves_) saves.push_back(save);
  for (const uint64_t save : saves) FailSave(save, status);
}

void DataLoop::SaveEnded(uint64_t save, const Status& status, bool complete) {
  saves_.erase(save);
  scheduler_.SaveEnded(save, status.ok() ? Failure() : Fail(status.code(), status.message()), complete, NowNs());
}

bool DataLoop::BeginRestore(SessionId session, uint32_t handle,
                            std::map<SubgroupId, std::shared_ptr<PartReader>> readers,
                            std::shared_ptr<LooseThreads> threads) {
  if (!scheduler_.BeginRestore(session, handle)) {
    threads->Post([readers = std::move(readers)]() mutable { readers.clear(); });
    return false;
  }
  restores_[{session, handle}] = {std::move(readers), std::move(threads)};
  return true;
}

uint64_t DataLoop::AskForCheckpoint(std::optional<uint32_t> uid, const std::optional<std::string>& job) {
  uint64_t asked = 0;
  for (auto& [id, session] : sessions_) {
    const SessionIdentity& identity = session->identity;
    const bool meant = (!uid || identity.uid == *uid) && (!job || identity.job == *job);
    if (!meant || !(identity.features & MLPO_FEATURE_SNAPSHOT)) continue;
    session->writer.AskForCheckpoint();
    ++asked;
  }
  return asked;
}

void DataLoop::Drain(std::function<void()> drained) {
  draining_ = true;
  CancelCalibration(kStopping);
  scheduler_.EndEvacuations();
  drain_patience_ns_ = NowNs() + kDrainPatienceNs;
  drained_ = std::move(drained);
  for (auto& [id, session] : sessions_) session->writer.SetState(MLPO_SESSION_DRAINING);
}

void DataLoop::AnnounceEnd() {
  for (auto& [id, session] : sessions_) session->writer.SetState(MLPO_SESSION_ENDED);
}

// What is not a single session's. Allocates nothing: path states fit into their strings.
void DataLoop::FillTotals(Snapshot* snapshot, int64_t now_ns) const {
  snapshot->lost_wakeups = lost_wakeups_;
  snapshot->total_sessions = sessions_.size();
  snapshot->total_parameters = 0;
  for (const auto& [id, session] : sessions_) snapshot->total_parameters += session->parameters;
  for (size_t i = 0; i < snapshot->paths.size(); ++i) {
    scheduler_.Fill(static_cast<PathIndex>(i), &snapshot->paths[i], now_ns);
  }
  scheduler_.Fill(&snapshot->pool);
  scheduler_.Fill(&snapshot->steps, &snapshot->workers_busy_ns, now_ns);
  snapshot->checkpoint_totals = scheduler_.checkpoint_totals();
}

void DataLoop::Fill(Snapshot* snapshot) const {
  const int64_t now_ns = NowNs();
  FillTotals(snapshot, now_ns);
  snapshot->taken_ns = now_ns;
  scheduler_.Fill(&snapshot->pool_use);
  for (const auto& [id, session] : sessions_) {
    SessionSnapshot entry;
    entry.id = id;
    entry.job = session->identity.job;
    entry.rank = session->identity.rank;
    entry.world_size = session->identity.world_size;
    entry.pid = session->identity.pid;
    entry.uid = session->identity.uid;
    entry.generation = session->identity.generation;
    entry.submissions = session->submissions;
    scheduler_.Fill(id, &entry, now_ns);
    snapshot->sessions.push_back(std::move(entry));
  }
  for (const auto& [save, known] : saves_) {
    snapshot->checkpoints.push_back(known.events.shown);
    scheduler_.Fill(save, &snapshot->checkpoints.back(), now_ns);
  }
  std::sort(snapshot->sessions.begin(), snapshot->sessions.end(),
            [](const SessionSnapshot& a, const SessionSnapshot& b) { return a.id < b.id; });
  std::sort(snapshot->checkpoints.begin(), snapshot->checkpoints.end(),
            [](const CheckpointSnapshot& a, const CheckpointSnapshot& b) {
              return std::tie(a.job, a.uid, a.rank) < std::tie(b.job, b.uid, b.rank);
            });
}

// ---- Calibration ----

std::vector<BufferIndex> DataLoop::LendBuffers(uint32_t count) {
  if (!sessions_.empty() || draining_ || lent_) return {};
  std::vector<BufferIndex> buffers = scheduler_.LendBuffers(count);
  lent_ = !buffers.empty();
  return buffers;
}

void DataLoop::GiveBack(const std::vector<BufferIndex>& buffers) {
  lent_ = false;
  scheduler_.TakeBack(buffers, NowNs());
}

void DataLoop::Calibrate(Calibration::Options options, std::function<void(const Calibration&)> done) {
  MLPO_CHECK(lent_ && !calibration_);
  options.first_id = kCalibrationIds;
  calibrated_ = std::move(done);
  calibration_ = std::make_unique<Calibration>(std::move(options), [this](const Transfer& t) { StartTransfer(t); });
  if (draining_) calibration_->Cancel(kStopping);
  if (!sessions_.empty()) calibration_->Cancel(kSessionComesFirst);
  if (!calibration_->ended()) calibration_->Begin(NowNs());
  MaybeEndCalibration();
}

void DataLoop::CancelCalibration(const std::string& why) {
  if (calibration_) calibration_->Cancel(why);
}

void DataLoop::MaybeEndCalibration() {
  if (!calibration_ || !calibration_->ended()) return;
  const std::unique_ptr<Calibration> ended = std::move(calibration_);
  GiveBack(ended->buffers());
  std::exchange(calibrated_, nullptr)(*ended);
}

void DataLoop::SetPath(PathIndex path, const PathParameters& parameters) { scheduler_.SetPath(path, parameters); }

// ---- What the scheduler asks for ----

void DataLoop::StartTransfer(const Transfer& transfer) { parts_.queues[transfer.path]->Submit(transfer); }

void DataLoop::StartBlockWork(const Op& op, Block& block) {
  if (op.kind() == MLPO_OP_RESTORE) return StartRestore(op, block);
  const auto staging = staging_.find(op.request.session);
  std::unique_ptr<SchedulerJob> job =
      MakeBlockJob(op, block, parts_.pool->data(block.buffer), staging == staging_.end() ? nullptr : staging->second);
  job->node = parts_.pool->piece(parts_.pool->piece_of(block.buffer)).node;
  Start(std::move(job), op, block.index);
}

void DataLoop::StartChecksums(Block& block, uint8_t check, uint8_t form) {
  auto job = std::make_unique<ChecksumJob>(block, parts_.pool->data(block.buffer), check, form);
  job->node = parts_.pool->piece(parts_.pool->piece_of(block.buffer)).node;
  if (scheduler_.tracing()) {
    job->spans.resize(job->pieces);
    job->label = scheduler_.TraceLabel(block);
  }
  Submit(std::move(job));
}

void DataLoop::ChecksumsWrong(const Block& block, PathIndex path, uint64_t pieces, bool again) {
  uint64_t suppressed = 0;  // clients can ask for what is lost as often as they like
  if (!(again ? wrong_again_ : wrong_checksums_).Allow(NowNs(), &suppressed)) return;
  const Subgroup* subgroup = block.owner->subgroup();
  const std::string name = subgroup == nullptr ? block.owner->Name() : "subgroup " + std::to_string(subgroup->spec.id);
  spdlog::log(again ? spdlog::level::err : spdlog::level::warn,
              "event={} path={} session={} of=\"{}\" block={} file_offset={} pieces={} suppressed={}",
              again ? "wrong_checksum_again" : "wrong_checksum", scheduler_.PathName(path), block.owner->session->id,
              name, block.index, Path::kFileHeaderBytes + block.extent.offset, pieces, suppressed);
}

void DataLoop::StartStats(Op& op) {
  auto job = std::make_unique<StatsJob>(&op);
  if (const LoopSession* session = Find(op.request.session)) job->node = session->identity.numa_node;
  Start(std::move(job), op, 0);
}

void DataLoop::Start(std::unique_ptr<SchedulerJob> job, const Op& op, uint32_t block) {
  if (scheduler_.tracing()) {
    job->spans.resize(job->pieces);
    job->label = scheduler_.TraceLabel(op, block);
  }
  Submit(std::move(job));
}

void DataLoop::Submit(std::unique_ptr<SchedulerJob> job) {
  Job* submitted = job.get();
  jobs_[submitted] = std::move(job);
  parts_.workers->Submit(submitted);
}

// What began before the trace did is in it from its begin on.
void DataLoop::TraceSpans(const SchedulerJob& job) {
  if (!scheduler_.tracing()) return;
  TraceRecord record = job.label;
  for (const WorkSpan& span : job.spans) {
    if (span.begin_ns == 0) continue;
    record.place = span.worker;
    record.begin_ns = span.begin_ns;
    record.end_ns = span.end_ns;
    scheduler_.TraceWork(record);
  }
}

Trace DataLoop::StopTrace() {
  Trace trace = scheduler_.StopTrace(NowNs());
  trace.workers = parts_.workers->workers();
  return trace;
}

Failure DataLoop::CopySteps(const Op& op, std::vector<Tensor>& tensors) {
  constexpr int64_t kMaxStep = int64_t{1} << 53;  // exact in FP64, which the bias correction is formed in
  const mlpo_submission& submission = op.request.submission;
  if (submission.count == 0) return {};
  std::byte* staged = staging_.at(op.request.session) + submission.staging_offset;
  std::vector<int64_t> steps(submission.count);
  const size_t bytes = submission.count * sizeof(int64_t);
  if (submission.op == MLPO_OP_READ_STATE) {
    for (size_t i = 0; i < steps.size(); ++i) steps[i] = tensors[submission.first + i].step;
    CopyClientMemory(staged, steps.data(), bytes);
    return {};
  }
  CopyClientMemory(steps.data(), staged, bytes);
  for (size_t i = 0; i < steps.size(); ++i) {
    if (steps[i] >= 0 && steps[i] < kMaxStep) continue;
    Failure failure = Fail(-EINVAL, "step " + std::to_string(steps[i]) + " of tensor '" +
                                        tensors[submission.first + i].name + "' is negative or above 2^53");
    failure.tensor = static_cast<uint32_t>(submission.first + i);
    return failure;
  }
  for (size_t i = 0; i < steps.size(); ++i) tensors[submission.first + i].step = steps[i];
  return {};
}

void DataLoop::CopyPiece(const Op& op, std::vector<std::byte>& memory) {
  const mlpo_submission& submission = op.request.submission;
  std::byte* staged = staging_.at(op.request.session) + submission.staging_offset;
  std::byte* held = memory.data() + submission.first;
  if (submission.op == MLPO_OP_FLUSH) {
    CopyClientMemory(held, staged, submission.count);
  } else {
    CopyClientMemory(staged, held, submission.count);
  }
}

void DataLoop::Evacuated(PathIndex path) { events_.evacuated(path); }

void DataLoop::StartProbe(PathIndex path, uint64_t end) { events_.probe(path, end); }

void DataLoop::MakeRoom(const ObjectStore& store, uint64_t bytes, uint64_t ticket) {
  events_.make_room(store, bytes, ticket);
}

void DataLoop::StatePinned(const StateSave& save) {
  LoopSave& mine = saves_.at(save.id);
  mine.state = std::make_shared<TakenState>(StateOf(scheduler_, save, Path::kFileHeaderBytes));
  const auto goes_on_elsewhere = [](FileId file) { return file != kNone; };
  if (std::any_of(save.next_files.begin(), save.next_files.end(), goes_on_elsewhere)) mine.events.left();
}

void DataLoop::FileUnused(SessionId session, PathIndex path, FileId file) { events_.file_unused(session, path, file); }

void DataLoop::StateTaken(const StateSave& save) {
  LoopSave& mine = saves_.at(save.id);
  mine.state->left = scheduler_.ExtentsLeft(save);
  mine.events.taken(std::exchange(mine.state, nullptr));
}

void DataLoop::WritePart(uint64_t save, Pin& pin, BufferIndex buffer) {
  const uint64_t id = next_part_write_++;
  part_writes_[id] = {save, &pin, buffer};
  const uint32_t arrays = pin.parts & kPartMoments ? 3 : 1;
  saves_.at(save).writer->Write(id, parts_.pool->data(buffer), arrays, pin.bytes / arrays, pin.part_offset);
}

void DataLoop::StateCopied(uint64_t save, const Failure& failure) {
  LoopSave& mine = saves_.at(save);
  mine.events.copied(failure, std::move(mine.manifest));
}

// nullptr: the client ended the handle, or registered the subgroup, after it began.
std::shared_ptr<PartReader> DataLoop::ReaderOf(const Op& op) const {
  const mlpo_submission& submission = op.request.submission;
  const auto restore = restores_.find({op.request.session, static_cast<uint32_t>(submission.first)});
  if (restore == restores_.end()) return nullptr;
  const auto found = restore->second.readers.find(submission.subgroup);
  return found == restore->second.readers.end() ? nullptr : found->second;
}

// By a thread that may wait: workers have Adam to do.
void DataLoop::StartRestore(const Op& op, Block& block) {
  std::shared_ptr<PartReader> reader = ReaderOf(op);
  if (!reader) {
    return Post([this, &block] {
      scheduler_.BlockRestored(block, 0, Fail(-EBADF, "the restore was ended, or began before the subgroup was there"),
                               NowNs());
    });
  }
  const LoopRestore& restore = restores_.at({op.request.session, static_cast<uint32_t>(op.request.submission.first)});
  auto job = std::make_shared<BlockRestore>(op, block, parts_.pool->data(block.buffer), std::move(reader));
  restoring_[&block] = {job, op.request.session, NowNs()};
  restore.threads->Post([gate = gate_, job] {
    if (!job->Run()) return;
    const std::lock_guard lock(gate->mutex);
    if (DataLoop* const loop = gate->loop) loop->Post([loop, job] { loop->BlockRead(job); });
  });
}

void DataLoop::BlockRead(const std::shared_ptr<BlockRestore>& job) {
  restoring_.erase(&job->block());
  job->Finish(scheduler_, NowNs());
}

// Blocks and saves whose files do not answer: at once if nobody is there who wants them, soon if the daemon is to end.
void DataLoop::GiveUpHanging(int64_t now_ns) {
  std::vector<std::pair<Block*, int64_t>> given_up;
  for (auto it = restoring_.begin(); it != restoring_.end();) {
    const Restoring& restoring = it->second;
    const bool wanted = sessions_.contains(restoring.session);
    const int64_t patience_ns = !wanted ? 0 : draining_ ? Scheduler::kStalledNs : hang_timeout_ns_;
    const int64_t age_ns = now_ns - restoring.since_ns;
    const bool hangs = !wanted || (patience_ns > 0 && age_ns >= patience_ns);
    if (!hangs || !restoring.job->Abandon()) {
      ++it;
      continue;
    }
    given_up.emplace_back(it->first, age_ns);
    it = restoring_.erase(it);
  }
  for (const auto& [block, age_ns] : given_up) {
    Failure failure = Fail(MLPO_E_IO, "restoring: the checkpoint's files have not answered for " +
                                          std::to_string(age_ns / kNsPerS) + " s");
    failure.os_errno = ETIMEDOUT;
    scheduler_.BlockRestored(*block, 0, std::move(failure), now_ns);
  }
  if (draining_) scheduler_.GiveUpStalled(Scheduler::kStalledNs, now_ns);
}

Failure DataLoop::RestoreSteps(const Op& op, std::vector<Tensor>& tensors) {
  const std::shared_ptr<PartReader> reader = ReaderOf(op);
  if (!reader) return Fail(-EBADF, "the restore was ended before the steps were taken over");
  const RestorePlan& plan = reader->plan();
  std::unordered_map<std::string, int64_t> steps;
  for (size_t i = 0; i < plan.tensors().size(); ++i) steps[plan.tensors()[i].name] = plan.step(i);
  for (Tensor& tensor : tensors) {
    const auto found = steps.find(tensor.name);
    MLPO_CHECK(found != steps.end());  // the plan is of just these tensors
    tensor.step = found->second;
  }
  return {};
}

void DataLoop::RestoreEnded(SessionId session, uint32_t handle) {
  const auto found = restores_.find({session, handle});
  if (found == restores_.end()) return;
  // Closing their files may take its time.
  found->second.threads->Post([readers = std::move(found->second.readers)]() mutable { readers.clear(); });
  restores_.erase(found);
}

void DataLoop::PublishEpoch(const Subgroup& subgroup) {
  auto* header =
      reinterpret_cast<mlpo_slot_header*>(subgroup.slot ? subgroup.spec.lent + *subgroup.slot : subgroup.spec.header);
  std::atomic_ref<uint64_t>(header->epoch).store(subgroup.epoch, std::memory_order_release);
}

void DataLoop::Complete(const Completion& completion) {
  LoopSession* session = Find(completion.session);
  if (session == nullptr) return;
  session->writer.Write(completion);
  if (std::find(to_publish_.begin(), to_publish_.end(), session) == to_publish_.end()) to_publish_.push_back(session);
}

void DataLoop::SessionGone(SessionId session) {
  staging_.erase(session);
  events_.gone(session);
}

}  // namespace mlpo
