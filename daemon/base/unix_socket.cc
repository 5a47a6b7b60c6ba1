#include "daemon/base/unix_socket.h"

#include <fcntl.h>
#include <grp.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>

namespace mlpo {
namespace {

constexpr int kLockAttempts = 100;

std::string Folder(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

// Opens and locks "<path>.lock". Its holder unlinks it at the end, so the name is looked at again after locking.
Result<UniqueFd> TakeLock(const std::string& path) {
  const std::string name = path + ".lock";
  for (int attempt = 0; attempt < kLockAttempts; ++attempt) {
    UniqueFd fd(::open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY, 0600));
    if (!fd) {
      const int error = errno;
      struct stat st;
      if (::lstat(name.c_str(), &st) == 0 && st.st_uid != ::geteuid())
        return Status(-EPERM, "lock file " + name + " belongs to uid " + std::to_string(st.st_uid) + ": refused");
      return Status::Errno(error, "lock file " + name);
    }
    struct stat held, named;
    if (::fstat(fd.get(), &held) != 0) return Status::Errno(errno, "lock file " + name);
    if (held.st_uid != ::geteuid())
      return Status(-EPERM, "lock file " + name + " belongs to uid " + std::to_string(held.st_uid) + ": refused");
    if (!S_ISREG(held.st_mode)) return Status(-EEXIST, "lock file " + name + " is not a regular file: remove it");
    if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
      const int error = errno;
      if (error == EINTR) continue;
      if (error != EWOULDBLOCK) return Status::Errno(error, "flock " + name);
      return Status(-EADDRINUSE, "another daemon serves socket " + path + " (it holds " + name + ")");
    }
    if (::lstat(name.c_str(), &named) == 0 && named.st_ino == held.st_ino && named.st_dev == held.st_dev) return fd;
  }
  return Status(-EAGAIN, "lock file " + name + " keeps changing: is another daemon starting again and again?");
}

// Whether somebody listens on the socket at `address`.
Result<bool> Answers(const sockaddr_un& address, int type) {
  UniqueFd probe(::socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!probe) return Status::Errno(errno, "socket(AF_UNIX)");
  int rc;
  do {
    rc = ::connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address);
  } while (rc != 0 && errno == EINTR);
  if (rc == 0) return true;
  switch (errno) {
    case ECONNREFUSED:
    case ENOENT:
      return false;
    case EAGAIN:      // its queue is full
    case EPROTOTYPE:  // it lives, with another type
      return true;
    default:
      return Status::Errno(errno, std::string("probing socket ") + address.sun_path);
  }
}

Status RemoveStale(const std::string& path, const sockaddr_un& address, int type) {
  struct stat st;
  if (::lstat(path.c_str(), &st) != 0) {
    if (errno == ENOENT) return Status();
    return Status::Errno(errno, "socket " + path);
  }
  if (st.st_uid != ::geteuid())
    return Status(-EPERM, path + " belongs to uid " + std::to_string(st.st_uid) + ": not replaced, use another socket");
  if (!S_ISSOCK(st.st_mode)) return Status(-EEXIST, path + " exists and is not a socket: remove it or use another");
  Result<bool> answers = Answers(address, type);
  if (!answers.ok()) return answers.status();
  if (*answers) return Status(-EADDRINUSE, "another program listens on socket " + path);
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) return Status::Errno(errno, "removing the stale socket " + path);
  return Status();
}

}  // namespace

Status CheckSocketFolder(const std::string& path) {
  const std::string folder = Folder(path);
  const std::string what = "folder " + folder + " of socket " + path;
  struct stat st;
  // The name itself first: a symlink that somebody else made could be turned elsewhere at any time.
  if (::lstat(folder.c_str(), &st) != 0) {
    const int error = errno;
    return Status::Errno(error, what + (error == ENOENT ? " (create it, mode 0700)" : ""));
  }
  if (S_ISLNK(st.st_mode) && st.st_uid != ::geteuid() && st.st_uid != 0)
    return Status(-EPERM, what + " is a symbolic link of uid " + std::to_string(st.st_uid) + ": refused");
  if (::stat(folder.c_str(), &st) != 0) return Status::Errno(errno, what);
  if (!S_ISDIR(st.st_mode)) return Status::Errno(ENOTDIR, what);
  if (st.st_uid != ::geteuid() && st.st_uid != 0)
    return Status(-EPERM, what + " belongs to uid " + std::to_string(st.st_uid) + ", not to uid " +
                              std::to_string(::geteuid()) + " or root: use a folder of your own");
  if ((st.st_mode & (S_IWGRP | S_IWOTH)) != 0 && (st.st_mode & S_ISVTX) == 0)
    return Status(-EPERM, what + " can be written by others: chmod go-w " + folder);
  return Status();
}

BoundSocket::BoundSocket(UniqueFd fd, UniqueFd lock, std::string path, dev_t device, ino_t inode)
    : fd_(std::move(fd)), lock_(std::move(lock)), path_(std::move(path)), device_(device), inode_(inode) {}

BoundSocket& BoundSocket::operator=(BoundSocket&& other) noexcept {
  if (this != &other) {
    Close();
    fd_ = std::move(other.fd_);
    lock_ = std::move(other.lock_);
    path_ = std::move(other.path_);
    device_ = other.device_;
    inode_ = other.inode_;
  }
  return *this;
}

BoundSocket::~BoundSocket() { Close(); }

void BoundSocket::Close() {
  if (!fd_) return;
  struct stat st;
  if (::lstat(path_.c_str(), &st) == 0 && st.st_dev == device_ && st.st_ino == inode_) ::unlink(path_.c_str());
  fd_.reset();
  ::unlink((path_ + ".lock").c_str());  // ours: we hold it
  lock_.reset();
}

Result<BoundSocket> BindUnixSocket(const std::string& path, int type, mode_t mode, std::optional<gid_t> group) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.find('\0') != std::string::npos) return Status::Invalid("a socket's path must not be empty");
  if (path.size() >= sizeof address.sun_path)
    return Status(-ENAMETOOLONG, "socket path " + path + " has " + std::to_string(path.size()) + " bytes; at most " +
                                     std::to_string(sizeof address.sun_path - 1) + " are possible");
  std::memcpy(address.sun_path, path.data(), path.size());

  if (Status status = CheckSocketFolder(path); !status.ok()) return status;
  Result<UniqueFd> lock = TakeLock(path);
  if (!lock.ok()) return lock.status();
  // Until the socket is whole, a failure takes the lock file away again (under the lock).
  auto fail = [&](Status status) {
    ::unlink((path + ".lock").c_str());
    return status;
  };
  if (Status status = RemoveStale(path, address, type); !status.ok()) return fail(status);

  UniqueFd fd(::socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) return fail(Status::Errno(errno, "socket(AF_UNIX)"));
  // bind() gives the name the socket inode's mode, less umask: with owner-only bits nobody else ever gets in before
  // group and mode are right.
  if (::fchmod(fd.get(), mode & 0700) != 0) return fail(Status::Errno(errno, "fchmod of a socket"));
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
    return fail(Status::Errno(errno, "binding socket " + path));
  struct stat st;
  if (::lstat(path.c_str(), &st) != 0) return fail(Status::Errno(errno, "socket " + path));
  BoundSocket bound(std::move(fd), std::move(*lock), path, st.st_dev, st.st_ino);  // cleans up from here on
  if (::listen(bound.fd(), SOMAXCONN) != 0) return Status::Errno(errno, "listening on socket " + path);
  if (group && ::lchown(path.c_str(), static_cast<uid_t>(-1), *group) != 0)
    return Status::Errno(
        errno, "giving socket " + path + " to group " + std::to_string(*group) + " (is the daemon a member of it?)");
  if (::chmod(path.c_str(), mode) != 0) return Status::Errno(errno, "setting the mode of socket " + path);
  return bound;
}

bool Peer::InGroup(gid_t group) const { return std::find(groups.begin(), groups.end(), group) != groups.end(); }

Result<Peer> PeerOf(int connected_fd) {
  ucred credentials{};
  socklen_t bytes = sizeof credentials;
  if (::getsockopt(connected_fd, SOL_SOCKET, SO_PEERCRED, &credentials, &bytes) != 0)
    return Status::Errno(errno, "SO_PEERCRED");
  Peer peer;
  peer.pid = credentials.pid;
  peer.uid = credentials.uid;
  peer.groups.resize(64);
  for (;;) {
    bytes = static_cast<socklen_t>(peer.groups.size() * sizeof(gid_t));
    if (::getsockopt(connected_fd, SOL_SOCKET, SO_PEERGROUPS, peer.groups.data(), &bytes) == 0) break;
    if (errno != ERANGE) return Status::Errno(errno, "SO_PEERGROUPS");
    peer.groups.resize(bytes / sizeof(gid_t));  // ERANGE tells the size that is needed
  }
  peer.groups.resize(bytes / sizeof(gid_t));
  peer.groups.push_back(credentials.gid);
  return peer;
}

Result<gid_t> GroupByName(const std::string& name) {
  gid_t number = 0;
  const char* end = name.data() + name.size();
  if (const auto [at, error] = std::from_chars(name.data(), end, number);
      error == std::errc() && at == end && number != static_cast<gid_t>(-1))
    return number;
  std::vector<char> buffer(1024);
  for (;;) {
    group entry{};
    group* found = nullptr;
    const int error = ::getgrnam_r(name.c_str(), &entry, buffer.data(), buffer.size(), &found);
    if (error == ERANGE && buffer.size() < (16u << 20)) {
      buffer.resize(buffer.size() * 4);
      continue;
    }
    if (found != nullptr) return found->gr_gid;
    if (error != 0) return Status::Errno(error, "looking up group " + name);
    return Status(-ENOENT, "there is no group " + name);
  }
}

}  // namespace mlpo
