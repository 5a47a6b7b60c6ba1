// Path: one storage directory and the device under it, proven by real I/O at start; and the files of sessions on it.
//
// The daemon works only in <directory>/mlpo/<daemon uid>/<node>/<client uid>-<job>/<rank>-<generation>/, and for
// objects in objects-<number>/ beside it. Path::Open makes the upper levels (mlpo 1777, below 0700 and owned by us; a
// foreign owner is an error), takes the lock of <uid>/<node>, removes what dead sessions of this <uid>/<node> left, and
// proves writing, reading back, O_DIRECT and its alignment.
//
// Threads: Open in main; whatever may block on a slow file system (files, records, Probe, Release, Retake) in the
// path's keeper thread, but HandOver in that of a checkpoint; the rest is immutable after Open. File descriptors are
// borrowed by the path's queue while files exist.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "daemon/base/status.h"
#include "daemon/base/unique_fd.h"
#include "daemon/config/config.h"
#include "daemon/io/path_record.h"
#include "daemon/types/gc_report.h"
#include "daemon/types/ids.h"

namespace mlpo {

// The `rank` of the file that has a job's objects: none has it.
inline constexpr uint32_t kObjectsRank = kNone;

// Whose file it is; checked against the file's header before use.
struct FileOwner {
  uint32_t client_uid = 0;
  std::string job;
  uint32_t rank = 0;
  uint64_t generation = 0;
};

class Path {
 public:
  // Bytes at the start of each file that hold its header (node, owner, generation, format); extents follow.
  static constexpr uint64_t kFileHeaderBytes = 4096;

  // `node` has been validated. Errors say what is wrong with which directory and what to do: ENOENT, EACCES, EROFS
  // (names ReadWritePaths=), ENOSPC, EEXIST/EBUSY (another daemon of this uid and node), EPERM (foreign owner).
  static Result<std::unique_ptr<Path>> Open(const PathConfig& config, const std::string& name, const std::string& node);
  ~Path();
  Path(const Path&) = delete;
  Path& operator=(const Path&) = delete;

  const std::string& name() const { return name_; }
  const std::string& directory() const { return directory_; }
  const PathConfig& config() const { return config_; }
  bool direct_io() const { return direct_io_; }
  // The NUMA node of its drives; -1: not known, or several.
  int numa_node() const;
  // Free bytes that new extents may take now: file system and configured capacity, less what is reserved.
  uint64_t AvailableBytes() const;
  // Of all files. Thread-safe.
  uint64_t ReservedBytes() const;

  // Proves that it stores a block: see ProbeBlock. For whoever may hang as the path does.
  Status Probe(uint64_t bytes, uint64_t end) const;

  // Closes its folders and gives its lock back, so that the file system can be unmounted or be another daemon's; EBUSY
  // while it has files. Until Retake everything that needs them is EBADF.
  Status Release();
  // As Open does, after Release; nothing happens if it was not released. The file system may be another one, as long as
  // it does O_DIRECT as the old one did.
  Status Retake();

  // Removes what dead sessions left beside the living ones, or says what it would.
  Result<GcReport> CollectGarbage(bool dry_run) const;
  // Shows other hosts, which may not see its lock, that the daemon lives: once a minute.
  Status Beat() const;

  // Its <uid>/<node> folder, and that one's name for messages. EBADF after Release. Thread-safe.
  Result<UniqueFd> OpenFolder() const;
  std::string folder_shown() const;

  // What is kept of it from one daemon to the next, as found by Open.
  const PathRecord& record() const { return record_; }
  Status SaveRecord(const PathRecord& record) const;

  // Makes a session's state file with its header, which it reads back. The FileId is unique on this path and never
  // reused.
  Result<FileId> CreateFile(const FileOwner& owner);
  // Makes [kFileHeaderBytes, kFileHeaderBytes + bytes) of the file exist on storage (fallocate; where that is not to be
  // had, checks free space). Grows only. More than that may be in use: where one path is full, others take its blocks.
  // `unused`: nothing is, until this has ended: then its length is set, and what a failed attempt took is given back.
  Status Reserve(FileId file, uint64_t bytes, bool unused = false);
  // Closes and unlinks the file and its folder. No transfer of it may be in flight. A file that somebody else has put
  // in its place stays: an error.
  Status RemoveFile(FileId file);
  // A file that is given away: where it is, and whose it has been.
  struct Leaving {
    int fd = -1;         // of the file
    int folder_fd = -1;  // of the folder that it is in, as `name`
    std::string name;
    std::string shown;  // in full, for messages
    FileOwner owner;
  };
  // `move` renames it to where it is to be. Once it has gone from its folder its space is not this path's any more, and
  // RemoveFile only closes it. May block. Returns what `move` does.
  Status HandOver(FileId file, const std::function<Status(const Leaving&)>& move);
  // The descriptor for transfers, valid until RemoveFile. Thread-safe.
  int descriptor(FileId file) const;
  // The same, kept open by whoever has it; nullptr if there is no such file. Thread-safe.
  std::shared_ptr<const UniqueFd> Share(FileId file) const;

 private:
  struct Impl;
  Path() = default;

  std::string name_;
  std::string directory_;
  PathConfig config_;
  bool direct_io_ = false;
  PathRecord record_;
  std::unique_ptr<Impl> impl_;
};

// Refuses equal directories (also by another name) and one inside another, with both names.
Status CheckDistinctPaths(const std::vector<PathConfig>& paths);

}  // namespace mlpo
