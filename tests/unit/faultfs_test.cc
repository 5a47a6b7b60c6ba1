// faultfs does what its rules say, seen by plain system calls: what the fault tests build on.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bitset>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>
#include <memory>
#include <thread>
#include <vector>

#include "tests/support/catch.h"
#include "tests/support/fault_fs.h"

namespace mlpo::test {
namespace {

constexpr size_t kBytes = 64 * 1024;
constexpr size_t kPage = 4096;

// An open file of kBytes, with O_DIRECT, and aligned memory.
class DirectFile {
 public:
  explicit DirectFile(const std::string& path)
      : fd_(::open(path.c_str(), O_RDWR | O_CREAT | O_DIRECT | O_CLOEXEC, 0600)),
        memory_(static_cast<char*>(std::aligned_alloc(kPage, kBytes))) {
    REQUIRE(fd_ >= 0);
    Fill(7);
    REQUIRE(Write(kBytes) == static_cast<ssize_t>(kBytes));
  }
  ~DirectFile() { ::close(fd_); }
  DirectFile(const DirectFile&) = delete;
  DirectFile& operator=(const DirectFile&) = delete;

  void Fill(char value) { std::memset(memory_.get(), value, kBytes); }
  ssize_t Write(size_t bytes, off_t offset = 0) { return ::pwrite(fd_, memory_.get(), bytes, offset); }
  ssize_t Read(size_t bytes, off_t offset = 0) { return ::pread(fd_, memory_.get(), bytes, offset); }
  // Bits of the first `bytes` that are not those of `value`.
  size_t WrongBits(char value, size_t bytes = kBytes) const {
    size_t wrong = 0;
    for (size_t i = 0; i < bytes; ++i)
      wrong += std::bitset<8>(static_cast<unsigned char>(memory_.get()[i] ^ value)).count();
    return wrong;
  }
  int fd() const { return fd_; }

 private:
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  const int fd_;
  std::unique_ptr<char, Free> memory_;
};

bool Missing(const FaultFs& fs) {
  if (fs.ok()) return false;
  WARN("skipped: " << fs.reason());
  return true;
}

TEST_CASE("FaultFs.PassesEverythingOnWithoutRules") {
  FaultFs fs;
  if (Missing(fs)) return;
  DirectFile file(fs.point() + "/a");
  file.Fill(0);
  REQUIRE(file.Read(kBytes) == static_cast<ssize_t>(kBytes));
  CHECK(file.WrongBits(7) == 0);
  struct stat st;
  REQUIRE(::stat((fs.source() + "/a").c_str(), &st) == 0);
  CHECK(st.st_size == static_cast<off_t>(kBytes));
  CHECK((st.st_mode & 07777) == 0600);
  // What the daemon needs of a file system.
  const std::string folder = fs.point() + "/folder";
  REQUIRE(::mkdir(folder.c_str(), 0700) == 0);
  CHECK(::rename((fs.point() + "/a").c_str(), (folder + "/b").c_str()) == 0);
  CHECK(::fallocate(file.fd(), 0, 0, 2 * kBytes) == 0);
  CHECK(::fsync(file.fd()) == 0);
  const int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY);
  CHECK(::fsync(fd) == 0);
  ::close(fd);
  CHECK(::unlink((folder + "/b").c_str()) == 0);
  CHECK(file.Read(kPage) == static_cast<ssize_t>(kPage));  // removed and still open
  CHECK(::rmdir(folder.c_str()) == 0);
  CHECK(fs.Of("write").acted == 0);
  CHECK(fs.Of("write").requests >= 1);
}

TEST_CASE("FaultFs.ErrorsComeWhereAndAsOftenAsTheRuleSays") {
  FaultFs fs;
  if (Missing(fs)) return;
  DirectFile file(fs.point() + "/state"), other(fs.point() + "/other");
  const auto error_of = [](ssize_t result) { return result < 0 ? errno : 0; };
  fs.Rule("write error 5 after=1 times=2 name=state");
  CHECK(error_of(file.Write(kPage)) == 0);
  CHECK(error_of(other.Write(kPage)) == 0);
  CHECK(error_of(file.Write(kPage)) == EIO);
  CHECK(error_of(file.Read(kPage)) == 0);
  CHECK(error_of(file.Write(kPage)) == EIO);
  CHECK(error_of(file.Write(kPage)) == 0);
  CHECK(fs.Of("write").acted == 2);
  fs.Clear();
  fs.Rule("read error 122 from=8192 to=12288");
  CHECK(error_of(file.Read(kPage, 4096)) == 0);
  CHECK(error_of(file.Read(kPage, 8192)) == EDQUOT);
  CHECK(error_of(file.Read(kBytes, 0)) == EDQUOT);
  CHECK(error_of(file.Read(kPage, 12288)) == 0);
  fs.Rule("fsync error 5");
  CHECK(error_of(::fsync(file.fd())) == EIO);
  fs.Rule("create error 28");
  CHECK(error_of(::open((fs.point() + "/new").c_str(), O_CREAT | O_WRONLY, 0600)) == ENOSPC);
  fs.Rule("fallocate error 95");
  CHECK(error_of(::fallocate(file.fd(), 0, 0, 1 << 20)) == EOPNOTSUPP);
  fs.Clear();
  CHECK(error_of(file.Read(kPage, 8192)) == 0);
}

TEST_CASE("FaultFs.ShortTransfersAndDelays") {
  FaultFs fs;
  if (Missing(fs)) return;
  DirectFile file(fs.point() + "/state");
  fs.Rule("write short 8192 times=1");
  fs.Rule("read short 4096 times=1");
  file.Fill(9);
  CHECK(file.Write(kBytes) == 8192);
  CHECK(file.Read(kBytes) == 4096);
  CHECK(file.Read(kBytes) == static_cast<ssize_t>(kBytes));
  CHECK(file.WrongBits(9, 8192) == 0);
  CHECK(file.WrongBits(9) > 0);  // the rest is what was there
  fs.Rule("read delay 200");
  const auto from = std::chrono::steady_clock::now();
  CHECK(file.Read(kPage) == static_cast<ssize_t>(kPage));
  CHECK(std::chrono::steady_clock::now() - from >= std::chrono::milliseconds(200));
}

TEST_CASE("FaultFs.FlipsOneBit") {
  FaultFs fs;
  if (Missing(fs)) return;
  DirectFile file(fs.point() + "/state");
  fs.Rule("read flip 3 times=1");
  REQUIRE(file.Read(kBytes) == static_cast<ssize_t>(kBytes));
  CHECK(file.WrongBits(7) == 1);
  REQUIRE(file.Read(kBytes) == static_cast<ssize_t>(kBytes));
  CHECK(file.WrongBits(7) == 0);  // what is stored is whole
  file.Fill(7);
  fs.Rule("write flip 4 times=1");
  REQUIRE(file.Write(kBytes) == static_cast<ssize_t>(kBytes));
  CHECK(file.WrongBits(7) == 0);  // the writer's memory, too
  REQUIRE(file.Read(kBytes) == static_cast<ssize_t>(kBytes));
  CHECK(file.WrongBits(7) == 1);
}

TEST_CASE("FaultFs.WhatHangsHoldsNothingElseUpAndGoesOnWhenCleared") {
  FaultFs fs;
  if (Missing(fs)) return;
  DirectFile file(fs.point() + "/state"), other(fs.point() + "/other");
  fs.Rule("read hang name=state");
  std::future<ssize_t> hanging = std::async(std::launch::async, [&] { return file.Read(kPage); });
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (fs.Of("read").hanging == 0 && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  CHECK(fs.Of("read").hanging == 1);
  CHECK(other.Read(kPage) == static_cast<ssize_t>(kPage));
  CHECK(hanging.wait_for(std::chrono::milliseconds(50)) == std::future_status::timeout);
  fs.Clear();
  CHECK(hanging.get() == static_cast<ssize_t>(kPage));
  CHECK(fs.Of("read").hanging == 0);
}

TEST_CASE("FaultFs.EndsWithRequestsThatHang") {
  std::future<ssize_t> hanging;
  {
    FaultFs fs;
    if (Missing(fs)) return;
    const auto file = std::make_shared<DirectFile>(fs.point() + "/state");
    fs.Rule("write hang");
    hanging = std::async(std::launch::async, [file]() -> ssize_t { return file->Write(kPage) < 0 ? -errno : 0; });
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (fs.Of("write").hanging == 0 && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
    CHECK(fs.Of("write").hanging == 1);
  }
  REQUIRE(hanging.wait_for(std::chrono::seconds(10)) == std::future_status::ready);
  const ssize_t error = hanging.get();
  CHECK((error == -ENOTCONN || error == -ECONNABORTED));
}

TEST_CASE("FaultFs.ARenameIsOneWithFlags") {
  FaultFs fs;
  if (Missing(fs)) return;
  const DirectFile file(fs.point() + "/one");
  fs.Rule("rename error " + std::to_string(EINVAL));
  const std::string one = fs.point() + "/one", two = fs.point() + "/two";
  CHECK(::renameat2(AT_FDCWD, one.c_str(), AT_FDCWD, two.c_str(), RENAME_NOREPLACE) != 0);
  CHECK(errno == EINVAL);
  CHECK(fs.Of("rename").acted == 1);
  CHECK(::rename(one.c_str(), two.c_str()) == 0);
  CHECK(fs.Of("rename").acted == 1);
  CHECK(::access(two.c_str(), F_OK) == 0);
}

TEST_CASE("FaultFs.RefusesWhatIsNoRule") {
  FaultFs fs;
  if (Missing(fs)) return;
  for (const char* line :
       {"read", "read nothing", "read error", "read error x", "read error 0", "unlink error 5", "fsync short 5",
        "flush flip 1", "read delay 5 often=3", "read delay 5 after=", "clear all"}) {
    CAPTURE(line);
    CHECK_THROWS_AS(fs.Rule(line), std::runtime_error);
  }
  for (int i = 0; i < 32; ++i) fs.Rule("flush delay 0");
  CHECK_THROWS_AS(fs.Rule("flush delay 0"), std::runtime_error);
  fs.Rule("clear");
  fs.Rule("flush delay 0\nread hang times=0\n");
}

}  // namespace
}  // namespace mlpo::test
