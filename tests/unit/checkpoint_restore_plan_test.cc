// Restoring with other ranks, packing and block sizes: every element is where it was, against tensors kept whole.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "daemon/checkpoint/restore_plan.h"
#include "tests/support/catch.h"

namespace mlpo::test {
namespace {

using Sizes = std::vector<uint64_t>;

// One tensor of the model. Element i of array a has the value Value(tensor, a, i), which no other has.
struct Whole {
  std::string name;
  Sizes shape;
  int64_t step = 0;
  uint64_t numel() const {
    uint64_t product = 1;
    for (const uint64_t size : shape) product *= size;
    return product;
  }
};
double Value(size_t tensor, uint32_t array, uint64_t element) {
  return static_cast<double>(tensor) * 1e9 + array * 1e8 + static_cast<double>(element) + 1;
}

// Of a session with one subgroup.
Result<RestorePlan> MakePlan(RestorePlan::Parts parts, uint32_t rank, uint32_t world_size,
                             std::vector<TargetTensor> tensors) {
  RestorePlan::Subgroups subgroups;
  subgroups.push_back(std::move(tensors));
  Result<std::vector<RestorePlan>> plans = RestorePlan::Make(std::move(parts), rank, world_size, std::move(subgroups));
  if (!plans.ok()) return plans.status();
  return std::move(plans->front());
}

enum class Cut { kRows, kColumns, kFlat };

// The part of `whole` that a rank holds, nearly equal; may be nothing.
TensorShard ShardOf(const Whole& whole, Cut cut, uint32_t rank, uint32_t world_size) {
  TensorShard shard;
  shard.global_shape = whole.shape;
  const auto bound = [&](uint64_t all, uint32_t r) { return all * r / world_size; };
  if (cut == Cut::kFlat) {
    shard.flat = true;
    shard.flat_first = bound(whole.numel(), rank);
    shard.count = bound(whole.numel(), rank + 1) - shard.flat_first;
    return shard;
  }
  const size_t d = cut == Cut::kRows ? 0 : whole.shape.size() - 1;
  shard.offsets = Sizes(whole.shape.size(), 0);
  shard.shape = whole.shape;
  shard.offsets[d] = bound(whole.shape[d], rank);
  shard.shape[d] = bound(whole.shape[d], rank + 1) - shard.offsets[d];
  shard.count = 1;
  for (const uint64_t size : shard.shape) shard.count *= size;
  return shard;
}

// Row-major number in the whole of a shard's i-th element.
uint64_t NumberOf(const TensorShard& shard, uint64_t i) {
  if (shard.flat) return shard.flat_first + i;
  uint64_t number = 0, stride = 1;
  for (size_t d = shard.shape.size(); d-- > 0;) {
    number += (shard.offsets[d] + i % shard.shape[d]) * stride;
    i /= shard.shape[d];
    stride *= shard.global_shape[d];
  }
  return number;
}

// The parts of one save, and what their files hold: value by (part, file, byte offset).
struct Saved {
  RestorePlan::Parts parts;
  std::map<std::tuple<uint32_t, uint32_t, uint64_t>, double> values;
};

// Packs each rank's shards `tensors_a_pack` to a subgroup, cut into blocks of `block` elements.
Saved Save(const std::vector<Whole>& model, Cut cut, uint32_t world_size, size_t tensors_a_pack, uint64_t block,
           bool contents = true) {
  Saved saved;
  for (uint32_t rank = 0; rank < world_size; ++rank) {
    auto part = std::make_shared<Manifest>();
    part->head.job = "job";
    part->head.tag = "tag";
    part->head.world_size = world_size;
    part->head.rank = rank;
    part->head.attempt.bytes[0] = 1;
    part->files.resize(2);
    part->files[1].index = 1;
    uint64_t offset[2] = {4096, 8192};
    for (size_t t = 0; t < model.size(); t += tensors_a_pack) {
      PartSubgroup subgroup;
      subgroup.key = "pack-" + std::to_string(t);
      std::vector<std::pair<size_t, uint64_t>> elements;  // (tensor, number in it)
      for (size_t i = t; i < std::min(model.size(), t + tensors_a_pack); ++i) {
        const TensorShard shard = ShardOf(model[i], cut, rank, world_size);
        subgroup.tensors.push_back({model[i].name, shard, model[i].step});
        subgroup.numel += shard.count;
        for (uint64_t e = 0; contents && e < shard.count; ++e) elements.emplace_back(i, NumberOf(shard, e));
      }
      for (uint64_t first = 0; first < subgroup.numel; first += block) {
        PartBlock b;
        b.first = first;
        b.count = std::min(block, subgroup.numel - first);
        b.file = static_cast<uint32_t>(first / block % 2);
        b.stored = kStoredAll;
        b.offset = offset[b.file];
        offset[b.file] += StoredBytes(b);
        for (uint32_t array = 0; contents && array < 3; ++array) {
          for (uint64_t e = 0; e < b.count; ++e) {
            const auto& [tensor, number] = elements[first + e];
            const uint64_t at = b.offset + array * ((b.count * 4 + 4095) / 4096 * 4096) + 4 * e;
            saved.values[{rank, b.file, at}] = Value(tensor, array, number);
          }
        }
        subgroup.blocks.push_back(b);
      }
      part->subgroups.push_back(std::move(subgroup));
    }
    part->files[0].bytes = offset[0];
    part->files[1].bytes = offset[1];
    saved.parts.push_back(std::move(part));
  }
  return saved;
}

// Restores into ranks cut in their own way, and compares every element.
void CheckRestore(const Saved& saved, const std::vector<Whole>& model, Cut cut, uint32_t world_size, uint64_t block) {
  for (uint32_t rank = 0; rank < world_size; ++rank) {
    std::vector<TargetTensor> tensors;
    uint64_t numel = 0;
    std::vector<std::pair<size_t, uint64_t>> elements;
    for (size_t i = model.size(); i-- > 0;) {  // another order than that of the save
      TargetTensor tensor{model[i].name, ShardOf(model[i], cut, rank, world_size), numel};
      numel += tensor.shard.count;
      for (uint64_t e = 0; e < tensor.shard.count; ++e) elements.emplace_back(i, NumberOf(tensor.shard, e));
      tensors.push_back(std::move(tensor));
    }
    const Result<RestorePlan> plan = MakePlan(saved.parts, rank, world_size, tensors);
    INFO(plan.status().message());
    REQUIRE(plan.ok());
    for (size_t i = 0; i < tensors.size(); ++i) {
      const auto whole = std::find_if(model.begin(), model.end(),
                                      [&](const Whole& w) { return w.name == plan.value().tensors()[i].name; });
      CHECK(plan.value().step(i) == whole->step);
    }
    for (uint32_t array = 0; array < 3; ++array) {
      std::vector<double> filled(numel, 0);
      for (uint64_t first = 0; first < numel; first += block) {
        const uint64_t end = std::min(numel, first + block);
        plan.value().ForEachRun(first, end, [&](const SourceRun& run) {
          const PartBlock& from = plan.value().block(run);
          REQUIRE((run.to >= first && run.to + run.count <= end && run.from + run.count <= from.count));
          const uint64_t at = RestorePlan::SourceOffset(from, array, run.from);
          for (uint64_t e = 0; e < run.count; ++e) {
            REQUIRE(filled[run.to + e] == 0);
            filled[run.to + e] = saved.values.at({run.part, from.file, at + 4 * e});
          }
        });
      }
      size_t wrong = 0;
      for (uint64_t e = 0; e < numel; ++e) wrong += filled[e] != Value(elements[e].first, array, elements[e].second);
      REQUIRE(wrong == 0);
    }
  }
}

const std::vector<Whole> kModel = {
    {"embedding", {37, 11}, 5}, {"weight", {24, 7, 3}, 5}, {"bias", {13}, 4}, {"scalar", {1}, 5}, {"none", {0, 4}, 0}};

}  // namespace

TEST_CASE("C21_AnotherNumberOfRanks") {
  const std::vector<std::pair<uint32_t, uint32_t>> changes = {{4, 1}, {1, 4}, {4, 3}, {8, 5}, {3, 3}, {1, 1}};
  for (const auto& [from, to] : changes) {
    for (const Cut saved_cut : {Cut::kRows, Cut::kColumns, Cut::kFlat}) {
      const Saved saved = Save(kModel, saved_cut, from, 2, 17);
      for (const Cut cut : {Cut::kRows, Cut::kColumns, Cut::kFlat}) CheckRestore(saved, kModel, cut, to, 29);
    }
  }
}

TEST_CASE("C21_AMillionAndThreeElementsFourToThree") {
  const std::vector<Whole> model = {{"w", {1'000'003}, 10}};
  const Saved saved = Save(model, Cut::kFlat, 4, 1, 65'536, /*contents=*/false);
  for (uint32_t rank = 0; rank < 3; ++rank) {
    const TargetTensor tensor{"w", ShardOf(model[0], Cut::kFlat, rank, 3), 0};
    const Result<RestorePlan> plan = MakePlan(saved.parts, rank, 3, {tensor});
    REQUIRE(plan.ok());
    uint64_t at = 0;
    plan.value().ForEachRun(0, tensor.shard.count, [&](const SourceRun& run) {
      REQUIRE(run.to == at);
      at += run.count;
      const PartBlock& block = plan.value().block(run);
      REQUIRE(run.from + run.count <= block.count);
      REQUIRE(1'000'003 * uint64_t{run.part} / 4 + block.first + run.from == tensor.shard.flat_first + run.to);
      CHECK(RestorePlan::SourceOffset(block, 2, run.from) ==
            block.offset + 2 * ((block.count + 1023) / 1024 * 4096) + 4 * run.from);
    });
    CHECK(at == tensor.shard.count);
  }
}

// Of each two shards compared it would be minutes.
TEST_CASE("RestorePlan.ManyRanksTakeNotTheSquareOfTheirNumber") {
  constexpr uint32_t kRanks = 20'000;
  const std::vector<Whole> model = {{"w", {uint64_t{kRanks} * 10}, 3}};
  const Saved saved = Save(model, Cut::kFlat, kRanks, 1, 10, /*contents=*/false);
  const TargetTensor tensor{"w", ShardOf(model[0], Cut::kRows, 0, 1), 0};
  const auto begun = std::chrono::steady_clock::now();
  const Result<RestorePlan> plan = MakePlan(saved.parts, 0, 1, {tensor});
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begun;
  INFO(plan.status().message());
  REQUIRE(plan.ok());
  CHECK(took.count() < 2);  // 20 to 50 ms; 5 s and more for each two
  uint64_t filled = 0;
  plan.value().ForEachRun(0, tensor.shard.count, [&](const SourceRun& run) { filled += run.count; });
  CHECK(filled == tensor.shard.count);
}

TEST_CASE("RestorePlan.OnePartSufficesForTheSameCut") {
  const Saved saved = Save(kModel, Cut::kRows, 4, 2, 17);
  std::vector<TargetTensor> tensors;
  uint64_t numel = 0;
  for (const Whole& whole : kModel) {
    tensors.push_back({whole.name, ShardOf(whole, Cut::kRows, 2, 4), numel});
    numel += tensors.back().shard.count;
  }
  CHECK(RestorePlan::Suffices(*saved.parts[2], {tensors}));
  CHECK(!RestorePlan::Suffices(*saved.parts[1], {tensors}));
  const Result<RestorePlan> plan = MakePlan({saved.parts[2]}, 2, 4, tensors);
  REQUIRE(plan.ok());
  uint64_t filled = 0;
  plan.value().ForEachRun(0, numel, [&](const SourceRun& run) { filled += run.count; });
  CHECK(filled == numel);
}

TEST_CASE("RestorePlan.SaysWhatIsMissingOrContradictsItself") {
  const Saved saved = Save(kModel, Cut::kRows, 4, 2, 17);
  const auto error = [&](RestorePlan::Parts parts, const TargetTensor& tensor, uint32_t world_size = 3) {
    const Result<RestorePlan> plan = MakePlan(std::move(parts), 0, world_size, {tensor});
    REQUIRE(!plan.ok());
    CHECK(plan.status().code() == -EINVAL);
    CHECK(plan.status().message().find(tensor.name) != std::string::npos);
    return plan.status().message();
  };
  const auto changed = [&](uint32_t part, const std::function<void(Manifest&)>& change) {
    RestorePlan::Parts parts = saved.parts;
    auto copy = std::make_shared<Manifest>(*parts[part]);
    change(*copy);
    parts[part] = copy;
    return parts;
  };
  TargetTensor embedding{"embedding", ShardOf(kModel[0], Cut::kRows, 0, 3), 0};
  TargetTensor stranger = embedding;
  stranger.name = "stranger";
  CHECK(error(saved.parts, stranger).find("is not in it") != std::string::npos);
  TargetTensor shaped = embedding;
  shaped.shard = ShardOf({"", {11, 37}, 0}, Cut::kRows, 0, 3);
  CHECK(error(saved.parts, shaped).find("[37, 11]") != std::string::npos);
  // A part without its shard, with one too large, and with another's updates.
  CHECK(error(changed(1, [](Manifest& m) { m.subgroups.erase(m.subgroups.begin()); }), embedding).find("parts hold") !=
        std::string::npos);
  CHECK(error(changed(1,
                      [](Manifest& m) {
                        TensorShard& shard = m.subgroups[0].tensors[0].shard;
                        shard = ShardOf(kModel[0], Cut::kRows, 0, 3);
                      }),
              embedding)
            .find("overlap") != std::string::npos);
  CHECK(error(changed(1, [](Manifest& m) { m.subgroups[0].tensors[0].step = 6; }), embedding).find("updates") !=
        std::string::npos);
  // The same name twice in one rank.
  CHECK(error(changed(0, [](Manifest& m) { m.subgroups[1].tensors[0] = m.subgroups[0].tensors[0]; }), embedding)
            .find("twice") != std::string::npos);
}

TEST_CASE("RestorePlan.CopiesAreCopiesOrTheRanksOwn") {
  // Two ranks that each hold all of "w".
  const std::vector<Whole> model = {{"w", {100}, 3}};
  RestorePlan::Parts parts = {Save(model, Cut::kRows, 1, 1, 40).parts[0], Save(model, Cut::kRows, 1, 1, 40).parts[0]};
  auto second = std::make_shared<Manifest>(*parts[1]);
  second->head.rank = 1;
  auto first = std::make_shared<Manifest>(*parts[0]);
  first->head.world_size = second->head.world_size = 2;
  const TargetTensor tensor{"w", ShardOf(model[0], Cut::kRows, 0, 1), 0};
  const auto source = [&](uint32_t rank, uint32_t world_size) {
    const Result<RestorePlan> plan = MakePlan({first, second}, rank, world_size, {tensor});
    uint32_t part = 99;
    if (plan.ok()) plan.value().ForEachRun(0, 100, [&](const SourceRun& run) { part = run.part; });
    return part;
  };
  CHECK(source(0, 2) == 0);
  CHECK(source(1, 2) == 1);
  CHECK(source(2, 3) == 0);
  CHECK(source(0, 1) == 0);
  // They differ: each rank may go on with its own, and nobody else knows which is right.
  second->subgroups[0].blocks[1].hash = 1;
  CHECK(source(0, 2) == 0);
  CHECK(source(1, 2) == 1);
  CHECK(source(0, 1) == 99);
  CHECK(source(2, 3) == 99);
  second->subgroups[0].blocks[1].hash = 0;
  second->subgroups[0].tensors[0].step = 4;
  CHECK(source(1, 2) == 1);
  CHECK(source(0, 1) == 99);
}

}  // namespace mlpo::test
