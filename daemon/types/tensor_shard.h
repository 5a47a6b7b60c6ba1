// TensorShard: which elements of a whole tensor a rank holds: a box of it, or a range of its row-major elements.
//
// The rank's own order of elements is row-major within the box, ascending within the range.
#pragma once

#include <compare>
#include <cstdint>
#include <vector>

namespace mlpo {

struct TensorShard {
  std::vector<uint64_t> global_shape;  // of the whole tensor; 1 to MLPO_MAX_DIMS dimensions
  bool flat = false;                   // the range [flat_first, flat_first + count)
  uint64_t flat_first = 0;
  std::vector<uint64_t> shape;  // of the box [offsets, offsets + shape); empty if flat
  std::vector<uint64_t> offsets;
  uint64_t count = 0;  // elements held

  bool operator==(const TensorShard&) const = default;
  auto operator<=>(const TensorShard&) const = default;  // any order: to find equal ones by
};

}  // namespace mlpo
