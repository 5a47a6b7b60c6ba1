// Scheduler: operations, from submission to completion.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "daemon/base/check.h"
#include "daemon/scheduler/failure.h"
#include "daemon/scheduler/scheduler.h"
#include "daemon/scheduler/session.h"

namespace mlpo {
namespace {

// What everything that uses the state of a subgroup is refused with.
Failure CheckMade(const Subgroup& subgroup) {
  if (!subgroup.unmade) return {};
  return Fail(MLPO_E_TORN, subgroup.Name() +
                               " was not restored to its end, so it has no state: restore it again, or "
                               "write all of it");
}

// What everything that changes a window or uses a gradient is refused with.
Failure CheckSlot(const Subgroup& subgroup) {
  if (subgroup.update_queued) return Fail(MLPO_E_SLOT_BUSY, "an UPDATE of " + subgroup.Name() + " has not ended");
  if (subgroup.unmade) return CheckMade(subgroup);
  if (subgroup.torn) {
    return Fail(MLPO_E_TORN, subgroup.Name() + " is partly at epoch " + std::to_string(subgroup.epoch + 1) +
                                 ": repeat the identical UPDATE, or write all of its state");
  }
  return {};
}

Failure CheckEpoch(const Subgroup& subgroup, uint32_t epoch) {
  if (epoch == subgroup.epoch + 1) return {};
  return Fail(MLPO_E_EPOCH, subgroup.Name() + " is at epoch " + std::to_string(subgroup.epoch) + ", so " +
                                std::to_string(subgroup.epoch + 1) + " is next, not " + std::to_string(epoch));
}

// What a gradient is refused with besides: the slot may have its gradient and the parameters in the same bytes.
Failure CheckNotRestored(const Subgroup& subgroup) {
  if (subgroup.restores_queued == 0) return {};
  return Fail(MLPO_E_SLOT_BUSY, "a RESTORE of " + subgroup.Name() +
                                    " has not ended, which writes parameters to its slot: wait for it, and write the "
                                    "gradient then");
}

uint32_t SlotState(const Subgroup& subgroup) {
  if (subgroup.update_queued || subgroup.restores_queued > 0) return MLPO_SLOT_BUSY;
  if (subgroup.torn) return MLPO_SLOT_TORN;
  if (subgroup.window.complete() && subgroup.grads_running == 0 && subgroup.window.begun()) return MLPO_SLOT_GRAD;
  return subgroup.params_valid && !subgroup.window.begun() ? MLPO_SLOT_PARAM : MLPO_SLOT_OPEN;
}

uint64_t Bits(double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

}  // namespace

void Scheduler::Answer(const Request& request, Failure failure, uint64_t value, uint32_t flags, uint32_t detail) {
  Completion completion;
  completion.session = request.session;
  completion.user_data = request.submission.user_data;
  completion.subgroup = request.submission.subgroup;
  completion.flags = flags;
  completion.value = value;
  completion.detail = detail;
  completion.failure = std::move(failure);
  actions_->Complete(completion);
}

void Scheduler::Submit(const Request& request, int64_t now_ns) {
  Enter(now_ns);
  Session* session = Find(request.session);
  if (session == nullptr || session->ending) return;  // its ring is not read any more
  const uint16_t op = request.submission.op;
  if (op == MLPO_OP_NOP) return Answer(request, {});
  if (op == MLPO_OP_DISCARD) return SubmitDiscard(*session, request);
  if (op == MLPO_OP_FETCH || op == MLPO_OP_FLUSH || op == MLPO_OP_DELETE) {
    SubmitObject(*session, request);
    return Pump();
  }
  if (op == MLPO_OP_RESTORE && session->features & MLPO_FEATURE_SNAPSHOT) {
    SubmitRestore(*session, request);
    return Pump();
  }
  if (op == MLPO_OP_SNAPSHOT && session->features & MLPO_FEATURE_SNAPSHOT) {
    SubmitSnapshot(*session, request);
    return Pump();
  }
  if (op > MLPO_OP_STAT || (op > MLPO_OP_DELETE && op <= MLPO_OP_CANCEL)) {
    return Answer(request, Fail(-EOPNOTSUPP, "operation " + std::to_string(op) + " is not offered by this daemon"));
  }
  Subgroup& subgroup = *session->subgroups.at(request.submission.subgroup);
  if (op == MLPO_OP_STAT) return Answer(request, {}, subgroup.epoch, 0, SlotState(subgroup));
  if (op == MLPO_OP_GRAD) return SubmitGrad(subgroup, request);
  SubmitState(subgroup, request);
  Pump();
}

void Scheduler::SubmitGrad(Subgroup& subgroup, const Request& request) {
  const mlpo_submission& submission = request.submission;
  auto op = std::make_unique<Op>();
  Failure failure = CheckNotRestored(subgroup);
  if (failure.status == 0) failure = CheckSlot(subgroup);
  if (failure.status == 0) failure = CheckEpoch(subgroup, submission.epoch);
  if (failure.status == 0) failure = subgroup.grad_lost;
  if (failure.status == 0) failure = CheckLentSlot(subgroup, submission.staging_offset);
  if (failure.status == 0) {
    failure = subgroup.window.AddPiece(submission.first, submission.count, submission.arg, &op->stats);
  }
  if (failure.status != 0) return Answer(request, std::move(failure));
  TakeLentSlot(subgroup, submission.staging_offset);
  op->request = request;
  op->session = subgroup.session;
  op->owner = &subgroup;
  op->results = subgroup.window.results();
  ++ops_;
  ++subgroup.session->unanswered;
  ++subgroup.session->in_flight;
  ++subgroup.grads_running;
  ++working_;
  steps_.GradBegins(subgroup.session->steps, subgroup.steps);
  if (subgroup.window_ns == 0) subgroup.window_ns = now_ns_;
  actions_->StartStats(*op);
  if (subgroup.spec.kept_as) return QueueGrad(subgroup, std::move(op));
  subgroup.grads.push_back(std::move(op));
}

void Scheduler::StatsDone(Op* op, int64_t now_ns) {
  Enter(now_ns);
  --working_;
  Session& session = *op->session;
  Subgroup& subgroup = *op->subgroup();
  --session.in_flight;
  steps_.GradEnds(session.steps);
  if (subgroup.spec.kept_as) {
    op->stats_running = false;
    if (session.ending) return MaybeGone(session);
    if (op->begun) BlockDone(*op);
    return Pump();
  }
  auto place = std::find_if(subgroup.grads.begin(), subgroup.grads.end(), [&](const auto& g) { return g.get() == op; });
  std::unique_ptr<Op> done = std::move(*place);
  subgroup.grads.erase(place);
  if (session.ending) return MaybeGone(session);
  --ops_;
  --session.unanswered;
  AnswerGrad(*done, {});
  RunQueue(subgroup);
  Pump();
}

void Scheduler::AnswerGrad(const Op& op, Failure failure) {
  Subgroup& subgroup = *op.subgroup();
  if (op.results != subgroup.window.results()) {
    return Answer(op.request, Fail(-ECANCELED, "the window was discarded before this gradient was looked at"));
  }
  --subgroup.grads_running;
  if (failure.status != 0) return Answer(op.request, std::move(failure));
  const bool complete = subgroup.window.complete() && subgroup.grads_running == 0;
  const Window::ChunkResult sum = complete ? subgroup.window.Total() : Window::Sum(*op.results, op.stats);
  Answer(op.request, {}, Bits(sum.sum_of_squares),
         (sum.all_finite ? MLPO_COMPLETION_ALL_FINITE : 0) | (complete ? MLPO_COMPLETION_WINDOW_COMPLETE : 0));
}

void Scheduler::SubmitDiscard(Session& session, const Request& request) {
  const bool all = request.submission.subgroup == MLPO_ALL_SUBGROUPS;
  for (auto& [handle, subgroup] : session.subgroups) {
    if (!all && handle != request.submission.subgroup) continue;
    Failure failure = CheckSlot(*subgroup);
    if (failure.status != 0) return Answer(request, std::move(failure));
  }
  for (auto& [handle, subgroup] : session.subgroups) {
    if (!all && handle != request.submission.subgroup) continue;
    ClearWindow(*subgroup);
    SettleLentSlot(*subgroup);
  }
  if (request.submission.arg == MLPO_DISCARD_OVERFLOW) ++session.skipped_steps;
  const bool windows = std::any_of(session.subgroups.begin(), session.subgroups.end(),
                                   [](const auto& entry) { return entry.second->window.begun(); });
  if (!windows) steps_.AllDiscarded(session.steps);
  Answer(request, {});
}

Failure Scheduler::CheckUpdate(const Subgroup& subgroup, const Request& request) const {
  if (subgroup.update_queued || subgroup.unmade) return CheckSlot(subgroup);
  Failure failure = CheckEpoch(subgroup, request.submission.epoch);
  if (failure.status != 0 || !subgroup.torn) return failure;
  if (std::memcmp(&request.hyper, &subgroup.torn_hyper, sizeof request.hyper) == 0 &&
      request.submission.flags == subgroup.torn_flags) {
    return {};
  }
  return Fail(MLPO_E_TORN, subgroup.Name() +
                               " is partly updated with other hyper-parameters: repeat the identical "
                               "UPDATE, or write all of its state");
}

void Scheduler::SubmitState(Subgroup& subgroup, const Request& request) {
  if (request.submission.op == MLPO_OP_READ_STATE && subgroup.unmade) return Answer(request, CheckMade(subgroup));
  if (request.submission.op == MLPO_OP_UPDATE) {
    Failure failure = CheckUpdate(subgroup, request);
    if (failure.status == 0) failure = CheckLentSlot(subgroup, request.submission.staging_offset);
    if (failure.status != 0) return Answer(request, std::move(failure));
    TakeLentSlot(subgroup, request.submission.staging_offset);
    steps_.UpdateAccepted(subgroup.session->steps, subgroup.steps);
  }
  subgroup.update_queued |= request.submission.op == MLPO_OP_UPDATE;
  Op& op = Enqueue(subgroup, *subgroup.session, request);
  if (op.kind() == MLPO_OP_UPDATE) op.window_ns = subgroup.window_ns;
  RunQueue(subgroup);
}

Op& Scheduler::Enqueue(BlockOwner& owner, Session& session, const Request& request) {
  auto op = std::make_unique<Op>();
  op->request = request;
  op->session = &session;
  op->owner = &owner;
  op->sequence = next_sequence_++;
  op->accepted_ns = now_ns_;
  ++ops_;
  ++session.unanswered;
  owner.queue.push_back(std::move(op));
  return *owner.queue.back();
}

// Begins what waits at the front, and ends it if there is nothing to wait for.
void Scheduler::RunQueue(BlockOwner& owner) {
  while (!owner.queue.empty() && !owner.queue.front()->begun) {
    Op& op = *owner.queue.front();
    if (op.kind() == MLPO_OP_UPDATE && op.subgroup()->grads_running > 0) return;
    op.begun = true;
    op.failure = op.object() != nullptr ? BeginObjectOp(op) : BeginOp(op);
    if (op.left > 0 && (op.failure.status == 0 || op.active > 0)) return;
    EndFront(owner);
  }
}

Failure Scheduler::BeginOp(Op& op) {
  if (op.kind() == MLPO_OP_GRAD) return BeginGrad(op);
  steps_.OpBegins(op.session->steps);
  if (op.kind() == MLPO_OP_UPDATE) return BeginUpdate(op);
  if (op.kind() == MLPO_OP_SNAPSHOT) return BeginTake(op);
  if (op.kind() == MLPO_OP_RESTORE) {
    BeginRestore(op);
    return {};
  }
  const mlpo_submission& submission = op.request.submission;
  if (submission.arg == MLPO_PART_STEP || submission.count == 0) return {};  // done in EndFront
  if (Failure damage = CheckDamage(op); damage.status != 0) return damage;
  WantRange(op);
  return {};
}

// The blocks of [first, first + count), which are there; count > 0.
void Scheduler::WantRange(Op& op) {
  const mlpo_submission& submission = op.request.submission;
  std::deque<Block>& blocks = op.owner->blocks;
  const uint64_t end = submission.first + submission.count;
  auto behind = [](uint64_t at, const Block& block) { return at < block.first; };
  auto begin = std::upper_bound(blocks.begin(), blocks.end(), submission.first, behind);
  op.first_block = static_cast<uint32_t>(begin - blocks.begin()) - 1;
  op.end_block = op.first_block;
  while (op.end_block < blocks.size() && blocks[op.end_block].first < end) ++op.end_block;
  op.left = op.end_block - op.first_block;
  for (uint32_t i = op.first_block; i < op.end_block; ++i) WantBlock(op, blocks[i]);
}

Failure Scheduler::BeginUpdate(Op& op) {
  Subgroup& subgroup = *op.subgroup();
  if (Failure damage = CheckDamage(op); damage.status != 0) return damage;
  if (subgroup.grad_lost.status != 0) return subgroup.grad_lost;
  Failure failure = subgroup.window.CheckComplete();
  if (failure.status != 0) return failure;
  if (!(op.request.submission.flags & MLPO_UPDATE_APPLY_NONFINITE) && !subgroup.window.Total().all_finite) {
    return Fail(MLPO_E_NOT_FINITE, "the gradient of " + subgroup.Name() + " has an infinity or NaN: discard it");
  }
  for (const Tensor& tensor : subgroup.spec.tensors) {
    const uint64_t tensor_end = tensor.first + tensor.count;
    for (auto it = subgroup.window.coverage().At(tensor.first);
         it != subgroup.window.coverage().pieces().end() && it->first < tensor_end; ++it) {
      if (it->second.kind == MLPO_PIECE_SKIP) continue;
      op.segments.push_back(Segment{std::max(it->first, tensor.first), std::min(it->second.end, tensor_end),
                                    it->second.kind, tensor.step + 1});
    }
  }
  const uint32_t target = subgroup.epoch + 1;
  op.end_block = static_cast<uint32_t>(subgroup.blocks.size());
  std::vector<Block*> wanted;
  size_t segment = 0;
  for (Block& block : subgroup.blocks) {
    if (subgroup.torn && block.epoch == target) continue;  // done by the UPDATE that tore it
    block.epoch = subgroup.epoch;
    if (Touches(op, block, &segment)) {
      wanted.push_back(&block);
    } else {
      block.epoch = target;
    }
  }
  op.updated_any = subgroup.torn;
  BeginStep(*op.session, target);
  op.left = static_cast<uint32_t>(wanted.size());
  if (options_.order != Order::kAdaptive) {
    LineUp(op, wanted);
    return {};
  }
  for (Block* block : wanted) WantBlock(op, *block);
  return {};
}

// Blocks that are to be wanted in an order that is not the scheduler's own.
void Scheduler::LineUp(Op& op, const std::vector<Block*>& blocks) {
  const bool backwards = options_.order == Order::kAlternating && op.session->epoch % 2 == 0;
  const int64_t sign = backwards ? -1 : 1;
  for (const Block* block : blocks) {
    op.session->line.insert({op.priority(), sign * static_cast<int64_t>(op.sequence), sign * block->index, &op});
  }
}

// Wants the blocks that are next in line: as many as keep the paths busy wait for a buffer, so that what is in memory
// waits, too, until those before it have one. A path that hangs holds up none but its own.
void Scheduler::WantNext() {
  if (options_.order == Order::kAdaptive) return;
  for (auto& [id, session] : sessions_) {
    uint64_t most = low_water_;
    for (PathIndex i = 0; i < paths_.size(); ++i) most += IsHanging(i) ? session->pending[i].size() : 0;
    while (!session->line.empty() && session->share.waiting_blocks < most) {
      const InLine next = session->line.extract(session->line.begin()).value();
      WantBlock(*next.op, next.op->owner->blocks[static_cast<size_t>(std::abs(next.index))]);
    }
  }
}

// An UPDATE begins, which may be the first of its epoch.
void Scheduler::BeginStep(Session& session, uint32_t epoch) {
  session.job->submitted_ns = now_ns_;
  if (epoch <= session.epoch) return;
  if (session.epoch > 0) session.period_ns = now_ns_ - session.step_ns;
  session.epoch = epoch;
  session.step_ns = now_ns_;
  session.job->step_ns = now_ns_;
}

// Whether a segment of op meets the block; *segment walks along with blocks in ascending order.
bool Scheduler::Touches(const Op& op, const Block& block, size_t* segment) const {
  while (*segment < op.segments.size() && op.segments[*segment].end <= block.first) ++*segment;
  return *segment < op.segments.size() && op.segments[*segment].first < block.first + block.count;
}

// Work on one block has ended for op.
void Scheduler::BlockDone(Op& op) {
  --op.left;
  --op.active;
  if (op.left == 0 || (op.failure.status != 0 && op.active == 0)) {
    Advance(*op.owner);
  }
}

// The front has ended: answers it and begins what is behind it. An object may be gone afterwards.
void Scheduler::Advance(BlockOwner& owner) {
  EndFront(owner);
  RunQueue(owner);
  if (Object* object = owner.object()) MaybeUnused(*object);
}

// Stops op: blocks that have not begun are not wanted any more; it ends when those in motion have.
void Scheduler::FailOp(Op& op, Failure failure) {
  if (op.failure.status == 0) op.failure = std::move(failure);
  std::erase_if(op.session->line, [&op](const InLine& waits) { return waits.op == &op; });
  std::erase(op.session->restoring, &op);
  look_at_restores_ |= op.kind() == MLPO_OP_RESTORE;
  for (uint32_t i = op.first_block; i < op.end_block; ++i) {
    Block& block = op.owner->blocks[i];
    if (block.want != &op || block.state == BlockState::kWorking || block.state == BlockState::kFetching) continue;
    const bool waits = block.pending_hook.is_linked();
    if (waits) RemovePending(block);
    block.want = nullptr;
    if (waits) SettleAway(block);
  }
}

std::unique_ptr<Op> Scheduler::TakeFront(BlockOwner& owner) {
  std::unique_ptr<Op> op = std::move(owner.queue.front());
  owner.queue.pop_front();
  if (op->session->ending) return op;  // not counted any more
  --ops_;
  --op->session->unanswered;
  return op;
}

void Scheduler::EndFront(BlockOwner& owner) {
  const std::unique_ptr<Op> op = TakeFront(owner);
  if (op->object() != nullptr) return EndObjectOp(*op);
  if (op->kind() == MLPO_OP_GRAD) return EndGrad(*op);
  Subgroup& subgroup = *op->subgroup();
  steps_.OpEnds(op->session->steps);
  if (op->kind() == MLPO_OP_SNAPSHOT) return EndTake(*op);
  Completion completion;
  completion.session = op->request.session;
  completion.user_data = op->request.submission.user_data;
  completion.subgroup = op->request.submission.subgroup;
  if (op->kind() == MLPO_OP_UPDATE) {
    subgroup.update_queued = false;
    EndUpdate(*op, &completion);
    SettleLentSlot(subgroup);
    steps_.UpdateEnds(op->session->steps, subgroup.steps, completion.value, op->session->subgroups.size());
    if (trace_.on()) TraceOp(*op, op->failure.status);
  } else if (op->kind() == MLPO_OP_RESTORE) {
    --subgroup.restores_queued;
    EndRestore(*op, &completion);
  } else if (op->request.submission.arg == MLPO_PART_STEP) {
    op->failure = actions_->CopySteps(*op, subgroup.spec.tensors);
  } else if (op->kind() == MLPO_OP_WRITE_STATE && op->failure.status == 0) {
    EndWrite(*op);
  }
  completion.failure = std::move(op->failure);
  actions_->Complete(completion);
}

void Scheduler::EndUpdate(Op& op, Completion* completion) {
  Subgroup& subgroup = *op.subgroup();
  if (op.failure.status != 0) {
    if (!op.updated_any) return;  // nothing has changed: the window is as it was
    subgroup.torn = true;
    subgroup.torn_hyper = op.request.hyper;
    subgroup.torn_flags = op.request.submission.flags;
    subgroup.torn_written.Clear();
    op.failure.text += "; the subgroup is torn";
    return;
  }
  // A tensor takes part unless it was skipped; one without elements always does.
  for (Tensor& tensor : subgroup.spec.tensors) {
    auto piece = subgroup.window.coverage().At(tensor.first);
    const bool skipped = tensor.count > 0 && piece->second.kind == MLPO_PIECE_SKIP;
    if (!skipped) ++tensor.step;
  }
  subgroup.torn = false;
  ClearWindow(subgroup);
  subgroup.params_valid = true;
  completion->value = ++subgroup.epoch;
  actions_->PublishEpoch(subgroup);
}

// A torn subgroup, or one of which blocks are lost, is whole again once all parts of every element have been written.
void Scheduler::EndWrite(Op& op) {
  Subgroup& subgroup = *op.subgroup();
  const mlpo_submission& submission = op.request.submission;
  if ((!subgroup.torn && subgroup.damaged == 0) || submission.arg != MLPO_PART_STATE) return;
  // Written twice is as good as once: only what is missing is added.
  uint64_t at = submission.first;
  const uint64_t end = submission.first + submission.count;
  while (at < end) {
    auto piece = subgroup.torn_written.At(at);
    const bool covered = piece != subgroup.torn_written.pieces().end() && piece->first <= at;
    const uint64_t next =
        piece == subgroup.torn_written.pieces().end() ? end : (covered ? piece->second.end : piece->first);
    uint64_t unused;
    if (!covered) subgroup.torn_written.Add(at, std::min(next, end) - at, MLPO_PIECE_VALUE, &unused);
    at = next;
  }
  if (!subgroup.torn_written.complete()) return;
  Heal(subgroup);
  if (!subgroup.torn) return;
  subgroup.torn = subgroup.unmade = false;
  subgroup.params_valid = false;
  ClearWindow(subgroup);
  for (Block& block : subgroup.blocks) block.epoch = subgroup.epoch;
  SettleLentSlot(subgroup);
}

}  // namespace mlpo
