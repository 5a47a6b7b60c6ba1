// Gradients that are kept: bytes in closed form, and none lost or stale whatever comes between GRAD and UPDATE.
#include <random>

#include "tests/support/fake_tier.h"
//
#include "tests/support/catch.h"

using namespace mlpo;
using namespace mlpo::test;

namespace {

constexpr uint64_t kBlock = 28672;  // parameters of a block without kept gradients: both cuts of it are whole pages
constexpr uint64_t kBuffer = 12 * kBlock;
uint64_t Size(mlpo_dtype kept_as) { return kept_as == MLPO_FLOAT32 ? 4 : 2; }
uint64_t Cut(mlpo_dtype kept_as) { return kBuffer / (12 + Size(kept_as)); }

Scheduler::Options Options(uint32_t buffers, size_t paths) {
  Scheduler::Options options;
  options.buffers = buffers;
  options.block_elements = kBlock;
  options.extents_offset_bytes = 4096;
  options.no_path_timeout_ns = 30'000'000'000;
  options.paths.resize(paths);
  return options;
}

struct Bytes {
  uint64_t read = 0, written = 0;
  Bytes operator-(const Bytes& other) const { return {read - other.read, written - other.written}; }
};
Bytes Moved(const FakeTier& tier) {
  Bytes moved;
  for (PathIndex i = 0; i < tier.options().paths.size(); ++i) {
    moved.read += tier.counts(i).read_bytes;
    moved.written += tier.counts(i).written_bytes;
  }
  return moved;
}

// All gradients of session 1, then all updates.
void Step(FakeTier& tier, SubgroupId subgroups, uint32_t epoch, int discards = 0) {
  std::vector<uint64_t> requests;
  for (int i = 0; i <= discards; ++i) {
    if (i > 0) requests.push_back(tier.Submit(1, MLPO_OP_DISCARD, MLPO_ALL_SUBGROUPS, 0, 0, 0, 0));
    for (SubgroupId id = 1; id <= subgroups; ++id) requests.push_back(tier.Grad(1, id, epoch));
    tier.RunUntilQuiet();
  }
  for (SubgroupId id = 1; id <= subgroups; ++id) requests.push_back(tier.Update(1, id, epoch));
  tier.RunUntilQuiet();
  for (const uint64_t request : requests) REQUIRE(tier.status(request) == 0);
  REQUIRE(tier.violation() == "");
}

}  // namespace

TEST_CASE("KeptGradients.BlocksAreCutSoThatStateAndGradientFitABuffer") {
  for (const mlpo_dtype kept_as : {MLPO_FLOAT32, MLPO_BFLOAT16}) {
    SubgroupSpec spec;
    spec.kept_as = kept_as;
    CHECK(Scheduler::BlockElements(spec, kBlock) == Cut(kept_as));
    for (uint64_t block = 2048; block <= 1 << 20; block *= 2) {
      const uint64_t elements = Scheduler::BlockElements(spec, block);
      const auto bytes = [&](uint64_t n) { return Scheduler::GradientBytes(spec, n) + Scheduler::BufferBytes(n); };
      CAPTURE(kept_as, block, elements);
      CHECK(bytes(elements) <= Scheduler::BufferBytes(block));
      CHECK(bytes(elements + 1024) > Scheduler::BufferBytes(block));
    }
    CHECK(Scheduler::BlockElements(spec, 1024) == 0);
  }
  CHECK(Scheduler::BlockElements(SubgroupSpec(), kBlock) == kBlock);
}

// A block that is not cached is written as gradient in the backward pass, read with it and written without it in the
// update: 12 + g bytes a parameter each way. The pool holds back at most its buffers of either kind.
TEST_CASE("KeptGradients.BytesAParameter") {
  constexpr uint64_t kBlocks = 120;
  constexpr uint32_t kBuffers = 6;
  for (const mlpo_dtype kept_as : {MLPO_FLOAT32, MLPO_FLOAT16}) {
    FakeTier tier(Options(kBuffers, 2), {{1e9, 1e9}, {1e9, 1e9}});
    for (SubgroupId id = 1; id <= 4; ++id) tier.AddSubgroup(1, id, {kBlocks / 4 * Cut(kept_as)}, kept_as);
    for (SubgroupId id = 1; id <= 4; ++id) tier.WriteState(1, id, MLPO_PART_STATE);
    for (uint32_t epoch = 1; epoch <= 2; ++epoch) Step(tier, 4, epoch);
    const Bytes before = Moved(tier);
    constexpr uint32_t kSteps = 3;
    for (uint32_t epoch = 3; epoch < 3 + kSteps; ++epoch) Step(tier, 4, epoch);
    const Bytes moved = Moved(tier) - before;
    CAPTURE(kept_as, moved.read / kBuffer / kSteps, moved.written / kBuffer / kSteps);
    for (const uint64_t bytes : {moved.read, moved.written}) {
      CHECK(bytes <= kSteps * (kBlocks + kBuffers) * kBuffer);  // what was fetched ahead may be dropped again
      CHECK(bytes >= kSteps * (kBlocks - kBuffers) * kBuffer);
    }
  }
}

TEST_CASE("KeptGradients.NothingIsMovedWhereThePoolHoldsAll") {
  FakeTier tier(Options(40, 1), {{1e9, 1e9}});
  tier.AddSubgroup(1, 1, {20 * Cut(MLPO_FLOAT32)}, MLPO_FLOAT32);
  tier.WriteState(1, 1, MLPO_PART_STATE);
  tier.RunUntilQuiet();
  Step(tier, 1, 1);
  const Bytes before = Moved(tier);
  for (uint32_t epoch = 2; epoch <= 5; ++epoch) Step(tier, 1, epoch);
  const Bytes moved = Moved(tier) - before;
  CHECK(moved.read == 0);
  CHECK(moved.written == 0);
}

TEST_CASE("KeptGradients.AnyNumberOfBuffersAndPaths") {
  for (const uint32_t buffers : {1u, 2u, 3u, 4u, 9u, 64u}) {
    for (const size_t paths : {1u, 2u, 5u}) {
      CAPTURE(buffers, paths);
      FakeTier tier(Options(buffers, paths), std::vector<FakeTier::PathSpeed>(paths, {1e9, 1e9}));
      for (SubgroupId id = 1; id <= 4; ++id) {
        tier.AddSubgroup(1, id, {5 * kBlock + 7, 0, 3}, id % 2 ? MLPO_FLOAT32 : MLPO_BFLOAT16);
      }
      tier.AddSubgroup(1, 5, {5 * kBlock});
      for (SubgroupId id = 1; id <= 3; ++id) tier.WriteState(1, id);  // 4 begins with all zero
      tier.RunUntilQuiet();
      for (uint32_t epoch = 1; epoch <= 4; ++epoch) Step(tier, 5, epoch, static_cast<int>(epoch % 2));
      tier.EndSession(1);
      tier.RunUntilQuiet();
      CHECK(tier.gone(1));
      CHECK(tier.scratch_bytes() == 0);
    }
  }
}

TEST_CASE("KeptGradients.TheirWindowsAreTraced") {
  for (const bool kept : {false, true}) {
    FakeTier tier(Options(40, 1), {{1e9, 1e9}});
    tier.AddSubgroup(1, 1, {4 * kBlock}, kept ? std::optional(MLPO_FLOAT32) : std::nullopt);
    tier.scheduler().StartTrace(tier.now_ns());
    for (uint32_t epoch = 1; epoch <= 3; ++epoch) Step(tier, 1, epoch);
    const Trace trace = tier.scheduler().StopTrace(tier.now_ns());
    int windows = 0;
    for (const TraceRecord& record : trace.records) {
      windows += record.kind == TraceKind::kWindow && record.end_ns > record.begin_ns;
    }
    CAPTURE(kept);
    CHECK(windows == 3);
  }
}

// Its blocks' gradients wait for it in at most its share of the pool; who has nothing there is not held up.
TEST_CASE("KeptGradients.AHungPathDoesNotTakeThePool") {
  FakeTier tier(Options(12, 2), {{1e9, 1e9}, {1e9, 1e9}});
  tier.AddSubgroup(1, 1, {60 * Cut(MLPO_BFLOAT16)}, MLPO_BFLOAT16);
  tier.WriteState(1, 1, MLPO_PART_STATE);
  tier.RunUntilQuiet();
  Step(tier, 1, 1);
  tier.ChangeSpeed(0, 0, {0, 0});
  const uint64_t grad = tier.Grad(1, 1, 2);
  tier.Wait(10'000'000'000);
  CHECK_FALSE(tier.answered(grad));
  tier.AddSubgroup(2, 1, {4 * kBlock});
  const uint64_t other = tier.WriteState(2, 1);
  tier.Wait(10'000'000'000);
  CHECK(tier.status(other) == 0);
  tier.ChangeSpeed(0, 0, {1e9, 1e9});
  tier.RunUntilAnswered(grad);
  CHECK(tier.status(grad) == 0);
  CHECK(tier.violation() == "");
}

// Reads go on, so training does: each block's gradient takes its state along to the other path.
TEST_CASE("KeptGradients.APathThatIsReadOnlyIsLeft") {
  FakeTier tier(Options(6, 2), {{1e9, 1e9}, {1e9, 1e9}});
  tier.AddSubgroup(1, 1, {40 * Cut(MLPO_FLOAT32)}, MLPO_FLOAT32);
  tier.WriteState(1, 1, MLPO_PART_STATE);
  tier.RunUntilQuiet();
  Step(tier, 1, 1);
  tier.SetFault(0, [](const Transfer& t) { return t.direction == Direction::kWrite ? EROFS : 0; });
  for (uint32_t epoch = 2; epoch <= 4; ++epoch) Step(tier, 1, epoch);
  tier.SetFault(0, nullptr);
  for (uint32_t epoch = 5; epoch <= 6; ++epoch) Step(tier, 1, epoch);
}

// The write of a discarded gradient is under way when the next one comes for the same buffer.
TEST_CASE("KeptGradients.DiscardedWhileWritten") {
  FakeTier tier(Options(8, 1), {{1e9, 1e7}});
  tier.AddSubgroup(1, 1, {20 * Cut(MLPO_BFLOAT16)}, MLPO_BFLOAT16);
  tier.WriteState(1, 1, MLPO_PART_STATE);
  tier.RunUntilQuiet();
  Step(tier, 1, 1);
  for (uint32_t epoch = 2; epoch <= 4; ++epoch) {
    uint64_t grad = tier.Grad(1, 1, epoch);
    for (int steps = 1; steps < 60; ++steps) {
      for (int i = 0; i < steps; ++i) tier.Step();
      CHECK(tier.status(tier.Submit(1, MLPO_OP_DISCARD, 1, 0, 0, 0, 0)) == 0);
      grad = tier.Grad(1, 1, epoch);
    }
    tier.RunUntilAnswered(grad);
    const uint64_t update = tier.Update(1, 1, epoch);
    tier.RunUntilQuiet();
    CHECK(tier.status(grad) == 0);
    CHECK(tier.status(update) == 0);
    REQUIRE(tier.violation() == "");
  }
}

// Between GRAD and UPDATE blocks are fetched ahead with their gradient: of session 1 with their state, too; of session
// 2, whose state is all zero, if there is one, with nothing else.
TEST_CASE("KeptGradients.DiscardedAfterOrWhileFetchedAhead") {
  for (const SessionId last : {1, 2}) {
    uint64_t after = 0, meanwhile = 0;
    for (int events = 0; events < 250; ++events) {
      FakeTier tier(Options(6, 2), {{1e9, 1e8}, {1e9, 1e8}});
      for (SessionId session = 1; session <= last; ++session) {
        tier.AddSubgroup(session, 1, {12 * kBlock}, MLPO_BFLOAT16);
      }
      const auto step = [&](uint32_t epoch, uint32_t kind_of_second) {
        std::vector<uint64_t> requests = {tier.Grad(1, 1, epoch)};
        if (last == 2) requests.push_back(tier.Submit(2, MLPO_OP_GRAD, 1, epoch, kind_of_second, 0, 12 * kBlock));
        tier.RunUntilQuiet();
        for (SessionId session = 1; session <= last; ++session) requests.push_back(tier.Update(session, 1, epoch));
        tier.RunUntilQuiet();
        for (const uint64_t request : requests) REQUIRE(tier.status(request) == 0);
      };
      step(1, MLPO_PIECE_SKIP);
      tier.Wait(1'000'000'000'000);  // a step takes so long that blocks never updated count as soon to be used
      step(2, MLPO_PIECE_SKIP);
      uint64_t begun = 0, ended = 0;
      const auto counts = [last](const Transfer& t) {
        return t.file == last && t.direction == Direction::kRead && t.buffer_offset == 0;
      };
      tier.on_transfer = [&](const Transfer& t) { begun += counts(t); };
      tier.on_transfer_end = [&](const Transfer& t) { ended += counts(t); };
      std::vector<uint64_t> grads;
      for (SessionId session = 1; session <= last; ++session) grads.push_back(tier.Grad(session, 1, 3));
      for (int i = 0; i < events && tier.Step(); ++i) {
      }
      after += ended;
      meanwhile += begun - ended;
      for (SessionId session = 1; session <= last; ++session) {
        REQUIRE(tier.status(tier.Submit(session, MLPO_OP_DISCARD, 1, 0, 0, 0, 0)) == 0);
      }
      tier.RunUntilQuiet();
      for (const uint64_t grad : grads) REQUIRE(tier.answered(grad));
      step(3, MLPO_PIECE_VALUE);
      step(4, MLPO_PIECE_VALUE);
      REQUIRE(tier.violation() == "");
      for (SessionId session = 1; session <= last; ++session) tier.EndSession(session);
      tier.RunUntilQuiet();
      REQUIRE(tier.scratch_bytes() == 0);
    }
    CAPTURE(last);
    CHECK(after > 0);
    CHECK(meanwhile > 0);
  }
}

TEST_CASE("KeptGradients.OneThatCannotBeKeptIsNeverApplied") {
  FakeTier tier(Options(3, 1), {{1e9, 1e9}});
  tier.AddSubgroup(1, 1, {40 * Cut(MLPO_FLOAT32)}, MLPO_FLOAT32);
  tier.WriteState(1, 1, MLPO_PART_STATE);
  tier.RunUntilQuiet();
  tier.SetFault(0, [](const Transfer&) { return EIO; });
  const uint64_t grad = tier.Grad(1, 1, 1);
  const uint64_t update = tier.Update(1, 1, 1);
  tier.Wait(60'000'000'000);
  CHECK(tier.status(grad) == MLPO_E_IO);
  CHECK(tier.status(update) == MLPO_E_IO);
  CHECK(tier.updates() == 0);
  const uint64_t again = tier.Grad(1, 1, 1);
  CHECK(tier.status(again) == MLPO_E_IO);
  tier.SetFault(0, nullptr);
  CHECK(tier.status(tier.Submit(1, MLPO_OP_DISCARD, 1, 0, 0, 0, 0)) == 0);
  Step(tier, 1, 1);
}

TEST_CASE("LentSlots.AreOnesUntilTheWindowIsComplete") {
  FakeTier tier(Options(64, 1), {{1e9, 1e9}}, FakeTier::Work{200'000, 50'000, 1});
  for (SubgroupId id = 1; id <= 3; ++id) tier.AddLentSubgroup(1, id, {4 * kBlock}, MLPO_BFLOAT16);
  const uint64_t bytes = tier.SlotBytes(1, 1);
  const uint64_t half = tier.SubmitIn(0, 1, MLPO_OP_GRAD, 1, 1, 0, 2 * kBlock);
  tier.RunUntilQuiet();
  CHECK(tier.status(half) == 0);
  // The window is open: its slot is nobody else's, not even in part, and its pieces go on there.
  for (const uint64_t offset : {uint64_t{0}, uint64_t{64}, bytes - 1}) {
    CHECK(tier.status(tier.SubmitIn(offset, 1, MLPO_OP_GRAD, 2, 1)) == MLPO_E_SLOT_BUSY);
    CHECK(tier.status(tier.SubmitIn(offset, 1, MLPO_OP_UPDATE, 2, 1)) == MLPO_E_SLOT_BUSY);
  }
  CHECK(tier.status(tier.SubmitIn(bytes, 1, MLPO_OP_GRAD, 1, 1, 2 * kBlock)) == -EINVAL);
  CHECK(tier.status(tier.SubmitIn(bytes, 1, MLPO_OP_UPDATE, 1, 1)) == -EINVAL);
  const uint64_t beside = tier.SubmitIn(bytes, 1, MLPO_OP_GRAD, 2, 1);
  CHECK(tier.status(tier.SubmitIn(bytes - 64, 1, MLPO_OP_GRAD, 3, 1)) == MLPO_E_SLOT_BUSY);
  const uint64_t rest = tier.SubmitIn(0, 1, MLPO_OP_GRAD, 1, 1, 2 * kBlock);
  CHECK(tier.status(tier.SubmitIn(0, 1, MLPO_OP_GRAD, 3, 1)) == MLPO_E_SLOT_BUSY);  // not looked at yet
  tier.RunUntilQuiet();
  CHECK(tier.status(beside) == 0);
  CHECK((tier.completion(rest).flags & MLPO_COMPLETION_WINDOW_COMPLETE) != 0);
  // Its gradient is kept: another may use the slot, and its update any other.
  const uint64_t third = tier.SubmitIn(0, 1, MLPO_OP_GRAD, 3, 1);
  const uint64_t update = tier.SubmitIn(2 * bytes, 1, MLPO_OP_UPDATE, 1, 1);
  CHECK(tier.status(tier.SubmitIn(2 * bytes, 1, MLPO_OP_UPDATE, 2, 1)) == MLPO_E_SLOT_BUSY);
  const uint64_t behind = tier.SubmitIn(0, 1, MLPO_OP_UPDATE, 3, 1);
  tier.RunUntilQuiet();
  CHECK(tier.status(tier.SubmitIn(2 * bytes, 1, MLPO_OP_UPDATE, 2, 1)) == 1);  // accepted now
  tier.RunUntilQuiet();
  for (const uint64_t request : {third, update, behind}) CHECK(tier.status(request) == 0);
  CHECK(tier.violation() == "");
}

TEST_CASE("LentSlots.ADiscardedGradientHasItsSlotUntilItHasEnded") {
  FakeTier tier(Options(64, 1), {{1e9, 1e9}}, FakeTier::Work{200'000, 50'000, 1});
  for (SubgroupId id = 1; id <= 2; ++id) tier.AddLentSubgroup(1, id, {4 * kBlock}, MLPO_BFLOAT16);
  const uint64_t grad = tier.SubmitIn(0, 1, MLPO_OP_GRAD, 1, 1);
  CHECK(tier.status(tier.Submit(1, MLPO_OP_DISCARD, 1, 0, 0, 0, 0)) == 0);
  CHECK(tier.status(tier.SubmitIn(0, 1, MLPO_OP_GRAD, 2, 1)) == MLPO_E_SLOT_BUSY);
  tier.RunUntilQuiet();
  CHECK(tier.status(grad) == -ECANCELED);
  const uint64_t other = tier.SubmitIn(0, 1, MLPO_OP_GRAD, 2, 1);
  tier.RunUntilQuiet();
  CHECK(tier.status(other) == 0);
  CHECK(tier.violation() == "");
}

TEST_CASE("LentSlots.ATornSubgroupGoesOnInTheSlotThatItHas") {
  FakeTier tier(Options(3, 1), {{1e9, 1e9}});
  tier.AddLentSubgroup(1, 1, {40 * Cut(MLPO_BFLOAT16)}, MLPO_BFLOAT16);
  tier.AddLentSubgroup(1, 2, {7}, MLPO_BFLOAT16);
  tier.WriteState(1, 1, MLPO_PART_STATE);
  const uint64_t grad = tier.SubmitIn(0, 1, MLPO_OP_GRAD, 1, 1);
  tier.RunUntilQuiet();
  REQUIRE(tier.status(grad) == 0);
  const auto tear = [&] {
    const uint64_t update = tier.SubmitIn(64, 1, MLPO_OP_UPDATE, 1, 1);
    const uint64_t before = tier.updates();
    while (tier.updates() == before && tier.Step()) {
    }
    tier.SetFault(0, [](const Transfer&) { return EIO; });
    tier.Wait(60'000'000'000);
    CHECK(tier.status(update) == MLPO_E_IO);
    tier.SetFault(0, nullptr);
    CHECK(tier.status(tier.SubmitIn(64, 1, MLPO_OP_GRAD, 1, 1)) == MLPO_E_TORN);
    CHECK(tier.status(tier.SubmitIn(0, 1, MLPO_OP_UPDATE, 1, 1)) == -EINVAL);
    CHECK(tier.status(tier.SubmitIn(128, 1, MLPO_OP_GRAD, 2, 1)) == MLPO_E_SLOT_BUSY);
  };
  tear();
  SECTION("the identical update") {
    const uint64_t update = tier.SubmitIn(64, 1, MLPO_OP_UPDATE, 1, 1);
    tier.RunUntilQuiet();
    CHECK(tier.status(update) == 0);
  }
  SECTION("all of its state is written") {
    tier.WriteState(1, 1, MLPO_PART_STATE);
    tier.RunUntilQuiet();
  }
  const uint64_t other = tier.SubmitIn(128, 1, MLPO_OP_GRAD, 2, 1);
  tier.RunUntilQuiet();
  CHECK(tier.status(other) == 0);
  CHECK(tier.violation() == "");
}

// Whatever clients and paths do, at any time: the tier checks what each buffer and extent holds. Half of the runs have
// checksums, and reads that bring wrong bytes, also when they are made again if transfers fail; half of these have
// blocks of several pieces.
TEST_CASE("KeptGradients.RandomOperations") {
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    CAPTURE(seed);
    std::mt19937_64 random(seed);
    const auto below = [&](uint64_t n) { return random() % n; };
    const size_t paths = 1 + below(3);
    const uint64_t block = seed % 4 == 0 ? 5 * kBlock : kBlock;
    Scheduler::Options options = Options(static_cast<uint32_t>(1 + below(12)), paths);
    options.block_elements = block;
    options.integrity = seed % 2 == 0;
    FakeTier tier(options, std::vector<FakeTier::PathSpeed>(paths, {1e9, 5e8}), FakeTier::Work{200'000, 50'000, 2});
    const int fault_rate = below(2) ? 0 : 30;
    std::mt19937_64 flips(seed);  // of its own: the operations are the same with and without
    for (PathIndex i = 0; i < paths; ++i) {
      if (options.integrity) {
        tier.SetFlip(i, [&flips, fault_rate](const Transfer&, bool again) {
          return again ? fault_rate > 0 && flips() % 3 == 0 : flips() % 20 == 0;
        });
      }
      tier.SetFault(i, [&random, fault_rate](const Transfer&) {
        return fault_rate > 0 && random() % static_cast<uint64_t>(fault_rate) == 0 ? EIO : 0;
      });
    }
    for (SessionId session = 1; session <= 2; ++session) {
      tier.AddSubgroup(session, 1, {3 * block + 5, 2 * block}, MLPO_FLOAT32);
      tier.AddSubgroup(session, 2, {4 * block}, MLPO_BFLOAT16);
      tier.AddSubgroup(session, 3, {2 * block});
      tier.AddLentSubgroup(session, 4, {2 * block}, MLPO_BFLOAT16);
      tier.AddLentSubgroup(session, 5, {100, block}, MLPO_FLOAT32);
    }
    const auto slot = [&](SubgroupId id) { return below(8) * (id == 4 ? block : 1024); };
    std::vector<uint64_t> requests;
    const bool ends = below(2);
    for (int i = 0; i < 400; ++i) {
      const SessionId session = 1 + below(2);
      const auto id = static_cast<SubgroupId>(1 + below(5));
      const Subgroup* subgroup = tier.scheduler().FindSubgroup(session, id);
      const uint64_t numel = subgroup->spec.numel;
      const uint32_t epoch = subgroup->epoch + 1;
      const uint64_t first = below(numel);
      const uint64_t count = below(numel - first + 1);
      const bool lent = subgroup->spec.lent != nullptr;
      switch (below(8)) {
        case 0:
        case 1:
          requests.push_back(lent ? tier.SubmitIn(slot(id), session, MLPO_OP_GRAD, id, epoch)
                                  : tier.Grad(session, id, epoch));
          break;
        case 2: {
          const uint64_t cut = below(numel);
          if (lent) {
            const uint64_t at = subgroup->slot.value_or(slot(id));
            requests.push_back(tier.SubmitIn(at, session, MLPO_OP_GRAD, id, epoch, 0, cut));
            requests.push_back(tier.SubmitIn(at, session, MLPO_OP_GRAD, id, epoch, cut));
            break;
          }
          requests.push_back(tier.Submit(session, MLPO_OP_GRAD, id, epoch, 1 + below(2), 0, cut));
          requests.push_back(tier.Submit(session, MLPO_OP_GRAD, id, epoch, 1 + below(2), cut, numel - cut));
          break;
        }
        case 3:
        case 4:
          requests.push_back(lent ? tier.SubmitIn(subgroup->slot.value_or(slot(id)), session, MLPO_OP_UPDATE, id, epoch)
                                  : tier.Update(session, id, epoch));
          break;
        case 5:
          requests.push_back(tier.Submit(session, MLPO_OP_DISCARD, below(4) ? id : MLPO_ALL_SUBGROUPS, 0, 0, 0, 0));
          break;
        case 6:
          requests.push_back(tier.Submit(session, MLPO_OP_READ_STATE, id, 0, 7, first, count));
          break;
        case 7:
          if (below(2)) {
            requests.push_back(tier.WriteState(session, id, 1 + static_cast<uint32_t>(below(7))));
          } else {
            requests.push_back(tier.Submit(session, MLPO_OP_WRITE_STATE, id, 0, 7, first, count));
          }
          break;
      }
      for (uint64_t steps = below(12); steps > 0; --steps) tier.Step();
      if (below(20) == 0) tier.RunUntilQuiet();
      REQUIRE(tier.violation() == "");
    }
    if (ends) {
      tier.EndSession(1);
      tier.EndSession(2);
    }
    tier.RunUntilQuiet();
    REQUIRE(tier.violation() == "");
    if (!ends) {
      tier.Wait(60'000'000'000);
      for (const uint64_t request : requests) CHECK(tier.answered(request));
      tier.EndSession(1);
      tier.EndSession(2);
      tier.RunUntilQuiet();
    }
    CHECK((tier.gone(1) && tier.gone(2)));
    CHECK(tier.scheduler().idle());
    CHECK(tier.scratch_bytes() == 0);
    PoolSnapshot pool;
    tier.scheduler().Fill(&pool);
    CHECK(pool.free_blocks == pool.buffers);
    CHECK(pool.dirty_blocks == 0);
  }
}
