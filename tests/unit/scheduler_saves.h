// What the tests of saves, hand-overs and restores on a fake tier have in common.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "tests/support/fake_tier.h"
//
#include "tests/support/catch.h"

namespace mlpo::test {

inline constexpr uint64_t kBlock = 1024;  // elements: parts of 4 KiB, blocks of 12 KiB
inline constexpr uint64_t kBlockBytes = 12288;
inline constexpr int64_t kS = 1'000'000'000;

inline Scheduler::Options MakeOptions(uint32_t buffers, size_t paths) {
  Scheduler::Options options;
  options.buffers = buffers;
  options.block_elements = kBlock;
  options.extents_offset_bytes = 4096;
  options.no_path_timeout_ns = 5 * kS;
  options.paths.resize(paths);
  return options;
}

// Of blocks that have room for a kept gradient.
inline constexpr uint64_t kLargeBlock = 4 * kBlock;

inline Scheduler::Options KeptOptions(uint32_t buffers, size_t paths) {
  Scheduler::Options options = MakeOptions(buffers, paths);
  options.block_elements = kLargeBlock;
  return options;
}

inline CopyPace::Options Pace(double write_bytes_per_s = 200e6, uint64_t target = 0) {
  return {0.05, write_bytes_per_s, 2 * kBlockBytes, target};
}

inline void TrainStep(FakeTier& tier, SessionId session, int subgroups, uint32_t epoch) {
  std::vector<uint64_t> requests;
  for (int id = 1; id <= subgroups; ++id) requests.push_back(tier.Grad(session, id, epoch));
  for (uint64_t grad : requests) tier.RunUntilAnswered(grad);
  requests.clear();
  for (int id = 1; id <= subgroups; ++id) requests.push_back(tier.Update(session, id, epoch));
  for (uint64_t update : requests) {
    tier.RunUntilAnswered(update);
    CHECK(tier.status(update) == 0);
  }
}

using Versions = std::map<std::pair<SubgroupId, uint32_t>, uint64_t>;

inline Versions Now(FakeTier& tier, SessionId session, int subgroups, uint32_t blocks) {
  Versions versions;
  for (int id = 1; id <= subgroups; ++id)
    for (uint32_t block = 0; block < blocks; ++block)
      versions[{static_cast<SubgroupId>(id), block}] = tier.VersionOf(session, static_cast<SubgroupId>(id), block);
  return versions;
}

inline bool IsInPart(FakeTier& tier, uint64_t save, const Versions& versions) {
  for (const auto& [place, version] : versions)
    if (tier.InPart(save, place.first, place.second) != version) return false;
  return true;
}

inline void RunUntilCopied(FakeTier& tier, uint64_t save) {
  while (!tier.save(save).copied && tier.Step()) {
  }
}

// Afterwards all of its state is on the paths.
inline void SaveAll(FakeTier& tier, SessionId session) {
  const uint64_t save = tier.BeginSave(session, 1, Pace());
  REQUIRE(save != 0);
  tier.RunUntilAnswered(tier.Take(session, 1));
  RunUntilCopied(tier, save);
  tier.RunUntilQuiet();
}

inline std::vector<const Block*> AwayOn(const Subgroup& subgroup, PathIndex path) {
  std::vector<const Block*> away;
  for (const Block& block : subgroup.blocks) {
    if (block.state == BlockState::kAway && block.extent.path == path) away.push_back(&block);
  }
  return away;
}

inline uint64_t CheckpointBytes(FakeTier& tier) {
  uint64_t bytes = 0;
  for (PathIndex i = 0; i < tier.options().paths.size(); ++i) {
    PathSnapshot path;
    tier.scheduler().Fill(i, &path, tier.now_ns());
    bytes += path.checkpoint_bytes;
  }
  return bytes;
}

}  // namespace mlpo::test
