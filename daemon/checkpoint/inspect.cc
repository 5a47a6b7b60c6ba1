#include "daemon/checkpoint/inspect.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>
#include <vector>

#include "daemon/base/name.h"
#include "daemon/base/unique_fd.h"
#include "daemon/checkpoint/folders.h"
#include "daemon/checkpoint/part_files.h"
#include "daemon/checkpoint/part_reader.h"
#include "daemon/checkpoint/shard_runs.h"

namespace mlpo {
namespace {

using nlohmann::json;

constexpr auto kReplace = json::error_handler_t::replace;

std::string Dump(const json& value) { return value.dump(-1, ' ', false, kReplace); }

Result<UniqueFd> OpenPart(int directory_fd, const std::string& directory, const PartHead& head, std::string* shown) {
  const std::string tag = directory + "/" + head.tag, name = PartFolderName(head.rank);
  Result<UniqueFd> tag_fd = OpenBelievedFolder(directory_fd, head.tag, ".", tag);
  if (!tag_fd.ok()) return tag_fd;
  *shown = tag + "/" + name;
  return OpenBelievedFolder(tag_fd->get(), name, "..", *shown);
}

// The manifests of a complete attempt, and what is wrong with their files.
std::vector<std::shared_ptr<const Manifest>> ReadParts(int directory_fd, const std::string& directory,
                                                       const FoundAttempt& attempt, const WorkingHeaderCheck& working,
                                                       std::vector<std::string>* problems) {
  std::vector<std::shared_ptr<const Manifest>> parts;
  for (const auto& [rank, head] : attempt.parts) {
    std::string shown;
    Result<UniqueFd> part_fd = OpenPart(directory_fd, directory, head, &shown);
    Result<Manifest> manifest =
        part_fd.ok() ? ReadManifest(part_fd->get(), attempt.id, shown) : Result<Manifest>(part_fd.status());
    if (!manifest.ok()) {
      problems->push_back(manifest.status().message());
      continue;
    }
    const Status files = CheckFiles(part_fd->get(), *manifest, working, shown);
    if (!files.ok()) problems->push_back(files.message());
    parts.push_back(std::make_shared<const Manifest>(std::move(*manifest)));
  }
  return parts;
}

uint64_t BytesOf(const std::vector<std::shared_ptr<const Manifest>>& parts) {
  uint64_t bytes = 0;
  for (const auto& part : parts)
    for (const PartFile& file : part->files) bytes += file.bytes;
  return bytes;
}

// Whether the parts hold whole tensors.
void CheckTensors(const std::vector<std::shared_ptr<const Manifest>>& parts, std::vector<std::string>* problems) {
  std::map<std::string, std::vector<const TensorShard*>> tensors;
  for (const auto& part : parts) {
    for (const PartSubgroup& subgroup : part->subgroups)
      for (const PartTensor& tensor : subgroup.tensors) tensors[tensor.name].push_back(&tensor.shard);
  }
  for (const auto& [name, shards] : tensors) {
    const std::string who = "tensor '" + name + "'";
    const auto other = [&](const TensorShard* shard) { return shard->global_shape != shards.front()->global_shape; };
    if (std::any_of(shards.begin(), shards.end(), other)) {
      problems->push_back(who + " has different global shapes in the parts");
      continue;
    }
    const Status tiled = CheckTiling(shards, who);
    if (!tiled.ok()) problems->push_back(tiled.message());
  }
}

void CheckBlocks(const std::string& directory, const std::vector<std::shared_ptr<const Manifest>>& parts,
                 std::vector<std::string>* problems) {
  const PartFileOpener open = FolderOpener(directory, parts);
  for (uint32_t p = 0; p < parts.size(); ++p) {
    const Manifest& part = *parts[p];
    if (!part.hashed) {
      problems->push_back("the part of rank " + std::to_string(part.head.rank) +
                          " has no hashes: whether it has changed cannot be told");
      continue;
    }
    std::map<uint32_t, UniqueFd> files;
    for (const PartSubgroup& subgroup : part.subgroups) {
      for (const PartBlock& block : subgroup.blocks) {
        if (block.stored == kStoredNothing) continue;
        UniqueFd& fd = files[block.file];
        if (!fd) {
          Result<UniqueFd> opened = open(p, block.file);
          if (!opened.ok()) continue;  // CheckFiles has said so
          fd = std::move(*opened);
        }
        const Status right = CheckStoredBlock(fd.get(), block,
                                              directory + "/" + part.head.tag + "/" + PartFolderName(part.head.rank) +
                                                  "/" + DataName(part.head.attempt, part.files[block.file].index));
        if (!right.ok())
          problems->push_back(right.message() + " (elements " + std::to_string(block.first) + " to " +
                              std::to_string(block.first + block.count) + " of subgroup '" + subgroup.key + "')");
      }
    }
  }
}

}  // namespace

Result<std::string> ListCheckpoints(const std::string& directory, const WorkingHeaderCheck& working) {
  Result<UniqueFd> fd = OpenCheckpointDirectory(directory);
  if (!fd.ok()) return fd.status();
  const Result<std::vector<FoundTag>> tags = ScanDirectory(fd->get(), directory);
  if (!tags.ok()) return tags.status();
  json list = json::array();
  for (const FoundTag& tag : tags.value()) {
    for (const FoundAttempt& attempt : tag.attempts) {
      std::vector<std::string> problems;
      const auto parts = ReadParts(fd->get(), directory, attempt, working, &problems);
      const char* state = !attempt.complete() ? "incomplete" : problems.empty() ? "complete" : "damaged";
      if (!attempt.wrong.empty()) problems.push_back(attempt.wrong);
      list.push_back({{"tag", tag.tag},
                      {"step", attempt.head().step},
                      {"job", attempt.head().job},
                      {"world_size", attempt.head().world_size},
                      {"parts", attempt.parts.size()},
                      {"attempt", AttemptText(attempt.id)},
                      {"started_unix_ns", attempt.head().started_unix_ns},
                      {"state", state},
                      {"bytes", BytesOf(parts)},
                      {"problems", problems}});
    }
    for (const auto& [attempt, files] : tag.unfinished) {
      const auto same = [&id = attempt](const FoundAttempt& other) { return other.id == id; };
      if (std::any_of(tag.attempts.begin(), tag.attempts.end(), same)) continue;
      list.push_back({{"tag", tag.tag},
                      {"parts", 0},
                      {"attempt", AttemptText(attempt)},
                      {"state", "incomplete"},
                      {"problems", json::array({std::to_string(files) + " data files without a manifest"})}});
    }
    if (tag.asides > 0)
      list.push_back({{"tag", tag.tag},
                      {"parts", 0},
                      {"state", "incomplete"},
                      {"problems", json::array({std::to_string(tag.asides) +
                                                " files that have no name yet: of a save that goes on or was cut"})}});
    if (!tag.strange.empty() && tag.attempts.empty() && tag.unfinished.empty() && tag.asides == 0)
      list.push_back({{"tag", tag.tag}, {"parts", 0}, {"state", "damaged"}, {"problems", tag.strange}});
  }
  return Dump({{"directory", directory}, {"checkpoints", std::move(list)}});
}

Result<std::string> VerifyCheckpoint(const std::string& directory, const std::optional<std::string>& tag,
                                     const WorkingHeaderCheck& working, bool* right) {
  Result<UniqueFd> fd = OpenCheckpointDirectory(directory);
  if (!fd.ok()) return fd.status();
  FoundTag found;
  if (tag) {
    Result<FoundTag> scanned = ScanTag(fd->get(), *tag, directory);
    if (!scanned.ok()) return scanned.status();
    found = std::move(*scanned);
  } else {
    const Result<std::vector<FoundTag>> tags = ScanDirectory(fd->get(), directory);
    if (!tags.ok()) return tags.status();
    if (const FoundTag* newest = NewestTag(tags.value(), "")) found = *newest;
  }
  const FoundAttempt* attempt = CompleteAttempt(found);
  if (attempt == nullptr) {
    std::string text = directory + " has no complete checkpoint" + (tag ? " '" + *tag + "'" : "");
    for (const FoundAttempt& cut : found.attempts)
      text += "; attempt " + AttemptText(cut.id) + " has " + std::to_string(cut.parts.size()) + " of " +
              std::to_string(cut.head().world_size) + " parts";
    for (const std::string& strange : found.strange) text += "; " + strange;
    return Status(-ENOENT, text);
  }
  std::vector<std::string> problems;
  const auto parts = ReadParts(fd->get(), directory, *attempt, working, &problems);
  CheckTensors(parts, &problems);
  CheckBlocks(directory, parts, &problems);
  *right = problems.empty();
  return Dump({{"directory", directory},
               {"tag", found.tag},
               {"step", attempt->head().step},
               {"attempt", AttemptText(attempt->id)},
               {"ok", problems.empty()},
               {"bytes", BytesOf(parts)},
               {"problems", problems}});
}

Result<std::string> RemoveCheckpoint(const std::string& directory, const std::string& tag,
                                     const WorkingHeaderReader& working, bool* all) {
  Result<UniqueFd> fd = OpenCheckpointDirectory(directory);
  if (!fd.ok()) return fd.status();
  if (!IsName(tag)) return Status::Invalid("'" + tag + "' is no tag: [A-Za-z0-9_][A-Za-z0-9._-]{0,127}");
  const std::string shown_tag = directory + "/" + tag;
  Result<UniqueFd> tag_fd = OpenFolder(fd->get(), tag, shown_tag);
  if (!tag_fd.ok()) return tag_fd.status();
  const Result<std::vector<std::string>> names = ListFolder(tag_fd->get(), shown_tag);
  if (!names.ok()) return names.status();
  uint32_t removed = 0;
  std::vector<std::string> kept;
  for (const std::string& name : names.value()) {
    const std::string shown = shown_tag + "/" + name;
    const std::optional<uint32_t> rank = ParsePartFolderName(name);
    if (!rank) {
      kept.push_back(shown + " is no part");
      continue;
    }
    Result<UniqueFd> part = OpenFolder(tag_fd->get(), name, shown);
    Result<std::vector<std::string>> files =
        part.ok() ? ListFolder(part->get(), shown) : Result<std::vector<std::string>>(part.status());
    if (!files.ok()) {
      kept.push_back(files.status().message());
      continue;
    }
    std::set<AttemptId> attempts;
    for (const std::string& file : *files) {
      const std::optional<PartFileName> parsed = ParsePartFileName(file);
      if (parsed) attempts.insert(parsed->attempt);
      if (!parsed && !IsAsideName(file)) kept.push_back(shown + "/" + file + " is no file of a part");
    }
    for (const AttemptId& attempt : attempts) {
      const Result<PartFiles::Removed> gone =
          PartFiles::RemovePart(part->get(), {*rank, attempt, working, nullptr, nullptr}, shown, &kept);
      if (gone.ok()) removed += gone.value().files;
      if (!gone.ok()) kept.push_back(gone.status().message());
    }
    const Result<uint32_t> asides = PartFiles::RemoveAsides(part->get(), shown, &kept);
    if (asides.ok()) removed += asides.value();
    if (!asides.ok()) kept.push_back(asides.status().message());
    const Result<bool> emptied = RemoveEmptyFolder(tag_fd->get(), name, shown);
    if (!emptied.ok()) kept.push_back(emptied.status().message());
  }
  const Result<bool> emptied = RemoveEmptyFolder(fd->get(), tag, shown_tag);
  if (!emptied.ok()) kept.push_back(emptied.status().message());
  *all = kept.empty();
  return Dump({{"directory", directory}, {"tag", tag}, {"removed", removed}, {"kept", kept}});
}

}  // namespace mlpo
