#include "daemon/checkpoint/manifest.h"

#include <xxhash.h>

#include <array>
#include <cerrno>
#include <set>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/checkpoint/json_text.h"
#include "daemon/checkpoint/shard_runs.h"

namespace mlpo {
namespace {

using nlohmann::json;

constexpr char kFormat[] = "mlpo-part";
constexpr uint64_t kVersion = 1;
constexpr char kHashed[] = "xxh3-64k";
constexpr char kNotHashed[] = "none";
constexpr size_t kMaxFiles = 4096;
constexpr uint64_t kMaxElements = uint64_t{1} << 40;  // of a subgroup, as at registration: products fit 64 bits
constexpr std::array<std::pair<mlpo_dtype, const char*>, 3> kTypes = {
    {{MLPO_FLOAT32, "float32"}, {MLPO_FLOAT16, "float16"}, {MLPO_BFLOAT16, "bfloat16"}}};

const char* TypeName(mlpo_dtype dtype) {
  for (const auto& [type, name] : kTypes)
    if (type == dtype) return name;
  CheckFailed(__FILE__, __LINE__, "a known type");
}

mlpo_dtype TakeType(JsonReader& reader, const char* key) {
  const std::string text = reader.Text(key);
  for (const auto& [type, name] : kTypes)
    if (text == name) return type;
  reader.Fail(std::string("has no known type as \"") + key + "\"");
  return MLPO_FLOAT32;
}

// ---- Writing ----

json FileJson(const PartFile& file, const AttemptId& attempt) {
  json out = {
      {"name", DataName(attempt, file.index)}, {"bytes", file.bytes}, {"kind", file.working ? "working" : "part"}};
  if (!file.working) return out;
  out["node"] = file.origin.node;
  out["daemon_uid"] = file.origin.daemon_uid;
  out["client_uid"] = file.origin.client_uid;
  out["job"] = file.origin.job;
  out["rank"] = file.origin.rank;
  out["generation"] = file.origin.generation;
  return out;
}

json TensorJson(const PartTensor& tensor) {
  json out = {{"name", NameToJson(tensor.name)},
              {"count", tensor.shard.count},
              {"step", static_cast<uint64_t>(tensor.step)},
              {"global_shape", tensor.shard.global_shape}};
  if (tensor.shard.flat) {
    out["flat_first"] = tensor.shard.flat_first;
  } else {
    out["shape"] = tensor.shard.shape;
    out["offsets"] = tensor.shard.offsets;
  }
  return out;
}

json SubgroupJson(const PartSubgroup& subgroup, bool hashed) {
  json tensors = json::array(), blocks = json::array();
  for (const PartTensor& tensor : subgroup.tensors) tensors.push_back(TensorJson(tensor));
  for (const PartBlock& block : subgroup.blocks) {
    const bool hash = hashed && block.stored != kStoredNothing;
    blocks.push_back(
        json::array({block.count, block.file, block.offset, block.stored, hash ? HexText(block.hash) : ""}));
  }
  return {{"key", NameToJson(subgroup.key)},
          {"dtype", TypeName(subgroup.dtype)},
          {"grad_dtype", TypeName(subgroup.grad_dtype)},
          {"numel", subgroup.numel},
          {"tensors", std::move(tensors)},
          {"blocks", std::move(blocks)}};
}

json HeadJson(const PartHead& head) {
  return {{"format", kFormat},
          {"version", kVersion},
          {"job", head.job},
          {"tag", head.tag},
          {"step", head.step},
          {"world_size", head.world_size},
          {"rank", head.rank},
          {"attempt", AttemptText(head.attempt)},
          {"started_unix_ns", static_cast<uint64_t>(head.started_unix_ns)},
          {"body_bytes", head.body_bytes},
          {"body_xxh3", HexText(head.body_xxh3)}};
}

// ---- Reading ----

std::vector<uint64_t> TakeSizes(JsonReader& reader, const char* key) {
  std::vector<uint64_t> sizes;
  const json& values = reader.Array(key);
  if (values.size() > MLPO_MAX_DIMS) {
    reader.Fail(std::string("has too many dimensions in \"") + key + "\"");
    return sizes;
  }
  for (const json& value : values) {
    if (!value.is_number_unsigned()) {
      reader.Fail(std::string("has something else than sizes in \"") + key + "\"");
      return {};
    }
    sizes.push_back(value.get<uint64_t>());
  }
  return sizes;
}

Result<PartFile> TakeFile(const json& value, const AttemptId& attempt, const std::string& who) {
  JsonReader reader(value, who);
  PartFile file;
  const std::string name = reader.Text("name");
  const std::optional<PartFileName> parsed = ParsePartFileName(name);
  if (!parsed || parsed->kind != PartFileName::Kind::kData || parsed->attempt != attempt)
    reader.Fail("is called '" + name.substr(0, 128) + "', which is no data file of this attempt");
  file.index = parsed ? parsed->index : 0;
  file.bytes = reader.Whole("bytes", INT64_MAX);
  const std::string kind = reader.Text("kind");
  file.working = kind == "working";
  if (!file.working && kind != "part") reader.Fail("is of the unknown kind '" + kind.substr(0, 64) + "'");
  if (file.working) {
    file.origin.node = reader.Text("node");
    file.origin.daemon_uid = static_cast<uint32_t>(reader.Whole("daemon_uid", UINT32_MAX));
    file.origin.client_uid = static_cast<uint32_t>(reader.Whole("client_uid", UINT32_MAX));
    file.origin.job = reader.Text("job");
    file.origin.rank = static_cast<uint32_t>(reader.Whole("rank", UINT32_MAX));
    file.origin.generation = reader.Whole("generation", UINT64_MAX);
    if (!IsTag(file.origin.node) || !IsTag(file.origin.job)) reader.Fail("comes from a node or job without a name");
  }
  if (!reader.status().ok()) return reader.status();
  return file;
}

Result<PartTensor> TakeTensor(const json& value, const std::string& who) {
  JsonReader reader(value, who);
  PartTensor tensor;
  tensor.name = reader.Name("name");
  if (tensor.name.empty() || tensor.name.size() > MLPO_MAX_TENSOR_NAME) reader.Fail("has a name of a wrong length");
  tensor.step = static_cast<int64_t>(reader.Whole("step", INT64_MAX));
  tensor.shard.count = reader.Whole("count", kMaxElements);
  tensor.shard.global_shape = TakeSizes(reader, "global_shape");
  tensor.shard.flat = reader.Has("flat_first");
  if (tensor.shard.flat) {
    tensor.shard.flat_first = reader.Whole("flat_first", UINT64_MAX);
  } else {
    tensor.shard.shape = TakeSizes(reader, "shape");
    tensor.shard.offsets = TakeSizes(reader, "offsets");
  }
  if (!reader.status().ok()) return reader.status();
  const Status sound = CheckShard(tensor.shard, who);
  if (!sound.ok()) return sound;
  return tensor;
}

Result<PartBlock> TakeBlock(const json& value, const Manifest& manifest, const std::string& who) {
  const auto whole = [&](size_t i) { return value[i].is_number_unsigned(); };
  if (!value.is_array() || value.size() != 5 || !whole(0) || !whole(1) || !whole(2) || !whole(3) ||
      !value[4].is_string())
    return Status::Invalid(who + " is not [count, file, offset, stored, hash]");
  PartBlock block;
  block.count = value[0].get<uint64_t>();
  const uint64_t file = value[1].get<uint64_t>();
  block.offset = value[2].get<uint64_t>();
  const uint64_t stored = value[3].get<uint64_t>();
  if (block.count == 0 || block.count > kMaxElements) return Status::Invalid(who + " has no elements, or too many");
  if (stored != kStoredNothing && stored != kStoredMaster && stored != kStoredAll)
    return Status::Invalid(who + " stores unknown arrays (" + std::to_string(stored) + ")");
  block.stored = static_cast<uint8_t>(stored);
  const std::string hash = value[4].get<std::string>();
  if (block.stored == kStoredNothing) {
    if (file != 0 || block.offset != 0 || !hash.empty())
      return Status::Invalid(who + " is all zero, and yet somewhere");
    return block;
  }
  if (file >= manifest.files.size()) return Status::Invalid(who + " is in file " + std::to_string(file) + " of none");
  block.file = static_cast<uint32_t>(file);
  const uint64_t bytes = manifest.files[file].bytes;
  if (block.offset < kPartHeaderBytes || block.offset % MLPO_ALIGN != 0 || block.offset > bytes ||
      StoredBytes(block) > bytes - block.offset)
    return Status::Invalid(who + " lies outside its file of " + std::to_string(bytes) + " bytes");
  const std::optional<uint64_t> parsed = ParseHex(hash);
  if (manifest.hashed ? !parsed : !hash.empty()) return Status::Invalid(who + " has a hash of another form");
  block.hash = parsed.value_or(0);
  return block;
}

Result<PartSubgroup> TakeSubgroup(const json& value, const Manifest& manifest, const std::string& who) {
  JsonReader reader(value, who);
  PartSubgroup subgroup;
  subgroup.key = reader.Name("key");
  if (subgroup.key.empty() || subgroup.key.size() > MLPO_MAX_KEY) reader.Fail("has a key of a wrong length");
  subgroup.dtype = TakeType(reader, "dtype");
  subgroup.grad_dtype = TakeType(reader, "grad_dtype");
  subgroup.numel = reader.Whole("numel", kMaxElements);
  const json& tensors = reader.Array("tensors");
  const json& blocks = reader.Array("blocks");
  if (!reader.status().ok()) return reader.status();
  std::set<std::string> names;
  uint64_t held = 0;
  for (const json& each : tensors) {
    Result<PartTensor> tensor = TakeTensor(each, who + ": tensor " + std::to_string(subgroup.tensors.size()));
    if (!tensor.ok()) return tensor.status();
    if (!names.insert(tensor->name).second) return Status::Invalid(who + " has a tensor twice");
    if (tensor->shard.count > subgroup.numel - held) return Status::Invalid(who + " has more elements in its tensors");
    held += tensor->shard.count;
    subgroup.tensors.push_back(std::move(*tensor));
  }
  if (held != subgroup.numel) return Status::Invalid(who + " has fewer elements in its tensors");
  uint64_t at = 0;
  for (const json& each : blocks) {
    Result<PartBlock> block = TakeBlock(each, manifest, who + ": block " + std::to_string(subgroup.blocks.size()));
    if (!block.ok()) return block.status();
    if (block->count > subgroup.numel - at) return Status::Invalid(who + " has more elements in its blocks");
    block->first = at;
    at += block->count;
    subgroup.blocks.push_back(*block);
  }
  if (at != subgroup.numel) return Status::Invalid(who + " has fewer elements in its blocks");
  return subgroup;
}

Status TakeBody(const json& body, const std::string& who, Manifest* manifest) {
  JsonReader reader(body, who);
  const std::string hashed = reader.Text("block_hash");
  manifest->hashed = hashed == kHashed;
  if (!manifest->hashed && hashed != kNotHashed)
    reader.Fail("has hashes of the unknown kind '" + hashed.substr(0, 64) + "'");
  const json& files = reader.Array("files");
  const json& subgroups = reader.Array("subgroups");
  if (files.size() > kMaxFiles) reader.Fail("names too many files");
  if (!reader.status().ok()) return reader.status();
  std::set<uint32_t> indices;
  for (const json& each : files) {
    Result<PartFile> file =
        TakeFile(each, manifest->head.attempt, who + ": file " + std::to_string(manifest->files.size()));
    if (!file.ok()) return file.status();
    if (!indices.insert(file->index).second) return Status::Invalid(who + " names a file twice");
    manifest->files.push_back(std::move(*file));
  }
  std::set<std::string> keys;
  for (const json& each : subgroups) {
    Result<PartSubgroup> subgroup =
        TakeSubgroup(each, *manifest, who + ": subgroup " + std::to_string(manifest->subgroups.size()));
    if (!subgroup.ok()) return subgroup.status();
    if (!keys.insert(subgroup->key).second) return Status::Invalid(who + " has a subgroup twice");
    manifest->subgroups.push_back(std::move(*subgroup));
  }
  return Status();
}

// With its end; EINVAL if the first line does not end where it should.
Result<std::string_view> HeadLine(std::string_view text, const std::string& who) {
  const size_t end = text.substr(0, kMaxHeadBytes).find('\n');
  if (end == std::string_view::npos) return Status::Invalid(who + " has no head: it is no manifest, or was cut");
  return text.substr(0, end + 1);
}

}  // namespace

Result<std::string> ManifestText(Manifest* manifest) {
  PartHead& head = manifest->head;
  MLPO_CHECK(IsTag(head.job) && IsTag(head.tag) && head.rank < head.world_size && !head.attempt.zero());
  json files = json::array(), subgroups = json::array();
  for (const PartFile& file : manifest->files) files.push_back(FileJson(file, head.attempt));
  for (const PartSubgroup& subgroup : manifest->subgroups)
    subgroups.push_back(SubgroupJson(subgroup, manifest->hashed));
  const json body = {{"block_hash", manifest->hashed ? kHashed : kNotHashed},
                     {"files", std::move(files)},
                     {"subgroups", std::move(subgroups)}};
  const std::string text = body.dump();
  head.body_bytes = text.size();
  head.body_xxh3 = XXH3_64bits(text.data(), text.size());
  std::string whole = HeadJson(head).dump() + "\n";
  MLPO_CHECK(whole.size() <= kMaxHeadBytes);
  if (text.size() > kMaxManifestBytes - kMaxHeadBytes - 1)
    return Status(-EFBIG, "the manifest of rank " + std::to_string(head.rank) + " would have " +
                              std::to_string(text.size()) + " bytes: use larger blocks ([memory] block)");
  whole += text;
  whole += '\n';
  return whole;
}

Result<PartHead> ParseHead(std::string_view text, const std::string& who) {
  const Result<std::string_view> line = HeadLine(text, who);
  if (!line.ok()) return line.status();
  const json parsed = json::parse(line.value(), nullptr, /*allow_exceptions=*/false);
  JsonReader reader(parsed, who + ": its head");
  if (reader.Text("format") != kFormat) reader.Fail("is not that of a part of a checkpoint");
  const uint64_t version = reader.Whole("version", UINT32_MAX);
  if (reader.status().ok() && version != kVersion)
    reader.Fail("has format " + std::to_string(version) + ", this version knows " + std::to_string(kVersion));
  PartHead head;
  head.job = reader.Text("job");
  head.tag = reader.Text("tag");
  head.step = reader.Whole("step", UINT64_MAX);
  head.world_size = static_cast<uint32_t>(reader.Whole("world_size", kMaxWorldSize));
  head.rank = static_cast<uint32_t>(reader.Whole("rank", kMaxWorldSize));
  const std::optional<AttemptId> attempt = ParseAttempt(reader.Text("attempt"));
  head.started_unix_ns = static_cast<int64_t>(reader.Whole("started_unix_ns", INT64_MAX));
  head.body_bytes = reader.Whole("body_bytes", kMaxManifestBytes);
  head.body_xxh3 = reader.Hex("body_xxh3");
  if (!IsTag(head.job) || !IsTag(head.tag)) reader.Fail("has a job or tag that is no name");
  if (!attempt) reader.Fail("has no attempt of 32 hexadecimal digits");
  if (head.rank >= head.world_size) reader.Fail("has rank " + std::to_string(head.rank) + " of too few");
  if (!reader.status().ok()) return reader.status();
  head.attempt = *attempt;
  return head;
}

Result<uint64_t> ManifestFileBytes(std::string_view beginning, const std::string& who) {
  const Result<std::string_view> line = HeadLine(beginning, who);
  if (!line.ok()) return line.status();
  const Result<PartHead> head = ParseHead(beginning, who);
  if (!head.ok()) return head.status();
  return line.value().size() + head.value().body_bytes + 1;
}

Result<Manifest> ParseManifest(std::string_view text, const std::string& who) {
  Manifest manifest;
  const Result<std::string_view> line = HeadLine(text, who);
  if (!line.ok()) return line.status();
  Result<PartHead> head = ParseHead(text, who);
  if (!head.ok()) return head.status();
  manifest.head = std::move(*head);
  const std::string_view rest = text.substr(line.value().size());
  if (rest.size() != manifest.head.body_bytes + 1 || rest.back() != '\n')
    return Status::Invalid(who + " has " + std::to_string(rest.size()) + " bytes behind its head, which says " +
                           std::to_string(manifest.head.body_bytes + 1) + ": it was cut or changed");
  const std::string_view body = rest.substr(0, rest.size() - 1);
  if (XXH3_64bits(body.data(), body.size()) != manifest.head.body_xxh3)
    return Status::Invalid(who + " is damaged: its body has another hash than its head says");
  const json parsed = json::parse(body, nullptr, /*allow_exceptions=*/false);
  const Status taken = TakeBody(parsed, who, &manifest);
  if (!taken.ok()) return taken;
  return manifest;
}

}  // namespace mlpo
