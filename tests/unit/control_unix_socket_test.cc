// BindUnixSocket against what the kernel shows of the file, and against others who were there first.
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>

#include "daemon/base/unix_socket.h"
#include "tests/support/catch.h"
#include "tests/support/scratch_dir.h"

using mlpo::BindUnixSocket;
using mlpo::BoundSocket;
using mlpo::Result;
using mlpo::UniqueFd;

namespace {

UniqueFd Listen(const std::string& path, int type, bool listening = true) {
  UniqueFd fd(::socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.c_str(), path.size());
  REQUIRE(::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
  if (listening) REQUIRE(::listen(fd.get(), 1) == 0);
  return fd;
}

UniqueFd Connect(const std::string& path, int type) {
  UniqueFd fd(::socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.c_str(), path.size());
  if (::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) fd.reset();
  return fd;
}

mode_t ModeOf(const std::string& path) {
  struct stat st;
  REQUIRE(::lstat(path.c_str(), &st) == 0);
  return st.st_mode & 07777;
}

bool Exists(const std::string& path) {
  struct stat st;
  return ::lstat(path.c_str(), &st) == 0;
}

bool Root() {
  if (::geteuid() == 0) return true;
  WARN("skipped: making files of another uid needs root");
  return false;
}

}  // namespace

TEST_CASE("BindUnixSocket.ServesWithItsModeAndLeavesNothing") {
  ScratchDir dir;
  const std::string path = dir / "mlpo.sock";
  for (const mode_t old_mask : {0u, 022u, 077u}) {
    const mode_t saved = ::umask(old_mask);
    {
      Result<BoundSocket> bound = BindUnixSocket(path, SOCK_SEQPACKET, 0660);
      REQUIRE(bound.status().message() == "");
      CHECK(ModeOf(path) == 0660);
      CHECK(Connect(path, SOCK_SEQPACKET));
      int flags = ::fcntl(bound->fd(), F_GETFD);
      CHECK((flags & FD_CLOEXEC) != 0);
      CHECK((::fcntl(bound->fd(), F_GETFL) & O_NONBLOCK) != 0);
      BoundSocket moved = std::move(*bound);
      CHECK(Connect(moved.path(), SOCK_SEQPACKET));
    }
    CHECK_FALSE(Exists(path));
    CHECK_FALSE(Exists(path + ".lock"));
    ::umask(saved);
  }
}

TEST_CASE("BindUnixSocket.TwoOnOnePathIsAddressInUse") {
  ScratchDir dir;
  const std::string path = dir / "mlpo.sock";
  Result<BoundSocket> first = BindUnixSocket(path, SOCK_STREAM, 0600);
  REQUIRE(first.ok());
  Result<BoundSocket> second = BindUnixSocket(path, SOCK_STREAM, 0600);
  REQUIRE_FALSE(second.ok());
  CHECK(second.status().code() == -EADDRINUSE);
  CHECK(second.status().message().find(path) != std::string::npos);
  CHECK(Connect(path, SOCK_STREAM));  // the first was not disturbed
}

TEST_CASE("BindUnixSocket.AListenerWithoutOurLockIsNotReplaced") {
  ScratchDir dir;
  const std::string path = dir / "mlpo.sock";
  for (const int type : {SOCK_STREAM, SOCK_SEQPACKET}) {
    UniqueFd other = Listen(path, type);
    Result<BoundSocket> bound = BindUnixSocket(path, SOCK_STREAM, 0600);
    REQUIRE_FALSE(bound.ok());
    CHECK(bound.status().code() == -EADDRINUSE);
    CHECK(Connect(path, type));
    CHECK_FALSE(Exists(path + ".lock"));
    ::unlink(path.c_str());
  }
}

TEST_CASE("BindUnixSocket.AStaleSocketOfAKilledDaemonIsReplaced") {
  ScratchDir dir;
  const std::string path = dir / "mlpo.sock";
  const pid_t child = ::fork();
  if (child == 0) {
    Result<BoundSocket> bound = BindUnixSocket(path, SOCK_STREAM, 0600);
    ::_exit(bound.ok() ? 0 : 1);  // no destructors: as after kill -9
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  REQUIRE(status == 0);
  REQUIRE(Exists(path));
  REQUIRE_FALSE(Connect(path, SOCK_STREAM));
  Result<BoundSocket> bound = BindUnixSocket(path, SOCK_STREAM, 0600);
  REQUIRE(bound.status().message() == "");
  CHECK(Connect(path, SOCK_STREAM));
}

TEST_CASE("C29_BindUnixSocket.WhatIsNotOursIsRefusedAndLeftAlone") {
  ScratchDir dir;
  const std::string path = dir / "mlpo.sock";
  SECTION("a regular file in the socket's place") {
    UniqueFd file(::open(path.c_str(), O_CREAT | O_WRONLY, 0600));
    Result<BoundSocket> bound = BindUnixSocket(path, SOCK_STREAM, 0600);
    REQUIRE_FALSE(bound.ok());
    CHECK(bound.status().code() == -EEXIST);
    CHECK(Exists(path));
  }
  SECTION("a symlink in the socket's place") {
    REQUIRE(::symlink((dir / "target").c_str(), path.c_str()) == 0);
    Result<BoundSocket> bound = BindUnixSocket(path, SOCK_STREAM, 0600);
    CHECK(bound.status().code() == -EEXIST);
    CHECK_FALSE(Exists(dir / "target"));
  }
  SECTION("a symlink in the lock's place") {
    REQUIRE(::symlink((dir / "target").c_str(), (path + ".lock").c_str()) == 0);
    Result<BoundSocket> bound = BindUnixSocket(path, SOCK_STREAM, 0600);
    REQUIRE_FALSE(bound.ok());
    CHECK(bound.status().code() == -ELOOP);
    CHECK_FALSE(Exists(dir / "target"));
  }
  SECTION("a pipe in the lock's place does not hang us") {
    REQUIRE(::mkfifo((path + ".lock").c_str(), 0600) == 0);
    Result<BoundSocket> bound = BindUnixSocket(path, SOCK_STREAM, 0600);
    CHECK(bound.status().code() == -EEXIST);
  }
  SECTION("a socket of another uid") {
    if (!Root()) return;
    Listen(path, SOCK_STREAM);
    REQUIRE(::lchown(path.c_str(), 65534, 65534) == 0);
    Result<BoundSocket> bound = BindUnixSocket(path, SOCK_STREAM, 0600);
    REQUIRE_FALSE(bound.ok());
    CHECK(bound.status().code() == -EPERM);
    CHECK(bound.status().message().find("65534") != std::string::npos);
    CHECK(Exists(path));
  }
  SECTION("a lock of another uid") {
    if (!Root()) return;
    UniqueFd file(::open((path + ".lock").c_str(), O_CREAT | O_WRONLY, 0666));
    REQUIRE(::lchown((path + ".lock").c_str(), 65534, 65534) == 0);
    Result<BoundSocket> bound = BindUnixSocket(path, SOCK_STREAM, 0600);
    CHECK(bound.status().code() == -EPERM);
    CHECK(Exists(path + ".lock"));
  }
  SECTION("a folder of another uid") {
    if (!Root()) return;
    REQUIRE(::chown(dir.path().c_str(), 65534, 65534) == 0);
    Result<BoundSocket> bound = BindUnixSocket(path, SOCK_STREAM, 0600);
    CHECK(bound.status().code() == -EPERM);
    CHECK(bound.status().message().find("65534") != std::string::npos);
    CHECK_FALSE(Exists(path + ".lock"));
  }
  SECTION("a folder that is a symlink of another uid") {
    if (!Root()) return;
    const std::string link = dir / "link";
    REQUIRE(::mkdir((dir / "real").c_str(), 0700) == 0);
    REQUIRE(::symlink((dir / "real").c_str(), link.c_str()) == 0);
    REQUIRE(::lchown(link.c_str(), 65534, 65534) == 0);
    CHECK(BindUnixSocket(link + "/mlpo.sock", SOCK_STREAM, 0600).status().code() == -EPERM);
  }
  SECTION("a folder that others may write") {
    REQUIRE(::chmod(dir.path().c_str(), 0770) == 0);
    CHECK(BindUnixSocket(path, SOCK_STREAM, 0600).status().code() == -EPERM);
    REQUIRE(::chmod(dir.path().c_str(), 01777) == 0);
    CHECK(BindUnixSocket(path, SOCK_STREAM, 0600).ok());
  }
  SECTION("a folder that is missing, or a file") {
    CHECK(BindUnixSocket(dir / "no/mlpo.sock", SOCK_STREAM, 0600).status().code() == -ENOENT);
    UniqueFd file(::open((dir / "file").c_str(), O_CREAT | O_WRONLY, 0600));
    CHECK(BindUnixSocket(dir / "file/mlpo.sock", SOCK_STREAM, 0600).status().code() == -ENOTDIR);
  }
}

TEST_CASE("BindUnixSocket.ATooLongPathNamesTheLimit") {
  ScratchDir dir;
  Result<BoundSocket> bound = BindUnixSocket(dir / std::string(120, 'x'), SOCK_STREAM, 0600);
  REQUIRE_FALSE(bound.ok());
  CHECK(bound.status().code() == -ENAMETOOLONG);
  CHECK(bound.status().message().find("107") != std::string::npos);
}

TEST_CASE("BindUnixSocket.GivesTheSocketToTheGroup") {
  ScratchDir dir;
  const std::string path = dir / "mlpo.sock";
  const gid_t group = ::geteuid() == 0 ? 12345 : ::getegid();
  Result<BoundSocket> bound = BindUnixSocket(path, SOCK_STREAM, 0660, group);
  REQUIRE(bound.status().message() == "");
  struct stat st;
  REQUIRE(::lstat(path.c_str(), &st) == 0);
  CHECK(st.st_gid == group);
  CHECK((st.st_mode & 07777) == 0660);
}

TEST_CASE("BindUnixSocket.ASocketPutInItsPlaceLaterIsNotUnlinked") {
  ScratchDir dir;
  const std::string path = dir / "mlpo.sock";
  UniqueFd other;
  {
    Result<BoundSocket> bound = BindUnixSocket(path, SOCK_STREAM, 0600);
    REQUIRE(bound.ok());
    REQUIRE(::unlink(path.c_str()) == 0);
    other = Listen(path, SOCK_STREAM);
  }
  CHECK(Connect(path, SOCK_STREAM));
}

TEST_CASE("PeerOf.NamesThisProcessAndItsGroups") {
  int pair[2];
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
  UniqueFd a(pair[0]), b(pair[1]);
  Result<mlpo::Peer> peer = mlpo::PeerOf(a.get());
  REQUIRE(peer.ok());
  CHECK(peer->pid == ::getpid());
  CHECK(peer->uid == ::geteuid());
  CHECK(peer->InGroup(::getegid()));
  std::vector<gid_t> groups(static_cast<size_t>(::getgroups(0, nullptr)));
  REQUIRE(::getgroups(static_cast<int>(groups.size()), groups.data()) >= 0);
  for (const gid_t group : groups) CHECK(peer->InGroup(group));
  CHECK_FALSE(peer->InGroup(0x7ffffff0));
  CHECK_FALSE(mlpo::PeerOf(STDERR_FILENO + 100).ok());
}

TEST_CASE("GroupByName.NamesAndNumbers") {
  CHECK(*mlpo::GroupByName("root") == 0);
  CHECK(*mlpo::GroupByName("4321") == 4321);
  CHECK(mlpo::GroupByName("no-such-group-here").status().code() == -ENOENT);
  CHECK(mlpo::GroupByName("").status().code() == -ENOENT);
  CHECK_FALSE(mlpo::GroupByName("4294967295").ok());  // (gid_t)-1 means "leave it"
}
