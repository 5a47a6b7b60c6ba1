// What gc removes and what it leaves, by listing the tree before and after.
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <map>

#include "daemon/base/unique_fd.h"
#include "daemon/io/file_header.h"
#include "daemon/io/path.h"
#include "daemon/io/scratch_cleanup.h"
#include "tests/support/catch.h"
#include "tests/unit/io_scratch.h"

namespace mlpo::test {
namespace {

namespace fs = std::filesystem;

std::unique_ptr<Path> OpenPath(const std::string& directory, const std::string& node) {
  PathConfig config;
  config.directory = directory;
  Result<std::unique_ptr<Path>> path = Path::Open(config, "p", node);
  INFO(path.status().message());
  REQUIRE(path.ok());
  return std::move(*path);
}

std::string NodeFolder(const ScratchFolder& folder, const std::string& node) {
  return folder.path() + "/mlpo/" + std::to_string(::geteuid()) + "/" + node;
}

// A session's file of 100 KB and a header.
void Leave(const std::string& node_folder, const std::string& node, const FileOwner& owner) {
  const std::string rank = owner.rank == kObjectsRank ? "objects" : std::to_string(owner.rank);
  const std::string folder = node_folder + "/" + std::to_string(owner.client_uid) + "-" + owner.job + "/" + rank + "-" +
                             std::to_string(owner.generation);
  fs::create_directories(folder);
  const HeaderPage page = MakeFileHeader({node, ::geteuid(), owner});
  std::ofstream file(folder + "/state", std::ios::binary);
  file.write(reinterpret_cast<const char*>(page.bytes.data()), static_cast<std::streamsize>(page.bytes.size()));
  file << std::string(100'000, 's');
  REQUIRE(file.good());
}

// Every file and folder below, with its inode.
std::map<std::string, ino_t> Tree(const std::string& top) {
  std::map<std::string, ino_t> tree;
  for (const auto& entry : fs::recursive_directory_iterator(top)) {
    struct stat st {};
    REQUIRE(::lstat(entry.path().c_str(), &st) == 0);
    tree[entry.path().string()] = st.st_ino;
  }
  return tree;
}

bool Mentions(const std::vector<GcItem>& items, const std::string& file) {
  return std::any_of(items.begin(), items.end(), [&](const GcItem& item) { return item.file == file; });
}

GcReport Clean(const ScratchFolder& folder, const std::string& node, const CleanupOptions& options = {}) {
  Result<GcReport> report = CleanNode(folder.path(), node, options);
  INFO(report.status().message());
  REQUIRE(report.ok());
  return *report;
}

// When the lock was last touched.
void SetAge(const std::string& node_folder, int64_t seconds) {
  struct timespec now {};
  REQUIRE(::clock_gettime(CLOCK_REALTIME, &now) == 0);
  now.tv_sec -= seconds;
  const struct timespec times[2] = {now, now};
  REQUIRE(::utimensat(AT_FDCWD, (node_folder + "/lock").c_str(), times, 0) == 0);
}

void SetHost(const std::string& node_folder, const std::string& host) {
  std::ofstream(node_folder + "/lock") << "pid=7\nuid=" << ::geteuid() << "\nnode=n\nhost=" << host << "\nstarted=1\n";
}

}  // namespace

TEST_CASE("Gc.ADryRunNamesTheSameAndRemovesNothing") {
  ScratchFolder folder;
  OpenPath(folder.path(), "node");
  const std::string node = NodeFolder(folder, "node");
  Leave(node, "node", {1000, "job", 1, 7});
  Leave(node, "node", {1000, "job", kObjectsRank, 9});
  Leave(node, "other", {1000, "job", 2, 7});
  fs::create_directories(node + "/1000-empty/3-1");
  std::ofstream(node + "/1000-empty/3-1/state");
  std::ofstream(node + "/record.json.new") << "{";
  const auto before = Tree(folder.path());
  CleanupOptions dry;
  dry.dry_run = true;
  const GcReport would = Clean(folder, "node", dry);
  CHECK(Tree(folder.path()) == before);
  CHECK(would.dry_run);
  const GcReport did = Clean(folder, "node");
  CHECK_FALSE(did.dry_run);
  for (const GcReport* report : {&would, &did}) {
    CHECK(report->removed.size() == 4);
    CHECK(Mentions(report->removed, node + "/1000-job/1-7/state"));
    CHECK(Mentions(report->removed, node + "/1000-job/objects-9/state"));
    CHECK(Mentions(report->removed, node + "/1000-empty/3-1/state"));
    CHECK(Mentions(report->removed, node + "/record.json.new"));
    CHECK(report->removed_bytes() >= 200'000);
    CHECK(Mentions(report->kept, node + "/1000-job/2-7/state"));
    CHECK(report->failed.empty());
  }
  std::map<std::string, ino_t> left = before;
  for (const char* gone : {"/1000-job/1-7/state", "/1000-job/1-7", "/1000-job/objects-9/state", "/1000-job/objects-9",
                           "/1000-empty/3-1/state", "/1000-empty/3-1", "/1000-empty", "/record.json.new"}) {
    CHECK(left.erase(node + gone) == 1);
  }
  CHECK(Tree(folder.path()) == left);
  CHECK(Clean(folder, "node").removed.empty());
}

TEST_CASE("Gc.WhatLivesStays") {
  ScratchFolder folder;
  const std::unique_ptr<Path> path = OpenPath(folder.path(), "node");
  const std::string node = NodeFolder(folder, "node");
  REQUIRE(path->CreateFile({1000, "job", 1, 7}).ok());
  const Result<FileId> ends = path->CreateFile({1000, "job", 2, 7});
  REQUIRE(ends.ok());
  Leave(node, "node", {1000, "job", 1, 6});  // the same rank, before
  Leave(node, "node", {1000, "dead", 1, 7});
  CHECK(CleanNode(folder.path(), "node", {}).status().code() == -EBUSY);  // the daemon has the lock
  Result<GcReport> report = path->CollectGarbage(/*dry_run=*/true);
  REQUIRE(report.ok());
  CHECK(report->removed.size() == 2);
  report = path->CollectGarbage(false);
  REQUIRE(report.ok());
  CHECK(report->removed.size() == 2);
  CHECK(report->kept.empty());
  CHECK(fs::exists(node + "/1000-job/1-7/state"));
  CHECK(fs::exists(node + "/1000-job/2-7/state"));
  CHECK_FALSE(fs::exists(node + "/1000-job/1-6"));
  CHECK_FALSE(fs::exists(node + "/1000-dead"));
  REQUIRE(path->RemoveFile(ends.value()).ok());
  CHECK(path->CollectGarbage(false)->removed.empty());
}

TEST_CASE("C14_Gc.AnotherNodesAreItsOwn") {
  ScratchFolder folder;
  const std::unique_ptr<Path> living = OpenPath(folder.path(), "living");
  REQUIRE(living->CreateFile({1000, "job", 1, 7}).ok());
  OpenPath(folder.path(), "dead");
  Leave(NodeFolder(folder, "dead"), "dead", {1000, "job", 1, 7});
  const auto before = Tree(NodeFolder(folder, "living"));
  CHECK(CleanNode(folder.path(), "living", {}).status().code() == -EBUSY);
  CHECK(Clean(folder, "dead").removed.size() == 1);
  CHECK(Tree(NodeFolder(folder, "living")) == before);
  CHECK(Clean(folder, "never").removed.empty());
  CHECK_FALSE(fs::exists(NodeFolder(folder, "never")));
  for (const char* name : {"..", "", "a/b", "."}) CHECK(CleanNode(folder.path(), name, {}).status().code() == -EINVAL);
}

// Locks of another host may not be seen: a daemon that was heard of lately lives.
TEST_CASE("Gc.ANodeOfAnotherHostIsDeadWhenItHasNotBeenHeardOf") {
  ScratchFolder folder;
  OpenPath(folder.path(), "n");
  const std::string node = NodeFolder(folder, "n");
  Leave(node, "n", {1000, "job", 1, 7});
  SetHost(node, "somewhere-else");
  SetAge(node, 0);
  const auto before = Tree(folder.path());
  for (const int64_t age : {int64_t{-100}, int64_t{0}, int64_t{60}, kDeadAfterS - 30}) {
    CAPTURE(age);
    SetAge(node, age);
    const Status refused = CleanNode(folder.path(), "n", {}).status();
    CHECK(refused.code() == -EBUSY);
    CHECK(refused.message().find("host=somewhere-else") != std::string::npos);
    CHECK(Tree(folder.path()) == before);
  }
  SetAge(node, kDeadAfterS + 30);
  CHECK(Clean(folder, "n").removed.size() == 1);
}

TEST_CASE("Gc.ABeatIsSeen") {
  ScratchFolder folder;
  const std::unique_ptr<Path> path = OpenPath(folder.path(), "n");
  const std::string lock = NodeFolder(folder, "n") + "/lock";
  SetAge(NodeFolder(folder, "n"), 3600);
  struct stat st {};
  REQUIRE(::stat(lock.c_str(), &st) == 0);
  const auto old = st.st_mtime;
  REQUIRE(path->Beat().ok());
  REQUIRE(::stat(lock.c_str(), &st) == 0);
  CHECK(st.st_mtime >= old + 3500);
  REQUIRE(path->Release().ok());
  CHECK(path->Beat().ok());
}

TEST_CASE("Gc.ALockThatIsHeldIsNotWaitedFor") {
  ScratchFolder folder;
  OpenPath(folder.path(), "n");
  Leave(NodeFolder(folder, "n"), "n", {1000, "job", 1, 7});
  SetAge(NodeFolder(folder, "n"), 2 * kDeadAfterS);
  UniqueFd lock(::open((NodeFolder(folder, "n") + "/lock").c_str(), O_RDWR | O_CLOEXEC));
  REQUIRE(lock);
  REQUIRE(::flock(lock.get(), LOCK_EX | LOCK_NB) == 0);
  CHECK(CleanNode(folder.path(), "n", {}).status().code() == -EBUSY);
  lock.reset();
  CHECK(Clean(folder, "n").removed.size() == 1);
}

TEST_CASE("C30_Gc.LinksAndForeignFoldersAreLeftAlone") {
  ScratchFolder folder, elsewhere;
  OpenPath(folder.path(), "n");
  const std::string node = NodeFolder(folder, "n");
  Leave(elsewhere.path(), "n", {1000, "job", 1, 7});
  fs::create_directory_symlink(elsewhere.path() + "/1000-job", node + "/1000-job");
  const auto before = Tree(elsewhere.path());
  const GcReport report = Clean(folder, "n");
  CHECK(report.removed.empty());
  CHECK(Mentions(report.kept, node + "/1000-job"));
  CHECK(Tree(elsewhere.path()) == before);
  fs::create_directory_symlink(node, NodeFolder(folder, "link"));
  CHECK_FALSE(CleanNode(folder.path(), "link", {}).ok());
  if (::geteuid() != 0) return;
  OpenPath(folder.path(), "foreign");
  REQUIRE(::chown(NodeFolder(folder, "foreign").c_str(), 65534, 65534) == 0);
  CHECK(CleanNode(folder.path(), "foreign", {}).status().code() == -EPERM);
}

// Parts of checkpoints lie elsewhere, and are recorded here.
TEST_CASE("Gc.TheJournalIsAsked") {
  ScratchFolder folder;
  OpenPath(folder.path(), "n");
  int asked = 0;
  CleanupOptions options;
  options.journal = [&](int node_fd, bool dry_run, GcReport* report) {
    ++asked;
    CHECK(::faccessat(node_fd, "lock", F_OK, 0) == 0);
    CHECK(dry_run);
    report->removed.push_back({"/checkpoints/run/part-3", 77, "its save was cut"});
    return Status();
  };
  options.dry_run = true;
  const GcReport report = Clean(folder, "n", options);
  CHECK(asked == 1);
  CHECK(report.removed_bytes() == 77);
  options.journal = [](int, bool, GcReport*) { return Status(-EIO, "the journal cannot be read"); };
  CHECK(CleanNode(folder.path(), "n", options).status().code() == -EIO);
}

}  // namespace mlpo::test
