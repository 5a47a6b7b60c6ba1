#include "daemon/io/extent_store.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <optional>
#include <string>
#include <utility>

#include "daemon/base/check.h"
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

// Nothing is in it. It goes when its path answers.
void ExtentStore::DropFile(size_t i, bool next) {
  Path* const path = places_[i].path;
  (next ? next_reserved_ : reserved_)[i] = 0;
  places_[i].keeper->Post(
      [path, file = std::exchange((next ? next_files_ : files_)[i], kNone)] {
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
  const Status reserved = MakeRoom(shares, extents, /*copy=*/false, extent_bytes, what, uses);
  if (!reserved.ok()) return reserved;
  extents_ = extents;
  extent_bytes_ = extent_bytes;
  what_ = what;
  // A session that goes on there is to have as much; if not, its checkpoint is begun anew, which asks for it.
  for (size_t i = 0; i < places_.size(); ++i) {
    if (next_files_[i] == kNone || !uses[i] || next_reserved_[i] >= reserved_[i]) continue;
    const Status next = Grow(i, /*next=*/true, reserved_[i]);
    if (!next.ok())
      spdlog::warn("event=next_file_smaller path={} reason=\"{}\"", places_[i].path->name(), next.message());
  }
  return Status();
}

Status ExtentStore::ReserveAgain(const std::vector<double>& shares, const std::vector<bool>& uses) {
  if (extents_ == 0) return Status();
  return MakeRoom(shares, extents_, /*copy=*/false, extent_bytes_, what_, uses);
}

void ExtentStore::Forget(uint64_t extents) {
  MLPO_CHECK(extents <= extents_);
  extents_ -= extents;
}

Status ExtentStore::ReserveForCopy(const std::vector<double>& shares, const std::vector<bool>& uses) {
  if (extents_ == 0) return Status();
  const Status reserved =
      MakeRoom(shares, extents_, /*copy=*/true, extent_bytes_, what_ + ", and as much again while it is saved,", uses);
  if (!reserved.ok()) return reserved;
  // A path without any room for a next file keeps the one that it has, and is copied.
  for (size_t i = 0; i < places_.size(); ++i) {
    if (next_files_[i] == kNone || next_reserved_[i] > 0) continue;
    const Status dropped = DropNext(static_cast<PathIndex>(i));
    if (!dropped.ok())
      spdlog::warn("event=remove_failed path={} reason=\"{}\"", places_[i].path->name(), dropped.message());
  }
  return Status();
}

Status ExtentStore::MakeRoom(const std::vector<double>& shares, uint64_t extents, bool copy, uint64_t extent_bytes,
                             const std::string& what, const std::vector<bool>& uses) {
  // What is left to a checkpoint keeps its file. Nothing new is written there, however much room an earlier copy has
  // left in it: the next file has to have the whole of the path's share.
  struct Room {
    bool next = false;  // of the next file
    uint64_t kept = 0;  // extents: of the state, in the file that is left
    uint64_t has = 0;   // likewise, from here on in the file that grows
    uint64_t room = 0;
    uint64_t grant = 0;
  };
  const uint64_t needed = copy ? 2 * extents : extents;
  std::vector<Room> rooms(places_.size());
  double share_sum = 0;
  uint64_t total = 0;
  uint64_t all_room = 0;
  for (size_t i = 0; i < places_.size(); ++i) {
    if (!uses[i] || files_[i] == kNone) continue;
    Path* const path = places_[i].path;
    const std::optional<uint64_t> available =
        places_[i].keeper->Ask<uint64_t>([path] { return path->AvailableBytes(); }, kPatience);
    if (!available) continue;
    Room& room = rooms[i];
    room.next = copy && next_files_[i] != kNone;
    const uint64_t has_bytes = room.next ? next_reserved_[i] : reserved_[i];
    room.has = has_bytes / extent_bytes;
    room.room = (has_bytes + *available) / extent_bytes;
    share_sum += shares[i];
  }
  for (size_t i = 0; i < places_.size(); ++i) {
    Room& room = rooms[i];
    const double share = (share_sum > 0 ? shares[i] / share_sum : 0) * static_cast<double>(extents);
    const auto want = static_cast<uint64_t>(std::ceil((copy && !room.next ? 2 : 1) * share * kReserve));
    room.grant = std::min(room.room, std::max(room.has, want));
    if (room.next) room.kept = std::min(reserved_[i] / extent_bytes, static_cast<uint64_t>(std::ceil(share)));
    total += room.kept + room.grant;
    all_room += room.kept + room.room;
  }
  if (all_room < needed) {
    std::string each;
    for (size_t i = 0; i < places_.size(); ++i) {
      each += (i > 0 ? ", '" : "'") + places_[i].path->name() + "' " +
              std::to_string((rooms[i].kept + rooms[i].room) * extent_bytes) +
              (files_[i] == kNone || !uses[i] ? " (not in use)" : "");
    }
    return Status(-ENOSPC, what + " needs " + std::to_string(needed * extent_bytes) +
                               " bytes on the paths, and they have room for " +
                               std::to_string(all_room * extent_bytes) + " (" + each +
                               "): free space, raise capacity or add a path");
  }
  for (size_t i = 0; i < places_.size() && total < needed; ++i) {
    const uint64_t more = std::min(rooms[i].room - rooms[i].grant, needed - total);
    rooms[i].grant += more;
    total += more;
  }
  for (size_t i = 0; i < places_.size(); ++i) {
    if (rooms[i].grant <= rooms[i].has) continue;
    const Status status = Grow(i, rooms[i].next, rooms[i].grant * extent_bytes);
    if (!status.ok()) {  // without it, if the others have room
      std::vector<bool> others = uses;
      others[i] = false;
      return MakeRoom(shares, extents, copy, extent_bytes, what, others).ok() ? Status() : status;
    }
  }
  return Status();
}

// To so many bytes of extents.
Status ExtentStore::Grow(size_t i, bool next, uint64_t bytes) {
  Path* const path = places_[i].path;
  const FileId file = next ? next_files_[i] : files_[i];
  const bool unused = next ? next_reserved_[i] == 0 : extents_ == 0;
  const std::optional<Status> reserved = places_[i].keeper->Ask<Status>(
      [path, file, bytes, unused] { return path->Reserve(file, bytes, unused); }, kPatience);
  if (!reserved) {
    if (unused) DropFile(i, next);  // if it fails after all, it cuts the file
    return NoAnswer(*path);
  }
  if (reserved->ok()) (next ? next_reserved_ : reserved_)[i] = bytes;
  return *reserved;
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
  removed_ = true;
  for (size_t i = 0; i < files_.size(); ++i) {
    Status status = RemoveOn(static_cast<PathIndex>(i));
    if (first.ok() && !status.ok()) first = status;
  }
  return first;
}

}  // namespace mlpo
