#include "daemon/checkpoint/part_files.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <limits>
#include <map>
#include <set>
#include <thread>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/base/log.h"
#include "daemon/base/name.h"
#include "daemon/checkpoint/folders.h"
#include "daemon/checkpoint/part_header.h"

namespace mlpo {
namespace {

// How long ranks that begin together may be in each other's way: a look is short, and so is a removal as a rule.
constexpr std::chrono::milliseconds kRanksMeet{1000};
constexpr std::chrono::milliseconds kLookAgain{50};

PartIdentity IdentityOf(const PartHead& head, uint32_t index) {
  PartIdentity identity;
  identity.attempt = head.attempt;
  identity.rank = head.rank;
  identity.world_size = head.world_size;
  identity.step = head.step;
  identity.index = index;
  identity.uid = ::geteuid();
  identity.started_unix_ns = head.started_unix_ns;
  identity.job = head.job;
  identity.tag = head.tag;
  return identity;
}

WorkingHeaderCheck CheckBy(const WorkingHeaderReader& read) {
  return [read](int fd, const WorkingOrigin& origin) {
    const Result<WorkingOrigin> found = read(fd);
    if (!found.ok()) return found.status();
    return found.value() == origin ? Status() : Status::Invalid("it is the working file of another session");
  };
}

// Whether what is written there stays in memory: that of the process that writes it, and as long as the machine runs.
Result<bool> IsMemory(int fd, const std::string& shown) {
  struct statfs fs;
  if (::fstatfs(fd, &fs) != 0) return Status::Errno(errno, "looking at the file system of " + shown);
  return fs.f_type == TMPFS_MAGIC || fs.f_type == RAMFS_MAGIC || fs.f_type == HUGETLBFS_MAGIC;
}

// What is removed under a save then is noticed at its commit only.
void WarnOfNoLocks(const std::string& shown) {
  spdlog::warn(
      "event=checkpoint_unlocked file=\"{}\" reason=\"its file system has no locks (flock): whoever removes "
      "checkpoints there, or saves under the same tag, may spoil a save that is under way\"",
      shown);
}

}  // namespace

// ---- Beginning ----

Result<std::unique_ptr<PartFiles>> PartFiles::Begin(Options options) {
  const PartHead& head = options.head;
  if (!IsName(head.tag)) return Status::Invalid("'" + head.tag + "' is no tag: [A-Za-z0-9_][A-Za-z0-9._-]{0,127}");
  MLPO_CHECK(IsName(head.job) && head.rank < head.world_size && !head.attempt.zero() && options.journal_fd >= 0 &&
             options.working);
  std::unique_ptr<PartFiles> part(new PartFiles(std::move(options)));
  // Ranks that begin, and one that takes empty folders back, may meet: then a folder is gone that was just opened.
  Status status;
  for (int attempt = 0; attempt < 16; ++attempt) {
    status = part->OpenFolders();
    if (status.ok()) status = part->MakeWay();
    if (status.ok()) status = part->MakeDataFile();
    if (status.ok()) {
      const Result<bool> memory = IsMemory(part->data_.get(), part->shown_);
      if (!memory.ok()) return memory.status();
      if (memory.value())
        spdlog::warn(
            "event=checkpoint_in_memory directory=\"{}\" reason=\"its file system is memory: a checkpoint there "
            "counts as the daemon's, and is gone with the machine\"",
            part->options_.directory);
      return part;
    }
    if (status.os_errno() != ENOENT || !part->directory_) break;
    part->record_.files.clear();
    part->data_.reset();
  }
  return status;  // the destructor takes back what there is
}

Result<std::unique_ptr<PartFiles>> PartFiles::Adopt(Options options, UniqueFd data, UniqueFd manifest, uint32_t uid) {
  const PartHead& head = options.head;
  if (!IsName(head.tag)) return Status::Invalid("'" + head.tag + "' is no tag: [A-Za-z0-9_][A-Za-z0-9._-]{0,127}");
  MLPO_CHECK(IsName(head.job) && head.rank < head.world_size && !head.attempt.zero());
  std::unique_ptr<PartFiles> part(new PartFiles(std::move(options)));
  part->shown_ = "the client's files of rank " + std::to_string(part->options_.head.rank);
  ino_t inodes[2] = {};
  dev_t devices[2] = {};
  const int fds[2] = {data.get(), manifest.get()};
  for (int i = 0; i < 2; ++i) {
    const std::string shown = i == 0 ? "the data file" : "the manifest";
    struct stat st;
    const int flags = ::fcntl(fds[i], F_GETFL);
    if (flags < 0 || ::fstat(fds[i], &st) != 0) return Status::Errno(errno, "looking at " + shown + " that was passed");
    const bool right = S_ISREG(st.st_mode) && st.st_uid == uid && st.st_size == 0 && (flags & O_ACCMODE) == O_RDWR &&
                       !(flags & (O_APPEND | O_PATH));
    if (!right)
      return Status::Invalid(shown + " that was passed is no empty file of uid " + std::to_string(uid) +
                             " that is open for reading and writing");
    const Result<bool> memory = IsMemory(fds[i], shown);
    if (!memory.ok()) return memory.status();
    if (memory.value())
      return Status::Invalid(shown +
                             " that was passed is memory (memfd, tmpfs or huge pages), which a checkpoint would "
                             "take from the daemon: pass a file on storage");
    inodes[i] = st.st_ino;
    devices[i] = st.st_dev;
  }
  if (inodes[0] == inodes[1] && devices[0] == devices[1])
    return Status::Invalid("data file and manifest that were passed are one file");
  part->data_ = std::move(data);
  part->manifest_ = std::move(manifest);
  const Status headed = part->MakeHeader(part->data_.get(), part->shown_);
  if (!headed.ok()) return headed;
  return part;
}

Status PartFiles::OpenFolders() {
  const PartHead& head = options_.head;
  directory_.reset();
  Result<UniqueFd> directory = OpenCheckpointDirectory(options_.directory);
  if (!directory.ok()) return directory.status();
  directory_ = std::move(*directory);
  const Result<FolderMark> mark = MarkOf(directory_.get(), options_.directory);
  if (!mark.ok()) return mark.status();
  const Result<FolderMark> parent = MarkOfParent(directory_.get(), options_.directory);
  record_.directory = options_.directory;
  record_.mark = mark.value();
  record_.parent = parent.ok() ? parent.value() : FolderMark();  // it may be closed to us; then a record stays longer
  record_.job = head.job;
  record_.tag = head.tag;
  record_.rank = head.rank;
  record_.attempt = head.attempt;
  if (!recorded_) {
    const Result<bool> taken = IsInJournal(options_.journal_fd, options_.journal_shown, record_);
    if (!taken.ok()) return taken.status();
    if (taken.value())
      return Status(-EEXIST, "attempt " + AttemptText(head.attempt) + " of rank " + std::to_string(head.rank) +
                                 " is being saved by this daemon, or was, and its rest is still there: each save needs "
                                 "an attempt of its own");
  }
  // First in the journal: the folders are to go, too, if nothing comes of it.
  const Status recorded = Record();
  if (!recorded.ok()) return recorded;
  recorded_ = true;

  const std::string tag = options_.directory + "/" + head.tag;
  Result<UniqueFd> tag_fd = MakeFolder(directory_.get(), head.tag, tag);
  if (!tag_fd.ok()) return tag_fd.status();
  tag_ = std::move(*tag_fd);
  shown_ = tag + "/" + PartFolderName(head.rank);
  Result<UniqueFd> part = MakeFolder(tag_.get(), PartFolderName(head.rank), shown_);
  if (!part.ok()) return part.status();
  part_ = std::move(*part);
  return Status();
}

// What this rank's earlier attempts left, unless one of them is part of a complete checkpoint. That is looked at only
// if there is a manifest of one: without it none can be complete. So a save of many ranks reads nothing in most cases.
// Another job's stays: it may be under way, with this rank's part committed and so without a lock. So does one of this
// job's that other ranks are still saving: it may yet be complete, and this save be refused to one of them for it.
// Ranks begin together, and look at and remove each other's parts of the same attempts: who finds a lock looks again.
Status PartFiles::MakeWay() {
  const AttemptId& own = options_.head.attempt;
  const Result<std::vector<std::string>> names = ListFolder(part_.get(), shown_);
  if (!names.ok()) return names.status();
  std::set<AttemptId> attempts, complete, hollow;
  bool manifest = false;
  for (const std::string& name : names.value()) {
    const std::optional<PartFileName> parsed = ParsePartFileName(name);
    if (!parsed) continue;
    const bool whole = parsed->kind == PartFileName::Kind::kManifest;
    if (whole && parsed->attempt == own)
      return Status(-EEXIST, shown_ + " has the part of this attempt already: a save of a rank has one part");
    attempts.insert(parsed->attempt);
    manifest |= whole;
  }
  if (manifest) {
    const Status looked = LookForComplete(&complete, &hollow);
    if (!looked.ok()) return looked;
  }
  const auto until = std::chrono::steady_clock::now() + kRanksMeet;
  for (const AttemptId& attempt : attempts) {
    if (complete.contains(attempt)) continue;
    std::vector<std::string> kept;
    for (;;) {
      kept.clear();
      const Result<bool> met = RemoveCut(attempt, hollow.contains(attempt), &kept);
      if (!met.ok()) return met.status();
      if (!met.value() || std::chrono::steady_clock::now() >= until) break;
      std::this_thread::sleep_for(kLookAgain);
    }
    for (const std::string& reason : kept) spdlog::warn("event=checkpoint_file_kept reason=\"{}\"", reason);
  }
  std::vector<std::string> kept;
  const Result<uint32_t> asides = RemoveAsides(part_.get(), shown_, &kept);
  if (!asides.ok()) return asides.status();
  for (const std::string& reason : kept) spdlog::warn("event=checkpoint_file_kept reason=\"{}\"", reason);
  return Status();
}

// This rank's part of an attempt that is not complete. True if it stays because somebody has a lock.
Result<bool> PartFiles::RemoveCut(const AttemptId& attempt, bool hollow, std::vector<std::string>* kept) {
  const AttemptId& own = options_.head.attempt;
  bool saved_by_others = false;
  // Asked with its lock held: it may have become complete since, and then earlier ones have gone for it.
  const auto may_go = [&](const Known& known) -> Result<bool> {
    if (!known.job.empty() && known.job != options_.head.job) return false;
    if (!known.committed || hollow) return true;
    const Result<bool> saved = IsBeingSaved(attempt);  // first: what ends in between is complete then
    if (!saved.ok()) return saved;
    saved_by_others = saved.value();
    if (saved_by_others) return false;
    const Result<FoundTag> now = ScanTag(directory_.get(), options_.head.tag, options_.directory);
    if (!now.ok()) return now.status();
    const FoundAttempt* found = FindAttempt(now.value(), attempt);
    return found == nullptr || !found->complete();
  };
  const Result<Removed> removed =
      RemoveOther(part_.get(), {options_.head.rank, attempt, nullptr, may_go, nullptr}, shown_, kept);
  if (!removed.ok()) return removed.status();
  if (removed.value().live && attempt == own)
    return Status(-EEXIST, shown_ + ": another process is saving a part under this attempt, " + AttemptText(own) +
                               ": each save needs one of its own");
  return removed.value().live || saved_by_others;
}

// Of the tag's attempts: *complete by their heads, and to be overwritten; or *hollow, of which files are gone. EEXIST
// if one is complete and not to be overwritten. This one begins after all of them, whatever the clock says.
Status PartFiles::LookForComplete(std::set<AttemptId>* complete, std::set<AttemptId>* hollow) {
  PartHead& head = options_.head;
  const Result<FoundTag> found = ScanTag(directory_.get(), head.tag, options_.directory);
  if (!found.ok()) return found.status();
  for (const FoundAttempt& attempt : found.value().attempts) {
    const int64_t began = attempt.head().started_unix_ns;
    if (began < std::numeric_limits<int64_t>::max()) head.started_unix_ns = std::max(head.started_unix_ns, began + 1);
    if (!attempt.complete()) continue;
    if (options_.overwrite) {
      complete->insert(attempt.id);
      continue;
    }
    const Status whole = CheckAttempt(directory_.get(), attempt, CheckBy(options_.working), options_.directory);
    if (whole.ok())
      return Status(-EEXIST, options_.directory + " has a complete checkpoint '" + head.tag + "' of step " +
                                 std::to_string(attempt.head().step) + " and " +
                                 std::to_string(attempt.head().world_size) +
                                 " ranks: use another tag, or overwrite it");
    if (whole.code() != -ENOENT && whole.code() != -EINVAL && whole.code() != -EPERM) return whole;
    spdlog::warn("event=checkpoint_hollow tag={} attempt={} reason=\"{}\"", head.tag, AttemptText(attempt.id),
                 whole.message());
    hollow->insert(attempt.id);
  }
  return Status();
}

Status PartFiles::Record() const { return SaveJournal(options_.journal_fd, options_.journal_shown, record_); }

Status PartFiles::MakeHeader(int fd, const std::string& shown) {
  const PartHeader header = MakePartHeader(IdentityOf(options_.head, 0));
  const Status written = WriteAll(fd, header.bytes.data(), header.bytes.size(), 0, shown);
  return written.ok() ? SyncData(fd, shown) : written;
}

// With its lock, its header on storage and its inode in the journal before it has a name; where the file system cannot
// make nameless files, the journal knows the name only, and then the header says whose it is.
Status PartFiles::MakeDataFile() {
  const std::string name = DataName(options_.head.attempt, 0), shown = shown_ + "/" + name;
  record_.files.push_back({});
  Result<UniqueFd> fd = MakeNamelessFile(part_.get(), shown);
  if (fd.ok()) {
    const Result<FileLock> lock = LockFile(fd->get(), /*shared=*/false, shown);
    if (!lock.ok()) return lock.status();
    if (lock.value() == FileLock::kUnknown) WarnOfNoLocks(shown);
    const Status headed = MakeHeader(fd->get(), shown);
    if (!headed.ok()) return headed;
    const Result<uint64_t> inode = InodeOf(fd->get(), shown);
    if (!inode.ok()) return inode.status();
    record_.files[0].inode = inode.value();
    const Status recorded = Record();
    if (!recorded.ok()) return recorded;
    if (GiveName(fd->get(), part_.get(), name, shown).ok()) {
      data_ = std::move(*fd);
      return SyncFolder(part_.get(), shown_);
    }
    record_.files[0].inode = 0;
  }
  const Status recorded = Record();
  return recorded.ok() ? MakeNamedDataFile(name, shown) : recorded;
}

// Until it has its lock it may be taken for a rest, and removed: then it is made again.
Status PartFiles::MakeNamedDataFile(const std::string& name, const std::string& shown) {
  Result<UniqueFd> fd = MakeFile(part_.get(), name, shown);
  if (!fd.ok()) return fd.status();  // what has the name is not ours
  data_ = std::move(*fd);
  const Result<FileLock> lock = LockFile(data_.get(), /*shared=*/false, shown);
  if (!lock.ok()) return lock.status();
  if (lock.value() == FileLock::kUnknown) WarnOfNoLocks(shown);
  const Result<bool> named = IsNamed(part_.get(), name, data_.get(), shown);
  if (!named.ok()) return named.status();
  if (named.value() && lock.value() == FileLock::kHeld) {
    const Result<bool> removed = RemoveFile(part_.get(), name, shown);
    if (!removed.ok()) return removed.status();
  }
  if (!named.value() || lock.value() == FileLock::kHeld)
    return Status(-ENOENT, shown + " was removed by somebody else as soon as it was made");
  const Result<uint64_t> inode = InodeOf(data_.get(), shown);
  if (!inode.ok()) return inode.status();
  Status status = MakeHeader(data_.get(), shown);
  if (!status.ok()) return status;
  record_.files[0].inode = inode.value();
  status = Record();
  return status.ok() ? SyncFolder(part_.get(), shown_) : status;
}

// ---- Filling ----

Result<uint64_t> PartFiles::FreeBytes() const {
  struct statvfs fs;
  if (::fstatvfs(data_.get(), &fs) != 0) return Status::Errno(errno, "asking for free space of " + shown_);
  return static_cast<uint64_t>(fs.f_bavail) * fs.f_frsize;
}

Status PartFiles::Allocate(uint64_t bytes) {
  MLPO_CHECK(bytes >= kPartHeaderBytes);
  int rc;
  do {
    rc = ::fallocate(data_.get(), 0, 0, static_cast<off_t>(bytes));
  } while (rc != 0 && errno == EINTR);
  if (rc == 0) return Status();
  int error = errno;
  if (error == EOPNOTSUPP || error == ENOSYS) {  // promised only; a write will tell
    if (::ftruncate(data_.get(), static_cast<off_t>(bytes)) == 0) return Status();
    error = errno;
  }
  return NoRoom(error, bytes, FreeBytes());
}

Status PartFiles::CheckRoom(uint64_t bytes) const {
  const Result<uint64_t> free_bytes = FreeBytes();
  if (!free_bytes.ok()) return free_bytes.status();
  return free_bytes.value() >= bytes ? Status() : NoRoom(ENOSPC, bytes, free_bytes);
}

Status PartFiles::NoRoom(int error, uint64_t bytes, const Result<uint64_t>& free_bytes) const {
  return Status(-error, shown_ + " needs " + std::to_string(bytes) + " bytes, and its file system has " +
                            (free_bytes.ok() ? std::to_string(free_bytes.value()) : "?") + " free: " +
                            Status::Errno(error, "allocating").message() + "; free space there or save elsewhere");
}

Result<uint32_t> PartFiles::HandOver(int folder_fd, const std::string& name, int fd, const WorkingOrigin& origin,
                                     const std::string& shown, bool* moved) {
  *moved = false;
  const Result<uint64_t> inode = InodeOf(fd, shown);
  if (!inode.ok()) return inode.status();
  uint32_t index = 0;
  for (const JournalRecord::File& file : record_.files) index = std::max(index, file.index + 1);
  record_.files.push_back({index, inode.value(), true, origin});
  Status status = Record();
  if (status.ok()) {
    const std::string target = DataName(options_.head.attempt, index);
    status = MoveFile(folder_fd, name, part_.get(), target, shown, shown_ + "/" + target);
    if (!status.ok()) {
      record_.files.pop_back();
      const Status again = Record();
      return again.ok() ? status : again;
    }
    *moved = true;
    // Both folders: after a crash it has one name or the other, and the journal knows this one.
    status = SyncFolder(part_.get(), shown_);
    if (status.ok()) status = SyncFolder(folder_fd, ParentOf(shown));
  }
  if (!status.ok()) return status;
  return index;
}

// ---- Ending ----

Status PartFiles::Commit(Manifest* manifest) {
  MLPO_CHECK(!committed_ && data_);
  manifest->head = options_.head;
  const Result<std::string> text = ManifestText(manifest);
  if (!text.ok()) return text.status();
  const AttemptId& attempt = options_.head.attempt;
  if (manifest_) {
    Status written = SyncData(data_.get(), shown_);
    if (written.ok()) written = WriteAll(manifest_.get(), text.value().data(), text.value().size(), 0, shown_);
    if (written.ok()) written = SyncData(manifest_.get(), shown_);
    committed_ = written.ok();
    return written;
  }
  Status status = SyncData(data_.get(), shown_ + "/" + DataName(attempt, 0));
  if (status.ok()) status = SyncFolder(part_.get(), shown_);
  if (status.ok()) status = CheckNames();
  if (!status.ok()) return status;
  manifest_begun_ = true;
  status = CommitText(part_.get(), NewManifestName(attempt), ManifestName(attempt), text.value(), shown_);
  if (!status.ok()) {
    // It may have its name already, and must not be counted: nobody knows whether it would be there tomorrow. Nobody
    // has: it is locked.
    const Result<bool> removed = RemoveFile(part_.get(), ManifestName(attempt), shown_);
    if (!removed.ok()) spdlog::warn("event=checkpoint_part_left reason=\"{}\"", removed.status().message());
    return status;
  }
  committed_ = true;
  // The part stands, and others may count it from here on; a record that stays is dropped by the next start, which
  // finds the manifest. The folders have been durable since they were made.
  status = UnlockFile(data_.get(), shown_);
  if (status.ok()) status = SyncFolder(tag_.get(), ParentOf(shown_));
  if (status.ok()) status = SyncFolder(directory_.get(), options_.directory);
  const Status forgotten = RemoveJournal(options_.journal_fd, options_.journal_shown, record_);
  if (!forgotten.ok()) spdlog::warn("event=journal_left reason=\"{}\"", forgotten.message());
  recorded_ = false;
  return status;
}

// Whether the name is still that of the file that this object has given it to. One of which the record does not know
// the inode is the first data file, in the making.
Result<bool> PartFiles::IsThere(const JournalRecord::File& file) const {
  const std::string name = DataName(options_.head.attempt, file.index), shown = shown_ + "/" + name;
  if (file.inode == 0) return data_ ? IsNamed(part_.get(), name, data_.get(), shown) : Result<bool>(false);
  struct stat st;
  if (::fstatat(part_.get(), name.c_str(), &st, AT_SYMLINK_NOFOLLOW) == 0)
    return static_cast<uint64_t>(st.st_ino) == file.inode;
  if (errno == ENOENT) return false;
  return Status::Errno(errno, "looking at " + shown);
}

Status PartFiles::CheckNames() const {
  for (const JournalRecord::File& file : record_.files) {
    const Result<bool> there = IsThere(file);
    if (!there.ok()) return there.status();
    if (!there.value())
      return Status(-ESTALE, shown_ + "/" + DataName(options_.head.attempt, file.index) +
                                 " was removed or replaced while it was being saved, by another save under this tag or "
                                 "by hand: save again");
  }
  return Status();
}

Status PartFiles::Abandon() {
  if (manifest_ && !committed_) {  // the client removes them; nothing in them is to look like a part meanwhile
    if (::ftruncate(manifest_.get(), 0) != 0 || ::ftruncate(data_.get(), 0) != 0)
      return Status::Errno(errno, "emptying " + shown_);
  }
  if (committed_ || !recorded_) return Status();
  Status first;
  const auto note = [&first](const Result<bool>& removed) {
    if (first.ok() && !removed.ok()) first = removed.status();
  };
  if (part_) {
    const AttemptId& attempt = options_.head.attempt;
    if (manifest_begun_) {
      note(RemoveFile(part_.get(), ManifestName(attempt), shown_));
      note(RemoveFile(part_.get(), NewManifestName(attempt), shown_));
    }
    for (const JournalRecord::File& file : record_.files) {
      const Result<bool> there = IsThere(file);  // else it is somebody else's that has the name
      note(there);
      if (there.ok() && there.value()) note(RemoveFile(part_.get(), DataName(attempt, file.index), shown_));
    }
    data_.reset();
    part_.reset();
    note(RemoveEmptyFolder(tag_.get(), PartFolderName(options_.head.rank), shown_));
  }
  if (tag_) {
    tag_.reset();
    note(RemoveEmptyFolder(directory_.get(), options_.head.tag, options_.directory + "/" + options_.head.tag));
  }
  if (!first.ok()) return first;  // the record stays, for the next start
  const Status forgotten = RemoveJournal(options_.journal_fd, options_.journal_shown, record_);
  if (!forgotten.ok()) return forgotten;
  recorded_ = false;
  return Status();
}

PartFiles::~PartFiles() {
  const Status abandoned = Abandon();
  if (!abandoned.ok()) spdlog::warn("event=checkpoint_part_left reason=\"{}\"", abandoned.message());
}

// ---- Other attempts ----

Result<PartFiles::Removed> PartFiles::RemovePart(int part_fd, const Removal& removal, const std::string& shown,
                                                 std::vector<std::string>* kept) {
  const AttemptId& attempt = removal.attempt;
  const std::string first_name = DataName(attempt, 0), first_shown = shown + "/" + first_name;
  Removed removed;
  // Held until the end: who saves it has it, and who else removes it.
  UniqueFd first;
  FileLock lock = FileLock::kUnknown;
  Result<UniqueFd> opened = OpenFile(part_fd, first_name, O_RDWR, first_shown);
  if (opened.ok()) {
    first = std::move(*opened);
    const Result<FileLock> locked = LockFile(first.get(), /*shared=*/false, first_shown);
    if (!locked.ok()) return locked.status();
    lock = locked.value();
    const Result<bool> named = IsNamed(part_fd, first_name, first.get(), first_shown);
    if (!named.ok()) return named.status();
    removed.live = lock == FileLock::kHeld || !named.value();
  } else if (opened.status().os_errno() != ENOENT) {  // without the lock nobody knows
    kept->push_back(opened.status().message());
    return removed;
  }
  if (removed.live) {
    kept->push_back(first_shown + " is being saved, or removed, by somebody else");
    return removed;
  }

  const Result<std::vector<std::string>> names = ListFolder(part_fd, shown);
  if (!names.ok()) return names.status();
  const Result<Manifest> manifest = ReadManifest(part_fd, attempt, shown);
  const Result<PartIdentity> identity =
      first ? ReadPartHeader(first.get(), first_shown) : Result<PartIdentity>(Status(-ENOENT, first_shown));
  Known known;
  known.committed = std::find(names.value().begin(), names.value().end(), ManifestName(attempt)) != names.value().end();
  if (manifest.ok()) {
    known.job = manifest.value().head.job;
    known.started_unix_ns = manifest.value().head.started_unix_ns;
  } else if (identity.ok()) {
    known.job = identity.value().job;
    known.started_unix_ns = identity.value().started_unix_ns;
  }
  if (removal.may_go) {
    const Result<bool> may = removal.may_go(known);
    if (!may.ok()) return may.status();
    if (!may.value()) return removed;
  }

  // Nobody is about to write its header: its lock would be held.
  const Result<bool> bare =
      first && lock == FileLock::kTaken ? LacksPartHeader(first.get(), first_shown) : Result<bool>(false);
  if (!bare.ok()) return bare.status();
  const auto is_its = [&](const Result<PartIdentity>& found) {
    return found.ok() && found.value().attempt == attempt && found.value().rank == removal.rank;
  };

  struct Doomed {
    std::string name;
    int turn;  // manifests, data files, the first data file
  };
  std::vector<Doomed> doomed;
  std::vector<JournalRecord::File> files;
  for (const std::string& name : names.value()) {
    const std::optional<PartFileName> parsed = ParsePartFileName(name);
    if (!parsed || parsed->attempt != attempt) continue;
    const std::string file = shown + "/" + name;
    struct stat st;
    if (::fstatat(part_fd, name.c_str(), &st, AT_SYMLINK_NOFOLLOW) != 0) {
      if (errno == ENOENT) continue;
      return Status::Errno(errno, "looking at " + file);
    }
    if (!S_ISREG(st.st_mode) || st.st_uid != ::geteuid()) {
      kept->push_back(file + " is not a file of uid " + std::to_string(::geteuid()));
      continue;
    }
    if (parsed->kind != PartFileName::Kind::kData) {
      doomed.push_back({name, 0});
      continue;
    }
    JournalRecord::File record{parsed->index, static_cast<uint64_t>(st.st_ino), false, {}};
    bool ours = false;
    if (parsed->index == 0) {
      ours = bare.value() || is_its(identity);
      if (bare.value()) record.inode = 0;
    } else {
      // The manifest lists it, or, where that has gone already, its header is that of a working file of this daemon's
      // and rank, under a name that has the attempt, or that of a part's file.
      for (const PartFile& listed : manifest.ok() ? manifest.value().files : std::vector<PartFile>()) {
        if (!listed.working || listed.index != parsed->index) continue;
        record.origin = listed.origin;
        ours = record.working = true;
      }
      Result<UniqueFd> fd = ours ? Result<UniqueFd>(UniqueFd()) : OpenFile(part_fd, name, O_RDONLY, file);
      if (fd.status().os_errno() == ENOENT) continue;
      if (!ours && fd.ok()) {
        const Result<WorkingOrigin> origin = removal.working(fd->get());
        record.working = origin.ok() && origin.value().daemon_uid == ::geteuid() && origin.value().rank == removal.rank;
        if (record.working) record.origin = origin.value();
        ours = record.working || is_its(ReadPartHeader(fd->get(), file));
      }
    }
    if (ours) {
      doomed.push_back({name, parsed->index == 0 ? 2 : 1});
      files.push_back(record);
    } else {
      kept->push_back(file + " has not the header of its name");
    }
  }
  if (removal.before && !files.empty() && !known.job.empty()) {
    const Status noted = removal.before(known.job, files);
    if (!noted.ok()) return noted;
  }
  std::stable_sort(doomed.begin(), doomed.end(), [](const Doomed& a, const Doomed& b) { return a.turn < b.turn; });
  for (size_t i = 0; i < doomed.size(); ++i) {
    const Result<bool> gone = RemoveFile(part_fd, doomed[i].name, shown + "/" + doomed[i].name);
    if (!gone.ok()) return gone.status();
    removed.files += gone.value();
    const bool last_manifest = doomed[i].turn == 0 && (i + 1 == doomed.size() || doomed[i + 1].turn > 0);
    if (!last_manifest) continue;
    const Status synced = SyncFolder(part_fd, shown);  // before any of its data goes
    if (!synced.ok()) return synced;
  }
  return removed;
}

Result<uint32_t> PartFiles::RemoveAsides(int part_fd, const std::string& shown, std::vector<std::string>* kept) {
  const Result<std::vector<std::string>> names = ListFolder(part_fd, shown);
  if (!names.ok()) return names.status();
  uint32_t removed = 0;
  for (const std::string& name : names.value()) {
    if (!IsAsideName(name)) continue;
    const std::string file = shown + "/" + name;
    struct stat st;
    if (::fstatat(part_fd, name.c_str(), &st, AT_SYMLINK_NOFOLLOW) != 0) {
      if (errno == ENOENT) continue;
      return Status::Errno(errno, "looking at " + file);
    }
    if (!S_ISREG(st.st_mode) || st.st_uid != ::geteuid()) {
      kept->push_back(file + " is not a file of uid " + std::to_string(::geteuid()));
      continue;
    }
    const Result<UniqueFd> fd = OpenFile(part_fd, name, O_RDWR, file);
    if (fd.status().os_errno() == ENOENT) continue;
    if (!fd.ok()) {
      kept->push_back(fd.status().message());
      continue;
    }
    const Result<FileLock> lock = LockFile(fd.value().get(), /*shared=*/false, file);
    if (!lock.ok()) return lock.status();
    const Result<bool> named = IsNamed(part_fd, name, fd.value().get(), file);
    if (!named.ok()) return named.status();
    if (!named.value()) continue;  // it has got its name, or has gone
    if (lock.value() != FileLock::kTaken) {
      kept->push_back(file + (lock.value() == FileLock::kHeld
                                  ? " is being saved by somebody else"
                                  : " may be being saved: its file system has no locks (flock) that would tell; if "
                                    "nobody saves there, remove it by hand"));
      continue;
    }
    const Result<bool> gone = RemoveFile(part_fd, name, file);
    if (!gone.ok()) return gone.status();
    removed += gone.value();
  }
  return removed;
}

Result<PartFiles::Removed> PartFiles::RemoveOther(int part_fd, Removal removal, const std::string& shown,
                                                  std::vector<std::string>* kept) const {
  JournalRecord record = record_;
  record.rank = removal.rank;
  record.attempt = removal.attempt;
  bool noted = false;
  removal.working = options_.working;
  if (removal.attempt != options_.head.attempt) {  // which has its record
    removal.before = [&](const std::string& job, const std::vector<JournalRecord::File>& files) {
      record.job = job;
      record.files = files;
      noted = true;
      return SaveJournal(options_.journal_fd, options_.journal_shown, record);
    };
  }
  Result<Removed> removed = RemovePart(part_fd, removal, shown, kept);
  if (noted && removed.ok()) {
    const Status forgotten = RemoveJournal(options_.journal_fd, options_.journal_shown, record);
    if (!forgotten.ok()) spdlog::warn("event=journal_left reason=\"{}\"", forgotten.message());
  }
  return removed;
}

// Each part of the attempt is done and on storage, and stays: whoever saves or removes one has its lock. Whoever ends
// last finds all of them so.
Result<bool> PartFiles::IsSettled(const FoundAttempt& attempt) const {
  for (const auto& [rank, head] : attempt.parts) {
    const std::string name = PartFolderName(rank), shown = ParentOf(shown_) + "/" + name;
    Result<UniqueFd> part = OpenFolder(tag_.get(), name, shown);
    if (part.status().os_errno() == ENOENT) return false;
    if (!part.ok()) return part.status();
    const std::string data = DataName(attempt.id, 0);
    Result<UniqueFd> first = OpenFile(part->get(), data, O_RDONLY, shown + "/" + data);
    if (first.status().os_errno() == ENOENT) return false;
    if (!first.ok()) return first.status();
    const Result<FileLock> lock = LockFile(first->get(), /*shared=*/true, shown + "/" + data);
    if (!lock.ok()) return lock.status();
    if (lock.value() == FileLock::kHeld) return false;
    const Status synced = SyncFolder(part->get(), shown);
    if (!synced.ok()) return synced;
  }
  return true;
}

// Whether another rank's part of the attempt is locked: in the making, or going. What cannot be seen may be. Not one
// with its manifest: whoever has its lock is done with saving it, or looks whether it goes.
Result<bool> PartFiles::IsBeingSaved(const AttemptId& attempt) const {
  const std::string tag = ParentOf(shown_), data = DataName(attempt, 0);
  const Result<std::vector<std::string>> names = ListFolder(tag_.get(), tag);
  if (!names.ok()) return names.status();
  for (const std::string& name : names.value()) {
    const std::optional<uint32_t> rank = ParsePartFolderName(name);
    if (!rank || *rank == options_.head.rank) continue;
    const Result<UniqueFd> part = OpenFolder(tag_.get(), name, tag + "/" + name);
    if (part.status().os_errno() == ENOENT) continue;
    if (!part.ok()) return true;
    const std::string manifest = ManifestName(attempt);
    const Result<bool> whole = mlpo::IsThere(part.value().get(), manifest, tag + "/" + name + "/" + manifest);
    if (whole.ok() && whole.value()) continue;
    const std::string shown = tag + "/" + name + "/" + data;
    const Result<UniqueFd> first = OpenFile(part.value().get(), data, O_RDONLY, shown);
    if (first.status().os_errno() == ENOENT) continue;
    if (!first.ok()) return true;
    const Result<FileLock> lock = LockFile(first.value().get(), /*shared=*/true, shown);
    if (!lock.ok()) return lock.status();
    if (lock.value() == FileLock::kHeld) return true;
  }
  return false;
}

// What most ranks learn from one part, where a look at the whole tag takes all. Each part's folder is opened: where
// others write it, over NFS, only that makes sure that a name is not there.
Result<bool> PartFiles::AllHaveManifests() const {
  const PartHead& head = options_.head;
  const std::string manifest = ManifestName(head.attempt);
  for (uint32_t rank = head.world_size; rank-- > 0;) {
    const std::string shown = ParentOf(shown_) + "/" + PartFolderName(rank);
    const Result<UniqueFd> part = OpenFolder(tag_.get(), PartFolderName(rank), shown);
    if (part.status().os_errno() == ENOENT) return false;
    if (!part.ok()) return part.status();
    const Result<bool> whole = mlpo::IsThere(part.value().get(), manifest, shown + "/" + manifest);
    if (!whole.ok() || !whole.value()) return whole;
  }
  return true;
}

Result<bool> PartFiles::IsComplete(std::vector<std::string>* kept) const {
  MLPO_CHECK(committed_);
  if (manifest_) return false;
  const PartHead& head = options_.head;
  const Result<bool> all = AllHaveManifests();
  if (!all.ok() || !all.value()) return all;
  Result<FoundTag> found = ScanTag(directory_.get(), head.tag, options_.directory);
  if (!found.ok()) return found.status();
  const FoundAttempt* own = FindAttempt(*found, head.attempt);
  if (own == nullptr || !own->complete()) return false;
  const Result<bool> settled = IsSettled(*own);
  if (!settled.ok() || !settled.value()) return settled;
  Status status = SyncFolder(tag_.get(), ParentOf(shown_));
  if (status.ok()) status = SyncFolder(directory_.get(), options_.directory);
  if (!status.ok()) return status;
  found = ScanTag(directory_.get(), head.tag, options_.directory);
  if (!found.ok()) return found.status();
  own = FindAttempt(*found, head.attempt);
  if (own == nullptr || !own->complete()) return false;
  const FoundAttempt* const last = CompleteAttempt(*found);
  if (last->id != head.attempt) {
    spdlog::warn(
        "event=checkpoint_not_last tag={} step={} attempt={} reason=\"attempt {} of step {} and job {} is complete, "
        "too, "
        "began later, and is what a restore takes\"",
        head.tag, head.step, AttemptText(head.attempt), AttemptText(last->id), last->head().step, last->head().job);
    return false;
  }
  status = RemoveEarlier(*found, *own, kept);
  if (!status.ok()) return status;
  return true;
}

// Of another job only what was to be overwritten. Attempts without any manifest are as old as their headers say.
Status PartFiles::RemoveEarlier(const FoundTag& found, const FoundAttempt& own, std::vector<std::string>* kept) const {
  const PartHead& head = options_.head;
  std::map<AttemptId, bool> others;  // whether it is known to have begun earlier
  for (const FoundAttempt& attempt : found.attempts) {
    if (attempt.id != own.id && IsLater(own, attempt)) others[attempt.id] = true;
  }
  for (const auto& [attempt, files] : found.unfinished) {
    if (FindAttempt(found, attempt) == nullptr) others[attempt] = false;
  }
  if (others.empty()) return Status();
  const Status whole = CheckAttempt(directory_.get(), own, CheckBy(options_.working), options_.directory);
  if (!whole.ok()) return whole.Within("what was saved before stays, since this is not whole");
  const Result<std::vector<std::string>> names = ListFolder(tag_.get(), ParentOf(shown_));
  if (!names.ok()) return names.status();
  for (const std::string& name : names.value()) {
    const std::optional<uint32_t> rank = ParsePartFolderName(name);
    const std::string shown = options_.directory + "/" + head.tag + "/" + name;
    if (!rank) continue;
    Result<UniqueFd> part = OpenFolder(tag_.get(), name, shown);
    if (part.status().os_errno() == ENOENT) continue;
    if (!part.ok()) {
      kept->push_back(part.status().message());
      continue;
    }
    for (const auto& [other, earlier] : others) {
      const auto may_go = [this, &own, earlier = earlier](const Known& known) -> Result<bool> {
        if (!known.job.empty() && known.job != options_.head.job && !options_.overwrite) return false;
        return earlier || !known.started_unix_ns || *known.started_unix_ns < own.head().started_unix_ns;
      };
      const Result<Removed> removed = RemoveOther(part->get(), {*rank, other, nullptr, may_go, nullptr}, shown, kept);
      if (!removed.ok()) kept->push_back(removed.status().message());
    }
    const Result<uint32_t> asides = RemoveAsides(part->get(), shown, kept);
    if (!asides.ok()) kept->push_back(asides.status().message());
    const Result<bool> emptied = RemoveEmptyFolder(tag_.get(), name, shown);
    if (!emptied.ok()) kept->push_back(emptied.status().message());
  }
  return Status();
}

}  // namespace mlpo
