// Many clients that connect, work and are killed, all at once, each with what its quota allows, beside one that
// trains: its bits are right, its steps take what its share of the paths allows, and nothing of the others stays. 64
// clients for ten minutes with MLPO_LONG=1.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/catch.h"
#include "tests/support/daemon_process.h"
#include "tests/support/daemon_status.h"
#include "tests/support/rank_process.h"
#include "tests/support/reference_trainer.h"

using namespace mlpo::test;
using mlpo::Client;

namespace {

using Clock = std::chrono::steady_clock;

// One place of a client: there is always one at work, each for a while.
class Place {
 public:
  Place(const DaemonProcess& daemon, int number, uint64_t seed) : daemon_(daemon), number_(number), random_(seed) {
    Start();
  }
  // Kills its client when its time has come, and starts the next one, of the same rank, at once.
  void Look() {
    if (Clock::now() < ends_) return;
    Stop();
    ++kills_;
    Start();
  }
  void Stop() {
    if (!client_->Runs() && complaint_.empty()) complaint_ = "it has ended by itself: " + client_->LastWords();
    client_->Kill();
  }
  int kills() const { return kills_; }
  const std::string& complaint() const { return complaint_; }

 private:
  void Start() {
    client_ = std::make_unique<RankProcess>(
        daemon_.socket(),
        RankProcess::Options{.job = "churn" + std::to_string(number_), .seed = number_, .arena_bytes = 16 << 20});
    client_->Go();
    ends_ = Clock::now() + std::chrono::milliseconds(std::uniform_int_distribution<int>(0, 2'000)(random_));
  }

  const DaemonProcess& daemon_;
  const int number_;
  std::mt19937_64 random_;
  std::unique_ptr<RankProcess> client_;
  Clock::time_point ends_;
  int kills_ = 0;
  std::string complaint_;
};

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[values.size() / 2];
}

size_t Sessions(const DaemonProcess& daemon) { return DaemonStatus(daemon.socket()).at("sessions").size(); }

}  // namespace

TEST_CASE("C24_ManyClientsComeAndGoBesideOneThatTrains") {
  const int clients = LongForm() ? 64 : 12;
  const auto duration = std::chrono::seconds(LongForm() ? 600 : 6);
  DaemonProcess daemon({.paths = 2,
                        .memory = "1MiB",
                        .environment = {"MLPO_MEMORY__ARENAS=2GiB"},
                        .config = "[quota]\njob_sessions = 1\njob_arenas = \"16MiB\"\n"});
  Client client = Connect(daemon.socket(), "survivor", 0, 1, 16 << 20);
  ReferenceTrainer trainer(client, {"survivor", 200'003, MLPO_BFLOAT16, MLPO_BFLOAT16, 5});
  std::vector<double> alone, beside;
  const auto step = [&trainer](std::vector<double>* seconds) {
    const auto from = Clock::now();
    trainer.WriteGradient();
    trainer.subgroup().SubmitGrad().Wait();
    trainer.SubmitUpdate().Wait();
    seconds->push_back(std::chrono::duration<double>(Clock::now() - from).count());
    trainer.StepReference();
  };
  for (int i = 0; i < 20; ++i) step(&alone);
  const int descriptors = daemon.SettledDescriptors();
  REQUIRE(Sessions(daemon) == 1);

  std::vector<std::unique_ptr<Place>> places;
  for (int i = 0; i < clients; ++i)
    places.push_back(std::make_unique<Place>(daemon, i, 100 + static_cast<uint64_t>(i)));
  std::atomic<bool> stop{false};
  std::string failure;
  std::thread survivor([&] {
    try {
      while (!stop) step(&beside);
    } catch (const std::exception& error) {
      failure = error.what();
    }
  });
  std::vector<double> sessions;
  const auto ends = Clock::now() + duration;
  for (int round = 0; Clock::now() < ends; ++round) {
    for (const auto& place : places) place->Look();
    if (round % 20 == 0) sessions.push_back(static_cast<double>(Sessions(daemon)));
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  stop = true;
  survivor.join();
  CHECK(failure == "");
  int kills = 0;
  for (const auto& place : places) {
    place->Stop();
    CHECK(place->complaint() == "");
    kills += place->kills();
  }

  REQUIRE(daemon.running());
  CHECK(trainer.Difference() == "");
  REQUIRE(Eventually([&] { return Sessions(daemon) == 1; }));
  CHECK(daemon.SettledDescriptors() == descriptors);
  CHECK(daemon.ScratchFiles().size() == 2);  // the survivor's, one a path
  const nlohmann::json status = DaemonStatus(daemon.socket());
  CHECK(status.at("protocol_errors") == 0);
  CHECK(status.at("lost_wakeups") == 0);
  // Its job's and its user's.
  CHECK(Eventually([&] { return DaemonStatus(daemon.socket()).at("quotas").size() == 2; }));
  const double busy = std::accumulate(sessions.begin(), sessions.end(), 0.0) / static_cast<double>(sessions.size());
  std::printf("%d kills of %d clients, %.1f sessions on average; step %.1f ms alone, %.1f ms beside them\n", kills,
              clients, busy, 1e3 * Median(alone), 1e3 * Median(beside));
  // Jobs share alike. A short run's steps are few, beside others that the machine does: only a share that is not kept
  // makes them so much longer.
  CHECK(Median(beside) <= (LongForm() ? 1.1 : 3) * busy * Median(alone));
  CHECK(beside.size() > 3);
  trainer.Step();
  CHECK(trainer.Difference() == "");
}
