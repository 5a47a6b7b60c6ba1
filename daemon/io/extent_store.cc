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
  store->next_files_.assign(store->places_.size(), kNone);
  store->next_reserved_.assign(store->places_.size(), 0);
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
Result<FileId> ExtentStore::CreateFile(size_t i, const FileOwner& owner) {
  Path* const path = places_[i].path;
  std::optional<Result<FileId>> made = places_[i].keeper->Ask<Result<FileId>>(
      [path, owner] { return path->CreateFile(owner); }, kPatience,
      [path](Result<FileId> late) {
        if (!late.ok()) return;
        const Status removed = path->RemoveFile(*late);
        if (!removed.ok()) spdlog::warn("event=remove_failed path={} reason=\"{}\"", path->name(), removed.message());
      });
  if (!made) return NoAnswer(*path);
  return std::move(*made);
}

Status ExtentStore::MakeFile(size_t i) {
  const Result<FileId> made = CreateFile(i, owner_);
  if (made.ok()) {
    files_[i] = made.value();
  } else {
    spdlog::warn("event=path_left_out path={} job={} rank={} reason=\"{}\"", places_[i].path->name(), owner_.job,
                 owner_.rank, made.status().message());
  }
  return made.status();
}

std::vector<std::pair<PathIndex, FileId>> ExtentStore::AddMissing(const std::vector<bool>& uses) {
  std::vector<std::pair<PathIndex, FileId>> added;
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
    room[i] = (HasBytes(i) + *available) / extent_bytes;
    share_sum += shares[i];
  }
  for (size_t i = 0; i < places_.size(); ++i) {
    const double share = share_sum > 0 ? shares[i] / share_sum : 0;
    const double want = std::ceil(share * static_cast<double>(extents) * 1.25);
    grant[i] = std::min(room[i], std::max(HasBytes(i) / extent_bytes, static_cast<uint64_t>(want)));
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
    if (grant[i] * extent_bytes <= HasBytes(i)) continue;
    Path* const path = places_[i].path;
    const bool next = next_files_[i] != kNone;
    const FileId file = next ? next_files_[i] : files_[i];
    const uint64_t bytes = grant[i] * extent_bytes - (next ? reserved_[i] : 0);
    const std::optional<Status> reserved =
        places_[i].keeper->Ask<Status>([path, file, bytes] { return path->Reserve(file, bytes); }, kPatience);
    const Status status = reserved.value_or(NoAnswer(*path));
    if (!status.ok()) {  // without it, if the others have room
      std::vector<bool> others = uses;
      others[i] = false;
      return Reserve(shares, extents, extent_bytes, what, others).ok() ? Status() : status;
    }
    (next ? next_reserved_ : reserved_)[i] = bytes;
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

Status ExtentStore::ReserveForCopy(const std::vector<double>& shares, const std::vector<bool>& uses) {
  if (extents_ == 0) return Status();
  const uint64_t extents = extents_;
  const std::string what = what_;
  const Status reserved =
      Reserve(shares, 2 * extents, extent_bytes_, what + ", and as much again while it is saved,", uses);
  extents_ = extents;
  what_ = what;
  return reserved;
}

// Not cancelled if it takes long: the keeper does it when its path answers.
Status ExtentStore::RemoveFile(size_t i, FileId file) {
  Path* const path = places_[i].path;
  const auto removed = std::make_shared<Status>();
  places_[i].keeper->Post([path, file, removed] { *removed = path->RemoveFile(file); }, kPatience);
  if (!places_[i].keeper->Ask<bool>([] { return true; }, kPatience)) return NoAnswer(*path);
  return *removed;
}

Status ExtentStore::RemoveOn(PathIndex i) {
  Status first = DropNext(i);
  const auto note = [&first](const Status& status) {
    if (first.ok() && !status.ok()) first = status;
  };
  for (auto it = left_.begin(); it != left_.end();) {
    if (it->first != i) {
      ++it;
      continue;
    }
    note(RemoveFile(i, it->second));
    it = left_.erase(it);
  }
  if (files_[i] == kNone) return first;
  reserved_[i] = 0;
  note(RemoveFile(i, std::exchange(files_[i], kNone)));
  return first;
}

// ---- Files that are left to a checkpoint ----

// A path that cannot make one keeps its file, and is copied.
void ExtentStore::MakeNext(const std::vector<bool>& wanted, const FileOwner& owner) {
  for (size_t i = 0; i < places_.size(); ++i) {
    if (!wanted[i] || files_[i] == kNone || next_files_[i] != kNone) continue;
    const Result<FileId> made = CreateFile(i, owner);
    if (made.ok()) {
      next_files_[i] = made.value();
    } else {
      spdlog::warn("event=checkpoint_copies path={} reason=\"{}\"", places_[i].path->name(), made.status().message());
    }
  }
}

void ExtentStore::UseNext() {
  for (size_t i = 0; i < places_.size(); ++i) {
    if (next_files_[i] == kNone) continue;
    left_.emplace_back(static_cast<PathIndex>(i), std::exchange(files_[i], std::exchange(next_files_[i], kNone)));
    reserved_[i] = std::exchange(next_reserved_[i], 0);
  }
}

Status ExtentStore::DropNext(PathIndex i) {
  if (next_files_[i] == kNone) return Status();
  next_reserved_[i] = 0;
  return RemoveFile(i, std::exchange(next_files_[i], kNone));
}

Status ExtentStore::DropNext() {
  Status first;
  for (size_t i = 0; i < places_.size(); ++i) {
    const Status status = DropNext(static_cast<PathIndex>(i));
    if (first.ok() && !status.ok()) first = status;
  }
  return first;
}

Status ExtentStore::RemoveLeft(PathIndex path, FileId file) {
  if (std::erase(left_, std::pair(path, file)) == 0) return Status();
  return RemoveFile(path, file);
}

Status ExtentStore::Remove() {
  Status first;
  for (size_t i = 0; i < files_.size(); ++i) {
    Status status = RemoveOn(static_cast<PathIndex>(i));
    if (first.ok() && !status.ok()) first = status;
  }
  return first;
}

}  // namespace mlpo
