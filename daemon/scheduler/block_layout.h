// BlockLayout: where the parts of a block and their pieces lie in its buffer and in its extent.
//
// A subgroup's block is the kept gradient, if there is one, then master parameters, first and second moments, each
// padded to MLPO_ALIGN. An object's block is its bytes, padded, as one part. A piece is kPieceBytes of a part: 64 Ki
// parameters of FP32, with the gradient of the same parameters; the last one ends with the padding. Each piece of each
// part has its own checksum, so that a part alone can be written, compared, and read again. Values; no state.
#pragma once

#include <algorithm>
#include <cstdint>

#include "proto/abi.h"

namespace mlpo {

// Parts of a block's buffer or content that are moved together.
inline constexpr uint8_t kPartMaster = 1;
inline constexpr uint8_t kPartMoments = 2;  // both
inline constexpr uint8_t kPartState = kPartMaster | kPartMoments;
inline constexpr uint8_t kPartGradient = 4;  // of the open window, where GRAD copies it (SubgroupSpec::kept_as)

inline constexpr uint64_t kPieceElements = 65536;
inline constexpr uint64_t kPieceBytes = kPieceElements * 4;

// Arrays that have checksums of their own; sets of them are bits (1 << array).
enum BlockArray : uint8_t { kArrayMaster, kArrayExpAvg, kArrayExpAvgSq, kArrayGradient };
inline constexpr int kBlockArrays = 4;
inline constexpr const char* kBlockArrayNames[kBlockArrays] = {"master", "exp_avg", "exp_avg_sq", "gradient"};

inline uint8_t ArraysOf(uint8_t parts) {
  uint8_t arrays = 0;
  if (parts & kPartMaster) arrays |= 1 << kArrayMaster;
  if (parts & kPartMoments) arrays |= 1 << kArrayExpAvg | 1 << kArrayExpAvgSq;
  if (parts & kPartGradient) arrays |= 1 << kArrayGradient;
  return arrays;
}

// Of one piece, by array.
struct PieceChecksums {
  uint64_t array[kBlockArrays] = {};
};

struct ByteSpan {
  uint64_t first = 0;  // bytes of the buffer, and of the extent
  uint64_t bytes = 0;
};

struct BlockLayout {
  uint64_t gradient_bytes = 0;          // padded; 0: no gradient is kept
  uint64_t gradient_element_bytes = 0;  // 2 or 4
  uint64_t part_bytes = 0;              // of master parameters, and of each moment, padded; or of an object's block

  uint32_t pieces() const {
    return static_cast<uint32_t>(std::max<uint64_t>(1, (part_bytes + kPieceBytes - 1) / kPieceBytes));
  }

  // Multiples of MLPO_ALIGN.
  ByteSpan Piece(BlockArray array, uint32_t piece) const {
    const bool gradient = array == kArrayGradient;
    const uint64_t base = gradient ? 0 : gradient_bytes + array * part_bytes;
    const uint64_t all = gradient ? gradient_bytes : part_bytes;
    const uint64_t step = gradient ? kPieceElements * gradient_element_bytes : kPieceBytes;
    const uint64_t first = std::min(all, piece * step);
    const uint64_t end = piece + 1 == pieces() ? all : std::min(all, first + step);
    return {base + first, end - first};
  }
};

}  // namespace mlpo
