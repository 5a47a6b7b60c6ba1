// The simulated tier itself: times are those of the path model, whatever scheduler is on it.
#include <cmath>

#include "tests/support/simulated_training.h"
//
#include "tests/support/catch.h"

using namespace mlpo;
using namespace mlpo::test;

namespace {

// So many reads and writes of 1 MB at the same time: the end of the last, in seconds.
double Seconds(SimulatedPath path, int reads, int writes) {
  for (int i = 0; i < reads + writes; ++i) {
    Transfer transfer;
    transfer.direction = i < reads ? Direction::kRead : Direction::kWrite;
    transfer.bytes = 1'000'000;
    path.Start(transfer, 0);
  }
  int ended = 0;
  int64_t last_ns = 0;
  while (path.next_ns() != SimulatedPath::kNever) {
    for (const auto& [transfer, end_ns] : path.Advance(path.next_ns())) {
      ++ended;
      last_ns = std::max(last_ns, end_ns);
    }
  }
  CHECK(ended == reads + writes);
  return static_cast<double>(last_ns) / 1e9;
}
SimulatedPath Path(SimulatedPath::Speed speed) { return SimulatedPath(speed); }

}  // namespace

TEST_CASE("SimulatedPath.TimesAreThePathModels") {
  CHECK(Seconds(Path({100e6, 50e6, 0.5}), 100, 0) == Approx(1).epsilon(1e-3));
  CHECK(Seconds(Path({100e6, 50e6, 1}), 0, 100) == Approx(2).epsilon(1e-3));
  for (const double d : {0.5, 1.0, 2.0}) {
    // As many seconds of either: max(R/r, W/w, d(R/r + W/w)).
    CHECK(Seconds(Path({100e6, 50e6, d}), 100, 50) == Approx(std::max(1.0, 2 * d)).epsilon(1e-3));
  }
  // Full duplex: the longer one. Half: the sum.
  CHECK(Seconds(Path({100e6, 50e6, 0.5}), 100, 100) == Approx(2).epsilon(1e-3));
  CHECK(Seconds(Path({100e6, 50e6, 1}), 100, 100) == Approx(3).epsilon(1e-3));
}

TEST_CASE("SimulatedPath.LatencyIsNoLossOfSpeed") {
  CHECK(Seconds(Path({100e6, 50e6, 0.5, 20'000'000}), 100, 0) == Approx(1.02).epsilon(1e-3));
}

TEST_CASE("SimulatedPath.SpeedsChangeInTheMiddleOfATransfer") {
  SimulatedPath halved({100e6, 50e6, 0.5});
  halved.ChangeSpeed(500'000'000, {50e6, 50e6, 0.5}, 0);
  halved.ChangeSpeed(1'500'000'000, {100e6, 50e6, 0.5}, 0);
  CHECK(Seconds(halved, 200, 0) == Approx(0.5 + 1 + 1).epsilon(1e-3));
  SimulatedPath hung({100e6, 50e6, 0.5});
  hung.ChangeSpeed(500'000'000, {0, 0, 0.5}, 0);
  hung.ChangeSpeed(7'500'000'000, {100e6, 50e6, 0.5}, 0);
  CHECK(Seconds(hung, 100, 0) == Approx(8).epsilon(1e-3));
}

TEST_CASE("SimulatedPath.JitterTakesItsShareOfTime") {
  // Half a second at a tenth, then five seconds on average.
  SimulatedPath path({100e6, 100e6, 0.5});
  path.SetJitter({}, 0);
  CHECK(600 / Seconds(path, 60'000, 0) == Approx((5 + 0.05) / 5.5).epsilon(0.03));
}

TEST_CASE("SimulatedTraining.CountsWhatATrainingMoves") {
  SimulatedTraining training;
  training.speeds = {{345e3, 265e3, 0.5}};
  training.options = SimulatedOptions(16, training.speeds);
  training.ranks = {{64}};
  const SimulatedResult result = SimulateTraining(training);
  CHECK(result.problem == "");
  CHECK(result.ideal_s == Approx(48 * 12288 / 265e3));
  CHECK(result.limit_share > 0.9);
  CHECK(result.limit_share < 1.03);
  CHECK(result.step_ends_s[0].size() == training.steps);
  // What is not read is a hit; every block that is read has been written.
  CHECK(result.paths[0].read_bytes / 12288 + result.hits == Approx(64));
  CHECK(result.paths[0].written_bytes >= 0.99 * result.paths[0].read_bytes);
}
