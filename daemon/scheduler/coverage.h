// Coverage: which elements of a subgroup the pieces of a window name, each at most once.
//
// Owner: the data thread. Pieces that touch and are of one kind become one.
#pragma once

#include <cstdint>
#include <map>

#include "proto/command.h"

namespace mlpo {

class Coverage {
 public:
  struct Piece {
    uint64_t end = 0;
    uint32_t kind = 0;  // enum mlpo_piece
  };
  using Pieces = std::map<uint64_t, Piece>;  // by first element

  // A hostile client may send one piece for every other element; more separate pieces than this are refused.
  static constexpr size_t kMaxPieces = 1u << 16;

  explicit Coverage(uint64_t numel = 0) : numel_(numel) {}

  enum class Outcome { kAdded, kOverlap, kTooMany };
  // Adds [first, first + count), which lies inside the subgroup. On kOverlap *at is the first element named twice.
  Outcome Add(uint64_t first, uint64_t count, uint32_t kind, uint64_t* at);
  // Of [first, first + count), whatever is covered is not any more.
  void Remove(uint64_t first, uint64_t count);
  bool complete() const { return covered_ == numel_; }
  // The first run of elements that nothing covers; count 0 if complete.
  void FirstGap(uint64_t* first, uint64_t* count) const;
  const Pieces& pieces() const { return pieces_; }
  bool empty() const { return pieces_.empty(); }
  // The piece that holds `element` or the first one behind it.
  Pieces::const_iterator At(uint64_t element) const;
  void Clear();

 private:
  uint64_t numel_;
  uint64_t covered_ = 0;
  Pieces pieces_;
};

}  // namespace mlpo
