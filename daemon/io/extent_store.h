// ExtentStore: the working files of one session, one on each path that can have one, and the room reserved in them.
//
// Each call asks the paths' keepers, and waits kPatience for each at most: a path whose file system does not answer, or
// fails, is left out and has no file of this session until AddMissing. Owner: the housekeeping thread. Paths and
// keepers are borrowed. The files go with Remove(), once no transfer uses them; one on a path that does not answer goes
// when it does.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "daemon/base/status.h"
#include "daemon/io/path.h"
#include "daemon/io/path_keeper.h"

namespace mlpo {

class ExtentStore {
 public:
  static constexpr auto kPatience = std::chrono::seconds(10);
  static constexpr double kReserve = 1.25;  // of a path's share, where it has the room

  struct Place {
    Path* path = nullptr;
    PathKeeper* keeper = nullptr;
  };
  // `uses`, per path: whether it is to have a file now. An error only if no path has one.
  static Result<std::unique_ptr<ExtentStore>> Create(std::vector<Place> places, const FileOwner& owner,
                                                     const std::vector<bool>& uses);

  // Makes room for `extents` of extent_bytes each, always the same: on each path that is used its share (they sum to 1)
  // and a quarter more, or as much as fits. ENOSPC with `what` needs it and the figures if all of these together cannot
  // hold even `extents`; what was reserved before stays. Nothing is put into the files before one has succeeded;
  // files() may be fewer after it.
  Status Reserve(const std::vector<double>& shares, uint64_t extents, uint64_t extent_bytes, const std::string& what,
                 const std::vector<bool>& uses);
  // Nothing was put into so many of them, nor will be: what is asked for after this is for the others.
  void Forget(uint64_t extents);
  // Of the last Reserve that succeeded, without what was forgotten.
  uint64_t extents() const { return extents_; }
  // What has been reserved, with the paths of `uses` alone: whether another could be emptied.
  Status ReserveAgain(const std::vector<double>& shares, const std::vector<bool>& uses);
  // Room for as much again, while a checkpoint holds the first: ENOSPC as above. ReserveAgain does not ask for it. Next
  // files that there is no room for at all are dropped.
  Status ReserveForCopy(const std::vector<double>& shares, const std::vector<bool>& uses);
  // Files on paths that are used and have none: which were made.
  std::vector<std::pair<PathIndex, FileId>> AddMissing(const std::vector<bool>& uses);
  // Per path; kNone where there is none.
  const std::vector<FileId>& files() const { return files_; }
  // Removes the files on one path; nothing may be in them.
  Status RemoveOn(PathIndex path);

  // Further files on the paths where `wanted`, for what is written once those that are there now are left to a
  // checkpoint; ReserveForCopy makes room in them for their paths' whole share. `owner`: with a generation of its own.
  // Where none can be made, there is none: that is no error.
  void MakeNext(const std::vector<bool>& wanted, const FileOwner& owner);
  // Per path; kNone where there is none.
  const std::vector<FileId>& next_files() const { return next_files_; }
  // They are the session's files from now on; those that were so before stay until RemoveLeft, RemoveOn or Remove.
  void UseNext();
  Status DropNext();
  Status RemoveLeft(PathIndex path, FileId file);

  // Removes all files; the first failure is returned, the others are removed all the same. None is made any more.
  Status Remove();

 private:
  Result<FileId> CreateFile(size_t place, const FileOwner& owner);
  Status MakeFile(size_t place);
  Status RemoveFile(size_t place, FileId file);
  void DropFile(size_t place, bool next);
  Status DropNext(PathIndex path);
  Status MakeRoom(const std::vector<double>& shares, uint64_t extents, bool copy, uint64_t extent_bytes,
                  const std::string& what, const std::vector<bool>& uses);
  Status Grow(size_t place, bool next, uint64_t bytes);

  std::vector<Place> places_;
  FileOwner owner_;
  std::vector<FileId> files_;
  std::vector<uint64_t> reserved_;  // bytes
  std::vector<FileId> next_files_;
  std::vector<uint64_t> next_reserved_;             // bytes
  std::vector<std::pair<PathIndex, FileId>> left_;  // by UseNext
  uint64_t extents_ = 0;                            // of the last Reserve that succeeded; 0: nothing is in the files
  bool removed_ = false;
  uint64_t extent_bytes_ = 0;
  std::string what_;
};

}  // namespace mlpo
