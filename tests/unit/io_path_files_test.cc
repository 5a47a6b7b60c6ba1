// A path's state files: header, space, removal, and what clean-up leaves alone.
#include <fcntl.h>
#include <sys/inotify.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

#include "daemon/base/unique_fd.h"
#include "daemon/io/file_header.h"
#include "daemon/io/path.h"
#include "tests/support/catch.h"
#include "tests/unit/io_scratch.h"

namespace mlpo::test {
namespace {

namespace fs = std::filesystem;

const FileOwner kOwner{1000, "job", 3, 7};

std::unique_ptr<Path> OpenPath(const std::string& directory, uint64_t capacity = 0, const std::string& node = "node") {
  PathConfig config;
  config.directory = directory;
  config.capacity_bytes = capacity;
  Result<std::unique_ptr<Path>> path = Path::Open(config, "p", node);
  INFO(path.status().message());
  REQUIRE(path.ok());
  return std::move(*path);
}

std::string NodeFolder(const ScratchFolder& folder, const std::string& node = "node") {
  return folder.path() + "/mlpo/" + std::to_string(::geteuid()) + "/" + node;
}

TEST_CASE("C14_FileCarriesItsOwnerAndNothingElsePasses") {
  ScratchFolder folder;
  std::unique_ptr<Path> path = OpenPath(folder.path());
  Result<FileId> file = path->CreateFile(kOwner);
  REQUIRE(file.ok());
  const std::string name = NodeFolder(folder) + "/1000-job/3-7/state";
  struct stat st {};
  REQUIRE(::stat(name.c_str(), &st) == 0);
  CHECK((st.st_mode & 07777) == 0600);
  CHECK(st.st_size == 4096);
  const int fd = path->descriptor(*file);
  struct stat open_st {};
  REQUIRE(::fstat(fd, &open_st) == 0);
  CHECK(open_st.st_ino == st.st_ino);

  const FileIdentity right{"node", ::geteuid(), kOwner};
  CHECK(CheckFileHeader(fd, right).ok());
  const auto refused = [&](auto change) {
    FileIdentity wrong = right;
    change(wrong);
    return CheckFileHeader(fd, wrong).code() == -EPERM;
  };
  CHECK(refused([](auto& w) { w.node = "node2"; }));
  CHECK(refused([](auto& w) { w.daemon_uid += 1; }));
  CHECK(refused([](auto& w) { w.owner.client_uid = 1; }));
  CHECK(refused([](auto& w) { w.owner.job = "jo"; }));
  CHECK(refused([](auto& w) { w.owner.rank = 4; }));
  CHECK(refused([](auto& w) { w.owner.generation = 6; }));
}

TEST_CASE("FileHeader.AnyChangedBitIsNoticed") {
  const HeaderPage page = MakeFileHeader({"node", 5, kOwner});
  const Result<FileIdentity> good = ParseFileHeader(page);
  REQUIRE(good.ok());
  CHECK(good.value().node == "node");
  CHECK(good.value().daemon_uid == 5);
  CHECK(good.value().owner.job == "job");
  CHECK(good.value().owner.generation == 7);
  for (size_t byte = 0; byte < page.bytes.size(); ++byte) {
    HeaderPage changed = page;
    changed.bytes[byte] ^= std::byte{static_cast<unsigned char>(1u << (byte % 8))};
    REQUIRE(ParseFileHeader(changed).status().code() == -EINVAL);
  }
  CHECK_FALSE(ParseFileHeader(HeaderPage()).ok());
}

TEST_CASE("Path.ReserveGrowsOnlyAndKeepsWhatIsThere") {
  ScratchFolder folder;
  std::unique_ptr<Path> path = OpenPath(folder.path());
  Result<FileId> file = path->CreateFile(kOwner);
  REQUIRE(file.ok());
  REQUIRE(path->Reserve(*file, 8 << 20).ok());
  struct stat st {};
  REQUIRE(::fstat(path->descriptor(*file), &st) == 0);
  CHECK(st.st_size == 4096 + (8 << 20));
  CHECK(st.st_blocks * 512 >= (8 << 20));  // on storage, not a promise
  REQUIRE(path->Reserve(*file, 1 << 20).ok());
  REQUIRE(::fstat(path->descriptor(*file), &st) == 0);
  CHECK(st.st_size == 4096 + (8 << 20));
  REQUIRE(path->Reserve(*file, 9 << 20).ok());
  REQUIRE(::fstat(path->descriptor(*file), &st) == 0);
  CHECK(st.st_size == 4096 + (9 << 20));
  CHECK(CheckFileHeader(path->descriptor(*file), {"node", ::geteuid(), kOwner}).ok());
}

TEST_CASE("Path.CapacityBoundsAllFilesTogether") {
  ScratchFolder folder;
  std::unique_ptr<Path> path = OpenPath(folder.path(), 4 << 20);
  CHECK(path->AvailableBytes() == 4 << 20);
  Result<FileId> a = path->CreateFile(kOwner);
  Result<FileId> b = path->CreateFile({1000, "job", 4, 7});
  REQUIRE((a.ok() && b.ok()));
  REQUIRE(path->Reserve(*a, 3 << 20).ok());
  CHECK(path->AvailableBytes() == 1 << 20);
  const Status refused = path->Reserve(*b, 2 << 20);
  CHECK(refused.code() == -ENOSPC);
  CHECK(refused.message().find(std::to_string(2 << 20)) != std::string::npos);  // need
  CHECK(refused.message().find(std::to_string(1 << 20)) != std::string::npos);  // available
  CHECK(refused.message().find(std::to_string(4 << 20)) != std::string::npos);  // capacity
  REQUIRE(path->RemoveFile(*a).ok());
  CHECK(path->AvailableBytes() == 4 << 20);
  CHECK(path->Reserve(*b, 2 << 20).ok());
}

TEST_CASE("Path.NoSpaceIsRefusedWithTheFiguresAndTakesNothing") {
  ScratchFolder point;
  ScratchMount tmpfs("tmpfs", point.path(), "tmpfs", 0, "size=8m");
  if (!tmpfs.ok()) {
    WARN("skipped: mounting a tmpfs needs root");
    return;
  }
  std::unique_ptr<Path> path = OpenPath(point.path());
  Result<FileId> file = path->CreateFile(kOwner);
  REQUIRE(file.ok());
  REQUIRE(path->Reserve(*file, 2 << 20).ok());
  struct statvfs before {
  }, after{};
  REQUIRE(::statvfs(point.path().c_str(), &before) == 0);
  CHECK(path->AvailableBytes() == before.f_bavail * before.f_frsize);
  const Status refused = path->Reserve(*file, 20 << 20);
  CHECK(refused.code() == -ENOSPC);
  CHECK(refused.message().find(std::to_string(18 << 20)) != std::string::npos);
  CHECK(refused.message().find(std::to_string(before.f_bavail * before.f_frsize)) != std::string::npos);
  REQUIRE(::statvfs(point.path().c_str(), &after) == 0);
  CHECK(after.f_bavail == before.f_bavail);
  CHECK(path->Reserve(*file, 4 << 20).ok());
}

// More may be in a file than was reserved in it: what has no place elsewhere. A reservation that fails leaves that
// there.
TEST_CASE("C11_Path.AReservationThatFailsCutsNothing") {
  constexpr size_t kPage = 4096;
  constexpr off_t kBeyond = 4 << 20;
  ScratchFolder folder;
  std::unique_ptr<Path> path = OpenPath(folder.path());
  Result<FileId> file = path->CreateFile(kOwner);
  Result<FileId> other = path->CreateFile({1000, "job", 4, 7});
  REQUIRE((file.ok() && other.ok()));
  REQUIRE(path->Reserve(*file, 1 << 20, /*unused=*/true).ok());
  const int fd = path->descriptor(*file);
  const std::unique_ptr<std::byte[], void (*)(void*)> page(static_cast<std::byte*>(std::aligned_alloc(kPage, kPage)),
                                                           std::free);
  std::memset(page.get(), 7, kPage);
  REQUIRE(::pwrite(fd, page.get(), kPage, kBeyond) == kPage);
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit old{};
  REQUIRE(::getrlimit(RLIMIT_FSIZE, &old) == 0);
  const rlimit lowered{8 << 20, old.rlim_max};
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &lowered) == 0);
  const Status refused = path->Reserve(*file, 16 << 20);
  const Status unused = path->Reserve(*other, 16 << 20, /*unused=*/true);
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &old) == 0);
  std::signal(SIGXFSZ, old_handler);
  CHECK(refused.code() == -EFBIG);
  CHECK(unused.code() == -EFBIG);
  std::memset(page.get(), 0, kPage);
  REQUIRE(::pread(fd, page.get(), kPage, kBeyond) == kPage);
  CHECK(std::all_of(page.get(), page.get() + kPage, [](std::byte byte) { return byte == std::byte{7}; }));
  struct stat st {};
  REQUIRE(::fstat(path->descriptor(*other), &st) == 0);
  CHECK(st.st_size == 4096);
  REQUIRE(path->Reserve(*file, 2 << 20).ok());  // nor does one that succeeds
  REQUIRE(::fstat(fd, &st) == 0);
  CHECK(st.st_size == kBeyond + static_cast<off_t>(kPage));
}

// ext2 has no fallocate: what is promised counts as used until it is written, and then only once.
TEST_CASE("Path.WithoutFallocateSpaceIsPromisedOnce") {
  LoopFileSystem loop("ext2", 512, 64);
  if (!loop.ok()) {
    WARN("skipped: " << loop.reason());
    return;
  }
  std::unique_ptr<Path> path = OpenPath(loop.point());
  Result<FileId> file = path->CreateFile(kOwner);
  REQUIRE(file.ok());
  const int fd = path->descriptor(*file);
  if (::fallocate(fd, FALLOC_FL_KEEP_SIZE, 4096, 4096) == 0 || errno != EOPNOTSUPP) {
    WARN("skipped: this ext2 has fallocate");
    return;
  }
  constexpr uint64_t kPromised = 16 << 20;
  const uint64_t free_before = path->AvailableBytes();
  REQUIRE(free_before > 2 * kPromised);
  REQUIRE(path->Reserve(*file, kPromised, /*unused=*/true).ok());
  struct stat st {};
  REQUIRE(::fstat(fd, &st) == 0);
  CHECK(st.st_size == 4096 + static_cast<off_t>(kPromised));
  CHECK(st.st_blocks * 512 < (1 << 20));
  const auto near = [](uint64_t a, uint64_t b) { return std::max(a, b) - std::min(a, b) < (1 << 20); };
  CHECK(near(path->AvailableBytes(), free_before - kPromised));
  Result<FileId> other = path->CreateFile({1000, "job", 4, 7});
  REQUIRE(other.ok());
  CHECK(path->Reserve(*other, free_before - kPromised / 2).code() == -ENOSPC);
  const std::unique_ptr<std::byte[], void (*)(void*)> page(static_cast<std::byte*>(std::aligned_alloc(4096, 1 << 20)),
                                                           std::free);
  std::memset(page.get(), 1, 1 << 20);
  for (int i = 0; i < 8; ++i) REQUIRE(::pwrite(fd, page.get(), 1 << 20, 4096 + (i << 20)) == 1 << 20);
  REQUIRE(::fsync(fd) == 0);
  CHECK(near(path->AvailableBytes(), free_before - kPromised));  // written: used, no longer promised
  REQUIRE(::pwrite(fd, page.get(), 1 << 20, 40 << 20) == 1 << 20);
  REQUIRE(path->Reserve(*file, kPromised + (1 << 20)).ok());
  REQUIRE(::fstat(fd, &st) == 0);
  CHECK(st.st_size == 41 << 20);  // what was written beyond it is not cut
}

TEST_CASE("Path.RemoveFileLeavesNothingAndNumbersAreNotReused") {
  ScratchFolder folder;
  std::unique_ptr<Path> path = OpenPath(folder.path());
  Result<FileId> a = path->CreateFile(kOwner);
  Result<FileId> b = path->CreateFile({1000, "job", 4, 7});
  REQUIRE((a.ok() && b.ok()));
  CHECK(*a != *b);
  CHECK(path->descriptor(*a) != path->descriptor(*b));
  REQUIRE(path->RemoveFile(*a).ok());
  CHECK(path->descriptor(*a) == -1);
  CHECK_FALSE(fs::exists(NodeFolder(folder) + "/1000-job/3-7"));
  CHECK(fs::exists(NodeFolder(folder) + "/1000-job/4-7/state"));
  REQUIRE(path->RemoveFile(*b).ok());
  CHECK_FALSE(fs::exists(NodeFolder(folder) + "/1000-job"));
  CHECK(path->RemoveFile(*b).code() == -EBADF);
  CHECK(path->Reserve(*b, 4096).code() == -EBADF);
  Result<FileId> c = path->CreateFile(kOwner);
  REQUIRE(c.ok());
  CHECK(*c != *a);
  CHECK(*c != *b);
  path.reset();
  CHECK_FALSE(fs::exists(NodeFolder(folder) + "/1000-job"));
}

// On NFS a file that is unlinked while it is open stays in its folder under another name.
TEST_CASE("Path.AFileIsClosedBeforeItIsRemoved") {
  const bool at_end = GENERATE(false, true);  // of the path, or of the session
  ScratchFolder folder;
  std::unique_ptr<Path> path = OpenPath(folder.path());
  Result<FileId> file = path->CreateFile(kOwner);
  REQUIRE(file.ok());
  const UniqueFd watch(::inotify_init1(IN_NONBLOCK | IN_CLOEXEC));
  REQUIRE(watch);
  // Of the file itself, whatever its name: unlinking changes its number of links.
  const std::string name = NodeFolder(folder) + "/1000-job/3-7/state";
  REQUIRE(::inotify_add_watch(watch.get(), name.c_str(), IN_CLOSE_WRITE | IN_ATTRIB | IN_DELETE_SELF) >= 0);
  if (at_end) {
    path.reset();
  } else {
    CHECK(path->RemoveFile(*file).ok());
  }
  CHECK_FALSE(fs::exists(name));
  alignas(inotify_event) char events[4096];
  const ssize_t bytes = ::read(watch.get(), events, sizeof events);
  REQUIRE(bytes >= static_cast<ssize_t>(sizeof(inotify_event)));
  CHECK(reinterpret_cast<const inotify_event*>(events)->mask == IN_CLOSE_WRITE);
}

TEST_CASE("Path.SameOwnerTwiceIsRefusedAndTheFirstStays") {
  ScratchFolder folder;
  std::unique_ptr<Path> path = OpenPath(folder.path());
  Result<FileId> file = path->CreateFile(kOwner);
  REQUIRE(file.ok());
  CHECK(path->CreateFile(kOwner).status().code() == -EEXIST);
  CHECK(fs::exists(NodeFolder(folder) + "/1000-job/3-7/state"));
  CHECK(CheckFileHeader(path->descriptor(*file), {"node", ::geteuid(), kOwner}).ok());
}

// A file as a killed daemon leaves it.
void Leave(const std::string& place, const FileIdentity& identity) {
  fs::create_directories(fs::path(place).parent_path());
  const HeaderPage page = MakeFileHeader(identity);
  std::ofstream file(place, std::ios::binary);
  file.write(reinterpret_cast<const char*>(page.bytes.data()), static_cast<std::streamsize>(page.bytes.size()));
  file << std::string(100'000, 's');
  REQUIRE(file.good());
}

// Whatever has our file's name at its end is removed only if it is ours.
TEST_CASE("C14_FileThatSomebodyPutInItsPlaceStays") {
  const std::string kind = GENERATE("foreign", "plain", "link", "folder");
  const bool at_end = GENERATE(false, true);  // of the path, or of the session
  ScratchFolder folder, elsewhere;
  std::unique_ptr<Path> path = OpenPath(folder.path());
  Result<FileId> file = path->CreateFile(kOwner);
  REQUIRE(file.ok());
  const std::string name = NodeFolder(folder) + "/1000-job/3-7/state";
  REQUIRE(fs::remove(name));
  if (kind == "foreign") Leave(name, {"node", ::geteuid(), {1000, "job", 3, 8}});  // of another generation
  if (kind == "plain") std::ofstream(name) << "somebody's";
  if (kind == "link") fs::create_symlink(elsewhere.path() + "/mine", name);
  if (kind == "folder") fs::create_directory(name);
  INFO(kind);
  if (at_end) {
    path.reset();
  } else {
    const Status removed = path->RemoveFile(*file);
    CHECK(removed.code() < 0);
    CHECK(removed.message().find(name) != std::string::npos);
  }
  CHECK(fs::exists(fs::symlink_status(name)));
}

// The same file under another number, as some network file systems give it: its header says whose it is.
TEST_CASE("Path.OwnFileWithAnotherNumberGoes") {
  ScratchFolder folder;
  std::unique_ptr<Path> path = OpenPath(folder.path());
  Result<FileId> file = path->CreateFile(kOwner);
  REQUIRE(file.ok());
  const std::string name = NodeFolder(folder) + "/1000-job/3-7/state";
  fs::copy_file(name, name + ".copy");
  fs::rename(name + ".copy", name);
  CHECK(path->RemoveFile(*file).ok());
  CHECK_FALSE(fs::exists(NodeFolder(folder) + "/1000-job"));
}

TEST_CASE("C30_JobNamesThatAreNotFolderNamesAreRefused") {
  ScratchFolder folder;
  std::unique_ptr<Path> path = OpenPath(folder.path());
  for (const std::string job : {"", ".", "..", "../../x", "a/b", "a\nb", ".x", "-x", "a b"}) {
    INFO(job);
    CHECK(path->CreateFile({1000, job, 0, 1}).status().code() == -EINVAL);
  }
  CHECK(path->CreateFile({1000, std::string(129, 'j'), 0, 1}).status().code() == -EINVAL);
  const auto entries = std::distance(fs::directory_iterator(NodeFolder(folder)), fs::directory_iterator());
  CHECK(entries == 1);  // the lock
  CHECK(path->CreateFile({1000, std::string(128, 'j'), 0, 1}).ok());
}

TEST_CASE("C30_LinkInPlaceOfAJobFolderIsNotFollowed") {
  ScratchFolder folder, elsewhere;
  std::unique_ptr<Path> path = OpenPath(folder.path());
  fs::create_directory_symlink(elsewhere.path(), NodeFolder(folder) + "/1000-job");
  CHECK_FALSE(path->CreateFile(kOwner).ok());
  CHECK(fs::is_empty(elsewhere.path()));
}

TEST_CASE("Path.ReleasedItCanBeAnothersAndBeTakenBack") {
  ScratchFolder folder;
  std::unique_ptr<Path> path = OpenPath(folder.path());
  Result<FileId> file = path->CreateFile(kOwner);
  REQUIRE(file.ok());
  CHECK(path->Release().code() == -EBUSY);
  CHECK(path->Retake().ok());  // it was not released
  REQUIRE(path->RemoveFile(*file).ok());
  REQUIRE(path->Release().ok());
  CHECK(path->AvailableBytes() == 0);
  CHECK_FALSE(path->CreateFile(kOwner).ok());
  CHECK_FALSE(path->Probe(1 << 20, 0).ok());
  CHECK(path->CollectGarbage(false).ok());  // there is nothing that it would know
  {
    std::unique_ptr<Path> another = OpenPath(folder.path());
    const Status held = path->Retake();
    CHECK(held.code() == -EBUSY);
    CHECK(held.message().find("pid=") != std::string::npos);
    CHECK(path->AvailableBytes() == 0);
  }
  Leave(NodeFolder(folder) + "/1000-job/1-7/state", {"node", ::geteuid(), {1000, "job", 1, 7}});
  REQUIRE(path->Retake().ok());
  CHECK_FALSE(fs::exists(NodeFolder(folder) + "/1000-job"));
  CHECK(path->CreateFile(kOwner).ok());
  CHECK(path->Probe(1 << 20, 0).ok());
}

// Threads of checkpoints ask for the folder while the keeper gives it back and takes it again.
TEST_CASE("Path.ItsFolderCanBeAskedForWhileItIsTakenBack") {
  ScratchFolder folder;
  std::unique_ptr<Path> path = OpenPath(folder.path());
  std::atomic<bool> ended{false};
  uint64_t opened = 0, refused = 0, wrong = 0;
  std::thread asking([&] {
    while (!ended.load()) {
      const Result<UniqueFd> node = path->OpenFolder();
      ++(node.ok() ? opened : refused);
      wrong += !node.ok() && node.status().message() != NodeFolder(folder) + " has been evacuated";
    }
  });
  Status status;
  for (int i = 0; i < 50 && status.ok(); ++i) {
    status = path->Release();
    if (status.ok()) status = path->Retake();
  }
  ended.store(true);
  asking.join();
  CHECK(status.ok());
  CHECK(wrong == 0);
  CHECK(opened + refused > 0);
}

TEST_CASE("Path.ReleasedItCanBeUnmounted") {
  ScratchFolder point;
  ScratchMount tmpfs("tmpfs", point.path(), "tmpfs", 0, "size=4m");
  if (!tmpfs.ok()) {
    WARN("skipped: mounting a tmpfs needs root");
    return;
  }
  std::unique_ptr<Path> path = OpenPath(point.path());
  CHECK((::umount2(point.path().c_str(), 0) == -1 && errno == EBUSY));
  REQUIRE(path->Release().ok());
  REQUIRE(::umount2(point.path().c_str(), 0) == 0);
  ScratchMount again("tmpfs", point.path(), "tmpfs", 0, "size=8m");
  REQUIRE(again.ok());
  CHECK(path->Retake().ok());
  CHECK(path->AvailableBytes() > (4 << 20));
  CHECK(path->CreateFile(kOwner).ok());
}

TEST_CASE("C14_CleanUpRemovesOnlyWhatIsOurs") {
  ScratchFolder folder;
  OpenPath(folder.path());
  OpenPath(folder.path(), 0, "other");
  const std::string node = NodeFolder(folder), uid_folder = folder.path() + "/mlpo/";
  const uint32_t uid = ::geteuid();
  const auto identity = [&](uint32_t rank) { return FileIdentity{"node", uid, {1000, "job", rank, 7}}; };

  Leave(node + "/1000-job/1-7/state", identity(1));  // ours, dead
  Leave(node + "/1000-gone/2-9/state", {"node", uid, {1000, "gone", 2, 9}});
  Leave(node + "/1000-job/2-7/state", identity(3));  // its header says another rank
  Leave(node + "/1000-job/4-7/state", {"other", uid, {1000, "job", 4, 7}});
  Leave(node + "/1000-job/5-7/state", {"node", uid + 1, {1000, "job", 5, 7}});
  Leave(node + "/1000-job/6-7/state", identity(6));
  std::fstream(node + "/1000-job/6-7/state", std::ios::in | std::ios::out).seekp(50) << "x";  // damaged
  Leave(node + "/1000-job/8-7/state", identity(8));
  std::ofstream(node + "/1000-job/8-7/notes") << "mine";  // beside ours
  Leave(node + "/1000-job/007-7/state", identity(7));     // not as we write names
  Leave(node + "/1000-job/9-7-7/state", identity(9));
  Leave(node + "/1000-job/10-7/other", identity(10));
  fs::create_directories(node + "/journal");
  std::ofstream(node + "/journal/1") << "x";
  std::ofstream(node + "/1000-file") << "x";
  fs::create_directories(node + "/1000-job/11-7");
  ScratchFolder elsewhere;
  Leave(elsewhere.path() + "/state", identity(12));
  fs::create_directory_symlink(elsewhere.path(), node + "/1000-job/12-7");
  fs::create_directories(node + "/1000-job/13-7");
  fs::create_symlink(elsewhere.path() + "/state", node + "/1000-job/13-7/state");
  const std::string other = NodeFolder(folder, "other");
  Leave(other + "/1000-job/1-7/state", {"other", uid, {1000, "job", 1, 7}});

  OpenPath(folder.path());

  for (const std::string gone : {"/1000-job/1-7", "/1000-gone", "/1000-job/8-7/state", "/1000-job/11-7"}) {
    INFO(gone);
    CHECK_FALSE(fs::exists(fs::symlink_status(node + gone)));
  }
  for (const std::string stays :
       {"/1000-job/2-7/state", "/1000-job/4-7/state", "/1000-job/5-7/state", "/1000-job/6-7/state",
        "/1000-job/8-7/notes", "/1000-job/007-7/state", "/1000-job/9-7-7/state", "/1000-job/10-7/other", "/journal/1",
        "/1000-file", "/lock", "/1000-job/12-7", "/1000-job/13-7/state"}) {
    INFO(stays);
    CHECK(fs::exists(fs::symlink_status(node + stays)));
  }
  CHECK(fs::exists(elsewhere.path() + "/state"));
  CHECK(fs::exists(other + "/1000-job/1-7/state"));
}

TEST_CASE("Path.AFileThatIsHandedOverIsNobodysToRemoveAndTakesNoCapacity") {
  ScratchFolder folder, target;
  std::unique_ptr<Path> path = OpenPath(folder.path(), 16 << 20);
  Result<FileId> file = path->CreateFile(kOwner);
  REQUIRE(file.ok());
  REQUIRE(path->Reserve(*file, 8 << 20).ok());
  const int fd = path->descriptor(*file);
  const auto refuses = [](const Path::Leaving&) { return Status(-EXDEV, "elsewhere"); };
  CHECK(path->HandOver(*file, refuses).code() == -EXDEV);
  CHECK(path->ReservedBytes() == 8 << 20);
  const std::string moved_to = target.path() + "/data";
  const auto moves = [&](const Path::Leaving& leaving) -> Status {
    CHECK(leaving.fd == fd);
    CHECK(leaving.owner.generation == kOwner.generation);
    CHECK(leaving.shown == NodeFolder(folder) + "/1000-job/3-7/state");
    if (::renameat(leaving.folder_fd, leaving.name.c_str(), AT_FDCWD, moved_to.c_str()) != 0)
      return Status::Errno(errno, "renaming");
    return Status();
  };
  const Status moved = path->HandOver(*file, moves);
  INFO(moved.message());
  REQUIRE(moved.ok());
  CHECK(path->ReservedBytes() == 0);
  CHECK(!fs::exists(NodeFolder(folder) + "/1000-job/3-7"));
  CHECK(path->descriptor(*file) == fd);  // what is in it can still be read
  CHECK(CheckFileHeader(fd, {"node", ::geteuid(), kOwner}).ok());
  CHECK(path->HandOver(*file, moves).code() == -ENOENT);
  CHECK(path->RemoveFile(*file).ok());
  CHECK(fs::exists(moved_to));
}

}  // namespace
}  // namespace mlpo::test
