// Reads and writes that the kernel cuts short go on, and end where the file does.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "daemon/base/file_io.h"
#include "daemon/base/unique_fd.h"
#include "tests/support/catch.h"
#include "tests/support/fault_fs.h"
#include "tests/unit/io_scratch.h"

namespace mlpo::test {
namespace {

std::string Pattern(size_t bytes) {
  std::string text(bytes, '\0');
  for (size_t i = 0; i < bytes; ++i) text[i] = static_cast<char>(i * 7 % 251);
  return text;
}

UniqueFd OpenNew(const std::string& file) {
  UniqueFd fd(::open(file.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  REQUIRE(fd.get() >= 0);
  return fd;
}

std::string Content(const std::string& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

}  // namespace

TEST_CASE("FileIo.ReadsToTheEndOfTheFileAndNoFurther") {
  const ScratchFolder folder;
  const UniqueFd fd = OpenNew(folder.path() + "/file");
  const std::string pattern = Pattern(10'000);
  REQUIRE(WriteAt(fd.get(), pattern.data(), pattern.size(), 100) == 0);
  CHECK(Content(folder.path() + "/file") == std::string(100, '\0') + pattern);
  std::string back(20'000, 'x');
  size_t got = 1;
  CHECK(ReadAt(fd.get(), back.data(), pattern.size(), 100, &got) == 0);
  CHECK(got == pattern.size());
  CHECK(back.substr(0, got) == pattern);
  CHECK(ReadAt(fd.get(), back.data(), back.size(), 5100, &got) == 0);
  CHECK(got == 5000);
  CHECK(back.substr(0, got) == pattern.substr(5000));
  CHECK(ReadAt(fd.get(), back.data(), back.size(), 50'000, &got) == 0);
  CHECK(got == 0);
  CHECK(ReadAt(fd.get(), back.data(), 0, 0, &got) == 0);
  CHECK(WriteAt(fd.get(), pattern.data(), 0, 0) == 0);
}

TEST_CASE("FileIo.ErrorsAreTheKernels") {
  const ScratchFolder folder;
  const UniqueFd closed;
  char byte = 0;
  size_t got = 1;
  CHECK(WriteAt(closed.get(), &byte, 1, 0) == EBADF);
  CHECK(ReadAt(closed.get(), &byte, 1, 0, &got) == EBADF);
  CHECK(got == 0);
  const UniqueFd full(::open("/dev/full", O_WRONLY | O_CLOEXEC));
  REQUIRE(full.get() >= 0);
  CHECK(WriteAt(full.get(), &byte, 1, 0) == ENOSPC);
  const UniqueFd file = OpenNew(folder.path() + "/file");
  std::vector<std::string> names = {"old"};
  CHECK(ListNames(file.get(), &names) == ENOTDIR);
  CHECK(names.empty());
}

TEST_CASE("FileIo.GoesOnWhereItWasCutShort") {
  const FaultFs faulty;
  if (!faulty.ok()) {
    WARN("skipped: " << faulty.reason());
    return;
  }
  const std::string pattern = Pattern(1000);
  const UniqueFd fd = OpenNew(faulty.point() + "/file");
  faulty.Rule("write short 7");
  CHECK(WriteAt(fd.get(), pattern.data(), pattern.size(), 3) == 0);
  CHECK(faulty.Of("write").acted > 100);
  CHECK(Content(faulty.source() + "/file") == std::string(3, '\0') + pattern);
  faulty.Rule("read short 9");
  std::string back(2000, 'x');
  size_t got = 0;
  CHECK(ReadAt(fd.get(), back.data(), back.size(), 3, &got) == 0);
  CHECK(got == pattern.size());
  CHECK(back.substr(0, got) == pattern);
  CHECK(faulty.Of("read").acted > 100);
  // What there was before an error counts.
  faulty.Clear();
  faulty.Rule("read short 9 times=1");
  faulty.Rule("read error " + std::to_string(EIO));
  CHECK(ReadAt(fd.get(), back.data(), back.size(), 0, &got) == EIO);
  CHECK(got == 9);
}

TEST_CASE("FileIo.NamesAreAllThereInOrderAndCanBeListedAgain") {
  const ScratchFolder folder;
  for (const char* name : {"b", ".hidden", "a", "..c"}) (void)OpenNew(folder.path() + "/" + name);
  const UniqueFd fd(::open(folder.path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  REQUIRE(fd.get() >= 0);
  for (int i = 0; i < 2; ++i) {
    std::vector<std::string> names = {"old"};
    CHECK(ListNames(fd.get(), &names) == 0);
    CHECK(names == std::vector<std::string>{"..c", ".hidden", "a", "b"});
  }
}

TEST_CASE("FileIo.ATakenNameIsNotReplacedWhateverTheFileSystemCan") {
  FaultFs fs;
  if (!fs.ok()) {
    WARN("skipped: " << fs.reason());
    return;
  }
  const UniqueFd folder(::open(fs.point().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  for (const bool flags : {true, false}) {
    INFO("renames with flags: " << flags);
    if (!flags) fs.Rule("rename error " + std::to_string(EINVAL));
    const std::string one = fs.point() + "/one", two = fs.point() + "/two";
    std::ofstream(one) << "one";
    std::ofstream(two) << "two";
    CHECK(MoveToFreeName(folder.get(), "one", folder.get(), "two") == EEXIST);
    CHECK(Content(two) == "two");
    REQUIRE(::unlink(two.c_str()) == 0);
    CHECK(MoveToFreeName(folder.get(), "one", folder.get(), "two") == 0);
    CHECK(Content(two) == "one");
    CHECK(MoveToFreeName(folder.get(), "one", folder.get(), "three") == ENOENT);
    REQUIRE(::unlink(two.c_str()) == 0);
  }
}

}  // namespace mlpo::test
