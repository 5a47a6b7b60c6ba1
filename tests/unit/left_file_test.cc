// What is given back of a working file that a checkpoint has: everything but what is in use, and its end is where it is
// said to be.
#include "daemon/left_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "daemon/base/unique_fd.h"
#include "tests/support/catch.h"
#include "tests/unit/io_scratch.h"

using namespace mlpo;

namespace {

constexpr uint64_t kHeader = 4096, kExtent = 12 << 10;

class WorkingFile {
 public:
  // Full of one byte, of so many.
  explicit WorkingFile(uint64_t bytes)
      : fd_(::open((folder_.path() + "/state").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)) {
    REQUIRE(fd_.get() >= 0);
    const std::string all(bytes, 'x');
    REQUIRE(::pwrite(fd_.get(), all.data(), all.size(), 0) == static_cast<ssize_t>(bytes));
  }
  int fd() const { return fd_.get(); }
  uint64_t size() const {
    struct stat st;
    REQUIRE(::fstat(fd_.get(), &st) == 0);
    return static_cast<uint64_t>(st.st_size);
  }
  // Whether [first, first + bytes) is as it was.
  bool Has(uint64_t first, uint64_t bytes) const {
    std::string read(bytes, '\0');
    return ::pread(fd_.get(), read.data(), bytes, static_cast<off_t>(first)) == static_cast<ssize_t>(bytes) &&
           read == std::string(bytes, 'x');
  }

 private:
  test::ScratchFolder folder_;
  UniqueFd fd_;
};

Extent At(uint64_t place) { return {0, place * kExtent, kExtent, 1}; }

}  // namespace

TEST_CASE("LeftFile.KeepsWhatIsInUseAndEndsBehindIt") {
  WorkingFile file(kHeader + 8 * kExtent);
  CHECK(GiveBackUnused(file.fd(), {At(5), At(1), At(2)}, file.size(), "it") == kHeader + 6 * kExtent);
  CHECK(file.size() == kHeader + 6 * kExtent);
  CHECK(file.Has(0, kHeader));
  CHECK(file.Has(kHeader + kExtent, 2 * kExtent));
  CHECK(file.Has(kHeader + 5 * kExtent, kExtent));
}

// A checkpoint whose file is said to be longer than it is counts as cut, and is never restored.
TEST_CASE("LeftFile.AnExtentMayReachBeyondTheEnd") {
  const uint64_t written = kHeader + 3 * kExtent + 8192;  // a block that is shorter than its extent
  WorkingFile file(written);
  CHECK(GiveBackUnused(file.fd(), {At(3), At(0)}, file.size(), "it") == written);
  CHECK(file.size() == written);
  CHECK(file.Has(kHeader, kExtent));
  CHECK(file.Has(kHeader + 3 * kExtent, 8192));
}

TEST_CASE("LeftFile.WithoutAnythingInUseOnlyTheHeaderStays") {
  WorkingFile file(kHeader + 2 * kExtent);
  CHECK(GiveBackUnused(file.fd(), {}, file.size(), "it") == kHeader);
  CHECK(file.size() == kHeader);
  CHECK(file.Has(0, kHeader));
}
