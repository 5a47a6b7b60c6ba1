// What a manifest says of a state that has been pinned: each block in its place, in whatever order subgroups came.
#include "daemon/part_manifest.h"

#include <chrono>
#include <optional>
#include <vector>

#include "tests/support/fake_tier.h"
//
#include "tests/support/catch.h"

using namespace mlpo;
using mlpo::test::FakeTier;

namespace {

constexpr uint64_t kBlock = 1024;  // elements
constexpr uint64_t kHeaderBytes = 4096;

Scheduler::Options MakeOptions() {
  Scheduler::Options options;
  options.buffers = 64;
  options.block_elements = kBlock;
  options.extents_offset_bytes = kHeaderBytes;
  options.no_path_timeout_ns = 5'000'000'000;
  options.paths.resize(1);
  return options;
}

CopyPace::Options Pace() { return {0.05, 200e6, uint64_t{1} << 20}; }

}  // namespace

TEST_CASE("PartManifest.BlocksHaveTheirPlacesHoweverSubgroupsWerePinned") {
  FakeTier tier(MakeOptions(), std::vector<FakeTier::PathSpeed>(1));
  tier.AddSubgroup(1, 3, {3 * kBlock});
  tier.AddSubgroup(1, 5, {kBlock, 1});
  tier.AddSubgroup(1, 9, {kBlock / 2});
  for (const SubgroupId id : {3u, 5u, 9u}) tier.WriteState(1, id, MLPO_PART_STATE);
  std::vector<SubgroupId> pinned;
  std::optional<TakenState> state;
  tier.on_pinned = [&](const StateSave& save) {
    state = StateOf(tier.scheduler(), save, kHeaderBytes);
    REQUIRE(state->sources.size() == save.pins.size());
    for (size_t i = 0; i < save.pins.size(); ++i) {
      const Pin& pin = save.pins[i];
      if (pinned.empty() || pinned.back() != pin.subgroup) pinned.push_back(pin.subgroup);
      const PartBlock& block = BlockOf(state->manifest, pin);
      CHECK(block.count == pin.count);
      CHECK(&block == &state->manifest.subgroups[state->sources[i].subgroup].blocks[state->sources[i].block]);
      CHECK(state->sources[i].bytes == pin.bytes);
      CHECK(state->sources[i].offset == kHeaderBytes + pin.extent.offset + pin.first_byte);
    }
  };
  REQUIRE(tier.BeginSave(1, 1, Pace()) != 0);
  tier.Submit(1, MLPO_OP_READ_STATE, 3, 0, MLPO_PART_STATE, 0, 3 * kBlock);  // its TAKE comes after it
  tier.RunUntilAnswered(tier.Take(1, 1));
  REQUIRE(state);
  CHECK(pinned.back() == 3);
  const std::vector<PartSubgroup>& subgroups = state->manifest.subgroups;
  REQUIRE(subgroups.size() == 3);
  CHECK(subgroups[0].key == "subgroup3");
  CHECK(subgroups[1].key == "subgroup5");
  CHECK(subgroups[2].key == "subgroup9");
  CHECK(subgroups[0].blocks.size() == 3);
  CHECK(subgroups[0].blocks[2].first == 2 * kBlock);
  CHECK(subgroups[1].blocks.size() == 2);
  CHECK(subgroups[2].blocks.size() == 1);
  tier.RunUntilQuiet();
  CHECK(tier.violation() == "");
}

// In the data thread, where all sessions wait for it.
TEST_CASE("PartManifest.ManySubgroupsTakeTimeByTheBlock") {
  constexpr SubgroupId kSubgroups = 20'000;
  FakeTier tier(MakeOptions(), std::vector<FakeTier::PathSpeed>(1));
  for (SubgroupId id = 1; id <= kSubgroups; ++id) tier.AddSubgroup(1, id, {8});  // all zero
  std::chrono::duration<double> took{};
  size_t blocks = 0;
  tier.on_pinned = [&](const StateSave& save) {
    const auto begin = std::chrono::steady_clock::now();
    TakenState state = StateOf(tier.scheduler(), save, kHeaderBytes);
    for (const Pin& pin : save.pins) blocks += BlockOf(state.manifest, pin).count == 8;
    took = std::chrono::steady_clock::now() - begin;
  };
  REQUIRE(tier.BeginSave(1, 1, Pace()) != 0);
  tier.RunUntilAnswered(tier.Take(1, 1));
  CHECK(blocks == kSubgroups);
  CHECK(took.count() < 0.5);  // some 30 ms; along all subgroups for each of them it is seconds
}
