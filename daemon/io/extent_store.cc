#include "daemon/io/extent_store.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <string>

namespace mlpo {

Result<std::unique_ptr<ExtentStore>> ExtentStore::Create(std::vector<Path*> paths, const FileOwner& owner) {
  auto store = std::make_unique<ExtentStore>();
  for (Path* path : paths) {
    Result<FileId> file = path->CreateFile(owner);
    if (!file.ok()) {
      (void)store->Remove();  // the failure that counts is the one that is returned
      return file.status();
    }
    store->paths_.push_back(path);
    store->files_.push_back(*file);
    store->reserved_.push_back(0);
  }
  return store;
}

Status ExtentStore::Reserve(const std::vector<double>& shares, uint64_t extents, uint64_t extent_bytes,
                            const std::string& what) {
  std::vector<uint64_t> room(paths_.size());
  std::vector<uint64_t> grant(paths_.size());
  uint64_t total = 0;
  uint64_t all_room = 0;
  for (size_t i = 0; i < paths_.size(); ++i) {
    room[i] = reserved_[i] + paths_[i]->AvailableBytes() / extent_bytes;
    const double want = std::ceil(shares[i] * static_cast<double>(extents) * 1.25);
    grant[i] = std::max(reserved_[i], std::min(room[i], static_cast<uint64_t>(want)));
    total += grant[i];
    all_room += room[i];
  }
  if (all_room < extents) {
    std::string each;
    for (size_t i = 0; i < paths_.size(); ++i) {
      each += (i > 0 ? ", '" : "'") + paths_[i]->name() + "' " + std::to_string(room[i] * extent_bytes);
    }
    return Status(-ENOSPC, what + " needs " + std::to_string(extents * extent_bytes) +
                               " bytes on the paths, and they have room for " +
                               std::to_string(all_room * extent_bytes) + " (" + each +
                               "): free space, raise capacity or add a path");
  }
  for (size_t i = 0; i < paths_.size() && total < extents; ++i) {
    const uint64_t more = std::min(room[i] - grant[i], extents - total);
    grant[i] += more;
    total += more;
  }
  for (size_t i = 0; i < paths_.size(); ++i) {
    if (grant[i] == reserved_[i]) continue;
    Status status = paths_[i]->Reserve(files_[i], grant[i] * extent_bytes);
    if (!status.ok()) return status;
    reserved_[i] = grant[i];
  }
  return Status();
}

Status ExtentStore::Remove() {
  Status first;
  for (size_t i = 0; i < files_.size(); ++i) {
    Status status = paths_[i]->RemoveFile(files_[i]);
    if (first.ok() && !status.ok()) first = status;
  }
  files_.clear();
  return first;
}

}  // namespace mlpo
