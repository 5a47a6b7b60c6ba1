// What shards have in common, and whether they make up a tensor, against counting every coordinate.
#include <algorithm>
#include <cerrno>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "daemon/base/plain_text.h"
#include "daemon/checkpoint/shard_runs.h"
#include "tests/support/catch.h"

namespace mlpo::test {
namespace {

using Sizes = std::vector<uint64_t>;

TensorShard BoxShard(Sizes global, Sizes offsets, Sizes shape) {
  TensorShard shard;
  shard.global_shape = std::move(global);
  shard.offsets = std::move(offsets);
  shard.shape = std::move(shape);
  shard.count = 1;
  for (const uint64_t size : shard.shape) shard.count *= size;
  return shard;
}

TensorShard FlatShard(Sizes global, uint64_t first, uint64_t count) {
  TensorShard shard;
  shard.global_shape = std::move(global);
  shard.flat = true;
  shard.flat_first = first;
  shard.count = count;
  return shard;
}

uint64_t Product(const Sizes& sizes) {
  uint64_t product = 1;
  for (const uint64_t size : sizes) product *= size;
  return product;
}

// The row-major number in the whole tensor of each of a shard's elements, in the shard's order: by walking through all
// elements of the whole and asking for each whether it is inside.
Sizes Elements(const TensorShard& shard) {
  Sizes elements;
  for (uint64_t number = 0; number < Product(shard.global_shape); ++number) {
    bool inside = shard.flat && number >= shard.flat_first && number < shard.flat_first + shard.count;
    if (!shard.flat) {
      inside = true;
      uint64_t rest = number;
      for (size_t d = shard.global_shape.size(); d-- > 0;) {
        const uint64_t at = rest % shard.global_shape[d];
        rest /= shard.global_shape[d];
        inside = inside && at >= shard.offsets[d] && at < shard.offsets[d] + shard.shape[d];
      }
    }
    if (inside) elements.push_back(number);
  }
  return elements;
}

class RandomShards {
 public:
  explicit RandomShards(uint64_t seed) : random_(seed) {}
  uint64_t Below(uint64_t limit) { return std::uniform_int_distribution<uint64_t>(0, limit - 1)(random_); }
  Sizes Shape() {
    Sizes shape(1 + Below(4));
    for (uint64_t& size : shape) size = 1 + Below(5);
    return shape;
  }
  TensorShard Of(const Sizes& global) {
    if (Below(2) == 0) {
      const uint64_t all = Product(global), first = Below(all + 1);
      return FlatShard(global, first, Below(all - first + 1));
    }
    Sizes offsets, shape;
    for (const uint64_t size : global) {
      offsets.push_back(Below(size + 1));
      shape.push_back(Below(size - offsets.back() + 1));
    }
    return BoxShard(global, offsets, shape);
  }

 private:
  std::mt19937_64 random_;
};

}  // namespace

TEST_CASE("ShardRuns.AreWhatCountingCoordinatesSays") {
  RandomShards random(1);
  for (int trial = 0; trial < 4000; ++trial) {
    const Sizes global = random.Shape();
    const TensorShard to = random.Of(global), from = random.Of(global);
    INFO(ShardText(to) << " from " << ShardText(from) << ", trial " << trial);
    REQUIRE(CheckShard(to, "to").ok());
    const Sizes to_elements = Elements(to), from_elements = Elements(from);
    REQUIRE(to_elements.size() == to.count);
    const uint64_t first = random.Below(to.count + 1), end = first + random.Below(to.count - first + 1);
    std::map<uint64_t, uint64_t> expected;  // place in `to` -> place in `from`
    for (uint64_t i = first; i < end; ++i) {
      const auto found = std::find(from_elements.begin(), from_elements.end(), to_elements[i]);
      if (found != from_elements.end()) expected[i] = static_cast<uint64_t>(found - from_elements.begin());
    }
    std::map<uint64_t, uint64_t> seen;
    uint64_t last_to = 0, last_from = 0;
    ForEachRun(to, first, end, from, [&](const Run& run) {
      REQUIRE(run.count > 0);
      if (!seen.empty()) {
        REQUIRE(run.to > last_to);
        REQUIRE(run.from > last_from);
      }
      for (uint64_t i = 0; i < run.count; ++i) REQUIRE(seen.emplace(run.to + i, run.from + i).second);
      last_to = run.to + run.count - 1;
      last_from = run.from + run.count - 1;
    });
    REQUIRE(seen == expected);
    uint64_t common = 0;
    for (const uint64_t element : to_elements)
      common += std::count(from_elements.begin(), from_elements.end(), element);
    REQUIRE(CommonElements(to, from) == common);
  }
}

TEST_CASE("ShardRuns.MessagesHaveAnyShapeAndNamesOfAnyBytes") {
  CHECK(ShapeText({}) == "[]");
  CHECK(ShapeText({6}) == "[6]");
  CHECK(ShapeText({6, 0, 8}) == "[6, 0, 8]");
  CHECK(PlainText("layer.0 ~") == "layer.0 ~");
  CHECK(PlainText(std::string("a\0\n\x7f\xc3\xa4", 6)) == "a?????");
}

TEST_CASE("ShardRuns.AreAsLongAsTheyCanBe") {
  const auto runs = [](const TensorShard& to, const TensorShard& from) {
    std::vector<Run> all;
    ForEachRun(to, 0, to.count, from, [&](const Run& run) { all.push_back(run); });
    return all;
  };
  const Sizes global{1000, 64, 32};
  // Rows: one run each, whatever the number of dimensions.
  CHECK(runs(BoxShard(global, {0, 0, 0}, global), BoxShard(global, {250, 0, 0}, {250, 64, 32})) ==
        std::vector<Run>{{250 * 2048, 0, 250 * 2048}});
  // The same columns on both sides follow each other there, though not in the whole.
  const TensorShard columns = BoxShard(global, {0, 16, 0}, {1000, 16, 32});
  CHECK(runs(columns, columns) == std::vector<Run>{{0, 0, columns.count}});
  CHECK(runs(columns, BoxShard(global, {500, 16, 0}, {500, 16, 32})) == std::vector<Run>{{500 * 512, 0, 500 * 512}});
  CHECK(runs(FlatShard(global, 7, 1'000'000), FlatShard(global, 500'000, 2'000)) ==
        std::vector<Run>{{499'993, 0, 2'000}});
}

TEST_CASE("C06_PlacesBeyondFourGigaElements") {
  const uint64_t rows = (uint64_t{1} << 32) + 5;
  const Sizes global{rows, 8};
  std::vector<Run> all;
  ForEachRun(BoxShard(global, {0, 0}, global), 8 * (rows - 2), 8 * rows, BoxShard(global, {rows - 1, 0}, {1, 8}),
             [&](const Run& run) { all.push_back(run); });
  CHECK(all == std::vector<Run>{{8 * (rows - 1), 0, 8}});
}

TEST_CASE("CheckTiling.IsWhatCountingElementsSays") {
  RandomShards random(2);
  int tiled = 0, refused = 0;
  for (int trial = 0; trial < 3000; ++trial) {
    const Sizes global = random.Shape();
    const uint64_t all = Product(global);
    std::vector<TensorShard> shards;
    if (trial % 2 == 0) {  // ranges that follow each other: most tile
      for (uint64_t at = 0; at < all;) {
        const uint64_t count = std::min(all - at, 1 + random.Below(all));
        shards.push_back(FlatShard(global, at, count));
        at += count;
      }
      if (random.Below(4) == 0) shards.erase(shards.begin() + static_cast<int64_t>(random.Below(shards.size())));
      if (random.Below(4) == 0 || shards.empty()) shards.push_back(random.Of(global));
      if (random.Below(4) == 0) shards.push_back(shards.front());  // a copy
    } else {
      for (uint64_t i = 0; i < 1 + random.Below(4); ++i) shards.push_back(random.Of(global));
    }
    std::vector<const TensorShard*> given;
    std::vector<TensorShard> distinct;
    for (const TensorShard& shard : shards) {
      given.push_back(&shard);
      if (std::find(distinct.begin(), distinct.end(), shard) == distinct.end()) distinct.push_back(shard);
    }
    std::map<uint64_t, int> times;
    for (const TensorShard& shard : distinct)
      for (const uint64_t element : Elements(shard)) ++times[element];
    const bool right = times.size() == all &&
                       std::all_of(times.begin(), times.end(), [](const auto& entry) { return entry.second == 1; });
    const Status status = CheckTiling(given, "tensor");
    INFO("trial " << trial << ": " << status.message());
    REQUIRE(status.ok() == right);
    if (!right) REQUIRE(status.message().find("tensor") != std::string::npos);
    ++(right ? tiled : refused);
  }
  CHECK(tiled > 300);
  CHECK(refused > 300);
}

TEST_CASE("CheckShard.RefusesWhatIsNone") {
  const uint64_t huge = uint64_t{1} << 40;
  CHECK(CheckShard(BoxShard({4, 6}, {0, 0}, {4, 6}), "t").ok());
  CHECK(CheckShard(BoxShard({4, 0}, {0, 0}, {4, 0}), "t").ok());
  CHECK(CheckShard(FlatShard({4, 6}, 24, 0), "t").ok());
  CHECK(CheckShard(FlatShard({4, 6}, 24, 1), "t").code() == -EINVAL);
  CHECK(CheckShard(FlatShard({4, 6}, UINT64_MAX, 2), "t").code() == -EINVAL);
  CHECK(CheckShard(BoxShard({4, 6}, {2, 0}, {3, 6}), "t").code() == -EINVAL);
  CHECK(CheckShard(BoxShard({4, 6}, {UINT64_MAX, 0}, {2, 6}), "t").code() == -EINVAL);
  CHECK(CheckShard(BoxShard({}, {}, {}), "t").code() == -EINVAL);
  CHECK(CheckShard(BoxShard(Sizes(9, 1), Sizes(9, 0), Sizes(9, 1)), "t").code() == -EINVAL);
  CHECK(CheckShard(BoxShard({huge, huge}, {0, 0}, {1, 1}), "t").code() == -EINVAL);
  CHECK(CheckShard(BoxShard({0, huge, huge}, {0, 0, 0}, {0, 1, 1}), "t").code() == -EINVAL);
  TensorShard wrong = BoxShard({4, 6}, {0, 0}, {4, 6});
  wrong.count = 23;
  CHECK(CheckShard(wrong, "t").code() == -EINVAL);
  wrong = BoxShard({4, 6}, {0}, {4});
  CHECK(CheckShard(wrong, "t").code() == -EINVAL);
  wrong = FlatShard({4, 6}, 0, 4);
  wrong.shape = {4};
  CHECK(CheckShard(wrong, "t").code() == -EINVAL);
}

}  // namespace mlpo::test
