// Queues whose reads and writes are made to fail, be short or return nothing; and io_uring refused at start.
#include <sys/resource.h>
#include <sys/stat.h>

#include <atomic>
#include <csignal>
#include <functional>

#include "daemon/io/io_faults.h"
#include "daemon/io/memory_lock.h"
#include "tests/unit/io_child.h"
#include "tests/unit/io_queue_fixture.h"
#include "tests/unit/io_scratch.h"

namespace mlpo::test {
namespace {

// Acts on the n-th read or write (from 1) of a direction; 0: on none.
class NthFault : public IoFaults {
 public:
  enum class Kind { kErrno, kZero, kHalf, kUnaligned };

  void Arm(Direction direction, int n, Kind kind, int error = 0) {
    direction_ = direction;
    kind_ = kind;
    error_ = error;
    requests_ = 0;
    outcomes_ = 0;
    n_ = n;
  }
  int outcomes() const { return outcomes_; }

  size_t RequestBytes(Direction direction, uint64_t, size_t bytes) override {
    if (n_ == 0 || direction != direction_ || ++requests_ != n_) return bytes;
    return kind_ == Kind::kHalf ? bytes / 2 : bytes;
  }
  int64_t Outcome(Direction direction, uint64_t, size_t, int64_t result) override {
    if (n_ == 0 || direction != direction_ || ++outcomes_ != n_) return result;
    if (kind_ == Kind::kErrno) return -error_;
    if (kind_ == Kind::kZero) return 0;
    return kind_ == Kind::kUnaligned && result > 512 ? result - 512 : result;
  }

 private:
  std::atomic<int> n_{0}, requests_{0}, outcomes_{0};
  Direction direction_ = Direction::kRead;
  Kind kind_ = Kind::kErrno;
  int error_ = 0;
};

QueueFixture::Setup With(const ScratchFolder& folder, const std::string& engine, IoFaults* faults) {
  QueueFixture::Setup setup;
  setup.directory = folder.path();
  setup.engine = engine;
  setup.faults = faults;
  setup.depth = 1;  // so that the n-th is the same one in both engines
  return setup;
}

constexpr uint64_t kBytes = 64 << 10;  // 4 pieces
constexpr uint64_t kOffset = Path::kFileHeaderBytes;

TEST_CASE("C10_NthWriteFailsWithItsErrnoAndTheNextOneIsWhole") {
  const std::string engine = GENERATE("io_uring", "threads");
  const int n = GENERATE(1, 2, 4);
  const int error = GENERATE(EIO, ENOSPC, 0);  // 0: the write returns 0
  ScratchFolder folder;
  NthFault faults;
  QueueFixture io(With(folder, engine, &faults));
  FillPattern(io.pool->data(0), kBytes, 1, kOffset);
  faults.Arm(Direction::kWrite, n, error == 0 ? NthFault::Kind::kZero : NthFault::Kind::kErrno, error);
  const TransferResult failed = io.Do(Direction::kWrite, 0, kOffset, kBytes);
  CHECK(failed.error == (error == 0 ? EIO : error));
  CHECK(failed.bytes == static_cast<uint64_t>(n - 1) * io.options.piece_bytes);
  CHECK(faults.outcomes() == n);  // nothing further was issued
  CHECK(HasPattern(io.pool->data(0), kBytes, 1, kOffset));
  REQUIRE(io.Do(Direction::kWrite, 0, kOffset, kBytes).error == 0);
  REQUIRE(io.Do(Direction::kRead, 1, kOffset, kBytes).error == 0);
  CHECK(HasPattern(io.pool->data(1), kBytes, 1, kOffset));
}

TEST_CASE("C10_ShortTransfersAreResumed") {
  const std::string engine = GENERATE("io_uring", "threads");
  const Direction direction = GENERATE(Direction::kRead, Direction::kWrite);
  const NthFault::Kind kind = GENERATE(NthFault::Kind::kHalf, NthFault::Kind::kUnaligned);
  const bool direct = GENERATE(true, false);
  const int n = GENERATE(1, 2, 4);
  ScratchFolder folder;
  NthFault faults;
  QueueFixture::Setup setup = With(folder, engine, &faults);
  setup.direct = direct;
  QueueFixture io(setup);
  FillPattern(io.pool->data(0), kBytes, 1, kOffset);
  faults.Arm(direction, n, kind);
  const TransferResult written = io.Do(Direction::kWrite, 0, kOffset, kBytes);
  CHECK(written.error == 0);
  CHECK(written.bytes == kBytes);
  std::memset(io.pool->data(1), 0, kBytes);
  const TransferResult read = io.Do(Direction::kRead, 1, kOffset, kBytes);
  CHECK(read.error == 0);
  CHECK(read.bytes == kBytes);
  CHECK(faults.outcomes() == 5);  // four pieces and one resumed
  CHECK(HasPattern(io.pool->data(1), kBytes, 1, kOffset));
}

TEST_CASE("C10_FailedReadIsNeverData") {
  const std::string engine = GENERATE("io_uring", "threads");
  const int error = GENERATE(EIO, 0);
  ScratchFolder folder;
  NthFault faults;
  QueueFixture io(With(folder, engine, &faults));
  FillPattern(io.pool->data(0), kBytes, 1, kOffset);
  REQUIRE(io.Do(Direction::kWrite, 0, kOffset, kBytes).error == 0);
  faults.Arm(Direction::kRead, 3, error == 0 ? NthFault::Kind::kZero : NthFault::Kind::kErrno, error);
  CHECK(io.Do(Direction::kRead, 1, kOffset, kBytes).error == EIO);
  CHECK(io.Do(Direction::kRead, 1, kOffset, kBytes).error == 0);
  CHECK(HasPattern(io.pool->data(1), kBytes, 1, kOffset));
}

// What a disk, a cable or a controller may do to the bytes on their way.
TEST_CASE("IoFaults.ChangesWhatOneReadBrings") {
  class OneBit : public IoFaults {
   public:
    std::atomic<uint64_t> offset{0};  // of the byte in the file; 0: none
    void DataRead(uint64_t at, std::byte* data, size_t bytes) override {
      const uint64_t wanted = offset.load();
      if (wanted < at || wanted - at >= bytes) return;
      data[wanted - at] ^= std::byte{0x10};
      offset = 0;
    }
  };
  const std::string engine = GENERATE("io_uring", "threads");
  const uint64_t byte = GENERATE(0, 16383, 16384, 65535);
  ScratchFolder folder;
  OneBit faults;
  QueueFixture io(With(folder, engine, &faults));
  FillPattern(io.pool->data(0), kBytes, 1, kOffset);
  REQUIRE(io.Do(Direction::kWrite, 0, kOffset, kBytes).error == 0);
  faults.offset = kOffset + byte;
  REQUIRE(io.Do(Direction::kRead, 1, kOffset, kBytes).error == 0);
  CHECK_FALSE(HasPattern(io.pool->data(1), kBytes, 1, kOffset));
  io.pool->data(1)[byte] ^= std::byte{0x10};
  CHECK(HasPattern(io.pool->data(1), kBytes, 1, kOffset));  // nothing else
  REQUIRE(io.Do(Direction::kRead, 1, kOffset, kBytes).error == 0);
  CHECK(HasPattern(io.pool->data(1), kBytes, 1, kOffset));
}

TEST_CASE("PathQueue.InterruptedAndAgainAreRepeated") {
  const std::string engine = GENERATE("io_uring", "threads");
  const int error = GENERATE(EINTR, EAGAIN);
  ScratchFolder folder;
  NthFault faults;
  QueueFixture io(With(folder, engine, &faults));
  FillPattern(io.pool->data(0), kBytes, 1, kOffset);
  faults.Arm(Direction::kWrite, 2, NthFault::Kind::kErrno, error);
  CHECK(io.Do(Direction::kWrite, 0, kOffset, kBytes).error == 0);
  CHECK(faults.outcomes() == 5);
  REQUIRE(io.Do(Direction::kRead, 1, kOffset, kBytes).error == 0);
  CHECK(HasPattern(io.pool->data(1), kBytes, 1, kOffset));
}

TEST_CASE("PathQueue.AgainForEverEndsWithinItsBound") {
  class Always : public IoFaults {
    int64_t Outcome(Direction, uint64_t, size_t, int64_t) override { return -EAGAIN; }
  };
  const std::string engine = GENERATE("io_uring", "threads");
  ScratchFolder folder;
  Always faults;
  QueueFixture io(With(folder, engine, &faults));
  CHECK(io.Do(Direction::kWrite, 0, kOffset, kBytes).error == EAGAIN);
}

// One transfer of 64 in flight fails; at once half-size ones go out in the same buffers.
TEST_CASE("C12_SixtyFourInFlightOneFailsAndHalfSizeOnesFollow") {
  class AtOffset : public IoFaults {
   public:
    std::atomic<uint64_t> offset{0};
    int64_t Outcome(Direction direction, uint64_t at, size_t, int64_t result) override {
      return direction == Direction::kWrite && at == offset.load() ? -EIO : result;
    }
  };
  const std::string engine = GENERATE("io_uring", "threads");
  const uint64_t bad = GENERATE(1, 32, 64);
  ScratchFolder folder;
  AtOffset faults;
  QueueFixture::Setup setup = With(folder, engine, &faults);
  setup.buffers = 64;
  setup.depth = 256;
  QueueFixture io(setup);
  const auto place = [](uint64_t i) { return kOffset + i * kBytes; };
  faults.offset = place(bad - 1);
  std::map<uint64_t, uint64_t> index_of;
  for (BufferIndex i = 0; i < 64; ++i) {
    FillPattern(io.pool->data(i), kBytes, 1, place(i));
    index_of[io.Submit(Direction::kWrite, i, place(i), kBytes)] = i;
  }
  // As each ends, its buffer takes a half-size transfer of the next version at once.
  size_t seen = 0;
  std::map<uint64_t, uint64_t> second;
  while (seen < 64) {
    for (const auto& [id, result] : io.Await(1)) {
      if (second.count(id) != 0) {  // it came back before the last of the first ones
        REQUIRE(result.error == 0);
        second.erase(id);
        continue;
      }
      REQUIRE(index_of.count(id) == 1);
      const uint64_t i = index_of.at(id);
      REQUIRE(result.error == (i == bad - 1 ? EIO : 0));
      ++seen;
      if (i == bad - 1) faults.offset = 0;
      FillPattern(io.pool->data(static_cast<BufferIndex>(i)), kBytes / 2, 2, place(i));
      second[io.Submit(Direction::kWrite, static_cast<BufferIndex>(i), place(i), kBytes / 2)] = i;
    }
  }
  for (const auto& [id, result] : io.Await(second.size())) {
    REQUIRE(second.count(id) == 1);
    REQUIRE(result.error == 0);
  }
  for (uint64_t i = 0; i < 64; ++i) {
    REQUIRE(io.Do(Direction::kRead, 0, place(i), kBytes / 2).error == 0);
    REQUIRE(HasPattern(io.pool->data(0), kBytes / 2, 2, place(i)));
    if (i == bad - 1) continue;  // the second half of the failed one is nobody's
    REQUIRE(io.Do(Direction::kRead, 0, place(i) + kBytes / 2, kBytes / 2).error == 0);
    REQUIRE(HasPattern(io.pool->data(0), kBytes / 2, 1, place(i) + kBytes / 2));
  }
}

TEST_CASE("C33_AnyErrnoFromIoUringLeadsToThreads") {
  class Refusing : public IoFaults {
   public:
    std::string call;
    int error = 0;
    int SetupError(std::string_view name) override { return name == call ? error : 0; }
  };
  Refusing faults;
  faults.call = GENERATE("io_uring_setup", "io_uring_enter", "io_uring_register");
  faults.error = GENERATE(EPERM, ENOSYS, EOPNOTSUPP, ENOMEM, EINVAL);
  ScratchFolder folder;
  if (faults.call == "io_uring_register" && faults.error == ENOMEM && MemoryLockLimit()) {
    WARN("skipped: RLIMIT_MEMLOCK binds this process, so that ENOMEM from io_uring_register means the limit");
    return;
  }
  QueueFixture io(With(folder, "auto", &faults));
  CHECK(io.queue->engine() == std::string("threads"));
  CHECK_FALSE(io.queue->registered_buffers());
  FillPattern(io.pool->data(0), kBytes, 1, kOffset);
  REQUIRE(io.Do(Direction::kWrite, 0, kOffset, kBytes).error == 0);
  REQUIRE(io.Do(Direction::kRead, 1, kOffset, kBytes).error == 0);
  CHECK(HasPattern(io.pool->data(1), kBytes, 1, kOffset));

  PathQueue::Options strict = io.options;
  strict.engine = "io_uring";
  const auto refused = PathQueue::Start(strict, io.path.get(), io.pool.get(), &io.results);
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.status().code() == -faults.error);
  CHECK(refused.status().message().find(faults.call) != std::string::npos);
}

TEST_CASE("PathQueue.RegistersThePoolWhereNoLimitBinds") {
  if (MemoryLockLimit()) {
    WARN("skipped: RLIMIT_MEMLOCK binds this process");
    return;
  }
  ScratchFolder folder;
  QueueFixture io(With(folder, "io_uring", nullptr));
  CHECK(io.queue->registered_buffers());
}

TEST_CASE("PathQueue.WorksUnregisteredWhereTheLimitIsTooSmall") {
  if (::geteuid() != 0) {
    WARN("skipped: needs root to become somebody whom RLIMIT_MEMLOCK binds");
    return;
  }
  ScratchFolder folder;
  REQUIRE(::chown(folder.path().c_str(), 65534, 65534) == 0);
  const ChildReport report = InChild([&]() -> std::string {
    const rlimit limit{64 << 10, 64 << 10};
    if (::setrlimit(RLIMIT_MEMLOCK, &limit) != 0 || ::setresuid(65534, 65534, 65534) != 0) return "cannot lower rights";
    QueueFixture::Setup setup = With(folder, "auto", nullptr);
    setup.buffer_bytes = 1 << 20;
    QueueFixture io(setup);
    FillPattern(io.pool->data(0), kBytes, 1, kOffset);
    const bool moved = io.Do(Direction::kWrite, 0, kOffset, kBytes).error == 0 &&
                       io.Do(Direction::kRead, 1, kOffset, kBytes).error == 0 &&
                       HasPattern(io.pool->data(1), kBytes, 1, kOffset);
    return std::string(io.queue->engine()) + (io.queue->registered_buffers() ? " registered" : " unregistered") +
           (moved ? " right" : " wrong");
  });
  CHECK(report.text == "io_uring unregistered right");
}

// The kernel's own refusal to grow a file: EFBIG arrives as such, and the queue goes on when the limit is raised.
TEST_CASE("C11_FileSizeLimitIsReportedAsEfbig") {
  const std::string engine = GENERATE("io_uring", "threads");
  ScratchFolder folder;
  QueueFixture io(With(folder, engine, nullptr));
  FillPattern(io.pool->data(0), kBytes, 1, kOffset);
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit old{};
  REQUIRE(::getrlimit(RLIMIT_FSIZE, &old) == 0);
  const rlimit lowered{kOffset + 3 * 16384, old.rlim_max};
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &lowered) == 0);
  const TransferResult limited = io.Do(Direction::kWrite, 0, kOffset, kBytes);
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &old) == 0);
  std::signal(SIGXFSZ, old_handler);
  CHECK(limited.error == EFBIG);
  CHECK(limited.bytes == 3 * 16384);
  CHECK(io.Do(Direction::kWrite, 0, kOffset, kBytes).error == 0);
  CHECK(io.Do(Direction::kRead, 1, kOffset, kBytes).error == 0);
  CHECK(HasPattern(io.pool->data(1), kBytes, 1, kOffset));
}

}  // namespace
}  // namespace mlpo::test
