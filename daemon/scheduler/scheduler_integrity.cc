// Scheduler: checksums of blocks, and what becomes of a block that is not what was written.
//
// Checksums (block_layout.h: one of each piece of each array) are kept in memory, as the state on the paths lives no
// longer than the daemon: so a write that was lost or went elsewhere is noticed like a flipped bit. Workers form them
// behind the work that changes a block which a path has, while the piece is in their cache; else, if the block is to be
// written after all, in a pass of its own, for which its write waits. What was read is compared by the work that uses
// it, piece by piece, before anything of the piece is changed: a piece that is wrong is left alone, and with it the
// gradient in its slot. It is read again into its place, once, and the work goes on with such pieces alone.
//
// What was read and goes to another path without having been used (scheduler_leave.cc, or because its path fails) is
// compared before it is written: a bit that flipped on the way would be lost for good when its extent is given back.
// What is wrong is read again, once; then the block stays where it is, and who needs it finds out.
//
// What is wrong then, too, is lost: the operation fails. If nothing of the block has been changed, it is left as it is,
// and the next operation tries again. If an UPDATE has changed other pieces of it, neither its extent nor its buffer is
// whole: it is damaged, and its subgroup torn. From the first loss on it is known what of the subgroup is written; a
// WRITE_STATE of all three parts does not fail any more for what it finds, but gives up what it cannot keep; and when
// all of the state has been written, the subgroup is whole. A WRITE_STATE of one part cannot make it whole, and so
// fails as the first one did. A gradient that alone is wrong is given up by either, and the state stays.
#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/base/clock.h"
#include "daemon/scheduler/failure.h"
#include "daemon/scheduler/object.h"
#include "daemon/scheduler/scheduler.h"
#include "daemon/scheduler/session.h"
#include "daemon/types/element_bytes.h"
#include "proto/abi.h"

namespace mlpo {
namespace {

std::string NamesOf(uint8_t arrays) {
  std::string names;
  for (int i = 0; i < kBlockArrays; ++i) {
    if (arrays & 1 << i) names += (names.empty() ? "" : ", ") + std::string(kBlockArrayNames[i]);
  }
  return names;
}

// In any piece.
uint8_t AllOf(const std::vector<uint8_t>& arrays) {
  uint8_t all = 0;
  for (const uint8_t bits : arrays) all |= bits;
  return all;
}

}  // namespace

BlockLayout Scheduler::LayoutOf(const Block& block) {
  BlockLayout layout;
  const Subgroup* subgroup = block.owner->subgroup();
  if (subgroup == nullptr) {
    layout.part_bytes = ContentBytes(block);
    return layout;
  }
  layout.gradient_bytes = GradientBytes(subgroup->spec, block.count);
  layout.gradient_element_bytes = ElementBytes(subgroup->spec.kept_as.value_or(MLPO_FLOAT32));
  layout.part_bytes = PartBytes(block.count);
  return layout;
}

void Scheduler::NeedChecksums(Block& block) {
  if (block.checksums.empty()) block.checksums.resize(LayoutOf(block).pieces());
}

void Scheduler::ChecksumsFormed(Block& block, int64_t now_ns, std::vector<uint8_t> wrong) {
  Enter(now_ns);
  const auto it = forming_.find(&block);
  MLPO_CHECK(it != forming_.end());
  const Forming formed = it->second;
  forming_.erase(it);
  steps_.ChecksumsEnd();
  // A gradient may have been discarded meanwhile.
  if (wrong.empty()) {
    block.summed |= formed.missing & block.nonzero;
    block.unchecked &= ~formed.unchecked;
    block.read_twice = false;
    if (block.doubtful && formed.unchecked & kPartState) Believe(block);
    const PathIndex path = formed.extent.path;
    const bool lone = block.filled == kPartGradient && block.nonzero & kPartState;  // which do not wait for turns
    if (lone || paths_[path].turn.Allows(block.owner->session->id, Direction::kWrite)) {
      // If the owner is ending, its extents are still there: WriteDone sees to the rest.
      const uint64_t turn = TakeTurn(block, path, Direction::kWrite);
      Move(block, Direction::kWrite, formed.extent, formed.parts, SpanOf(block, formed.parts), turn);
    } else {
      TakeBackWrite(block, formed);  // it waits among the dirty ones, and needs no pass any more
      if (block.nonzero == 0) ReleaseExtent(block);
      AfterWrite(block, true);
    }
  } else {
    TakeBackWrite(block, formed);
    if (!(block.nonzero & kPartGradient)) {
      for (uint8_t& arrays : wrong) arrays &= ~(1 << kArrayGradient);
    }
    const bool right = std::all_of(wrong.begin(), wrong.end(), [](uint8_t arrays) { return arrays == 0; });
    if (block.nonzero == 0) ReleaseExtent(block);
    if (right || block.want != nullptr || block.owner->ending) {
      AfterWrite(block, true);  // whoever wants it compares it, too
    } else {
      MayNotMove(block, std::move(wrong));
    }
  }
  LeavingGoesOn();
  Pump();
}

// Of which nothing has been transferred.
void Scheduler::TakeBackWrite(Block& block, const Forming& write) {
  LeaveQueue(block, write.extent.path);
  const bool in_place = write.extent.path == block.extent.path && write.extent.file == block.extent.file &&
                        write.extent.offset == block.extent.offset;
  if (!in_place) GiveExtent(*block.owner->session, write.extent);
}

// ---- Reading again ----

// Work has left pieces of a block alone.
void Scheduler::FoundWrong(Block& block, std::vector<uint8_t> arrays) {
  Op& op = *block.want;
  if (op.session->ending) {  // of an object, which others may read: who wants the block next compares again
    block.wrong.reset();
    block.want = nullptr;
    SettleInMemory(block);
    return BlockDone(op);
  }
  const std::vector<uint8_t> wanted = StillWanted(block, arrays);
  const bool any = std::any_of(wanted.begin(), wanted.end(), [](uint8_t bits) { return bits != 0; });
  const bool read_again = block.wrong != nullptr && !block.wrong->spans.empty();
  if (any && !read_again) return ReadAgain(block, std::move(arrays));
  if (block.wrong == nullptr) {
    block.wrong = std::make_unique<WrongPieces>();
    block.wrong->sequence = op.sequence;
  }
  block.wrong->arrays = std::move(arrays);
  any ? Lose(block, 0) : StartWork(block);
}

// What of these arrays the block still has: its gradient may have been discarded since workers compared it. What they
// left alone is still to be done.
std::vector<uint8_t> Scheduler::StillWanted(const Block& block, std::vector<uint8_t> arrays) {
  for (uint8_t& bits : arrays) bits &= ArraysOf(block.unchecked);
  return arrays;
}

void Scheduler::ReadAgain(Block& block, std::vector<uint8_t> arrays) {
  auto wrong = std::make_unique<WrongPieces>();
  const BlockLayout layout = LayoutOf(block);
  const std::vector<uint8_t> wanted = StillWanted(block, arrays);
  uint64_t pieces = 0;
  for (const int array : {kArrayGradient, kArrayMaster, kArrayExpAvg, kArrayExpAvgSq}) {  // as they lie
    for (uint32_t piece = 0; piece < wanted.size(); ++piece) {
      if (!(wanted[piece] & 1 << array)) continue;
      ++pieces;
      const ByteSpan span = layout.Piece(static_cast<BlockArray>(array), piece);
      std::vector<ByteSpan>& spans = wrong->spans;
      // Each transfer is of the gradient or of the state, as it was written.
      const bool goes_on = !spans.empty() && spans.back().first + spans.back().bytes == span.first &&
                           span.first != layout.gradient_bytes;
      if (goes_on) {
        spans.back().bytes += span.bytes;
      } else {
        spans.push_back(span);
      }
    }
  }
  MLPO_CHECK(pieces > 0 && block.extent.path != kNone);
  paths_[block.extent.path].checksum_mismatches += pieces;
  actions_->ChecksumsWrong(block, block.extent.path, pieces, false);
  wrong->arrays = std::move(arrays);
  wrong->sequence = block.want == nullptr ? 0 : block.want->sequence;
  block.wrong = std::move(wrong);
  ReadNextPiece(block);
}

// Whatever else the path has in flight: it is little, and seldom.
void Scheduler::ReadNextPiece(Block& block) {
  block.state = BlockState::kFetching;
  ++paths_[block.extent.path].reads;
  Hold(block);
  const uint64_t turn = TakeTurn(block, block.extent.path, Direction::kRead);
  const ByteSpan span = block.wrong->spans[block.wrong->next];
  const uint8_t parts = span.first < LayoutOf(block).gradient_bytes ? kPartGradient : kPartState;
  Move(block, Direction::kRead, block.extent, parts, span, turn);
}

// The work goes on even if its operation has failed meanwhile: as any that workers have, it is done to the end.
void Scheduler::PieceRead(Block& block, int error) {
  const bool goes_on = block.want != nullptr && block.want->sequence == block.wrong->sequence;
  if (error != 0 && goes_on) return Lose(block, error);
  if (error == 0 && ++block.wrong->next < block.wrong->spans.size()) return ReadNextPiece(block);
  if (goes_on) return StartWork(block);
  // The block was to be moved, or whoever wanted it has gone: nothing of it has been changed. Who wants it now compares
  // all of it.
  block.wrong.reset();
  if (error != 0) return CannotBeRead(block, error);
  if (block.nonzero == 0) ReleaseExtent(block);  // a gradient that has been discarded meanwhile
  if (block.want != nullptr) {
    if (block.want->failure.status == 0) return StartWork(block);
    Op& op = *std::exchange(block.want, nullptr);
    SettleInMemory(block);
    return BlockDone(op);
  }
  block.read_twice = true;
  SettleInMemory(block);
  if (block.leaves) Leave(block);
  LookForTake(block);
}

// A block that nobody wants was found wrong when it was to be written to another path.
void Scheduler::MayNotMove(Block& block, std::vector<uint8_t> arrays) {
  if (!block.read_twice) return ReadAgain(block, std::move(arrays));
  const PathIndex from = block.extent.path;
  const auto is_wrong = [](uint8_t bits) { return bits != 0; };
  const auto pieces = static_cast<uint64_t>(std::count_if(arrays.begin(), arrays.end(), is_wrong));
  ++paths_[from].checksum_errors;
  actions_->ChecksumsWrong(block, from, pieces, true);
  if (block.owner->subgroup() != nullptr) Doubt(block, AllOf(arrays));
  CannotLeave(block);
  ForgetRead(block);
  ReadsFail(from, EBADMSG);
}

// ---- What is lost ----

// `error`: of reading it again; 0: it could be read, and is wrong. `changed`: other pieces of it have been.
Failure Scheduler::WhatIsLost(const Block& block, const std::vector<uint8_t>& wrong, int error, bool changed) const {
  uint64_t first = kNone, last = 0;  // pieces
  for (uint64_t piece = 0; piece < wrong.size(); ++piece) {
    if (wrong[piece] == 0) continue;
    first = std::min(first, piece);
    last = piece;
  }
  const PathIndex from = block.extent.path;
  const bool object = block.owner->object() != nullptr;
  const uint8_t arrays = AllOf(wrong);
  std::string text = (object ? "" : NamesOf(arrays) + " in ") + "block " + std::to_string(block.index) + " of " +
                     block.owner->Name() + " is not what was written to path '" + options_.path_names[from] + "'";
  text += error == 0 ? " (wrong checksum)" : " (wrong checksum, then " + std::generic_category().message(error) + ")";
  if (!object) {
    const bool state_is_whole = arrays == 1 << kArrayGradient && !changed;
    text += state_is_whole ? ": repeat it, or discard the gradient" : ": restore it, or write all of its state";
  }
  Failure failure = Fail(MLPO_E_IO, std::move(text));
  failure.os_errno = error != 0 ? error : EBADMSG;  // as file systems say it
  failure.block = block.index;
  failure.path = from;
  const uint64_t each = object ? kPieceBytes : kPieceElements;
  failure.first = block.first + first * each;
  failure.count = std::min(block.count, (last + 1) * each) - first * each;
  return failure;
}

void Scheduler::Lose(Block& block, int error) {
  Op& op = *block.want;
  Subgroup* const subgroup = block.owner->subgroup();
  const PathIndex from = block.extent.path;
  const std::vector<uint8_t> arrays = StillWanted(block, block.wrong->arrays);
  const auto is_wrong = [](uint8_t bits) { return bits != 0; };
  const auto pieces = static_cast<uint64_t>(std::count_if(arrays.begin(), arrays.end(), is_wrong));
  ++paths_[from].checksum_errors;
  actions_->ChecksumsWrong(block, from, pieces, true);
  const bool known = subgroup != nullptr && (subgroup->torn || subgroup->damaged > 0);
  const uint8_t lost = AllOf(arrays);
  if (subgroup != nullptr) Doubt(block, lost);
  ReadsFail(from, error != 0 ? error : EBADMSG);
  // On the way to having all of it written. What could not be read may yet be right.
  if (known && error == 0 && op.kind() == MLPO_OP_WRITE_STATE) {
    if (lost == 1 << kArrayGradient) {
      GiveUpGradient(block);
      return StartWork(block);  // on the pieces that were left alone for it: those that are done are changed
    }
    if (op.request.submission.arg == MLPO_PART_STATE) {
      block.wrong.reset();
      GiveUp(block, !(lost & 1 << kArrayGradient));
      return StartWork(block);
    }
  }
  const bool changed = op.kind() == MLPO_OP_UPDATE && pieces < arrays.size();
  Failure failure = WhatIsLost(block, arrays, error, changed);
  block.wrong.reset();
  block.want = nullptr;
  if (changed) {  // some of it is of the new epoch, some is lost: nothing of it is worth keeping
    op.updated_any = true;
    GiveUp(block, false);
    DropBuffer(block);
  } else {
    ForgetRead(block);
  }
  FailOp(op, std::move(failure));
  BlockDone(op);
}

// From here on it is known what is written of the subgroup: once that is all, it is whole. What of the block had been
// written, with state that is wrong now, does not count.
void Scheduler::Doubt(Block& block, uint8_t wrong) {
  Subgroup& subgroup = *block.owner->subgroup();
  if (!subgroup.torn && subgroup.damaged == 0) subgroup.torn_written.Clear();
  if (wrong & ArraysOf(kPartState)) subgroup.torn_written.Remove(block.first, block.count);
  if (block.doubtful || block.damaged) return;
  ++subgroup.damaged;
  block.doubtful = true;
}

// It has been read again meanwhile and was right, or has been written as a whole.
void Scheduler::Believe(Block& block) {
  --block.owner->subgroup()->damaged;
  block.doubtful = false;
}

// A kept one, of a block that has a buffer and is in no list: what needs it fails until it is discarded.
void Scheduler::GiveUpGradient(Block& block) {
  Subgroup& subgroup = *block.owner->subgroup();
  if (subgroup.grad_lost.status == 0) {
    subgroup.grad_lost =
        Fail(MLPO_E_IO, "the gradient of block " + std::to_string(block.index) + " of " + subgroup.Name() +
                            " was lost to a wrong checksum: discard it, or, if torn, write all of its state");
  }
  block.nonzero &= ~kPartGradient;
  block.filled &= ~kPartGradient;
  block.summed &= ~kPartGradient;
  block.unchecked &= ~kPartGradient;
  block.grad_saved = false;
}

// Of a block that has a buffer and is in no list: its state goes, and without `gradient` a kept gradient, too.
void Scheduler::GiveUp(Block& block, bool gradient) {
  Subgroup& subgroup = *block.owner->subgroup();
  if (!gradient && block.nonzero & kPartGradient) GiveUpGradient(block);
  ReleaseExtent(block);
  block.nonzero &= kPartGradient;
  block.filled &= block.nonzero;
  block.summed &= block.nonzero;
  block.unchecked = 0;
  if (!block.doubtful && !block.damaged) ++subgroup.damaged;
  block.doubtful = false;
  block.damaged = true;
  subgroup.torn_written.Remove(block.first, block.count);  // what had been written of it is gone, too
}

// Whether op would give out, or go on from, what is not there. A WRITE_STATE does neither.
Failure Scheduler::CheckDamage(const Op& op) {
  const Subgroup& subgroup = *op.subgroup();
  if (subgroup.damaged == 0 || op.kind() == MLPO_OP_WRITE_STATE) return {};
  const mlpo_submission& submission = op.request.submission;
  for (const Block& block : subgroup.blocks) {
    const bool read = submission.first < block.first + block.count && block.first < submission.first + submission.count;
    if (!block.damaged || (op.kind() == MLPO_OP_READ_STATE && !read)) continue;
    Failure failure = Fail(MLPO_E_IO, "block " + std::to_string(block.index) + " of " + subgroup.Name() +
                                          " was lost to a wrong checksum: restore it, or write all of its state");
    failure.os_errno = EBADMSG;
    failure.block = block.index;
    failure.first = block.first;
    failure.count = block.count;
    return failure;
  }
  return {};
}

// All of its state has been written.
void Scheduler::Heal(Subgroup& subgroup) {
  for (Block& block : subgroup.blocks) block.damaged = block.doubtful = false;
  subgroup.damaged = 0;
}

}  // namespace mlpo
