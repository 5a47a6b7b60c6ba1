#include "daemon/scheduler/window.h"

#include <algorithm>

#include "daemon/scheduler/failure.h"
#include "proto/abi.h"

namespace mlpo {
namespace {

Failure CoverageFailure(uint32_t tensor, uint64_t first, uint64_t count, std::string text) {
  Failure failure = Fail(MLPO_E_COVERAGE, std::move(text));
  failure.tensor = tensor;
  failure.first = first;
  failure.count = count;
  return failure;
}

}  // namespace

Window::Window(uint64_t numel, const std::vector<Tensor>* tensors) : tensors_(tensors), coverage_(numel) {
  uint64_t chunks = 0;
  for (const Tensor& tensor : *tensors) {
    first_chunk_.push_back(chunks);
    chunks += (tensor.count + MLPO_STAT_CHUNK_ELEMENTS - 1) / MLPO_STAT_CHUNK_ELEMENTS;
  }
  results_ = std::make_shared<Results>(chunks);
  covered_.resize(chunks);
}

uint32_t Window::TensorAt(uint64_t element) const {
  // The last tensor that begins at or before the element; tensors without elements share their begin with the next.
  auto behind = std::upper_bound(tensors_->begin(), tensors_->end(), element,
                                 [](uint64_t at, const Tensor& tensor) { return at < tensor.first; });
  return static_cast<uint32_t>(behind - tensors_->begin()) - 1;
}

Failure Window::CheckWholeTensors(uint64_t first, uint64_t end) const {
  const uint32_t begin_tensor = TensorAt(first);
  const uint32_t end_tensor = TensorAt(end - 1);
  const Tensor& a = (*tensors_)[begin_tensor];
  const Tensor& b = (*tensors_)[end_tensor];
  if (a.first == first && b.first + b.count == end) return {};
  const bool at_begin = a.first != first;
  const Tensor& cut = at_begin ? a : b;
  return CoverageFailure(at_begin ? begin_tensor : end_tensor, first, end - first,
                         "SKIP names a part of tensor '" + cut.name + "'; it takes whole tensors");
}

Failure Window::AddPiece(uint64_t first, uint64_t count, uint32_t kind, StatWork* work) {
  if (count == 0) return {};
  const uint64_t end = first + count;
  if (kind == MLPO_PIECE_SKIP) {
    Failure failure = CheckWholeTensors(first, end);
    if (failure.status != 0) return failure;
  }
  uint64_t at = 0;
  switch (coverage_.Add(first, count, kind, &at)) {
    case Coverage::Outcome::kAdded:
      break;
    case Coverage::Outcome::kOverlap: {
      const uint32_t tensor = TensorAt(at);
      return CoverageFailure(tensor, at, end - at,
                             "element " + std::to_string(at) + " of tensor '" + (*tensors_)[tensor].name +
                                 "' was already named by a piece of this window");
    }
    case Coverage::Outcome::kTooMany:
      return CoverageFailure(
          kNone, first, count,
          "more than " + std::to_string(Coverage::kMaxPieces) + " separate pieces in one window; send larger ones");
  }
  if (kind != MLPO_PIECE_SKIP) AddChunks(first, end, work);
  return {};
}

void Window::AddChunks(uint64_t first, uint64_t end, StatWork* work) {
  for (uint32_t t = TensorAt(first); t < tensors_->size() && (*tensors_)[t].first < end; ++t) {
    const Tensor& tensor = (*tensors_)[t];
    const uint64_t from = std::max(first, tensor.first) - tensor.first;
    const uint64_t to = std::min(end, tensor.first + tensor.count) - tensor.first;
    if (from >= to) continue;
    for (uint64_t chunk = from / MLPO_STAT_CHUNK_ELEMENTS; chunk * MLPO_STAT_CHUNK_ELEMENTS < to; ++chunk) {
      const uint64_t chunk_first = tensor.first + chunk * MLPO_STAT_CHUNK_ELEMENTS;
      const uint64_t chunk_end = std::min(chunk_first + MLPO_STAT_CHUNK_ELEMENTS, tensor.first + tensor.count);
      // Counted rather than looked up: a client may send a chunk in thousands of pieces.
      uint32_t& covered = covered_[first_chunk_[t] + chunk];
      covered += static_cast<uint32_t>(std::min(end, chunk_end) - std::max(first, chunk_first));
      if (covered < chunk_end - chunk_first) continue;
      StatChunk entry{first_chunk_[t] + chunk, work->runs.size(), 0};
      AddRuns(tensor, chunk_first, chunk_end, work);
      entry.run_count = work->runs.size() - entry.first_run;
      work->chunks.push_back(entry);
    }
  }
}

void Window::AddRuns(const Tensor& tensor, uint64_t first, uint64_t end, StatWork* work) const {
  for (auto it = coverage_.At(first); it != coverage_.pieces().end() && it->first < end; ++it) {
    if (it->second.kind != MLPO_PIECE_VALUE) continue;
    const uint64_t from = std::max(first, it->first);
    const uint64_t to = std::min(end, it->second.end);
    work->runs.push_back(StatRun{from, static_cast<uint32_t>((from - tensor.first) % MLPO_STAT_CHUNK_ELEMENTS),
                                 static_cast<uint32_t>(to - from)});
  }
}

Window::ChunkResult Window::Total() const {
  ChunkResult total;
  for (const ChunkResult& result : *results_) {
    total.sum_of_squares += result.sum_of_squares;
    total.all_finite &= result.all_finite;
  }
  return total;
}

Window::ChunkResult Window::Sum(const Results& results, const StatWork& work) {
  ChunkResult total;
  for (const StatChunk& chunk : work.chunks) {
    total.sum_of_squares += results[chunk.chunk].sum_of_squares;
    total.all_finite &= results[chunk.chunk].all_finite;
  }
  return total;
}

Failure Window::CheckComplete() const {
  if (complete()) return {};
  uint64_t first, count;
  coverage_.FirstGap(&first, &count);
  const uint32_t tensor = TensorAt(first);
  return CoverageFailure(tensor, first, count,
                         "no piece of this window names elements " + std::to_string(first) + " to " +
                             std::to_string(first + count - 1) + ", which begin in tensor '" +
                             (*tensors_)[tensor].name + "'");
}

void Window::Clear() {
  coverage_.Clear();
  std::fill(covered_.begin(), covered_.end(), 0);
  if (results_.use_count() > 1) {
    results_ = std::make_shared<Results>(results_->size());
  } else {
    std::fill(results_->begin(), results_->end(), ChunkResult{});
  }
}

}  // namespace mlpo
