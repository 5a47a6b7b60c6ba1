// ExtentStore: the working files of one session, one on each path, and the room reserved in them.
//
// Owner: the housekeeping thread (every call may block on a slow file system). Paths are borrowed. The files go with
// Remove(), once no transfer uses them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "daemon/base/status.h"
#include "daemon/io/path.h"

namespace mlpo {

class ExtentStore {
 public:
  static Result<std::unique_ptr<ExtentStore>> Create(std::vector<Path*> paths, const FileOwner& owner);

  // Makes room for `extents` of extent_bytes each, always the same: on each path its share (they sum to 1) and a
  // quarter more, or as much as fits. ENOSPC with `what` needs it and the figures if all paths together cannot hold
  // even `extents`; what was reserved before stays.
  Status Reserve(const std::vector<double>& shares, uint64_t extents, uint64_t extent_bytes, const std::string& what);
  // Per path.
  const std::vector<FileId>& files() const { return files_; }
  // Removes all files; the first failure is returned, the others are removed all the same.
  Status Remove();

 private:
  std::vector<Path*> paths_;
  std::vector<FileId> files_;
  std::vector<uint64_t> reserved_;  // extents
};

}  // namespace mlpo
