#include "daemon/checkpoint/part_reader.h"

#include <fcntl.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>

#include "daemon/base/file_io.h"
#include "daemon/base/log.h"
#include "daemon/base/plain_text.h"
#include "daemon/checkpoint/block_hash.h"
#include "daemon/checkpoint/folders.h"

namespace mlpo {
namespace {

constexpr size_t kMaxOpenFiles = 256;
constexpr size_t kMaxRuns = 65536;  // that are collected before blocks are read: 2.5 MiB
constexpr uint64_t kPieceBytes = kHashPieceElements * 4;

Status ReadAll(int fd, std::byte* to, uint64_t bytes, uint64_t offset, const std::string& shown) {
  size_t got = 0;
  if (const int error = ReadAt(fd, to, bytes, offset, &got); error != 0)
    return Status::Errno(error, "reading " + shown);
  if (got == bytes) return Status();
  return Status(-EIO, shown + " ends at byte " + std::to_string(offset + got) + ": it was cut");
}

using Buffer = std::vector<std::byte>;
// Told each piece of each array, with the values that it was hashed from.
using TakePiece = std::function<void(uint64_t piece, uint32_t array, const std::byte* values)>;

uint64_t PiecesOfArray(const PartBlock& block) {
  return (StoredArrayBytes(block.count) + kPieceBytes - 1) / kPieceBytes;
}

// With the array's padding, if it is the last one. Its hash.
Result<uint64_t> ReadPiece(int fd, const PartBlock& block, uint64_t piece, uint32_t array, Buffer* buffer,
                           const std::string& shown) {
  const uint64_t array_bytes = StoredArrayBytes(block.count), at = piece * kPieceBytes;
  buffer->resize(std::min(kPieceBytes, array_bytes - at));
  const Status read = ReadAll(fd, buffer->data(), buffer->size(), block.offset + array * array_bytes + at, shown);
  if (!read.ok()) return read;
  return XXH3_64bits(buffer->data(), buffer->size());
}

// A bit that flipped on the way is not there the second time, if what is in the page cache is not asked again.
void ForgetCached(int fd, uint64_t offset, uint64_t bytes, const std::string& shown) {
  spdlog::warn("event=checkpoint_read_again file=\"{}\" offset={} bytes={}", shown, offset, bytes);
  (void)::posix_fadvise(fd, static_cast<off_t>(offset), static_cast<off_t>(bytes), POSIX_FADV_DONTNEED);  // advice
}

Status Damaged(uint64_t offset, uint64_t bytes, const std::string& shown) {
  return Status(-EBADMSG, shown + " is damaged: " + std::to_string(bytes) + " bytes at " + std::to_string(offset) +
                              " have another hash than the manifest says");
}

// All of a block that stores something, compared with its hash; once more if it has another. The hashes of its pieces.
Result<std::vector<uint64_t>> ReadBlock(int fd, const PartBlock& block, const TakePiece& take,
                                        const std::string& shown) {
  Buffer buffer;
  for (int reading = 1; reading <= 2; ++reading) {
    std::vector<uint64_t> hashes;
    for (uint64_t piece = 0; piece < PiecesOfArray(block); ++piece) {
      for (uint32_t array = 0; array < block.stored; ++array) {
        const Result<uint64_t> hash = ReadPiece(fd, block, piece, array, &buffer, shown);
        if (!hash.ok()) return hash.status();
        hashes.push_back(hash.value());
        if (take) take(piece, array, buffer.data());
      }
    }
    if (HashOfPieces(hashes) == block.hash) return hashes;
    if (reading == 1) ForgetCached(fd, block.offset, StoredBytes(block), shown);
  }
  return Damaged(block.offset, StoredBytes(block), shown);
}

// Of a block that has been compared, one piece of all arrays, likewise.
Status ReadKnownPiece(int fd, const PartBlock& block, uint64_t piece, const std::vector<uint64_t>& known,
                      const TakePiece& take, Buffer* buffer, const std::string& shown) {
  for (uint32_t array = 0; array < block.stored; ++array) {
    for (int reading = 1;; ++reading) {
      const Result<uint64_t> hash = ReadPiece(fd, block, piece, array, buffer, shown);
      if (!hash.ok()) return hash.status();
      if (hash.value() == known[piece * block.stored + array]) break;
      const uint64_t offset = block.offset + array * StoredArrayBytes(block.count) + piece * kPieceBytes;
      if (reading == 2) return Damaged(offset, buffer->size(), shown);
      ForgetCached(fd, offset, buffer->size(), shown);
    }
    take(piece, array, buffer->data());
  }
  return Status();
}

}  // namespace

Status CheckStoredBlock(int fd, const PartBlock& block, const std::string& shown) {
  if (block.stored == kStoredNothing) return Status();
  const Result<std::vector<uint64_t>> read = ReadBlock(fd, block, nullptr, shown);
  return read.ok() ? Status() : read.status();
}

PartFileOpener FolderOpener(const std::string& directory, RestorePlan::Parts parts) {
  return [directory, parts = std::move(parts)](uint32_t part, uint32_t file) -> Result<UniqueFd> {
    const PartHead& head = parts[part]->head;
    Result<UniqueFd> top = OpenCheckpointDirectory(directory);
    if (!top.ok()) return top;
    const std::string tag = directory + "/" + head.tag;
    Result<UniqueFd> tag_fd = OpenBelievedFolder(top->get(), head.tag, ".", tag);
    if (!tag_fd.ok()) return tag_fd;
    const std::string name = PartFolderName(head.rank), shown = tag + "/" + name;
    Result<UniqueFd> part_fd = OpenBelievedFolder(tag_fd->get(), name, "..", shown);
    if (!part_fd.ok()) return part_fd;
    const std::string data = DataName(head.attempt, parts[part]->files[file].index);
    return OpenBelievedFile(part_fd->get(), data, O_RDONLY, shown + "/" + data);
  };
}

std::string PartReader::Shown(const SourceRun& run) const {
  const Manifest& part = *plan_->parts()[run.part];
  const PartSubgroup& subgroup = part.subgroups[run.subgroup];
  return "part of rank " + std::to_string(part.head.rank) + " of checkpoint '" + part.head.tag + "', " +
         DataName(part.head.attempt, part.files[subgroup.blocks[run.block].file].index) + ", block " +
         std::to_string(run.block) + " of subgroup '" + PlainText(subgroup.key) + "'";
}

// The lock is not held while a file is opened: that may hang.
Result<std::shared_ptr<const UniqueFd>> OpenParts::FileOf(uint32_t part, uint32_t file) {
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

OpenParts::Pieces OpenParts::PiecesOf(const BlockKey& block) {
  std::lock_guard guard(mutex_);
  const auto found = pieces_.find(block);
  return found == pieces_.end() ? nullptr : found->second;
}

void OpenParts::Keep(const BlockKey& block, Pieces pieces) {
  std::lock_guard guard(mutex_);
  pieces_.emplace(block, std::move(pieces));
}

Status PartReader::Fill(uint64_t first, uint64_t count, const Target& target, uint8_t* stored) {
  *stored = kStoredNothing;
  std::map<OpenParts::BlockKey, std::vector<SourceRun>> wanted;  // so that each block is read once
  size_t runs = 0;
  Status status;
  const auto fill = [&] {
    for (auto& [block, of_block] : wanted) {
      if (status.ok()) status = FillFrom(of_block, first, target, stored);
    }
    wanted.clear();
    runs = 0;
  };
  plan_->ForEachRun(first, first + count, [&](const SourceRun& run) {
    if (!status.ok()) return;
    wanted[{run.part, run.subgroup, run.block}].push_back(run);
    if (++runs == kMaxRuns) fill();
  });
  fill();
  return status;
}

Status PartReader::FillFrom(std::vector<SourceRun>& runs, uint64_t first, const Target& target, uint8_t* stored) {
  const SourceRun& any = runs.front();
  const PartBlock& block = plan_->block(any);
  for (uint32_t array = block.stored; array < 3; ++array) {
    for (const SourceRun& run : runs) std::memset(target.arrays[array] + (run.to - first) * 4, 0, run.count * 4);
  }
  if (block.stored == kStoredNothing) return Status();
  const std::string shown = Shown(any);
  const Result<std::shared_ptr<const UniqueFd>> file = open_->FileOf(any.part, block.file);
  if (!file.ok()) return file.status().Within(shown);
  *stored = std::max(*stored, block.stored);
  if (plan_->parts()[any.part]->hashed) {
    std::sort(runs.begin(), runs.end(), [](const SourceRun& a, const SourceRun& b) { return a.from < b.from; });
    return FillHashed(file.value(), runs, first, target);
  }
  for (const SourceRun& run : runs) {
    for (uint32_t array = 0; array < block.stored; ++array) {
      std::byte* const to = target.arrays[array] + (run.to - first) * 4;
      const Status read =
          ReadAll(file.value()->get(), to, run.count * 4, RestorePlan::SourceOffset(block, array, run.from), shown);
      if (!read.ok()) return read;
      open_->CountRead(run.count * 4);
    }
  }
  return Status();
}

// `runs` are in ascending order of `from`, and no element of the block is in two of them: a tensor's elements are named
// once.
Status PartReader::FillHashed(const std::shared_ptr<const UniqueFd>& file, const std::vector<SourceRun>& runs,
                              uint64_t first, const Target& target) {
  const SourceRun& any = runs.front();
  const PartBlock& block = plan_->block(any);
  const TakePiece take = [&](uint64_t piece, uint32_t array, const std::byte* values) {
    const uint64_t begin = piece * kHashPieceElements, end = begin + kHashPieceElements;
    auto run = std::partition_point(runs.begin(), runs.end(),
                                    [&](const SourceRun& each) { return each.from + each.count <= begin; });
    for (; run != runs.end() && run->from < end; ++run) {
      const uint64_t from = std::max(begin, run->from), stop = std::min(end, run->from + run->count);
      std::memcpy(target.arrays[array] + (run->to - first + from - run->from) * 4, values + (from - begin) * 4,
                  (stop - from) * 4);
    }
  };
  const OpenParts::BlockKey key{any.part, any.subgroup, any.block};
  const OpenParts::Pieces known = open_->PiecesOf(key);
  if (!known) {
    Result<std::vector<uint64_t>> read = ReadBlock(file->get(), block, take, Shown(any));
    if (!read.ok()) return read.status();
    open_->CountRead(StoredBytes(block));
    uint64_t used = 0;
    for (const SourceRun& run : runs) used += run.count;
    if (used < block.count) open_->Keep(key, std::make_shared<const std::vector<uint64_t>>(std::move(*read)));
    return Status();
  }
  Buffer buffer;
  uint64_t next = 0;  // piece that has not been read
  for (const SourceRun& run : runs) {
    const uint64_t last = (run.from + run.count - 1) / kHashPieceElements;
    for (next = std::max(next, run.from / kHashPieceElements); next <= last; ++next) {
      const Status read = ReadKnownPiece(file->get(), block, next, *known, take, &buffer, Shown(any));
      if (!read.ok()) return read;
      open_->CountRead(buffer.size() * block.stored);
    }
  }
  return Status();
}

}  // namespace mlpo
