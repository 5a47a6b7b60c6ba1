// FakeTier: paths, workers and memory for a Scheduler under test, in virtual time and without a disk.
//
// Each path reads and writes at its own speed, one transfer after another a direction, the two directions at once (full
// duplex). Workers take a fixed time a block. What a buffer or extent holds is a token, so that a wrong, stale or
// half-written block is seen at once: the tier checks every rule of ownership that real memory cannot.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <queue>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "daemon/scheduler/scheduler.h"
#include "proto/abi.h"

namespace mlpo::test {

class FakeTier : public SchedulerActions {
 public:
  struct PathSpeed {
    double read_bytes_per_s = 1e9;
    double write_bytes_per_s = 1e9;
  };
  FakeTier(Scheduler::Options options, std::vector<PathSpeed> speeds, int64_t work_ns = 1000)
      : options_(options), speeds_(std::move(speeds)), work_ns_(work_ns), busy_until_(speeds_.size()) {
    options_.path_names.resize(options_.paths.size(), "path");
    scheduler_ = std::make_unique<Scheduler>(options_, this);
    buffers_.resize(options_.buffers);
    for (size_t i = 0; i < speeds_.size(); ++i) faults_.push_back(nullptr);
  }

  Scheduler& scheduler() { return *scheduler_; }
  int64_t now_ns() const { return now_ns_; }

  // The pool grows.
  void AddBuffers(uint32_t count, int node) {
    const auto first = static_cast<BufferIndex>(buffers_.size());
    buffers_.resize(first + count);
    scheduler_->AddBuffers(first, count, node, now_ns_);
  }
  // All are of one job.
  void AddSession(SessionId session) {
    SessionIdentity identity;
    identity.id = session;
    identity.job = "job";
    identity.features = MLPO_FEATURES_HERE;
    scheduler_->AddSession(identity);
    known_.insert({session, true});
  }
  void AddSubgroup(SessionId session, SubgroupId id, std::vector<uint64_t> tensor_counts) {
    if (!known_.contains(session)) {
      AddSession(session);
      scheduler_->SetFiles(session, std::vector<FileId>(speeds_.size(), static_cast<FileId>(session)));
    }
    SubgroupSpec spec;
    spec.id = id;
    spec.key = "subgroup" + std::to_string(id);
    for (uint64_t count : tensor_counts) {
      spec.tensors.push_back({"tensor" + std::to_string(spec.tensors.size()), spec.numel, count, 0});
      spec.numel += count;
    }
    scheduler_->AddSubgroup(session, spec);
  }

  // Submits and returns the request's number; its completion will be in completions().
  uint64_t Submit(SessionId session, uint16_t op, SubgroupId subgroup, uint32_t epoch, uint32_t arg, uint64_t first,
                  uint64_t count, const std::string& name = "") {
    Request request;
    request.name = name;
    request.session = session;
    request.submission.op = op;
    request.submission.subgroup = subgroup;
    request.submission.user_data = ++requests_;
    request.submission.epoch = epoch;
    request.submission.arg = arg;
    request.submission.first = first;
    request.submission.count = count;
    scheduler_->Submit(request, now_ns_);
    return requests_;
  }
  uint64_t Grad(SessionId session, SubgroupId id, uint32_t epoch) {
    return Submit(session, MLPO_OP_GRAD, id, epoch, MLPO_PIECE_VALUE, 0, Numel(session, id));
  }
  uint64_t Update(SessionId session, SubgroupId id, uint32_t epoch, uint32_t priority = 0) {
    return Submit(session, MLPO_OP_UPDATE, id, epoch, priority, 0, 0);
  }
  uint64_t WriteState(SessionId session, SubgroupId id, uint32_t parts = MLPO_PART_MASTER) {
    return Submit(session, MLPO_OP_WRITE_STATE, id, 0, parts, 0, Numel(session, id));
  }
  // Steps of FETCH and FLUSH.
  uint64_t Open(SessionId session, uint16_t op, uint32_t handle, const std::string& name, uint64_t bytes = 0) {
    return Submit(session, op, handle, 0, MLPO_OBJECT_OPEN, name.size(), bytes, name);
  }
  uint64_t Piece(SessionId session, uint16_t op, uint32_t handle, uint64_t first, uint64_t count) {
    return Submit(session, op, handle, 0, MLPO_OBJECT_PIECE, first, count);
  }
  uint64_t Commit(SessionId session, uint32_t handle) {
    return Submit(session, MLPO_OP_FLUSH, handle, 0, MLPO_OBJECT_COMMIT, 0, 0);
  }
  uint64_t Close(SessionId session, uint16_t op, uint32_t handle) {
    return Submit(session, op, handle, 0, MLPO_OBJECT_CLOSE, 0, 0);
  }
  uint64_t Size(SessionId session, const std::string& name) {
    return Submit(session, MLPO_OP_FETCH, 0, 0, MLPO_OBJECT_SIZE, name.size(), 0, name);
  }
  uint64_t Delete(SessionId session, const std::string& name) {
    return Submit(session, MLPO_OP_DELETE, 0, 0, 0, name.size(), 0, name);
  }
  // A whole version in pieces of `piece` bytes, committed; returns the COMMIT's number.
  uint64_t Flush(SessionId session, uint32_t handle, const std::string& name, uint64_t bytes, uint64_t piece) {
    Open(session, MLPO_OP_FLUSH, handle, name, bytes);
    for (uint64_t at = 0; at < bytes; at += piece) {
      Piece(session, MLPO_OP_FLUSH, handle, at, std::min(piece, bytes - at));
    }
    return Commit(session, handle);
  }
  uint64_t scratch_bytes() {
    uint64_t bytes = 0;
    for (PathIndex i = 0; i < speeds_.size(); ++i) {
      PathSnapshot path;
      scheduler_->Fill(i, &path, now_ns_);
      bytes += path.scratch_bytes;
    }
    return bytes;
  }
  uint64_t Numel(SessionId session, SubgroupId id) { return scheduler_->FindSubgroup(session, id)->spec.numel; }

  // The next event; false if there is none. At least once a virtual second the scheduler is told the time.
  bool Step() {
    if (events_.empty()) return false;
    const int64_t next_second_ns = (now_ns_ / 1'000'000'000 + 1) * 1'000'000'000;
    if (events_.top().at_ns >= next_second_ns) {
      now_ns_ = next_second_ns;
      scheduler_->Tick(now_ns_);
      return true;
    }
    const Event event = events_.top();
    events_.pop();
    now_ns_ = std::max(now_ns_, event.at_ns);
    event.happen();
    return true;
  }
  void RunUntilQuiet() {
    while (Step()) {
    }
  }
  void RunUntilAnswered(uint64_t request) {
    while (!completions_.contains(request) && Step()) {
    }
  }
  // Lets time pass in which nothing comes.
  void Wait(int64_t ns) {
    const int64_t end = now_ns_ + ns;
    At(end, [] {});
    while (now_ns_ < end && Step()) {
    }
  }

  // By request number; asking for one that has not been answered is the test's own fault.
  const Completion& completion(uint64_t request) const { return completions_.at(request); }
  bool answered(uint64_t request) const { return completions_.contains(request); }
  int status(uint64_t request) const { return answered(request) ? completion(request).failure.status : 1; }
  bool gone(SessionId session) const { return gone_.contains(session); }
  size_t gone_count() const { return gone_.size(); }
  // What rules were broken; empty if none.
  const std::string& violation() const { return violation_; }

  struct PathCounts {
    uint64_t reads = 0, writes = 0, read_bytes = 0, written_bytes = 0;
    uint32_t most_in_flight = 0, in_flight = 0;
  };
  const PathCounts& counts(PathIndex path) const { return counts_[path]; }
  // errno for a transfer; 0: it succeeds.
  using Fault = std::function<int(const Transfer&)>;
  void SetFault(PathIndex path, Fault fault) { faults_[path] = std::move(fault); }
  uint64_t updates() const { return updates_; }
  // Of all transfers, in their order.
  const std::vector<Transfer>& transfers() const { return transfers_; }
  // In order of their work: (subgroup, block).
  const std::vector<std::pair<SubgroupId, uint32_t>>& worked() const { return worked_; }

 private:
  struct Event {
    int64_t at_ns;
    uint64_t order;
    std::function<void()> happen;
    bool operator<(const Event& other) const {
      return at_ns != other.at_ns ? at_ns > other.at_ns : order > other.order;
    }
  };
  enum class Use { kIdle, kTransfer, kWork };
  struct Buffer {
    Use use = Use::kIdle;
    uint64_t token = 0;
  };
  using BlockName = std::pair<const BlockOwner*, uint32_t>;

  void At(int64_t at_ns, std::function<void()> happen) { events_.push({at_ns, ++order_, std::move(happen)}); }
  void Violate(const std::string& what) {
    if (violation_.empty()) violation_ = what;
  }
  void Use(BufferIndex buffer, enum Use use) {
    if (buffers_[buffer].use != Use::kIdle) Violate("buffer " + std::to_string(buffer) + " is in use twice");
    buffers_[buffer].use = use;
  }

  void StartTransfer(const Transfer& transfer) override {
    Use(transfer.buffer, Use::kTransfer);
    transfers_.push_back(transfer);
    PathCounts& counts = counts_[transfer.path];
    counts.most_in_flight = std::max(counts.most_in_flight, ++counts.in_flight);
    const bool read = transfer.direction == Direction::kRead;
    (read ? counts.reads : counts.writes)++;
    (read ? counts.read_bytes : counts.written_bytes) += transfer.bytes;
    const PathSpeed& speed = speeds_[transfer.path];
    int64_t& busy = busy_until_[transfer.path][read ? 0 : 1];
    const double seconds =
        static_cast<double>(transfer.bytes) / (read ? speed.read_bytes_per_s : speed.write_bytes_per_s);
    busy = std::max(busy, now_ns_) + static_cast<int64_t>(seconds * 1e9);
    At(busy, [this, transfer] { EndTransfer(transfer); });
  }

  void EndTransfer(const Transfer& transfer) {
    --counts_[transfer.path].in_flight;
    Buffer& buffer = buffers_[transfer.buffer];
    buffer.use = Use::kIdle;
    TransferResult result;
    result.id = transfer.id;
    result.path = transfer.path;
    result.error = faults_[transfer.path] ? faults_[transfer.path](transfer) : 0;
    uint64_t& stored = storage_[{transfer.path, transfer.file, transfer.offset}];
    if (result.error != 0) {
      if (transfer.direction == Direction::kWrite) stored = kGarbage;
    } else {
      result.bytes = transfer.bytes;
      (transfer.direction == Direction::kRead ? buffer.token : stored) =
          transfer.direction == Direction::kRead ? stored : buffer.token;
    }
    scheduler_->TransferDone(result, now_ns_);
  }

  void StartBlockWork(const Op& op, Block& block) override {
    Use(block.buffer, Use::kWork);
    Buffer& buffer = buffers_[block.buffer];
    uint64_t& version = versions_[BlockName{block.owner, block.index}];
    if (op.object() != nullptr && block.nonzero == 0) version = 0;  // a new one, maybe where another has been
    // What must be read has been read; what is all zero need not.
    const bool whole_write = op.kind() == MLPO_OP_WRITE_STATE && block.filled == 0;
    if (version != 0 && !whole_write && buffer.token != version) {
      Violate(block.owner->Name() + " block " + std::to_string(block.index) +
              ": the buffer does not hold its newest state");
    }
    if (op.kind() == MLPO_OP_UPDATE) ++updates_;
    if (op.kind() != MLPO_OP_READ_STATE && op.kind() != MLPO_OP_FETCH) version = ++next_version_;
    const uint64_t token = version;
    if (const Subgroup* subgroup = op.subgroup()) worked_.push_back({subgroup->spec.id, block.index});
    const BufferIndex index = block.buffer;
    worker_busy_ns_ = std::max(worker_busy_ns_, now_ns_) + work_ns_;
    At(worker_busy_ns_, [this, index, token, &block] {
      buffers_[index].use = Use::kIdle;
      buffers_[index].token = token;
      scheduler_->BlockWorkDone(block, now_ns_);
    });
  }
  void StartStats(Op& op) override {
    for (const StatChunk& chunk : op.stats.chunks) (*op.results)[chunk.chunk] = {chunk_sum, chunk_finite};
    At(now_ns_ + 1, [this, &op] { scheduler_->StatsDone(&op, now_ns_); });
  }
  Failure CopySteps(const Op&, std::vector<Tensor>&) override { return {}; }
  void CopyPiece(const Op&, std::vector<std::byte>&) override { ++small_pieces; }
  void MakeRoom(const ObjectStore& asks, uint64_t bytes, uint64_t ticket) override {
    if (++asking_[asks.id] != 1) Violate("a store asked for room twice at once");
    rooms.push_back(bytes);
    At(now_ns_ + 1000, [this, store = asks.id, bytes, ticket] {
      --asking_[store];
      const auto file = static_cast<FileId>(1'000'000 + (store & ~kStoreBit));
      scheduler_->RoomMade(store, bytes, ticket, std::vector<FileId>(speeds_.size(), file), room_failure, now_ns_);
    });
  }
  void PublishEpoch(const Subgroup& subgroup) override { epochs_[subgroup.spec.id] = subgroup.epoch; }
  void Complete(const Completion& completion) override {
    if (!completions_.insert({completion.user_data, completion}).second) Violate("a request was answered twice");
  }
  void SessionGone(SessionId session) override { gone_[session] = true; }

 public:
  double chunk_sum = 1;  // what statistics say of a chunk
  bool chunk_finite = true;
  Failure room_failure;         // of every MakeRoom
  std::vector<uint64_t> rooms;  // bytes that were asked for
  int small_pieces = 0;

 private:
  static constexpr uint64_t kGarbage = ~uint64_t{0};

  Scheduler::Options options_;
  std::vector<PathSpeed> speeds_;
  const int64_t work_ns_;
  std::unique_ptr<Scheduler> scheduler_;
  int64_t now_ns_ = 1;
  uint64_t order_ = 0;
  uint64_t requests_ = 0;
  std::priority_queue<Event> events_;
  std::vector<std::array<int64_t, 2>> busy_until_;  // by path: read, write
  int64_t worker_busy_ns_ = 0;
  std::vector<Buffer> buffers_;
  std::map<std::tuple<PathIndex, FileId, uint64_t>, uint64_t> storage_;
  std::map<BlockName, uint64_t> versions_;
  uint64_t next_version_ = 0;
  std::vector<Fault> faults_;
  std::map<uint64_t, Completion> completions_;
  std::map<SessionId, bool> known_;
  std::map<SessionId, bool> gone_;
  std::map<SessionId, int> asking_;  // questions for room under way
  std::map<SubgroupId, uint64_t> epochs_;
  uint64_t updates_ = 0;
  std::vector<std::pair<SubgroupId, uint32_t>> worked_;
  std::vector<Transfer> transfers_;
  std::string violation_;
  std::vector<PathCounts> counts_ = std::vector<PathCounts>(16);
};

}  // namespace mlpo::test
