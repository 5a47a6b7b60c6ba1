#include "daemon/io/extent_store.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <optional>
#include <string>
#include <utility>

#include "daemon/base/log.h"

namespace mlpo {
namespace {

Status NoAnswer(const Path& path) {
  return Status(-ETIMEDOUT, "the file system of path " + path.name() + " (" + path.directory() + ") does not answer");
}

}  // namespace

Result<std::unique_ptr<ExtentStore>> ExtentStore::Create(std::vector<Place> places, const FileOwner& owner,
                                                         const std::vector<bool>& uses) {
  auto store = std::make_unique<ExtentStore>();
  store->places_ = std::move(places);
  store->owner_ = owner;
  store->files_.assign(store->places_.size(), kNone);
  store->reserved_.assign(store->places_.size(), 0);
  Status first(-ENOSPC, "no path can be used: mlpo-ctl paths says why");
  bool any = false;
  for (size_t i = 0; i < store->places_.size(); ++i) {
    if (!uses[i]) continue;
    const Status made = store->MakeFile(i);
    any |= made.ok();
    if (!made.ok() && first.code() == -ENOSPC) first = made;
  }
  if (!any) return first;
  return store;
}

// What comes too late is removed again.
Status ExtentStore::MakeFile(size_t i) {
  Path* const path = places_[i].path;
  std::optional<Result<FileId>> made = places_[i].keeper->Ask<Result<FileId>>(
      [path, owner = owner_] { return path->CreateFile(owner); }, kPatience,
      [path](Result<FileId> late) {
        if (!late.ok()) return;
        const Status removed = path->RemoveFile(*late);
        if (!removed.ok()) spdlog::warn("event=remove_failed path={} reason=\"{}\"", path->name(), removed.message());
      });
  const Status status = !made ? NoAnswer(*path) : made->status();
  if (status.ok()) {
    files_[i] = **made;
  } else {
    spdlog::warn("event=path_left_out path={} job={} rank={} reason=\"{}\"", path->name(), owner_.job, owner_.rank,
                 status.message());
  }
  return status;
}

// Nothing is in it. It goes when its path answers.
void ExtentStore::DropFile(size_t i) {
  Path* const path = places_[i].path;
  reserved_[i] = 0;
  places_[i].keeper->Post(
      [path, file = std::exchange(files_[i], kNone)] {
        const Status removed = path->RemoveFile(file);
        if (!removed.ok()) spdlog::warn("event=remove_failed path={} reason=\"{}\"", path->name(), removed.message());
      },
      kPatience);
}

std::vector<std::pair<PathIndex, FileId>> ExtentStore::AddMissing(const std::vector<bool>& uses) {
  std::vector<std::pair<PathIndex, FileId>> added;
  if (removed_) return added;
  for (size_t i = 0; i < places_.size(); ++i) {
    if (!uses[i] || files_[i] != kNone || !MakeFile(i).ok()) continue;
    added.emplace_back(static_cast<PathIndex>(i), files_[i]);
  }
  return added;
}

Status ExtentStore::Reserve(const std::vector<double>& shares, uint64_t extents, uint64_t extent_bytes,
                            const std::string& what, const std::vector<bool>& uses) {
  std::vector<uint64_t> room(places_.size());   // extents
  std::vector<uint64_t> grant(places_.size());  // likewise
  double share_sum = 0;
  uint64_t total = 0;
  uint64_t all_room = 0;
  for (size_t i = 0; i < places_.size(); ++i) {
    if (!uses[i] || files_[i] == kNone) continue;
    Path* const path = places_[i].path;
    const std::optional<uint64_t> available =
        places_[i].keeper->Ask<uint64_t>([path] { return path->AvailableBytes(); }, kPatience);
    if (!available) continue;
    room[i] = (reserved_[i] + *available) / extent_bytes;
    share_sum += shares[i];
  }
  for (size_t i = 0; i < places_.size(); ++i) {
    const double share = share_sum > 0 ? shares[i] / share_sum : 0;
    const double want = std::ceil(share * static_cast<double>(extents) * 1.25);
    grant[i] = std::min(room[i], std::max(reserved_[i] / extent_bytes, static_cast<uint64_t>(want)));
    total += grant[i];
    all_room += room[i];
  }
  if (all_room < extents) {
    std::string each;
    for (size_t i = 0; i < places_.size(); ++i) {
      each += (i > 0 ? ", '" : "'") + places_[i].path->name() + "' " + std::to_string(room[i] * extent_bytes) +
              (files_[i] == kNone || !uses[i] ? " (not in use)" : "");
    }
    return Status(-ENOSPC, what + " needs " + std::to_string(extents * extent_bytes) +
                               " bytes on the paths, and they have room for " +
                               std::to_string(all_room * extent_bytes) + " (" + each +
                               "): free space, raise capacity or add a path");
  }
  for (size_t i = 0; i < places_.size() && total < extents; ++i) {
    const uint64_t more = std::min(room[i] - grant[i], extents - total);
    grant[i] += more;
    total += more;
  }
  for (size_t i = 0; i < places_.size(); ++i) {
    const uint64_t bytes = grant[i] * extent_bytes;
    if (bytes <= reserved_[i]) continue;
    Path* const path = places_[i].path;
    const bool unused = extents_ == 0;
    const std::optional<Status> reserved = places_[i].keeper->Ask<Status>(
        [path, file = files_[i], bytes, unused] { return path->Reserve(file, bytes, unused); }, kPatience);
    if (!reserved && unused) DropFile(i);  // if it fails after all, it cuts the file
    const Status status = reserved.value_or(NoAnswer(*path));
    if (!status.ok()) {  // without it, if the others have room
      std::vector<bool> others = uses;
      others[i] = false;
      return Reserve(shares, extents, extent_bytes, what, others).ok() ? Status() : status;
    }
    reserved_[i] = bytes;
  }
  extents_ = extents;
  extent_bytes_ = extent_bytes;
  what_ = what;
  return Status();
}

Status ExtentStore::ReserveAgain(const std::vector<double>& shares, const std::vector<bool>& uses) {
  if (extents_ == 0) return Status();
  return Reserve(shares, extents_, extent_bytes_, what_, uses);
}

Status ExtentStore::RemoveOn(PathIndex i) {
  if (files_[i] == kNone) return Status();
  Path* const path = places_[i].path;
  const FileId file = std::exchange(files_[i], kNone);
  reserved_[i] = 0;
  // Not cancelled if it takes long: the keeper does it when its path answers.
  const auto removed = std::make_shared<Status>();
  places_[i].keeper->Post([path, file, removed] { *removed = path->RemoveFile(file); }, kPatience);
  if (!places_[i].keeper->Ask<bool>([] { return true; }, kPatience)) return NoAnswer(*path);
  return *removed;
}

Status ExtentStore::Remove() {
  Status first;
  removed_ = true;
  for (size_t i = 0; i < files_.size(); ++i) {
    Status status = RemoveOn(static_cast<PathIndex>(i));
    if (first.ok() && !status.ok()) first = status;
  }
  return first;
}

}  // namespace mlpo
