// Where a step's time went, in virtual time, where it can be reckoned by hand.
#include <numeric>
#include <random>

#include "daemon/scheduler/trace_log.h"
#include "tests/support/fake_tier.h"
//
#include "tests/support/catch.h"

using namespace mlpo;
using mlpo::test::FakeTier;

namespace {

constexpr uint64_t kBlock = 1024;  // elements: parts of 4 KiB, blocks of 12 KiB
constexpr uint64_t kBlockBytes = 3 * 4096;
constexpr int64_t kMs = 1'000'000;

Scheduler::Options MakeOptions(uint32_t buffers, size_t paths) {
  Scheduler::Options options;
  options.buffers = buffers;
  options.block_elements = kBlock;
  options.extents_offset_bytes = 4096;
  options.no_path_timeout_ns = 5'000'000'000;
  options.paths.resize(paths);
  return options;
}

// Bytes a second at which a block takes `ms`.
double BlockIn(double ms) { return static_cast<double>(kBlockBytes) * 1e3 / ms; }

SessionSnapshot Look(FakeTier& tier, SessionId session) {
  SessionSnapshot snapshot;
  tier.scheduler().Fill(session, &snapshot, tier.now_ns());
  return snapshot;
}

StepRecord Last(FakeTier& tier, SessionId session) {
  const SessionSnapshot snapshot = Look(tier, session);
  REQUIRE(!snapshot.steps.empty());
  return snapshot.steps.back();
}

int64_t SumOfParts(const StepRecord& step) {
  return std::accumulate(step.parts_ns.begin(), step.parts_ns.end(), int64_t{0});
}

// GRAD of each, a pause, UPDATE of each; to the last answer.
void Step(FakeTier& tier, SessionId session, SubgroupId subgroups, uint32_t epoch, int64_t pause_ns = 0) {
  uint64_t last = 0;
  for (SubgroupId id = 1; id <= subgroups; ++id) last = tier.Grad(session, id, epoch);
  tier.RunUntilAnswered(last);
  if (pause_ns > 0) tier.Wait(pause_ns);
  std::vector<uint64_t> updates;
  for (SubgroupId id = 1; id <= subgroups; ++id) updates.push_back(tier.Update(session, id, epoch));
  for (uint64_t update : updates) tier.RunUntilAnswered(update);
}

// The third step of ten blocks through one buffer: each one is read, worked on and written, and nothing runs beside it.
StepRecord OneBuffer(double read_ms, double write_ms, int64_t work_ns) {
  FakeTier tier(MakeOptions(1, 1), {{BlockIn(read_ms), BlockIn(write_ms)}}, work_ns);
  tier.AddSubgroup(1, 1, {10 * kBlock});
  tier.WriteState(1, 1, MLPO_PART_STATE);
  tier.RunUntilQuiet();
  for (uint32_t epoch = 1; epoch <= 3; ++epoch) {
    Step(tier, 1, 1, epoch, 7 * kMs);
    tier.RunUntilQuiet();
  }
  CHECK(tier.violation() == "");
  return Last(tier, 1);
}

}  // namespace

TEST_CASE("StepRecord.ThroughOneBufferEachPartIsWhatItTakes") {
  const StepRecord step = OneBuffer(4, 6, 3 * kMs);
  const auto reads = static_cast<int64_t>(step.read_blocks);
  CHECK(reads >= 9);  // one may have been fetched ahead
  CHECK(step.blocks == 10);
  CHECK(step.read_blocks + step.prefetched_blocks + step.cached_blocks == 10);
  CHECK(step.part_ns(StepPart::kAdam) == 10 * 3 * kMs);
  CHECK(step.part_ns(StepPart::kFetchWait) == reads * 4 * kMs);
  CHECK(step.part_ns(StepPart::kFlushWait) == 9 * 6 * kMs);
  CHECK(step.part_ns(StepPart::kIdle) == 7 * kMs);
  CHECK(step.part_ns(StepPart::kGrad) == 1);  // what the tier takes for it
  CHECK(step.part_ns(StepPart::kCopy) == 0);
  CHECK(SumOfParts(step) == step.ended_ns - step.began_ns);
  CHECK(step.number == 3);
  CHECK(step.epoch == 3);
  CHECK(step.updates == 1);
  CHECK(step.grads == 1);
  CHECK(!step.skipped);
}

TEST_CASE("StepRecord.ASlowerDiskIsFoundWhereItIsSlower") {
  const StepRecord before = OneBuffer(4, 6, kMs);
  const StepRecord reads = OneBuffer(8, 6, kMs);
  CHECK(reads.part_ns(StepPart::kFetchWait) == 2 * before.part_ns(StepPart::kFetchWait));
  CHECK(reads.part_ns(StepPart::kFlushWait) == before.part_ns(StepPart::kFlushWait));
  CHECK(reads.part_ns(StepPart::kAdam) == before.part_ns(StepPart::kAdam));
  const StepRecord writes = OneBuffer(4, 12, kMs);
  CHECK(writes.part_ns(StepPart::kFetchWait) == before.part_ns(StepPart::kFetchWait));
  CHECK(writes.part_ns(StepPart::kFlushWait) == 2 * before.part_ns(StepPart::kFlushWait));
  const StepRecord adam = OneBuffer(4, 6, 2 * kMs);
  CHECK(adam.part_ns(StepPart::kAdam) == 2 * before.part_ns(StepPart::kAdam));
  CHECK(adam.part_ns(StepPart::kFetchWait) == before.part_ns(StepPart::kFetchWait));
}

TEST_CASE("StepRecord.BytesAndBusyTimeOfAllStepsAreThePaths") {
  FakeTier tier(MakeOptions(8, 2), {{BlockIn(2), BlockIn(3)}, {BlockIn(5), BlockIn(4)}}, 100'000);
  for (SubgroupId id = 1; id <= 3; ++id) tier.AddSubgroup(1, id, {9 * kBlock});
  for (SubgroupId id = 1; id <= 3; ++id) tier.WriteState(1, id, MLPO_PART_STATE);
  tier.RunUntilQuiet();
  Step(tier, 1, 3, 1);
  tier.RunUntilQuiet();
  for (uint32_t epoch = 2; epoch <= 6; ++epoch) {
    Step(tier, 1, 3, epoch);
    if (epoch < 6) tier.Wait(50 * kMs);
  }
  const SessionSnapshot snapshot = Look(tier, 1);
  CHECK(!snapshot.step.has_value());
  REQUIRE(snapshot.steps.size() == 6);
  int64_t periods = 0;
  PathUse sums[2];
  for (const StepRecord& step : snapshot.steps) {
    CHECK(SumOfParts(step) == step.ended_ns - step.began_ns);
    periods += step.period_ns;
    for (PathIndex path = 0; path < 2; ++path) {
      const PathUse& use = step.paths[path];
      sums[path].read_bytes += use.read_bytes;
      sums[path].written_bytes += use.written_bytes;
      CHECK(use.busy_ns <= step.period_ns);
      CHECK(use.busy_ns >= std::max(use.read_busy_ns, use.write_busy_ns));
      CHECK(use.busy_ns <= use.read_busy_ns + use.write_busy_ns);
    }
  }
  CHECK(periods == snapshot.steps.back().ended_ns - snapshot.steps.front().began_ns);
  for (PathIndex path = 0; path < 2; ++path) {
    // What was written before the first step began is in no step, what is in flight in none yet.
    PathSnapshot now;
    tier.scheduler().Fill(path, &now, tier.now_ns());
    INFO("path " << path);
    CHECK(sums[path].read_bytes == now.read_bytes);
    CHECK(sums[path].written_bytes <= now.written_bytes);
    CHECK(sums[path].written_bytes > 0);
    CHECK(now.busy_ns <= tier.now_ns());
    CHECK(now.busy_ns > 0);
  }
}

TEST_CASE("StepRecord.AStepEndsWithTheLastUpdateOfAllSubgroups") {
  // Update in backward: a subgroup's UPDATE follows its GRAD at once, long before the next one's gradient.
  FakeTier tier(MakeOptions(64, 1), {{}}, kMs);
  for (SubgroupId id = 1; id <= 3; ++id) tier.AddSubgroup(1, id, {2 * kBlock});
  for (uint32_t epoch = 1; epoch <= 2; ++epoch) {
    for (SubgroupId id = 1; id <= 3; ++id) {
      tier.RunUntilAnswered(tier.Grad(1, id, epoch));
      tier.RunUntilAnswered(tier.Update(1, id, epoch));
      tier.Wait(10 * kMs);
    }
    tier.Wait(100 * kMs);
  }
  const SessionSnapshot snapshot = Look(tier, 1);
  REQUIRE(snapshot.steps.size() == 2);
  for (const StepRecord& step : snapshot.steps) {
    CHECK(step.ended_ns - step.began_ns == 3 * (1 + 2 * kMs) + 2 * 10 * kMs);
    CHECK(step.part_ns(StepPart::kAdam) == 3 * 2 * kMs);
    CHECK(step.part_ns(StepPart::kIdle) == 2 * 10 * kMs);
    CHECK(step.updates == 3);
  }
  CHECK(snapshot.steps[1].period_ns - (snapshot.steps[1].ended_ns - snapshot.steps[1].began_ns) == 110 * kMs);
}

TEST_CASE("StepRecord.ASubgroupThatIsLeftOutIsNotWaitedFor") {
  FakeTier tier(MakeOptions(64, 1), {{}}, kMs);
  for (SubgroupId id = 1; id <= 3; ++id) tier.AddSubgroup(1, id, {kBlock});
  Step(tier, 1, 2, 1);
  const int64_t ended = tier.now_ns();
  CHECK(Look(tier, 1).steps.empty());
  REQUIRE(Look(tier, 1).step.has_value());  // nobody can know yet
  tier.Wait(40 * kMs);
  tier.RunUntilAnswered(tier.Grad(1, 1, 2));
  const StepRecord step = Last(tier, 1);
  CHECK(step.ended_ns == ended);
  CHECK(SumOfParts(step) == step.ended_ns - step.began_ns);
  CHECK(step.updates == 2);
  CHECK(Look(tier, 1).step->number == 2);
}

TEST_CASE("StepRecord.AStepThatBeginsBeforeTheLastOneEndsCountsFromItsEnd") {
  // The next forward and backward pass run while the last updates are under way.
  FakeTier tier(MakeOptions(64, 1), {{}}, 10 * kMs);
  for (SubgroupId id = 1; id <= 2; ++id) tier.AddSubgroup(1, id, {kBlock});
  uint64_t last = 0;
  for (SubgroupId id = 1; id <= 2; ++id) last = tier.Grad(1, id, 1);
  tier.RunUntilAnswered(last);
  const uint64_t quick = tier.Update(1, 1, 1);
  const uint64_t slow = tier.Update(1, 2, 1);
  tier.RunUntilAnswered(quick);
  const uint64_t next = tier.Grad(1, 1, 2);
  tier.RunUntilAnswered(next);
  CHECK(!tier.answered(slow));
  CHECK(Look(tier, 1).steps.empty());
  tier.RunUntilAnswered(slow);
  CHECK(Last(tier, 1).number == 1);
  CHECK(Last(tier, 1).updates == 2);
  const std::optional<StepRecord> open = Look(tier, 1).step;
  REQUIRE(open.has_value());
  CHECK(open->number == 2);
  CHECK(open->began_ns == Last(tier, 1).ended_ns);
  tier.RunUntilAnswered(tier.Update(1, 1, 2));
  CHECK(Look(tier, 1).steps.size() == 1);
  tier.RunUntilAnswered(tier.Grad(1, 2, 2));
  tier.RunUntilAnswered(tier.Update(1, 2, 2));
  CHECK(Last(tier, 1).number == 2);
  CHECK(SumOfParts(Last(tier, 1)) == Last(tier, 1).ended_ns - Last(tier, 1).began_ns);
  CHECK(!Look(tier, 1).step.has_value());
}

TEST_CASE("StepRecord.DiscardedGradientsAreASkippedStep") {
  FakeTier tier(MakeOptions(64, 1), {{}}, kMs);
  for (SubgroupId id = 1; id <= 2; ++id) tier.AddSubgroup(1, id, {kBlock});
  tier.RunUntilAnswered(tier.Grad(1, 1, 1));
  tier.RunUntilAnswered(tier.Grad(1, 2, 1));
  tier.Wait(5 * kMs);
  tier.RunUntilAnswered(tier.Submit(1, MLPO_OP_DISCARD, MLPO_ALL_SUBGROUPS, 0, MLPO_DISCARD_OVERFLOW, 0, 0));
  CHECK(Last(tier, 1).skipped);
  CHECK(Last(tier, 1).updates == 0);
  CHECK(Last(tier, 1).epoch == 0);
  CHECK(Last(tier, 1).part_ns(StepPart::kIdle) >= 5 * kMs);
  Step(tier, 1, 2, 1);
  CHECK(!Last(tier, 1).skipped);
  CHECK(Last(tier, 1).epoch == 1);
  StepTotals totals;
  int64_t busy_ns;
  tier.scheduler().Fill(&totals, &busy_ns, tier.now_ns());
  CHECK(totals.ended == 2);
  CHECK(totals.skipped == 1);
  CHECK(totals.updates == 2);
  CHECK(std::accumulate(totals.times.counts.begin(), totals.times.counts.end(), uint64_t{0}) == 2);
}

TEST_CASE("StepRecord.AFailedUpdateIsTheSameStepWhenItIsRepeated") {
  FakeTier tier(MakeOptions(4, 1), {{}}, kMs);
  tier.AddSubgroup(1, 1, {8 * kBlock});
  tier.WriteState(1, 1, MLPO_PART_STATE);
  tier.RunUntilQuiet();
  tier.SetFault(
      0, [reads = 0](const Transfer& t) mutable { return t.direction == Direction::kRead && ++reads == 3 ? EIO : 0; });
  tier.RunUntilAnswered(tier.Grad(1, 1, 1));
  const uint64_t failed = tier.Update(1, 1, 1);
  tier.RunUntilAnswered(failed);
  REQUIRE(tier.status(failed) == MLPO_E_IO);
  CHECK(Look(tier, 1).steps.empty());
  tier.RunUntilAnswered(tier.Update(1, 1, 1));
  CHECK(Last(tier, 1).number == 1);
  CHECK(Last(tier, 1).updates == 1);
  CHECK(SumOfParts(Last(tier, 1)) == Last(tier, 1).ended_ns - Last(tier, 1).began_ns);
}

TEST_CASE("StepRecord.WaitingForAPathThatAnotherSessionUsesIsFetching") {
  // Buffers are there, but the one path reads one block at a time, for one session and the other in turn.
  Scheduler::Options options = MakeOptions(16, 1);
  options.queue_blocks = 1;
  FakeTier tier(options, {{BlockIn(10), BlockIn(0.01)}}, 1);
  for (SessionId session = 1; session <= 2; ++session) {
    tier.AddSubgroup(session, 1, {40 * kBlock});
    tier.WriteState(session, 1, MLPO_PART_STATE);
  }
  tier.RunUntilQuiet();
  for (SessionId session = 1; session <= 2; ++session) tier.Grad(session, 1, 1);
  tier.RunUntilQuiet();
  const uint64_t first = tier.Update(1, 1, 1);
  const uint64_t second = tier.Update(2, 1, 1);
  tier.RunUntilAnswered(first);
  tier.RunUntilAnswered(second);
  const StepRecord one = Last(tier, 1);
  const StepRecord two = Last(tier, 2);
  REQUIRE(std::min(one.read_blocks, two.read_blocks) >= 20);
  const StepRecord& last = one.ended_ns > two.ended_ns ? one : two;
  CHECK(last.part_ns(StepPart::kFlushWait) < 10 * kMs);
  CHECK(last.part_ns(StepPart::kFetchWait) >= static_cast<int64_t>(one.read_blocks + two.read_blocks - 1) * 10 * kMs);
}

TEST_CASE("StepRecord.WhatOthersDoToTheBuffersChangesWhatAnIdleSessionWaitsFor") {
  TraceLog trace;
  StepBook book(1, &trace);
  SessionSteps session(1);
  SubgroupSteps subgroup;
  book.Settle(0, true);
  book.UpdateAccepted(session, subgroup);
  book.OpBegins(session);
  book.BlockWaits(session);
  // Nothing happens to it from here on.
  book.Settle(10, true);
  book.Settle(30, false);
  book.Settle(40, false);
  SessionSnapshot snapshot;
  book.Fill(session, &snapshot, 45, true);
  REQUIRE(snapshot.step.has_value());
  CHECK(snapshot.step->part_ns(StepPart::kFetchWait) == 15);
  CHECK(snapshot.step->part_ns(StepPart::kFlushWait) == 30);
  book.Settle(70, true);
  book.Settle(71, true);
  book.BlockWaitsNoMore(session);
  book.OpEnds(session);
  book.UpdateEnds(session, subgroup, 1, 1);
  book.Fill(session, &snapshot, 80, true);
  REQUIRE(snapshot.steps.size() == 1);
  CHECK(snapshot.steps.back().part_ns(StepPart::kFetchWait) == 41);
  CHECK(snapshot.steps.back().part_ns(StepPart::kFlushWait) == 30);
}

TEST_CASE("StepRecord.WhatWasFetchedAheadAndThrownOutIsReadAgain") {
  FakeTier tier(MakeOptions(1, 1), {{BlockIn(2), BlockIn(3)}}, kMs);
  tier.AddSubgroup(1, 1, {30 * kBlock});
  tier.AddSubgroup(2, 1, {30 * kBlock});
  tier.WriteState(1, 1, MLPO_PART_STATE);
  tier.RunUntilQuiet();
  uint64_t ahead = 0;
  tier.on_transfer = [&](const Transfer& t) { ahead += t.file == 1 && t.direction == Direction::kRead; };
  uint32_t epoch = 0;
  for (const bool thrown_out : {false, true}) {
    for (int i = 0; i < 2; ++i) Step(tier, 1, 1, ++epoch);
    ahead = 0;
    tier.RunUntilQuiet();
    REQUIRE(ahead == 1);
    if (thrown_out) {
      tier.WriteState(2, 1, MLPO_PART_STATE);
      tier.Wait(30 * kMs);
    }
    Step(tier, 1, 1, ++epoch);
    const StepRecord step = Last(tier, 1);
    CAPTURE(thrown_out, step.cached_blocks, step.prefetched_blocks, step.read_blocks);
    CHECK(step.prefetched_blocks == (thrown_out ? 0 : 1));
    CHECK(step.read_blocks == (thrown_out ? 30 : 29));
    tier.RunUntilQuiet();
  }
  CHECK(tier.violation() == "");
}

TEST_CASE("StepRecord.PartsAddUpWhateverHappens") {
  std::mt19937 random(7);
  for (int round = 0; round < 30; ++round) {
    const uint32_t buffers = 1 + random() % 12;
    const size_t paths = 1 + random() % 3;
    FakeTier tier(MakeOptions(buffers, paths), std::vector<FakeTier::PathSpeed>(paths, {BlockIn(2), BlockIn(3)}), kMs);
    for (SessionId session = 1; session <= 3; ++session) {
      for (SubgroupId id = 1; id <= 3; ++id) tier.AddSubgroup(session, id, {(1 + random() % 5) * kBlock});
    }
    for (int i = 0; i < 200; ++i) {
      const SessionId session = 1 + random() % 3;
      const SubgroupId id = 1 + random() % 3;
      switch (random() % 5) {
        case 0:
        case 1:
          tier.Grad(session, id, tier.scheduler().FindSubgroup(session, id)->epoch + 1);
          break;
        case 2:
          tier.Update(session, id, tier.scheduler().FindSubgroup(session, id)->epoch + 1);
          break;
        case 3:
          if (random() % 8 == 0) tier.Submit(session, MLPO_OP_DISCARD, id, 0, MLPO_DISCARD_OVERFLOW, 0, 0);
          if (random() % 8 == 0) tier.WriteState(session, id);
          break;
        case 4:
          tier.Wait(static_cast<int64_t>(random() % 10) * kMs);
          break;
      }
      const SessionSnapshot snapshot = Look(tier, session);
      int64_t end = 0;
      for (const StepRecord& step : snapshot.steps) {
        REQUIRE(SumOfParts(step) == step.ended_ns - step.began_ns);
        for (int64_t part : step.parts_ns) REQUIRE(part >= 0);
        REQUIRE(step.began_ns >= end);
        REQUIRE(step.blocks >= step.cached_blocks + step.prefetched_blocks + step.read_blocks);
        end = step.ended_ns;
      }
      if (snapshot.step) {
        REQUIRE(SumOfParts(*snapshot.step) == tier.now_ns() - snapshot.step->began_ns);
        REQUIRE(snapshot.step->began_ns >= end);
      }
    }
    tier.RunUntilQuiet();
    CHECK(tier.violation() == "");
    for (SessionId session = 1; session <= 3; ++session) tier.scheduler().EndSession(session, tier.now_ns());
    tier.RunUntilQuiet();
    CHECK(tier.gone_count() == 3);
  }
}

TEST_CASE("TraceLog.WhatCameFirstIsDroppedFirst") {
  constexpr uint64_t kLimit = TraceLog::kSteps;
  TraceLog log;
  const auto step = [&](uint64_t number) {
    StepRecord record;
    record.number = number;
    record.began_ns = static_cast<int64_t>(number);
    record.ended_ns = record.began_ns + 1;
    log.Step(1, record);
  };
  // Steps that a trace has: their numbers follow each other, and the last one is among them.
  const auto check = [](const Trace& trace, uint64_t first, uint64_t last) {
    uint64_t number = first;
    for (const TraceRecord& record : trace.records) {
      if (record.kind != TraceKind::kStep) continue;
      REQUIRE(record.bytes < trace.steps.size());
      REQUIRE(trace.steps[record.bytes].number == number);
      REQUIRE(record.begin_ns == static_cast<int64_t>(number));
      ++number;
    }
    CHECK(number == last + 1);
  };
  for (const uint64_t beyond : {uint64_t{0}, uint64_t{1}, uint64_t{100}, 2 * kLimit + 3}) {
    log.Start(1, 0);
    for (uint64_t number = 1; number <= kLimit + beyond; ++number) step(number);
    const Trace trace = log.Stop(1'000'000);
    CHECK(trace.dropped == beyond);
    CHECK(trace.records.size() == kLimit);
    check(trace, beyond + 1, kLimit + beyond);
  }
  // Other records push out those of the first steps: nothing is counted twice.
  log.Start(1, 0);
  for (uint64_t number = 1; number <= 10; ++number) step(number);
  for (size_t i = 0; i < TraceLog::kRecords - 5; ++i) log.Add({});
  for (uint64_t number = 11; number <= kLimit + 5; ++number) step(number);
  const Trace trace = log.Stop(1'000'000);
  CHECK(trace.records.size() + trace.dropped == kLimit + TraceLog::kRecords);
  check(trace, 11, kLimit + 5);
}
