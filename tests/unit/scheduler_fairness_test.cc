// Who gets how much: ranks of one job end together whatever their sizes, jobs get equal parts, and a rank that is late,
// pauses, stops or ends costs the others nothing.
#include <algorithm>

#include "tests/support/simulated_training.h"
//
#include "tests/support/catch.h"

using namespace mlpo;
using namespace mlpo::test;

namespace {

SimulatedTraining Training(uint32_t buffers, std::vector<SimulatedRank> ranks) {
  SimulatedTraining training;
  training.speeds = {{345e3, 265e3, 0.5}, {180e3, 180e3, 0.5}};
  training.options = SimulatedOptions(buffers, training.speeds);
  training.work = {3'500'000, 300'000, 2};
  training.ranks = std::move(ranks);
  return training;
}

double MakespanShare(const SimulatedTraining& training, const SimulatedResult& result) {
  return result.ideal_s * training.steps / result.makespan_s;
}

double StepSeconds(const SimulatedResult& result, size_t rank, size_t step) {
  return result.step_ends_s[rank][step - 1] - (step > 1 ? result.step_ends_s[rank][step - 2] : 0);
}

}  // namespace

TEST_CASE("Fairness.RanksOfDifferentSizesEndTogether") {
  for (const uint32_t buffers : {17u, 50u}) {
    SimulatedTraining training = Training(buffers, {{64, 4}, {192, 12}});
    training.barrier = true;
    const SimulatedResult result = SimulateTraining(training);
    CAPTURE(buffers, result.problem);
    REQUIRE(result.finished);
    CHECK(MakespanShare(training, result) >= 0.95);
    // The cache may hold much of the small one, so that it has little left; it never ends last by much.
    for (size_t step = 2; step < training.steps; ++step) {
      CHECK(result.step_ends_s[0][step] < result.step_ends_s[1][step] + 0.05 * result.period_s);
    }
  }
  // Without a cache to speak of, both have as much left as they are large.
  SimulatedTraining training = Training(8, {{64, 4}, {192, 12}});
  training.barrier = true;
  const SimulatedResult result = SimulateTraining(training);
  REQUIRE(result.finished);
  for (size_t step = 2; step < training.steps; ++step) {
    CHECK(result.step_ends_s[0][step] == Approx(result.step_ends_s[1][step]).margin(0.15 * result.period_s));
  }
}

TEST_CASE("Fairness.ARankThatIsHalfAStepLateCostsNothing") {
  for (const uint32_t buffers : {17u, 50u}) {
    SimulatedTraining training = Training(buffers, {{128, 8}, {128, 8}});
    training.ranks[1].start_ns = buffers == 17 ? 3'300'000'000 : 2'850'000'000;
    const SimulatedResult result = SimulateTraining(training);
    CAPTURE(buffers, result.problem);
    REQUIRE(result.finished);
    CHECK(MakespanShare(training, result) >= 0.95);
  }
}

TEST_CASE("Fairness.RanksOfDifferentSizesHalfAStepApart") {
  for (const uint32_t buffers : {17u, 50u}) {
    for (const size_t late : {0, 1}) {
      SimulatedTraining training = Training(buffers, {{64, 4}, {192, 12}});
      training.ranks[late].start_ns = buffers == 17 ? 3'300'000'000 : 2'850'000'000;
      const SimulatedResult result = SimulateTraining(training);
      CAPTURE(buffers, late, result.problem, MakespanShare(training, result));
      REQUIRE(result.finished);
      CHECK(MakespanShare(training, result) >= 0.95);
    }
  }
}

// However much of it waits at once: a job that writes takes no more of the paths than another one.
TEST_CASE("Fairness.FlushesOfJobsGetEqualParts") {
  for (const uint32_t buffers : {6u, 40u}) {
    const SimulatedTraining training = Training(buffers, {});
    FakeTier tier(training.options, training.speeds, training.work);
    tier.AddSession(1, "one");
    tier.AddSession(2, "two");
    tier.AddSubgroup(1, 1, {200 * 1024});
    for (SubgroupId id = 1; id <= 8; ++id) tier.AddSubgroup(2, id, {100 * 1024});
    double written[2] = {};
    tier.on_transfer_end = [&](const Transfer& transfer) {
      if (transfer.direction == Direction::kWrite) written[transfer.file - 1] += static_cast<double>(transfer.bytes);
    };
    for (SubgroupId id = 1; id <= 8; ++id) tier.WriteState(2, id, MLPO_PART_STATE);
    tier.RunUntilAnswered(tier.WriteState(1, 1, MLPO_PART_STATE));
    CAPTURE(buffers);
    CHECK(written[0] == Approx(written[1]).epsilon(0.15));
    CHECK(tier.violation() == "");
  }
}

TEST_CASE("Fairness.AStoppedRankCostsTheOthersNothing") {
  for (const uint32_t buffers : {17u, 50u}) {
    SimulatedTraining alone = Training(buffers, {{128, 8}});
    SimulatedTraining beside = Training(buffers, {{128, 8}, {128, 8}});
    alone.steps = beside.steps = 8;
    const double alone_s = SimulateTraining(alone).period_s;
    beside.ranks[1].stop_step = 3;  // in the middle of an open window, its blocks dirty in the pool
    const SimulatedResult result = SimulateTraining(beside);
    CAPTURE(buffers, result.problem);
    REQUIRE(result.finished);
    for (size_t step = 6; step <= 8; ++step) CHECK(StepSeconds(result, 0, step) < 1.04 * alone_s);
  }
}

TEST_CASE("Fairness.ARankThatEndsLeavesAllToTheOthers") {
  SimulatedTraining alone = Training(17, {{128, 8}});
  SimulatedTraining beside = Training(17, {{128, 8}, {128, 8}});
  beside.ranks[1].end_step = 2;
  beside.end_after_ns = 1'000'000'000;
  const double alone_s = SimulateTraining(alone).period_s;
  const SimulatedResult result = SimulateTraining(beside);
  REQUIRE(result.finished);
  for (size_t step = 4; step <= 6; ++step) CHECK(StepSeconds(result, 0, step) < 1.04 * alone_s);
}

TEST_CASE("Fairness.JobsGetEqualParts") {
  // One has a rank, the other three as large: their bytes are equal while both train.
  SimulatedTraining training = Training(8, {{96, 6, "one"}, {96, 6, "three"}, {96, 6, "three"}, {96, 6, "three"}});
  training.steps = 4;
  double bytes[2] = {};
  bool both = true;
  training.prepare = [&](FakeTier& tier) {
    tier.on_transfer_end = [&](const Transfer& transfer) {
      if (both) bytes[transfer.file == 1 ? 0 : 1] += static_cast<double>(transfer.bytes);
    };
  };
  training.on_step = [&](FakeTier&, size_t rank, uint32_t step) { both &= rank != 0 || step != training.steps; };
  const SimulatedResult result = SimulateTraining(training);
  REQUIRE(result.finished);
  CHECK(bytes[0] == Approx(bytes[1]).epsilon(0.1));
  for (size_t rank = 1; rank <= 2; ++rank) {  // and within the larger job likewise
    CHECK(StepSeconds(result, rank, 2) == Approx(StepSeconds(result, 3, 2)).epsilon(0.1));
  }
}
