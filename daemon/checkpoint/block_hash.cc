#include "daemon/checkpoint/block_hash.h"

#include <xxhash.h>

#include <algorithm>
#include <bit>

namespace mlpo {

static_assert(std::endian::native == std::endian::little, "hashes are over little endian values");

uint64_t HashOfPieces(const std::vector<uint64_t>& pieces) {
  return XXH3_64bits(pieces.data(), pieces.size() * sizeof(uint64_t));
}

uint64_t BlockHash(const std::byte* stored, uint32_t arrays, uint64_t array_bytes) {
  constexpr uint64_t kPieceBytes = kHashPieceElements * 4;
  std::vector<uint64_t> pieces;
  for (uint64_t at = 0; at < array_bytes; at += kPieceBytes) {
    for (uint32_t array = 0; array < arrays; ++array)
      pieces.push_back(XXH3_64bits(stored + array * array_bytes + at, std::min(kPieceBytes, array_bytes - at)));
  }
  return HashOfPieces(pieces);
}

}  // namespace mlpo
