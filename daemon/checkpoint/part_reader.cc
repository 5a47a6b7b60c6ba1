#include "daemon/checkpoint/part_reader.h"

#include <fcntl.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "daemon/base/log.h"
#include "daemon/checkpoint/block_hash.h"
#include "daemon/checkpoint/folders.h"

namespace mlpo {
namespace {

constexpr size_t kMaxOpenFiles = 256;

Status ReadAll(int fd, std::byte* to, uint64_t bytes, uint64_t offset, const std::string& shown) {
  while (bytes > 0) {
    const ssize_t got = ::pread(fd, to, bytes, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return Status::Errno(errno, "reading " + shown);
    if (got == 0) return Status(-EIO, shown + " ends at byte " + std::to_string(offset) + ": it was cut");
    to += got;
    bytes -= static_cast<uint64_t>(got);
    offset += static_cast<uint64_t>(got);
  }
  return Status();
}

std::string Plain(const std::string& name) {
  std::string plain;
  for (const char c : name) plain += c >= 0x20 && c < 0x7f ? c : '?';
  return plain;
}

}  // namespace

namespace {

Result<uint64_t> HashStored(int fd, const PartBlock& block, const std::string& shown) {
  constexpr uint64_t kPieceBytes = kHashPieceElements * 4;
  const uint64_t array_bytes = StoredArrayBytes(block.count);
  std::vector<std::byte> piece(std::min(kPieceBytes, array_bytes));
  std::vector<uint64_t> hashes;
  for (uint64_t at = 0; at < array_bytes; at += kPieceBytes) {
    const uint64_t bytes = std::min(kPieceBytes, array_bytes - at);
    for (uint32_t array = 0; array < block.stored; ++array) {
      const Status read = ReadAll(fd, piece.data(), bytes, block.offset + array * array_bytes + at, shown);
      if (!read.ok()) return read;
      hashes.push_back(XXH3_64bits(piece.data(), bytes));
    }
  }
  return HashOfPieces(hashes);
}

}  // namespace

// A bit that flipped on the way is not there the second time, if what is in the page cache is not asked again.
Status CheckStoredBlock(int fd, const PartBlock& block, const std::string& shown) {
  if (block.stored == kStoredNothing) return Status();
  for (int reading = 1; reading <= 2; ++reading) {
    const Result<uint64_t> hash = HashStored(fd, block, shown);
    if (!hash.ok()) return hash.status();
    if (hash.value() == block.hash) return Status();
    if (reading == 2) break;
    spdlog::warn("event=checkpoint_read_again file=\"{}\" offset={} bytes={}", shown, block.offset, StoredBytes(block));
    (void)::posix_fadvise(fd, static_cast<off_t>(block.offset), static_cast<off_t>(StoredBytes(block)),
                          POSIX_FADV_DONTNEED);  // advice
  }
  return Status(-EBADMSG, shown + " is damaged: " + std::to_string(StoredBytes(block)) + " bytes at " +
                              std::to_string(block.offset) + " have another hash than the manifest says");
}

PartFileOpener FolderOpener(const std::string& directory, RestorePlan::Parts parts) {
  return [directory, parts = std::move(parts)](uint32_t part, uint32_t file) -> Result<UniqueFd> {
    const PartHead& head = parts[part]->head;
    Result<UniqueFd> top = OpenCheckpointDirectory(directory);
    if (!top.ok()) return top;
    const std::string tag = directory + "/" + head.tag;
    Result<UniqueFd> tag_fd = OpenBelievedFolder(top->get(), head.tag, tag);
    if (!tag_fd.ok()) return tag_fd;
    const std::string name = PartFolderName(head.rank), shown = tag + "/" + name;
    Result<UniqueFd> part_fd = OpenBelievedFolder(tag_fd->get(), name, shown);
    if (!part_fd.ok()) return part_fd;
    const std::string data = DataName(head.attempt, parts[part]->files[file].index);
    return OpenBelievedFile(part_fd->get(), data, O_RDONLY, shown + "/" + data);
  };
}

PartReader::PartReader(std::shared_ptr<const RestorePlan> plan, PartFileOpener open)
    : plan_(std::move(plan)), open_(std::move(open)) {
  for (const auto& part : plan_->parts()) {
    checked_.emplace_back();
    for (const PartSubgroup& subgroup : part->subgroups)
      checked_.back().push_back(std::make_unique<std::atomic<bool>[]>(subgroup.blocks.size()));
  }
}

std::string PartReader::Shown(const SourceRun& run) const {
  const Manifest& part = *plan_->parts()[run.part];
  const PartSubgroup& subgroup = part.subgroups[run.subgroup];
  return "part of rank " + std::to_string(part.head.rank) + " of checkpoint '" + part.head.tag + "', " +
         DataName(part.head.attempt, part.files[subgroup.blocks[run.block].file].index) + ", block " +
         std::to_string(run.block) + " of subgroup '" + Plain(subgroup.key) + "'";
}

// The lock is not held while a file is opened: that may hang.
Result<std::shared_ptr<const UniqueFd>> PartReader::FileOf(uint32_t part, uint32_t file) {
  const Key key{part, file};
  {
    std::lock_guard guard(mutex_);
    const auto found = files_.find(key);
    if (found != files_.end()) {
      by_use_.splice(by_use_.end(), by_use_, found->second.used);
      return found->second.fd;
    }
  }
  Result<UniqueFd> opened = open_(part, file);
  if (!opened.ok()) return opened.status();
  auto fd = std::make_shared<const UniqueFd>(std::move(*opened));
  std::lock_guard guard(mutex_);
  if (files_.contains(key)) return fd;  // another thread was faster; this one is closed after use
  if (files_.size() >= kMaxOpenFiles) {
    files_.erase(by_use_.front());
    by_use_.pop_front();
  }
  files_[key] = {fd, by_use_.insert(by_use_.end(), key)};
  return fd;
}

Status PartReader::Fill(uint64_t first, uint64_t count, const Target& target, uint8_t* stored) {
  *stored = kStoredNothing;
  Status status;
  plan_->ForEachRun(first, first + count, [&](const SourceRun& run) {
    if (status.ok()) status = FillRun(run, first, target, stored);
  });
  return status;
}

Status PartReader::FillRun(const SourceRun& run, uint64_t first, const Target& target, uint8_t* stored) {
  const PartBlock& block = plan_->block(run);
  const uint64_t at = (run.to - first) * 4, bytes = run.count * 4;
  if (block.stored == kStoredNothing) {
    for (std::byte* array : target.arrays) std::memset(array + at, 0, bytes);
    return Status();
  }
  const Result<std::shared_ptr<const UniqueFd>> file = FileOf(run.part, block.file);
  if (!file.ok()) return file.status().Within(Shown(run));
  const int fd = file.value()->get();
  std::atomic<bool>& checked = checked_[run.part][run.subgroup][run.block];
  if (plan_->parts()[run.part]->hashed && !checked.load(std::memory_order_relaxed)) {
    const Status right = CheckStoredBlock(fd, block, Shown(run));
    if (!right.ok()) return right;
    checked.store(true, std::memory_order_relaxed);
    read_bytes_.fetch_add(StoredBytes(block), std::memory_order_relaxed);
  }
  for (uint32_t array = 0; array < 3; ++array) {
    if (!RestorePlan::IsStored(block, array)) {
      std::memset(target.arrays[array] + at, 0, bytes);
      continue;
    }
    const uint64_t from = RestorePlan::SourceOffset(block, array, run.from);
    const Status read = ReadAll(fd, target.arrays[array] + at, bytes, from, Shown(run));
    if (!read.ok()) return read;
    read_bytes_.fetch_add(bytes, std::memory_order_relaxed);
  }
  *stored = std::max(*stored, block.stored);
  return Status();
}

}  // namespace mlpo
