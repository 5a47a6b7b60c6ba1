#include "daemon/scheduler/coverage.h"

#include <algorithm>
#include <iterator>

namespace mlpo {

Coverage::Pieces::const_iterator Coverage::At(uint64_t element) const {
  auto it = pieces_.upper_bound(element);
  if (it != pieces_.begin() && std::prev(it)->second.end > element) return std::prev(it);
  return it;
}

Coverage::Outcome Coverage::Add(uint64_t first, uint64_t count, uint32_t kind, uint64_t* at) {
  if (count == 0) return Outcome::kAdded;
  const uint64_t end = first + count;
  auto next = At(first);
  if (next != pieces_.end() && next->first < end) {
    *at = std::max(first, next->first);
    return Outcome::kOverlap;
  }
  uint64_t joined_first = first;
  uint64_t joined_end = end;
  if (next != pieces_.end() && next->first == end && next->second.kind == kind) {
    joined_end = next->second.end;
    next = pieces_.erase(next);
  }
  if (next != pieces_.begin()) {
    auto before = std::prev(next);
    if (before->second.end == first && before->second.kind == kind) {
      joined_first = before->first;
      pieces_.erase(before);
    }
  }
  if (pieces_.size() >= kMaxPieces) return Outcome::kTooMany;
  pieces_[joined_first] = {joined_end, kind};
  covered_ += count;
  return Outcome::kAdded;
}

void Coverage::Remove(uint64_t first, uint64_t count) {
  if (count == 0) return;
  const uint64_t end = first + count;
  for (auto it = At(first); it != pieces_.end() && it->first < end;) {
    const uint64_t piece_first = it->first;
    const Piece piece = it->second;
    it = pieces_.erase(it);
    covered_ -= std::min(piece.end, end) - std::max(piece_first, first);
    if (piece_first < first) pieces_[piece_first] = {first, piece.kind};
    if (piece.end > end) pieces_[end] = piece;
  }
}

void Coverage::FirstGap(uint64_t* first, uint64_t* count) const {
  *first = 0;
  auto it = pieces_.begin();
  while (it != pieces_.end() && it->first == *first) {
    *first = it->second.end;
    ++it;
  }
  *count = (it == pieces_.end() ? numel_ : it->first) - *first;
}

void Coverage::Clear() {
  pieces_.clear();
  covered_ = 0;
}

}  // namespace mlpo
