// Pools of machines that are not here: several NUMA nodes, huge pages set aside, memory that runs out in the middle.
// Memory is only mapped; what the kernel would do with it is this test's.
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "daemon/io/buffer_pool.h"
#include "tests/support/catch.h"

namespace mlpo::test {
namespace {

constexpr uint64_t kGib = uint64_t{1} << 30;
constexpr uint64_t kMib = uint64_t{1} << 20;
constexpr uint64_t kKept = 64 * kMib;  // for the rest of the daemon

class FakeMemory : public PoolMemory {
 public:
  int MapHugetlb(std::byte* at, uint64_t bytes, int shift) override {
    uint64_t& left = shift == 30 ? giant_pages : huge_pages;
    const uint64_t pages = (bytes + (1ull << shift) - 1) >> shift;
    if (left < pages) return ENOMEM;
    left -= pages;
    hugetlb_bytes += bytes;
    set_aside.insert(at);
    return PoolMemory::MapSmall(at, bytes);
  }
  int Prefer(std::byte* at, uint64_t bytes, int node) override {
    const std::lock_guard lock(mutex);
    if (policy_error != 0) return policy_error;
    wished[at] = {bytes, node};
    return 0;
  }
  int Interleave(std::byte*, uint64_t, const std::vector<int>& nodes) override {
    const std::lock_guard lock(mutex);
    interleaved = nodes;
    return policy_error;
  }
  int Populate(std::byte* at, uint64_t bytes) override {
    std::unique_lock lock(mutex);
    go.wait(lock, [this] { return !held; });
    if (populate_error != 0 && filled_bytes >= error_at_bytes) return populate_error;
    filling += bytes;
    most = std::max(most, filled_bytes + filling);
    lock.unlock();
    std::this_thread::yield();
    lock.lock();
    filling -= bytes;
    auto map = set_aside.upper_bound(at);
    const bool reserved = map != set_aside.begin() && at < *--map + kGib;
    if (!reserved) filled_bytes += bytes;  // the host has to find it
    threads.insert(std::this_thread::get_id());
    populated[at] = bytes;
    if (taken_at_bytes != 0 && filled_bytes >= taken_at_bytes) others_bytes = taken_bytes;
    return 0;
  }
  int Lock(std::byte*, uint64_t bytes) override {
    locked_bytes += bytes;
    return lock_error;
  }
  std::optional<int> NodeOf(std::byte* page) override {
    const std::lock_guard lock(mutex);
    if (silent) return std::nullopt;
    auto it = wished.upper_bound(page);
    if (it == wished.begin()) return 0;
    --it;
    return full_node == it->second.second ? 0 : it->second.second;
  }
  Result<uint64_t> Available(std::string* what) override {
    const std::lock_guard lock(mutex);
    *what = "the test's host";
    const uint64_t used = filled_bytes + others_bytes;
    return host_bytes - std::min(host_bytes, used);
  }
  void Hold(bool hold) {
    {
      const std::lock_guard lock(mutex);
      held = hold;
    }
    go.notify_all();
  }

  std::mutex mutex;
  std::condition_variable go;
  bool held = false;
  uint64_t host_bytes = uint64_t{1} << 50;
  uint64_t filled_bytes = 0, filling = 0, most = 0, others_bytes = 0;
  uint64_t taken_at_bytes = 0, taken_bytes = 0;  // when so much is filled, others take so much
  int populate_error = 0;
  uint64_t error_at_bytes = 0;
  uint64_t giant_pages = 0, huge_pages = 0;
  std::atomic<uint64_t> hugetlb_bytes{0}, locked_bytes{0};
  int lock_error = 0, policy_error = 0;
  bool silent = false;  // move_pages is refused
  int full_node = -1;
  std::map<std::byte*, std::pair<uint64_t, int>> wished;
  std::map<std::byte*, uint64_t> populated;
  std::set<std::byte*> set_aside;
  std::vector<int> interleaved;
  std::set<std::thread::id> threads;
};

BufferPool::Options With(FakeMemory* memory, uint64_t bytes, int nodes) {
  BufferPool::Options options;
  options.pool_bytes = bytes;
  options.buffer_bytes = 12 * kMib;
  options.memory = memory;
  for (int i = 0; i < nodes; ++i) options.nodes.push_back({i, {}, true});
  return options;
}

std::unique_ptr<BufferPool> Made(const BufferPool::Options& options) {
  Result<std::unique_ptr<BufferPool>> pool = BufferPool::Create(options);
  INFO(pool.status().message());
  REQUIRE(pool.ok());
  return std::move(*pool);
}

// Grows it to its end, and what was told.
struct Growth {
  std::mutex mutex;
  std::set<uint32_t> pieces;
  int ends = 0;
  Status status;
  void Start(BufferPool& pool) {
    pool.Grow(
        [this, &pool](uint32_t piece) {
          const std::lock_guard lock(mutex);
          if (!pool.IsReady(piece) || !pieces.insert(piece).second) ends = 100;  // told too early, or twice
        },
        [this](Status end) {
          const std::lock_guard lock(mutex);
          status = std::move(end);
          ++ends;
        });
  }
};

uint64_t ReadyBuffers(const BufferPool& pool) {
  uint64_t buffers = 0;
  for (uint32_t i = 0; i < pool.piece_count(); ++i) buffers += pool.IsReady(i) ? pool.piece(i).count : 0;
  return buffers;
}

TEST_CASE("BufferPool.EachNodeHasAnEqualPartAndItsFirstPieceComesFirst") {
  FakeMemory memory;
  BufferPool::Options options = With(&memory, 100 * kGib, 2);
  options.grow = true;
  const auto pool = Made(options);
  CHECK(pool->count() == 100 * kGib / (12 * kMib));
  CHECK(pool->growing());
  REQUIRE(pool->piece_count() > 4);
  CHECK(pool->IsReady(0));
  CHECK(pool->IsReady(1));
  CHECK_FALSE(pool->IsReady(2));
  CHECK(ReadyBuffers(*pool) == 170);  // 85 of 12 MiB in a GiB
  CHECK(pool->ready_bytes() == ReadyBuffers(*pool) * 12 * kMib);
  CHECK(pool->coming_bytes() == pool->pool_bytes() - pool->ready_bytes());
  Growth growth;
  growth.Start(*pool);
  pool->StopGrowing();  // may cut it short: then the rest is not there, and that is told
  if (growth.pieces.size() + 2 < pool->piece_count()) CHECK(growth.status.ok());
  CHECK(growth.ends == 1);
  CHECK_FALSE(pool->growing());
}

TEST_CASE("BufferPool.GrowsToItsSizeAndTellsEachPieceOnce") {
  const int nodes = GENERATE(0, 1, 2, 8);
  FakeMemory memory;
  BufferPool::Options options = With(&memory, 50 * kGib, nodes);
  options.grow = true;
  const auto pool = Made(options);
  Growth growth;
  growth.Start(*pool);
  for (int i = 0; i < 60'000 && pool->growing(); ++i) ::usleep(1000);
  pool->StopGrowing();
  INFO("nodes " << nodes);
  CHECK(growth.ends == 1);
  CHECK(growth.status.ok());
  CHECK(growth.pieces.size() + std::max(nodes, 1) == pool->piece_count());
  CHECK(ReadyBuffers(*pool) == pool->count());
  CHECK(pool->ready_bytes() == pool->pool_bytes());
  CHECK(pool->locked());
  CHECK(memory.locked_bytes == pool->pool_bytes());
  // Every buffer is inside its piece, which was populated.
  std::map<int, uint64_t> on;
  for (BufferIndex i = 0; i < pool->count(); ++i) {
    const BufferPool::Piece& piece = pool->piece(pool->piece_of(i));
    const auto* start = static_cast<const std::byte*>(piece.memory.iov_base);
    REQUIRE(i >= piece.first);
    REQUIRE(i < piece.first + piece.count);
    REQUIRE(pool->data(i) == start + (i - piece.first) * pool->buffer_bytes());
    auto step = memory.populated.upper_bound(pool->data(i));
    REQUIRE(step != memory.populated.begin());
    --step;
    REQUIRE(pool->data(i) < step->first + step->second);
    ++on[piece.node];
  }
  CHECK(on.size() == static_cast<size_t>(std::max(nodes, 1)));
  if (nodes < 2) return;
  for (const auto& [node, buffers] : on) {
    CHECK(node >= 0);
    CHECK(buffers >= pool->count() / nodes - 85);
    CHECK(buffers <= pool->count() / nodes + 85);
  }
}

TEST_CASE("BufferPool.ASmallPoolIsOnAllNodesToo") {
  FakeMemory memory;
  const auto pool = Made(With(&memory, 5 * 12 * kMib, 2));
  REQUIRE(pool->piece_count() == 2);
  CHECK(pool->piece(0).count == 3);
  CHECK(pool->piece(1).count == 2);
  CHECK(pool->piece(0).node == 0);
  CHECK(pool->piece(1).node == 1);
}

TEST_CASE("BufferPool.SaysWhereThePagesReallyAre") {
  FakeMemory memory;
  SECTION("a node that is full gives its part to another") {
    memory.full_node = 1;
    const auto pool = Made(With(&memory, 4 * kGib, 2));
    for (uint32_t i = 0; i < pool->piece_count(); ++i) CHECK(pool->piece(i).node == 0);
  }
  SECTION("where the kernel does not say, what was wished for") {
    memory.silent = true;
    const auto pool = Made(With(&memory, 4 * kGib, 2));
    for (uint32_t i = 0; i < pool->piece_count(); ++i) CHECK(pool->piece(i).node == static_cast<int>(i % 2));
  }
  SECTION("a container may refuse mbind") {
    memory.policy_error = EPERM;
    memory.silent = true;
    const auto pool = Made(With(&memory, 4 * kGib, 2));
    CHECK(pool->ready_bytes() == pool->pool_bytes());
  }
  SECTION("interleaved: no buffer is on one node") {
    BufferPool::Options options = With(&memory, 4 * kGib, 2);
    options.interleave = true;
    const auto pool = Made(options);
    CHECK(memory.interleaved == std::vector<int>{0, 1});
    for (uint32_t i = 0; i < pool->piece_count(); ++i) CHECK(pool->piece(i).node == -1);
  }
}

TEST_CASE("C15_MemoryThatGoesElsewhereWhileThePoolGrowsMakesItSmallerNotDead") {
  FakeMemory memory;
  memory.host_bytes = 20 * kGib;
  memory.taken_at_bytes = 4 * kGib;  // then others take half of the host
  memory.taken_bytes = 10 * kGib;
  BufferPool::Options options = With(&memory, 16 * kGib, 2);
  options.grow = true;
  const auto pool = Made(options);
  Growth growth;
  growth.Start(*pool);
  for (int i = 0; i < 60'000 && pool->growing(); ++i) ::usleep(1000);
  pool->StopGrowing();
  CHECK(growth.ends == 1);
  CHECK(growth.status.code() == -ENOMEM);
  CHECK(growth.status.message().find("the test's host has only") != std::string::npos);
  CHECK(growth.status.message().find(std::to_string(pool->pool_bytes())) != std::string::npos);
  CHECK(memory.most + memory.others_bytes <= memory.host_bytes);  // never beyond: that would be the killer's hour
  CHECK(pool->ready_bytes() >= 6 * kGib);
  CHECK(pool->ready_bytes() <= 10 * kGib);
  uint64_t ready = 0;  // a node's last piece is smaller than the others, and may be among them
  for (uint32_t i = 0; i < pool->piece_count(); ++i) ready += pool->IsReady(i) ? 1 : 0;
  CHECK(growth.pieces.size() + 2 == ready);
}

TEST_CASE("C15_APoolThatJustFitsIsFilledByAllThreadsAtOnce") {
  FakeMemory memory;
  const int nodes = GENERATE(1, 4);
  BufferPool::Options options = With(&memory, 16 * kGib, nodes);
  memory.host_bytes = 16 * kGib / options.buffer_bytes * options.buffer_bytes + kKept;
  const auto pool = Made(options);
  CHECK(pool->ready_bytes() == pool->pool_bytes());
  CHECK(memory.most <= memory.host_bytes);
}

TEST_CASE("BufferPool.TheKernelsRefusalInTheMiddleIsToldOnce") {
  FakeMemory memory;
  memory.populate_error = ENOMEM;
  memory.error_at_bytes = 5 * kGib;
  SECTION("while growing") {
    BufferPool::Options options = With(&memory, 16 * kGib, 2);
    options.grow = true;
    const auto pool = Made(options);
    Growth growth;
    growth.Start(*pool);
    for (int i = 0; i < 60'000 && pool->growing(); ++i) ::usleep(1000);
    pool->StopGrowing();
    CHECK(growth.ends == 1);
    CHECK(growth.status.code() == -ENOMEM);
    CHECK(pool->ready_bytes() < 6 * kGib);
    CHECK(ReadyBuffers(*pool) * pool->buffer_bytes() == pool->ready_bytes());
  }
  SECTION("at start") {
    const Result<std::unique_ptr<BufferPool>> pool = BufferPool::Create(With(&memory, 16 * kGib, 2));
    CHECK(pool.status().code() == -ENOMEM);
  }
}

TEST_CASE("BufferPool.TakesWhatIsSetAsideLargestFirst") {
  FakeMemory memory;
  memory.host_bytes = 3 * kGib;  // of which hugetlb pages are no part
  memory.giant_pages = 2;
  memory.huge_pages = 512 + 100;  // one piece, and not enough for another
  const auto pool = Made(With(&memory, 5 * 85 * 12 * kMib, 1));
  CHECK(pool->piece_count() == 5);
  CHECK(memory.giant_pages == 0);
  CHECK(memory.hugetlb_bytes == 2 * kGib + 1020 * kMib);
  CHECK(pool->huge_bytes() == 3 * 1020 * kMib);
  CHECK(pool->huge_pages());
  CHECK(pool->locked());
  CHECK(memory.locked_bytes == 2 * 1020 * kMib);  // the others cannot be swapped out
}

TEST_CASE("BufferPool.PagesThatWereSetAsideAndAreRefusedAfterAllAreReplaced") {
  class Refusing : public FakeMemory {
   public:
    int MapSmall(std::byte* at, uint64_t bytes) override {
      small = true;
      return FakeMemory::MapSmall(at, bytes);
    }
    int Populate(std::byte* at, uint64_t bytes) override { return small ? FakeMemory::Populate(at, bytes) : EFAULT; }
    std::atomic<bool> small{false};
  };
  Refusing memory;
  memory.huge_pages = 1000;
  const auto pool = Made(With(&memory, 60 * kMib, 1));
  CHECK(memory.small);
  CHECK(pool->ready_bytes() == 60 * kMib);
  CHECK(pool->huge_bytes() == 0);
}

TEST_CASE("BufferPool.HugePagesThatAreRequiredAndNotThereAreAnErrorWithTheAdvice") {
  FakeMemory memory;  // which populates nothing, so that there are no transparent ones either
  BufferPool::Options options = With(&memory, 4 * kGib, 1);
  options.huge_pages = BufferPool::HugePages::kRequire;
  const Result<std::unique_ptr<BufferPool>> none = BufferPool::Create(options);
  REQUIRE_FALSE(none.ok());
  CHECK(none.status().message().find("vm.nr_hugepages=") != std::string::npos);
  memory.giant_pages = 8;
  CHECK(BufferPool::Create(options).ok());
}

TEST_CASE("BufferPool.ALockThatIsRefusedIsSaidAndNotTriedAgain") {
  FakeMemory memory;
  memory.lock_error = ENOMEM;
  const auto pool = Made(With(&memory, 8 * kGib, 1));
  CHECK_FALSE(pool->locked());
  CHECK(pool->ready_bytes() == pool->pool_bytes());
  CHECK(memory.locked_bytes <= 16 * kGib);
}

TEST_CASE("BufferPool.StopsInTheMiddleOfGrowing") {
  FakeMemory memory;
  BufferPool::Options options = With(&memory, 64 * kGib, 2);
  options.grow = true;
  auto pool = Made(options);
  memory.Hold(true);
  Growth growth;
  growth.Start(*pool);
  std::thread release([&] {
    ::usleep(20'000);
    memory.Hold(false);
  });
  pool->StopGrowing();
  release.join();
  CHECK(growth.ends == 1);
  CHECK(pool->ready_bytes() < pool->pool_bytes());
  pool.reset();
  // Without a word to StopGrowing the end waits for the threads, too.
  pool = Made(options);
  growth.ends = 0;
  growth.pieces.clear();
  growth.Start(*pool);
  pool.reset();
  CHECK(growth.ends == 1);
}

}  // namespace
}  // namespace mlpo::test
