// The scheduler's work as jobs of the worker pool: UPDATE, READ_STATE and WRITE_STATE on one block, pieces of FETCH and
// FLUSH on one, copies and statistics of a GRAD, checksums of a block that is to be written.
//
// Work on what was read compares each piece with its checksums first, and leaves it alone if it is wrong; work that is
// told to forms them anew behind each piece. A job that is made while block.wrong is there does those pieces only.
//
// A job copies what it needs when it is made; memory it points to (buffer, slot, staging area, the Op's segments) is
// kept by the scheduler's rules until Finish. Made and finished by the data thread, run by workers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "daemon/adam/kernel.h"
#include "daemon/adam/worker_pool.h"
#include "daemon/scheduler/block.h"
#include "daemon/scheduler/scheduler.h"

namespace mlpo {

class SchedulerJob : public Job {
 public:
  virtual void Finish(Scheduler& scheduler, int64_t now_ns) = 0;
  TraceRecord label;  // with `spans`: what they are of
};

// What the jobs on a block have in common: its pieces in its buffer, and their checksums.
class CheckedJob : public SchedulerJob {
 public:
  // `check`, `form`: parts whose checksums are compared before, or formed behind, the work on each piece.
  CheckedJob(Block& block, std::byte* buffer, uint8_t check, uint8_t form);
  void Finish(Scheduler& scheduler, int64_t now_ns) override;

 protected:
  // Whether the work on a piece is to be done: it is not done yet, and it is what was written.
  bool Begin(uint32_t piece) { return IsToDo(piece) && IsRight(piece, check_); }
  bool IsToDo(uint32_t piece) const { return only_.empty() || only_[piece] != 0; }
  // Of those to compare, these arrays.
  bool IsRight(uint32_t piece, uint8_t arrays);
  // The work on it is done.
  void End(uint32_t piece);
  // By piece, what IsRight found; empty: all was right.
  std::vector<uint8_t> TakeWrong();

  Block& block_;  // for Finish; workers do not look at it
  std::byte* const buffer_;
  const BlockLayout layout_;

 private:
  uint64_t ChecksumOf(int array, uint32_t piece) const;

  const uint8_t check_;  // arrays
  const uint8_t form_;
  PieceChecksums* const checksums_;  // by piece
  const std::vector<uint8_t> only_;  // by piece: 0: done already; empty: none is
  std::vector<uint8_t> wrong_;       // by piece: arrays; written by who has the piece
};

// Only the checksums, of a block that is to be written.
class ChecksumJob : public CheckedJob {
 public:
  using CheckedJob::CheckedJob;
  void RunPiece(uint32_t piece) override {
    if (Begin(piece)) End(piece);
  }
  void Finish(Scheduler& scheduler, int64_t now_ns) override { scheduler.ChecksumsFormed(block_, now_ns, TakeWrong()); }
};

// What the jobs on a subgroup's block have in common: the block in its buffer.
class BlockJob : public CheckedJob {
 public:
  BlockJob(Block& block, std::byte* buffer, uint8_t check, uint8_t form);

 protected:
  // Elements of the block that a piece has: [begin, end).
  uint64_t PieceBegin(uint32_t piece) const { return piece * kPieceElements; }
  uint64_t PieceEnd(uint32_t piece) const;
  std::byte* GradientAt(uint64_t at) const { return gradient_ + at * ElementBytes(kept_as_); }
  // Zeroes what the buffer does not hold yet; the padding behind each part, too, with the last piece.
  void FillPiece(uint32_t piece);
  void ZeroPadding();  // of the state; with the last piece

  const uint8_t filled_;
  const uint64_t first_;  // element of the subgroup
  const uint64_t count_;
  float* parts_[3];            // master, first and second moments
  std::byte* const gradient_;  // where GRAD copies it, if layout_ has it
  const mlpo_dtype kept_as_;
};

// GRAD's copy of a block whose elements are all covered.
class GradientJob : public BlockJob {
 public:
  GradientJob(const Op& op, Block& block, std::byte* buffer);
  void RunPiece(uint32_t piece) override;

 private:
  void ZeroTo(uint64_t begin_bytes, uint64_t end_bytes);

  const std::vector<Segment>& segments_;
  const mlpo_dtype grad_dtype_;
  const std::byte* const grad_;
};

class UpdateJob : public BlockJob {
 public:
  UpdateJob(const Op& op, Block& block, std::byte* buffer);
  void RunPiece(uint32_t piece) override;

 private:
  const std::vector<Segment>& segments_;
  const mlpo_hyper hyper_;
  const mlpo_dtype grad_dtype_;
  const mlpo_dtype dtype_;
  const std::byte* const grad_;
  std::byte* const param_;
};

class StateJob : public BlockJob {
 public:
  StateJob(const Op& op, Block& block, std::byte* buffer, std::byte* staging);
  void RunPiece(uint32_t piece) override;

 private:
  const mlpo_submission submission_;
  std::byte* const staging_;
};

class ObjectJob : public CheckedJob {
 public:
  ObjectJob(const Op& op, Block& block, std::byte* buffer, std::byte* staging);
  void RunPiece(uint32_t piece) override;

 private:
  const bool writes_;
  const bool empty_;      // the buffer holds nothing of the block yet
  const uint64_t bytes_;  // of the block, padded
  const uint64_t begin_;  // what is copied: bytes of the block
  const uint64_t end_;
  std::byte* const staged_;  // of byte begin_
};

// What an operation does to a block in its buffer. `staging`: the session's; GRAD and UPDATE need none.
std::unique_ptr<SchedulerJob> MakeBlockJob(const Op& op, Block& block, std::byte* buffer, std::byte* staging);

class StatsJob : public SchedulerJob {
 public:
  explicit StatsJob(Op* op);
  void RunPiece(uint32_t piece) override;
  void Finish(Scheduler& scheduler, int64_t now_ns) override;

 private:
  static constexpr size_t kChunksPerPiece = 4;

  Op* const op_;
  const std::byte* const grad_;
  const mlpo_dtype dtype_;
};

}  // namespace mlpo
