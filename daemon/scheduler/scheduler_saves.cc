// Scheduler: states that go into a checkpoint: taken, pinned, copied.
//
// TAKE stands in the queue of each subgroup: behind what was submitted before, in front of what comes later, which
// waits for this subgroup's flushes and no longer. Gradients of subgroups with slots of their own never wait. Then
// every block is in an extent or all zero, and the extents are pinned: an update takes its block away from a pinned
// extent, and its flush goes elsewhere as ever. So training goes on, and what is copied is the state as it was.
//
// A copy is a read of an extent into a buffer and a write of the buffer to the part, which others carry out. Copies
// come last: they take buffers that nobody waits for, on paths that nobody reads from; or they press, as CopyPace
// allows.
#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/base/checksum.h"
#include "daemon/base/clock.h"
#include "daemon/scheduler/failure.h"
#include "daemon/scheduler/scheduler.h"
#include "daemon/scheduler/session.h"
#include "daemon/scheduler/state_save.h"
#include "proto/abi.h"

namespace mlpo {
namespace {

constexpr size_t kMostRestores = 4;  // of a session that it has begun and not ended: each has threads and files

const char* Name(StateSave::Phase phase) {
  switch (phase) {
    case StateSave::Phase::kBegun:
      return "begun";
    case StateSave::Phase::kTaking:
      return "taking";
    case StateSave::Phase::kLeaving:
    case StateSave::Phase::kTaken:
      return "taken";
    case StateSave::Phase::kCopying:
      return "copying";
    case StateSave::Phase::kCopied:
      return "committing";
  }
  return "";
}

Failure HasLost(const Subgroup& subgroup) {
  return Fail(MLPO_E_IO, subgroup.Name() +
                             " has blocks that were lost to wrong checksums: restore a checkpoint, or write all of "
                             "its state, before it is saved");
}

}  // namespace

// ---- From outside ----

uint64_t Scheduler::BeginSave(SessionId id, uint32_t handle, const CopyPace::Options& pace,
                              std::vector<FileId> next_files, int64_t now_ns) {
  Enter(now_ns);
  Session* session = Find(id);
  if (session == nullptr || session->ending || session->save != nullptr) return 0;
  if (session->files.empty()) next_files.clear();  // nothing of it is on any path
  const uint64_t number = next_save_++;
  auto save = std::make_unique<StateSave>(number, session, id, session->job->uid, handle, PaceOf(pace), now_ns);
  save->subgroups = session->subgroups.size();
  save->waiting.resize(paths_.size());
  save->next_files = next_files.empty() ? std::vector<FileId>(paths_.size(), kNone) : std::move(next_files);
  save->old_files.assign(paths_.size(), kNone);
  MLPO_CHECK(save->next_files.size() == paths_.size());
  for (size_t i = 0; i < session->files.size(); ++i) {
    if (session->files[i] == kNone) save->next_files[i] = kNone;  // evacuated since they were made
  }
  session->save = save.get();
  ++checkpoint_totals_.begun;
  saves_[number] = std::move(save);
  return number;
}

void Scheduler::CopyState(uint64_t number, const std::vector<PinPlace>& places, int64_t now_ns) {
  Enter(now_ns);
  auto it = saves_.find(number);
  if (it == saves_.end() || it->second->phase != StateSave::Phase::kTaken) return;
  StateSave& save = *it->second;
  MLPO_CHECK(places.size() == save.pins.size());
  save.phase = StateSave::Phase::kCopying;
  save.moved_ns = now_ns;
  save.bytes = 0;
  for (size_t i = 0; i < places.size(); ++i) {
    Pin& pin = save.pins[i];
    if (pin.extent.path == kNone) continue;
    if (places[i].there) {
      DropPin(pin);
      continue;
    }
    pin.part_offset = places[i].part_offset;
    save.bytes += pin.bytes;
    save.waiting[pin.extent.path].push_back(&pin);
  }
  MaybeCopied(save);
  Pump();
}

void Scheduler::FailSave(uint64_t number, Failure failure, int64_t now_ns) {
  Enter(now_ns);
  auto it = saves_.find(number);
  if (it == saves_.end()) return;
  Break(*it->second, std::move(failure));
  Pump();
}

void Scheduler::SaveEnded(uint64_t number, Failure failure, bool complete, int64_t now_ns) {
  Enter(now_ns);
  auto it = saves_.find(number);
  if (it == saves_.end()) return;
  StateSave& save = *it->second;
  MLPO_CHECK(save.phase == StateSave::Phase::kCopied);
  if (save.failure.status == 0) save.failure = std::move(failure);
  ++(save.failure.status == 0 ? checkpoint_totals_.saved : checkpoint_totals_.failed);
  if (save.session != nullptr) {
    // Who asks later is told the same, until the session begins another.
    save.session->last_save = LastSave{save.handle, save.failure, complete};
    save.session->save = nullptr;
    if (save.saved) AnswerSave(*save.session, *std::exchange(save.saved, std::nullopt), save.failure, complete);
  }
  saves_.erase(it);
  Pump();
}

void Scheduler::Fill(uint64_t number, CheckpointSnapshot* snapshot, int64_t now_ns) const {
  const auto it = saves_.find(number);
  if (it == saves_.end()) return;
  const StateSave& save = *it->second;
  snapshot->phase = Name(save.phase);
  snapshot->bytes = save.bytes;
  snapshot->copied_bytes = save.copied_bytes;
  snapshot->bytes_per_s = save.rate.PerSecond(now_ns);
  if (save.phase != StateSave::Phase::kCopying) return;
  const auto left = static_cast<double>(save.bytes - save.copied_bytes);
  snapshot->bound_s = BoundSeconds(save);
  snapshot->left_s =
      snapshot->bytes_per_s > 0 ? std::min(snapshot->bound_s, left / snapshot->bytes_per_s) : snapshot->bound_s;
}

double Scheduler::SaveBoundSeconds(uint64_t number) const {
  const auto it = saves_.find(number);
  const bool copies = it != saves_.end() && it->second->phase == StateSave::Phase::kCopying;
  return copies ? BoundSeconds(*it->second) : 0;
}

// All that goes to the same target goes at the pace of one.
double Scheduler::BoundSeconds(const StateSave& save) const {
  uint64_t left = 0;
  for (const auto& [number, other] : saves_) {
    const bool copies = other->phase == StateSave::Phase::kCopying && other->failure.status == 0;
    if (copies && other->pace == save.pace) left += other->bytes - other->copied_bytes;
  }
  return save.pace->BoundSeconds(left);
}

// ---- Submissions ----

void Scheduler::SubmitSnapshot(Session& session, const Request& request) {
  const mlpo_submission& submission = request.submission;
  const auto handle = static_cast<uint32_t>(submission.first);
  const bool known = session.save != nullptr && session.save->handle == handle && submission.first == handle;
  if (submission.arg == MLPO_SNAPSHOT_SAVED && !known && session.last_save && session.last_save->handle == handle) {
    return Answer(request, session.last_save->failure, session.last_save->complete);
  }
  if (!known) {
    return Answer(request,
                  Fail(-EBADF, "no checkpoint has been begun with handle " + std::to_string(submission.first)));
  }
  StateSave& save = *session.save;
  if (submission.arg == MLPO_SNAPSHOT_ABANDON) {
    if (save.phase == StateSave::Phase::kCopied && save.failure.status == 0)
      return Answer(request, Fail(-EALREADY,
                                  "all of the checkpoint has been copied, and it is being made durable: wait until it "
                                  "is saved, then remove it"));
    Break(save, Fail(-ECANCELED, "the client has abandoned the checkpoint"));
    return Answer(request, {});
  }
  if (submission.arg == MLPO_SNAPSHOT_SAVED) {
    if (save.saved) return Answer(request, Fail(-EBUSY, "the end of this checkpoint is waited for already"));
    save.saved = request;
    ++ops_;
    ++session.unanswered;
    return;
  }
  if (submission.arg != MLPO_SNAPSHOT_TAKE) {
    return Answer(request, Fail(-EINVAL, "SNAPSHOT: unknown step " + std::to_string(submission.arg)));
  }
  Failure failure = CheckTake(session, save);
  if (failure.status != 0) return Answer(request, std::move(failure));
  save.phase = StateSave::Phase::kTaking;
  save.moved_ns = now_ns_;
  save.take = request;
  ++ops_;
  ++session.unanswered;
  save.subgroups_left = static_cast<uint32_t>(session.subgroups.size()) + 1;  // one for this call
  for (auto& [id, subgroup] : session.subgroups) {
    Enqueue(*subgroup, session, request);
    RunQueue(*subgroup);
  }
  SubgroupTaken(save);
}

Failure Scheduler::CheckTake(const Session& session, const StateSave& save) const {
  if (save.failure.status != 0) return save.failure;
  if (save.phase != StateSave::Phase::kBegun) {
    return Fail(-EBUSY, "the state for this checkpoint has been taken already");
  }
  if (session.subgroups.size() != save.subgroups) {
    return Fail(-ESTALE, std::to_string(session.subgroups.size() - save.subgroups) +
                             " subgroups were registered since the checkpoint was begun, and there is no room for "
                             "them in it: abandon it, and begin it anew");
  }
  for (const auto& [id, subgroup] : session.subgroups) {
    if (subgroup->torn) {
      return Fail(MLPO_E_TORN, subgroup->Name() + " is partly updated: repeat the identical UPDATE first");
    }
    if (subgroup->window.begun() && !subgroup->update_queued) {
      return Fail(MLPO_E_SLOT_BUSY, subgroup->Name() +
                                        " has gradients of an open window: a checkpoint is taken between its "
                                        "UPDATE, or DISCARD, and the next gradient");
    }
  }
  return {};
}

// ---- Taking ----

// The front of a subgroup's queue: nothing works on its blocks. Those that no extent has are flushed first.
Failure Scheduler::BeginTake(Op& op) {
  Subgroup& subgroup = *op.subgroup();
  StateSave* save = op.session->save;
  if (save == nullptr || save->failure.status != 0) return Fail(-ECANCELED, "the checkpoint was given up");
  if (subgroup.torn) {
    return Fail(MLPO_E_TORN, subgroup.Name() + " was partly updated by the UPDATE before the checkpoint");
  }
  if (subgroup.damaged > 0) return HasLost(subgroup);
  save->moved_ns = now_ns_;
  for (Block& block : subgroup.blocks) {
    if (!MustBeWritten(block)) continue;
    block.flush_for = &op;
    ++op.left;
    ++taking_;
    op.session->to_flush.push_back(&block);
  }
  return {};
}

// Flushes that a TAKE waits for: at once, whatever the pool has, on all paths.
void Scheduler::PumpTakes() {
  if (taking_ == 0) return;
  for (Session* const session : all_sessions_) {
    while (!session->to_flush.empty()) {
      Block& block = *session->to_flush.front();
      const bool waits = block.flush_for != nullptr && MustBeWritten(block);
      const bool starts = waits && block.state == BlockState::kDirty;
      if (starts && !StartFlush(block)) break;
      session->to_flush.pop_front();
      // What it was dirty for, a gradient, has been discarded meanwhile; or its path can be read again; or it could not
      // be written, and stays where it is.
      const bool settled =
          block.state == BlockState::kClean || block.state == BlockState::kDirty || block.state == BlockState::kAway;
      if (!waits && settled) TakeGoesOn(block);
    }
  }
}

// Whether no extent has its state, or none that can be read, and the buffer does. What merely has to leave a path is
// safe where it is until then. A gradient, of a window whose UPDATE has failed, is none of the checkpoint's: its path
// may hang.
bool Scheduler::MustBeWritten(const Block& block) const {
  if (!(block.nonzero & kPartState)) return false;
  if (block.extent.path == kNone) return true;
  return paths_[block.extent.path].health.unreadable() && (block.nonzero & ~block.filled) == 0;
}

// The block has settled otherwise than after a write: the next PumpTakes sees whether a TAKE goes on without it.
void Scheduler::LookForTake(Block& block) {
  if (block.flush_for != nullptr) block.owner->session->to_flush.push_back(&block);
}

// The block's write has ended, and it has settled.
void Scheduler::TakeGoesOn(Block& block) {
  if (block.flush_for == nullptr) return;
  if (MustBeWritten(block)) return block.owner->session->to_flush.push_back(&block);  // the write failed: elsewhere
  Op& op = *std::exchange(block.flush_for, nullptr);
  --taking_;
  op.session->save->moved_ns = now_ns_;
  if (--op.left == 0) Advance(*op.owner);
}

void Scheduler::EndTake(Op& op) {
  Subgroup& subgroup = *op.subgroup();
  for (Block& block : subgroup.blocks) {
    if (block.flush_for != &op) continue;
    block.flush_for = nullptr;
    --taking_;
  }
  StateSave* save = op.session->save;
  if (save == nullptr || save->phase != StateSave::Phase::kTaking) return;
  if (op.failure.status == 0 && subgroup.damaged > 0) op.failure = HasLost(subgroup);  // found meanwhile
  if (op.failure.status != 0 && save->failure.status == 0) save->failure = std::move(op.failure);
  if (save->failure.status == 0) PinBlocks(*save, subgroup);
  SubgroupTaken(*save);
}

void Scheduler::PinBlocks(StateSave& save, Subgroup& subgroup) {
  for (Block& block : subgroup.blocks) {
    // One that may have to go elsewhere since a moment ago, as reads of its path fail, is where it was.
    MLPO_CHECK(block.pin == nullptr && (!(block.nonzero & kPartState) || block.extent.path != kNone));
    Pin& pin = save.pins.emplace_back();
    pin.save = &save;
    pin.subgroup = subgroup.spec.id;
    pin.index = block.index;
    pin.count = block.count;
    pin.parts = block.nonzero & kPartState;
    if (pin.parts == 0) continue;
    const ByteSpan span = SpanOf(block, pin.parts);
    pin.extent = block.extent;
    pin.first_byte = span.first;
    pin.bytes = span.bytes;
    pin.hashed = options_.integrity && (pin.parts & ~block.summed) == 0;
    if (pin.hashed) pin.hash = HashOfPinned(block, pin.parts);
    pin.block = &block;
    block.pin = &pin;
    save.bytes += pin.bytes;
    paths_[pin.extent.path].pinned_bytes += pin.extent.bytes;
  }
  std::vector<int64_t>& steps = save.steps[subgroup.spec.id];
  for (const Tensor& tensor : subgroup.spec.tensors) steps.push_back(tensor.step);
}

// As checkpoint/block_hash.h says, which is what its checksums make up.
uint64_t Scheduler::HashOfPinned(const Block& block, uint8_t parts) {
  std::vector<uint64_t> pieces;
  const uint8_t arrays = ArraysOf(parts);
  for (const PieceChecksums& piece : block.checksums) {
    for (const int array : {kArrayMaster, kArrayExpAvg, kArrayExpAvgSq}) {
      if (arrays & 1 << array) pieces.push_back(piece.array[array]);
    }
  }
  return Checksum(pieces.data(), pieces.size() * sizeof(uint64_t));
}

void Scheduler::SubgroupTaken(StateSave& save) {
  if (--save.subgroups_left > 0) return;
  if (save.failure.status != 0) {
    save.phase = StateSave::Phase::kTaken;
    const Failure failure = save.failure;
    if (save.take) AnswerSave(*save.session, *std::exchange(save.take, std::nullopt), failure, 0);
    return GiveUp(save);
  }
  LeaveFiles(save);
  save.phase = StateSave::Phase::kLeaving;
  save.moved_ns = now_ns_;
  AnswerSave(*save.session, *std::exchange(save.take, std::nullopt), {}, save.bytes);
  LeavingGoesOn();
}

// ---- Files that are handed over ----

// From here on the session writes to its next files. What its blocks have in the old ones is read there until they have
// been updated; extents that are pinned there, and all others, are not used again.
void Scheduler::LeaveFiles(StateSave& save) {
  Session& session = *save.session;
  std::vector<PathIndex> unused;
  for (PathIndex i = 0; i < paths_.size(); ++i) {
    if (save.next_files[i] == kNone) continue;
    save.old_files[i] = std::exchange(session.files[i], save.next_files[i]);
    const uint64_t bytes = std::exchange(session.extents[i], ExtentMap()).bytes_in_use();
    if (bytes > 0) {
      session.old_files[{i, save.old_files[i]}] = bytes;
    } else {
      unused.push_back(i);
    }
  }
  std::map<SubgroupId, uint32_t> places;
  for (const auto& [id, steps] : save.steps) places.emplace(id, static_cast<uint32_t>(places.size()));
  for (Pin& pin : save.pins) pin.place = places.at(pin.subgroup);
  actions_->StatePinned(save);
  for (const PathIndex i : unused) {
    actions_->FileUnused(session.id, i, std::exchange(save.old_files[i], kNone));
  }
}

// Blocks of subgroups that came after the TAKE, too: they may have been flushed before the session left its files.
std::vector<Extent> Scheduler::ExtentsLeft(const StateSave& save) const {
  std::vector<Extent> extents;
  if (std::all_of(save.old_files.begin(), save.old_files.end(), [](FileId file) { return file == kNone; }))
    return extents;
  const auto note = [&](const Extent& extent) {
    if (extent.path != kNone && save.old_files[extent.path] == extent.file) extents.push_back(extent);
  };
  for (const Pin& pin : save.pins) note(pin.extent);
  const Session* session = Find(save.session_id);
  if (session == nullptr) return extents;
  for (const auto& [id, subgroup] : session->subgroups) {
    for (const Block& block : subgroup->blocks) {
      if (block.pin == nullptr) note(block.extent);  // else it is the pin's
    }
  }
  return extents;
}

// Whether something is still being written to a file that its session has left: blocks of subgroups that were pinned
// before the others.
bool Scheduler::IsLeaving(const StateSave& save) const {
  const auto meets = [&save](const Block& block, const Extent& extent) {
    return block.owner->session == save.session && save.old_files[extent.path] == extent.file;
  };
  return std::any_of(transfers_.begin(), transfers_.end(),
                     [&](const auto& entry) {
                       const InFlight& in_flight = entry.second;
                       return in_flight.block != nullptr && in_flight.transfer.direction == Direction::kWrite &&
                              meets(*in_flight.block, in_flight.extent);
                     }) ||
         std::any_of(forming_.begin(), forming_.end(),
                     [&](const auto& entry) { return meets(*entry.first, entry.second.extent); });
}

void Scheduler::LeavingGoesOn() {
  for (auto& [number, save] : saves_) {
    if (save->phase != StateSave::Phase::kLeaving || IsLeaving(*save)) continue;
    save->phase = StateSave::Phase::kTaken;
    save->moved_ns = now_ns_;
    actions_->StateTaken(*save);
  }
}

void Scheduler::AnswerSave(Session& session, const Request& request, Failure failure, uint64_t value) {
  --ops_;
  --session.unanswered;
  Answer(request, std::move(failure), value);
}

// ---- Pins ----

// The block goes on without its extent, which is the pin's alone now.
void Scheduler::LeavePin(Block& block) {
  block.owner->session->placed_bytes[block.extent.path] -= block.extent.bytes;
  block.pin->block = nullptr;
  block.pin = nullptr;
  block.extent = Extent{};
  block.grad_saved = false;
}

void Scheduler::DropPin(Pin& pin) {
  if (pin.extent.path == kNone) return;
  paths_[pin.extent.path].pinned_bytes -= pin.extent.bytes;
  if (pin.block != nullptr) {
    pin.block->pin = nullptr;
  } else if (pin.save->session != nullptr) {
    FreeExtent(*pin.save->session, pin.extent);
  } else {
    paths_[pin.extent.path].extent_bytes -= pin.extent.bytes;  // its file goes with the save
  }
  pin.block = nullptr;
  pin.extent = Extent{};
}

// ---- Failing and ending ----

void Scheduler::Break(StateSave& save, Failure failure) {
  if (save.phase == StateSave::Phase::kCopied) return;
  if (save.failure.status == 0) save.failure = std::move(failure);
  if (save.phase != StateSave::Phase::kTaking) return GiveUp(save);
  // Who takes hears it now: what is in front of it in a queue may still hang.
  if (save.take) AnswerSave(*save.session, *std::exchange(save.take, std::nullopt), save.failure, 0);
  FailTaking(save);
}

// What is queued ends with the failure; the last one gives the save up.
void Scheduler::FailTaking(StateSave& save) {
  if (save.session->ending) return GiveUp(save);  // its queues do not run any more
  std::vector<Subgroup*> waiting;
  for (auto& [id, subgroup] : save.session->subgroups) {
    const bool front = !subgroup->queue.empty() && subgroup->queue.front()->kind() == MLPO_OP_SNAPSHOT;
    if (front && subgroup->queue.front()->begun) waiting.push_back(subgroup.get());
  }
  for (Subgroup* subgroup : waiting) {
    FailOp(*subgroup->queue.front(), save.failure);
    Advance(*subgroup);
  }
}

// A target may hang: only what is in flight is waited for, and only that keeps its extent.
void Scheduler::GiveUp(StateSave& save) {
  for (std::deque<Pin*>& pins : save.waiting) pins.clear();
  if (save.in_flight > 0) {
    for (Pin& pin : save.pins) {
      if (!pin.in_flight) DropPin(pin);
    }
  }
  MaybeCopied(save);
}

void Scheduler::MaybeCopied(StateSave& save) {
  if (save.in_flight > 0 || save.phase == StateSave::Phase::kCopied) return;
  const bool waits =
      std::any_of(save.waiting.begin(), save.waiting.end(), [](const auto& pins) { return !pins.empty(); });
  if (save.failure.status == 0 && (waits || save.phase != StateSave::Phase::kCopying)) return;
  for (Pin& pin : save.pins) DropPin(pin);
  save.phase = StateSave::Phase::kCopied;
  save.moved_ns = now_ns_;
  actions_->StateCopied(save.id, save.failure);
}

// The session has ended. What has been taken goes on, whoever asked for it.
void Scheduler::EndUseOfSave(Session& session) {
  for (Block* block : session.to_flush) {
    if (block->flush_for != nullptr) --taking_;
    block->flush_for = nullptr;
  }
  session.to_flush.clear();
  for (const auto& [handle, begun] : std::exchange(session.restores, {})) actions_->RestoreEnded(session.id, handle);
  for (auto& [id, subgroup] : session.subgroups) {
    for (Block& block : subgroup->blocks) {
      if (block.flush_for != nullptr) --taking_;  // its write is in flight
      block.flush_for = nullptr;
    }
  }
  StateSave* save = std::exchange(session.save, nullptr);
  if (save == nullptr) return;
  save->take.reset();
  save->saved.reset();
  if (save->phase == StateSave::Phase::kBegun || save->phase == StateSave::Phase::kTaking) {
    Break(*save, Fail(-ESHUTDOWN, "the session ended before its state was taken"));
  }
}

// Its blocks have let go of their extents.
void Scheduler::ForgetSession(const Session& session) {
  for (auto& [id, save] : saves_) {
    if (save->session == &session) save->session = nullptr;
  }
  std::erase_if(filling_, [&session](const auto& entry) { return entry.second.session == session.id; });
}

bool Scheduler::Saving() const {
  return std::any_of(saves_.begin(), saves_.end(), [this](const auto& entry) {
    return entry.second->phase != StateSave::Phase::kBegun && !IsStalled(*entry.second, kStalledNs);
  });
}

// ---- Saves that hang ----

// What a client passes it may serve itself, and never answer. Taking depends on paths, and on the session, only.
bool Scheduler::IsStalled(const StateSave& save, int64_t stalled_ns) const {
  if (now_ns_ - save.moved_ns < stalled_ns) return false;
  switch (save.phase) {
    case StateSave::Phase::kTaken:
    case StateSave::Phase::kCopied:
      return true;
    case StateSave::Phase::kCopying:
      return save.in_flight > 0;
    default:
      return false;
  }
}

// Buffers that copies have, but for those of saves that hang: others have their own.
uint32_t Scheduler::CopiesUnderWay() const {
  uint32_t copies = 0;
  for (const auto& [number, save] : saves_) copies += IsStalled(*save, kStalledNs) ? 0 : save->in_flight;
  return copies;
}

Scheduler::HungCopies Scheduler::CopiesThatHang(uint32_t uid) const {
  HungCopies hang;
  for (const auto& [number, save] : saves_) {
    if (!IsStalled(*save, kStalledNs)) continue;
    hang.all += save->in_flight;
    hang.of_user += save->uid == uid ? save->in_flight : 0;
  }
  return hang;
}

// Whether it may have one buffer more. All that move have `most` of them together; while others have something to copy,
// half of these is one save's, and one user's. What hangs keeps its buffers until the kernel lets go of them: a user
// gets no more than as many again, and all users together half of the pool, or they could take it, save by save.
bool Scheduler::MayCopy(const StateSave& save) const {
  if (IsStalled(save, kStalledNs)) return false;
  const uint32_t most = MostCopies(), half = std::max(1u, most / 2);
  uint32_t all = 0, of_user = 0;
  bool others = false, other_users = false;
  for (const auto& [number, other] : saves_) {
    const bool same_user = other->uid == save.uid;
    if (IsStalled(*other, kStalledNs)) continue;
    all += other->in_flight;
    of_user += same_user ? other->in_flight : 0;
    if (other.get() == &save || other->phase != StateSave::Phase::kCopying) continue;
    const bool wants =
        std::any_of(other->waiting.begin(), other->waiting.end(), [](const auto& pins) { return !pins.empty(); });
    others |= wants;
    other_users |= wants && !same_user;
  }
  const HungCopies hang = CopiesThatHang(save.uid);
  if (all >= most || hang.of_user + of_user >= 2 * most || hang.all + all >= MostHung()) return false;
  return (!others || save.in_flight < half) && (!other_users || of_user < half);
}

void Scheduler::GiveUpStalled(int64_t stalled_ns, int64_t now_ns) {
  Enter(now_ns);
  for (auto& [number, save] : saves_) {
    if (!IsStalled(*save, stalled_ns)) continue;
    Failure failure = Fail(-ETIMEDOUT, "nothing has been done for this checkpoint for " +
                                           std::to_string((now_ns - save->moved_ns) / kNsPerS) +
                                           " s: its directory does not answer; mlpo-ctl checkpoint list says what "
                                           "became of it");
    if (save->saved) AnswerSave(*save->session, *std::exchange(save->saved, std::nullopt), failure, 0);
    Break(*save, std::move(failure));
  }
}

// A block that a TAKE of the session waits for; nullptr: there is none.
const Block* Scheduler::WaitsForTake(const Session& session) const {
  for (const Block* block : session.to_flush) {
    if (block->flush_for != nullptr) return block;
  }
  for (const auto& [id, in_flight] : transfers_) {
    const Block* const block = in_flight.block;
    if (block != nullptr && block->flush_for != nullptr && block->owner->session == &session) return block;
  }
  return nullptr;
}

// Saves that wait for a path, and have so for too long: for what it has not written or read, or for one that takes what
// is to be written.
void Scheduler::FailHungSaves() {
  for (auto& [number, save] : saves_) {
    if (save->failure.status != 0) continue;
    if (save->phase == StateSave::Phase::kTaking) {
      FailHungTake(*save);
      continue;
    }
    if (save->phase == StateSave::Phase::kCopying) FailStarvedCopies(*save);
    if (save->failure.status != 0) continue;
    for (PathIndex path = 0; path < paths_.size(); ++path) {
      const bool leaves = save->phase == StateSave::Phase::kLeaving && save->old_files[path] != kNone &&
                          now_ns_ - save->moved_ns >= options_.hang_timeout_ns && IsLost(path, Direction::kWrite);
      // Copies in flight are IsStalled's.
      const bool copies = save->phase == StateSave::Phase::kCopying && save->in_flight == 0 &&
                          !save->waiting[path].empty() && IsLost(path, Direction::kRead);
      if (!leaves && !copies) continue;
      Failure failure =
          Fail(MLPO_E_IO, "path '" + options_.path_names[path] + "' has not answered for " +
                              std::to_string(HungNs(path) / kNsPerS) + " s, and blocks that are to be saved are there");
      failure.os_errno = ETIMEDOUT;
      failure.path = path;
      Break(*save, std::move(failure));
      break;
    }
  }
}

// Training waits for a TAKE, which nothing is lost without: it is given up long before what else waits for the path is,
// and alone. Others may go on, with what they have in memory or read, where nothing can be written.
void Scheduler::FailHungTake(StateSave& save) {
  if (now_ns_ - save.moved_ns < options_.no_path_timeout_ns) return;
  const Block* const block = WaitsForTake(*save.session);
  if (block == nullptr) return;
  bool taken = false;
  for (PathIndex path = 0; path < paths_.size(); ++path) {
    const int64_t hung_ns = HungNs(path);
    if (hung_ns != 0 && hung_ns >= options_.no_path_timeout_ns) return Break(save, HasHung(path, hung_ns, *block));
    taken |= HasRoom(path, ExtentBytes(*block), *save.session);
  }
  if (taken) return;
  Failure failure =
      Fail(MLPO_E_IO, "no path takes block " + std::to_string(block->index) + " of " + block->owner->Name() +
                          ", which has to be written before it can be saved: mlpo-ctl paths says why");
  failure.os_errno = paths_.front().health.error();
  failure.block = block->index;
  failure.first = block->first;
  failure.count = block->count;
  Break(save, std::move(failure));
}

// Copies that have waited for too long for a buffer, and nothing that is under way gives them one: all are dirty and no
// path takes what is written, or copies that hang have as many as may be. Workers do not count: while they go on in
// what is dirty, it stays so.
void Scheduler::FailStarvedCopies(StateSave& save) {
  const bool waits = save.in_flight == 0 && std::any_of(save.waiting.begin(), save.waiting.end(),
                                                        [](const auto& pins) { return !pins.empty(); });
  const HungCopies hang = CopiesThatHang(save.uid);
  const bool too_many = HangTooMany(hang);
  const bool none_comes = !BufferIsFree() && clean_ahead_.empty() && CopiesUnderWay() == 0 && !PathsMove();
  if (!waits || !(too_many || none_comes)) {
    save.starved_ns = 0;
    return;
  }
  if (save.starved_ns == 0) save.starved_ns = now_ns_;
  if (now_ns_ - save.starved_ns < options_.no_path_timeout_ns) return;
  if (too_many) {
    return Break(save, Fail(-ETIMEDOUT, "copies to directories that do not answer have " + std::to_string(hang.all) +
                                            " buffers of the pool, of this user " + std::to_string(hang.of_user) +
                                            "; more may not be lost to such, and this checkpoint waits for one: end "
                                            "what serves these directories"));
  }
  Failure failure = Fail(MLPO_E_IO,
                         "copying waits for a buffer of the pool, and none becomes free as long as no path "
                         "takes what they have: " +
                             WhyNotWritten() + "; when one does, save again");
  failure.os_errno = paths_.front().health.error();
  Break(save, std::move(failure));
}

// ---- Copying ----

std::shared_ptr<CopyPace> Scheduler::PaceOf(const CopyPace::Options& options) {
  std::erase_if(paces_, [](const auto& entry) { return entry.second.expired(); });
  if (options.target == 0) return std::make_shared<CopyPace>(options, now_ns_);
  std::weak_ptr<CopyPace>& known = paces_[options.target];
  std::shared_ptr<CopyPace> pace = known.lock();
  if (pace == nullptr) known = pace = std::make_shared<CopyPace>(options, now_ns_);
  return pace;
}

uint32_t Scheduler::CopiesAtPace(const CopyPace* pace) const {
  uint32_t copies = 0;
  for (const auto& [number, save] : saves_) copies += save->pace.get() == pace ? save->in_flight : 0;
  return copies;
}

// In turn: who has waited for the longest first. Those that press go before what waits for the next buffer, or they
// would get none while there is always something; the others after it.
void Scheduler::PumpCopies(bool only_press) {
  copy_wake_ns_ = kNever;
  std::vector<StateSave*> in_turn;
  for (auto& [number, save] : saves_) {
    if (save->phase == StateSave::Phase::kCopying) in_turn.push_back(save.get());
  }
  while (!in_turn.empty()) {
    std::sort(in_turn.begin(), in_turn.end(), [](const StateSave* a, const StateSave* b) { return a->turn < b->turn; });
    const auto next =
        std::find_if(in_turn.begin(), in_turn.end(), [&](StateSave* save) { return StartCopy(*save, only_press); });
    if (next == in_turn.end()) return;
    (*next)->turn = ++copy_turn_;
  }
}

// Whether one would be made if there were a buffer: then something is flushed for it. While training pauses nothing
// else asks for that, and all buffers may be dirty.
bool Scheduler::CopyWaits() const {
  if (pending_ > 0) return false;  // something is, for that
  return std::any_of(saves_.begin(), saves_.end(), [this](const auto& entry) {
    const StateSave& save = *entry.second;
    if (save.phase != StateSave::Phase::kCopying || save.failure.status != 0 || !MayCopy(save)) return false;
    for (PathIndex i = 0; i < paths_.size(); ++i) {
      if (!save.waiting[i].empty() && MayCopyFrom(i, save)) return true;
    }
    return false;
  });
}

// Reads may move where writes hang.
bool Scheduler::MayCopyFrom(PathIndex path, const StateSave& save) const {
  return paths_[path].turn.Allows(save.session_id, Direction::kRead) &&
         model_.HungNs(path, Direction::kRead, now_ns_) == 0;
}

bool Scheduler::StartCopy(StateSave& save, bool only_press) {
  if (save.failure.status != 0 || !MayCopy(save)) return false;
  PathIndex from = kNone;
  bool presses = false;
  for (PathIndex i = 0; i < paths_.size() && (from == kNone || presses); ++i) {
    if (save.waiting[i].empty() || !MayCopyFrom(i, save)) continue;
    const uint64_t bytes = save.waiting[i].front()->bytes;
    const bool idle = !only_press && pending_ == 0 && paths_[i].pending_bytes == 0;
    if (idle && BufferIsFree() && MayQueue(i, Direction::kRead)) {
      from = i;
      presses = false;
    } else if (from == kNone && paths_[i].copies == 0) {
      if (!save.pace->MayPress(bytes, now_ns_)) {
        copy_wake_ns_ = std::min(copy_wake_ns_, std::max(now_ns_ + 1, save.pace->PressNs(bytes, now_ns_)));
      } else if (HasBuffer()) {
        from = i;
        presses = true;
      }
    }
  }
  BufferIndex buffer;
  if (from == kNone || !TakeBuffer(NodeOf(from), &buffer)) return false;
  Pin& pin = *save.waiting[from].front();
  save.waiting[from].pop_front();
  pin.in_flight = true;
  save.pace->Begun(pin.bytes, now_ns_);
  if (save.in_flight++ == 0) save.moved_ns = now_ns_;
  PathState& path = paths_[from];
  ++path.reads;
  ++path.copies;
  InFlight in_flight;
  in_flight.pin = &pin;
  in_flight.extent = pin.extent;
  in_flight.parts = pin.parts;
  Transfer& transfer = in_flight.transfer;
  transfer.id = next_transfer_++;
  transfer.direction = Direction::kRead;
  transfer.path = from;
  transfer.file = pin.extent.file;
  transfer.buffer = buffer;
  transfer.offset = options_.extents_offset_bytes + pin.extent.offset + pin.first_byte;
  transfer.bytes = pin.bytes;
  in_flight.turn = path.turn.Started(save.session_id, Direction::kRead, 1);
  transfers_[transfer.id] = in_flight;
  model_.Started(from, Direction::kRead, now_ns_);
  trace_.TransferBegins(transfer, now_ns_);
  actions_->StartTransfer(transfer);
  return true;
}

void Scheduler::CopyRead(const InFlight& in_flight, const TransferResult& result) {
  Pin& pin = *in_flight.pin;
  StateSave& save = *pin.save;
  PathState& path = paths_[in_flight.transfer.path];
  path.read_bytes += result.bytes;
  path.read_rate.Add(result.bytes, now_ns_);
  --path.reads;
  --path.copies;
  save.moved_ns = now_ns_;
  if (result.error == 0 && save.failure.status == 0) {
    return actions_->WritePart(save.id, pin, in_flight.transfer.buffer);
  }
  Failure failure =
      Fail(MLPO_E_IO, "reading block " + std::to_string(pin.index) + " of subgroup " + std::to_string(pin.subgroup) +
                          " for a checkpoint from path '" + options_.path_names[in_flight.transfer.path] +
                          "': " + std::generic_category().message(result.error));
  failure.os_errno = result.error;
  failure.path = in_flight.transfer.path;
  failure.block = pin.index;
  if (result.error != 0) ++path.read_errors;
  EndCopy(pin, in_flight.transfer.buffer);
  if (result.error == 0) return EndPin(pin);
  ReadsFail(in_flight.transfer.path, result.error);
  Break(save, std::move(failure));
}

void Scheduler::PartWritten(uint64_t number, Pin& pin, BufferIndex buffer, uint64_t hash, Failure failure,
                            int64_t took_ns, int64_t now_ns) {
  Enter(now_ns);
  StateSave& save = *saves_.at(number);
  const uint32_t together = CopiesAtPace(save.pace.get());
  EndCopy(pin, buffer);
  if (failure.status != 0) {
    Break(save, std::move(failure));
  } else if (pin.hashed && hash != pin.hash) {
    CopiedWrong(save, pin);
  } else {
    save.copied_bytes += pin.bytes;
    save.rate.Add(pin.bytes, now_ns);
    checkpoint_totals_.copied_bytes += pin.bytes;
    save.pace->Ended(pin.bytes, took_ns, together);
    EndPin(pin);
  }
  Pump();
}

// What was read is not what was written to the path: once more, over what the part has got; then it is given up.
void Scheduler::CopiedWrong(StateSave& save, Pin& pin) {
  const PathIndex from = pin.extent.path;
  PathState& path = paths_[from];
  ++path.checksum_mismatches;
  if (save.failure.status != 0) return EndPin(pin);
  if (!std::exchange(pin.again, true)) return save.waiting[from].push_front(&pin);
  ++path.checksum_errors;
  Failure failure = Fail(MLPO_E_IO, "block " + std::to_string(pin.index) + " of subgroup " +
                                        std::to_string(pin.subgroup) + " on path '" + options_.path_names[from] +
                                        "' is not what was written there: it cannot be saved");
  failure.os_errno = EBADMSG;
  failure.path = from;
  failure.block = pin.index;
  ReadsFail(from, EBADMSG);
  Break(save, std::move(failure));
}

void Scheduler::EndCopy(Pin& pin, BufferIndex buffer) {
  free_.Give(buffer);
  pin.in_flight = false;
  --pin.save->in_flight;
  pin.save->moved_ns = now_ns_;
}

// Nobody needs what it holds any more.
void Scheduler::EndPin(Pin& pin) {
  DropPin(pin);
  MaybeCopied(*pin.save);
}

// ---- Restoring ----

bool Scheduler::BeginRestore(SessionId id, uint32_t handle) {
  Session* session = Find(id);
  if (session == nullptr || session->ending || session->restores.size() >= kMostRestores) return false;
  return session->restores.insert({handle, false}).second;
}

void Scheduler::SubmitRestore(Session& session, const Request& request) {
  const mlpo_submission& submission = request.submission;
  const auto handle = static_cast<uint32_t>(submission.first);
  const auto restore = session.restores.find(handle);
  if (submission.first != handle || restore == session.restores.end()) {
    return Answer(request, Fail(-EBADF, "no restore has been begun with handle " + std::to_string(submission.first)));
  }
  if (submission.subgroup == 0) {
    session.restores.erase(restore);
    Answer(request, {});
    return actions_->RestoreEnded(session.id, handle);
  }
  const auto found = session.subgroups.find(submission.subgroup);
  if (found == session.subgroups.end()) {
    return Answer(request, Fail(-EBADF, "no subgroup has handle " + std::to_string(submission.subgroup)));
  }
  Subgroup& subgroup = *found->second;
  const auto in_use = [](const Subgroup& each) { return each.update_queued || each.window.begun(); };
  const Subgroup* busy = in_use(subgroup) ? &subgroup : nullptr;
  if (!restore->second) {
    // With a handle's first one all are looked at: refused later, one would keep its own state beside the checkpoint's.
    for (const auto& [id, each] : session.subgroups) {
      if (busy == nullptr && in_use(*each)) busy = each.get();
    }
  }
  if (busy != nullptr) {
    return Answer(
        request, Fail(MLPO_E_SLOT_BUSY, busy->Name() + " has an open window or an UPDATE that has not ended: a restore "
                                                       "would lose it; discard it first"));
  }
  restore->second = true;
  ++subgroup.restores_queued;
  Enqueue(subgroup, session, request);
  RunQueue(subgroup);
}

// Every block is filled anew. From the first on, nothing of the old state counts.
void Scheduler::BeginRestore(Op& op) {
  Subgroup& subgroup = *op.subgroup();
  if (subgroup.blocks.empty()) return;
  subgroup.torn = subgroup.unmade = true;
  subgroup.torn_written.Clear();
  op.end_block = static_cast<uint32_t>(subgroup.blocks.size());
  op.left = op.end_block;
  op.session->restoring.push_back(&op);
  look_at_restores_ = true;
}

// Wants the next blocks of RESTOREs, a few at a time: while their checkpoints' files do not answer, their buffers are
// nobody else's. All that move have an eighth of the pool together; while others have something to fill, half of that
// is one user's. What hangs keeps its buffers until it is given up; with whatever else is its user's it counts against
// that one alone, who gets no more than as many again. All users together get half of the pool: else they could take
// it, or keep others from restoring.
void Scheduler::PumpRestores() {
  if (!std::exchange(look_at_restores_, false)) return;
  struct Use {
    uint32_t move = 0, hang = 0;
  };
  std::map<SessionId, uint32_t> of_session;
  std::map<uint32_t, Use> of_user;                                      // by uid
  const auto count = [&](SessionId session, uint32_t uid, bool hang) {  // one block more
    ++of_session[session];
    ++(hang ? of_user[uid].hang : of_user[uid].move);
  };
  std::erase_if(filling_, [](const auto& entry) {  // its RESTORE has failed before it was begun
    const Op* const want = entry.first->want;
    return want == nullptr || want->kind() != MLPO_OP_RESTORE;
  });
  for (const auto& [block, filling] : filling_) {
    count(filling.session, filling.uid, now_ns_ - filling.since_ns >= kStalledNs);
  }
  const auto has_more = [](const Op* op) { return op->next_fill < op->end_block; };
  std::vector<Session*> waiting;
  for (Session* const session : all_sessions_) {
    if (session->ending || session->restoring.empty()) continue;
    if (std::any_of(session->restoring.begin(), session->restoring.end(), has_more)) waiting.push_back(session);
  }
  const uint32_t most = std::max(1u, free_.added() / 8), half = std::max(1u, most / 2);
  const uint32_t most_of_pool = std::max(1u, free_.added() / 2);
  const auto may_fill = [&](const Session& session) {
    const uint32_t uid = session.job->uid;
    const Use& user = of_user[uid];
    uint32_t all = 0, move = 0;
    for (const auto& [each, use] : of_user) {
      all += use.move + use.hang;
      move += use.hang == 0 ? use.move : 0;
    }
    const bool others =
        std::any_of(waiting.begin(), waiting.end(), [uid](const Session* other) { return other->job->uid != uid; });
    return of_session[session.id] < options_.restore_buffers && move < most && user.move + user.hang < 2 * most &&
           all < most_of_pool && (!others || user.move < half);
  };
  for (;;) {
    Session* next = nullptr;  // in turn: who has waited for the longest
    for (Session* const session : waiting) {
      if ((next == nullptr || session->restore_turn < next->restore_turn) && may_fill(*session)) next = session;
    }
    if (next == nullptr) return;
    next->restore_turn = ++restore_turn_;
    count(next->id, next->job->uid, false);
    Op& op = **std::find_if(next->restoring.begin(), next->restoring.end(), has_more);
    Block& block = op.owner->blocks[op.next_fill++];
    filling_[&block] = {next->id, next->job->uid, now_ns_};
    WantBlock(op, block);
    if (std::none_of(next->restoring.begin(), next->restoring.end(), has_more)) std::erase(waiting, next);
  }
}

void Scheduler::BlockRestored(Block& block, uint8_t parts, Failure failure, int64_t now_ns) {
  Enter(now_ns);
  Op& op = *block.want;
  Session& session = *op.session;
  --working_;
  filling_.erase(&block);
  look_at_restores_ = true;
  steps_.WorkEnds(session.steps, false);
  LetGo(block);
  --session.in_flight;
  block.want = nullptr;
  block.used_ns = now_ns;
  block.summed = block.unchecked = 0;
  block.read_twice = false;
  block.wrong.reset();
  if (block.owner->ending) {
    DropBuffer(block);
    MaybeGone(*block.owner);
    return Pump();
  }
  LeaveLone(block);
  ReleaseExtent(block);
  if (failure.status == 0) {
    block.nonzero = parts & kPartState;
    block.filled = kPartState;
    block.epoch = op.subgroup()->epoch;
    SettleInMemory(block);
  } else {  // it holds anything, and is taken for nothing until it is written in full
    block.nonzero = 0;
    DropBuffer(block);
    failure.block = block.index;
    failure.first = block.first;
    failure.count = block.count;
    FailOp(op, std::move(failure));
  }
  BlockDone(op);
  MaybeGone(session);
  Pump();
}

void Scheduler::EndRestore(Op& op, Completion* completion) {
  Subgroup& subgroup = *op.subgroup();
  std::erase(op.session->restoring, &op);
  completion->value = subgroup.epoch;
  if (op.failure.status == 0) op.failure = actions_->RestoreSteps(op, subgroup.spec.tensors);
  if (op.failure.status != 0) {
    op.failure.text += "; " + subgroup.Name() + " has no state: restore it again, or write all of it";
    return;
  }
  Heal(subgroup);
  subgroup.torn = subgroup.unmade = false;
  if (subgroup.spec.lent == nullptr) {
    subgroup.params_valid = true;
    actions_->PublishEpoch(subgroup);
  }
  SettleLentSlot(subgroup);
}

}  // namespace mlpo
