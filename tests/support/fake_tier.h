// FakeTier: paths, workers and memory for a Scheduler under test, in virtual time and without a disk.
//
// Paths are SimulatedPaths. All workers share a block, one block after another.
//
// What a buffer or extent holds is a token, so that a wrong, stale, half-written or overwritten block is seen at once:
// the tier checks every rule of ownership that real memory cannot. violation() says which was broken.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <queue>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "daemon/scheduler/scheduler.h"
#include "proto/abi.h"
#include "tests/support/simulated_path.h"

namespace mlpo::test {

class FakeTier : public SchedulerActions {
 public:
  using PathSpeed = SimulatedPath::Speed;
  using Jitter = SimulatedPath::Jitter;
  struct Work {
    int64_t block_ns = 1000;  // one worker and a whole block; a shorter one takes its part
    int64_t stats_ns = 0;     // one worker, and the gradient of a whole block
    uint32_t workers = 1;
  };

  FakeTier(Scheduler::Options options, std::vector<PathSpeed> speeds, int64_t block_ns = 1000);
  FakeTier(Scheduler::Options options, std::vector<PathSpeed> speeds, Work work);

  Scheduler& scheduler() { return *scheduler_; }
  const Scheduler::Options& options() const { return options_; }
  int64_t now_ns() const { return now_ns_; }

  // The pool grows.
  void AddBuffers(uint32_t count, int node);

  // ---- Paths ----

  // From a time on, now at the earliest; changes of one path are given in their order. A speed of 0 hangs the path.
  void ChangeSpeed(PathIndex path, int64_t at_ns, PathSpeed speed) {
    paths_[path].device.ChangeSpeed(at_ns, speed, now_ns_);
  }
  void SetJitter(PathIndex path, Jitter jitter) { paths_[path].device.SetJitter(jitter, now_ns_); }
  // errno for a transfer that ends; 0: it succeeds. A failed write leaves garbage. Probes are asked about, too: as a
  // transfer whose id is 0.
  using Fault = std::function<int(const Transfer&)>;
  void SetFault(PathIndex path, Fault fault) { paths_[path].fault = std::move(fault); }

  // As the daemon carries it out: sessions get files there, if they had to give them back.
  void EnablePath(PathIndex path);

  struct PathCounts {
    uint64_t reads = 0, writes = 0, read_bytes = 0, written_bytes = 0;  // started
    uint64_t done_read_bytes = 0, done_written_bytes = 0;               // of those that succeeded
    uint32_t most_in_flight = 0, in_flight = 0;
    uint64_t probes = 0;  // which are in none of the others
  };
  const PathCounts& counts(PathIndex path) const { return paths_[path].counts; }
  // Whether a read that ends brings wrong bytes; `again`: it reads once more what was wrong. Scheduler::Options must
  // have integrity, or nobody notices.
  using Flip = std::function<bool(const Transfer&, bool again)>;
  void SetFlip(PathIndex path, Flip flip) { paths_[path].flip = std::move(flip); }
  // Transfers as they are started and as they end: for tests of order.
  std::function<void(const Transfer&)> on_transfer, on_transfer_end;

  // ---- Sessions ----

  void AddSession(SessionId session, const std::string& job = "job", uint32_t uid = 0);
  void AddSubgroup(SessionId session, SubgroupId id, std::vector<uint64_t> tensor_counts,
                   std::optional<mlpo_dtype> kept_as = std::nullopt);
  // Without a slot of its own: gradients and parameters of `kept_as`, in slots that SlotBytes() tells.
  void AddLentSubgroup(SessionId session, SubgroupId id, std::vector<uint64_t> tensor_counts, mlpo_dtype kept_as);
  uint64_t SlotBytes(SessionId session, SubgroupId id) {
    return scheduler_->FindSubgroup(session, id)->spec.slot_bytes;
  }
  void EndSession(SessionId session);

  // Submits and returns the request's number, which becomes its user_data; its completion will be in completions().
  uint64_t Submit(Request request);
  uint64_t Submit(SessionId session, uint16_t op, SubgroupId subgroup, uint32_t epoch, uint32_t arg, uint64_t first,
                  uint64_t count, const std::string& name = "");
  uint64_t Grad(SessionId session, SubgroupId id, uint32_t epoch) {
    return Submit(session, MLPO_OP_GRAD, id, epoch, MLPO_PIECE_VALUE, 0, Numel(session, id));
  }
  uint64_t Update(SessionId session, SubgroupId id, uint32_t epoch, uint32_t priority = 0) {
    return Submit(session, MLPO_OP_UPDATE, id, epoch, priority, 0, 0);
  }
  uint64_t WriteState(SessionId session, SubgroupId id, uint32_t parts = MLPO_PART_MASTER) {
    return Submit(session, MLPO_OP_WRITE_STATE, id, 0, parts, 0, Numel(session, id));
  }
  // GRAD of [first, first + count) or UPDATE, with a slot of the lent area at an offset.
  uint64_t SubmitIn(uint64_t slot, SessionId session, uint16_t op, SubgroupId id, uint32_t epoch, uint64_t first = 0,
                    uint64_t count = UINT64_MAX);
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
  uint64_t Flush(SessionId session, uint32_t handle, const std::string& name, uint64_t bytes, uint64_t piece);
  uint64_t scratch_bytes();
  uint64_t Numel(SessionId session, SubgroupId id) { return scheduler_->FindSubgroup(session, id)->spec.numel; }

  // By request number; asking for one that has not been answered is the test's own fault.
  const Completion& completion(uint64_t request) const { return completions_.at(request); }
  bool answered(uint64_t request) const { return completions_.contains(request); }
  int status(uint64_t request) const { return answered(request) ? completion(request).failure.status : 1; }
  // A client's ear: runs after the completion has been given, when the scheduler may be called again.
  std::function<void(const Completion&)> on_complete;
  bool gone(SessionId session) const { return gone_.contains(session); }
  size_t gone_count() const { return gone_.size(); }
  std::vector<SessionId> hanging;  // of which the scheduler has told that what they have in flight hangs

  // ---- Time ----

  // Something that happens at a time, now at the earliest.
  void At(int64_t at_ns, std::function<void()> happen);
  // The next event; false if there is none. At least once a virtual second the scheduler is told the time.
  bool Step();
  void RunUntilQuiet() {
    while (Step()) {
    }
  }
  void RunUntilAnswered(uint64_t request) {
    while (!completions_.contains(request) && Step()) {
    }
  }
  // Lets time pass in which nothing comes.
  void Wait(int64_t ns);
  // From now on, real time spent in the scheduler is counted.
  void MeasureScheduler() { measured_ = true; }
  int64_t scheduler_ns() const { return scheduler_ns_; }

  // What rules were broken; empty if none.
  const std::string& violation() const { return violation_; }
  uint64_t updates() const { return updates_; }
  uint64_t passes() const { return passes_; }  // of a block's checksums alone
  // (pieces, again), as the scheduler told of them.
  const std::vector<std::pair<uint64_t, bool>>& wrong_checksums() const { return wrong_checksums_; }
  // In order of their work: (subgroup, block).
  const std::vector<std::pair<SubgroupId, uint32_t>>& worked() const { return worked_; }

  std::string key = "subgroup";  // of those to come, with their number behind it
  double chunk_sum = 1;          // what statistics say of a chunk
  bool chunk_finite = true;
  Failure room_failure;                   // of every MakeRoom
  uint64_t most_room_bytes = UINT64_MAX;  // of a store; MakeRoom of more fails
  std::vector<uint64_t> rooms;            // bytes that were asked for

  // ---- Checkpoints ----

  // What is in parts, and how they ended. Writing one block takes part_write_ns; a part_fault gives its errno.
  struct Save {
    bool pinned = false, taken = false, copied = false, left = false;
    Failure failure;
    uint64_t blocks = 0;  // pinned, those that are all zero included
  };
  // `hands_over`: per path, whether the session's file there becomes part of the checkpoint; then nothing may change in
  // it any more. `clones`: likewise, whether what is there is in the part without having been read. Empty: none.
  uint64_t BeginSave(SessionId session, uint32_t handle, CopyPace::Options pace, std::vector<bool> hands_over = {},
                     std::vector<bool> clones = {});
  // Whether all that was handed over is still as it was.
  bool HandedOverIsUnchanged() const;
  // That are stored in files that sessions have left.
  uint64_t left_bytes() const;
  size_t files_unused() const { return unused_.size(); }
  uint64_t Take(SessionId session, uint32_t handle) {
    return Submit(session, MLPO_OP_SNAPSHOT, 0, 0, MLPO_SNAPSHOT_TAKE, handle, 0);
  }
  uint64_t Saved(SessionId session, uint32_t handle) {
    return Submit(session, MLPO_OP_SNAPSHOT, 0, 0, MLPO_SNAPSHOT_SAVED, handle, 0);
  }
  const Save& save(uint64_t number) { return saves_[number]; }
  std::function<void(const StateSave&)> on_pinned;
  // The state of a block, as a token that no other state of any block has; 0: it was never written. In a part: 0 if it
  // was all zero there.
  uint64_t VersionOf(SessionId session, SubgroupId id, uint32_t block) { return versions_[{session, id, block}]; }
  uint64_t InPart(uint64_t number, SubgroupId id, uint32_t block) { return in_parts_[{number, id, block}]; }
  uint64_t Restore(SessionId session, SubgroupId id, uint32_t handle) {
    return Submit(session, MLPO_OP_RESTORE, id, 0, 0, handle, 0);
  }
  std::function<int(const Block&)> restore_fault;     // errno
  std::function<int64_t(const Block&)> restore_time;  // that filling one takes, in a thread of its own; not: workers'
  std::vector<std::pair<SessionId, uint32_t>> restores_ended;
  int steps_restored = 0;
  int64_t part_write_ns = 1000;
  std::function<int64_t(uint64_t save)> part_write_time;  // instead, by save
  std::optional<PathIndex> part_path;                     // instead, as long as the path needs beside all else
  uint32_t part_writes = 0;                               // in flight
  int64_t place_ns = 1000;                                // between a state's taking and its copying
  std::function<int(const Pin&)> part_fault;
  int small_pieces = 0;
  std::vector<PathIndex> evacuated;  // paths, as they were

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
    uint64_t token = 0;           // of the state
    uint64_t gradient = 0;        // the token of a kept one
    uint64_t gradient_bytes = 0;  // that lie in front of the state
    // Parts (kPartState as a whole, kPartGradient) that have checksums, and in which bytes are wrong.
    uint8_t summed = 0;
    uint8_t flipped = 0;
    uint64_t read_again = 0;  // reads to come, of what was wrong
  };
  struct Path {
    SimulatedPath device;
    PathCounts counts;
    Fault fault;
    Flip flip;
  };
  // What a file holds: by offset.
  struct Stored {
    uint64_t bytes;
    uint64_t token;
    bool gradient = false;
    bool flipped = false;  // was so when it was written
    uint8_t part() const { return gradient ? kPartGradient : kPartState; }
  };
  using File = std::map<uint64_t, Stored>;
  using BlockName = std::tuple<SessionId, uint64_t, uint32_t>;  // session, subgroup or object, index

  void Violate(const std::string& what) {
    if (violation_.empty()) violation_ = what;
  }
  void Use(BufferIndex buffer, enum Use use);
  template <class F>
  void Call(F&& f);
  class Outside;

  void EndTransfer(const Transfer& transfer);
  void EndPart(uint64_t save, Pin& pin, BufferIndex buffer, int64_t started_ns);
  void Read(const Transfer& transfer, const File& file, bool again, Buffer* buffer);
  void Bring(const Transfer& transfer, const Stored& stored, bool again, Buffer* buffer);
  std::vector<uint8_t> Compare(const Op& op, const Block& block, const Buffer& buffer);
  static std::vector<uint8_t> WrongIn(const Block& block, uint8_t flipped);
  void Write(const Transfer& transfer, File* file, const Buffer& buffer, bool good);
  void CheckAlone(const Transfer& transfer);
  // Of a session, or a store, that has left none to a checkpoint.
  FileId FileOn(PathIndex path, SessionId session) const;
  // The token of a state that is stored there; garbage if it is none.
  uint64_t StoredAt(PathIndex path, FileId file, uint64_t offset) const;
  void GiveBackUnused(const StateSave& save);
  void Add(SessionId session, SubgroupSpec spec, const std::vector<uint64_t>& tensor_counts);
  void CheckSlot(const Op& op);
  void CopyGradient(const Op& op, Block& block, uint64_t* gradient);
  void Occupy(int64_t work_ns, std::function<void()> then);

  void StartTransfer(const Transfer& transfer) override;
  void StartBlockWork(const Op& op, Block& block) override;
  void StartChecksums(Block& block, uint8_t check, uint8_t form) override;
  void ChecksumsWrong(const Block& block, PathIndex path, uint64_t pieces, bool again) override;
  void StartStats(Op& op) override;
  Failure CopySteps(const Op&, std::vector<Tensor>&) override { return {}; }
  void CopyPiece(const Op&, std::vector<std::byte>&) override { ++small_pieces; }
  void Evacuated(PathIndex path) override;
  void StartProbe(PathIndex path, uint64_t end) override;
  void EndProbe(Transfer transfer);
  void MakeRoom(const ObjectStore& asks, uint64_t bytes, uint64_t ticket) override;
  void PublishEpoch(const Subgroup&) override {}
  void Complete(const Completion& completion) override;
  void SessionGone(SessionId session) override;
  void SessionHangs(SessionId session) override { hanging.push_back(session); }
  void StatePinned(const StateSave& save) override;
  void FileUnused(SessionId session, PathIndex path, FileId file) override;
  void StateTaken(const StateSave& save) override;
  void WritePart(uint64_t save, Pin& pin, BufferIndex buffer) override;
  void StateCopied(uint64_t save, const Failure& failure) override;
  Failure RestoreSteps(const Op&, std::vector<Tensor>&) override {
    ++steps_restored;
    return {};
  }
  void RestoreEnded(SessionId session, uint32_t handle) override { restores_ended.emplace_back(session, handle); }

  Scheduler::Options options_;
  const Work work_;
  std::vector<Path> paths_;
  std::unique_ptr<Scheduler> scheduler_;
  int64_t now_ns_ = 1;
  uint64_t order_ = 0;
  uint64_t requests_ = 0;
  std::priority_queue<Event> events_;
  int64_t worker_busy_ns_ = 0;
  std::vector<Buffer> buffers_;
  std::map<std::pair<PathIndex, FileId>, File> files_;
  std::map<std::pair<PathIndex, FileId>, std::map<uint64_t, Transfer>> moving_;  // by id
  std::map<BlockName, uint64_t> versions_;
  std::map<BlockName, uint64_t> gradients_;  // the token of the open window's, where it is kept
  uint64_t next_version_ = 0;
  // What slots of the lent areas hold, by session and offset: a window's gradient or an update's parameters.
  struct InSlot {
    uint64_t end;
    SubgroupId id;
  };
  std::map<SessionId, std::map<uint64_t, InSlot>> slots_;
  std::map<uint64_t, Completion> completions_;
  std::map<SessionId, bool> known_;
  std::map<SessionId, bool> gone_;
  std::map<SessionId, int> asking_;  // questions for room under way
  std::map<uint64_t, Save> saves_;
  std::map<BlockName, uint64_t> in_parts_;  // by save, subgroup, index
  std::map<SessionId, int> saving_;         // saves that need the session's files
  std::map<uint64_t, SessionId> saver_;
  std::map<uint64_t, std::function<void()>> to_parts_;      // what follows a write to one, by its transfer
  std::map<uint64_t, std::vector<bool>> clones_;            // by save
  FileId next_file_ = 1u << 24;                             // of a session that leaves one, or gets one anew
  std::map<std::pair<PathIndex, SessionId>, FileId> anew_;  // instead of its first
  std::set<std::pair<PathIndex, FileId>> removed_;          // with what was evacuated
  std::set<std::pair<PathIndex, FileId>> left_, unused_;    // that sessions have left; of these, that have no use
  std::map<std::tuple<PathIndex, FileId, uint64_t>, uint64_t> handed_over_;  // what is at an offset
  uint64_t updates_ = 0;
  uint64_t passes_ = 0;
  std::vector<std::pair<uint64_t, bool>> wrong_checksums_;
  std::vector<std::pair<SubgroupId, uint32_t>> worked_;
  std::string violation_;
  bool measured_ = false;
  int64_t scheduler_ns_ = 0;
};

}  // namespace mlpo::test
