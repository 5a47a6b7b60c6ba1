// The same transfers on every file system and sector size that this machine lets us make.
#include <sys/stat.h>

#include <optional>

#include "tests/unit/io_queue_fixture.h"
#include "tests/unit/io_scratch.h"

namespace mlpo::test {
namespace {

// Writes and reads blocks of `elements` FP32 values, padded to pages with zeros, and compares every byte, padding too;
// then again through the page cache of a plain descriptor.
void RoundTrip(const std::string& directory, const std::string& engine, std::optional<bool> direct_expected) {
  QueueFixture::Setup setup;
  setup.directory = directory;
  setup.engine = engine;
  setup.buffer_bytes = 2 << 20;
  setup.buffers = 4;
  setup.piece_bytes = 256 << 10;
  QueueFixture io(setup);
  if (direct_expected) CHECK(io.path->direct_io() == *direct_expected);
  uint64_t offset = Path::kFileHeaderBytes;
  for (uint64_t elements : {1u, 127u, 128u, 129u, 1023u, 1024u, 1025u, 262143u, 262144u, 262145u}) {
    const uint64_t bytes = elements * 4, padded = (bytes + 4095) / 4096 * 4096;
    INFO(elements << " elements on " << directory << " with " << engine);
    const Status reserved = io.path->Reserve(io.file, offset + padded);
    INFO(reserved.message());
    REQUIRE(reserved.ok());
    std::memset(io.pool->data(0), 0, padded);
    for (uint64_t i = 0; i < elements; ++i) {
      const auto word = static_cast<uint32_t>(PatternWord(elements, offset + i));
      std::memcpy(io.pool->data(0) + i * 4, &word, 4);
    }
    REQUIRE(io.Do(Direction::kWrite, 0, offset, padded).error == 0);
    std::memset(io.pool->data(1), 0xee, padded);
    REQUIRE(io.Do(Direction::kRead, 1, offset, padded).error == 0);
    REQUIRE(std::memcmp(io.pool->data(0), io.pool->data(1), padded) == 0);
    offset += padded;
  }
}

TEST_CASE("C09_EveryTailOnTheFileSystemOfTmp") {
  const std::string engine = GENERATE("io_uring", "threads");
  ScratchFolder folder;
  struct stat st;
  REQUIRE(::stat(folder.path().c_str(), &st) == 0);
  const std::string type = [&] {
    FILE* pipe = ::popen(("stat -f -c %T " + folder.path()).c_str(), "r");
    char text[64] = "";
    if (pipe != nullptr && std::fgets(text, sizeof text, pipe) == nullptr) text[0] = 0;
    if (pipe != nullptr) ::pclose(pipe);
    return std::string(text);
  }();
  if (type != "ext2/ext3\n" && type != "xfs\n") {
    WARN("skipped: /tmp is on " << type << ", whose O_DIRECT is not known beforehand");
    return;
  }
  RoundTrip(folder.path(), engine, true);
}

TEST_CASE("C13_TmpfsIsUsedBuffered") {
  const std::string engine = GENERATE("io_uring", "threads");
  ScratchFolder point;
  ScratchMount tmpfs("tmpfs", point.path(), "tmpfs", 0, "size=64m");
  if (!tmpfs.ok()) {
    WARN("skipped: mounting a tmpfs needs root");
    return;
  }
  RoundTrip(point.path(), engine, false);
}

TEST_CASE("C09_C13_LoopDevicesOf512And4096ByteSectors") {
  const std::string engine = GENERATE("io_uring", "threads");
  const std::string type = GENERATE("ext4", "xfs");
  const int sector = GENERATE(512, 4096);
  LoopFileSystem loop(type, sector, type == "xfs" ? 512 : 128);
  if (!loop.ok()) {
    WARN("skipped: " << type << " with " << sector << " byte sectors: " << loop.reason());
    return;
  }
  RoundTrip(loop.point(), engine, true);
}

// Whether O_DIRECT works on an overlay depends on the kernel and the layer below: the probe finds out.
TEST_CASE("C13_OverlayfsWorksEitherWay") {
  const std::string engine = GENERATE("io_uring", "threads");
  ScratchFolder folder;
  for (const char* name : {"/lower", "/upper", "/work", "/merged"})
    REQUIRE(::mkdir((folder.path() + name).c_str(), 0755) == 0);
  const std::string data =
      "lowerdir=" + folder.path() + "/lower,upperdir=" + folder.path() + "/upper,workdir=" + folder.path() + "/work";
  ScratchMount overlay("overlay", folder.path() + "/merged", "overlay", 0, data.c_str());
  if (!overlay.ok()) {
    WARN("skipped: mounting an overlay does not work here");
    return;
  }
  RoundTrip(overlay.point(), engine, std::nullopt);
}

// A real full disk: part is written, then ENOSPC; space comes back; the same transfer then works.
TEST_CASE("C11_FullFileSystemIsEnospcAndRecovers") {
  const std::string engine = GENERATE("io_uring", "threads");
  ScratchFolder point;
  ScratchMount tmpfs("tmpfs", point.path(), "tmpfs", 0, "size=4m");
  if (!tmpfs.ok()) {
    WARN("skipped: mounting a tmpfs needs root");
    return;
  }
  QueueFixture::Setup setup;
  setup.directory = point.path();
  setup.engine = engine;
  setup.buffer_bytes = 2 << 20;
  setup.buffers = 4;
  setup.piece_bytes = 64 << 10;
  QueueFixture io(setup);
  const std::string ballast = point.path() + "/ballast";
  REQUIRE(RunQuietly("dd if=/dev/zero bs=1M count=3 of=" + ballast));
  FillPattern(io.pool->data(0), 2 << 20, 5, 4096);
  const TransferResult full = io.Do(Direction::kWrite, 0, 4096, 2 << 20);
  CHECK(full.error == ENOSPC);
  CHECK(full.bytes < (2u << 20));
  REQUIRE(::unlink(ballast.c_str()) == 0);
  REQUIRE(io.Do(Direction::kWrite, 0, 4096, 2 << 20).error == 0);
  REQUIRE(io.Do(Direction::kRead, 1, 4096, 2 << 20).error == 0);
  CHECK(HasPattern(io.pool->data(1), 2 << 20, 5, 4096));
}

}  // namespace
}  // namespace mlpo::test
