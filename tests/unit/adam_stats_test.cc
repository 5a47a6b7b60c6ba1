// Sum of squares and finiteness.
#include <sys/mman.h>

#include <array>
#include <cmath>
#include <limits>

#include "daemon/base/mapped_region.h"
#include "tests/unit/adam_arrays.h"

namespace mlpo::testing {
namespace {

Guarded RandomGradient(mlpo_dtype dtype, size_t n, size_t offset, uint64_t seed) {
  Guarded gradient(n * ElementBytes(dtype), offset);
  Random random(seed);
  for (size_t i = 0; i < n; ++i) {
    reference::StoreElement(gradient.data(), dtype, i, RandomFloat(&random, Values::kTypical, 3));
  }
  return gradient;
}

// The definition, word for word.
StatLanes Defined(const Guarded& gradient, mlpo_dtype dtype, size_t n) {
  StatLanes lanes;
  for (size_t lane = 0; lane < MLPO_STAT_LANES; ++lane) {
    for (size_t i = lane; i < n; i += MLPO_STAT_LANES) {
      const double value = reference::LoadElement(gradient.data(), dtype, i);
      lanes.lane[lane] += value * value;
    }
  }
  return lanes;
}

bool SameLanes(const StatLanes& a, const StatLanes& b) {
  return std::memcmp(a.lane, b.lane, sizeof a.lane) == 0 && a.all_finite == b.all_finite;
}

TEST_CASE("Stats.LanesAddInTheStatedOrderOnEverySet", "[adam]") {
  OnEachTarget([](const std::string&) {
    for (const mlpo_dtype dtype : kTypes) {
      for (const size_t n : {0, 1, 15, 16, 17, 100, 4096, 65535, 65536}) {
        const Guarded gradient = RandomGradient(dtype, n, ElementBytes(dtype), n + 1);
        StatLanes lanes;
        AccumulateStats(gradient.data(), dtype, 0, n, &lanes);
        INFO("dtype " << dtype << " n " << n);
        CHECK(SameLanes(lanes, Defined(gradient, dtype, n)));
      }
    }
  });
}

TEST_CASE("Stats.AnyCutOfAChunkGivesTheSameBits", "[adam]") {
  constexpr size_t kCount = 3001;
  OnEachTarget([](const std::string&) {
    for (const mlpo_dtype dtype : kTypes) {
      const Guarded gradient = RandomGradient(dtype, kCount, 0, 9);
      const StatLanes expected = Defined(gradient, dtype, kCount);
      for (const size_t cut : {1, 2, 7, 15, 16, 17, 33, 1000}) {
        StatLanes lanes;
        for (size_t first = 0; first < kCount; first += cut) {
          AccumulateStats(gradient.data() + first * ElementBytes(dtype), dtype, first, std::min(cut, kCount - first),
                          &lanes);
        }
        INFO("dtype " << dtype << " pieces of " << cut);
        CHECK(SameLanes(lanes, expected));
      }
    }
  });
}

TEST_CASE("Stats.TheSumIsNearTheExactOne", "[adam]") {
  for (const mlpo_dtype dtype : kTypes) {
    const Guarded gradient = RandomGradient(dtype, MLPO_STAT_CHUNK_ELEMENTS, 0, 77);
    StatLanes lanes;
    AccumulateStats(gradient.data(), dtype, 0, MLPO_STAT_CHUNK_ELEMENTS, &lanes);
    long double exact = 0;
    for (size_t i = 0; i < MLPO_STAT_CHUNK_ELEMENTS; ++i) {
      const long double value = reference::LoadElement(gradient.data(), dtype, i);
      exact += value * value;
    }
    CHECK(std::abs(ReduceLanes(lanes) - static_cast<double>(exact)) <= 1e-13 * static_cast<double>(exact));
  }
}

TEST_CASE("Stats.LanesAreReducedAsAFixedTree", "[adam]") {
  StatLanes lanes;
  Random random(4);
  for (double& lane : lanes.lane) lane = random.Uniform(0, 1e9);
  const double* l = lanes.lane;
  const double tree = (((l[0] + l[8]) + (l[4] + l[12])) + ((l[2] + l[10]) + (l[6] + l[14]))) +
                      (((l[1] + l[9]) + (l[5] + l[13])) + ((l[3] + l[11]) + (l[7] + l[15])));
  CHECK(ReduceLanes(lanes) == tree);
}

TEST_CASE("Stats.OneValueThatIsNotFiniteIsFoundAnywhere", "[adam]") {
  constexpr size_t kCount = 77;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  OnEachTarget([](const std::string&) {
    for (const mlpo_dtype dtype : kTypes) {
      for (const float bad : {kInfinity, -kInfinity, std::bit_cast<float>(0xff812345u)}) {
        for (size_t at = 0; at < kCount; ++at) {
          Guarded gradient = RandomGradient(dtype, kCount, 0, at);
          reference::StoreElement(gradient.data(), dtype, at, bad);
          StatLanes lanes;
          AccumulateStats(gradient.data(), dtype, 0, kCount, &lanes);
          if (lanes.all_finite) FAIL("dtype " << dtype << ": " << bad << " at " << at << " is not seen");
          REQUIRE(std::isnan(ReduceLanes(lanes)) == std::isnan(bad));
        }
      }
    }
  });
}

TEST_CASE("Stats.TheLargestValuesAreFinite", "[adam]") {
  OnEachTarget([](const std::string&) {
    const std::vector<float> largest(MLPO_STAT_CHUNK_ELEMENTS, std::numeric_limits<float>::max());
    StatLanes lanes;
    AccumulateStats(largest.data(), MLPO_FLOAT32, 0, largest.size(), &lanes);
    CHECK(lanes.all_finite);
    CHECK(std::isfinite(ReduceLanes(lanes)));
    const std::vector<float> smallest(32, std::numeric_limits<float>::denorm_min());
    StatLanes small;
    AccumulateStats(smallest.data(), MLPO_FLOAT32, 0, smallest.size(), &small);
    CHECK(ReduceLanes(small) == 32 * 0x1p-298);
  });
}

// `bytes` of address space in which the same megabytes come again and again, so that huge arrays need little memory.
class RepeatedMemory {
 public:
  static constexpr size_t kWindow = 16 << 20;
  explicit RepeatedMemory(size_t bytes) : bytes_((bytes + kWindow - 1) / kWindow * kWindow) {
    Result<UniqueFd> fd = CreateSealedMemfd("repeated", kWindow);
    REQUIRE(fd.ok());
    void* base = mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    REQUIRE(base != MAP_FAILED);
    base_ = static_cast<std::byte*>(base);
    for (size_t at = 0; at < bytes_; at += kWindow) {
      REQUIRE(mmap(base_ + at, kWindow, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd->get(), 0) == base_ + at);
    }
  }
  ~RepeatedMemory() { munmap(base_, bytes_); }
  RepeatedMemory(const RepeatedMemory&) = delete;
  RepeatedMemory& operator=(const RepeatedMemory&) = delete;
  std::byte* data() const { return base_; }

 private:
  size_t bytes_;
  std::byte* base_ = nullptr;
};

TEST_CASE("C06_CountsPast32BitsDoNotWrap", "[adam]") {
  if (!LongTests()) {
    WARN("skipped: passes over 8 GiB of addresses; set MLPO_LONG=1 to run it");
    return;
  }
  constexpr size_t kCount = (1ull << 32) + 5;
  constexpr size_t kWindowElements = RepeatedMemory::kWindow / 2;
  const RepeatedMemory memory(2 * kCount);
  for (size_t i = 0; i < kWindowElements; ++i) {
    reinterpret_cast<uint16_t*>(memory.data())[i] = 0x3f80;  // 1 in BF16: sums are exact
  }
  StatLanes lanes;
  AccumulateStats(memory.data(), MLPO_BFLOAT16, 0, kCount, &lanes);
  CHECK(ReduceLanes(lanes) == static_cast<double>(kCount));

  // Rounding 2^31 + 1 floats: the last one lands where it should, and nothing after it.
  constexpr size_t kFloats = (1ull << 31) + 1;
  const RepeatedMemory from(4 * kFloats), to(2 * kFloats + 2);
  for (size_t i = 0; i < RepeatedMemory::kWindow / 4; ++i) {
    reinterpret_cast<float*>(from.data())[i] = static_cast<float>(i % 256);
  }
  RoundTo(MLPO_BFLOAT16, reinterpret_cast<const float*>(from.data()), to.data(), kFloats);
  const auto* rounded = reinterpret_cast<const uint16_t*>(to.data());
  for (const size_t i : {size_t{1}, size_t{255}, kFloats - 2, kFloats - 1}) {
    CHECK(reference::FromBfloat16(rounded[i]) == static_cast<float>(i % 256));
  }
}

}  // namespace
}  // namespace mlpo::testing
