#include <sys/mount.h>

#include <filesystem>

#include "daemon/io/path.h"
#include "tests/support/catch.h"
#include "tests/unit/io_scratch.h"

namespace mlpo::test {
namespace {

namespace fs = std::filesystem;

Status Check(const std::vector<std::string>& directories) {
  std::vector<PathConfig> paths;
  for (const std::string& directory : directories) paths.emplace_back().directory = directory;
  return CheckDistinctPaths(paths);
}

bool Names(const Status& status, const std::string& a, const std::string& b) {
  return status.code() == -EEXIST && status.message().find(a) != std::string::npos &&
         status.message().find(b) != std::string::npos;
}

TEST_CASE("DistinctPaths.DirectoriesBesideEachOtherAreFine") {
  ScratchFolder folder;
  const std::string a = folder.path() + "/a", b = folder.path() + "/ab", c = folder.path() + "/b";
  for (const std::string& name : {a, b, c}) fs::create_directory(name);
  CHECK(Check({a, b, c}).ok());
  CHECK(Check({c, b, a}).ok());
  CHECK(Check({a}).ok());
  CHECK(Check({}).ok());
}

TEST_CASE("DistinctPaths.TheSameByAnyNameIsRefusedWithBothNames") {
  ScratchFolder folder;
  const std::string a = folder.path() + "/a", b = folder.path() + "/b", link = folder.path() + "/link";
  fs::create_directory(a);
  fs::create_directory(b);
  fs::create_directory_symlink(a, link);
  CHECK(Names(Check({a, a}), a, a));
  CHECK(Names(Check({a, b, a + "/"}), a, a + "/"));
  CHECK(Names(Check({a, folder.path() + "/./b/../a"}), a, "/./b/../a"));
  CHECK(Names(Check({link, b, a}), link, a));
}

TEST_CASE("DistinctPaths.OneInsideAnotherIsRefusedWithBothNames") {
  ScratchFolder folder;
  const std::string a = folder.path() + "/a", inner = a + "/x/y", link = folder.path() + "/link";
  fs::create_directories(inner);
  fs::create_directory_symlink(inner, link);
  CHECK(Names(Check({a, inner}), a, inner));
  CHECK(Names(Check({inner, a}), a, inner));
  CHECK(Names(Check({a, link}), a, link));
  CHECK(Names(Check({inner, "/"}), "/", inner));
}

TEST_CASE("DistinctPaths.BindMountsAreSeenThrough") {
  ScratchFolder folder;
  const std::string a = folder.path() + "/a", inner = a + "/x", b = folder.path() + "/b", c = folder.path() + "/c";
  fs::create_directories(inner);
  fs::create_directory(b);
  fs::create_directory(c);
  ScratchMount same(a, b, nullptr, MS_BIND, nullptr);
  ScratchMount below(inner, c, nullptr, MS_BIND, nullptr);
  if (!same.ok() || !below.ok()) {
    WARN("skipped: bind mounts need root");
    return;
  }
  CHECK(Names(Check({a, b}), a, b));
  CHECK(Names(Check({a, c}), a, c));
  CHECK(Names(Check({c, b}), b, c));
}

TEST_CASE("DistinctPaths.AMissingDirectoryIsNamed") {
  ScratchFolder folder;
  const Status status = Check({folder.path(), folder.path() + "/missing"});
  CHECK(status.code() == -ENOENT);
  CHECK(status.message().find("/missing") != std::string::npos);
}

}  // namespace
}  // namespace mlpo::test
