// Scheduler: a block's states, and which buffer it has.
#include <algorithm>

#include "daemon/base/check.h"
#include "daemon/scheduler/scheduler.h"
#include "daemon/scheduler/session.h"

namespace mlpo {

void Scheduler::WantBlock(Op& op, Block& block) {
  block.want = &op;
  switch (block.state) {
    case BlockState::kAway:
      MakePending(block);
      break;
    case BlockState::kFetching:
      ++op.active;
      break;
    case BlockState::kClean:
    case BlockState::kDirty:
      ++op.active;
      StartWork(block);
      break;
    case BlockState::kFlushing:
      break;  // WriteDone goes on
    case BlockState::kWorking:
      MLPO_CHECK(false);  // operations of a subgroup run one at a time
  }
}

// Whether the wanted operation needs what the block held before.
bool Scheduler::NeedsOldContent(const Block& block) const {
  if (block.nonzero == 0) return false;
  const mlpo_submission& submission = block.want->request.submission;
  if (block.want->kind() != MLPO_OP_WRITE_STATE) return true;
  const bool whole =
      submission.first <= block.first && block.first + block.count <= submission.first + submission.count;
  const bool moments =
      !(block.nonzero & kPartMoments) || (submission.arg & MLPO_PART_EXP_AVG && submission.arg & MLPO_PART_EXP_AVG_SQ);
  return !(whole && moments && submission.arg & MLPO_PART_MASTER);
}

void Scheduler::MakePending(Block& block) {
  Session& session = *block.subgroup->session;
  const bool read = NeedsOldContent(block);
  const size_t queue = read ? block.extent.path : paths_.size();
  const bool had_none = std::all_of(session.pending.begin(), session.pending.end(), [](auto& s) { return s.empty(); });
  if (had_none) {  // does not make up for the time in which it wanted nothing
    double least = -1;
    for (const auto& [id, other] : sessions_) {
      const bool waits = std::any_of(other->pending.begin(), other->pending.end(), [](auto& s) { return !s.empty(); });
      if (waits && (least < 0 || other->granted_bytes < least)) least = other->granted_bytes;
    }
    session.granted_bytes = std::max(session.granted_bytes, least);
  }
  session.pending[queue].insert(block);
  ++pending_;
  if (read) paths_[queue].pending_bytes += PartBytes(block.count);
}

void Scheduler::RemovePending(Block& block) {
  Session& session = *block.subgroup->session;
  const bool read = NeedsOldContent(block);
  const size_t queue = read ? block.extent.path : paths_.size();
  session.pending[queue].erase(session.pending[queue].iterator_to(block));
  --pending_;
  if (read) paths_[queue].pending_bytes -= PartBytes(block.count);
}

void Scheduler::StartWork(Block& block) {
  block.dirty = block.state == BlockState::kDirty;
  LeaveLists(block);
  block.state = BlockState::kWorking;
  block.ahead = false;
  ++working_;
  ++block.subgroup->session->in_flight;
  actions_->StartBlockWork(*block.want, block);
}

void Scheduler::BlockWorkDone(SessionId id, SubgroupId handle, uint32_t index, int64_t now_ns) {
  now_ns_ = now_ns;
  Session* session = Find(id);
  MLPO_CHECK(session != nullptr);
  Block& block = session->subgroups.at(handle)->blocks[index];
  Op& op = *block.want;
  --working_;
  --session->in_flight;
  block.want = nullptr;
  block.filled = kPartMaster | kPartMoments;
  if (session->ending) {
    DropBuffer(block);
    MaybeGone(*session);
    return Pump();
  }
  if (op.kind() != MLPO_OP_READ_STATE) {
    block.dirty = true;
    ReleaseExtent(block);
    if (op.kind() == MLPO_OP_UPDATE) {
      block.nonzero = kPartMaster | kPartMoments;
      block.epoch = op.request.submission.epoch;
      op.updated_any = true;
    } else {
      const uint32_t parts = op.request.submission.arg;
      if (parts & MLPO_PART_MASTER) block.nonzero |= kPartMaster;
      if (parts & (MLPO_PART_EXP_AVG | MLPO_PART_EXP_AVG_SQ)) block.nonzero |= kPartMoments;
    }
  }
  SettleInMemory(block);
  BlockDone(op);
  Pump();
}

// Into the list of dirty or clean blocks, where its buffer can be had.
void Scheduler::SettleInMemory(Block& block) {
  block.state = block.dirty ? BlockState::kDirty : BlockState::kClean;
  (block.dirty ? dirty_ : block.ahead ? clean_ahead_ : clean_).push_back(block);
}

void Scheduler::LeaveLists(Block& block) {
  if (!block.list_hook.is_linked()) return;
  BlockList& list = block.state == BlockState::kDirty ? dirty_ : block.ahead ? clean_ahead_ : clean_;
  list.erase(list.iterator_to(block));
}

void Scheduler::DropBuffer(Block& block) {
  LeaveLists(block);
  free_.push_back(block.buffer);
  block.buffer = kNone;
  block.filled = 0;
  block.ahead = false;
  block.state = BlockState::kAway;
}

void Scheduler::ReleaseExtent(Block& block) {
  if (block.extent.path == kNone) return;
  block.subgroup->session->extents[block.extent.path].Give(block.extent.index);
  paths_[block.extent.path].extent_bytes -= BufferBytes(options_.block_elements);
  block.extent = Extent{};
}

// From the free ones, else from a clean block. What was fetched ahead goes only if no other buffer is coming.
bool Scheduler::TakeBuffer(BufferIndex* buffer) {
  if (free_.empty() && !clean_.empty()) DropBuffer(clean_.front());
  const bool coming = flushing_ > 0 || working_ > 0;
  if (free_.empty() && !coming && !clean_ahead_.empty()) DropBuffer(clean_ahead_.back());
  if (free_.empty()) return false;
  *buffer = free_.back();
  free_.pop_back();
  return true;
}

}  // namespace mlpo
