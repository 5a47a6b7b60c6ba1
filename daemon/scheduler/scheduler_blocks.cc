// Scheduler: a block's states, and which buffer it has.
#include <algorithm>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/scheduler/scheduler.h"
#include "daemon/scheduler/session.h"
#include "proto/abi.h"

namespace mlpo {

void Scheduler::WantBlock(Op& op, Block& block) {
  block.want = &op;
  if (op.kind() == MLPO_OP_UPDATE) steps_.UpdateWants(op.session->steps, WhereFound(block));
  switch (block.state) {
    case BlockState::kAway:
      MakePending(block);
      break;
    case BlockState::kFetching:
      ++op.active;
      break;
    case BlockState::kClean:
    case BlockState::kDirty:
      if (Missing(block) != 0) return FetchState(op, block);
      ++op.active;
      StartWork(block);
      break;
    case BlockState::kFlushing:
      break;  // WriteDone goes on
    case BlockState::kWorking:
      MLPO_CHECK(false);  // operations of a subgroup run one at a time
  }
}

StepBook::Found Scheduler::WhereFound(const Block& block) {
  if (block.ahead) return StepBook::Found::kPrefetched;
  const bool alone = block.filled == kPartGradient && block.nonzero & kPartState;  // a gradient without its state
  if (block.state != BlockState::kAway && !alone) return StepBook::Found::kCached;
  return block.nonzero != 0 ? StepBook::Found::kAway : StepBook::Found::kZero;
}

// What the wanted operation needs of what the block held before, and the buffer does not hold.
uint8_t Scheduler::Missing(const Block& block) const {
  const uint8_t missing = block.nonzero & ~block.filled;
  const mlpo_submission& submission = block.want->request.submission;
  if (missing == 0 || block.want->kind() == MLPO_OP_GRAD || block.want->kind() == MLPO_OP_RESTORE) return 0;
  if (block.want->kind() != MLPO_OP_WRITE_STATE) return missing;  // of FLUSH, too: its pieces follow each other
  const bool whole =
      submission.first <= block.first && block.first + block.count <= submission.first + submission.count;
  const bool moments =
      !(block.nonzero & kPartMoments) || (submission.arg & MLPO_PART_EXP_AVG && submission.arg & MLPO_PART_EXP_AVG_SQ);
  return whole && moments && submission.arg & MLPO_PART_MASTER ? missing & kPartGradient : missing;
}

// Whether the buffer holds what no extent does, or none that can be counted on.
bool Scheduler::Unsaved(const Block& block) const {
  if (block.nonzero & kPartGradient && !block.grad_saved) return true;
  if (!(block.nonzero & kPartState)) return false;
  if (block.extent.path == kNone) return true;
  const PathState& path = paths_[block.extent.path];
  return (path.health.unreadable() || path.leaving.on) && (block.nonzero & ~block.filled) == 0;
}

// What is in memory of what the path holds stays there until it is elsewhere.
void Scheduler::KeepInMemory(PathIndex path) {
  for (BlockList* list : {&clean_, &clean_ahead_}) {
    for (auto it = list->begin(); it != list->end();) {
      Block& block = *it++;
      if (block.extent.path != path || !Unsaved(block)) continue;
      LeaveLists(block);
      SetAhead(block, false);
      block.state = BlockState::kDirty;
      block.owner->session->dirty.push_front(block);  // nobody gives it away for another while there is a choice
    }
  }
}

// The path to read from, or the last one. A gradient that gets a buffer while its state is on a path stands in that
// path's queue, too: until it is written there, the buffer is the path's.
size_t Scheduler::PendingQueue(const Block& block) const {
  const bool lone = block.want->kind() == MLPO_OP_GRAD && block.nonzero & kPartState;
  return lone || Missing(block) != 0 ? block.extent.path : paths_.size();
}

uint64_t Scheduler::PendingBytes(const Block& block) {
  return block.want->kind() == MLPO_OP_GRAD ? SpanOf(block, kPartGradient).bytes : ContentBytes(block);
}

void Scheduler::MakePending(Block& block) {
  Session& session = *block.owner->session;
  const size_t queue = PendingQueue(block);
  LeaveLists(block);
  session.pending[queue].insert(block);
  fair_share_.Wait(session, queue, PendingBytes(block));
  steps_.BlockWaits(session.steps);
  ++pending_;
  if (queue < paths_.size()) paths_[queue].pending_bytes += PendingBytes(block);
}

void Scheduler::RemovePending(Block& block) {
  Session& session = *block.owner->session;
  const size_t queue = PendingQueue(block);
  session.pending[queue].erase(session.pending[queue].iterator_to(block));
  steps_.BlockWaitsNoMore(session.steps);
  --pending_;
  fair_share_.Leave(session, PendingBytes(block));
  if (queue < paths_.size()) paths_[queue].pending_bytes -= PendingBytes(block);
}

void Scheduler::StartWork(Block& block) {
  LeaveLists(block);
  StopLeaving(block);
  block.read_twice = false;
  const bool alone = (block.nonzero & ~block.filled & kPartState) != 0;
  if (block.want->kind() == MLPO_OP_GRAD && alone && !block.lone_grad) BeLone(block);
  // What a path has now is likely to go to one again; what has stayed in memory is not, and costs nothing.
  block.form = options_.integrity && block.extent.path != kNone;
  if (block.form) NeedChecksums(block);
  block.state = BlockState::kWorking;
  SetAhead(block, false);
  ++working_;
  Hold(block);
  ++block.want->session->in_flight;  // its arena is in use, too
  if (block.want->kind() == MLPO_OP_RESTORE)
    filling_[&block] = {block.owner->session->id, block.owner->session->job->uid, now_ns_};
  steps_.WorkBegins(block.want->session->steps, block.want->kind() == MLPO_OP_UPDATE);
  actions_->StartBlockWork(*block.want, block);
}

void Scheduler::BlockWorkDone(Block& block, int64_t now_ns, std::vector<uint8_t> wrong) {
  Enter(now_ns);
  Op& op = *block.want;
  Session& session = *op.session;
  --working_;
  steps_.WorkEnds(session.steps, op.kind() == MLPO_OP_UPDATE);
  LetGo(block);
  --session.in_flight;
  if (!wrong.empty() && !block.owner->ending) {
    FoundWrong(block, std::move(wrong));
    MaybeGone(session);
    return Pump();
  }
  block.wrong.reset();
  block.want = nullptr;
  if (op.kind() != MLPO_OP_GRAD) {
    block.unchecked &= op.kind() == MLPO_OP_READ_STATE ? kPartGradient : 0;
    if (block.doubtful) Believe(block);
    block.filled |= kPartState;
    block.used_ns = now_ns;
  }
  if (block.owner->ending) {
    DropBuffer(block);
    MaybeGone(*block.owner);
    return Pump();
  }
  if (op.kind() == MLPO_OP_GRAD) {
    GradientCopied(op, block);
  } else if (op.kind() != MLPO_OP_READ_STATE && op.kind() != MLPO_OP_FETCH) {
    LeaveLone(block);
    ReleaseExtent(block);
    block.summed &= op.kind() == MLPO_OP_WRITE_STATE ? kPartGradient : 0;
    if (op.kind() == MLPO_OP_UPDATE) {
      block.nonzero = block.filled = kPartState;  // the gradient is used up
      if (block.form) block.summed = kPartState;
      block.epoch = op.request.submission.epoch;
      op.updated_any = true;
    } else if (op.kind() == MLPO_OP_FLUSH) {
      block.nonzero = kPartMaster;
    } else {
      const uint32_t parts = op.request.submission.arg;
      if (parts & MLPO_PART_MASTER) block.nonzero |= kPartMaster;
      // Moments are moved with the master parameters in front of them, which are compared, too.
      if (parts & (MLPO_PART_EXP_AVG | MLPO_PART_EXP_AVG_SQ)) block.nonzero |= kPartState;
    }
  }
  if (block.nonzero == 0) ReleaseExtent(block);  // a gradient that has been discarded meanwhile
  SettleInMemory(block);
  BlockDone(op);
  MaybeGone(session);  // an object's work goes on when its session has ended
  Pump();
}

// Into the list of dirty or clean blocks, where its buffer can be had.
void Scheduler::SettleInMemory(Block& block) {
  block.state = Unsaved(block) ? BlockState::kDirty : BlockState::kClean;
  if (block.filled == 0) return DropBuffer(block);  // it was there for a gradient that has been discarded
  if (block.state == BlockState::kClean && !MayKeep(*block.owner->session, 0)) return DropBuffer(block);
  const Object* object = block.owner->object();
  // As ForgetAhead; and what goes elsewhere is not there ahead of its use.
  if (block.state == BlockState::kDirty || (object != nullptr && object->handles == 0)) SetAhead(block, false);
  const bool last = block.state == BlockState::kDirty
                        ? IsGrowing(block) || block.nonzero & kPartGradient  // whose state is wanted before others'
                        : (block.nonzero & ~block.filled) != 0;              // a gradient alone, which is written
  BlockList& list = ListOf(block);
  const bool least_recently = options_.order != Order::kAdaptive && block.state == BlockState::kDirty;
  last || least_recently ? list.push_front(block) : list.push_back(block);
}

// Its next use can be foreseen if it was updated before.
void Scheduler::SettleAway(Block& block) {
  if (block.epoch > 0 && block.extent.path != kNone && !block.owner->ending) ListOf(block).push_back(block);
}

BlockList& Scheduler::ListOf(Block& block) {
  if (block.state == BlockState::kAway) return block.owner->session->away[block.extent.path];
  if (block.state == BlockState::kDirty)
    return block.lone_grad ? paths_[block.extent.path].lone_grads : block.owner->session->dirty;
  return block.ahead ? clean_ahead_ : clean_;
}

void Scheduler::LeaveLists(Block& block) {
  if (!block.list_hook.is_linked()) return;
  BlockList& list = ListOf(block);
  list.erase(list.iterator_to(block));
}

void Scheduler::SetAhead(Block& block, bool ahead) {
  if (block.owner->subgroup() != nullptr && ahead != block.ahead) {
    uint32_t& count = paths_[block.extent.path].ahead;
    count += ahead ? 1 : -1;
  }
  block.ahead = ahead;
}

void Scheduler::DropBuffer(Block& block) {
  LeaveLists(block);
  LeaveLone(block);
  StopLeaving(block);
  free_.Give(block.buffer);
  CountHeld(block, -1);
  block.buffer = kNone;
  block.filled = block.unchecked = 0;
  block.read_twice = false;
  block.wrong.reset();
  SetAhead(block, false);
  block.state = BlockState::kAway;
  if (block.want == nullptr) SettleAway(block);
  LookForTake(block);
}

// A block's, or one that a write of it had taken.
void Scheduler::GiveExtent(Session& session, const Extent& extent) {
  session.placed_bytes[extent.path] -= extent.bytes;
  FreeExtent(session, extent);
}

// Nobody's any more. In a file that the session has left nothing is used again.
void Scheduler::FreeExtent(Session& session, const Extent& extent) {
  paths_[extent.path].extent_bytes -= extent.bytes;
  if (extent.file == session.files[extent.path]) return session.extents[extent.path].Give(extent.offset, extent.bytes);
  const auto old = session.old_files.find({extent.path, extent.file});
  MLPO_CHECK(old != session.old_files.end() && old->second >= extent.bytes);
  if ((old->second -= extent.bytes) > 0) return;
  session.old_files.erase(old);
  if (!session.ending) actions_->FileUnused(session.id, extent.path, extent.file);
}

// Whether its extent is in a file that the session has left: nothing is written there, since it may be a checkpoint's.
bool Scheduler::IsInOldFile(const Block& block) {
  return block.extent.path != kNone && block.extent.file != block.owner->session->files[block.extent.path];
}

void Scheduler::ReleaseExtent(Block& block) {
  if (block.extent.path == kNone) return;
  StopLeaving(block);
  Leaving& leaving = paths_[block.extent.path].leaving;
  leaving.moved = true;
  leaving.staying -= std::exchange(block.stays, false);
  if (block.pin != nullptr) return LeavePin(block);
  GiveExtent(*block.owner->session, block.extent);
  block.extent = Extent{};
  block.grad_saved = false;
}

// ---- What jobs and users keep ----

void Scheduler::CountHeld(Block& block, int by) {
  Session& session = *block.owner->session;
  session.use.held += by;
  if (session.job == nullptr) return;
  session.job->use.held += by;
  session.job->user->use.held += by;
}

void Scheduler::CountFlushing(Block& block, int by) {
  Session& session = *block.owner->session;
  session.use.flushing += by;
  if (session.job == nullptr) return;
  session.job->use.flushing += by;
  session.job->user->use.flushing += by;
}

// It is ending: what it still has is nobody's to keep.
void Scheduler::LeaveJob(Session& session) {
  for (PoolUse* use : {&session.job->use, &session.job->user->use}) {
    use->held -= session.use.held;
    use->flushing -= session.use.flushing;
  }
  session.job = nullptr;
}

// Whether its job and user may keep what they have and so many buffers more.
bool Scheduler::MayKeep(const Session& session, uint64_t more) const {
  if (session.job == nullptr) return true;
  const auto fits = [more](const PoolUse& use, uint64_t limit) { return limit == 0 || use.held + more <= limit; };
  return fits(session.job->use, options_.job_buffers) && fits(session.job->user->use, options_.user_buffers);
}

// Of those who have more than they may keep, dirty blocks are written without anybody asking for their buffers.
void Scheduler::PumpQuotas() {
  if (options_.job_buffers == 0 && options_.user_buffers == 0) return;
  const auto above = [](const PoolUse& use, uint64_t limit) { return limit > 0 && use.held - use.flushing > limit; };
  for (Session* const session : all_sessions_) {
    while (session->job != nullptr && !session->dirty.empty() &&
           (above(session->job->use, options_.job_buffers) || above(session->job->user->use, options_.user_buffers))) {
      Block& last = session->dirty.back();
      if (IsGrowing(last) || !StartFlush(last)) break;
    }
  }
}

// A transfer of the block, or work on it: its owner stays until it has ended.
void Scheduler::Hold(Block& block) {
  ++block.owner->in_flight;
  ++block.owner->session->in_flight;
}

void Scheduler::LetGo(Block& block) {
  --block.owner->in_flight;
  --block.owner->session->in_flight;
}

// What a block holds at most.
uint64_t Scheduler::ContentBytes(const Block& block) {
  if (const Subgroup* subgroup = block.owner->subgroup()) {
    return BufferBytes(block.count) + GradientBytes(subgroup->spec, block.count);
  }
  return (block.count + MLPO_ALIGN - 1) / MLPO_ALIGN * MLPO_ALIGN;
}

// Where parts lie: the gradient, the master parameters, both moments. What is transferred is one span.
ByteSpan Scheduler::SpanOf(const Block& block, uint8_t parts) {
  const Subgroup* subgroup = block.owner->subgroup();
  if (subgroup == nullptr) return {0, ContentBytes(block)};
  const uint64_t gradient = GradientBytes(subgroup->spec, block.count);
  const uint64_t first = parts & kPartGradient ? 0 : gradient;
  const uint64_t state = parts & kPartMoments ? 3 : parts & kPartMaster ? 1 : 0;
  return {first, gradient + state * PartBytes(block.count) - first};
}

// Those of subgroups are of one size.
uint64_t Scheduler::ExtentBytes(const Block& block) const {
  return block.owner->object() == nullptr ? BufferBytes(options_.block_elements) : ContentBytes(block);
}

// Whether TakeBuffer will have one. What was fetched ahead goes only if no other buffer is coming.
bool Scheduler::HasBuffer() const {
  if (BufferIsFree()) return true;
  return !clean_ahead_.empty() && working_ == 0 && Coming() == 0;
}

// On `node` if one is free there; from the free ones, else from a clean block.
bool Scheduler::TakeBuffer(int node, BufferIndex* buffer) {
  if (free_.empty() && !clean_.empty()) DropBuffer(clean_.front());
  if (!HasBuffer()) return false;
  if (free_.empty()) DropBuffer(clean_ahead_.back());
  *buffer = free_.Take(node);
  return true;
}

}  // namespace mlpo
