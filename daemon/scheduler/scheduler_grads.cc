// Scheduler: gradients that are kept: copied to the blocks' buffers by GRAD, and read there by UPDATE.
//
// A block's gradient lies in front of its state, in the buffer and in the extent, so that any of what is moved is one
// transfer. GRAD copies a block once all of it is covered: its bytes in the slot stay as they are until then. If the
// block is in memory, the gradient goes beside its state. Else it gets a buffer of its own, is written to the block's
// extent as soon as the path may take it, and the buffer is free again: until then the buffer is as good as in that
// path's queue, and counted there.
#include <algorithm>

#include "daemon/base/check.h"
#include "daemon/scheduler/failure.h"
#include "daemon/scheduler/scheduler.h"
#include "daemon/scheduler/session.h"

namespace mlpo {

// ---- Slots of the lent area ----

// From a window's first GRAD to the last one's end, from an UPDATE's submission to its end, and as long as the subgroup
// is torn, the bytes of the slot are the subgroup's.
Failure Scheduler::CheckLentSlot(const Subgroup& subgroup, uint64_t offset) {
  if (subgroup.spec.lent == nullptr) return {};
  if (subgroup.slot) {
    if (*subgroup.slot == offset) return {};
    return Fail(-EINVAL, subgroup.Name() + " uses the slot at " + std::to_string(*subgroup.slot) +
                             " of the lent area, and has to go on with it instead of that at " +
                             std::to_string(offset));
  }
  const auto& slots = subgroup.session->slots;
  auto other = slots.lower_bound(offset);
  const bool behind = other != slots.end() && other->first < offset + subgroup.spec.slot_bytes;
  if (!behind) {
    if (other == slots.begin()) return {};
    --other;
    if (other->first + other->second->spec.slot_bytes <= offset) return {};
  }
  return Fail(MLPO_E_SLOT_BUSY, "the slot at " + std::to_string(offset) + " of the lent area overlaps the one at " +
                                    std::to_string(other->first) + ", which " + other->second->Name() + " uses");
}

void Scheduler::TakeLentSlot(Subgroup& subgroup, uint64_t offset) {
  if (subgroup.spec.lent == nullptr || subgroup.slot) return;
  subgroup.slot = offset;
  subgroup.session->slots[offset] = &subgroup;
}

// Gives it back if nothing needs it any more.
void Scheduler::SettleLentSlot(Subgroup& subgroup) {
  const bool open = subgroup.window.begun() && !subgroup.window.complete();
  if (!subgroup.slot || open || subgroup.update_queued || subgroup.torn || subgroup.grads_queued > 0) return;
  subgroup.session->slots.erase(*subgroup.slot);
  subgroup.slot.reset();
}

// ---- The operation ----

// Statistics are being formed; blocks are copied when what is in front of it in the queue has ended.
void Scheduler::QueueGrad(Subgroup& subgroup, std::unique_ptr<Op> op) {
  const mlpo_submission& submission = op->request.submission;
  const uint64_t end = submission.first + submission.count;
  std::deque<Block>& blocks = subgroup.blocks;
  auto behind = [](uint64_t at, const Block& block) { return at < block.first; };
  auto at = std::upper_bound(blocks.begin(), blocks.end(), submission.first, behind);
  if (submission.count > 0) --at;
  for (; at != blocks.end() && at->first < end && submission.count > 0; ++at) {
    uint64_t& covered = subgroup.covered[at->index];
    covered += std::min(end, at->first + at->count) - std::max(submission.first, at->first);
    if (covered < at->count) continue;
    if (op->first_block == op->end_block) op->first_block = at->index;
    op->end_block = at->index + 1;  // a piece completes blocks that follow each other
  }
  op->sequence = next_sequence_++;
  op->stats_running = true;
  ++subgroup.grads_queued;
  subgroup.queue.push_back(std::move(op));
  RunQueue(subgroup);
  Pump();
}

Failure Scheduler::BeginGrad(Op& op) {
  Subgroup& subgroup = *op.subgroup();
  if (op.stats_running) op.left = op.active = 1;
  if (op.results != subgroup.window.results()) return Fail(-ECANCELED, "");  // discarded: AnswerGrad says so
  std::vector<Block*> wanted;
  for (uint32_t i = op.first_block; i < op.end_block; ++i) {
    Block& block = subgroup.blocks[i];
    const uint64_t end = block.first + block.count;
    const auto& pieces = subgroup.window.coverage().pieces();
    bool value = false;
    for (auto it = subgroup.window.coverage().At(block.first); it != pieces.end() && it->first < end; ++it) {
      if (it->second.kind != MLPO_PIECE_VALUE) continue;
      value = true;
      op.segments.push_back({std::max(it->first, block.first), std::min(it->second.end, end), MLPO_PIECE_VALUE, 0});
    }
    if (value) wanted.push_back(&block);
  }
  op.left += static_cast<uint32_t>(wanted.size());
  for (Block* block : wanted) WantBlock(op, *block);
  return {};
}

void Scheduler::GradientCopied(const Op& op, Block& block) {
  if (op.results != op.subgroup()->window.results()) return;  // discarded meanwhile
  block.nonzero |= kPartGradient;
  block.filled |= kPartGradient;
  block.grad_saved = false;
  block.summed = block.form ? block.summed | kPartGradient : block.summed & ~kPartGradient;
}

void Scheduler::EndGrad(Op& op) {
  Subgroup& subgroup = *op.subgroup();
  const bool open = op.results == subgroup.window.results();
  if (op.failure.status != 0 && open && subgroup.grad_lost.status == 0) {
    subgroup.grad_lost = op.failure;
    subgroup.grad_lost.text = "a gradient of this window could not be kept, discard it: " + op.failure.text;
  }
  AnswerGrad(op, std::move(op.failure));
  --subgroup.grads_queued;
  SettleLentSlot(subgroup);
}

// The window has ended, by whatever: its gradients are forgotten.
void Scheduler::ClearWindow(Subgroup& subgroup) {
  subgroup.window.Clear();
  subgroup.window_ns = 0;
  subgroup.grads_running = 0;
  if (!subgroup.spec.kept_as) return;
  subgroup.grad_lost = Failure{};
  std::fill(subgroup.covered.begin(), subgroup.covered.end(), 0);
  for (Block& block : subgroup.blocks) DropGradient(block);
  Op* front = subgroup.queue.empty() ? nullptr : subgroup.queue.front().get();
  if (front == nullptr || front->kind() != MLPO_OP_GRAD) return;
  FailOp(*front, Fail(-ECANCELED, ""));
  if (front->active == 0) Advance(subgroup);
}

void Scheduler::DropGradient(Block& block) {
  if (!(block.nonzero & kPartGradient)) return;
  const bool pending = block.pending_hook.is_linked();
  if (pending) RemovePending(block);
  LeaveLists(block);
  LeaveLone(block);
  block.nonzero &= ~kPartGradient;
  block.filled &= ~kPartGradient;
  block.summed &= ~kPartGradient;
  block.unchecked &= ~kPartGradient;
  block.grad_saved = false;
  // What moves, or what workers compare, may be read again: its extent goes when that has ended.
  const bool in_use = block.state == BlockState::kFlushing || block.state == BlockState::kFetching ||
                      block.state == BlockState::kWorking;
  if (block.nonzero == 0 && !in_use) {
    SetAhead(block, false);  // while the extent's path still counts it
    ReleaseExtent(block);
  }
  if (pending) return MakePending(block);
  if (block.state == BlockState::kAway) SettleAway(block);
  if (block.state == BlockState::kClean || block.state == BlockState::kDirty) SettleInMemory(block);
}

// ---- Blocks ----

// op wants a block whose buffer has only the gradient. It takes no second one: the state is read into it.
void Scheduler::FetchState(Op& op, Block& block) {
  if (block.lone_grad) {  // in its path's queue already, by the count
    ++op.active;
    return StartRead(block, block.buffer);
  }
  MLPO_CHECK(block.state == BlockState::kClean);  // the extent has the gradient, too
  DropBuffer(block);
  MakePending(block);
}

void Scheduler::BeLone(Block& block) {
  block.lone_grad = true;
  ++paths_[block.extent.path].lone;
}

void Scheduler::LeaveLone(Block& block) {
  if (!block.lone_grad) return;
  block.lone_grad = false;
  --paths_[block.extent.path].lone;
}

// Of a block whose extent has its state: only the gradient is written, behind which the state stays. Else, and where
// the path does not take it now and the state is here, too: false, and the block goes as a whole.
bool Scheduler::FlushGradient(Block& block) {
  if (!(block.nonzero & kPartGradient) || block.extent.path == kNone || IsInOldFile(block)) return false;
  if (!MayRewrite(block) || !MayStart(block.extent.path, Direction::kWrite, *block.owner->session)) return false;
  StartWrite(block, block.extent, kPartGradient);
  return true;
}

// Writes gradients that have a buffer of their own. Where a path takes no writes, or a checkpoint may have the file,
// their states are read, so that they can go elsewhere.
void Scheduler::PumpGradients() {
  for (PathIndex i = 0; i < paths_.size(); ++i) {
    PathState& path = paths_[i];
    while (!path.lone_grads.empty() && !IsHanging(i)) {
      Block& block = path.lone_grads.front();
      const bool left = IsInOldFile(block);
      if (!left && MayRewrite(block)) {
        if (path.writes >= model_.QueueBlocks(i, Direction::kWrite)) break;
        StartWrite(block, block.extent, kPartGradient);
      } else {
        const bool waits = (path.writes > 0 && !left) || now_ns_ < path.rescue_again_ns;
        if (waits || path.reads >= model_.QueueBlocks(i, Direction::kRead)) break;
        StartRead(block, block.buffer);
      }
    }
  }
}

}  // namespace mlpo
