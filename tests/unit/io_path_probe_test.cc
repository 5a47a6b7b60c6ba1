// The probe of a block: what the kernel refuses it comes back as such, and nothing is left behind.
#include <fcntl.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <filesystem>

#include "daemon/base/unique_fd.h"
#include "daemon/io/path.h"
#include "daemon/io/path_probe.h"
#include "tests/support/catch.h"
#include "tests/unit/io_scratch.h"

namespace mlpo::test {
namespace {

constexpr uint64_t kBytes = 1 << 20;

UniqueFd OpenFolder(const std::string& directory) {
  UniqueFd fd(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  REQUIRE(fd);
  return fd;
}

int Probe(const std::string& directory, bool direct, uint64_t end) {
  const Status status = ProbeBlock(OpenFolder(directory).get(), directory, direct, kBytes, end);
  INFO(status.message());
  CHECK((status.ok() || status.message().find(directory) != std::string::npos));
  return -status.code();
}

TEST_CASE("PathProbe.ABlockAnywhereLeavesNothing") {
  ScratchFolder folder;
  for (const uint64_t end : {uint64_t{0}, uint64_t{4096}, kBytes, uint64_t{40} << 30}) {
    CAPTURE(end);
    CHECK(Probe(folder.path(), false, end) == 0);
  }
  CHECK(std::filesystem::is_empty(folder.path()));
}

TEST_CASE("PathProbe.AsThePathDoes") {
  ScratchFolder folder;
  PathConfig config;
  config.directory = folder.path();
  Result<std::unique_ptr<Path>> path = Path::Open(config, "p", "node");
  REQUIRE(path.ok());
  INFO("O_DIRECT: " << (*path)->direct_io());
  CHECK((*path)->Probe(kBytes, 0).message() == "");
  CHECK((*path)->Probe(kBytes, 64 * kBytes).message() == "");
}

// A file may not reach where the write that failed did, though there is room: that is what has to be proven.
TEST_CASE("C11_PathProbe.AFileSizeLimitIsMetWhereTheWriteMetIt") {
  ScratchFolder folder;
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit old{};
  REQUIRE(::getrlimit(RLIMIT_FSIZE, &old) == 0);
  const rlimit lowered{8 * kBytes + 4096, old.rlim_max};
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &lowered) == 0);
  const int below = Probe(folder.path(), false, 8 * kBytes);
  const int across = Probe(folder.path(), false, 8 * kBytes + 8192);
  const int beyond = Probe(folder.path(), false, 64 * kBytes);
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &old) == 0);
  std::signal(SIGXFSZ, old_handler);
  CHECK(below == 0);
  CHECK(across == EFBIG);
  CHECK(beyond == EFBIG);
  CHECK(Probe(folder.path(), false, 64 * kBytes) == 0);
}

TEST_CASE("C11_PathProbe.AFullFileSystemUntilSpaceIsBack") {
  ScratchFolder point;
  ScratchMount tmpfs("tmpfs", point.path(), "tmpfs", 0, "size=4m");
  if (!tmpfs.ok()) {
    WARN("skipped: mounting a tmpfs needs root");
    return;
  }
  const std::string filler = point.path() + "/filler";
  UniqueFd fd(::open(filler.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
  REQUIRE(fd);
  REQUIRE(::posix_fallocate(fd.get(), 0, (4 << 20) - (512 << 10)) == 0);
  CHECK(Probe(point.path(), false, 0) == ENOSPC);
  CHECK(Probe(point.path(), false, 64 * kBytes) == ENOSPC);
  fd.reset();
  REQUIRE(::unlink(filler.c_str()) == 0);
  CHECK(Probe(point.path(), false, 0) == 0);
}

TEST_CASE("PathProbe.AReadOnlyFileSystem") {
  ScratchFolder point;
  ScratchMount tmpfs("tmpfs", point.path(), "tmpfs", 0, "size=4m");
  if (!tmpfs.ok()) {
    WARN("skipped: mounting a tmpfs needs root");
    return;
  }
  const auto remount = [&](unsigned long flags) {
    return ::mount("tmpfs", point.path().c_str(), "tmpfs", MS_REMOUNT | flags, "size=4m") == 0;
  };
  REQUIRE(remount(MS_RDONLY));
  CHECK(Probe(point.path(), false, 0) == EROFS);
  REQUIRE(remount(0));
  CHECK(Probe(point.path(), false, 0) == 0);
}

}  // namespace
}  // namespace mlpo::test
