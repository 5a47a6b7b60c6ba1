// The pool in io_uring's tables: registered once and cloned, or by each ring, or not at all; and growing meanwhile.
#include <atomic>
#include <map>
#include <random>
#include <set>
#include <string>

#include "daemon/io/io_faults.h"
#include "daemon/io/memory_lock.h"
#include "daemon/io/uring_pool.h"
#include "tests/unit/io_queue_fixture.h"
#include "tests/unit/io_scratch.h"

namespace mlpo::test {
namespace {

constexpr uint64_t kBuffer = 64 << 10;
constexpr uint32_t kPerPiece = 32;

// Calls that the kernel refuses.
class Refusing : public IoFaults {
 public:
  std::map<std::string, int, std::less<>> errors;
  std::atomic<int> registrations{0};
  int SetupError(std::string_view call) override {
    registrations += call == "io_uring_register";
    const auto found = errors.find(call);
    return found == errors.end() ? 0 : found->second;
  }
};

// Queues of two paths on a pool of many small pieces, of which the first is there.
struct Rings {
  explicit Rings(Refusing* faults, uint32_t pieces = 8) {
    BufferPool::Options pool_options;
    pool_options.buffer_bytes = kBuffer;
    pool_options.piece_bytes = kPerPiece * kBuffer;
    pool_options.pool_bytes = pieces * pool_options.piece_bytes;
    pool_options.grow = true;
    Result<std::unique_ptr<BufferPool>> made = BufferPool::Create(pool_options);
    INFO(made.status().message());
    REQUIRE(made.ok());
    pool = std::move(*made);
    shared = UringPool::Open(pool.get(), faults);
    for (int i = 0; i < 2; ++i) {
      PathConfig config;
      config.directory = folders[i].path();
      Result<std::unique_ptr<Path>> opened = Path::Open(config, "path" + std::to_string(i), "node");
      INFO(opened.status().message());
      REQUIRE(opened.ok());
      paths[i] = std::move(*opened);
      Result<FileId> created = paths[i]->CreateFile({1000, "job", 0, 1});
      REQUIRE(created.ok());
      files[i] = *created;
      PathQueue::Options options;
      options.index = static_cast<PathIndex>(i);
      options.engine = "io_uring";
      options.piece_bytes = 16 << 10;
      options.rings = 2;
      options.shared = shared.get();
      options.faults = faults;
      Result<std::unique_ptr<PathQueue>> started = PathQueue::Start(options, paths[i].get(), pool.get(), &results);
      INFO(started.status().message());
      REQUIRE(started.ok());
      queues[i] = std::move(*started);
    }
  }
  ~Rings() { pool->StopGrowing(); }

  // As the daemon does it.
  void Grow() {
    pool->Grow(
        [this](uint32_t piece) {
          if (shared) shared->PieceReady(piece);
          for (auto& queue : queues) queue->PieceReady(piece);
          ready.fetch_add(1);
        },
        [](Status) {});
  }
  void GrowAll() {
    Grow();
    while (pool->growing()) std::this_thread::yield();
    pool->StopGrowing();
  }

  // Writes and reads back every buffer that is ready, on both paths, with several in flight.
  void MoveEverything() {
    std::vector<BufferIndex> buffers;
    for (BufferIndex buffer = 0; buffer < pool->count(); ++buffer) {
      if (pool->IsReady(pool->piece_of(buffer))) buffers.push_back(buffer);
    }
    for (int path = 0; path < 2; ++path) {
      for (const Direction direction : {Direction::kWrite, Direction::kRead}) {
        std::set<uint64_t> flying;
        for (const BufferIndex buffer : buffers) {
          if (direction == Direction::kWrite) {
            FillPattern(pool->data(buffer), kBuffer, path, buffer);
          } else {
            std::memset(pool->data(buffer), 0xee, kBuffer);
          }
          Transfer transfer;
          transfer.id = next_id++;
          transfer.path = static_cast<PathIndex>(path);
          transfer.direction = direction;
          transfer.file = files[path];
          transfer.buffer = buffer;
          transfer.offset = Path::kFileHeaderBytes + buffer * kBuffer;
          transfer.bytes = kBuffer;
          queues[path]->Submit(transfer);
          flying.insert(transfer.id);
        }
        while (!flying.empty()) {
          pollfd event{results.event_fd(), POLLIN, 0};
          REQUIRE(::poll(&event, 1, 60'000) == 1);
          std::vector<TransferResult> taken;
          results.TakeAll(&taken);
          for (const TransferResult& result : taken) {
            REQUIRE(result.error == 0);
            REQUIRE(flying.erase(result.id) == 1);
          }
        }
      }
      for (const BufferIndex buffer : buffers) REQUIRE(HasPattern(pool->data(buffer), kBuffer, path, buffer));
    }
  }

  ScratchFolder folders[2];
  std::unique_ptr<BufferPool> pool;
  std::unique_ptr<UringPool> shared;
  std::unique_ptr<Path> paths[2];
  FileId files[2] = {};
  TransferResults results;
  std::unique_ptr<PathQueue> queues[2];
  std::atomic<uint32_t> ready{0};
  uint64_t next_id = 1;
};

bool Skipped() {
  if (!ProbeUring().ok()) {
    WARN("skipped: io_uring is refused here: " << ProbeUring().message());
    return true;
  }
  if (MemoryLockLimit()) {
    WARN("skipped: RLIMIT_MEMLOCK binds this process");
    return true;
  }
  return false;
}

TEST_CASE("UringPool.EachPieceIsRegisteredOnceHoweverManyRings") {
  if (Skipped()) return;
  Refusing faults;
  Rings rings(&faults);
  if (!rings.shared) {
    WARN("skipped: this kernel does not clone buffers (Linux 6.12)");
    return;
  }
  CHECK(faults.registrations == 1);
  rings.MoveEverything();
  rings.GrowAll();
  rings.MoveEverything();
  CHECK(faults.registrations == 8);
  for (uint32_t piece = 0; piece < 8; ++piece) CHECK(rings.shared->IsRegistered(piece));
  for (const auto& queue : rings.queues) CHECK(queue->registered_buffers());
}

// Linux 6.13 to early 6.18 lose what lies above a range that is cloned.
TEST_CASE("UringPool.PiecesMayComeInAnyOrder") {
  if (Skipped()) return;
  Refusing faults;
  Rings rings(&faults);
  rings.pool->Grow([](uint32_t) {}, [](Status) {});
  while (rings.pool->growing()) std::this_thread::yield();
  rings.pool->StopGrowing();
  for (uint32_t piece = rings.pool->piece_count() - 1; piece > 0; --piece) {
    if (rings.shared) rings.shared->PieceReady(piece);
    for (auto& queue : rings.queues) queue->PieceReady(piece);
  }
  rings.MoveEverything();
  for (const auto& queue : rings.queues) CHECK(queue->registered_buffers());
}

TEST_CASE("UringPool.StepsDownToWhatTheKernelHas") {
  if (Skipped()) return;
  const int error = GENERATE(EINVAL, EPERM, ENOSYS);
  Refusing faults;
  SECTION("no cloning of single pieces (Linux 6.12): later ones by each ring") {
    faults.errors = {{"io_uring_clone_piece", error}};
    Rings rings(&faults);
    rings.GrowAll();
    rings.MoveEverything();
    for (const auto& queue : rings.queues) CHECK(queue->registered_buffers());
  }
  SECTION("no cloning: each ring by itself") {
    faults.errors = {{"io_uring_clone", error}};
    Rings rings(&faults);
    CHECK(rings.shared == nullptr);
    CHECK(faults.registrations == 2);
    rings.GrowAll();
    rings.MoveEverything();
    for (const auto& queue : rings.queues) CHECK(queue->registered_buffers());
  }
  SECTION("no table that grows (before Linux 5.19): what is there at start") {
    faults.errors = {{"io_uring_clone", error}, {"io_uring_table", error}};
    Rings rings(&faults);
    for (const auto& queue : rings.queues) CHECK(queue->registered_buffers());
    rings.MoveEverything();
    rings.GrowAll();
    rings.MoveEverything();
    for (const auto& queue : rings.queues) CHECK_FALSE(queue->registered_buffers());
  }
}

TEST_CASE("UringPool.APieceThatIsRefusedIsUsedWithout") {
  if (Skipped()) return;
  Refusing faults;
  Rings rings(&faults);
  if (!rings.shared) {
    WARN("skipped: this kernel does not clone buffers (Linux 6.12)");
    return;
  }
  faults.errors = {{"io_uring_register", ENOMEM}};  // from now on
  rings.GrowAll();
  rings.MoveEverything();
  CHECK(rings.shared->IsRegistered(0));
  CHECK_FALSE(rings.shared->IsRegistered(7));
  for (const auto& queue : rings.queues) CHECK_FALSE(queue->registered_buffers());
}

// Transfers go on while pieces come; the newest are used at once, before the rings have heard of them.
TEST_CASE("UringPool.GrowsUnderTransfers") {
  if (Skipped()) return;
  Refusing faults;
  Rings rings(&faults, 40);
  rings.Grow();
  int rounds = 0;
  while (rings.pool->growing() || rounds < 3) {
    rings.MoveEverything();
    ++rounds;
  }
  rings.MoveEverything();
  CHECK(rings.ready == 39);
  CHECK(rings.pool->ready_bytes() == 40 * kPerPiece * kBuffer);
}

}  // namespace
}  // namespace mlpo::test
