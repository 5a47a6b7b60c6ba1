#include "daemon/checkpoint/folders.h"

#include <fcntl.h>
#include <linux/openat2.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/base/file_io.h"

namespace mlpo {
namespace {

constexpr size_t kReadBytes = size_t{1} << 18;  // at a time

StepHook& Hook() {
  static StepHook hook;
  return hook;
}

void Step(std::string_view step, std::string_view shown) {
  if (Hook()) Hook()(step, shown);
}

Status Error(int error, const std::string& what, const std::string& shown) {
  std::string advice;
  switch (error) {
    case EACCES:
    case EPERM:
    case EROFS:
      advice = "; let uid " + std::to_string(::geteuid()) + " write there, under systemd by ReadWritePaths= too";
      break;
    case ENOSPC:
    case EDQUOT:
      advice = "; free space there or save elsewhere";
      break;
    case ELOOP:
      advice = "; a link is not followed below the directory of the checkpoints";
      break;
    default:
      break;
  }
  const Status status = Status::Errno(error, what + " " + shown);
  return Status(status.code(), status.message() + advice);
}

// One name below a folder, never a link. openat2 insists on that for the whole path; where a sandbox refuses the call,
// O_NOFOLLOW does for a single name.
int OpenBelow(int folder_fd, const std::string& name, int flags, mode_t mode) {
  MLPO_CHECK(!name.empty() && name != "." && name != ".." && name.find('/') == std::string::npos);
  open_how how{};
  how.flags = static_cast<uint64_t>(flags | O_CLOEXEC | O_NOFOLLOW);
  how.mode = (flags & O_CREAT) != 0 ? mode : 0;
  how.resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS;
  while (true) {
    const long fd = ::syscall(SYS_openat2, folder_fd, name.c_str(), &how, sizeof how);
    if (fd >= 0) return static_cast<int>(fd);
    if (errno == EINTR || errno == EAGAIN) continue;  // EAGAIN: a rename somewhere raced with it
    if (errno != ENOSYS && errno != EPERM) return -1;
    return ::openat(folder_fd, name.c_str(), flags | O_CLOEXEC | O_NOFOLLOW, mode);
  }
}

}  // namespace

std::string ParentOf(const std::string& shown) { return shown.substr(0, shown.rfind('/')); }

void SetStepHook(StepHook hook) { Hook() = std::move(hook); }

Result<UniqueFd> OpenCheckpointDirectory(const std::string& directory) {
  if (directory.empty() || directory.front() != '/')
    return Status::Invalid("the directory for checkpoints '" + directory + "' is not absolute");
  UniqueFd fd(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (fd) return fd;
  const Status status = Error(errno, "opening the directory for checkpoints", directory);
  if (status.os_errno() != ENOENT) return status;
  return Status(status.code(), status.message() + "; make it first");
}

Result<UniqueFd> OpenFolder(int parent_fd, const std::string& name, const std::string& shown) {
  UniqueFd fd(OpenBelow(parent_fd, name, O_RDONLY | O_DIRECTORY, 0));
  if (!fd) return Error(errno, "opening", shown);
  return fd;
}

Result<UniqueFd> MakeFolder(int parent_fd, const std::string& name, const std::string& shown) {
  Step("mkdir", shown);
  const bool made = ::mkdirat(parent_fd, name.c_str(), 0700) == 0;
  if (!made && errno != EEXIST) return Error(errno, "making", shown);
  Result<UniqueFd> fd = OpenFolder(parent_fd, name, shown);
  if (!fd.ok()) return fd;
  struct stat st;
  if (::fstat(fd->get(), &st) != 0) return Error(errno, "looking at", shown);
  if (st.st_uid != ::geteuid())
    return Status(-EPERM, shown + " belongs to uid " + std::to_string(st.st_uid) + ", not to uid " +
                              std::to_string(::geteuid()) + " who saves: use another tag or directory");
  if ((st.st_mode & 022) != 0)
    return Status(-EPERM,
                  shown + " can be written to by others, who could replace what is in it: run chmod go-w on it");
  // Also if it was there: who made it may have died before its entry was durable.
  const Status synced = SyncFolder(parent_fd, ParentOf(shown));
  if (!synced.ok()) return synced;
  return fd;
}

Result<std::vector<std::string>> ListFolder(int folder_fd, const std::string& shown) {
  std::vector<std::string> names;
  if (const int error = ListNames(folder_fd, &names); error != 0) return Error(error, "listing", shown);
  return names;
}

Status SyncFolder(int folder_fd, const std::string& shown) {
  Step("sync_folder", shown);
  if (::fsync(folder_fd) != 0) return Error(errno, "syncing", shown);
  return Status();
}

Result<bool> RemoveEmptyFolder(int parent_fd, const std::string& name, const std::string& shown) {
  Step("rmdir", shown);
  if (::unlinkat(parent_fd, name.c_str(), AT_REMOVEDIR) == 0) return true;
  if (errno == ENOTEMPTY || errno == EEXIST || errno == ENOENT) return false;
  return Error(errno, "removing", shown);
}

Result<UniqueFd> OpenFile(int folder_fd, const std::string& name, int flags, const std::string& shown) {
  UniqueFd fd(OpenBelow(folder_fd, name, flags | O_NONBLOCK, 0));  // a FIFO in its place holds nobody up
  if (!fd) return Error(errno, "opening", shown);
  struct stat st;
  if (::fstat(fd.get(), &st) != 0) return Error(errno, "looking at", shown);
  if (!S_ISREG(st.st_mode)) return Status::Invalid(shown + " is no regular file");
  return fd;
}

namespace {

Result<UniqueFd> Believed(int folder_fd, const char* directory, Result<UniqueFd> fd, const std::string& shown) {
  if (!fd.ok()) return fd;
  struct stat top, st;
  if (::fstatat(folder_fd, directory, &top, 0) != 0 || ::fstat(fd->get(), &st) != 0)
    return Error(errno, "looking at the owner of", shown);
  if (st.st_uid == ::geteuid() || st.st_uid == 0 || st.st_uid == top.st_uid) return fd;
  return Status(-EPERM, shown + " belongs to uid " + std::to_string(st.st_uid) +
                            ", who is neither this user, nor root, nor the owner of the directory of the checkpoints");
}

}  // namespace

Result<UniqueFd> OpenBelievedFolder(int parent_fd, const std::string& name, const char* directory,
                                    const std::string& shown) {
  return Believed(parent_fd, directory, OpenFolder(parent_fd, name, shown), shown);
}

Result<UniqueFd> OpenBelievedFile(int folder_fd, const std::string& name, int flags, const std::string& shown) {
  return Believed(folder_fd, "../..", OpenFile(folder_fd, name, flags, shown), shown);
}

Result<UniqueFd> MakeNamelessFile(int folder_fd, const std::string& shown) {
  Step("make_nameless", shown);
  UniqueFd fd(::openat(folder_fd, ".", O_RDWR | O_TMPFILE | O_CLOEXEC, 0600));
  if (!fd) return Error(errno, "making a file without a name for", shown);
  return fd;
}

Result<UniqueFd> MakeFile(int folder_fd, const std::string& name, const std::string& shown) {
  Step("make_file", shown);
  UniqueFd fd(OpenBelow(folder_fd, name, O_RDWR | O_CREAT | O_EXCL, 0600));
  if (!fd) return Error(errno, "making", shown);
  return fd;
}

Status GiveName(int fd, int folder_fd, const std::string& name, const std::string& shown) {
  Step("link", shown);
  const std::string self = "/proc/self/fd/" + std::to_string(fd);
  if (::linkat(AT_FDCWD, self.c_str(), folder_fd, name.c_str(), AT_SYMLINK_FOLLOW) != 0)
    return Error(errno, "naming", shown);
  return Status();
}

Status MoveFile(int from_fd, const std::string& name, int to_fd, const std::string& new_name, const std::string& shown,
                const std::string& new_shown) {
  Step("move", new_shown);
  const int error = MoveToFreeName(from_fd, name, to_fd, new_name);
  return error == 0 ? Status() : Status::Errno(error, "moving " + shown + " to " + new_shown);
}

Result<bool> RemoveFile(int folder_fd, const std::string& name, const std::string& shown) {
  Step("unlink", shown);
  if (::unlinkat(folder_fd, name.c_str(), 0) == 0) return true;
  if (errno == ENOENT) return false;
  return Error(errno, "removing", shown);
}

Result<uint64_t> InodeOf(int fd, const std::string& shown) {
  struct stat st;
  if (::fstat(fd, &st) != 0) return Error(errno, "looking at", shown);
  return static_cast<uint64_t>(st.st_ino);
}

Result<bool> IsThere(int folder_fd, const std::string& name, const std::string& shown) {
  struct stat st;
  if (::fstatat(folder_fd, name.c_str(), &st, AT_SYMLINK_NOFOLLOW) == 0) return true;
  if (errno == ENOENT) return false;
  return Error(errno, "looking at", shown);
}

Result<bool> IsNamed(int folder_fd, const std::string& name, int fd, const std::string& shown) {
  struct stat named, held;
  if (::fstat(fd, &held) != 0) return Error(errno, "looking at", shown);
  if (::fstatat(folder_fd, name.c_str(), &named, AT_SYMLINK_NOFOLLOW) == 0)
    return named.st_dev == held.st_dev && named.st_ino == held.st_ino;
  if (errno == ENOENT) return false;
  return Error(errno, "looking at", shown);
}

Result<FolderMark> MarkOf(int folder_fd, const std::string& shown) {
  struct stat st;
  struct statfs fs;
  if (::fstat(folder_fd, &st) != 0 || ::fstatfs(folder_fd, &fs) != 0) return Error(errno, "looking at", shown);
  FolderMark mark;
  mark.inode = st.st_ino;
  static_assert(sizeof fs.f_fsid == sizeof mark.file_system);
  std::memcpy(&mark.file_system, &fs.f_fsid, sizeof mark.file_system);
  if (mark.file_system == 0) mark.file_system = static_cast<uint64_t>(fs.f_type);
  return mark;
}

Result<FolderMark> MarkOfParent(int folder_fd, const std::string& shown) {
  const UniqueFd parent(::openat(folder_fd, "..", O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (!parent) return Error(errno, "opening the folder above", shown);
  return MarkOf(parent.get(), ParentOf(shown));
}

Result<FileLock> LockFile(int fd, bool shared, const std::string& shown) {
  int rc;
  do {
    rc = ::flock(fd, (shared ? LOCK_SH : LOCK_EX) | LOCK_NB);
  } while (rc != 0 && errno == EINTR);
  if (rc == 0) return FileLock::kTaken;
  switch (errno) {
    case EWOULDBLOCK:
      return FileLock::kHeld;
    case ENOSYS:
    case EOPNOTSUPP:
    case ENOLCK:
    case EINVAL:
      return FileLock::kUnknown;
    default:
      return Error(errno, "locking", shown);
  }
}

Status UnlockFile(int fd, const std::string& shown) {
  if (::flock(fd, LOCK_UN) == 0 || errno == ENOSYS || errno == EOPNOTSUPP || errno == ENOLCK || errno == EINVAL)
    return Status();
  return Error(errno, "unlocking", shown);
}

Status WriteAll(int fd, const void* data, size_t bytes, uint64_t offset, const std::string& shown) {
  Step("write", shown);
  if (const int error = WriteAt(fd, data, bytes, offset); error != 0) return Error(error, "writing", shown);
  return Status();
}

Status SyncData(int fd, const std::string& shown) {
  Step("sync", shown);
  if (::fdatasync(fd) != 0) return Error(errno, "syncing", shown);
  return Status();
}

// Memory comes with what has been read: a file may say any size, and its reading never end.
Result<std::string> ReadBeginning(int fd, size_t max_bytes, const std::string& shown) {
  std::string text;
  size_t done = 0;
  while (done < max_bytes) {
    if (done == text.size()) text.resize(std::min(max_bytes, done + kReadBytes));
    const ssize_t got = ::pread(fd, text.data() + done, text.size() - done, static_cast<off_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return Error(errno, "reading", shown);
    if (got == 0) break;
    done += static_cast<size_t>(got);
  }
  text.resize(done);
  return text;
}

Result<std::string> ReadText(int folder_fd, const std::string& name, uint64_t max_bytes, const std::string& shown) {
  Result<UniqueFd> fd = OpenBelievedFile(folder_fd, name, O_RDONLY, shown);
  if (!fd.ok()) return fd.status();
  struct stat st;
  if (::fstat(fd->get(), &st) != 0) return Error(errno, "looking at", shown);
  const auto bytes = static_cast<uint64_t>(st.st_size);
  if (bytes > max_bytes)
    return Status::Invalid(shown + " has " + std::to_string(bytes) + " bytes; at most " + std::to_string(max_bytes) +
                           " are read");
  return ReadBeginning(fd->get(), static_cast<size_t>(bytes), shown);
}

Status CommitText(int folder_fd, const std::string& new_name, const std::string& name, std::string_view text,
                  const std::string& shown) {
  const std::string shown_new = shown + "/" + new_name;
  const Result<bool> removed = RemoveFile(folder_fd, new_name, shown_new);  // what an earlier try left
  if (!removed.ok()) return removed.status();
  Result<UniqueFd> fd = MakeFile(folder_fd, new_name, shown_new);
  if (!fd.ok()) return fd.status();
  Status status = WriteAll(fd->get(), text.data(), text.size(), 0, shown_new);
  if (status.ok()) {
    Step("sync", shown_new);
    if (::fsync(fd->get()) != 0) status = Error(errno, "syncing", shown_new);
  }
  if (status.ok()) {
    Step("rename", shown + "/" + name);
    if (::renameat(folder_fd, new_name.c_str(), folder_fd, name.c_str()) != 0)
      status = Error(errno, "renaming to", shown + "/" + name);
  }
  if (!status.ok()) {
    (void)::unlinkat(folder_fd, new_name.c_str(), 0);  // the first error is the one to report
    return status;
  }
  return SyncFolder(folder_fd, shown);
}

}  // namespace mlpo
