// Where extents are in a file, against a bitmap that is searched from its beginning.
#include "daemon/scheduler/placement.h"

#include <algorithm>
#include <random>
#include <vector>

#include "tests/support/catch.h"

using namespace mlpo;

namespace {

// Units of the file, by number.
class Bitmap {
 public:
  uint64_t Take(uint64_t units) {
    const uint64_t at = Find(units);
    if (at + units > used_.size()) used_.resize(at + units);
    std::fill_n(used_.begin() + static_cast<std::ptrdiff_t>(at), units, true);
    return at;
  }
  void Give(uint64_t at, uint64_t units) { std::fill_n(used_.begin() + static_cast<std::ptrdiff_t>(at), units, false); }
  void Wrote(uint64_t at, uint64_t units) { written_ = std::max(written_, at + units); }
  uint64_t Next(uint64_t units) const { return Find(units); }
  bool IsWritten(uint64_t at, uint64_t units) const { return at + units <= written_; }
  uint64_t in_use() const { return static_cast<uint64_t>(std::count(used_.begin(), used_.end(), true)); }

 private:
  uint64_t Find(uint64_t units) const {
    uint64_t run = 0;
    for (uint64_t at = 0; at < used_.size(); ++at) {
      run = used_[at] ? 0 : run + 1;
      if (run == units) return at + 1 - units;
    }
    return used_.size() - run;
  }

  std::vector<bool> used_;
  uint64_t written_ = 0;
};

}  // namespace

TEST_CASE("ExtentMap.IsABitmap") {
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    CAPTURE(seed);
    std::mt19937_64 random(seed);
    ExtentMap map;
    Bitmap bitmap;
    std::vector<std::pair<uint64_t, uint64_t>> taken;
    for (int i = 0; i < 300; ++i) {
      const uint64_t units = 1 + random() % 4;
      const uint64_t next = map.Next(units);
      REQUIRE(next == bitmap.Next(units));
      REQUIRE(map.IsWritten(next, units) == bitmap.IsWritten(next, units));
      if (taken.empty() || random() % 2 == 0) {
        const uint64_t at = map.Take(units);
        REQUIRE(at == bitmap.Take(units));
        taken.emplace_back(at, units);
      } else {
        const size_t which = random() % taken.size();
        const auto [at, size] = taken[which];
        if (random() % 2 == 0) {
          map.Wrote(at, size);
          bitmap.Wrote(at, size);
        }
        map.Give(at, size);
        bitmap.Give(at, size);
        taken.erase(taken.begin() + static_cast<std::ptrdiff_t>(which));
      }
      REQUIRE(map.bytes_in_use() == bitmap.in_use());
    }
  }
}

TEST_CASE("ExtentMap.WhatWasWrittenCanBeWrittenAgain") {
  ExtentMap map;
  const auto next_is_written = [&](uint64_t bytes) { return map.IsWritten(map.Next(bytes), bytes); };
  CHECK_FALSE(next_is_written(1));
  const uint64_t first = map.Take(10), second = map.Take(10);
  map.Wrote(second, 10);
  CHECK_FALSE(next_is_written(10));  // all of it is in use
  map.Give(first, 10);
  CHECK(next_is_written(10));
  CHECK_FALSE(next_is_written(11));
  map.Give(second, 10);
  CHECK(next_is_written(20));  // also beyond the last extent in use
  CHECK_FALSE(next_is_written(21));
  map.Forget();
  CHECK_FALSE(next_is_written(1));
  CHECK(map.Take(5) == 0);
}
