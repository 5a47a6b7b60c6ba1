#include <utility>  // before Asio of Boost 1.74 in C++20

#include "daemon/storages.h"

#include <spdlog/spdlog.h>

#include <algorithm>

#include "daemon/scheduler/scheduler.h"
#include "daemon/session/quota_book.h"
#include "proto/abi.h"

namespace mlpo {

Storages::Storages(Parts parts, const std::vector<PathParameters>& parameters) : parts_(std::move(parts)) {
  SetShares(parameters);
}

void Storages::SetShares(const std::vector<PathParameters>& parameters) {
  shares_ = PathShares(parameters, parts_.policy);
}

void Storages::Remove() {
  for (auto& [id, storage] : storages_) {
    if (!storage->store) continue;
    Status removed = storage->store->Remove();
    if (!removed.ok()) spdlog::warn("event=remove_failed reason=\"{}\"", removed.message());
  }
}

uint32_t Storages::BlockCount(const SubgroupSpec& spec) const {
  return Scheduler::BlockCount(spec, parts_.config->memory.block_elements);
}

// Sessions that came while it could not be used get a file there, too.
void Storages::UseAgain(PathIndex path) {
  std::vector<std::pair<SessionId, std::shared_ptr<Storage>>> storages(storages_.begin(), storages_.end());
  parts_.threads->PostHousekeeping([this, path, storages = std::move(storages)] { AddFiles(path, storages); });
}

void Storages::AddFiles(PathIndex path, const std::vector<std::pair<SessionId, std::shared_ptr<Storage>>>& storages) {
  std::vector<bool> only(parts_.paths.size());
  only[path] = true;
  for (const auto& [id, storage] : storages) {
    if (!storage->store) continue;
    (void)storage->store->AddMissing(only);
    // One that it had is told, too: the scheduler may have given it up since.
    const FileId file = storage->store->files()[path];
    if (file != kNone)
      parts_.loop->Post([this, session = id, path, file] { parts_.loop->SetFile(session, path, file); });
  }
}

Status Storages::MakeFiles(Storage& storage, const FileOwner& owner, const std::vector<bool>& uses) {
  std::vector<ExtentStore::Place> places;
  for (size_t i = 0; i < parts_.paths.size(); ++i) places.push_back({parts_.paths[i], parts_.keepers[i]});
  Result<std::unique_ptr<ExtentStore>> store = ExtentStore::Create(std::move(places), owner, uses);
  if (!store.ok()) return store.status();
  storage.store = std::move(*store);
  return Status();
}

Status Storages::Reserve(Storage& storage, const SessionIdentity& identity, uint64_t blocks,
                         const std::vector<bool>& uses) {
  const uint64_t before = storage.store ? storage.store->extents() : 0;
  std::vector<std::pair<PathIndex, FileId>> added;
  if (!storage.store) {
    Status made = MakeFiles(storage, {identity.uid, identity.job, identity.rank, identity.generation}, uses);
    if (!made.ok()) return made;
    storage.owner = "rank " + std::to_string(identity.rank) + " of job '" + identity.job + "'";
  } else {
    added = storage.store->AddMissing(uses);
  }
  Status status =
      storage.store->Reserve(shares_, before + blocks, Scheduler::BufferBytes(parts_.config->memory.block_elements),
                             "the session's state", uses);
  if (before == 0) {  // a path that did not answer in time may have none any more
    parts_.loop->Post([this, id = identity.id, files = storage.store->files()] { parts_.loop->SetFiles(id, files); });
  } else {
    for (const auto& [path, file] : added)
      parts_.loop->Post([this, id = identity.id, on = path, made = file] { parts_.loop->SetFile(id, on, made); });
  }
  return status;
}

void Storages::MakeRoom(SessionId store, const FileOwner& owner, uint64_t bytes, uint64_t ticket) {
  std::shared_ptr<Storage>& storage = storages_[store];
  if (!storage) storage = std::make_shared<Storage>();
  const uint64_t more = bytes - std::min(bytes, storage->quota_bytes);
  if (const Status taken = TakeCapacity(*storage, owner.client_uid, owner.job, more); !taken.ok())
    return parts_.loop->Post(
        [this, store, bytes, ticket, taken] { parts_.loop->RoomMade(store, bytes, ticket, {}, taken); });
  parts_.threads->PostHousekeeping([this, storage, store, owner, bytes, more, ticket, uses = parts_.used_paths()] {
    Status status;
    if (!storage->store) {
      status = MakeFiles(*storage, owner, uses);
      storage->owner = "job '" + owner.job + "'";
    } else {
      (void)storage->store->AddMissing(uses);  // RoomMade tells of all files
    }
    if (status.ok()) {
      status =
          storage->store->Reserve(shares_, bytes / MLPO_ALIGN, MLPO_ALIGN, "what job '" + owner.job + "' keeps", uses);
    }
    std::vector<FileId> files;
    if (status.ok()) files = storage->store->files();
    if (!status.ok()) parts_.threads->PostMain([this, storage, more] { GiveCapacity(*storage, more); });
    parts_.loop->Post(
        [this, store, bytes, ticket, files, status] { parts_.loop->RoomMade(store, bytes, ticket, files, status); });
  });
}

void Storages::PrepareStorage(const SessionIdentity& identity, const SubgroupSpec& spec,
                              std::function<void(Status)> done) {
  std::shared_ptr<Storage>& storage = storages_[identity.id];
  if (!storage) storage = std::make_shared<Storage>();
  const uint64_t blocks = BlockCount(spec);
  const uint64_t bytes = blocks * Scheduler::BufferBytes(parts_.config->memory.block_elements);
  const Status taken = TakeCapacity(*storage, identity.uid, identity.job, bytes);
  if (!taken.ok()) return parts_.threads->PostMain([done = std::move(done), taken] { done(taken); });
  storage->blocks += blocks;
  parts_.threads->PostHousekeeping(
      [this, storage, identity, blocks, uses = parts_.used_paths(), done = std::move(done)] {
        Status status = Reserve(*storage, identity, blocks, uses);
        parts_.threads->PostMain([this, storage, blocks, done, status] {
          if (!status.ok()) GiveBlocks(*storage, blocks);
          done(status);
        });
      });
}

void Storages::ReturnStorage(SessionId session, const SubgroupSpec& spec) {
  const auto found = storages_.find(session);
  if (found == storages_.end() || found->second->going) return;  // all of it goes back, or has
  const std::shared_ptr<Storage>& storage = found->second;
  const uint64_t blocks = BlockCount(spec);
  GiveBlocks(*storage, blocks);
  // What is reserved on the paths is for the next subgroup.
  parts_.threads->PostHousekeeping([storage, blocks] { storage->store->Forget(blocks); });
}

// Of the quotas. It goes back when the storage goes, at the latest.
Status Storages::TakeCapacity(Storage& storage, uint32_t uid, const std::string& job, uint64_t bytes) {
  Status taken = parts_.sessions->quotas().Take(uid, job, Quota::kCapacity, bytes);
  if (!taken.ok()) return taken;
  storage.uid = uid;
  storage.job = job;
  storage.quota_bytes += bytes;
  return taken;
}

void Storages::GiveCapacity(Storage& storage, uint64_t bytes) {
  parts_.sessions->quotas().Give(storage.uid, storage.job, Quota::kCapacity, bytes);
  storage.quota_bytes -= bytes;
}

void Storages::GiveBlocks(Storage& storage, uint64_t blocks) {
  GiveCapacity(storage, blocks * Scheduler::BufferBytes(parts_.config->memory.block_elements));
  storage.blocks -= blocks;
}

// Of each block a second extent: the state as it is saved stays while training writes another.
void Storages::MakeRoomForCopy(const SessionIdentity& identity, std::vector<bool> next,
                               CheckpointRuns::Options::RoomMade done) {
  const auto found = storages_.find(identity.id);
  // No subgroups, no state; or the session has ended, as BeginSave will say.
  if (found == storages_.end() || found->second->going) return done(std::vector<FileId>());
  const FileOwner owner{identity.uid, identity.job, identity.rank, parts_.sessions->NextGeneration()};
  const std::shared_ptr<Storage> storage = found->second;
  // The room stays the session's, for its next checkpoint; and so does its quota.
  const uint64_t both = 2 * storage->blocks * Scheduler::BufferBytes(parts_.config->memory.block_elements);
  const uint64_t more = both - std::min(both, storage->quota_bytes);
  const Status taken = TakeCapacity(*storage, identity.uid, identity.job, more);
  if (!taken.ok()) return done(taken.Within("a checkpoint needs as much room again as the state has"));
  std::vector<bool> uses = parts_.used_paths();
  for (size_t i = 0; i < next.size(); ++i) next[i] = next[i] && uses[i];
  parts_.threads->PostHousekeeping([this, storage, next = std::move(next), owner, more, uses, done = std::move(done)] {
    Status status;
    std::vector<FileId> files;
    if (storage->store) {
      storage->store->MakeNext(next, owner);
      status = storage->store->ReserveForCopy(shares_, uses);
      const std::vector<FileId>& made = storage->store->next_files();
      const bool any = std::any_of(made.begin(), made.end(), [](FileId file) { return file != kNone; });
      if (!status.ok() && any) {
        // Where the session stays in its files, what an earlier copy has had reserved there may do: all is copied.
        const Status dropped = storage->store->DropNext();
        if (!dropped.ok()) spdlog::warn("event=remove_failed reason=\"{}\"", dropped.message());
        status = storage->store->ReserveForCopy(shares_, uses);
      }
      files = storage->store->next_files();
    }
    parts_.threads->PostMain([this, storage, more, done, status, files = std::move(files)]() mutable {
      if (status.ok()) return done(std::move(files));
      GiveCapacity(*storage, more);
      done(status);
    });
  });
}

// Of the session's files on persistent paths: those that were made for this are its own now, or never will be.
void Storages::UseNextFiles(SessionId session, bool used) {
  const auto found = storages_.find(session);
  if (found == storages_.end()) return;
  parts_.threads->PostHousekeeping([storage = found->second, used] {
    if (!storage->store) return;
    if (used) return storage->store->UseNext();
    const Status dropped = storage->store->DropNext();
    if (!dropped.ok()) spdlog::warn("event=remove_failed reason=\"{}\"", dropped.message());
  });
}

void Storages::RemoveLeft(SessionId session, PathIndex path, FileId file) {
  const auto found = storages_.find(session);
  if (found == storages_.end()) return;  // it has ended: all its files go
  parts_.threads->PostHousekeeping([storage = found->second, path, file] {
    const Status removed = storage->store ? storage->store->RemoveLeft(path, file) : Status();
    if (!removed.ok()) spdlog::warn("event=remove_failed reason=\"{}\"", removed.message());
  });
}

// Also of one that has no files yet: it may get some before its state is taken. Who comes when these are going already,
// since its session ended while it made its own, holds nothing and lets go of nothing.
void Storages::HoldFiles(SessionId session, bool needed) {
  if (needed && parts_.sessions->Find(session) != nullptr && !storages_.contains(session))
    storages_[session] = std::make_shared<Storage>();
  const auto found = storages_.find(session);
  if (found == storages_.end() || found->second->going) return;
  Storage& storage = *found->second;
  storage.saves += needed ? 1 : -1;
  if (storage.saves > 0 || !storage.gone) return;
  RemoveFiles(session, found->second);
}

void Storages::OnGone(SessionId session) {
  auto it = storages_.find(session);
  std::shared_ptr<Storage> storage = it == storages_.end() ? nullptr : it->second;
  if (storage && storage->saves > 0) {
    // The rank may come again at once: its files have another generation.
    storage->gone = true;
    if (!IsStore(session)) parts_.sessions->SessionGone(session);
    return parts_.gone();
  }
  RemoveFiles(session, std::move(storage));
}

void Storages::RemoveFiles(SessionId session, std::shared_ptr<Storage> storage) {
  if (storage) storage->going = true;
  // Behind anything that housekeeping still does for this session.
  parts_.threads->PostHousekeeping([this, session, storage] {
    if (storage && storage->store) {
      Status removed = storage->store->Remove();
      if (!removed.ok()) spdlog::warn("event=remove_failed session={} reason=\"{}\"", session, removed.message());
    }
    parts_.threads->PostMain([this, session, storage] {
      const bool told = storage && storage->gone;
      if (storage) GiveCapacity(*storage, storage->quota_bytes);
      storages_.erase(session);
      if (!told && !IsStore(session)) parts_.sessions->SessionGone(session);
      parts_.gone();
    });
  });
}

}  // namespace mlpo
