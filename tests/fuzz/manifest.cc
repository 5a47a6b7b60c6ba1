// The manifest of a checkpoint's part, whoever wrote it. An input with an odd first byte gets its body's length and
// hash right, so that what lies behind them is reached, too. What is accepted keeps its bounds, and is written as what
// is read again.
#include "daemon/checkpoint/manifest.h"
#include "daemon/base/name.h"

#include <xxhash.h>

#include <nlohmann/json.hpp>

#include "tests/fuzz/fuzz_target.h"

namespace {

using namespace mlpo;
using nlohmann::json;

constexpr char kWho[] = "the manifest";

// With a head that fits the body; as it is where the head is no JSON.
std::string Mend(std::string_view text) {
  const size_t line = std::min(text.find('\n'), text.size());
  std::string_view body = text.substr(std::min(line + 1, text.size()));
  if (!body.empty() && body.back() == '\n') body.remove_suffix(1);
  json head = json::parse(text.substr(0, line), nullptr, /*allow_exceptions=*/false);
  if (!head.is_object()) return std::string(text);
  char hash[17];
  std::snprintf(hash, sizeof hash, "%016llx", static_cast<unsigned long long>(XXH3_64bits(body.data(), body.size())));
  head["body_bytes"] = body.size();
  head["body_xxh3"] = hash;
  std::string mended = head.dump(-1, ' ', false, json::error_handler_t::replace) + "\n";
  mended += body;
  mended += '\n';
  return mended;
}

// Exact, where the parser's own checks must not wrap.
void CheckBounds(const Manifest& manifest) {
  using Wide = unsigned __int128;
  FUZZ_CHECK(manifest.head.rank < manifest.head.world_size, "rank");
  FUZZ_CHECK(IsName(manifest.head.job) && IsName(manifest.head.tag) && !manifest.head.attempt.zero(), "names");
  for (const PartSubgroup& subgroup : manifest.subgroups) {
    Wide tensors = 0, blocks = 0;
    for (const PartTensor& tensor : subgroup.tensors) {
      const TensorShard& shard = tensor.shard;
      tensors += shard.count;
      Wide whole = 1, box = 1;
      const bool empty = std::find(shard.global_shape.begin(), shard.global_shape.end(), 0) != shard.global_shape.end();
      for (const uint64_t size : shard.global_shape) {
        whole = empty ? 0 : whole * size;
        FUZZ_CHECK(whole <= ~uint64_t{0}, "a tensor of more than 2^64 elements");
      }
      if (shard.flat) {
        FUZZ_CHECK(Wide{shard.flat_first} + shard.count <= whole, "a range outside its tensor");
        continue;
      }
      FUZZ_CHECK(shard.shape.size() == shard.global_shape.size() && shard.offsets.size() == shard.shape.size(), "box");
      for (size_t d = 0; d < shard.shape.size(); ++d) {
        FUZZ_CHECK(Wide{shard.offsets[d]} + shard.shape[d] <= shard.global_shape[d], "a box outside its tensor");
        box *= shard.shape[d];
      }
      FUZZ_CHECK(box == shard.count, "a box of another number of elements");
    }
    for (const PartBlock& block : subgroup.blocks) {
      FUZZ_CHECK(block.first == blocks, "blocks that do not follow each other");
      blocks += block.count;
      if (block.stored == kStoredNothing) continue;
      FUZZ_CHECK(block.stored == kStoredMaster || block.stored == kStoredAll, "what is stored");
      FUZZ_CHECK(block.file < manifest.files.size(), "a block in no file");
      const Wide array = (Wide{block.count} * 4 + MLPO_ALIGN - 1) / MLPO_ALIGN * MLPO_ALIGN;
      FUZZ_CHECK(block.offset + array * block.stored <= manifest.files[block.file].bytes, "a block outside its file");
    }
    FUZZ_CHECK(tensors == subgroup.numel && blocks == subgroup.numel, "what does not add up to the subgroup");
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  test::FuzzInput input(data, size);
  const bool mend = input.Byte() & 1;
  const std::string_view rest = input.Rest();
  const std::string text = mend ? Mend(rest) : std::string(rest);
  (void)ParseHead(text, kWho);
  (void)ManifestFileBytes(text, kWho);
  Result<Manifest> parsed = ParseManifest(text, kWho);
  if (!parsed.ok()) {
    FUZZ_CHECK(parsed.status().message().find(kWho) != std::string::npos, parsed.status().message());
    return 0;
  }
  CheckBounds(*parsed);
  const Result<std::string> written = ManifestText(&*parsed);
  FUZZ_CHECK(written.ok(), written.status().message());
  Result<Manifest> again = ParseManifest(written.value(), kWho);
  FUZZ_CHECK(again.ok(), again.status().message());
  const Result<std::string> written_again = ManifestText(&*again);
  FUZZ_CHECK(written_again.ok() && written_again.value() == written.value(), "what was written is not what is read");
  return 0;
}

std::vector<std::string> mlpo::test::FuzzSeeds() {
  Manifest manifest;
  manifest.head.job = "job";
  manifest.head.tag = "step-100";
  manifest.head.step = 100;
  manifest.head.world_size = 2;
  manifest.head.rank = 1;
  manifest.head.attempt.bytes[3] = 7;
  PartFile file;
  file.bytes = kPartHeaderBytes + StoredBytes(5'000, kStoredAll);
  manifest.files.push_back(file);
  PartFile working = file;
  working.index = 1;
  working.working = true;
  working.origin = {"node", 1000, 1000, "job", 1, 5};
  manifest.files.push_back(working);
  PartSubgroup subgroup;
  subgroup.key = "layer";
  subgroup.numel = 5'010;
  PartTensor box;
  box.name = "weight";
  box.shard = {{100, 100}, false, 0, {50, 100}, {50, 0}, 5'000};
  PartTensor flat;
  flat.name = "bias";
  flat.shard = {{20}, true, 10, {}, {}, 10};
  subgroup.tensors = {box, flat};
  subgroup.blocks = {{0, 4'096, 0, kPartHeaderBytes, kStoredMaster, 1},
                     {4'096, 914, 1, kPartHeaderBytes, kStoredAll, 2}};
  manifest.subgroups.push_back(subgroup);
  std::vector<std::string> seeds;
  for (const bool hashed : {true, false}) {
    manifest.hashed = hashed;
    const Result<std::string> text = ManifestText(&manifest);
    FUZZ_CHECK(text.ok(), text.status().message());
    for (const char first : {'\0', '\1'}) seeds.push_back(first + text.value());
  }
  return seeds;
}
