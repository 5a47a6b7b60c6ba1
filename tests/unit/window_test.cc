// Coverage and windows: every element exactly once, and statistics that do not depend on how the gradient came.
#include "daemon/scheduler/window.h"
//
#include "proto/abi.h"
#include "tests/support/catch.h"

using namespace mlpo;

namespace {

std::vector<Tensor> MakeTensors(std::vector<uint64_t> counts) {
  std::vector<Tensor> tensors;
  uint64_t first = 0;
  for (uint64_t count : counts) {
    tensors.push_back({"t" + std::to_string(tensors.size()), first, count, 0});
    first += count;
  }
  return tensors;
}
uint64_t Numel(const std::vector<Tensor>& tensors) { return tensors.back().first + tensors.back().count; }

}  // namespace

TEST_CASE("Coverage.FindsGapsAndOverlaps") {
  Coverage coverage(100);
  uint64_t at = 0, first = 0, count = 0;
  CHECK(coverage.Add(10, 20, MLPO_PIECE_VALUE, &at) == Coverage::Outcome::kAdded);
  CHECK(coverage.Add(50, 50, MLPO_PIECE_ZERO, &at) == Coverage::Outcome::kAdded);
  CHECK(coverage.Add(29, 5, MLPO_PIECE_VALUE, &at) == Coverage::Outcome::kOverlap);
  CHECK(at == 29);
  CHECK(coverage.Add(0, 11, MLPO_PIECE_VALUE, &at) == Coverage::Outcome::kOverlap);
  CHECK(at == 10);
  coverage.FirstGap(&first, &count);
  CHECK((first == 0 && count == 10));
  CHECK(coverage.Add(0, 10, MLPO_PIECE_VALUE, &at) == Coverage::Outcome::kAdded);
  coverage.FirstGap(&first, &count);
  CHECK((first == 30 && count == 20));
  CHECK(coverage.Add(30, 20, MLPO_PIECE_VALUE, &at) == Coverage::Outcome::kAdded);
  CHECK(coverage.complete());
  CHECK(coverage.pieces().size() == 2);  // those of one kind have grown together
}

// Against a set of elements.
TEST_CASE("Coverage.RemovesWhatItHasOfARange") {
  constexpr uint64_t kNumel = 24;
  for (uint64_t first = 0; first <= kNumel; ++first) {
    for (uint64_t count = 0; first + count <= kNumel; ++count) {
      Coverage coverage(kNumel);
      std::vector<uint32_t> kinds(kNumel);
      uint64_t at = 0;
      const auto add = [&](uint64_t from, uint64_t end, uint32_t kind) {
        REQUIRE(coverage.Add(from, end - from, kind, &at) == Coverage::Outcome::kAdded);
        std::fill(kinds.begin() + static_cast<ptrdiff_t>(from), kinds.begin() + static_cast<ptrdiff_t>(end), kind);
      };
      add(2, 8, MLPO_PIECE_VALUE);
      add(8, 11, MLPO_PIECE_ZERO);
      add(14, 15, MLPO_PIECE_VALUE);
      add(18, 24, MLPO_PIECE_VALUE);
      coverage.Remove(first, count);
      std::fill(kinds.begin() + static_cast<ptrdiff_t>(first), kinds.begin() + static_cast<ptrdiff_t>(first + count),
                0);
      std::vector<uint32_t> covered(kNumel);
      for (const auto& [from, piece] : coverage.pieces()) {
        for (uint64_t i = from; i < piece.end; ++i) covered[i] = piece.kind;
      }
      CAPTURE(first, count);
      CHECK(covered == kinds);
      for (uint64_t i = 0; i < kNumel; ++i) {
        if (kinds[i] == 0) REQUIRE(coverage.Add(i, 1, MLPO_PIECE_VALUE, &at) == Coverage::Outcome::kAdded);
      }
      CHECK(coverage.complete());
    }
  }
}

TEST_CASE("Coverage.RefusesMorePiecesThanItKeeps") {
  Coverage coverage(4 * Coverage::kMaxPieces);
  uint64_t at = 0;
  Coverage::Outcome outcome = Coverage::Outcome::kAdded;
  uint64_t added = 0;
  for (; outcome == Coverage::Outcome::kAdded; ++added) outcome = coverage.Add(2 * added, 1, MLPO_PIECE_VALUE, &at);
  CHECK(outcome == Coverage::Outcome::kTooMany);
  CHECK(added == Coverage::kMaxPieces + 1);
}

TEST_CASE("C03_PiecesThatDoNotCoverExactlyOnceAreRefused") {
  constexpr uint64_t kMi = 1 << 20;
  const std::vector<Tensor> tensors = MakeTensors({1, 4095, 4096, kMi - 1, kMi + 1});
  Window window(Numel(tensors), &tensors);
  StatWork work;
  for (const Tensor& tensor : tensors) {
    if (&tensor == &tensors[3]) continue;  // one piece left out
    CHECK(window.AddPiece(tensor.first, tensor.count, MLPO_PIECE_VALUE, &work).status == 0);
  }
  const Failure gap = window.CheckComplete();
  CHECK(gap.status == MLPO_E_COVERAGE);
  CHECK(gap.tensor == 3);
  CHECK(gap.first == tensors[3].first);
  CHECK(gap.count == tensors[3].count);
  CHECK(gap.text.find("'t3'") != std::string::npos);
  const Failure twice = window.AddPiece(tensors[4].first, 1, MLPO_PIECE_VALUE, &work);
  CHECK(twice.status == MLPO_E_COVERAGE);
  CHECK(twice.tensor == 4);
  CHECK(window.AddPiece(tensors[3].first, tensors[3].count, MLPO_PIECE_VALUE, &work).status == 0);
  CHECK(window.CheckComplete().status == 0);
}

TEST_CASE("Window.SkipTakesWholeTensors") {
  const std::vector<Tensor> tensors = MakeTensors({10, 20, 0, 30});
  Window window(60, &tensors);
  StatWork work;
  CHECK(window.AddPiece(10, 19, MLPO_PIECE_SKIP, &work).status == MLPO_E_COVERAGE);
  CHECK(window.AddPiece(5, 25, MLPO_PIECE_SKIP, &work).status == MLPO_E_COVERAGE);
  CHECK_FALSE(window.begun());
  CHECK(window.AddPiece(10, 50, MLPO_PIECE_SKIP, &work).status == 0);
  CHECK(window.AddPiece(0, 10, MLPO_PIECE_VALUE, &work).status == 0);
  CHECK(window.complete());
  CHECK(work.chunks.size() == 1);  // what is skipped has no statistics
}

TEST_CASE("Window.EachChunkIsMeasuredOnceWhenAllOfItIsCovered") {
  const uint64_t chunk = MLPO_STAT_CHUNK_ELEMENTS;
  const std::vector<Tensor> tensors = MakeTensors({3 * chunk + 5, chunk - 1, 1});
  const uint64_t numel = Numel(tensors);
  // Whole, and cut in many ways: every chunk appears exactly once, with runs that cover its VALUE elements in order.
  for (uint64_t cut : {numel, uint64_t{1000}, chunk, chunk - 1, chunk + 1, uint64_t{77'777}}) {
    Window window(numel, &tensors);
    std::vector<int> seen(6, 0);
    uint64_t measured = 0;
    for (uint64_t first = 0; first < numel; first += cut) {
      StatWork work;
      REQUIRE(window.AddPiece(first, std::min(cut, numel - first), MLPO_PIECE_VALUE, &work).status == 0);
      for (const StatChunk& entry : work.chunks) {
        ++seen[entry.chunk];
        uint64_t next = 0;
        for (size_t r = entry.first_run; r < entry.first_run + entry.run_count; ++r) {
          CHECK(work.runs[r].position == next);
          next += work.runs[r].count;
        }
        measured += next;
      }
    }
    CHECK(seen == std::vector<int>{1, 1, 1, 1, 1, 1});
    CHECK(measured == numel);
  }
}

TEST_CASE("Window.ManySmallPiecesCostNoMoreThanTheirNumber") {
  // Every other element first, so that nothing grows together, then the ones between: a client may do so.
  const uint64_t numel = MLPO_STAT_CHUNK_ELEMENTS;
  const std::vector<Tensor> tensors = MakeTensors({numel});
  Window window(numel, &tensors);
  StatWork work;
  for (uint64_t i = 0; i < numel; i += 2) window.AddPiece(i, 1, MLPO_PIECE_VALUE, &work);
  CHECK(work.chunks.empty());
  for (uint64_t i = 1; i < numel; i += 2) window.AddPiece(i, 1, MLPO_PIECE_VALUE, &work);
  CHECK(work.chunks.size() == 1);
  CHECK(window.complete());
}

TEST_CASE("Window.AWindowThatEndsLeavesRunningWorkItsOwnResults") {
  const std::vector<Tensor> tensors = MakeTensors({100});
  Window window(100, &tensors);
  StatWork work;
  CHECK(window.AddPiece(0, 100, MLPO_PIECE_VALUE, &work).status == 0);
  const auto old = window.results();  // as a GRAD that runs holds it
  window.Clear();
  CHECK(window.results() != old);
  (*old)[0] = {42, false};
  CHECK(window.Total().all_finite);
  CHECK(window.Total().sum_of_squares == 0);
}
