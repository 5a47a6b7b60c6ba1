#include <cstdlib>
#include <random>
#include <set>

#include "tests/unit/io_queue_fixture.h"
#include "tests/unit/io_scratch.h"

namespace mlpo::test {
namespace {

QueueFixture::Setup On(const ScratchFolder& folder, const std::string& engine) {
  QueueFixture::Setup setup;
  setup.directory = folder.path();
  setup.engine = engine;
  return setup;
}

TEST_CASE("PathQueue.ReadsBackWhatItWrote") {
  const std::string engine = GENERATE("io_uring", "threads");
  const bool direct = GENERATE(true, false);
  ScratchFolder folder;
  QueueFixture::Setup setup = On(folder, engine);
  setup.direct = direct;
  QueueFixture io(setup);
  CHECK(io.queue->engine() == engine);
  CHECK(io.path->direct_io() == direct);
  // Sizes around the piece: less, one, one and a page, all of the buffer.
  uint64_t offset = Path::kFileHeaderBytes;
  for (uint64_t bytes : {4096u, 12288u, 16384u, 20480u, 65536u}) {
    FillPattern(io.pool->data(0), bytes, 7, offset);
    const int64_t before = NowNs();
    const TransferResult written = io.Do(Direction::kWrite, 0, offset, bytes);
    CHECK(written.error == 0);
    CHECK(written.bytes == bytes);
    CHECK(written.started_ns >= before);
    CHECK(written.finished_ns >= written.started_ns);
    CHECK(written.finished_ns <= NowNs());
    const TransferResult read = io.Do(Direction::kRead, 1, offset, bytes);
    CHECK(read.error == 0);
    CHECK(read.bytes == bytes);
    CHECK(HasPattern(io.pool->data(1), bytes, 7, offset));
    offset += bytes;
  }
}

TEST_CASE("PathQueue.WritesNothingBesideTheTransfer") {
  const std::string engine = GENERATE("io_uring", "threads");
  ScratchFolder folder;
  QueueFixture io(On(folder, engine));
  const uint64_t start = Path::kFileHeaderBytes;
  FillPattern(io.pool->data(0), 65536, 1, start);
  REQUIRE(io.Do(Direction::kWrite, 0, start, 65536).error == 0);
  FillPattern(io.pool->data(1), 20480, 2, start + 16384);
  REQUIRE(io.Do(Direction::kWrite, 1, start + 16384, 20480).error == 0);
  std::memset(io.pool->data(2), 0, 65536);
  REQUIRE(io.Do(Direction::kRead, 2, start, 65536).error == 0);
  CHECK(HasPattern(io.pool->data(2), 16384, 1, start));
  CHECK(HasPattern(io.pool->data(2) + 16384, 20480, 2, start + 16384));
  CHECK(HasPattern(io.pool->data(2) + 36864, 65536 - 36864, 1, start + 36864));
}

TEST_CASE("PathQueue.NoBytesAndUnknownFileEndAtOnce") {
  const std::string engine = GENERATE("io_uring", "threads");
  ScratchFolder folder;
  QueueFixture io(On(folder, engine));
  CHECK(io.Do(Direction::kWrite, 0, 4096, 0).error == 0);
  io.file += 1;
  CHECK(io.Do(Direction::kRead, 0, 4096, 4096).error == EBADF);
}

TEST_CASE("PathQueue.ReadBeyondTheEndIsEio") {
  const std::string engine = GENERATE("io_uring", "threads");
  ScratchFolder folder;
  QueueFixture io(On(folder, engine));
  FillPattern(io.pool->data(0), 16384, 1, 4096);
  REQUIRE(io.Do(Direction::kWrite, 0, 4096, 16384).error == 0);
  const TransferResult all_beyond = io.Do(Direction::kRead, 1, 1 << 20, 16384);
  CHECK(all_beyond.error == EIO);
  CHECK(all_beyond.bytes == 0);
  // The first piece is there, the others are not: never zeros for data.
  const TransferResult partly = io.Do(Direction::kRead, 1, 4096, 65536);
  CHECK(partly.error == EIO);
  CHECK(partly.bytes < 65536);
}

TEST_CASE("PathQueue.DestructorWaitsForAllAccepted") {
  const std::string engine = GENERATE("io_uring", "threads");
  ScratchFolder folder;
  QueueFixture::Setup setup = On(folder, engine);
  setup.depth = 2;
  QueueFixture io(setup);
  constexpr uint64_t kTransfers = 64;
  for (BufferIndex i = 0; i < 8; ++i) FillPattern(io.pool->data(i), 65536, i, 0);
  for (uint64_t i = 0; i < kTransfers; ++i) io.Submit(Direction::kWrite, i % 8, 4096 + i * 65536, 65536);
  io.queue.reset();
  std::vector<TransferResult> taken;
  io.results.TakeAll(&taken);
  std::set<uint64_t> ids;
  for (const TransferResult& result : taken) {
    CHECK(result.error == 0);
    ids.insert(result.id);
  }
  CHECK(ids.size() == kTransfers);
  io.Restart();
  for (uint64_t i = 0; i < kTransfers; ++i) {
    REQUIRE(io.Do(Direction::kRead, 0, 4096 + i * 65536, 65536).error == 0);
    REQUIRE(HasPattern(io.pool->data(0), 65536, i % 8, 0));
  }
}

TEST_CASE("PathQueue.BadSettingsAreRefused") {
  ScratchFolder folder;
  QueueFixture io(On(folder, "threads"));
  const auto refused = [&](auto change) {
    PathQueue::Options options = io.options;
    change(options);
    return PathQueue::Start(options, io.path.get(), io.pool.get(), &io.results).status().code();
  };
  CHECK(refused([](auto& o) { o.engine = "uring"; }) == -EINVAL);
  CHECK(refused([](auto& o) { o.piece_bytes = 5000; }) == -EINVAL);
  CHECK(refused([](auto& o) { o.piece_bytes = 0; }) == -EINVAL);
  CHECK(refused([](auto& o) { o.piece_bytes = 16u << 20; }) == -EINVAL);
  CHECK(refused([](auto& o) { o.depth = 0; }) == -EINVAL);
}

// 10^4 random operations, 10^6 with MLPO_LONG=1. The file is regions of one buffer's size; a region has at most one
// transfer in flight; each knows the version it holds.
TEST_CASE("C12_RandomOperationsKeepTheirPattern") {
  const std::string engine = GENERATE("io_uring", "threads");
  const char* wanted = std::getenv("MLPO_LONG");
  const int operations = wanted != nullptr && *wanted == '1' ? 1'000'000 : 10'000;
  ScratchFolder folder;
  QueueFixture::Setup setup = On(folder, engine);
  setup.buffer_bytes = 32 << 10;
  setup.buffers = 16;
  setup.piece_bytes = 8 << 10;
  QueueFixture io(setup);

  struct Region {
    uint64_t version = 0;
    uint64_t bytes = 0;  // written
    bool busy = false;
  };
  struct Flight {
    Direction direction;
    size_t region;
    BufferIndex buffer;
    uint64_t bytes;
  };
  std::vector<Region> regions(64);
  std::map<uint64_t, Flight> flights;
  std::vector<BufferIndex> free_buffers;
  for (BufferIndex i = 0; i < setup.buffers; ++i) free_buffers.push_back(i);
  std::mt19937_64 random(42);
  int submitted = 0, ended = 0;
  while (ended < operations) {
    while (submitted < operations && !free_buffers.empty()) {
      const size_t r = random() % regions.size();
      Region& region = regions[r];
      if (region.busy) break;
      const BufferIndex buffer = free_buffers.back();
      free_buffers.pop_back();
      const bool write = region.bytes == 0 || random() % 2 == 0;
      const uint64_t offset = Path::kFileHeaderBytes + r * setup.buffer_bytes;
      if (write) {
        region.version = random();
        region.bytes = 4096 * (1 + random() % (setup.buffer_bytes / 4096));
        FillPattern(io.pool->data(buffer), region.bytes, region.version, offset);
      } else {
        std::memset(io.pool->data(buffer), 0xee, region.bytes);
      }
      region.busy = true;
      const Direction direction = write ? Direction::kWrite : Direction::kRead;
      flights[io.Submit(direction, buffer, offset, region.bytes)] = {direction, r, buffer, region.bytes};
      ++submitted;
    }
    std::vector<TransferResult> taken;
    pollfd event{io.results.event_fd(), POLLIN, 0};
    REQUIRE(::poll(&event, 1, 60'000) == 1);
    io.results.TakeAll(&taken);
    for (const TransferResult& result : taken) {
      const auto flight = flights.find(result.id);
      REQUIRE(flight != flights.end());  // each exactly once
      const auto [direction, r, buffer, bytes] = flight->second;
      flights.erase(flight);
      REQUIRE(result.error == 0);
      REQUIRE(result.bytes == bytes);
      if (direction == Direction::kRead)
        REQUIRE(HasPattern(io.pool->data(buffer), bytes, regions[r].version,
                           Path::kFileHeaderBytes + r * setup.buffer_bytes));
      regions[r].busy = false;
      free_buffers.push_back(buffer);
      ++ended;
    }
  }
  CHECK(flights.empty());
}

}  // namespace
}  // namespace mlpo::test
