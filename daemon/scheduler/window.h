// Window: from a subgroup's first gradient to its UPDATE or DISCARD: what is covered, and the gradient's statistics.
//
// Sum of squares: each tensor is cut into chunks of MLPO_STAT_CHUNK_ELEMENTS from its start; workers form a chunk's sum
// as soon as all of it is covered; sums of chunks are added in order of tensors and chunks. So the bits do not depend
// on how the gradient came.
// Owner: the data thread. Workers write only the chunk results that a StatWork names, before StatsDone.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "daemon/base/status.h"
#include "daemon/scheduler/coverage.h"
#include "daemon/types/request.h"
#include "daemon/types/subgroup_spec.h"

namespace mlpo {

// A run of VALUE elements in a chunk.
struct StatRun {
  uint64_t first = 0;     // element of the subgroup
  uint32_t position = 0;  // in the chunk
  uint32_t count = 0;
};
// A chunk whose statistics can be formed: its runs are runs[first_run, first_run + run_count) of the StatWork.
struct StatChunk {
  uint64_t chunk = 0;
  size_t first_run = 0;
  size_t run_count = 0;
};
struct StatWork {
  std::vector<StatChunk> chunks;
  std::vector<StatRun> runs;
};

class Window {
 public:
  struct ChunkResult {
    double sum_of_squares = 0;
    bool all_finite = true;
  };
  using Results = std::vector<ChunkResult>;  // by chunk

  // `tensors` is borrowed, and fixed but for its steps.
  Window(uint64_t numel, const std::vector<Tensor>* tensors);

  // Adds a piece inside the subgroup. On success *work has the chunks that it completed.
  Failure AddPiece(uint64_t first, uint64_t count, uint32_t kind, StatWork* work);
  // Where workers put the results of chunks. They keep a reference, so that a window can end while they work: the next
  // one has results of its own.
  const std::shared_ptr<Results>& results() const { return results_; }
  // In the order of chunks, over all of them or over those of one piece.
  ChunkResult Total() const;
  static ChunkResult Sum(const Results& results, const StatWork& work);

  // Success if every element is covered, else which tensor and range is not.
  Failure CheckComplete() const;
  bool complete() const { return coverage_.complete(); }
  // Whether any piece has come.
  bool begun() const { return !coverage_.empty(); }
  const Coverage& coverage() const { return coverage_; }
  void Clear();

 private:
  uint32_t TensorAt(uint64_t element) const;
  Failure CheckWholeTensors(uint64_t first, uint64_t end) const;
  void AddChunks(uint64_t first, uint64_t end, StatWork* work);
  void AddRuns(const Tensor& tensor, uint64_t first, uint64_t end, StatWork* work) const;

  const std::vector<Tensor>* tensors_;
  std::vector<uint64_t> first_chunk_;  // of each tensor
  std::shared_ptr<Results> results_;
  std::vector<uint32_t> covered_;  // elements of each chunk that VALUE and ZERO pieces name
  Coverage coverage_;
};

}  // namespace mlpo
