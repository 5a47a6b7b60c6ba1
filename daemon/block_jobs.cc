#include "daemon/block_jobs.h"

#include <algorithm>
#include <cstring>

#include "daemon/base/check.h"
#include "daemon/base/checksum.h"
#include "daemon/base/client_memory.h"
#include "proto/abi.h"

namespace mlpo {
namespace {

uint32_t PieceCount(uint64_t count, uint64_t per_piece) {
  return static_cast<uint32_t>(std::max<uint64_t>(1, (count + per_piece - 1) / per_piece));
}

}  // namespace

CheckedJob::CheckedJob(Block& block, std::byte* buffer, uint8_t check, uint8_t form)
    : block_(block),
      buffer_(buffer),
      layout_(Scheduler::LayoutOf(block)),
      check_(ArraysOf(check)),
      form_(ArraysOf(form)),
      checksums_(block.checksums.data()),
      only_(block.wrong == nullptr ? std::vector<uint8_t>() : block.wrong->arrays) {
  pieces = layout_.pieces();
  if (check_ != 0) wrong_.resize(pieces);
}

void CheckedJob::Finish(Scheduler& scheduler, int64_t now_ns) { scheduler.BlockWorkDone(block_, now_ns, TakeWrong()); }

std::vector<uint8_t> CheckedJob::TakeWrong() {
  const bool right = std::all_of(wrong_.begin(), wrong_.end(), [](uint8_t arrays) { return arrays == 0; });
  return right ? std::vector<uint8_t>() : std::move(wrong_);
}

uint64_t CheckedJob::ChecksumOf(int array, uint32_t piece) const {
  const ByteSpan span = layout_.Piece(static_cast<BlockArray>(array), piece);
  return Checksum(buffer_ + span.first, span.bytes);
}

// All of them are compared: what is wrong is read again, the rest is not.
bool CheckedJob::IsRight(uint32_t piece, uint8_t arrays) {
  arrays &= check_;
  if (arrays == 0) return true;
  uint8_t wrong = 0;
  for (int i = 0; i < kBlockArrays; ++i) {
    if (arrays & 1 << i && ChecksumOf(i, piece) != checksums_[piece].array[i]) wrong |= 1 << i;
  }
  wrong_[piece] = wrong;
  return wrong == 0;
}

void CheckedJob::End(uint32_t piece) {
  for (int i = 0; i < kBlockArrays; ++i) {
    if (form_ & 1 << i) checksums_[piece].array[i] = ChecksumOf(i, piece);
  }
}

BlockJob::BlockJob(Block& block, std::byte* buffer, uint8_t check, uint8_t form)
    : CheckedJob(block, buffer, check, form),
      filled_(block.filled),
      first_(block.first),
      count_(block.count),
      gradient_(buffer),
      kept_as_(block.owner->subgroup()->spec.kept_as.value_or(MLPO_FLOAT32)) {
  for (int i = 0; i < 3; ++i) {
    parts_[i] = reinterpret_cast<float*>(buffer + layout_.gradient_bytes + i * layout_.part_bytes);
  }
}

uint64_t BlockJob::PieceEnd(uint32_t piece) const { return std::min(count_, (piece + 1) * kPieceElements); }

void BlockJob::FillPiece(uint32_t piece) {
  const uint64_t begin = PieceBegin(piece);
  const uint64_t end = piece + 1 == pieces ? layout_.part_bytes / sizeof(float) : PieceEnd(piece);
  for (int i = 0; i < 3; ++i) {
    const uint8_t part = i == 0 ? kPartMaster : kPartMoments;
    if (!(filled_ & part)) std::fill(parts_[i] + begin, parts_[i] + end, 0.0f);
  }
}

void BlockJob::ZeroPadding() {
  for (float* part : parts_) std::fill(part + count_, part + layout_.part_bytes / sizeof(float), 0.0f);
}

UpdateJob::UpdateJob(const Op& op, Block& block, std::byte* buffer)
    : BlockJob(block, buffer, block.unchecked, block.form ? kPartState : 0),
      segments_(op.segments),
      hyper_(op.request.hyper),
      grad_dtype_(layout_.gradient_bytes > 0 ? kept_as_ : op.subgroup()->spec.grad_dtype),
      dtype_(op.subgroup()->spec.dtype),
      grad_(layout_.gradient_bytes > 0 ? nullptr : op.subgroup()->spec.grad),
      param_(op.InSlot(op.subgroup()->spec.param)) {}

void UpdateJob::RunPiece(uint32_t piece) {
  if (!Begin(piece)) return;
  FillPiece(piece);
  const uint64_t begin = first_ + PieceBegin(piece);
  const uint64_t end = first_ + PieceEnd(piece);
  auto segment = std::lower_bound(segments_.begin(), segments_.end(), begin,
                                  [](const Segment& s, uint64_t at) { return s.end <= at; });
  int64_t step = 0;  // that `scalars` are of: tensors mostly have the same
  AdamScalars scalars;
  for (; segment != segments_.end() && segment->first < end; ++segment) {
    if (segment->step != step) {
      step = segment->step;
      scalars = MakeScalars(hyper_, step);
    }
    const uint64_t from = std::max(begin, segment->first);
    const uint64_t at = from - first_;
    AdamRange range;
    range.n = std::min(end, segment->end) - from;
    range.p = parts_[0] + at;
    range.m = parts_[1] + at;
    range.v = parts_[2] + at;
    range.grad_dtype = grad_dtype_;
    range.dtype = dtype_;
    if (segment->kind == MLPO_PIECE_VALUE)
      range.grad = grad_ != nullptr ? grad_ + from * ElementBytes(grad_dtype_) : GradientAt(at);
    range.param = param_ + from * ElementBytes(dtype_);
    AdamUpdate(scalars, range);
  }
  End(piece);
}

GradientJob::GradientJob(const Op& op, Block& block, std::byte* buffer)
    : BlockJob(block, buffer, 0, block.form ? kPartGradient : 0),
      segments_(op.segments),
      grad_dtype_(op.subgroup()->spec.grad_dtype),
      grad_(op.InSlot(op.subgroup()->spec.grad)) {}

// What no VALUE piece names becomes 0: whatever the buffer held is somebody else's.
void GradientJob::ZeroTo(uint64_t begin_bytes, uint64_t end_bytes) {
  std::memset(gradient_ + begin_bytes, 0, end_bytes - begin_bytes);
}

void GradientJob::RunPiece(uint32_t piece) {
  const uint64_t begin = first_ + PieceBegin(piece);
  const uint64_t end = first_ + PieceEnd(piece);
  const uint64_t size = ElementBytes(kept_as_);
  uint64_t done = PieceBegin(piece) * size;  // bytes of the gradient
  auto segment = std::lower_bound(segments_.begin(), segments_.end(), begin,
                                  [](const Segment& s, uint64_t at) { return s.end <= at; });
  for (; segment != segments_.end() && segment->first < end; ++segment) {
    const uint64_t from = std::max(begin, segment->first);
    const uint64_t count = std::min(end, segment->end) - from;
    const std::byte* given = grad_ + from * ElementBytes(grad_dtype_);
    std::byte* kept = GradientAt(from - first_);
    ZeroTo(done, (from - first_) * size);
    if (kept_as_ == grad_dtype_) {
      CopyClientMemory(kept, given, count * size);
    } else {
      WidenFrom(grad_dtype_, given, reinterpret_cast<float*>(kept), count);
    }
    done = (from - first_ + count) * size;
  }
  ZeroTo(done, piece + 1 == pieces ? layout_.gradient_bytes : PieceEnd(piece) * size);
  End(piece);
}

// A WRITE_STATE gives up the extent that a gradient, too, could be read from again.
StateJob::StateJob(const Op& op, Block& block, std::byte* buffer, std::byte* staging)
    : BlockJob(block, buffer, op.kind() == MLPO_OP_WRITE_STATE ? block.unchecked : block.unchecked & kPartState, 0),
      submission_(op.request.submission),
      staging_(staging) {}

void StateJob::RunPiece(uint32_t piece) {
  const uint64_t begin = std::max(first_ + PieceBegin(piece), submission_.first);
  const uint64_t end = std::min(first_ + PieceEnd(piece), submission_.first + submission_.count);
  // State that is written over as a whole may have been anything.
  const bool replaced = submission_.op == MLPO_OP_WRITE_STATE && submission_.arg == MLPO_PART_STATE &&
                        begin == first_ + PieceBegin(piece) && end == first_ + PieceEnd(piece);
  if (!IsToDo(piece) || !IsRight(piece, replaced ? 1 << kArrayGradient : 0xff)) return;
  FillPiece(piece);
  if (replaced && piece + 1 == pieces) ZeroPadding();
  if (begin >= end) return;
  std::byte* array = staging_ + submission_.staging_offset;
  for (int i = 0; i < 3; ++i) {
    if (!(submission_.arg & (MLPO_PART_MASTER << i))) continue;
    std::byte* staged = array + (begin - submission_.first) * sizeof(float);
    float* held = parts_[i] + (begin - first_);
    if (submission_.op == MLPO_OP_READ_STATE) {
      CopyClientMemory(staged, held, (end - begin) * sizeof(float));
    } else {
      CopyClientMemory(held, staged, (end - begin) * sizeof(float));
    }
    array += submission_.count * sizeof(float);
  }
}

ObjectJob::ObjectJob(const Op& op, Block& block, std::byte* buffer, std::byte* staging)
    : CheckedJob(block, buffer, block.unchecked, 0),
      writes_(op.kind() == MLPO_OP_FLUSH),
      empty_(block.filled == 0),
      bytes_((block.count + MLPO_ALIGN - 1) / MLPO_ALIGN * MLPO_ALIGN),
      begin_(std::max(block.first, op.request.submission.first) - block.first),
      end_(std::min(block.first + block.count, op.request.submission.first + op.request.submission.count) -
           block.first),
      staged_(staging + op.request.submission.staging_offset + (block.first + begin_ - op.request.submission.first)) {}

// Whatever the buffer held before is somebody else's: what is not written is zeroed, the padding, too.
void ObjectJob::RunPiece(uint32_t piece) {
  if (!Begin(piece)) return;
  const uint64_t first = piece * kPieceBytes;
  const uint64_t last = std::min(bytes_, first + kPieceBytes);
  const uint64_t begin = std::clamp(begin_, first, last);
  const uint64_t end = std::clamp(end_, first, last);
  if (empty_) {
    std::memset(buffer_ + first, 0, begin - first);
    std::memset(buffer_ + end, 0, last - end);
  }
  if (begin == end) return;
  std::byte* staged = staged_ + (begin - begin_);
  if (writes_) {
    CopyClientMemory(buffer_ + begin, staged, end - begin);
  } else {
    CopyClientMemory(staged, buffer_ + begin, end - begin);
  }
}

std::unique_ptr<SchedulerJob> MakeBlockJob(const Op& op, Block& block, std::byte* buffer, std::byte* staging) {
  if (op.kind() == MLPO_OP_UPDATE) return std::make_unique<UpdateJob>(op, block, buffer);
  if (op.kind() == MLPO_OP_GRAD) return std::make_unique<GradientJob>(op, block, buffer);
  MLPO_CHECK(staging != nullptr);
  if (op.object() != nullptr) return std::make_unique<ObjectJob>(op, block, buffer, staging);
  return std::make_unique<StateJob>(op, block, buffer, staging);
}

StatsJob::StatsJob(Op* op)
    : op_(op), grad_(op->InSlot(op->subgroup()->spec.grad)), dtype_(op->subgroup()->spec.grad_dtype) {
  pieces = PieceCount(op->stats.chunks.size(), kChunksPerPiece);
}

void StatsJob::RunPiece(uint32_t piece) {
  const StatWork& work = op_->stats;
  const size_t end = std::min(work.chunks.size(), (piece + 1) * kChunksPerPiece);
  for (size_t i = piece * kChunksPerPiece; i < end; ++i) {
    const StatChunk& chunk = work.chunks[i];
    StatLanes lanes;
    for (size_t r = chunk.first_run; r < chunk.first_run + chunk.run_count; ++r) {
      const StatRun& run = work.runs[r];
      AccumulateStats(grad_ + run.first * ElementBytes(dtype_), dtype_, run.position, run.count, &lanes);
    }
    (*op_->results)[chunk.chunk] = {ReduceLanes(lanes), lanes.all_finite};
  }
}

void StatsJob::Finish(Scheduler& scheduler, int64_t now_ns) { scheduler.StatsDone(op_, now_ns); }

}  // namespace mlpo
