// Paths whose speeds are not what was declared, or change in the middle of a run: how soon the steps are at the new
// limit, in virtual time. MLPO_LONG=1 prints each step.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "tests/support/simulated_training.h"
//
#include "tests/support/catch.h"

using namespace mlpo;
using namespace mlpo::test;

namespace {

using Speeds = std::vector<FakeTier::PathSpeed>;

constexpr uint64_t kBlocks = 256;  // of the whole state: 268 M parameters
constexpr uint32_t kBuffers = 50;

const Speeds kPaper{{345e3, 265e3, 0.5}, {180e3, 180e3, 0.5}};
const Speeds kHalf{{345e3, 265e3, 1}, {180e3, 180e3, 0.5}};
const Speeds kCrossed{{337.5e3, 120e3, 0.5}, {173e3, 343e3, 0.5}};

bool Long() {
  const char* wanted = std::getenv("MLPO_LONG");
  return wanted != nullptr && std::string(wanted) == "1";
}

double Worth(const FakeTier::PathSpeed& s) { return PathWorth({s.read_bytes_per_s, s.write_bytes_per_s, s.duplex, 0}); }

double IdealS(const Speeds& speeds) {
  double worth = 0;
  for (const FakeTier::PathSpeed& s : speeds) worth += Worth(s);
  return static_cast<double>((kBlocks - kBuffers) * Scheduler::BufferBytes(1024)) / worth;
}

SimulatedTraining Training(const Speeds& speeds, uint32_t steps) {
  SimulatedTraining training;
  training.speeds = speeds;
  training.options = SimulatedOptions(kBuffers, speeds);
  training.work = {3'500'000, 300'000, 2};
  training.steps = steps;
  SimulatedRank rank;
  rank.blocks = kBlocks;
  rank.subgroups = 16;
  rank.backward_ns = 60'000'000;
  training.ranks.push_back(rank);
  return training;
}

// Each step's time from the end of the one before.
std::vector<double> StepTimes(const SimulatedResult& result) {
  std::vector<double> times;
  double before = 0;
  for (const double end : result.step_ends_s[0]) times.push_back(end - std::exchange(before, end));
  return times;
}

void Print(const std::string& what, const std::vector<double>& times, double ideal_s) {
  if (!Long()) return;
  std::printf("%-40s", what.c_str());
  for (const double time : times) std::printf(" %.3f", ideal_s / time);
  std::printf("\n");
}

}  // namespace

TEST_CASE("SchedulerSpeeds.AHalvedPathCostsTwoStepsAndARestoredOneToo") {
  struct Case {
    const char* name;
    Speeds speeds;
    size_t path;
    double limit_share;  // of a step at the new limit; the cache's own loss is in it, which is not what is tested
  };
  for (const Case& c :
       {Case{"paper, nvme", kPaper, 0, 0.94}, Case{"paper, pfs", kPaper, 1, 0.94}, Case{"half, nvme", kHalf, 0, 0.75},
        Case{"crossed, nvme", kCrossed, 0, 0.85}, Case{"crossed, pfs", kCrossed, 1, 0.9}}) {
    for (const bool known : {true, false}) {
      Speeds halved = c.speeds;
      halved[c.path].read_bytes_per_s /= 2;
      halved[c.path].write_bytes_per_s /= 2;
      SimulatedTraining training = Training(c.speeds, 16);
      for (PathParameters& path : training.options.paths) path.duplex_known = known;
      std::vector<double> worths;     // as believed after each step
      std::vector<int64_t> unneeded;  // blocks written more than read until then
      // In the middle of step 4 it is halved, in that of step 11 restored.
      training.on_step = [&](FakeTier& tier, size_t, uint32_t step) {
        PathSnapshot snapshot;
        tier.scheduler().Fill(static_cast<PathIndex>(c.path), &snapshot, tier.now_ns());
        worths.push_back(snapshot.worth_bytes_per_s);
        int64_t more = 0;
        for (PathIndex path = 0; path < 2; ++path) {
          more += static_cast<int64_t>(tier.counts(path).writes) - static_cast<int64_t>(tier.counts(path).reads);
        }
        unneeded.push_back(more);
        const auto half_step_ns = static_cast<int64_t>((step == 3 ? IdealS(c.speeds) : IdealS(halved)) * 0.5e9);
        if (step == 3) tier.ChangeSpeed(static_cast<PathIndex>(c.path), tier.now_ns() + half_step_ns, halved[c.path]);
        if (step == 10)
          tier.ChangeSpeed(static_cast<PathIndex>(c.path), tier.now_ns() + half_step_ns, c.speeds[c.path]);
      };
      const SimulatedResult result = SimulateTraining(training);
      REQUIRE(result.problem == "");
      const std::vector<double> times = StepTimes(result);
      Print(std::string(c.name) + (known ? "" : ", d learned"), times, IdealS(c.speeds));
      Print("  of the halved limit", times, IdealS(halved));
      INFO(c.name << ", d " << (known ? "known" : "learned"));
      REQUIRE(worths.size() == 16);
      for (size_t step = 6; step <= 9; ++step) {
        CHECK(IdealS(halved) / times[step] >= c.limit_share);
        CHECK(worths[step] == Approx(Worth(halved[c.path])).epsilon(0.04));
      }
      for (size_t step = 13; step <= 15; ++step) {
        CHECK(IdealS(c.speeds) / times[step] >= c.limit_share);
        CHECK(worths[step] == Approx(Worth(c.speeds[c.path])).epsilon(0.04));
      }
      // What is flushed makes room for what is read; none is flushed at the beginning of a step only to be used next.
      CHECK(unneeded[15] - unneeded[6] <= 9);
    }
  }
}

TEST_CASE("SchedulerSpeeds.WhatIsNotDeclaredIsLearnedInTheFirstSteps") {
  for (const Speeds& speeds :
       {kPaper, kHalf, kCrossed, Speeds{{345e3, 265e3, 0.5}, {180e3, 180e3, 0.5}, {90e3, 90e3, 1}}}) {
    SimulatedTraining training = Training(speeds, 8);
    for (PathParameters& path : training.options.paths) path = PathParameters{};
    const SimulatedResult result = SimulateTraining(training);
    REQUIRE(result.problem == "");
    const std::vector<double> times = StepTimes(result);
    Print("undeclared", times, IdealS(speeds));
    for (size_t step = 4; step < times.size(); ++step) CHECK(IdealS(speeds) / times[step] >= 0.92);
  }
}
