// Rank processes side by side, one of them paused: each has the bits of the scalar reference, as it has alone.
#include <chrono>
#include <csignal>
#include <memory>
#include <thread>

#include "tests/support/catch.h"
#include "tests/support/daemon_process.h"
#include "tests/support/daemon_status.h"
#include "tests/support/rank_process.h"

using namespace mlpo::test;

namespace {

void TrainRanks(const DaemonProcess::Options& options, int ranks, int steps) {
  DaemonProcess daemon(options);
  std::vector<std::unique_ptr<RankProcess>> processes;
  for (int rank = 0; rank < ranks; ++rank) {
    processes.push_back(std::make_unique<RankProcess>(
        daemon.socket(), RankProcess::Options{.rank = rank, .world_size = ranks, .steps = steps, .seed = rank + 1}));
  }
  for (auto& process : processes) process->Go();
  for (auto& process : processes) {
    const int code = process->WaitForEnd(120'000);
    INFO(process->output());
    CHECK(code == 0);
    CHECK(process->output().find("equal") != std::string::npos);
  }
  CHECK(daemon.ScratchGone());
}

}  // namespace

TEST_CASE("MultiRank.TwoRanksPoolOfThreeBuffers") { TrainRanks({.paths = 2, .memory = "147456"}, 2, 6); }
TEST_CASE("MultiRank.FourRanksSmallPool") { TrainRanks({.paths = 2, .memory = "512KiB"}, 4, 8); }
TEST_CASE("MultiRank.ThreeRanksThreadEngine") {
  TrainRanks({.paths = 2, .memory = "256KiB", .engine = "threads"}, 3, 6);
}

// C14: equal ranks and names in two jobs, at the same time.
TEST_CASE("C14_TwoJobsWithEqualRanksAndNames") {
  DaemonProcess daemon({.paths = 2, .memory = "512KiB"});
  std::vector<std::unique_ptr<RankProcess>> processes;
  for (int i = 0; i < 4; ++i) {
    processes.push_back(std::make_unique<RankProcess>(
        daemon.socket(),
        RankProcess::Options{
            .job = i < 2 ? "one" : "two", .rank = i % 2, .world_size = 2, .steps = 6, .seed = 10 + i}));
  }
  for (auto& process : processes) process->Go();
  for (auto& process : processes) CHECK(process->WaitForEnd(120'000) == 0);
}

TEST_CASE("C26_PausedRankIsNotDeadAndHoldsNobodyUp") {
  DaemonProcess daemon({.paths = 2, .memory = "256KiB"});
  RankProcess paused(daemon.socket(), {.rank = 0, .world_size = 2, .steps = 12, .seed = 1});
  paused.Go();
  REQUIRE(paused.WaitFor("step 3"));
  paused.Signal(SIGSTOP);
  const auto pause_ends = std::chrono::steady_clock::now() + std::chrono::seconds(LongForm() ? 120 : 4);
  RankProcess other(daemon.socket(), {.rank = 1, .world_size = 2, .steps = 12, .seed = 2});
  other.Go();
  CHECK(other.WaitForEnd() == 0);  // while the first one is stopped
  CHECK(paused.Runs());
  CHECK(DaemonStatus(daemon.socket()).at("sessions").size() == 1);
  std::this_thread::sleep_until(pause_ends);
  CHECK(DaemonStatus(daemon.socket()).at("sessions").size() == 1);
  paused.Signal(SIGCONT);
  const int code = paused.WaitForEnd();
  INFO(paused.output());
  CHECK(code == 0);
}
