// BlockLayout: pieces cover a block's buffer, each page once, for every length that could make a difference.
#include "daemon/scheduler/block_layout.h"

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "daemon/scheduler/scheduler.h"
//
#include "tests/support/catch.h"

using namespace mlpo;

namespace {

const std::vector<uint64_t> kLengths = {1,      2,       1023,      1024,      1025,     2047,   2048,
                                        2049,   65535,   65536,     65537,     66560,    131071, 131072,
                                        131073, 200'000, 1'000'003, 1'048'575, 1'048'576};

BlockLayout LayoutFor(uint64_t elements, std::optional<mlpo_dtype> kept_as) {
  SubgroupSpec spec;
  spec.kept_as = kept_as;
  Subgroup subgroup(nullptr, std::move(spec));
  Block block;
  block.owner = &subgroup;
  block.count = elements;
  return Scheduler::LayoutOf(block);
}

}  // namespace

TEST_CASE("BlockLayout.EachPageBelongsToOnePieceOfOneArray") {
  for (const std::optional<mlpo_dtype> kept_as :
       {std::optional<mlpo_dtype>(), std::optional(MLPO_FLOAT32), std::optional(MLPO_BFLOAT16)}) {
    for (const uint64_t elements : kLengths) {
      const BlockLayout layout = LayoutFor(elements, kept_as);
      CAPTURE(elements, layout.gradient_bytes);
      CHECK(layout.pieces() == (elements + 65535) / 65536);
      std::vector<int> owners((layout.gradient_bytes + 3 * layout.part_bytes) / MLPO_ALIGN);
      for (int array = 0; array < kBlockArrays; ++array) {
        for (uint32_t piece = 0; piece < layout.pieces(); ++piece) {
          const ByteSpan span = layout.Piece(static_cast<BlockArray>(array), piece);
          REQUIRE(span.first % MLPO_ALIGN == 0);
          REQUIRE(span.bytes % MLPO_ALIGN == 0);
          REQUIRE(span.first + span.bytes <= owners.size() * MLPO_ALIGN);
          for (uint64_t at = 0; at < span.bytes; at += MLPO_ALIGN) ++owners[(span.first + at) / MLPO_ALIGN];
        }
      }
      CHECK(owners == std::vector<int>(owners.size(), 1));
    }
  }
}

// The first and the last parameter of each piece, by counting bytes from the array's begin.
TEST_CASE("BlockLayout.AParametersBytesAreInThePieceOfItsNumber") {
  for (const mlpo_dtype kept_as : {MLPO_FLOAT32, MLPO_BFLOAT16}) {
    for (const uint64_t elements : kLengths) {
      const BlockLayout layout = LayoutFor(elements, kept_as);
      const uint64_t size = kept_as == MLPO_FLOAT32 ? 4 : 2;
      for (uint32_t piece = 0; piece < layout.pieces(); ++piece) {
        const uint64_t first = uint64_t{65536} * piece, last = std::min(elements, first + 65536) - 1;
        for (const uint64_t element : {first, last}) {
          CAPTURE(elements, piece, element);
          const auto has = [&](BlockArray array, uint64_t at, uint64_t bytes) {
            const ByteSpan span = layout.Piece(array, piece);
            return span.first <= at && at + bytes <= span.first + span.bytes;
          };
          CHECK(has(kArrayGradient, element * size, size));
          for (const int i : {0, 1, 2}) {
            const uint64_t at = layout.gradient_bytes + static_cast<uint64_t>(i) * layout.part_bytes + element * 4;
            CHECK(has(static_cast<BlockArray>(i), at, 4));
          }
        }
      }
    }
  }
}

TEST_CASE("BlockLayout.ObjectsBlockIsOneArray") {
  BlockLayout layout;
  layout.part_bytes = 3 * 262144 + 4096;
  REQUIRE(layout.pieces() == 4);
  CHECK(layout.Piece(kArrayMaster, 2).first == 2 * 262144);
  CHECK(layout.Piece(kArrayMaster, 2).bytes == 262144);
  CHECK(layout.Piece(kArrayMaster, 3).bytes == 4096);
}

TEST_CASE("BlockLayout.ArraysOfParts") {
  CHECK(ArraysOf(0) == 0);
  CHECK(ArraysOf(kPartMaster) == 1);
  CHECK(ArraysOf(kPartMoments) == 6);
  CHECK(ArraysOf(kPartState | kPartGradient) == 15);
}
