#include "daemon/checkpoint/part_set.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <tuple>
#include <utility>

#include "daemon/base/name.h"
#include "daemon/base/unique_fd.h"
#include "daemon/checkpoint/folders.h"
#include "daemon/checkpoint/part_header.h"

namespace mlpo {
namespace {

// What tells which of two began later; attempts break ties, so that everyone says the same.
auto Age(const FoundAttempt& attempt) { return std::make_tuple(attempt.head().started_unix_ns, attempt.id); }

Result<uint64_t> SizeOf(int fd, const std::string& shown) {
  struct stat st;
  if (::fstat(fd, &st) != 0) return Status::Errno(errno, "looking at " + shown);
  return static_cast<uint64_t>(st.st_size);
}

// Its head, if the file is as long as that says.
Result<PartHead> ReadHead(int part_fd, const std::string& name, const std::string& shown) {
  Result<UniqueFd> fd = OpenBelievedFile(part_fd, name, O_RDONLY, shown);
  if (!fd.ok()) return fd.status();
  const Result<std::string> beginning = ReadBeginning(fd->get(), kMaxHeadBytes, shown);
  if (!beginning.ok()) return beginning.status();
  Result<PartHead> head = ParseHead(beginning.value(), shown);
  if (!head.ok()) return head;
  const Result<uint64_t> should = ManifestFileBytes(beginning.value(), shown);
  if (!should.ok()) return should.status();
  const Result<uint64_t> size = SizeOf(fd->get(), shown);
  if (!size.ok()) return size.status();
  if (size.value() != should.value())
    return Status::Invalid(shown + " has " + std::to_string(size.value()) + " bytes instead of " +
                           std::to_string(should.value()) + ": it was cut or changed");
  return head;
}

// One part's folder: heads of its manifests, and attempts that have data and no manifest.
Status ScanPart(int part_fd, uint32_t rank, const std::string& shown, std::vector<PartHead>* heads, FoundTag* found) {
  const Result<std::vector<std::string>> names = ListFolder(part_fd, shown);
  if (!names.ok()) return names.status();
  std::map<AttemptId, uint32_t> data;
  std::vector<AttemptId> finished;
  for (const std::string& name : names.value()) {
    const std::string file = shown + "/" + name;
    const std::optional<PartFileName> parsed = ParsePartFileName(name);
    if (!parsed && IsAsideName(name)) {
      ++found->asides;
    } else if (!parsed) {
      found->strange.push_back(file + " is no file of a part");
    } else if (parsed->kind == PartFileName::Kind::kData) {
      ++data[parsed->attempt];
    } else if (parsed->kind == PartFileName::Kind::kManifest) {
      Result<PartHead> head = ReadHead(part_fd, name, file);
      if (head.status().os_errno() == ENOENT) continue;  // somebody removes it
      if (head.ok() && (head->rank != rank || head->tag != found->tag || head->attempt != parsed->attempt))
        head = Status::Invalid(file + " is that of rank " + std::to_string(head->rank) + ", tag '" + head->tag +
                               "', attempt " + AttemptText(head->attempt) + ": it was moved here");
      if (head.ok()) {
        finished.push_back(parsed->attempt);
        heads->push_back(std::move(*head));
      } else {
        found->strange.push_back(head.status().message());
      }
    } else {
      data[parsed->attempt] += 0;  // it may have no data at all
    }
  }
  for (const auto& [attempt, files] : data) {
    if (std::find(finished.begin(), finished.end(), attempt) == finished.end()) found->unfinished[attempt] += files;
  }
  return Status();
}

}  // namespace

std::vector<FoundAttempt> GroupParts(const std::vector<PartHead>& heads) {
  std::map<AttemptId, FoundAttempt> attempts;
  for (const PartHead& head : heads) {
    FoundAttempt& attempt = attempts[head.attempt];
    attempt.id = head.attempt;
    attempt.parts.emplace(head.rank, head);
  }
  std::vector<FoundAttempt> grouped;
  for (auto& [id, attempt] : attempts) {
    const PartHead& first = attempt.head();
    for (const auto& [rank, part] : attempt.parts) {
      if (part.job == first.job && part.tag == first.tag && part.step == first.step &&
          part.world_size == first.world_size)
        continue;
      attempt.wrong = "rank " + std::to_string(rank) + " is of job '" + part.job + "', tag '" + part.tag + "', step " +
                      std::to_string(part.step) + ", " + std::to_string(part.world_size) + " ranks, but rank " +
                      std::to_string(first.rank) + " of job '" + first.job + "', tag '" + first.tag + "', step " +
                      std::to_string(first.step) + ", " + std::to_string(first.world_size) + " ranks";
      break;
    }
    grouped.push_back(std::move(attempt));
  }
  std::sort(grouped.begin(), grouped.end(),
            [](const FoundAttempt& a, const FoundAttempt& b) { return Age(a) < Age(b); });
  return grouped;
}

bool IsLater(const FoundAttempt& a, const FoundAttempt& b) { return Age(a) > Age(b); }

const FoundAttempt* FindAttempt(const FoundTag& found, const AttemptId& id) {
  for (const FoundAttempt& attempt : found.attempts) {
    if (attempt.id == id) return &attempt;
  }
  return nullptr;
}

const FoundAttempt* CompleteAttempt(const FoundTag& found) {
  const FoundAttempt* last = nullptr;
  for (const FoundAttempt& attempt : found.attempts) {
    if (attempt.complete()) last = &attempt;  // they are in order
  }
  return last;
}

Result<FoundTag> ScanTag(int directory_fd, const std::string& tag, const std::string& shown) {
  const std::string shown_tag = shown + "/" + tag;
  if (!IsName(tag)) return Status::Invalid("'" + tag + "' is no tag: [A-Za-z0-9_][A-Za-z0-9._-]{0,127}");
  Result<UniqueFd> tag_fd = OpenBelievedFolder(directory_fd, tag, ".", shown_tag);
  if (!tag_fd.ok()) return tag_fd.status();
  const Result<std::vector<std::string>> names = ListFolder(tag_fd->get(), shown_tag);
  if (!names.ok()) return names.status();
  FoundTag found;
  found.tag = tag;
  std::vector<PartHead> heads;
  for (const std::string& name : names.value()) {
    const std::string part = shown_tag + "/" + name;
    const std::optional<uint32_t> rank = ParsePartFolderName(name);
    if (!rank) {
      found.strange.push_back(part + " is no part");
      continue;
    }
    Result<UniqueFd> part_fd = OpenBelievedFolder(tag_fd->get(), name, "..", part);
    if (part_fd.status().os_errno() == ENOENT) continue;
    const Status scanned = part_fd.ok() ? ScanPart(part_fd->get(), *rank, part, &heads, &found) : part_fd.status();
    if (!scanned.ok()) found.strange.push_back(scanned.message());
  }
  found.attempts = GroupParts(heads);
  return found;
}

Result<std::vector<FoundTag>> ScanDirectory(int directory_fd, const std::string& shown) {
  const Result<std::vector<std::string>> names = ListFolder(directory_fd, shown);
  if (!names.ok()) return names.status();
  std::vector<FoundTag> all;
  for (const std::string& name : names.value()) {
    if (!IsName(name)) continue;
    Result<FoundTag> found = ScanTag(directory_fd, name, shown);
    const int error = found.status().os_errno();
    if (error == ENOENT || error == ENOTDIR || error == ELOOP) continue;  // a file, a link: whatever else is there
    if (!found.ok()) {
      FoundTag unreadable;
      unreadable.tag = name;
      unreadable.strange.push_back(found.status().message());
      all.push_back(std::move(unreadable));
    } else if (!found->attempts.empty() || !found->unfinished.empty() || found->asides > 0) {
      all.push_back(std::move(*found));
    }
  }
  return all;
}

const FoundTag* NewestTag(const std::vector<FoundTag>& found, const std::string& job) {
  const FoundTag* newest = nullptr;
  const auto rank = [&](const FoundTag& tag) {
    const PartHead& head = CompleteAttempt(tag)->head();
    return std::make_tuple(head.job == job, head.step, head.started_unix_ns, tag.tag);
  };
  for (const FoundTag& tag : found) {
    if (CompleteAttempt(tag) != nullptr && (newest == nullptr || rank(tag) > rank(*newest))) newest = &tag;
  }
  return newest;
}

Result<Manifest> ReadManifest(int part_fd, const AttemptId& attempt, const std::string& shown) {
  const std::string name = ManifestName(attempt);
  const Result<std::string> text = ReadText(part_fd, name, kMaxManifestBytes, shown + "/" + name);
  if (!text.ok()) return text.status();
  Result<Manifest> manifest = ParseManifest(text.value(), shown + "/" + name);
  if (manifest.ok() && manifest->head.attempt != attempt)
    return Status::Invalid(shown + "/" + name + " is that of another attempt: it was moved here");
  return manifest;
}

Status CheckFile(int fd, const PartHead& head, const PartFile& file, const WorkingHeaderCheck& working,
                 const std::string& shown) {
  const Result<uint64_t> size = SizeOf(fd, shown);
  if (!size.ok()) return size.status();
  if (size.value() < file.bytes)
    return Status::Invalid(shown + " has " + std::to_string(size.value()) + " bytes instead of " +
                           std::to_string(file.bytes) + ": it was cut");
  if (file.working) return working(fd, file.origin).Within(shown);
  const Result<PartIdentity> identity = ReadPartHeader(fd, shown);
  if (!identity.ok()) return identity.status();
  PartIdentity should = identity.value();  // the uid may be any: a copy of a checkpoint is as good
  should.attempt = head.attempt;
  should.rank = head.rank;
  should.world_size = head.world_size;
  should.step = head.step;
  should.index = file.index;
  should.job = head.job;
  should.tag = head.tag;
  if (identity.value() == should) return Status();
  return Status::Invalid(shown + " is the file of rank " + std::to_string(identity.value().rank) + ", tag '" +
                         identity.value().tag + "', attempt " + AttemptText(identity.value().attempt) +
                         ": it was moved here");
}

Status CheckFiles(int part_fd, const Manifest& manifest, const WorkingHeaderCheck& working, const std::string& shown) {
  for (const PartFile& file : manifest.files) {
    const std::string name = DataName(manifest.head.attempt, file.index);
    Result<UniqueFd> fd = OpenBelievedFile(part_fd, name, O_RDONLY, shown + "/" + name);
    if (!fd.ok()) return fd.status();
    const Status right = CheckFile(fd->get(), manifest.head, file, working, shown + "/" + name);
    if (!right.ok()) return right;
  }
  return Status();
}

Status CheckAttempt(int directory_fd, const FoundAttempt& attempt, const WorkingHeaderCheck& working,
                    const std::string& shown) {
  const std::string shown_tag = shown + "/" + attempt.head().tag;
  Result<UniqueFd> tag_fd = OpenBelievedFolder(directory_fd, attempt.head().tag, ".", shown_tag);
  if (!tag_fd.ok()) return tag_fd.status();
  for (const auto& [rank, head] : attempt.parts) {
    const std::string name = PartFolderName(rank), part = shown_tag + "/" + name;
    Result<UniqueFd> part_fd = OpenBelievedFolder(tag_fd->get(), name, "..", part);
    if (!part_fd.ok()) return part_fd.status();
    const Result<Manifest> manifest = ReadManifest(part_fd->get(), attempt.id, part);
    if (!manifest.ok()) return manifest.status();
    const Status files = CheckFiles(part_fd->get(), manifest.value(), working, part);
    if (!files.ok()) return files;
  }
  return Status();
}

}  // namespace mlpo
