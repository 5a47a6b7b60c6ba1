// Named objects in the scheduler on a fake tier: versions, handles, room, and who keeps what alive.
#include <map>
#include <set>
#include <utility>

#include "tests/support/fake_tier.h"
//
#include "tests/support/catch.h"

using namespace mlpo;
using mlpo::test::FakeTier;

namespace {

constexpr uint64_t kBlock = 2048;                              // elements
constexpr uint64_t kBytes = Scheduler::kSmallObjectBytes + 1;  // of an object that is not small: one block and a little
constexpr uint64_t kBlockBytes = 24576;

Scheduler::Options MakeOptions(uint32_t buffers, size_t paths) {
  Scheduler::Options options;
  options.buffers = buffers;
  options.block_elements = kBlock;
  options.extents_offset_bytes = 4096;
  options.no_path_timeout_ns = 5'000'000'000;
  options.paths.resize(paths);
  return options;
}

struct Tier : FakeTier {
  explicit Tier(uint32_t buffers = 4, size_t paths = 2)
      : FakeTier(MakeOptions(buffers, paths), std::vector<FakeTier::PathSpeed>(paths)) {
    REQUIRE(Scheduler::BufferBytes(kBlock) == kBlockBytes);
    for (SessionId session : {1, 2}) AddSession(session);
  }
  int After(uint64_t request) {
    RunUntilAnswered(request);
    return status(request);
  }
  uint64_t Value(uint64_t request) {
    CHECK(After(request) == 0);
    return completion(request).value;
  }
  void End(SessionId session) {
    scheduler().EndSession(session, now_ns());
    RunUntilQuiet();
  }
};

}  // namespace

TEST_CASE("Objects.EverySessionOfTheJobSeesWhatWasCommittedLast") {
  Tier tier;
  CHECK(tier.After(tier.Size(2, "a")) == -ENOENT);
  for (const uint64_t bytes : {uint64_t{0}, uint64_t{1}, kBytes, 5 * kBlockBytes, 5 * kBlockBytes + 1}) {
    CHECK(tier.After(tier.Flush(1, 7, "a", bytes, 10'000)) == 0);
    CHECK(tier.Value(tier.Size(2, "a")) == bytes);
  }
  // Not before the COMMIT.
  tier.Open(1, MLPO_OP_FLUSH, 1, "b", 10);
  tier.Piece(1, MLPO_OP_FLUSH, 1, 0, 10);
  CHECK(tier.After(tier.Size(2, "b")) == -ENOENT);
  CHECK(tier.After(tier.Commit(1, 1)) == 0);
  CHECK(tier.Value(tier.Size(2, "b")) == 10);
  CHECK(tier.After(tier.Delete(2, "b")) == 0);
  CHECK(tier.After(tier.Delete(1, "b")) == -ENOENT);
  CHECK(tier.violation() == "");
}

TEST_CASE("Objects.AReaderKeepsItsVersionWhateverBecomesOfTheName") {
  Tier tier(2);
  tier.After(tier.Flush(1, 1, "a", 4 * kBlockBytes, kBlockBytes));
  CHECK(tier.Value(tier.Open(2, MLPO_OP_FETCH, 5, "a")) == 4 * kBlockBytes);
  CHECK(tier.After(tier.Flush(1, 1, "a", 8 * kBlockBytes, kBlockBytes)) == 0);
  CHECK(tier.After(tier.Delete(1, "a")) == 0);
  tier.RunUntilQuiet();
  for (uint64_t at = 0; at < 4 * kBlockBytes; at += kBlockBytes) {
    CHECK(tier.After(tier.Piece(2, MLPO_OP_FETCH, 5, at, kBlockBytes)) == 0);
  }
  CHECK(tier.After(tier.Piece(2, MLPO_OP_FETCH, 5, 4 * kBlockBytes - 1, 2)) == -EINVAL);
  CHECK(tier.violation() == "");
  tier.Close(2, MLPO_OP_FETCH, 5);
  tier.RunUntilQuiet();
  CHECK(tier.scratch_bytes() == 0);
  CHECK(tier.gone_count() == 1);  // the store
  PoolSnapshot pool;
  tier.scheduler().Fill(&pool);
  CHECK(pool.free_blocks == pool.buffers);
}

TEST_CASE("Objects.ExtentsHaveTheObjectsLength") {
  Tier tier(1, 1);  // one buffer: whatever is written goes to storage when the next one comes
  for (int i = 0; i < 10; ++i) {
    CHECK(tier.After(tier.Flush(1, 1, "o" + std::to_string(i), kBytes, kBytes)) == 0);
  }
  CHECK(tier.scratch_bytes() == 9 * 20480);  // 16385 bytes in pages, nine times; the last is in the buffer
  CHECK(tier.violation() == "");
}

TEST_CASE("Objects.PiecesFollowEachOther") {
  Tier tier;
  const uint64_t open = tier.Open(1, MLPO_OP_FLUSH, 1, "a", kBytes);
  const uint64_t first = tier.Piece(1, MLPO_OP_FLUSH, 1, 0, 100);
  CHECK(tier.After(tier.Piece(1, MLPO_OP_FLUSH, 1, 0, 100)) == -EINVAL);
  CHECK(tier.After(tier.Piece(1, MLPO_OP_FLUSH, 1, 101, 1)) == -EINVAL);
  CHECK(tier.After(tier.Piece(1, MLPO_OP_FLUSH, 1, 100, kBytes)) == -EINVAL);
  CHECK(tier.After(tier.Piece(1, MLPO_OP_FETCH, 1, 0, 1)) == -EBADF);    // it is open for writing
  CHECK(tier.After(tier.Piece(2, MLPO_OP_FLUSH, 1, 100, 1)) == -EBADF);  // a handle is its session's own
  CHECK(tier.After(open) == 0);
  CHECK(tier.After(first) == 0);
  CHECK(tier.After(tier.Commit(1, 1)) == -EINVAL);  // too early: the version is dropped
  CHECK(tier.After(tier.Piece(1, MLPO_OP_FLUSH, 1, 100, 1)) == -EBADF);
  CHECK(tier.After(tier.Size(1, "a")) == -ENOENT);
}

TEST_CASE("Objects.WithoutRoomWhatWasThereStays") {
  Tier tier;
  tier.After(tier.Flush(1, 1, "a", kBytes, kBytes));
  tier.room_failure.status = -ENOSPC;
  tier.room_failure.text = "no room";
  const uint64_t open = tier.Open(1, MLPO_OP_FLUSH, 1, "a", 100 * kBlockBytes);
  const uint64_t piece = tier.Piece(1, MLPO_OP_FLUSH, 1, 0, kBlockBytes);  // behind the OPEN, which is not answered yet
  CHECK_FALSE(tier.answered(open));
  CHECK(tier.After(open) == -ENOSPC);
  CHECK(tier.completion(open).failure.text == "no room");
  CHECK(tier.After(piece) == -ENOSPC);
  CHECK(tier.After(tier.Commit(1, 1)) == -EBADF);
  CHECK(tier.Value(tier.Size(1, "a")) == kBytes);
  // What is within the room made so far is asked nobody for.
  const size_t asked = tier.rooms.size();
  CHECK(tier.After(tier.Delete(1, "a")) == 0);
  tier.room_failure = {};
  CHECK(tier.After(tier.Flush(1, 1, "b", kBytes, kBytes)) == 0);
  CHECK(tier.rooms.size() == asked + 1);  // a new store: the one before went with its last object
  tier.Flush(1, 1, "b", kBytes, kBytes);
  tier.RunUntilQuiet();
  CHECK(tier.rooms.back() == 2 * 20480);  // both versions at once
  CHECK(tier.After(tier.Flush(1, 1, "b", kBytes, kBytes)) == 0);
  CHECK(tier.rooms.size() == asked + 2);
}

// What a client can have done fast costs nobody else: small objects no message, and one question for room at a time.
TEST_CASE("Objects.RoomIsAskedForOneByOne") {
  Tier tier;
  for (int i = 0; i < 100; ++i) {
    tier.Open(1, MLPO_OP_FLUSH, 1, "small", 10);
    tier.Close(1, MLPO_OP_FLUSH, 1);
  }
  CHECK(tier.gone_count() == 0);
  CHECK(tier.rooms.empty());
  std::vector<uint64_t> opens;
  for (int i = 0; i < 20; ++i) {
    opens.push_back(tier.Open(1, MLPO_OP_FLUSH, 1, "a", kBytes));
    if (i % 2 == 0) tier.Close(1, MLPO_OP_FLUSH, 1);
    if (i % 2 == 1) tier.Commit(1, 1);
  }
  CHECK(tier.rooms.size() == 1);
  for (uint64_t open : opens) CHECK(tier.After(open) == 0);
  tier.RunUntilQuiet();
  for (uint64_t bytes : tier.rooms) CHECK(bytes == 20480);  // none of them stays
  CHECK(tier.scratch_bytes() == 0);
  CHECK(tier.violation() == "");
  // A session that ends while its OPENs wait leaves the way free for others.
  tier.Open(1, MLPO_OP_FLUSH, 1, "a", kBytes);
  tier.Open(1, MLPO_OP_FLUSH, 2, "b", kBytes);
  const uint64_t other = tier.Open(2, MLPO_OP_FLUSH, 1, "c", kBytes);
  tier.End(1);
  CHECK(tier.After(other) == 0);
  CHECK(tier.violation() == "");
}

TEST_CASE("Objects.Limits") {
  Tier tier;
  for (uint32_t handle = 1; handle <= MLPO_MAX_OBJECT_HANDLES; ++handle) {
    CHECK(tier.After(tier.Open(1, MLPO_OP_FLUSH, handle, "a", 1)) == 0);
  }
  CHECK(tier.After(tier.Open(1, MLPO_OP_FLUSH, 1000, "a", 1)) == MLPO_E_QUOTA);
  CHECK(tier.After(tier.Close(1, MLPO_OP_FLUSH, 1)) == 0);
  CHECK(tier.After(tier.Open(1, MLPO_OP_FLUSH, 2, "a", 1)) == -EEXIST);
  CHECK(tier.After(tier.Open(1, MLPO_OP_FLUSH, 1000, "a", MLPO_MAX_OBJECT_BYTES + 1)) == -EFBIG);
  CHECK(tier.After(tier.Open(1, MLPO_OP_FLUSH, 1000, "a", 1)) == 0);
  for (uint32_t i = MLPO_MAX_OBJECT_HANDLES; i < MLPO_MAX_OBJECTS; ++i) {
    REQUIRE(tier.After(tier.Flush(2, 1, std::to_string(i), 0, 1)) == 0);
  }
  CHECK(tier.After(tier.Open(2, MLPO_OP_FLUSH, 1, "one more", 0)) == MLPO_E_QUOTA);
  tier.End(1);
  CHECK(tier.After(tier.Open(2, MLPO_OP_FLUSH, 1, "one more", 0)) == 0);
}

TEST_CASE("Objects.GoWithTheLastSessionAndNoEarlier") {
  Tier tier(4, 1);
  tier.After(tier.Flush(1, 1, "a", 20 * kBlockBytes, kBlockBytes));
  tier.End(1);
  CHECK(tier.gone(1));
  CHECK(tier.Value(tier.Size(2, "a")) == 20 * kBlockBytes);
  tier.Open(2, MLPO_OP_FETCH, 1, "a");
  tier.Piece(2, MLPO_OP_FETCH, 1, 0, 20 * kBlockBytes);
  for (int i = 0; i < 3; ++i) tier.Step();  // in the middle
  tier.End(2);
  CHECK(tier.gone(2));
  CHECK(tier.gone_count() == 3);
  CHECK(tier.scratch_bytes() == 0);
  CHECK(tier.scheduler().idle());
  tier.AddSession(3);
  CHECK(tier.After(tier.Size(3, "a")) == -ENOENT);
  CHECK(tier.violation() == "");
}

TEST_CASE("Objects.ABlockThatHadToGoBetweenTwoPiecesIsReadBack") {
  Tier tier(1, 1);
  tier.Open(1, MLPO_OP_FLUSH, 1, "a", kBlockBytes);
  CHECK(tier.After(tier.Piece(1, MLPO_OP_FLUSH, 1, 0, 100)) == 0);
  CHECK(tier.After(tier.Flush(2, 1, "b", kBlockBytes, kBlockBytes)) == 0);  // takes the only buffer
  CHECK(tier.After(tier.Piece(1, MLPO_OP_FLUSH, 1, 100, kBlockBytes - 100)) == 0);
  CHECK(tier.After(tier.Commit(1, 1)) == 0);
  CHECK(tier.counts(0).reads == 1);
  CHECK(tier.violation() == "");
}

TEST_CASE("Objects.AReadErrorIsTheReadersAndTheObjectStays") {
  Tier tier(1, 1);
  tier.After(tier.Flush(1, 1, "a", 3 * kBlockBytes, kBlockBytes));
  tier.RunUntilQuiet();
  tier.SetFault(0, [](const Transfer& t) { return t.direction == Direction::kRead ? EIO : 0; });
  tier.Open(2, MLPO_OP_FETCH, 1, "a");
  const uint64_t read = tier.Piece(2, MLPO_OP_FETCH, 1, 0, 3 * kBlockBytes);
  CHECK(tier.After(read) == MLPO_E_IO);
  CHECK(tier.completion(read).failure.text.find("object 'a' from path 'path'") != std::string::npos);
  tier.SetFault(0, nullptr);
  CHECK(tier.After(tier.Piece(2, MLPO_OP_FETCH, 1, 0, 3 * kBlockBytes)) == 0);
  CHECK(tier.violation() == "");
}

TEST_CASE("Objects.AFullTierFailsTheFlush") {
  Tier tier(2, 1);
  tier.SetFault(0, [](const Transfer& t) { return t.direction == Direction::kWrite ? ENOSPC : 0; });
  const uint64_t commit = tier.Flush(1, 1, "a", 10 * kBlockBytes, kBlockBytes);
  for (int i = 0; i < 20 && !tier.answered(commit); ++i) tier.Wait(1'000'000'000);
  CHECK(tier.status(commit) == -ENOSPC);
  CHECK(tier.After(tier.Size(1, "a")) == -ENOENT);
  tier.RunUntilQuiet();
  CHECK(tier.scheduler().idle());
}

// Pieces of half a block, two of them under way, as the client library sends them. Ten times the pool, two paths of
// 1 MB/s each way: 300 blocks take 3.69 s to write and as long to read if neither path ever waits.
TEST_CASE("Objects.LargeOnesGoAtTheSpeedOfThePaths") {
  FakeTier tier(MakeOptions(30, 2), {{1e6, 1e6}, {1e6, 1e6}}, 1'000'000);
  tier.AddSession(1);
  constexpr uint64_t kSize = 300 * kBlockBytes;
  const auto stream = [&](uint16_t op) {
    const int64_t start_ns = tier.now_ns();
    tier.RunUntilAnswered(tier.Open(1, op, 1, "large", op == MLPO_OP_FLUSH ? kSize : 0));
    uint64_t before = 0, last = 0;
    for (uint64_t at = 0; at < kSize; at += kBlockBytes / 2) {
      if (before != 0) tier.RunUntilAnswered(before);
      before = std::exchange(last, tier.Piece(1, op, 1, at, kBlockBytes / 2));
    }
    tier.RunUntilAnswered(last);
    CHECK(tier.status(last) == 0);
    return static_cast<double>(tier.now_ns() - start_ns) * 1e-9;
  };
  const double ideal_s = static_cast<double>(kSize) / 2e6;
  const double write_s = stream(MLPO_OP_FLUSH);
  tier.RunUntilAnswered(tier.Commit(1, 1));
  const double read_s = stream(MLPO_OP_FETCH);
  CHECK(write_s < 1.1 * ideal_s);
  CHECK(read_s < 1.15 * ideal_s);  // they are where the writing put them, not in equal turns
  CHECK(tier.violation() == "");
}

// Who streams a large object always has a block that waits for a buffer and for no read.
TEST_CASE("Objects.AStreamDoesNotHoldUpdatesUp") {
  FakeTier tier(MakeOptions(8, 1), {{1e6, 1e6}}, 1'000'000);
  tier.AddSession(1);
  tier.AddSubgroup(2, 1, {20 * kBlock});
  tier.WriteState(2, 1, MLPO_PART_STATE);
  tier.RunUntilQuiet();
  tier.Grad(2, 1, 1);
  tier.RunUntilQuiet();
  constexpr uint64_t kSize = 400 * kBlockBytes;
  tier.RunUntilAnswered(tier.Open(1, MLPO_OP_FLUSH, 1, "large", kSize));
  uint64_t before = 0, last = 0, at = 0, update = 0;
  for (; at < kSize && (update == 0 || !tier.answered(update)); at += kBlockBytes / 2) {
    if (before != 0) tier.RunUntilAnswered(before);
    before = std::exchange(last, tier.Piece(1, MLPO_OP_FLUSH, 1, at, kBlockBytes / 2));
    if (at == 20 * kBlockBytes) update = tier.Update(2, 1, 1);  // all buffers are the stream's
  }
  CHECK(tier.status(update) == 0);
  CHECK(at < 100 * kBlockBytes);  // both had the same share of the path, within the buffers
  CHECK(tier.violation() == "");
}

// Several sessions on few names, with sessions that end in the middle and paths that fail: every request of a living
// session is answered, no buffer and no extent is lost, and blocks hold what was written last.
TEST_CASE("Objects.RandomOperationsWithEndingSessions") {
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    std::mt19937_64 random(seed);
    const auto below = [&](uint64_t n) { return random() % n; };
    const size_t paths = 1 + below(3);
    FakeTier tier(MakeOptions(static_cast<uint32_t>(1 + below(8)), paths), std::vector<FakeTier::PathSpeed>(paths),
                  1 + static_cast<int64_t>(below(100'000)));
    if (below(2) == 0) {
      for (size_t i = 0; i < paths; ++i) {
        tier.SetFault(static_cast<PathIndex>(i), [&](const Transfer&) { return below(40) == 0 ? EIO : 0; });
      }
    }
    std::set<SessionId> alive;
    SessionId next = 1;
    std::map<uint64_t, SessionId> requests;
    for (int i = 0; i < 400; ++i) {
      if (alive.empty() || (alive.size() < 4 && below(10) == 0)) {
        tier.AddSubgroup(next, 1, {1 + below(5 * kBlock)});
        alive.insert(next++);
      }
      const SessionId session = *std::next(alive.begin(), static_cast<int64_t>(below(alive.size())));
      const uint32_t handle = static_cast<uint32_t>(1 + below(4));
      const std::string name(1, static_cast<char>('a' + below(3)));
      const uint64_t bytes = below(4) == 0 ? below(100) : below(6 * kBlockBytes);
      const auto keep = [&](uint64_t request) { requests[request] = session; };
      tier.room_failure.status = below(10) == 0 ? -ENOSPC : 0;
      switch (below(12)) {
        case 0:
        case 1:
        case 2:
          keep(tier.Flush(session, handle, name, bytes, 1 + below(2 * kBlockBytes)));
          break;
        case 3:
          keep(tier.Open(session, MLPO_OP_FLUSH, handle, name, bytes));
          break;
        case 4:
          keep(tier.Piece(session, MLPO_OP_FLUSH, handle, 0, below(bytes + 1)));
          break;
        case 5:
          keep(tier.Open(session, MLPO_OP_FETCH, handle, name));
          break;
        case 6:
        case 7:
          keep(tier.Piece(session, MLPO_OP_FETCH, handle, below(bytes + 1), below(bytes + 1)));
          break;
        case 8:
          keep(tier.Close(session, below(2) ? MLPO_OP_FETCH : MLPO_OP_FLUSH, handle));
          break;
        case 9:
          keep(tier.Delete(session, name));
          break;
        case 10:
          keep(tier.WriteState(session, 1));
          break;
        case 11:
          if (below(4) == 0) {
            tier.scheduler().EndSession(session, tier.now_ns());
            alive.erase(session);
          }
          break;
      }
      for (uint64_t steps = below(30); steps > 0 && tier.Step(); --steps) {
      }
    }
    for (int i = 0; i < 10 && !tier.scheduler().idle(); ++i) tier.Wait(100'000'000'000);
    CAPTURE(seed);
    CHECK(tier.violation() == "");
    size_t unanswered = 0;
    for (const auto& [request, session] : requests) unanswered += alive.contains(session) && !tier.answered(request);
    CHECK(unanswered == 0);
    for (SessionId session : alive) tier.scheduler().EndSession(session, tier.now_ns());
    tier.RunUntilQuiet();
    for (SessionId session = 1; session < next; ++session) CHECK(tier.gone(session));
    CHECK(tier.scheduler().idle());
    CHECK(tier.scratch_bytes() == 0);
    PoolSnapshot pool;
    tier.scheduler().Fill(&pool);
    CHECK(pool.free_blocks == pool.buffers);
  }
}
