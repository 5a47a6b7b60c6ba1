// Scheduler: decides which block is read, worked on and written when and where, for all sessions. Policy only: no
// system calls, no threads; what is to be done goes to SchedulerActions, what has happened comes back as calls, time as
// an argument.
//
// Rules (after MLP-Offload, SC'25, and what measuring its traffic showed):
// - A block needs exactly one buffer at a time, and every buffer state is left by I/O, by a worker or by time, never by
//   a message from a client; clean blocks may be dropped at once. So there is no deadlock with any number of buffers.
// - Blocks in memory are worked on first, then whichever arrives first from any path.
// - A buffer is worth what its block's next use is near: a session's steps take the blocks in about the same order, so
//   that is one step after the last use, and the dirty block used last is flushed first. What a step did first stays
//   for the beginning of the next. What a step that has just begun is about to update is not flushed.
// - A dirty block belongs to no path until its flush starts. Flushes start only while free buffers plus buffers being
//   flushed are below the low-water mark and somebody needs one, or the cache would empty itself.
// - A flush goes to the path furthest below its share of the session's blocks (path_model.h).
// - A free buffer goes to the path whose remaining reads take longest, and one is kept back for it while its queue is
//   full; in it, to the session that FairShare says. Blocks that need no read are one more such queue: the session that
//   is next in either is served.
// - In flight per path at most what the path model says a direction, and max(1, buffers/(paths+1)) together: a slow one
//   cannot take the pool; a suspect one gets one.
// - To a path that hangs (path_model.h) nothing is sent in the direction that does, nor written; what still moves, one
//   by one; and nobody waits for the buffers that it has. When it moves again, it is as before, or probed first if it
//   has hung for long.
// - Off a path that is evacuated, blocks move in the background: out of memory if they are there, else through a buffer
//   each; while others want buffers, one at a time.
// - A path that has failed is not written to before a probe of it was good (path_health.h); what it holds is read all
//   the same when it is wanted. Blocks in memory that are stored where reads fail are as if they were stored nowhere.
// - An object that is being written is sure to need more buffers, one that is read in order more blocks: up to the
//   low-water mark they are freed, or fetched into what is free, before they are asked for.
// - A path that has nothing to read that is wanted goes on with what its sessions will want next, if that is sooner
//   than they want what must go for it: for the step under way some blocks, for the next one so few that it stays busy,
//   since each costs a buffer that could have kept another. Then nothing moves until asked.
// - What a job or a user may keep of the pool can be limited: its blocks above that are flushed at once, dropped when
//   they are clean, and not fetched ahead. What is in motion is not counted against it, so nobody waits for a limit.
// - Copies for a checkpoint come last, and take at least a small share of what its target can write: all those to one
//   target together, in turn. A user whose targets hang has a few buffers there, and others copy all the same.
// - A path's transfers may be held to turns (turn.h): within them the rules above choose.
// - With `integrity`, nothing is written whose checksums are not known, and nothing that was read is used, or written
//   elsewhere, before they have been compared (scheduler_integrity.cc).
//
// Operations of one subgroup: GRADs run side by side; everything else waits for them and runs one at a time. So do the
// pieces of one version of a named object (object.h).
//
// Owner and only user: the data thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "daemon/base/counters.h"
#include "daemon/scheduler/block.h"
#include "daemon/scheduler/copy_pace.h"
#include "daemon/scheduler/fair_share.h"
#include "daemon/scheduler/free_buffers.h"
#include "daemon/scheduler/object.h"
#include "daemon/scheduler/path_health.h"
#include "daemon/scheduler/path_model.h"
#include "daemon/scheduler/state_save.h"
#include "daemon/scheduler/step_record.h"
#include "daemon/scheduler/trace_log.h"
#include "daemon/scheduler/turn.h"
#include "daemon/types/request.h"
#include "daemon/types/session_identity.h"
#include "daemon/types/snapshot.h"
#include "daemon/types/transfer.h"

namespace mlpo {

// What the scheduler asks for. Calls do not come back into the scheduler before they return.
class SchedulerActions {
 public:
  virtual ~SchedulerActions() = default;
  // Answered by TransferDone, always.
  virtual void StartTransfer(const Transfer& transfer) = 0;
  // UPDATE, READ_STATE, WRITE_STATE, or a piece of FETCH or FLUSH, of op on one block in its buffer; answered by
  // BlockWorkDone. RESTORE: fills all of its state, and its parameters in the slot; answered by BlockRestored.
  virtual void StartBlockWork(const Op& op, Block& block) = 0;
  // Before a block is written: compares the parts `check` of its buffer with block.checksums, and forms those of the
  // parts `form`; answered by ChecksumsFormed.
  virtual void StartChecksums(Block& block, uint8_t check, uint8_t form) = 0;
  // For the log: so many pieces of a block's arrays were not what had been written to the path; `again`: nor when they
  // were read again, or that failed.
  virtual void ChecksumsWrong(const Block& block, PathIndex path, uint64_t pieces, bool again) = 0;
  // The chunks of op.stats of a GRAD; answered by StatsDone.
  virtual void StartStats(Op& op) = 0;
  // READ_STATE or WRITE_STATE of step counts: between op's staging area and tensors[first, first + count).
  virtual Failure CopySteps(const Op& op, std::vector<Tensor>& tensors) = 0;
  // A piece of FETCH or FLUSH of an object that is in memory whole: between op's staging area and `memory`.
  virtual void CopyPiece(const Op& op, std::vector<std::byte>& memory) = 0;
  // Nothing is stored there any more, and no session's file of it is used again before SetFile.
  virtual void Evacuated(PathIndex path) = 0;
  // Writes a block that is nobody's to the path, up to `end` of a file, and reads it back; answered by ProbeDone.
  virtual void StartProbe(PathIndex path, uint64_t end) = 0;
  // Makes the files of a job's objects if need be, and room in them for `bytes` in all; answered by RoomMade.
  virtual void MakeRoom(const ObjectStore& store, uint64_t bytes, uint64_t ticket) = 0;
  // Before the completion of an UPDATE: all parameters are in the slot.
  virtual void PublishEpoch(const Subgroup& subgroup) = 0;
  virtual void Complete(const Completion& completion) = 0;
  // Nothing of an ended session, or of a store that has files and no objects any more, is in flight; but copies of a
  // save may be, which needs its files until StateCopied.
  virtual void SessionGone(SessionId session) = 0;
  // All that an ended session has in flight is on paths that hang: whoever comes after it need not wait for that.
  // SessionGone follows when it comes back. At most once.
  virtual void SessionHangs(SessionId session) = 0;
  // The state is pinned, while the session is surely there; from now on it is written to the next files that the save
  // began with, if there are any.
  virtual void StatePinned(const StateSave& save) = 0;
  // Nothing is in a file any more that a session has left. Not called for an ended session: SessionGone says so.
  virtual void FileUnused(SessionId session, PathIndex path, FileId file) = 0;
  // And nothing is being written any more to the files that it has left: what is on persistent paths may be cloned or
  // handed over. Answered by CopyState or FailSave.
  virtual void StateTaken(const StateSave& save) = 0;
  // Writes pin.bytes of a buffer to the part, at pin.part_offset; answered by PartWritten.
  virtual void WritePart(uint64_t save, Pin& pin, BufferIndex buffer) = 0;
  // All of it has been copied; or it has failed, and nothing of it is in flight. Answered by SaveEnded.
  virtual void StateCopied(uint64_t save, const Failure& failure) = 0;
  // All blocks of a RESTORE have been filled: gives the subgroup's tensors their steps in the checkpoint.
  virtual Failure RestoreSteps(const Op& op, std::vector<Tensor>& tensors) = 0;
  // The client has no more use for what was prepared under the handle, or its session has ended.
  virtual void RestoreEnded(SessionId session, uint32_t handle) = 0;
};

// In which order a step's blocks are taken, and which stay in memory.
enum class Order : uint8_t {
  kAdaptive,     // those in memory first; those stay that are used first
  kAlternating,  // as submitted, each second step backwards; those stay that were used last
  kAscending,    // as submitted; those stay that were used last
};

class Scheduler {
 public:
  struct Options {
    uint32_t buffers = 0;   // numbers [0, buffers) are there at start: at least 1; others come by AddBuffers
    int buffers_node = -1;  // the NUMA node of these; -1: not known
    uint64_t block_elements = 0;
    uint64_t extents_offset_bytes = 0;  // where extents begin in a session's file
    uint32_t queue_blocks = 0;          // in flight per path and direction; 0: by the path model
    int64_t no_path_timeout_ns = 0;
    int64_t hang_timeout_ns = 0;  // a path hangs for so long: who waits for it fails; 0: never
    Policy policy = Policy::kAdaptive;
    Order order = Order::kAdaptive;
    bool learn = true;             // speeds, from what the paths do
    bool integrity = false;        // blocks on paths have checksums
    uint32_t copy_buffers = 4;     // that copies for checkpoints may have, and no more than an eighth of all
    uint32_t restore_buffers = 8;  // that one session's RESTOREs may have; all of them: an eighth of all
    uint64_t seed = 0;             // of the path model
    std::vector<PathParameters> paths;
    std::vector<std::string> path_names;                // for messages
    std::vector<TurnRules> turns;                       // per path; empty: none
    std::vector<int> path_nodes;                        // NUMA node of each path's device; -1, or empty: not known
    uint64_t small_objects_bytes = uint64_t{32} << 20;  // of all objects that are kept in memory beside the pool
    uint64_t user_buffers = 0;                          // that all jobs of one user may keep; 0: no limit
    uint64_t job_buffers = 0;                           // that one job may
  };
  // Objects of at most this are kept in memory, while small_objects_bytes last: in a block each would take a buffer.
  static constexpr uint64_t kSmallObjectBytes = 16384;
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

  Scheduler(Options options, SchedulerActions* actions);
  ~Scheduler();

  // The pool has grown by buffers [first, first + count), which are on NUMA node `node`.
  void AddBuffers(BufferIndex first, uint32_t count, int node, int64_t now_ns);
  void AddSession(const SessionIdentity& identity);
  // The session's file on each path, kNone where it has none; before its first subgroup.
  void SetFiles(SessionId session, std::vector<FileId> files);
  // One where it has none; of a store, too. Nothing happens if the session has ended, or has one.
  void SetFile(SessionId session, PathIndex path, FileId file);
  void AddSubgroup(SessionId session, SubgroupSpec spec);
  // Drops what is queued, answers nothing more, and calls SessionGone when nothing is in flight.
  void EndSession(SessionId session, int64_t now_ns);

  // A validated request: handles, ranges and hyper-parameters are good. Answered by exactly one Complete.
  void Submit(const Request& request, int64_t now_ns);
  void TransferDone(const TransferResult& result, int64_t now_ns);
  // `wrong`: by piece, bits of arrays whose checksums were others than block.checksums: such a piece was left alone.
  // Empty: none.
  void BlockWorkDone(Block& block, int64_t now_ns, std::vector<uint8_t> wrong = {});
  // `wrong`: as of BlockWorkDone.
  void ChecksumsFormed(Block& block, int64_t now_ns, std::vector<uint8_t> wrong = {});
  void StatsDone(Op* op, int64_t now_ns);
  // `bytes`, ticket: as asked. The store's files, unless it failed.
  void RoomMade(SessionId store, uint64_t bytes, uint64_t ticket, std::vector<FileId> files, Failure failure,
                int64_t now_ns);
  // ---- Checkpoints: scheduler_saves.cc ----
  // The files of a part have been made: SNAPSHOT with this handle takes the state. `next_files`: per path, or empty:
  // where the session goes on if its file there is to be handed over; kNone elsewhere. The save's number; 0: the
  // session has ended, or has begun another.
  uint64_t BeginSave(SessionId session, uint32_t handle, const CopyPace::Options& pace, std::vector<FileId> next_files,
                     int64_t now_ns);
  // What pins and blocks have in the files that the session has left for the save: nothing else of these is used again.
  std::vector<Extent> ExtentsLeft(const StateSave& save) const;
  // Copies what is not in the part already; `places` in the order of its pins.
  void CopyState(uint64_t save, const std::vector<PinPlace>& places, int64_t now_ns);
  // `hash`: of what was written.
  void PartWritten(uint64_t save, Pin& pin, BufferIndex buffer, uint64_t hash, Failure failure, int64_t took_ns,
                   int64_t now_ns);
  // Gives it up; StateCopied comes when nothing of it is in flight.
  void FailSave(uint64_t save, Failure failure, int64_t now_ns);
  // The part has been committed, or removed. Answers SAVED.
  void SaveEnded(uint64_t save, Failure failure, bool complete, int64_t now_ns);

  // Nobody waits any longer for saves for which nothing has been done for `stalled_ns`; they may still end. Those that
  // have not moved for kStalledNs are not counted by idle().
  void GiveUpStalled(int64_t stalled_ns, int64_t now_ns);
  static constexpr int64_t kStalledNs = 60'000'000'000;

  // What RESTORE with this handle needs has been prepared. False: the session has ended, or has the handle, or too
  // many.
  bool BeginRestore(SessionId session, uint32_t handle);
  // `parts`: of the state that may be other than zero. After a failure the buffer holds anything.
  void BlockRestored(Block& block, uint8_t parts, Failure failure, int64_t now_ns);

  // `error`: errno; 0: what was written was read back.
  void ProbeDone(PathIndex path, int error, int64_t now_ns);
  // Time has passed: deadlines, and paths that are probed. Call at least once a second while !idle() or ailing().
  void Tick(int64_t now_ns);
  // A path is to be probed or evacuated, some time.
  bool ailing() const;
  // When to call Tick at the latest, beside that; kNever: no wish.
  int64_t wake_ns() const { return std::min(wake_ns_, copy_wake_ns_); }

  // At most `count` buffers, to be used for something else until TakeBack; fewer, or none, if they are in use.
  std::vector<BufferIndex> LendBuffers(uint32_t count);
  void TakeBack(const std::vector<BufferIndex>& buffers, int64_t now_ns);
  const std::string& PathName(PathIndex path) const { return options_.path_names[path]; }
  // What is known of a path, from now on.
  void SetPath(PathIndex path, const PathParameters& parameters);
  // See PathModel.
  void AssumePath(PathIndex path, const PathParameters& parameters);
  void GrantPath(PathIndex path, double bytes_per_s) { model_.Grant(path, bytes_per_s); }

  // Why the path cannot be disabled: no other takes what is written; "" if it can.
  std::string WhyNeeded(PathIndex path) const;
  // Nothing is written there any more; what is there is read when it is wanted.
  void DisablePath(PathIndex path, int64_t now_ns);
  // And moves to the other paths. Answered by Evacuated, some time, unless it is enabled before.
  void EvacuatePath(PathIndex path, int64_t now_ns);
  // Is probed, and then used again.
  void EnablePath(PathIndex path, int64_t now_ns);
  // Nothing more is moved for its own sake: the paths stay disabled.
  void EndEvacuations();

  // No request is unanswered and nothing is in flight.
  bool idle() const { return ops_ == 0 && transfers_.empty() && working_ == 0 && forming_.empty() && !Saving(); }
  // For validation of submissions; nullptr if the session has no such subgroup.
  const Subgroup* FindSubgroup(SessionId session, SubgroupId subgroup) const;
  // Of all of a session's subgroups.
  std::vector<SubgroupSpec> Specs(SessionId session) const;

  void Fill(PoolSnapshot* pool) const;
  void Fill(std::vector<PoolUseSnapshot>* jobs) const;
  void Fill(StepTotals* steps, int64_t* workers_busy_ns, int64_t now_ns) const;
  void Fill(PathIndex path, PathSnapshot* snapshot, int64_t now_ns) const;
  void Fill(SessionId session, SessionSnapshot* snapshot, int64_t now_ns) const;
  void Fill(uint64_t save, CheckpointSnapshot* snapshot, int64_t now_ns) const;
  // The time that its copies take at most, with those of other saves to the same target; 0: nothing is to be copied.
  double SaveBoundSeconds(uint64_t save) const;
  const CheckpointTotals& checkpoint_totals() const { return checkpoint_totals_; }

  // Recording for `mlpo-ctl trace`.
  void StartTrace(int64_t now_ns);
  Trace StopTrace(int64_t now_ns);
  bool tracing() const { return trace_.on(); }
  // What a worker did of a job for an operation on `owner`; with its names and block.
  void TraceWork(const TraceRecord& record);
  TraceRecord TraceLabel(const Op& op, uint32_t block);
  TraceRecord TraceLabel(const Block& block);  // of its checksums
  void TracePool(int64_t now_ns);

  // Bytes of one block's parts on storage and in its buffer: master, first and second moments, each padded to
  // MLPO_ALIGN.
  static uint64_t PartBytes(uint64_t elements);
  static uint64_t BufferBytes(uint64_t block_elements) { return 3 * PartBytes(block_elements); }
  // Of a block's gradient, where GRAD copies it: it lies in front of the state, in buffer and extent. 0 elsewhere.
  static uint64_t GradientBytes(const SubgroupSpec& spec, uint64_t elements);
  // How a subgroup is cut: nearly equal blocks of at most so many elements that state and kept gradient fit a buffer; 0
  // if not even the smallest block's do.
  static uint64_t BlockElements(const SubgroupSpec& spec, uint64_t block_elements);
  static uint32_t BlockCount(const SubgroupSpec& spec, uint64_t block_elements);
  static BlockLayout LayoutOf(const Block& block);

 private:
  // Of a path that is evacuated: how far, and where to look for more.
  struct Leaving {
    bool on = false;
    bool told = false;         // Evacuated
    uint64_t total_bytes = 0;  // that were there at the beginning
    uint32_t held = 0;         // blocks that are Block::leaves
    uint64_t staying = 0;      // blocks that are Block::stays
    int64_t read_ns = 0;       // when the last one was begun to be read
    // The round under way: a place in the order of sessions, subgroups or objects, and blocks.
    SessionId session = 0;
    uint64_t owner = 0;
    uint32_t block = 0;
    bool begun = false;
    bool retries = false;   // it reads blocks that stay, too
    bool moved = false;     // a block has left since it began
    bool looks_on = false;  // it has looked at as many as a call may, and goes on in the next
    int64_t again_ns = 0;   // the next one does not begin before this time
    int64_t retry_ns = 0;   // one that begins from then on retries
  };
  struct PathState {
    uint32_t reads = 0;  // transfers in flight
    uint32_t writes = 0;
    uint32_t ahead = 0;           // subgroups' blocks that were read from it before anybody asked, and are
    uint64_t pending_bytes = 0;   // that operations wait to have read
    uint64_t extent_bytes = 0;    // of all sessions' extents in use, pinned ones included
    uint64_t pinned_bytes = 0;    // of those that a checkpoint has
    uint32_t copies = 0;          // of `reads`: for checkpoints
    uint32_t lone = 0;            // buffers with Block::lone_grad whose state is here
    BlockList lone_grads;         // of these, the ones that are dirty
    int64_t rescue_again_ns = 0;  // their states are not read before this time
    PathHealth health;
    Leaving leaving;
    uint64_t read_errors = 0;
    uint64_t write_errors = 0;
    uint64_t checksum_mismatches = 0;
    uint64_t checksum_errors = 0;
    uint64_t read_bytes = 0;
    uint64_t written_bytes = 0;
    RateMeter read_rate;
    RateMeter write_rate;
    Turn turn;
  };
  struct InFlight {
    Transfer transfer;
    Block* block = nullptr;
    Pin* pin = nullptr;  // of a copy, instead of a block
    Extent extent;
    uint8_t parts = 0;
    uint64_t turn = 0;  // its number
  };
  // A write that waits for checksums; it has its place in the path's queue, but no turn: others go on meanwhile.
  struct Forming {
    Extent extent;
    uint8_t parts = 0;      // that are to be written
    uint8_t unchecked = 0;  // of these, that are compared
    uint8_t missing = 0;    // of these, that had no checksums
  };
  // A block that a RESTORE wants or fills; its session may have ended.
  struct Filling {
    SessionId session = 0;
    uint32_t uid = 0;
    int64_t since_ns = 0;
  };

  void SetLowWater();
  // First in each call: time has come to now_ns.
  void Enter(int64_t now_ns);
  void NameForTrace(const BlockOwner& owner, Session& session);
  void TraceTransfer(const InFlight& in_flight, const TransferResult& result);
  void TraceOp(const Op& op, int status);
  // Without a flush.
  bool BufferIsFree() const { return !free_.empty() || !clean_.empty(); }
  Session* Find(SessionId session) const;
  PathIndex ChooseHome(Session& session, uint64_t numel) const;
  void Keep(SessionId id, std::unique_ptr<Session> session);
  void LeaveOutEvacuated(Session& session) const;
  // Operations: scheduler_ops.cc
  void SubmitGrad(Subgroup& subgroup, const Request& request);
  void SubmitDiscard(Session& session, const Request& request);
  void SubmitState(Subgroup& subgroup, const Request& request);
  Failure CheckUpdate(const Subgroup& subgroup, const Request& request) const;
  Op& Enqueue(BlockOwner& owner, Session& session, const Request& request);
  void RunQueue(BlockOwner& owner);
  Failure BeginOp(Op& op);
  Failure BeginUpdate(Op& op);
  void BeginStep(Session& session, uint32_t epoch);
  void WantRange(Op& op);
  void LineUp(Op& op, const std::vector<Block*>& blocks);
  void WantNext();
  bool Touches(const Op& op, const Block& block, size_t* segment) const;
  void Advance(BlockOwner& owner);
  std::unique_ptr<Op> TakeFront(BlockOwner& owner);
  void EndFront(BlockOwner& owner);
  void EndUpdate(Op& op, Completion* completion);
  void AnswerGrad(const Op& op, Failure failure);
  void EndWrite(Op& op);
  void FailOp(Op& op, Failure failure);
  void BlockDone(Op& op);
  void Answer(const Request& request, Failure failure, uint64_t value = 0, uint32_t flags = 0, uint32_t detail = 0);
  // Gradients that are kept: scheduler_grads.cc
  void QueueGrad(Subgroup& subgroup, std::unique_ptr<Op> op);
  Failure BeginGrad(Op& op);
  void EndGrad(Op& op);
  void GradientCopied(const Op& op, Block& block);
  void ClearWindow(Subgroup& subgroup);
  void DropGradient(Block& block);
  void FetchState(Op& op, Block& block);
  void BeLone(Block& block);
  void LeaveLone(Block& block);
  bool FlushGradient(Block& block);
  void PumpGradients();
  static Failure CheckLentSlot(const Subgroup& subgroup, uint64_t offset);
  static void TakeLentSlot(Subgroup& subgroup, uint64_t offset);
  static void SettleLentSlot(Subgroup& subgroup);
  // Named objects: scheduler_objects.cc
  void SubmitObject(Session& session, const Request& request);
  void Open(Session& session, const Request& request);
  void OpenForWriting(Session& session, const Request& request);
  void SeeToRoom(ObjectStore& store);
  Failure CheckPiece(const ObjectHandle& handle, const mlpo_submission& submission) const;
  Failure BeginObjectOp(Op& op);
  void EndObjectOp(Op& op);
  Failure Commit(Object& object);
  void CloseHandle(Session& session, uint32_t handle);
  void ForgetAhead(Object& object);
  void EndUseOfObjects(Session& session);
  void DropOps(Object& object, Session& session);
  ObjectStore& StoreOf(TrainingJob& job);
  Object* FindObject(const Session& session, const std::string& name) const;
  void MaybeUnused(Object& object);
  void ReadAhead(Object& object, uint32_t from);
  uint64_t BlocksToCome(const Object& object) const;
  static bool IsGrowing(const Block& block);
  // Checkpoints: scheduler_saves.cc
  void SubmitSnapshot(Session& session, const Request& request);
  Failure CheckTake(const Session& session, const StateSave& save) const;
  Failure BeginTake(Op& op);
  void PumpTakes();
  void TakeGoesOn(Block& block);
  bool MustBeWritten(const Block& block) const;
  static void LookForTake(Block& block);
  void EndTake(Op& op);
  void PinBlocks(StateSave& save, Subgroup& subgroup);
  void SubgroupTaken(StateSave& save);
  void LeaveFiles(StateSave& save);
  bool IsLeaving(const StateSave& save) const;
  void LeavingGoesOn();
  static uint64_t HashOfPinned(const Block& block, uint8_t parts);
  void AnswerSave(Session& session, const Request& request, Failure failure, uint64_t value);
  static void LeavePin(Block& block);
  void DropPin(Pin& pin);
  void Break(StateSave& save, Failure failure);
  void FailTaking(StateSave& save);
  void GiveUp(StateSave& save);
  void MaybeCopied(StateSave& save);
  void EndUseOfSave(Session& session);
  void ForgetSession(const Session& session);
  bool Saving() const;
  bool IsStalled(const StateSave& save, int64_t stalled_ns) const;
  uint32_t CopiesUnderWay() const;
  // Buffers that copies have of saves that hang: one user's and all users', which no limit of one user's keeps low.
  struct HungCopies {
    uint32_t of_user = 0;
    uint32_t all = 0;
  };
  HungCopies CopiesThatHang(uint32_t uid) const;
  bool HangTooMany(const HungCopies& hang) const { return hang.of_user >= 2 * MostCopies() || hang.all >= MostHung(); }
  uint32_t MostCopies() const { return std::clamp(free_.added() / 8, 1u, options_.copy_buffers); }
  uint32_t MostHung() const { return std::max(1u, free_.added() / 2); }
  const Block* WaitsForTake(const Session& session) const;
  void FailHungSaves();
  void FailHungTake(StateSave& save);
  void FailStarvedCopies(StateSave& save);
  std::shared_ptr<CopyPace> PaceOf(const CopyPace::Options& options);
  uint32_t CopiesAtPace(const CopyPace* pace) const;
  double BoundSeconds(const StateSave& save) const;
  bool MayCopy(const StateSave& save) const;
  void PumpCopies(bool only_press);
  bool StartCopy(StateSave& save, bool only_press);
  bool CopyWaits() const;
  bool MayCopyFrom(PathIndex path, const StateSave& save) const;
  void CopyRead(const InFlight& in_flight, const TransferResult& result);
  void CopiedWrong(StateSave& save, Pin& pin);
  void EndCopy(Pin& pin, BufferIndex buffer);
  void EndPin(Pin& pin);
  void SubmitRestore(Session& session, const Request& request);
  void BeginRestore(Op& op);
  void PumpRestores();
  void EndRestore(Op& op, Completion* completion);
  // Blocks: scheduler_blocks.cc
  void WantBlock(Op& op, Block& block);
  static StepBook::Found WhereFound(const Block& block);
  uint8_t Missing(const Block& block) const;
  bool Unsaved(const Block& block) const;
  void KeepInMemory(PathIndex path);
  size_t PendingQueue(const Block& block) const;
  static uint64_t PendingBytes(const Block& block);
  void StartWork(Block& block);
  void MakePending(Block& block);
  void RemovePending(Block& block);
  void SettleInMemory(Block& block);
  void SettleAway(Block& block);
  void SetAhead(Block& block, bool ahead);
  BlockList& ListOf(Block& block);
  void LeaveLists(Block& block);
  void DropBuffer(Block& block);
  void GiveExtent(Session& session, const Extent& extent);
  void FreeExtent(Session& session, const Extent& extent);
  static bool IsInOldFile(const Block& block);
  void ReleaseExtent(Block& block);
  bool HasBuffer() const;
  bool TakeBuffer(int node, BufferIndex* buffer);
  int NodeOf(PathIndex path) const { return path < options_.path_nodes.size() ? options_.path_nodes[path] : -1; }
  void Hold(Block& block);
  void LetGo(Block& block);
  void EndOwner(BlockOwner& owner);
  void MaybeGone(BlockOwner& owner);
  void MaybeGone(Session& session);
  static uint64_t ContentBytes(const Block& block);
  static ByteSpan SpanOf(const Block& block, uint8_t parts);
  uint64_t ExtentBytes(const Block& block) const;
  // Integrity: scheduler_integrity.cc
  static void NeedChecksums(Block& block);
  void FoundWrong(Block& block, std::vector<uint8_t> arrays);
  static std::vector<uint8_t> StillWanted(const Block& block, std::vector<uint8_t> arrays);
  void ReadAgain(Block& block, std::vector<uint8_t> arrays);
  void ReadNextPiece(Block& block);
  void PieceRead(Block& block, int error);
  void Lose(Block& block, int error);
  void TakeBackWrite(Block& block, const Forming& write);
  void MayNotMove(Block& block, std::vector<uint8_t> arrays);
  Failure WhatIsLost(const Block& block, const std::vector<uint8_t>& wrong, int error, bool changed) const;
  static void Doubt(Block& block, uint8_t wrong);
  static void Believe(Block& block);
  static void GiveUpGradient(Block& block);
  void GiveUp(Block& block, bool gradient);
  static Failure CheckDamage(const Op& op);
  static void Heal(Subgroup& subgroup);
  // What jobs and users keep: scheduler_blocks.cc
  void CountHeld(Block& block, int by);
  void CountFlushing(Block& block, int by);
  void LeaveJob(Session& session);
  bool MayKeep(const Session& session, uint64_t more) const;
  void PumpQuotas();
  // Evacuation: scheduler_leave.cc
  void PumpLeaving();
  int64_t NextLook() const;
  void LeaveOne(PathIndex path, uint32_t* looks);
  BlockOwner* NextOwner(Leaving* at);
  static void EndLeaving(Leaving* leaving);
  bool MoveOff(PathIndex path, Block& block);
  void EndRound(Leaving* at);
  void Leave(Block& block);
  void LookAgain(const Block& block);
  void StopLeaving(Block& block);
  void CannotLeave(Block& block);
  void MaybeEvacuated(PathIndex path);
  // Movement: scheduler_pump.cc
  void Pump();
  void PumpFlushes();
  bool FetchOne();
  bool FetchAheadOne();
  uint32_t RoomAhead(PathIndex path, const Block& block) const;
  uint64_t WantedAhead(const Block* victim) const;
  Block* NextAhead(PathIndex path) const;
  Block* Victim() const;
  int64_t NextUse(const Block& block) const;
  int64_t NextUse(const Session& session, int64_t used_ns) const;
  int64_t AboutToBeUsed(const Block& block) const;
  PathIndex ChooseReadPath();
  uint64_t TakeTurn(const Block& block, PathIndex path, Direction direction);
  void Move(Block& block, Direction direction, Extent extent, uint8_t parts, ByteSpan span, uint64_t turn);
  void StartWrite(Block& block, Extent extent, uint8_t parts);
  void LeaveQueue(Block& block, PathIndex path);
  void AfterWrite(Block& block, bool failed);
  void StartRead(Block& block, BufferIndex buffer);
  bool StartFlush(Block& block);
  bool CanWrite() const;
  bool FlushOne(Block& victim);
  PathIndex ChooseFlushPath(const Block& block, uint64_t bytes);
  bool TakesWrites(PathIndex index, uint64_t bytes) const;
  bool HasRoom(PathIndex index, uint64_t bytes, const Session& session) const;
  bool MayRewrite(const Block& block) const;
  bool MayQueue(PathIndex index, Direction direction) const;
  bool MayStart(PathIndex index, Direction direction, const Session& session) const;
  Session* Reader(PathIndex path);
  bool FlushInTurn();
  bool YieldTurns();
  void ReadDone(const InFlight& in_flight, const TransferResult& result);
  void CannotBeRead(Block& block, int error);
  void ForgetRead(Block& block);
  void ReadsFail(PathIndex path, int error);
  void WriteDone(const InFlight& in_flight, const TransferResult& result);
  bool PathsMove() const;
  bool CanMove() const;
  std::string WhyNotWritten() const;
  void FailStuck();
  void FailHung();
  void TellOfHanging();
  Failure HasHung(PathIndex path, int64_t hung_ns, const Block& block) const;
  void StartProbes();
  int64_t NextProbe() const;
  bool IsHanging(PathIndex path) const { return model_.IsHanging(path, now_ns_); }
  // Of that direction which has not moved for longer.
  int64_t HungNs(PathIndex path) const {
    return std::max(model_.HungNs(path, Direction::kRead, now_ns_), model_.HungNs(path, Direction::kWrite, now_ns_));
  }
  // For so long that it is not to be trusted when it moves again.
  bool HangsForLong(PathIndex path, Direction direction) const {
    return model_.HungNs(path, direction, now_ns_) >= PathModel::kLongHangNs;
  }
  // For so long that nobody waits for it any more.
  bool IsLost(PathIndex path, Direction direction) const {
    return options_.hang_timeout_ns > 0 && model_.HungNs(path, direction, now_ns_) >= options_.hang_timeout_ns;
  }
  uint32_t Coming() const;
  const char* StateName(PathIndex index) const;

  const Options options_;
  SchedulerActions* const actions_;
  PathModel model_;
  std::vector<double> room_bytes_;  // per path, while one is chosen
  std::vector<PathState> paths_;
  uint32_t low_water_;
  std::map<SessionId, std::unique_ptr<Session>> sessions_;        // and stores
  std::vector<Session*> all_sessions_;                            // of sessions_, which is slow to walk along
  std::map<std::pair<uint32_t, std::string>, TrainingJob> jobs_;  // by uid and name
  std::map<uint32_t, PoolUser> users_;                            // by uid
  FairShare fair_share_;
  SessionId next_store_ = kStoreBit | 1;
  uint64_t small_objects_bytes_ = 0;  // in use
  std::map<uint64_t, InFlight> transfers_;
  uint64_t next_transfer_ = 1;
  std::map<Block*, Forming> forming_;
  uint64_t next_sequence_ = 1;

  TraceLog trace_;
  StepBook steps_;
  int64_t now_ns_ = 0;          // of the call that is being carried out
  int64_t stuck_since_ns_ = 0;  // nothing can move since; 0: not so
  int64_t wake_ns_ = kNever;
  int64_t copy_wake_ns_ = kNever;  // when a copy may press

  FreeBuffers free_;
  BlockList clean_;        // used, kept while there is room; dropped first
  BlockList clean_ahead_;  // fetched ahead and not used yet; dropped last
  uint32_t flushing_ = 0;
  uint32_t working_ = 0;  // blocks and GRADs that workers have
  uint64_t ops_ = 0;      // unanswered requests that are kept
  uint64_t pending_ = 0;  // blocks that wait for a buffer
  std::map<uint64_t, std::unique_ptr<StateSave>> saves_;
  uint64_t next_save_ = 1;
  std::map<uint64_t, std::weak_ptr<CopyPace>> paces_;  // by target
  uint64_t copy_turn_ = 0;
  std::map<const Block*, Filling> filling_;
  uint64_t restore_turn_ = 0;
  bool look_at_restores_ = false;  // one has begun, moved or ended, or time has passed; until the next Pump
  CheckpointTotals checkpoint_totals_;
  uint64_t taking_ = 0;         // blocks with `flush_for`
  uint64_t coming_ = 0;         // blocks of objects that are being written, and that no piece has reached yet
  bool leaving_waits_ = false;  // an evacuation does, for a buffer; until the next Pump
  uint64_t read_ahead_ = 0;     // blocks that a reader will want next, and that had no buffer; until the next Pump
};

}  // namespace mlpo
