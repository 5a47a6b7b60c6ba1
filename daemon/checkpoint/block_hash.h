// The hash of a stored block, by which a changed bit is noticed: "xxh3-64k" in manifests.
//
// A piece is 65536 elements of one array, the last one of an array with its padding. Its hash is XXH3-64 over its
// bytes; the block's is XXH3-64 over the hashes of its pieces, 8 bytes each, little endian: piece by piece, and of each
// piece the stored arrays, master parameters first. So it is what the daemon's own checksums of a block in use make up,
// and nothing need be read to know it. No state; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace mlpo {

inline constexpr uint64_t kHashPieceElements = 65536;

// Of the pieces' hashes in that order.
uint64_t HashOfPieces(const std::vector<uint64_t>& pieces);
// Of a block as it is stored: `arrays` (1 or 3) of `array_bytes` each, padding included, one after another.
uint64_t BlockHash(const std::byte* stored, uint32_t arrays, uint64_t array_bytes);

}  // namespace mlpo
