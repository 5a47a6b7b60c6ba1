// BlockTier: one path on a real file system, its engine, workers, and the scheduler that drives them, without a daemon,
// a ring or a client around: for tests that change what the path's file holds, or what reads bring.
//
// Used from one thread, which is the data thread; each call returns when it is answered, or fails the test after a
// minute.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "daemon/adam/worker_pool.h"
#include "daemon/base/clock.h"
#include "daemon/block_jobs.h"
#include "daemon/io/io.h"
#include "daemon/scheduler/scheduler.h"
#include "proto/abi.h"
#include "tests/support/catch.h"
#include "tests/support/scratch_dir.h"

namespace mlpo::test {

class BlockTier : private SchedulerActions {
 public:
  static constexpr SessionId kSession = 1;
  struct Setup {
    uint64_t block_elements = 0;
    uint32_t buffers = 3;  // at least 3
    std::string engine = "auto";
    bool integrity = true;
    IoFaults* faults = nullptr;  // borrowed
  };
  // State by part; a gradient or parameters.
  using Floats = std::vector<float>;
  using Bytes = std::vector<std::byte>;

  explicit BlockTier(const Setup& setup) {
    PathConfig config;
    config.directory = folder_.path();
    path_ = Taken(Path::Open(config, "nvme", "node"));
    BufferPool::Options pool;
    pool.buffer_bytes = Scheduler::BufferBytes(setup.block_elements);
    pool.pool_bytes = setup.buffers * pool.buffer_bytes;
    pool.lock = false;
    pool_ = Taken(BufferPool::Create(pool));
    PathQueue::Options queue;
    queue.engine = setup.engine;
    queue.faults = setup.faults;
    queue_ = Taken(PathQueue::Start(queue, path_.get(), pool_.get(), &transfers_));
    workers_ = Taken(WorkerPool::Start({.workers = 2}, &done_jobs_));
    Scheduler::Options options;
    options.buffers = setup.buffers;
    options.block_elements = setup.block_elements;
    options.extents_offset_bytes = Path::kFileHeaderBytes;
    options.no_path_timeout_ns = 30 * kNsPerS;
    options.integrity = setup.integrity;
    options.paths.resize(1);
    options.path_names = {"nvme"};
    scheduler_ = std::make_unique<Scheduler>(std::move(options), static_cast<SchedulerActions*>(this));
    SessionIdentity identity;
    identity.id = kSession;
    identity.job = "job";
    identity.features = MLPO_FEATURES_HERE;
    scheduler_->AddSession(identity);
    file_ = MakeFile({1000, "job", 0, 1});
    scheduler_->SetFiles(kSession, {file_});
  }
  ~BlockTier() {
    scheduler_->EndSession(kSession, NowNs());
    const int64_t deadline_ns = NowNs() + kDeadlineNs;
    while (!gone_ || !scheduler_->idle()) {
      if (NowNs() > deadline_ns) std::abort();  // workers and engine use what is about to go
      Turn();
    }
  }

  // ---- Operations ----

  // Gradients and parameters share a slot, as BF16, which the test writes and reads. `kept_as`: as SubgroupSpec's.
  void AddSubgroup(SubgroupId id, uint64_t numel, std::optional<mlpo_dtype> kept_as = std::nullopt) {
    Bytes& slot = slots_[id];
    slot.resize(2 * numel);
    SubgroupSpec spec;
    spec.id = id;
    spec.key = "subgroup" + std::to_string(id);
    spec.dtype = spec.grad_dtype = MLPO_BFLOAT16;
    spec.numel = numel;
    spec.tensors = {{"tensor", 0, numel, 0}};
    spec.grad = spec.param = slot.data();
    spec.kept_as = kept_as;
    scheduler_->AddSubgroup(kSession, spec);
    Need(12 * numel);
  }
  Bytes& slot(SubgroupId id) { return slots_[id]; }

  // Of [first, first + count): all three parts, one after another.
  Completion WriteState(SubgroupId id, uint64_t first, const Floats& parts) {
    std::memcpy(staging_.data(), parts.data(), parts.size() * sizeof(float));
    return Do(StateOf(id, MLPO_OP_WRITE_STATE, first, parts.size() / 3));
  }
  Completion WritePart(SubgroupId id, uint32_t part, uint64_t first, const Floats& values) {
    std::memcpy(staging_.data(), values.data(), values.size() * sizeof(float));
    mlpo_submission submission = StateOf(id, MLPO_OP_WRITE_STATE, first, values.size());
    submission.arg = part;
    return Do(submission);
  }
  Completion ReadState(SubgroupId id, uint64_t first, uint64_t count, Floats* parts) {
    const Completion completion = Do(StateOf(id, MLPO_OP_READ_STATE, first, count));
    parts->resize(3 * count);
    std::memcpy(parts->data(), staging_.data(), parts->size() * sizeof(float));
    return completion;
  }
  // Of what is in the slot.
  Completion Grad(SubgroupId id, uint32_t epoch) {
    mlpo_submission submission = {};
    submission.op = MLPO_OP_GRAD;
    submission.subgroup = id;
    submission.epoch = epoch;
    submission.arg = MLPO_PIECE_VALUE;
    submission.count = slots_[id].size() / 2;
    return Do(submission);
  }
  Completion Update(SubgroupId id, uint32_t epoch, const mlpo_hyper& hyper) {
    mlpo_submission submission = {};
    submission.op = MLPO_OP_UPDATE;
    submission.subgroup = id;
    submission.epoch = epoch;
    return Do(submission, "", hyper);
  }
  // A named object as a whole, in one piece.
  Completion Flush(const std::string& name, const Bytes& bytes) {
    Need(bytes.size());
    std::memcpy(staging_.data(), bytes.data(), bytes.size());
    (void)Step(MLPO_OP_FLUSH, MLPO_OBJECT_OPEN, name.size(), bytes.size(), name);
    const Completion piece = Step(MLPO_OP_FLUSH, MLPO_OBJECT_PIECE, 0, bytes.size());
    return piece.failure.status != 0 ? piece : Step(MLPO_OP_FLUSH, MLPO_OBJECT_COMMIT, 0, 0);
  }
  Completion Fetch(const std::string& name, Bytes* bytes) {
    (void)Step(MLPO_OP_FETCH, MLPO_OBJECT_OPEN, name.size(), 0, name);
    const Completion piece = Step(MLPO_OP_FETCH, MLPO_OBJECT_PIECE, 0, bytes->size());
    std::memcpy(bytes->data(), staging_.data(), bytes->size());
    (void)Step(MLPO_OP_FETCH, MLPO_OBJECT_CLOSE, 0, 0);
    return piece;
  }

  // What a checkpoint pins of the state as it is. The checkpoint is given up then.
  std::vector<Pin> TakeState() {
    REQUIRE(scheduler_->BeginSave(kSession, kHandle, {0.05, 1e9, uint64_t{1} << 20}, {}, NowNs()) != 0);
    mlpo_submission submission = {};
    submission.op = MLPO_OP_SNAPSHOT;
    submission.arg = MLPO_SNAPSHOT_TAKE;
    submission.first = kHandle;
    REQUIRE(Do(submission).failure.status == 0);
    RunUntil([&] { return !saving_; });
    return std::exchange(pins_, {});
  }

  // ---- What there is ----

  const Subgroup& subgroup(SubgroupId id) const { return *scheduler_->FindSubgroup(kSession, id); }
  PathSnapshot path() const {
    PathSnapshot snapshot;
    scheduler_->Fill(0, &snapshot, NowNs());
    return snapshot;
  }
  const char* engine() const { return queue_->engine(); }
  // Until nothing is written or read any more.
  void Settle() {
    RunUntil([&] { return scheduler_->idle(); });
  }
  // The byte of the extent, counted from its begin, in the path's file.
  uint64_t FileOffset(const Block& block, uint64_t at) const {
    return Path::kFileHeaderBytes + block.extent.offset + at;
  }
  // Its name, for those who open it on their own.
  std::string StateFile() const {
    return folder_.path() + "/mlpo/" + std::to_string(::geteuid()) + "/node/1000-job/0-1/state";
  }
  FileId file() const { return file_; }
  FileId objects_file() const { return objects_file_; }
  // The transfers so far, as they were asked for.
  const std::vector<Transfer>& reads() const { return reads_; }
  const std::vector<Transfer>& writes() const { return writes_; }

  // Changes a bit of a byte of a file, past everything that the daemon knows.
  void Flip(FileId file, uint64_t offset, int bit) {
    const int fd = path_->descriptor(file);
    alignas(MLPO_ALIGN) std::byte page[MLPO_ALIGN];
    const auto at = static_cast<off_t>(offset / MLPO_ALIGN * MLPO_ALIGN);
    REQUIRE(::pread(fd, page, sizeof page, at) == sizeof page);
    page[offset % MLPO_ALIGN] ^= std::byte{static_cast<unsigned char>(1u << bit)};
    REQUIRE(::pwrite(fd, page, sizeof page, at) == sizeof page);
  }

 private:
  static constexpr int64_t kDeadlineNs = 60 * kNsPerS;
  static constexpr uint64_t kFileBytes = uint64_t{64} << 20;
  static constexpr uint32_t kHandle = 7;

  template <class T>
  static T Taken(Result<T> result) {
    INFO(result.status().message());
    REQUIRE(result.ok());
    return std::move(*result);
  }
  void Need(uint64_t bytes) { staging_.resize(std::max<size_t>(staging_.size(), bytes)); }
  FileId MakeFile(const FileOwner& owner) {
    const FileId file = Taken(path_->CreateFile(owner));
    REQUIRE(path_->Reserve(file, kFileBytes, /*unused=*/true).ok());
    return file;
  }
  static mlpo_submission StateOf(SubgroupId id, uint16_t op, uint64_t first, uint64_t count) {
    mlpo_submission submission = {};
    submission.op = op;
    submission.subgroup = id;
    submission.arg = MLPO_PART_STATE;
    submission.first = first;
    submission.count = count;
    return submission;
  }
  Completion Step(uint16_t op, uint32_t arg, uint64_t first, uint64_t count, const std::string& name = "") {
    mlpo_submission submission = {};
    submission.op = op;
    submission.subgroup = kHandle;
    submission.arg = arg;
    submission.first = first;
    submission.count = count;
    return Do(submission, name);
  }

  Completion Do(const mlpo_submission& submission, const std::string& name = "", const mlpo_hyper& hyper = {}) {
    Request request;
    request.session = kSession;
    request.submission = submission;
    request.submission.user_data = ++requests_;
    request.hyper = hyper;
    request.name = name;
    scheduler_->Submit(request, NowNs());
    RunUntil([&] { return completions_.contains(requests_); });
    return completions_.extract(requests_).mapped();
  }

  template <class F>
  void RunUntil(F reached) {
    const int64_t deadline_ns = NowNs() + kDeadlineNs;
    while (!reached()) {
      REQUIRE(NowNs() < deadline_ns);
      Turn();
    }
  }

  void Turn() {
    constexpr int kTickMs = 20;
    for (const std::function<void()>& then : std::exchange(later_, {})) then();
    pollfd events[2] = {{transfers_.event_fd(), POLLIN, 0}, {done_jobs_.event_fd(), POLLIN, 0}};
    (void)::poll(events, 2, kTickMs);  // what has come is looked for below, whatever it says
    std::vector<TransferResult> ended;
    transfers_.TakeAll(&ended);
    for (const TransferResult& result : ended) scheduler_->TransferDone(result, NowNs());
    std::vector<Job*> done;
    done_jobs_.TakeAll(&done);
    for (Job* job : done) {
      const std::unique_ptr<SchedulerJob> ours = std::move(jobs_.extract(job).mapped());
      ours->Finish(*scheduler_, NowNs());
    }
    scheduler_->Tick(NowNs());
    // A path that has brought wrong bytes is probed at once: a test would wait for it a second each time.
    if (scheduler_->ailing() && !probing_) scheduler_->EnablePath(0, NowNs());
  }

  void Start(std::unique_ptr<SchedulerJob> job) {
    Job* const submitted = job.get();
    jobs_[submitted] = std::move(job);
    workers_->Submit(submitted);
  }

  // ---- SchedulerActions ----

  void StartTransfer(const Transfer& transfer) override {
    (transfer.direction == Direction::kRead ? reads_ : writes_).push_back(transfer);
    queue_->Submit(transfer);
  }
  void StartBlockWork(const Op& op, Block& block) override {
    Start(MakeBlockJob(op, block, pool_->data(block.buffer), staging_.data()));
  }
  void StartChecksums(Block& block, uint8_t check, uint8_t form) override {
    Start(std::make_unique<ChecksumJob>(block, pool_->data(block.buffer), check, form));
  }
  void ChecksumsWrong(const Block&, PathIndex, uint64_t, bool) override {}
  void StartStats(Op& op) override { Start(std::make_unique<StatsJob>(&op)); }
  Failure CopySteps(const Op&, std::vector<Tensor>&) override { return {}; }
  void CopyPiece(const Op&, std::vector<std::byte>&) override {}  // objects here are larger
  void Evacuated(PathIndex) override {}                           // nobody asks for it here
  void StartProbe(PathIndex path, uint64_t) override {
    probing_ = true;
    later_.push_back([this, path] {
      probing_ = false;
      scheduler_->ProbeDone(path, 0, NowNs());
    });
  }
  void MakeRoom(const ObjectStore& store, uint64_t bytes, uint64_t ticket) override {
    later_.push_back([this, id = store.id, bytes, ticket] {
      if (objects_file_ == 0) objects_file_ = MakeFile({1000, "job", kObjectsRank, 1});
      scheduler_->RoomMade(id, bytes, ticket, {objects_file_}, {}, NowNs());
    });
  }
  void PublishEpoch(const Subgroup&) override {}
  void Complete(const Completion& completion) override { completions_[completion.user_data] = completion; }
  void SessionGone(SessionId session) override { gone_ |= session == kSession; }
  void SessionHangs(SessionId) override {}  // nothing hangs here
  // Nothing is copied or restored here.
  void StatePinned(const StateSave& save) override {
    saving_ = true;
    pins_.assign(save.pins.begin(), save.pins.end());
  }
  void FileUnused(SessionId, PathIndex, FileId) override { std::abort(); }
  void StateTaken(const StateSave& save) override {
    later_.push_back([this, id = save.id] {
      Failure failure;
      failure.status = -ECANCELED;
      scheduler_->FailSave(id, failure, NowNs());
    });
  }
  void WritePart(uint64_t, Pin&, BufferIndex) override { std::abort(); }
  void StateCopied(uint64_t save, const Failure&) override {
    later_.push_back([this, save] {
      saving_ = false;
      scheduler_->SaveEnded(save, {}, false, NowNs());
    });
  }
  Failure RestoreSteps(const Op&, std::vector<Tensor>&) override { std::abort(); }
  void RestoreEnded(SessionId, uint32_t) override { std::abort(); }

  // What workers and engine use comes before them: it goes after them.
  ScratchDir folder_;
  std::unique_ptr<Path> path_;
  std::unique_ptr<BufferPool> pool_;
  std::map<SubgroupId, Bytes> slots_;
  Bytes staging_;
  TransferResults transfers_;
  DoneJobs done_jobs_;
  std::unordered_map<Job*, std::unique_ptr<SchedulerJob>> jobs_;
  std::unique_ptr<PathQueue> queue_;
  std::unique_ptr<WorkerPool> workers_;
  std::unique_ptr<Scheduler> scheduler_;
  FileId file_ = 0;
  FileId objects_file_ = 0;
  std::vector<Transfer> reads_, writes_;
  std::vector<std::function<void()>> later_;
  std::map<uint64_t, Completion> completions_;
  uint64_t requests_ = 0;
  std::vector<Pin> pins_;
  bool saving_ = false;
  bool probing_ = false;
  bool gone_ = false;
};

}  // namespace mlpo::test
