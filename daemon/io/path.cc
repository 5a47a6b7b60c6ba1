#include "daemon/io/path.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <mutex>
#include <system_error>
#include <unordered_map>
#include <utility>
#include <vector>

#include "daemon/base/log.h"
#include "daemon/base/name.h"
#include "daemon/io/block_device.h"
#include "daemon/io/byte_text.h"
#include "daemon/io/file_header.h"
#include "daemon/io/path_folders.h"
#include "daemon/io/path_probe.h"
#include "daemon/io/scratch_cleanup.h"
#include "daemon/io/scratch_layout.h"
#include "proto/abi.h"

namespace mlpo {
namespace {

// One fallocate is cut so that a signal loses little of a long one.
constexpr uint64_t kAllocateBytes = uint64_t{16} << 30;
constexpr uint64_t kNoCapacity = std::numeric_limits<uint64_t>::max();

struct StateFile {
  std::shared_ptr<const UniqueFd> fd;  // shared with AvailableBytes while it asks; the last one closes it
  FileOwner owner;
  dev_t device = 0;  // where it is, to know it by when it is closed
  ino_t inode = 0;   // 0: not known
  uint64_t reserved_bytes = 0;
  bool allocated = true;     // false: the file system has no fallocate; what is not written yet is only promised
  bool handed_over = false;  // it has no name of ours any more
};

// Bytes that are promised to a file but not on storage yet.
uint64_t PromisedBytes(const StateFile& file) {
  struct stat st;
  if (::fstat(file.fd->get(), &st) != 0) return file.reserved_bytes;
  const uint64_t stored = static_cast<uint64_t>(st.st_blocks) * 512;
  return file.reserved_bytes - std::min(file.reserved_bytes, stored);
}

}  // namespace

struct Path::Impl {
  // Set by Open, and not changed afterwards: threads other than the keeper read both.
  std::string shown;  // <directory>/mlpo/<uid>/<node>
  std::string node;
  UniqueFd node_fd;
  UniqueFd lock;
  mutable std::mutex mutex;  // guards what follows
  std::unordered_map<FileId, StateFile> files;
  FileId next_file = 1;
  uint64_t reserved_bytes = 0;  // of all files

  // Free bytes of the file system for new extents, less what is only promised. The file system may be slow to answer:
  // the mutex, which transfers need, is not held over it.
  Result<uint64_t> FreeOnFileSystem() const {
    std::vector<StateFile> promised;
    {
      std::lock_guard guard(mutex);
      for (const auto& [id, file] : files)
        if (!file.allocated && !file.handed_over) promised.push_back(file);
    }
    struct statvfs fs;
    if (::fstatvfs(node_fd.get(), &fs) != 0) return PathError(errno, "asking for free space of", shown);
    uint64_t free_bytes = static_cast<uint64_t>(fs.f_bavail) * fs.f_frsize;
    for (const StateFile& file : promised) free_bytes -= std::min(free_bytes, PromisedBytes(file));
    return free_bytes;
  }
  uint64_t LeftOfCapacity(uint64_t capacity_bytes) const {
    if (capacity_bytes == 0) return kNoCapacity;
    std::lock_guard guard(mutex);
    return capacity_bytes - std::min(capacity_bytes, reserved_bytes);
  }
  std::string FileName(const FileOwner& owner) const {
    return shown + "/" + JobFolder(owner) + "/" + RankFolder(owner) + "/" + kStateFile;
  }

  // Its own descriptor, for threads other than the keeper: which may close the path's meanwhile.
  Result<UniqueFd> NodeFolder() const {
    const std::lock_guard guard(mutex);
    if (!node_fd) return Status(-EBADF, shown + " has been evacuated");
    UniqueFd folder(::fcntl(node_fd.get(), F_DUPFD_CLOEXEC, 0));
    if (!folder) return PathError(errno, "opening", shown);
    return folder;
  }

  Status OpenFolders(const std::string& directory);
  void CloseFolders() {
    UniqueFd folder;
    {
      const std::lock_guard guard(mutex);
      folder = std::move(node_fd);
    }
    lock.reset();
  }
  Status CleanUp(const std::string& path_name) const;
  Result<UniqueFd> MakeStateFile(int folder_fd, const FileOwner& owner, bool direct) const;
  Result<UniqueFd> TryStateFile(int folder_fd, const FileOwner& owner, bool direct, bool nameless) const;
  Status Unlink(const StateFile& file) const;
  Result<UniqueFd> OpenRankFolder(const FileOwner& owner, UniqueFd* job_fd) const;
  Status RemoveFolders(int job_fd, const FileOwner& owner) const;
  Status IsOurs(int folder_fd, const StateFile& file) const;
};

// With its header on storage before it has a name, so that a crash leaves no file that we would not know as ours; where
// the file system cannot make nameless files, the header follows the name. The header is read back before anything else
// is done with the file: a path that gives back something else is refused here, not in the middle of a step.
Result<UniqueFd> Path::Impl::MakeStateFile(int folder_fd, const FileOwner& owner, bool direct) const {
  Result<UniqueFd> fd = TryStateFile(folder_fd, owner, direct, true);
  return fd.ok() ? std::move(fd) : TryStateFile(folder_fd, owner, direct, false);
}

Result<UniqueFd> Path::Impl::TryStateFile(int folder_fd, const FileOwner& owner, bool direct, bool nameless) const {
  const int flags = O_RDWR | O_CLOEXEC | (direct ? O_DIRECT : 0);
  const std::string name = FileName(owner);
  UniqueFd fd(nameless ? ::openat(folder_fd, ".", flags | O_TMPFILE, 0600)
                       : ::openat(folder_fd, kStateFile, flags | O_CREAT | O_EXCL | O_NOFOLLOW, 0600));
  if (!fd) return PathError(errno, "making the state file", name);

  int error = 0;
  Status checked;
  const FileIdentity identity{node, ::geteuid(), owner};
  const HeaderPage header = MakeFileHeader(identity);
  const ssize_t put = ::pwrite(fd.get(), header.bytes.data(), header.bytes.size(), 0);
  if (put < 0) {
    error = errno;
  } else if (static_cast<size_t>(put) != header.bytes.size()) {
    error = ENOSPC;
  } else if (::fdatasync(fd.get()) != 0) {
    error = errno;
  } else if (checked = CheckFileHeader(fd.get(), identity); !checked.ok()) {
    checked = checked.Within("the header of " + name + " is not read back as it was written");
  } else if (nameless) {
    const std::string self = "/proc/self/fd/" + std::to_string(fd.get());
    if (::linkat(AT_FDCWD, self.c_str(), folder_fd, kStateFile, AT_SYMLINK_FOLLOW) != 0) error = errno;
  }
  if (error == 0 && checked.ok()) return fd;
  if (!nameless) (void)::unlinkat(folder_fd, kStateFile, 0);  // the first error is the one to report
  return error != 0 ? PathError(error, "writing the header of", name) : checked;
}

// Whether what has the name of a file of ours is that file: the one that we made, or, as some file systems number files
// anew, one with the same header. Anything else was put there by somebody else.
Status Path::Impl::IsOurs(int folder_fd, const StateFile& file) const {
  const std::string name = FileName(file.owner);
  struct stat named_file;
  if (::fstatat(folder_fd, kStateFile, &named_file, AT_SYMLINK_NOFOLLOW) != 0)
    return PathError(errno, "looking at", name);
  if (file.inode != 0 && file.device == named_file.st_dev && file.inode == named_file.st_ino) return Status();
  Status found(-EPERM, "it is no regular file");
  if (S_ISREG(named_file.st_mode)) {
    const UniqueFd there(::openat(folder_fd, kStateFile, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    found = there ? CheckFileHeader(there.get(), {node, ::geteuid(), file.owner}) : Status::Errno(errno, "opening it");
  }
  return found.Within(name + " has been replaced by something that is not ours and stays");
}

Result<UniqueFd> Path::Impl::OpenRankFolder(const FileOwner& owner, UniqueFd* job_fd) const {
  constexpr int kFolderFlags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
  Result<UniqueFd> folder = NodeFolder();
  if (!folder.ok()) return folder.status();
  *job_fd = UniqueFd(::openat(folder->get(), JobFolder(owner).c_str(), kFolderFlags));
  if (!*job_fd) return PathError(errno, "opening the folder of", FileName(owner));
  UniqueFd rank_fd(::openat(job_fd->get(), RankFolder(owner).c_str(), kFolderFlags));
  if (!rank_fd) return PathError(errno, "opening the folder of", FileName(owner));
  return rank_fd;
}

// Of a file that has gone. Folders that others still use stay.
Status Path::Impl::RemoveFolders(int job_fd, const FileOwner& owner) const {
  if (::unlinkat(job_fd, RankFolder(owner).c_str(), AT_REMOVEDIR) != 0)
    return PathError(errno, "removing the folder of", FileName(owner));
  Result<UniqueFd> folder = NodeFolder();
  if (!folder.ok()) return folder.status();
  if (::unlinkat(folder->get(), JobFolder(owner).c_str(), AT_REMOVEDIR) != 0 && errno != ENOTEMPTY && errno != EEXIST)
    return PathError(errno, "removing the job folder of", FileName(owner));
  return Status();
}

// The file and its folders. A file that others have put there stays. The file is closed before: of one that is open NFS
// would leave another in the folder, which then could not be removed.
Status Path::Impl::Unlink(const StateFile& file) const {
  if (file.handed_over) return Status();
  UniqueFd job_fd;
  Result<UniqueFd> rank_fd = OpenRankFolder(file.owner, &job_fd);
  if (!rank_fd.ok()) return rank_fd.status();
  if (Status ours = IsOurs(rank_fd->get(), file); !ours.ok()) return ours;
  if (::unlinkat(rank_fd->get(), kStateFile, 0) != 0) return PathError(errno, "removing", FileName(file.owner));
  return RemoveFolders(job_fd.get(), file.owner);
}

// Each level below the directory that the user named, then the lock of the last one.
Status Path::Impl::OpenFolders(const std::string& directory) {
  Result<UniqueFd> directory_fd = OpenPathDirectory(directory);
  if (!directory_fd.ok()) return directory_fd.status();
  const std::string top_shown = directory + "/" + kTopFolder;
  Result<UniqueFd> top = OpenTopFolder(directory_fd->get(), top_shown);
  if (!top.ok()) return top.status();
  const std::string uid = std::to_string(::geteuid());
  Result<UniqueFd> own = OpenOwnFolder(top->get(), uid, top_shown + "/" + uid);
  if (!own.ok()) return own.status();
  Result<UniqueFd> last = OpenOwnFolder(own->get(), node, shown);
  if (!last.ok()) return last.status();
  Result<UniqueFd> locked = LockNodeFolder(last->get(), node, shown);
  {
    const std::lock_guard guard(mutex);
    node_fd = std::move(*last);
  }
  if (!locked.ok()) return locked.status();
  lock = std::move(*locked);
  return Status();
}

// What dead sessions left, before there are living ones.
Status Path::Impl::CleanUp(const std::string& path_name) const {
  const Result<GcReport> cleaned = CleanScratch(node_fd.get(), node, shown, {});
  if (!cleaned.ok()) return cleaned.status();
  const GcReport& report = cleaned.value();
  for (const GcItem& item : report.kept) spdlog::warn("event=scratch_kept file={} reason=\"{}\"", item.file, item.why);
  if (!report.removed.empty()) {
    spdlog::info("event=scratch_removed path={} files={} bytes={}", path_name, report.removed.size(),
                 report.removed_bytes());
  }
  return Status();
}

Result<std::unique_ptr<Path>> Path::Open(const PathConfig& config, const std::string& name, const std::string& node) {
  if (!IsName(node))
    return Status::Invalid("the node name must match [A-Za-z0-9_][A-Za-z0-9._-]{0,127}; set [daemon] node");
  std::unique_ptr<Path> path(new Path());
  path->impl_ = std::make_unique<Impl>();
  path->name_ = name;
  path->directory_ = config.directory;
  path->config_ = config;
  Impl& impl = *path->impl_;
  impl.node = node;
  impl.shown = path->folder_shown();
  const Status opened = impl.OpenFolders(config.directory);
  if (!opened.ok()) return opened;

  const Status cleaned = impl.CleanUp(name);
  if (!cleaned.ok()) return cleaned;

  Result<PathRecord> record = LoadPathRecord(impl.node_fd.get(), impl.shown);
  if (record.ok()) {
    path->record_ = std::move(*record);
  } else {
    spdlog::warn("event=record_ignored path={} reason=\"{}\"", name, record.status().message());
  }

  Result<ProbeResult> probe = ProbeFolder(impl.node_fd.get(), impl.shown, config.direct);
  if (!probe.ok()) return probe.status();
  path->direct_io_ = probe->direct;
  if (!probe->direct && config.direct) {
    const std::string error = probe->error == 0 ? "" : ": " + std::generic_category().message(probe->error);
    spdlog::warn("event=buffered_io path={} directory={} errno={} reason=\"{}{}\"", name, config.directory,
                 probe->error, probe->reason, error);
  }
  spdlog::info("event=path_open path={} directory={} direct_io={} alignment={}", name, config.directory, probe->direct,
               probe->alignment);
  return path;
}

Path::~Path() {
  if (impl_ == nullptr) return;
  // Working state lives as long as its session; what is left here belongs to sessions that end with us.
  for (auto& [id, file] : impl_->files) {
    file.fd.reset();
    const Status removed = impl_->Unlink(file);
    if (!removed.ok()) spdlog::warn("event=scratch_left path={} error=\"{}\"", name_, removed.message());
  }
}

Result<UniqueFd> Path::OpenFolder() const { return impl_->NodeFolder(); }

std::string Path::folder_shown() const {
  return directory_ + "/" + kTopFolder + "/" + std::to_string(::geteuid()) + "/" + impl_->node;
}

Status Path::SaveRecord(const PathRecord& record) const {
  return SavePathRecord(impl_->node_fd.get(), impl_->shown, record);
}

Status Path::Probe(uint64_t bytes, uint64_t end) const {
  return ProbeBlock(impl_->node_fd.get(), impl_->shown, direct_io_, bytes, end);
}

Result<GcReport> Path::CollectGarbage(bool dry_run) const {
  CleanupOptions options;
  options.dry_run = dry_run;
  if (!impl_->node_fd) {  // released: others may use it
    GcReport nothing;
    nothing.dry_run = dry_run;
    return nothing;
  }
  options.is_live = [this](const FileOwner& owner) {
    const std::lock_guard guard(impl_->mutex);
    return std::any_of(impl_->files.begin(), impl_->files.end(), [&](const auto& entry) {
      const FileOwner& live = entry.second.owner;
      return live.client_uid == owner.client_uid && live.job == owner.job && live.rank == owner.rank &&
             live.generation == owner.generation;
    });
  };
  return CleanScratch(impl_->node_fd.get(), impl_->node, impl_->shown, options);
}

Status Path::Beat() const {
  if (!impl_->lock) return Status();
  return ::futimens(impl_->lock.get(), nullptr) == 0 ? Status()
                                                     : PathError(errno, "touching the lock file in", impl_->shown);
}

Status Path::Release() {
  {
    const std::lock_guard guard(impl_->mutex);
    if (!impl_->files.empty())
      return Status(-EBUSY, "path " + name_ + " (" + directory_ + ") has " + std::to_string(impl_->files.size()) +
                                " files of sessions");
  }
  impl_->CloseFolders();
  return Status();
}

Status Path::Retake() {
  if (impl_->node_fd) return Status();
  Status status = impl_->OpenFolders(directory_);
  if (status.ok()) status = impl_->CleanUp(name_);
  if (status.ok()) {
    const Result<ProbeResult> probe = ProbeFolder(impl_->node_fd.get(), impl_->shown, config_.direct);
    status = probe.status();
    if (status.ok() && probe.value().direct != direct_io_)
      status = Status(-EOPNOTSUPP, "path " + name_ + " (" + directory_ + ") " +
                                       (direct_io_ ? "no longer does O_DIRECT (" + probe.value().reason + ")"
                                                   : std::string("does O_DIRECT now")) +
                                       ": start the daemon anew to use it so");
  }
  if (status.ok()) return status;
  impl_->CloseFolders();
  return status;
}

uint64_t Path::AvailableBytes() const {
  const Result<uint64_t> free_bytes = impl_->FreeOnFileSystem();
  if (!free_bytes.ok()) {  // asked often, by policy: no space until the file system answers again
    spdlog::debug("event=free_space_unknown path={} error=\"{}\"", name_, free_bytes.status().message());
    return 0;
  }
  return std::min(free_bytes.value(), impl_->LeftOfCapacity(config_.capacity_bytes));
}

int Path::numa_node() const {
  struct stat st;
  return ::stat(directory_.c_str(), &st) == 0 ? DriveNode("", major(st.st_dev), minor(st.st_dev)) : -1;
}

uint64_t Path::ReservedBytes() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->reserved_bytes;
}

Result<FileId> Path::CreateFile(const FileOwner& owner) {
  if (!IsName(owner.job)) return Status::Invalid("a job name must match [A-Za-z0-9_][A-Za-z0-9._-]{0,127}");
  const std::string job = JobFolder(owner), rank = RankFolder(owner);
  Result<UniqueFd> job_fd = OpenOwnFolder(impl_->node_fd.get(), job, impl_->shown + "/" + job);
  if (!job_fd.ok()) return job_fd.status();
  Result<UniqueFd> rank_fd = OpenOwnFolder(job_fd->get(), rank, impl_->shown + "/" + job + "/" + rank);
  if (!rank_fd.ok()) return rank_fd.status();
  Result<UniqueFd> fd = impl_->MakeStateFile(rank_fd->get(), owner, direct_io_);
  if (!fd.ok()) {  // fails where somebody's file is in the folder: then it stays
    if (::unlinkat(job_fd->get(), rank.c_str(), AT_REMOVEDIR) == 0)
      (void)::unlinkat(impl_->node_fd.get(), job.c_str(), AT_REMOVEDIR);
    return fd.status();
  }
  StateFile file;
  if (struct stat st; ::fstat(fd->get(), &st) == 0) {  // else its header says whose it is
    file.device = st.st_dev;
    file.inode = st.st_ino;
  }
  file.fd = std::make_shared<const UniqueFd>(std::move(*fd));
  file.owner = owner;
  std::lock_guard lock(impl_->mutex);
  const FileId id = impl_->next_file++;
  impl_->files.emplace(id, std::move(file));
  return id;
}

Status Path::Reserve(FileId id, uint64_t bytes, bool unused) {
  // Only this thread makes and removes files, so the descriptor stays; the lock is not held over a slow fallocate.
  int fd = -1;
  uint64_t from = 0;
  {
    std::lock_guard lock(impl_->mutex);
    const auto found = impl_->files.find(id);
    if (found == impl_->files.end()) return Status(-EBADF, "no file " + std::to_string(id) + " on path " + name_);
    if (bytes <= found->second.reserved_bytes) return Status();
    fd = found->second.fd->get();
    from = found->second.reserved_bytes;
  }
  const Result<uint64_t> free_bytes = impl_->FreeOnFileSystem();
  if (!free_bytes.ok()) return free_bytes.status();
  const uint64_t available = std::min(free_bytes.value(), impl_->LeftOfCapacity(config_.capacity_bytes));
  const auto no_space = [&](int error, uint64_t have) {
    return Status(-error,
                  "path " + name_ + " (" + directory_ + ") cannot give " + ByteText(bytes - from) + " more; " +
                      ByteText(have) + " are available" +
                      (config_.capacity_bytes != 0 ? " (capacity is " + ByteText(config_.capacity_bytes) + ")" : "") +
                      "; free space there, raise its capacity, or add a path");
  };
  if (bytes - from > available) return no_space(ENOSPC, available);

  bool allocated = true;
  int error = 0;
  for (uint64_t at = from; at < bytes && error == 0;) {
    const uint64_t length = std::min(kAllocateBytes, bytes - at);
    if (::fallocate(fd, 0, static_cast<off_t>(kFileHeaderBytes + at), static_cast<off_t>(length)) == 0) {
      at += length;
    } else if (errno == EOPNOTSUPP || errno == ENOSYS) {  // promised only; room for it was checked above
      allocated = false;
      if (unused && ::ftruncate(fd, static_cast<off_t>(kFileHeaderBytes + bytes)) != 0) error = errno;
      break;
    } else if (errno != EINTR) {
      error = errno;
    }
  }
  if (error != 0) {
    if (unused && ::ftruncate(fd, static_cast<off_t>(kFileHeaderBytes + from)) != 0)
      spdlog::warn("event=reserve_undo_failed path={} file={} errno={}", name_, id, errno);
    if (error == ENOSPC || error == EDQUOT) return no_space(error, available);
    if (error == EFBIG)
      return Status(-EFBIG, "path " + name_ + " (" + directory_ + "): a file of " + ByteText(kFileHeaderBytes + bytes) +
                                " is beyond RLIMIT_FSIZE or the file system's limit; raise LimitFSIZE= or ulimit -f");
    return PathError(error, "reserving " + ByteText(bytes - from) + " on path " + name_ + " in", directory_);
  }
  std::lock_guard lock(impl_->mutex);
  StateFile& file = impl_->files.at(id);
  file.reserved_bytes = bytes;
  file.allocated = file.allocated && allocated;
  impl_->reserved_bytes += bytes - from;
  return Status();
}

Status Path::RemoveFile(FileId id) {
  StateFile file;
  {
    std::lock_guard lock(impl_->mutex);
    const auto found = impl_->files.find(id);
    if (found == impl_->files.end()) return Status(-EBADF, "no file " + std::to_string(id) + " on path " + name_);
    file = std::move(found->second);
    impl_->files.erase(found);
    impl_->reserved_bytes -= file.reserved_bytes;
  }
  file.fd.reset();
  return impl_->Unlink(file);
}

Status Path::HandOver(FileId id, const std::function<Status(const Leaving&)>& move) {
  StateFile file;
  {
    std::lock_guard lock(impl_->mutex);
    const auto found = impl_->files.find(id);
    if (found == impl_->files.end()) return Status(-EBADF, "no file " + std::to_string(id) + " on path " + name_);
    file = found->second;
  }
  UniqueFd job_fd;
  Result<UniqueFd> rank_fd = impl_->OpenRankFolder(file.owner, &job_fd);
  if (!rank_fd.ok()) return rank_fd.status();
  if (Status ours = impl_->IsOurs(rank_fd->get(), file); !ours.ok()) return ours;
  const Status moved = move({file.fd->get(), rank_fd->get(), kStateFile, impl_->FileName(file.owner), file.owner});
  // Whatever it says: where the name is gone, so is the file, and nothing of ours is to be removed there.
  struct stat st;
  if (::fstatat(rank_fd->get(), kStateFile, &st, AT_SYMLINK_NOFOLLOW) == 0 || errno != ENOENT) return moved;
  {
    std::lock_guard lock(impl_->mutex);
    const auto found = impl_->files.find(id);
    if (found != impl_->files.end()) {
      found->second.handed_over = true;
      impl_->reserved_bytes -= std::exchange(found->second.reserved_bytes, 0);
    }
  }
  const Status emptied = impl_->RemoveFolders(job_fd.get(), file.owner);
  if (!emptied.ok()) spdlog::warn("event=remove_failed path={} reason=\"{}\"", name_, emptied.message());
  return moved;
}

int Path::descriptor(FileId id) const {
  std::lock_guard lock(impl_->mutex);
  const auto found = impl_->files.find(id);
  return found == impl_->files.end() ? -1 : found->second.fd->get();
}

std::shared_ptr<const UniqueFd> Path::Share(FileId id) const {
  std::lock_guard lock(impl_->mutex);
  const auto found = impl_->files.find(id);
  return found == impl_->files.end() ? nullptr : found->second.fd;
}

}  // namespace mlpo
