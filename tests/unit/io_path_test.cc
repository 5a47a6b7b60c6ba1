// Path::Open: what it makes, and what it refuses with which words.
#include "daemon/io/path.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "tests/support/catch.h"
#include "tests/unit/io_scratch.h"

namespace mlpo::test {
namespace {

namespace fs = std::filesystem;

PathConfig At(const std::string& directory) {
  PathConfig config;
  config.directory = directory;
  return config;
}

Result<std::unique_ptr<Path>> OpenAt(const std::string& directory, const std::string& node = "node") {
  return Path::Open(At(directory), "p", node);
}

bool Says(const Status& status, const std::string& text) { return status.message().find(text) != std::string::npos; }

mode_t ModeOf(const std::string& name) {
  struct stat st {};
  REQUIRE(::lstat(name.c_str(), &st) == 0);
  return st.st_mode & 07777;
}

std::string Own(const ScratchFolder& folder) { return folder.path() + "/mlpo/" + std::to_string(::geteuid()); }

// With another effective uid, so that the kernel's permission checks apply to a test run by root.
class AsUid {
 public:
  explicit AsUid(uid_t uid) { REQUIRE(::seteuid(uid) == 0); }
  ~AsUid() { (void)!::seteuid(0); }
  AsUid(const AsUid&) = delete;
  AsUid& operator=(const AsUid&) = delete;
};
constexpr uid_t kStranger = 64321;

bool IsRoot() {
  if (::geteuid() == 0) return true;
  WARN("skipped: needs root to act as another uid or to mount");
  return false;
}

TEST_CASE("Path.MakesItsFoldersWithTheirModesWhateverTheUmask") {
  ScratchFolder folder;
  const mode_t mask = GENERATE(0022, 0077, 0000);
  const mode_t old = ::umask(mask);
  Result<std::unique_ptr<Path>> path = OpenAt(folder.path());
  ::umask(old);
  INFO(path.status().message());
  REQUIRE(path.ok());
  CHECK(path.value()->name() == "p");
  CHECK(path.value()->directory() == folder.path());
  CHECK(ModeOf(folder.path() + "/mlpo") == 01777);
  CHECK(ModeOf(Own(folder)) == 0700);
  CHECK(ModeOf(Own(folder) + "/node") == 0700);
  CHECK(ModeOf(Own(folder) + "/node/lock") == 0600);
  // Nothing else remains: no probe file, no folder made aside.
  CHECK(std::distance(fs::directory_iterator(folder.path()), fs::directory_iterator()) == 1);
  CHECK(std::distance(fs::directory_iterator(Own(folder) + "/node"), fs::directory_iterator()) == 1);
  path.value().reset();
  CHECK(OpenAt(folder.path()).ok());  // again, over what the first left
}

TEST_CASE("Path.DirectoryThatIsNotThereOrNotOneIsNamed") {
  ScratchFolder folder;
  const std::string missing = folder.path() + "/missing", file = folder.path() + "/file";
  std::ofstream(file) << "x";
  const Status none = OpenAt(missing).status();
  CHECK(none.code() == -ENOENT);
  CHECK(Says(none, missing));
  CHECK(Says(none, "--path"));
  const Status not_one = OpenAt(file).status();
  CHECK(not_one.code() == -ENOTDIR);
  CHECK(Says(not_one, file));
  CHECK(OpenAt("").status().code() == -EINVAL);
}

TEST_CASE("Path.UnreadableOrUnwritableDirectoryIsEaccesAndNamesReadWritePaths") {
  if (!IsRoot()) return;
  ScratchFolder folder;
  const mode_t mode = GENERATE(0000, 0555, 0333);
  REQUIRE(::chmod(folder.path().c_str(), mode) == 0);
  AsUid stranger(kStranger);
  const Status status = OpenAt(folder.path()).status();
  CHECK(status.code() == -EACCES);
  CHECK(Says(status, folder.path()));
  CHECK(Says(status, "ReadWritePaths="));
  CHECK(Says(status, std::to_string(kStranger)));
}

TEST_CASE("Path.ReadOnlyFileSystemIsErofsAndNamesReadWritePaths") {
  if (!IsRoot()) return;
  const bool used_before = GENERATE(false, true);
  ScratchFolder point;
  ScratchMount tmpfs("tmpfs", point.path(), "tmpfs", 0, "size=8m");
  if (!tmpfs.ok()) {
    WARN("skipped: mounting does not work here");
    return;
  }
  if (used_before) REQUIRE(OpenAt(point.path()).ok());
  REQUIRE(::mount("tmpfs", point.path().c_str(), "tmpfs", MS_REMOUNT | MS_RDONLY, "size=8m") == 0);
  const Status status = OpenAt(point.path()).status();
  CHECK(status.code() == -EROFS);
  CHECK(Says(status, "ReadWritePaths="));
}

TEST_CASE("Path.FullFileSystemIsEnospc") {
  if (!IsRoot()) return;
  ScratchFolder point;
  ScratchMount tmpfs("tmpfs", point.path(), "tmpfs", 0, "size=1m");
  if (!tmpfs.ok()) {
    WARN("skipped: mounting does not work here");
    return;
  }
  (void)RunQuietly("dd if=/dev/zero bs=4k of=" + point.path() + "/ballast");
  const Status status = OpenAt(point.path()).status();
  CHECK(status.code() == -ENOSPC);
  CHECK(Says(status, point.path()));
}

TEST_CASE("C29_ForeignOwnerOfOurFolderIsRefused") {
  if (!IsRoot()) return;
  ScratchFolder folder;
  REQUIRE(OpenAt(folder.path()).ok());
  const std::string taken = Own(folder) + GENERATE(as<std::string>(), "", "/node", "/node/lock");
  REQUIRE(::chown(taken.c_str(), kStranger, kStranger) == 0);
  const Status status = OpenAt(folder.path()).status();
  CHECK(status.code() == -EPERM);
  struct stat st {};
  REQUIRE(::stat(taken.c_str(), &st) == 0);  // neither used nor deleted
  CHECK(st.st_uid == kStranger);
  if (taken.find("lock") == std::string::npos)
    CHECK(Says(status, taken + " belongs to uid " + std::to_string(kStranger)));
}

TEST_CASE("C29_LinksInPlaceOfOurFoldersAreNotFollowed") {
  ScratchFolder folder, elsewhere;
  const std::string level = GENERATE("mlpo", "uid", "node", "lock");
  fs::create_directory(elsewhere.path() + "/target");
  if (level == "mlpo") {
    fs::create_directory_symlink(elsewhere.path() + "/target", folder.path() + "/mlpo");
  } else {
    REQUIRE(OpenAt(folder.path()).ok());
    const std::string name =
        level == "uid" ? Own(folder) : Own(folder) + (level == "lock" ? "/node/lock" : "/" + level);
    fs::remove_all(name);
    if (level == "lock") std::ofstream(elsewhere.path() + "/target/file") << "precious";
    fs::create_symlink(elsewhere.path() + (level == "lock" ? "/target/file" : "/target"), name);
  }
  const Status status = OpenAt(folder.path()).status();
  CHECK_FALSE(status.ok());
  CHECK((status.code() == -ENOTDIR || status.code() == -ELOOP));
  const auto entries = std::distance(fs::directory_iterator(elsewhere.path() + "/target"), fs::directory_iterator());
  CHECK(entries == (level == "lock" ? 1 : 0));  // nothing was made behind the link
}

TEST_CASE("C29_TopFolderThatOthersMayRearrangeIsRefused") {
  ScratchFolder folder;
  const std::string top = folder.path() + "/mlpo";
  fs::create_directory(top);
  REQUIRE(::chmod(top.c_str(), 0777) == 0);
  const Status status = OpenAt(folder.path()).status();
  CHECK(status.code() == -EPERM);
  CHECK(Says(status, "chmod 1777"));
  REQUIRE(::chmod(top.c_str(), 0755) == 0);  // ours alone: fine too
  CHECK(OpenAt(folder.path()).ok());
}

TEST_CASE("C30_NodeNamesThatAreNotFolderNamesAreRefused") {
  ScratchFolder folder;
  for (const std::string node : {"", ".", "..", "../x", "a/b", "a\nb", ".hidden", "-x", "a b", "\xc3\xa4"}) {
    INFO(node);
    CHECK(OpenAt(folder.path(), node).status().code() == -EINVAL);
  }
  CHECK(OpenAt(folder.path(), std::string("a\0b", 3)).status().code() == -EINVAL);
  CHECK(OpenAt(folder.path(), std::string(129, 'n')).status().code() == -EINVAL);
  CHECK(OpenAt(folder.path(), std::string(128, 'n')).ok());
  CHECK(OpenAt(folder.path(), "node-1.cluster_a").ok());
}

TEST_CASE("C14_SecondDaemonOfOneUserAndNodeIsEbusyWithTheHolder") {
  ScratchFolder folder;
  Result<std::unique_ptr<Path>> first = OpenAt(folder.path());
  REQUIRE(first.ok());
  const Status second = OpenAt(folder.path()).status();
  CHECK(second.code() == -EBUSY);
  CHECK(Says(second, "pid=" + std::to_string(::getpid())));
  CHECK(Says(second, "node=node"));
  CHECK(OpenAt(folder.path(), "other").ok());  // another node's folder is another lock
  first.value().reset();
  CHECK(OpenAt(folder.path()).ok());
}

TEST_CASE("C24_LockOfAKilledDaemonDoesNotRemain") {
  ScratchFolder folder;
  int pipe_fds[2];
  REQUIRE(::pipe(pipe_fds) == 0);
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    Result<std::unique_ptr<Path>> path = OpenAt(folder.path());
    const bool made = path.ok() && path.value()->CreateFile({1, "job", 0, 1}).ok();
    (void)!::write(pipe_fds[1], made ? "y" : "n", 1);
    ::pause();
    ::_exit(0);
  }
  char answer = 0;
  REQUIRE(::read(pipe_fds[0], &answer, 1) == 1);
  CHECK(answer == 'y');
  CHECK(OpenAt(folder.path()).status().code() == -EBUSY);
  ::kill(child, SIGKILL);
  REQUIRE(::waitpid(child, nullptr, 0) == child);
  ::close(pipe_fds[0]);
  ::close(pipe_fds[1]);
  CHECK(OpenAt(folder.path()).ok());
  CHECK_FALSE(fs::exists(Own(folder) + "/node/1-job"));  // and what it left is gone
}

TEST_CASE("C13_BufferedBySettingAndOnTmpfs") {
  ScratchFolder folder;
  PathConfig config = At(folder.path());
  config.direct = false;
  Result<std::unique_ptr<Path>> path = Path::Open(config, "p", "node");
  REQUIRE(path.ok());
  CHECK_FALSE(path.value()->direct_io());
  const Result<FileId> file = path.value()->CreateFile({1, "job", 0, 1});
  REQUIRE(file.ok());
  CHECK((::fcntl(path.value()->descriptor(file.value()), F_GETFL) & O_DIRECT) == 0);
  if (::access("/dev/shm", W_OK) != 0) {
    WARN("skipped in part: no /dev/shm");
    return;
  }
  ScratchFolder memory("/dev/shm");
  Result<std::unique_ptr<Path>> shm = OpenAt(memory.path());
  INFO(shm.status().message());
  REQUIRE(shm.ok());
  CHECK_FALSE(shm.value()->direct_io());
}

}  // namespace
}  // namespace mlpo::test
