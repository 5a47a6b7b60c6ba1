#include "daemon/checkpoint/manifest.h"

#include <xxhash.h>

#include <array>
#include <cerrno>
#include <optional>
#include <set>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/base/name.h"
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
  if (file.working) PutOrigin(file.origin, &out);
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
  if (file.working) file.origin = TakeOrigin(reader);
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

// What can be said of it without the manifest's files. *hash: whether it has one.
Result<PartBlock> TakeBlock(const json& value, const std::string& who, bool* hash) {
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
  const std::string text = value[4].get<std::string>();
  *hash = !text.empty();
  if (block.stored == kStoredNothing) {
    if (file != 0 || block.offset != 0 || *hash) return Status::Invalid(who + " is all zero, and yet somewhere");
    return block;
  }
  if (file >= kMaxFiles) return Status::Invalid(who + " is in file " + std::to_string(file) + " of none");
  block.file = static_cast<uint32_t>(file);
  const std::optional<uint64_t> parsed = ParseHex(text);
  if (*hash && !parsed) return Status::Invalid(who + " has a hash of another form");
  block.hash = parsed.value_or(0);
  return block;
}

Status CheckPlace(const PartBlock& block, const std::vector<PartFile>& files, const std::string& who) {
  if (block.stored == kStoredNothing) return Status();
  if (block.file >= files.size())
    return Status::Invalid(who + " is in file " + std::to_string(block.file) + " of none");
  const uint64_t bytes = files[block.file].bytes;
  if (block.offset < kPartHeaderBytes || block.offset % MLPO_ALIGN != 0 || block.offset > bytes ||
      StoredBytes(block) > bytes - block.offset)
    return Status::Invalid(who + " lies outside its file of " + std::to_string(bytes) + " bytes");
  return Status();
}

// Takes a body while it is parsed: a file, a tensor, a block at a time. As JSON values a body would need many times its
// bytes, and one that a client passes may be made for that: [0,0,0,...].
class BodyReader {
 public:
  BodyReader(const std::string& who, Manifest* manifest) : who_(who), manifest_(manifest) {}

  Status Read(std::string_view text) {
    try {
      const json body = json::parse(
          text, [this](int depth, Event event, json& value) { return On(depth, event, value); },
          /*allow_exceptions=*/false);
      return Finish(body);
    } catch (const Refused& refused) {  // ours: the parser has no other way to be stopped
      return refused.status;
    }
  }

 private:
  using Event = json::parse_event_t;
  struct Refused {
    Status status;
  };
  // Of one subgroup's stored blocks: one that has a hash, and one that has none.
  struct Hashes {
    std::optional<size_t> with, without;
  };
  static constexpr int kMaxDepth = 8;
  static constexpr uint32_t kMaxValues = 64;  // of one item of a list, or one member that is none

  // Depths: 0 the body, 1 its members, 2 a file or subgroup, 3 its members, 4 a tensor or block. False discards the
  // value.
  bool On(int depth, Event event, json& value) {
    const bool start = event == Event::object_start || event == Event::array_start;
    if (start && depth > kMaxDepth) Refuse(Status::Invalid(who_ + " is nested deeper than any manifest"));
    if (skipped_ > 0) {  // an unknown member, until the next one
      if (depth > skipped_ || (depth == skipped_ && event != Event::key)) return true;
      skipped_ = 0;
    }
    const bool in_subgroup = member_ == "subgroups";
    if (event == Event::key && (depth == 1 || (depth == 3 && in_subgroup))) {
      std::string& key = depth == 1 ? member_ : part_;
      key = value.get<std::string>();
      values_ = 0;
      const bool known = depth == 1 ? key == "block_hash" || key == "files" || key == "subgroups"
                                    : key == "key" || key == "dtype" || key == "grad_dtype" || key == "numel" ||
                                          key == "tensors" || key == "blocks";
      if (!known) skipped_ = depth;
      return known;
    }
    const bool in_list = (depth == 2 && (in_subgroup || member_ == "files")) ||
                         (depth == 4 && in_subgroup && (part_ == "tensors" || part_ == "blocks"));
    if (start && in_list) {
      values_ = 0;
      if (depth == 2) BeginItem();
    }
    if ((start || event == Event::value) && ++values_ > kMaxValues)
      Refuse(Status::Invalid(who_ + " has too much in \"" + member_ + "\""));
    if (start || event == Event::key || !in_list) return true;
    Take(depth, value);
    return false;
  }

  void BeginItem() {
    part_.clear();
    names_.clear();
    subgroup_ = PartSubgroup();
    held_ = placed_ = 0;
    hashes_ = Hashes();
  }

  void Take(int depth, const json& value) {
    const std::string subgroup = who_ + ": subgroup " + std::to_string(manifest_->subgroups.size());
    if (depth == 4) return part_ == "tensors" ? AddTensor(value, subgroup) : AddBlock(value, subgroup);
    return member_ == "files" ? AddFile(value) : AddSubgroup(value, subgroup);
  }

  void AddFile(const json& value) {
    const std::string who = who_ + ": file " + std::to_string(manifest_->files.size());
    Result<PartFile> file = TakeFile(value, manifest_->head.attempt, who);
    if (!file.ok()) Refuse(file.status());
    if (!indices_.insert(file->index).second) Refuse(Status::Invalid(who_ + " names a file twice"));
    if (manifest_->files.size() == kMaxFiles) Refuse(Status::Invalid(who_ + " names too many files"));
    manifest_->files.push_back(std::move(*file));
  }

  void AddTensor(const json& value, const std::string& who) {
    Result<PartTensor> tensor = TakeTensor(value, who + ": tensor " + std::to_string(subgroup_.tensors.size()));
    if (!tensor.ok()) Refuse(tensor.status());
    if (!names_.insert(tensor->name).second) Refuse(Status::Invalid(who + " has a tensor twice"));
    if (tensor->shard.count > kMaxElements - held_) Refuse(Status::Invalid(who + " has more elements in its tensors"));
    held_ += tensor->shard.count;
    subgroup_.tensors.push_back(std::move(*tensor));
  }

  void AddBlock(const json& value, const std::string& who) {
    const size_t place = subgroup_.blocks.size();
    bool hash = false;
    Result<PartBlock> block = TakeBlock(value, who + ": block " + std::to_string(place), &hash);
    if (!block.ok()) Refuse(block.status());
    if (block->count > kMaxElements - placed_) Refuse(Status::Invalid(who + " has more elements in its blocks"));
    block->first = placed_;
    placed_ += block->count;
    if (block->stored != kStoredNothing) (hash ? hashes_.with : hashes_.without) = place;
    subgroup_.blocks.push_back(*block);
  }

  void AddSubgroup(const json& value, const std::string& who) {
    JsonReader reader(value, who);
    subgroup_.key = reader.Name("key");
    if (subgroup_.key.empty() || subgroup_.key.size() > MLPO_MAX_KEY) reader.Fail("has a key of a wrong length");
    subgroup_.dtype = TakeType(reader, "dtype");
    subgroup_.grad_dtype = TakeType(reader, "grad_dtype");
    subgroup_.numel = reader.Whole("numel", kMaxElements);
    (void)reader.Array("tensors");  // that they are there: what was in them has been taken
    (void)reader.Array("blocks");
    if (!reader.status().ok()) Refuse(reader.status());
    const auto compare = [&](uint64_t elements, const char* in) {
      if (elements != subgroup_.numel)
        Refuse(Status::Invalid(who + " has " + (elements > subgroup_.numel ? "more" : "fewer") + " elements in its " +
                               in));
    };
    compare(held_, "tensors");
    compare(placed_, "blocks");
    if (!keys_.insert(subgroup_.key).second) Refuse(Status::Invalid(who_ + " has a subgroup twice"));
    subgroup_.tensors.shrink_to_fit();
    subgroup_.blocks.shrink_to_fit();
    manifest_->subgroups.push_back(std::move(subgroup_));
    subgroup_hashes_.push_back(hashes_);
  }

  // `body`: without the items of its lists.
  Status Finish(const json& body) {
    JsonReader reader(body, who_);
    const std::string hashed = reader.Text("block_hash");
    manifest_->hashed = hashed == kHashed;
    if (!manifest_->hashed && hashed != kNotHashed)
      reader.Fail("has hashes of the unknown kind '" + hashed.substr(0, 64) + "'");
    (void)reader.Array("files");
    (void)reader.Array("subgroups");
    if (!reader.status().ok()) return reader.status();
    for (size_t i = 0; i < manifest_->subgroups.size(); ++i) {
      const std::string who = who_ + ": subgroup " + std::to_string(i) + ": block ";
      const PartSubgroup& subgroup = manifest_->subgroups[i];
      for (size_t b = 0; b < subgroup.blocks.size(); ++b) {
        const Status placed = CheckPlace(subgroup.blocks[b], manifest_->files, who + std::to_string(b));
        if (!placed.ok()) return placed;
      }
    }
    for (size_t i = 0; i < subgroup_hashes_.size(); ++i) {
      const std::optional<size_t>& wrong = manifest_->hashed ? subgroup_hashes_[i].without : subgroup_hashes_[i].with;
      if (wrong)
        return Status::Invalid(who_ + ": subgroup " + std::to_string(i) + ": block " + std::to_string(*wrong) +
                               " has a hash of another form");
    }
    return Status();
  }

  [[noreturn]] static void Refuse(const Status& status) { throw Refused{status}; }

  const std::string& who_;
  Manifest* const manifest_;
  std::string member_;   // of the body
  std::string part_;     // member of the subgroup
  int skipped_ = 0;      // depth of the unknown member that is being passed over
  uint32_t values_ = 0;  // since the item or member began
  std::set<uint32_t> indices_;
  std::set<std::string> keys_;
  PartSubgroup subgroup_;  // that is being taken
  std::set<std::string> names_;
  uint64_t held_ = 0;
  uint64_t placed_ = 0;
  Hashes hashes_;
  std::vector<Hashes> subgroup_hashes_;
};

// With its end; EINVAL if the first line does not end where it should.
Result<std::string_view> HeadLine(std::string_view text, const std::string& who) {
  const size_t end = text.substr(0, kMaxHeadBytes).find('\n');
  if (end == std::string_view::npos) return Status::Invalid(who + " has no head: it is no manifest, or was cut");
  return text.substr(0, end + 1);
}

}  // namespace

Result<std::string> ManifestText(Manifest* manifest) {
  PartHead& head = manifest->head;
  MLPO_CHECK(IsName(head.job) && IsName(head.tag) && head.rank < head.world_size && !head.attempt.zero());
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
  if (!IsName(head.job) || !IsName(head.tag)) reader.Fail("has a job or tag that is no name");
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
  const Status taken = BodyReader(who, &manifest).Read(body);
  if (!taken.ok()) return taken;
  return manifest;
}

}  // namespace mlpo
