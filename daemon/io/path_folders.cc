#include "daemon/io/path_folders.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <ctime>
#include <string>

#include "daemon/base/file_io.h"
#include "daemon/io/scratch_layout.h"

namespace mlpo {
namespace {

constexpr int kFolderFlags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;

std::string OctalMode(mode_t mode) {
  char text[16];
  std::snprintf(text, sizeof text, "%04o", static_cast<unsigned>(mode & 07777));
  return text;
}

Status NotAFolder(int error, const std::string& shown) {
  // O_NOFOLLOW with O_DIRECTORY answers ENOTDIR or ELOOP for a link.
  return Status(-error, shown +
                            " is a symbolic link or a file where a folder of the daemon should be; it is not "
                            "followed: remove it or use another directory");
}

// mkdir applies the umask and chmod comes after it: a folder made aside and renamed has its mode from the start.
// 0, or an errno; EEXIST if somebody else was faster.
int MakeStickyFolder(int directory_fd) {
  uint64_t random = 0;
  if (::getrandom(&random, sizeof random, 0) != sizeof random) return errno;
  char aside[64];
  std::snprintf(aside, sizeof aside, ".%s-%016llx", kTopFolder, static_cast<unsigned long long>(random));
  if (::mkdirat(directory_fd, aside, 0700) != 0) return errno;
  UniqueFd folder(::openat(directory_fd, aside, kFolderFlags));
  const int error = !folder || ::fchmod(folder.get(), 01777) != 0
                        ? errno
                        : MoveToFreeName(directory_fd, aside, directory_fd, kTopFolder);
  if (error != 0) (void)::unlinkat(directory_fd, aside, AT_REMOVEDIR);  // the first error is the one to report
  return error;
}

Status WriteRecord(int fd, const std::string& node, const std::string& shown) {
  char host[256] = "?";
  if (::gethostname(host, sizeof host - 1) != 0) return Status::Errno(errno, "gethostname");
  const std::string record = "pid=" + std::to_string(::getpid()) + "\nuid=" + std::to_string(::geteuid()) +
                             "\nnode=" + node + "\nhost=" + host + "\nstarted=" + std::to_string(std::time(nullptr)) +
                             "\n";
  if (::ftruncate(fd, 0) != 0) return PathError(errno, "emptying the lock file", shown);
  const ssize_t put = ::pwrite(fd, record.data(), record.size(), 0);
  if (put < 0) return PathError(errno, "writing the lock file", shown);
  if (static_cast<size_t>(put) != record.size()) return PathError(ENOSPC, "writing the lock file", shown);
  return Status();
}

}  // namespace

Status PathError(int error, const std::string& what, const std::string& shown) {
  std::string advice;
  switch (error) {
    case EACCES:
    case EPERM:
      advice = "; let uid " + std::to_string(::geteuid()) +
               " read and write there, and under systemd list the directory in ReadWritePaths=";
      break;
    case EROFS:
      advice = "; mount it writable, and under systemd list the directory in ReadWritePaths=";
      break;
    case ENOSPC:
    case EDQUOT:
      advice = "; free space there or take the path out";
      break;
    case ENOLCK:
    case ENOSYS:
    case EOPNOTSUPP:
      advice = "; the file system cannot do this (Lustre: mount with -o flock)";
      break;
    default:
      break;
  }
  const Status status = Status::Errno(error, what + " " + shown);
  return Status(status.code(), status.message() + advice);
}

Result<UniqueFd> OpenPathDirectory(const std::string& directory) {
  if (directory.empty()) return Status::Invalid("a path without a directory; set --path or [[path]] directory");
  UniqueFd fd(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd && (errno == ENOENT || errno == ENOTDIR)) {
    const Status status = Status::Errno(errno, "opening the path directory " + directory);
    return Status(status.code(), status.message() + "; make the directory, or correct --path or [[path]] directory");
  }
  if (!fd) return PathError(errno, "opening the path directory", directory);
  // With the effective uid, as every later call; the start probe proves it by writing. A path may be writable only in
  // its mlpo folder, so that is not refused here.
  if (::faccessat(fd.get(), ".", R_OK | X_OK, AT_EACCESS) != 0)
    return PathError(errno, "reading the path directory", directory);
  return fd;
}

Result<UniqueFd> OpenTopFolder(int directory_fd, const std::string& shown) {
  for (int attempt = 0; attempt < 3; ++attempt) {
    UniqueFd fd(::openat(directory_fd, kTopFolder, kFolderFlags));
    if (fd) {
      struct stat st;
      if (::fstat(fd.get(), &st) != 0) return PathError(errno, "looking at", shown);
      const bool private_to_owner = (st.st_mode & 022) == 0 && (st.st_uid == ::geteuid() || st.st_uid == 0);
      if ((st.st_mode & S_ISVTX) != 0 || private_to_owner) return fd;
      return Status(-EPERM, shown + " has mode " + OctalMode(st.st_mode) + " and owner " + std::to_string(st.st_uid) +
                                ": others could replace our folders in it; run chmod 1777 on it");
    }
    if (errno == ENOTDIR || errno == ELOOP) return NotAFolder(errno, shown);
    if (errno != ENOENT) return PathError(errno, "opening", shown);
    const int error = MakeStickyFolder(directory_fd);
    if (error != 0 && error != EEXIST) return PathError(error, "making", shown);
  }
  return Status(-EAGAIN, shown + " appears and disappears; is somebody else cleaning the directory?");
}

Result<UniqueFd> OpenOwnFolder(int parent_fd, const std::string& name, const std::string& shown) {
  if (::mkdirat(parent_fd, name.c_str(), 0700) != 0 && errno != EEXIST) return PathError(errno, "making", shown);
  UniqueFd fd(::openat(parent_fd, name.c_str(), kFolderFlags));
  if (!fd && (errno == ENOTDIR || errno == ELOOP)) return NotAFolder(errno, shown);
  // Without read permission for us it is somebody else's: say whose.
  struct stat st;
  if (!fd && (errno != EACCES || ::fstatat(parent_fd, name.c_str(), &st, AT_SYMLINK_NOFOLLOW) != 0))
    return PathError(errno, "opening", shown);
  if (fd && ::fstat(fd.get(), &st) != 0) return PathError(errno, "looking at", shown);
  if (st.st_uid != ::geteuid())
    return Status(-EPERM, shown + " belongs to uid " + std::to_string(st.st_uid) + ", not to the daemon's uid " +
                              std::to_string(::geteuid()) + "; it is not used: have its owner or root remove it");
  if (!fd) return PathError(EACCES, "opening", shown);
  if ((st.st_mode & 07777) != 0700 && ::fchmod(fd.get(), 0700) != 0)
    return PathError(errno, "setting mode 0700 of", shown);
  return fd;
}

NodeHolder ReadHolder(int lock_fd) {
  char text[512];
  const ssize_t got = ::pread(lock_fd, text, sizeof text, 0);
  std::string record(text, got > 0 ? static_cast<size_t>(got) : 0);
  for (char& c : record) c = c == '\n' ? ' ' : c >= ' ' && c < 0x7f ? c : '?';
  while (record.ends_with(' ')) record.pop_back();
  NodeHolder holder{record.empty() ? "of unknown pid" : record, ""};
  if (const size_t at = record.find("host="); at != std::string::npos)
    holder.host = record.substr(at + 5, record.find(' ', at) - at - 5);
  return holder;
}

bool TryLock(int fd) {
  int rc;
  do {
    rc = ::flock(fd, LOCK_EX | LOCK_NB);
  } while (rc != 0 && errno == EINTR);
  return rc == 0;
}

Result<UniqueFd> LockNodeFolder(int node_fd, const std::string& node, const std::string& shown) {
  UniqueFd fd(::openat(node_fd, kLockFile, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!fd) return PathError(errno, "opening the lock file in", shown);
  struct stat st;
  if (::fstat(fd.get(), &st) != 0) return PathError(errno, "looking at the lock file in", shown);
  if (!S_ISREG(st.st_mode) || st.st_uid != ::geteuid())
    return Status(-EPERM, "the lock file in " + shown + " is not a regular file of uid " + std::to_string(::geteuid()) +
                              "; remove it");
  const bool locked = TryLock(fd.get());
  if (!locked && errno == EWOULDBLOCK)
    return Status(-EBUSY, shown + " is in use by another daemon of this user and node (" + ReadHolder(fd.get()).text +
                              "); stop that daemon, use another directory, or give this one its own [daemon] node");
  if (!locked) return PathError(errno, "locking", shown);
  const Status recorded = WriteRecord(fd.get(), node, shown);
  if (!recorded.ok()) return recorded;
  return fd;
}

}  // namespace mlpo
