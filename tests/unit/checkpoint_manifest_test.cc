// Manifests, headers and names of a checkpoint's parts: there and back, and whatever is wrong with them is refused.
#include <xxhash.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "daemon/checkpoint/block_hash.h"
#include "daemon/checkpoint/manifest.h"
#include "daemon/checkpoint/part_header.h"
#include "tests/support/catch.h"

namespace mlpo::test {
namespace {

using nlohmann::json;

AttemptId Attempt(uint8_t last) {
  AttemptId attempt;
  attempt.bytes.back() = last;
  return attempt;
}

TensorShard Rows(uint64_t rows, uint64_t columns, uint64_t first, uint64_t count) {
  TensorShard shard;
  shard.global_shape = {rows, columns};
  shard.offsets = {first, 0};
  shard.shape = {count, columns};
  shard.count = count * columns;
  return shard;
}

Manifest Small() {
  Manifest manifest;
  manifest.head.job = "job";
  manifest.head.tag = "step-100";
  manifest.head.step = 100;
  manifest.head.world_size = 4;
  manifest.head.rank = 2;
  manifest.head.attempt = Attempt(7);
  manifest.head.started_unix_ns = 1'700'000'000'123'456'789;
  PartFile data;
  data.bytes = 4096 + 3 * 4096 + 4096;
  PartFile working;
  working.index = 5;
  working.bytes = 1 << 20;
  working.working = true;
  working.origin = {"node", 1000, 1001, "job", 2, 3};
  manifest.files = {data, working};
  PartSubgroup subgroup;
  subgroup.key = "decoder.0";
  subgroup.dtype = MLPO_BFLOAT16;
  subgroup.grad_dtype = MLPO_FLOAT32;
  subgroup.numel = 30;
  subgroup.tensors.push_back({"weight \xff\xfe\"\n", Rows(6, 8, 2, 3), 12});
  TensorShard flat;
  flat.global_shape = {100};
  flat.flat = true;
  flat.flat_first = 50;
  flat.count = 6;
  subgroup.tensors.push_back({"bias", flat, 0});
  subgroup.blocks = {{0, 10, 0, 4096, kStoredAll, 0xfedcba9876543210},
                     {10, 10, 1, 8192, kStoredMaster, 17},
                     {20, 10, 0, 0, kStoredNothing, 0}};
  manifest.subgroups.push_back(subgroup);
  PartSubgroup empty;
  empty.key = "empty";
  manifest.subgroups.push_back(empty);
  return manifest;
}

std::string TextOf(Manifest manifest) {
  const Result<std::string> text = ManifestText(&manifest);
  REQUIRE(text.ok());
  return text.value();
}

std::string Sealed(json head, const std::string& body) {
  char hash[17];
  std::snprintf(hash, sizeof hash, "%016llx", static_cast<unsigned long long>(XXH3_64bits(body.data(), body.size())));
  head["body_xxh3"] = hash;
  return head.dump() + "\n" + body + "\n";
}

// The text with its documents changed and sealed again: as a file of another version, or of an enemy.
std::string Changed(const std::function<void(json& head, json& body)>& change) {
  const std::string text = TextOf(Small());
  const size_t line = text.find('\n');
  json head = json::parse(text.substr(0, line)), body = json::parse(text.substr(line + 1));
  change(head, body);
  const std::string body_text = body.dump();
  if (head.contains("body_bytes") && head["body_bytes"] == text.size() - line - 2)
    head["body_bytes"] = body_text.size();
  return Sealed(head, body_text);
}

// Most memory that this process has had since it was last asked, in bytes.
uint64_t Peak() {
  std::ifstream status("/proc/self/status");
  uint64_t kib = 0;
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("VmHWM:")) kib = std::stoull(line.substr(6));
  REQUIRE(kib > 0);
  std::ofstream("/proc/self/clear_refs") << "5";
  return kib * 1024;
}

}  // namespace

TEST_CASE("Manifest.ComesBackAsItWas") {
  const std::string text = TextOf(Small());
  const Result<Manifest> back = ParseManifest(text, "file");
  INFO(back.status().message());
  REQUIRE(back.ok());
  const Manifest &m = back.value(), was = Small();
  CHECK(m.head.job == was.head.job);
  CHECK(m.head.tag == was.head.tag);
  CHECK(m.head.step == was.head.step);
  CHECK(m.head.world_size == was.head.world_size);
  CHECK(m.head.rank == was.head.rank);
  CHECK(m.head.attempt == was.head.attempt);
  CHECK(m.head.started_unix_ns == was.head.started_unix_ns);
  REQUIRE(m.files.size() == 2);
  CHECK(m.files[0].bytes == was.files[0].bytes);
  CHECK(!m.files[0].working);
  CHECK(m.files[1].index == 5);
  CHECK(m.files[1].working);
  CHECK(m.files[1].origin == was.files[1].origin);
  REQUIRE(m.subgroups.size() == 2);
  const PartSubgroup &s = m.subgroups[0], &should = was.subgroups[0];
  CHECK(s.key == should.key);
  CHECK(s.dtype == MLPO_BFLOAT16);
  CHECK(s.grad_dtype == MLPO_FLOAT32);
  REQUIRE(s.tensors.size() == 2);
  for (size_t i = 0; i < 2; ++i) {
    CHECK(s.tensors[i].name == should.tensors[i].name);
    CHECK(s.tensors[i].shard == should.tensors[i].shard);
    CHECK(s.tensors[i].step == should.tensors[i].step);
  }
  REQUIRE(s.blocks.size() == 3);
  for (size_t i = 0; i < 3; ++i) {
    CHECK(s.blocks[i].first == should.blocks[i].first);
    CHECK(s.blocks[i].count == should.blocks[i].count);
    CHECK(s.blocks[i].file == should.blocks[i].file);
    CHECK(s.blocks[i].offset == should.blocks[i].offset);
    CHECK(s.blocks[i].stored == should.blocks[i].stored);
    CHECK(s.blocks[i].hash == should.blocks[i].hash);
  }
  CHECK(m.subgroups[1].key == "empty");
  // The head alone says enough, from the file's first bytes, and how long the file must be.
  const Result<PartHead> head = ParseHead(std::string_view(text).substr(0, text.find('\n') + 1), "file");
  REQUIRE(head.ok());
  CHECK(head.value().attempt == Attempt(7));
  CHECK(ManifestFileBytes(std::string_view(text).substr(0, kMaxHeadBytes), "file").value() == text.size());
}

TEST_CASE("Manifest.HasNoHashesWhereThereAreNone") {
  Manifest manifest = Small();
  manifest.hashed = false;
  const Result<Manifest> back = ParseManifest(TextOf(manifest), "file");
  REQUIRE(back.ok());
  CHECK(!back.value().hashed);
}

TEST_CASE("Manifest.AnyChangedByteAndAnyCutIsNoticed") {
  const std::string text = TextOf(Small());
  const Manifest was = Small();
  for (size_t i = 0; i < text.size(); ++i) {
    CHECK(!ParseManifest(text.substr(0, i), "file").ok());
    std::string changed = text;
    changed[i] = static_cast<char>(changed[i] ^ 1 << (i % 7));
    const Result<Manifest> back = ParseManifest(changed, "file");
    if (!back.ok()) {
      CHECK(back.status().code() == -EINVAL);
      continue;
    }
    // The head's own fields have no hash; what its bytes say is checked against other parts, file name and headers.
    INFO("byte " << i);
    CHECK(i < text.find('\n'));
    const PartHead& head = back.value().head;
    const bool other = head.job != was.head.job || head.tag != was.head.tag || head.step != was.head.step ||
                       head.world_size != was.head.world_size || head.rank != was.head.rank ||
                       head.attempt != was.head.attempt || head.started_unix_ns != was.head.started_unix_ns;
    CHECK(other);
  }
  CHECK(!ParseManifest(text + "x", "file").ok());
  CHECK(!ParseManifest("", "file").ok());
  CHECK(!ParseManifest(std::string(10'000, 'x'), "file").ok());
}

TEST_CASE("Manifest.UnknownMembersAreLeftAlone") {
  CHECK(ParseManifest(Changed([](json& head, json& body) {
                        head["new"] = 1;
                        body["new"] = {1, 2};
                        body["subgroups"][0]["tensors"][0]["new"] = "x";
                      }),
                      "file")
            .ok());
}

TEST_CASE("C30_AManifestOfAnEnemyIsRefused") {
  using Change = std::function<void(json & head, json & body)>;
  const std::vector<std::pair<const char*, Change>> changes = {
      {"version", [](json& h, json&) { h["version"] = 2; }},
      {"format", [](json& h, json&) { h["format"] = "tar"; }},
      {"no head", [](json& h, json&) { h = json::object(); }},
      {"rank of too many", [](json& h, json&) { h["rank"] = 4; }},
      {"no ranks", [](json& h, json&) { h["world_size"] = 0; }},
      {"huge world", [](json& h, json&) { h["world_size"] = uint64_t{1} << 32; }},
      {"job", [](json& h, json&) { h["job"] = "../x"; }},
      {"tag", [](json& h, json&) { h["tag"] = "a/b"; }},
      {"negative step", [](json& h, json&) { h["step"] = -1; }},
      {"attempt", [](json& h, json&) { h["attempt"] = std::string(32, '0'); }},
      {"attempt's case", [](json& h, json&) { h["attempt"] = std::string(32, 'A'); }},
      {"huge body", [](json& h, json&) { h["body_bytes"] = uint64_t{1} << 60; }},
      {"body is an array", [](json&, json& b) { b = json::array(); }},
      {"hash kind", [](json&, json& b) { b["block_hash"] = "md5"; }},
      {"file's name", [](json&, json& b) { b["files"][0]["name"] = "../../etc/passwd"; }},
      {"file of another attempt", [](json&, json& b) { b["files"][0]["name"] = DataName(Attempt(8), 0); }},
      {"manifest as a file", [](json&, json& b) { b["files"][0]["name"] = ManifestName(Attempt(7)); }},
      {"file twice", [](json&, json& b) { b["files"][1] = b["files"][0]; }},
      {"file's kind", [](json&, json& b) { b["files"][0]["kind"] = "link"; }},
      {"huge file", [](json&, json& b) { b["files"][0]["bytes"] = UINT64_MAX; }},
      {"origin's node", [](json&, json& b) { b["files"][1]["node"] = ".."; }},
      {"no origin", [](json&, json& b) { b["files"][1].erase("generation"); }},
      {"type", [](json&, json& b) { b["subgroups"][0]["dtype"] = "float64"; }},
      {"key", [](json&, json& b) { b["subgroups"][0]["key"] = ""; }},
      {"key's hex",
       [](json&, json& b) {
         b["subgroups"][0]["key"] = {{"hex", "f"}};
       }},
      {"key twice", [](json&, json& b) { b["subgroups"][1]["key"] = "decoder.0"; }},
      {"long name", [](json&, json& b) { b["subgroups"][0]["tensors"][0]["name"] = std::string(257, 'x'); }},
      {"tensor twice",
       [](json&, json& b) { b["subgroups"][0]["tensors"][1]["name"] = b["subgroups"][0]["tensors"][0]["name"]; }},
      {"numel", [](json&, json& b) { b["subgroups"][0]["numel"] = 31; }},
      {"count", [](json&, json& b) { b["subgroups"][0]["tensors"][0]["count"] = 25; }},
      {"shape",
       [](json&, json& b) {
         b["subgroups"][0]["tensors"][0]["shape"] = {3, 9};
       }},
      {"offsets",
       [](json&, json& b) {
         b["subgroups"][0]["tensors"][0]["offsets"] = {UINT64_MAX, 0};
       }},
      {"many dimensions",
       [](json&, json& b) { b["subgroups"][0]["tensors"][0]["global_shape"] = std::vector<int>(9, 1); }},
      {"flat range", [](json&, json& b) { b["subgroups"][0]["tensors"][1]["flat_first"] = 95; }},
      {"block's form",
       [](json&, json& b) {
         b["subgroups"][0]["blocks"][0] = {10, 0, 4096, 3};
       }},
      {"block's count", [](json&, json& b) { b["subgroups"][0]["blocks"][0][0] = 11; }},
      {"empty block", [](json&, json& b) { b["subgroups"][0]["blocks"][0][0] = 0; }},
      {"huge block", [](json&, json& b) { b["subgroups"][0]["blocks"][0][0] = UINT64_MAX; }},
      {"block's file", [](json&, json& b) { b["subgroups"][0]["blocks"][0][1] = 2; }},
      {"block in the header", [](json&, json& b) { b["subgroups"][0]["blocks"][0][2] = 0; }},
      {"block not aligned", [](json&, json& b) { b["subgroups"][0]["blocks"][0][2] = 4097; }},
      {"block beyond the file", [](json&, json& b) { b["subgroups"][0]["blocks"][0][2] = 12288; }},
      {"block far beyond", [](json&, json& b) { b["subgroups"][0]["blocks"][0][2] = UINT64_MAX - 4095; }},
      {"negative offset", [](json&, json& b) { b["subgroups"][0]["blocks"][0][2] = -4096; }},
      {"moments without masters", [](json&, json& b) { b["subgroups"][0]["blocks"][0][3] = 2; }},
      {"no hash", [](json&, json& b) { b["subgroups"][0]["blocks"][0][4] = ""; }},
      {"zero block somewhere", [](json&, json& b) { b["subgroups"][0]["blocks"][2][2] = 4096; }},
      {"a block less", [](json&, json& b) { b["subgroups"][0]["blocks"].erase(2); }},
  };
  REQUIRE(ParseManifest(Changed([](json&, json&) {}), "file").ok());
  for (const auto& [what, change] : changes) {
    INFO(what);
    const Result<Manifest> back = ParseManifest(Changed(change), "file-name");
    REQUIRE(!back.ok());
    CHECK(back.status().code() == -EINVAL);
    CHECK(back.status().message().find("file-name") != std::string::npos);
  }
}

// As JSON values, these would need 16 times their text and more.
TEST_CASE("C30_AManifestThatIsMadeToFillMemoryIsNotTakenIn") {
  constexpr size_t kBytes = 8u << 20;
  const std::string text = TextOf(Small());
  const size_t line = text.find('\n');
  json head = json::parse(text.substr(0, line));
  const std::string body = text.substr(line + 1, text.size() - line - 2);
  REQUIRE(body.starts_with("{"));
  std::string zeros;
  zeros.reserve(kBytes);
  while (zeros.size() + 2 < kBytes) zeros += "0,";
  zeros += "0";
  const std::string subgroup = R"("subgroups":[{"key":"k","dtype":"float32","grad_dtype":"float32","numel":0,)";
  const auto refused = [](std::string rest) { return R"({"block_hash":"none","files":[],)" + std::move(rest) + "}"; };
  const auto check = [&](const char* what, const std::string& hostile, bool good) {
    INFO(what);
    head["body_bytes"] = hostile.size();
    const std::string sealed = Sealed(head, hostile);
    (void)Peak();
    const uint64_t before = Peak();
    const Result<Manifest> parsed = ParseManifest(sealed, "file");
    CHECK(Peak() < before + 3 * kBytes);
    INFO(parsed.status().message());
    CHECK(parsed.ok() == good);
    if (!good) CHECK(parsed.status().code() == -EINVAL);
  };
  check("files", R"({"block_hash":"none","subgroups":[],"files":[)" + zeros + "]}", false);
  check("a file", R"({"block_hash":"none","subgroups":[],"files":[{"name":[)" + zeros + "]}]}", false);
  check("subgroups", refused("\"subgroups\":[" + zeros + "]"), false);
  check("blocks", refused(subgroup + "\"tensors\":[],\"blocks\":[" + zeros + "]}]"), false);
  check("a block", refused(subgroup + "\"tensors\":[],\"blocks\":[[" + zeros + "]]}]"), false);
  check("a tensor", refused(subgroup + "\"blocks\":[],\"tensors\":[{\"shape\":[" + zeros + "]}]}]"), false);
  check("another member", refused("\"block_hash\":[" + zeros + "]"), false);
  check("deep", refused("\"subgroups\":" + std::string(kBytes, '[')), false);
  // Who does not know a member passes over it, however long.
  check("an unknown member", "{\"new\":[" + zeros + "]," + body.substr(1), true);
}

TEST_CASE("PartHeader.AnyChangedBitIsNoticed") {
  const PartIdentity was{Attempt(9), 3, 8, 1000, 0, 1234, 1'700'000'000'000'000'000, "job", "tag-1"};
  const PartHeader page = MakePartHeader(was);
  CHECK(std::memcmp(page.bytes.data(), "MLPOPART", 8) == 0);
  const Result<PartIdentity> good = ParsePartHeader(page);
  REQUIRE(good.ok());
  CHECK(good.value() == was);
  for (size_t byte = 0; byte < page.bytes.size(); ++byte) {
    PartHeader changed = page;
    changed.bytes[byte] ^= std::byte{static_cast<unsigned char>(1u << (byte % 8))};
    REQUIRE(ParsePartHeader(changed).status().code() == -EINVAL);
  }
  REQUIRE(ParsePartHeader(PartHeader()).status().code() == -EINVAL);
}

TEST_CASE("Names.AreOurFormAndNoOther") {
  const AttemptId attempt = Attempt(0xab);
  const std::string hex = std::string(30, '0') + "ab";
  CHECK(AttemptText(attempt) == hex);
  CHECK(ParseAttempt(hex) == attempt);
  CHECK(!ParseAttempt(std::string(30, '0') + "AB"));
  CHECK(!ParseAttempt(hex + "0"));
  CHECK(!ParseAttempt(std::string(32, '0')));
  CHECK(!NewAttempt({}).zero());
  CHECK(PartFolderName(12) == "part-12");
  CHECK(ParsePartFolderName("part-12") == 12u);
  for (const char* name : {"part-", "part-012", "part--1", "part-4294967296", "part-1x", "part", "Part-1", "part-1/"})
    CHECK(!ParsePartFolderName(name));
  const std::optional<PartFileName> data = ParsePartFileName(DataName(attempt, 3));
  REQUIRE(data);
  CHECK(data->kind == PartFileName::Kind::kData);
  CHECK(data->attempt == attempt);
  CHECK(data->index == 3);
  REQUIRE(ParsePartFileName(ManifestName(attempt)));
  CHECK(ParsePartFileName(ManifestName(attempt))->kind == PartFileName::Kind::kManifest);
  REQUIRE(ParsePartFileName(NewManifestName(attempt)));
  CHECK(ParsePartFileName(NewManifestName(attempt))->kind == PartFileName::Kind::kNewManifest);
  const std::vector<std::string> strange = {"data-" + hex,
                                            "data-" + hex + "-",
                                            "data-" + hex + "-01",
                                            "manifest-" + hex + ".ne",
                                            "manifest-" + hex + "-1",
                                            "data-",
                                            "manifest-" + hex.substr(1),
                                            hex,
                                            ""};
  for (const std::string& name : strange) CHECK(!ParsePartFileName(name));
}

TEST_CASE("BlockHash.IsXXH3OfThePiecesHashes") {
  // 65536 elements and 1000 more, padded to 4096 bytes: two pieces an array.
  const uint64_t array_bytes = StoredArrayBytes(66'536);
  REQUIRE(array_bytes == 266'240);
  std::vector<std::byte> stored(3 * array_bytes);
  for (size_t i = 0; i < stored.size(); ++i) stored[i] = static_cast<std::byte>(i * 7 + i / 251);
  const auto piece = [&](size_t array, size_t from, size_t bytes) {
    return XXH3_64bits(stored.data() + array * array_bytes + from, bytes);
  };
  const std::vector<uint64_t> pieces = {piece(0, 0, 262'144),     piece(1, 0, 262'144),     piece(2, 0, 262'144),
                                        piece(0, 262'144, 4'096), piece(1, 262'144, 4'096), piece(2, 262'144, 4'096)};
  CHECK(BlockHash(stored.data(), 3, array_bytes) == XXH3_64bits(pieces.data(), 48));
  const std::vector<uint64_t> master = {pieces[0], pieces[3]};
  CHECK(BlockHash(stored.data(), 1, array_bytes) == XXH3_64bits(master.data(), 16));
  CHECK(HashOfPieces(pieces) == XXH3_64bits(pieces.data(), 48));
}

}  // namespace mlpo::test
