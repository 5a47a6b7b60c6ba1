// kill -9 of clients at random moments, beside one that goes on; and of the daemon, with clients and I/O in flight.
#include <chrono>
#include <csignal>
#include <cstdio>
#include <memory>
#include <random>
#include <thread>

#include "tests/support/catch.h"
#include "tests/support/daemon_process.h"
#include "tests/support/daemon_status.h"
#include "tests/support/rank_process.h"
#include "tests/support/reference_trainer.h"

using namespace mlpo::test;
using mlpo::Client;

namespace {

// What a daemon's resident memory may grow by. A sanitizer keeps freed memory aside (AddressSanitizer 256 MiB) and
// notes about all it has seen, so that there only a leak of whole arenas would show: its own leak check sees the rest.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr uint64_t kResidentSlackBytes = uint64_t{512} << 20;
#else
constexpr uint64_t kResidentSlackBytes = uint64_t{16} << 20;
#endif

using Clock = std::chrono::steady_clock;

// Small blocks and a pool far below the state of two jobs: there is I/O at any moment.
DaemonProcess::Options BusyDaemon() { return {.paths = 2, .memory = "256KiB"}; }

// What must come back to where it was.
struct Footprint {
  int descriptors = 0;
  size_t files = 0;
  uint64_t resident_bytes = 0;
};
Footprint Measure(const DaemonProcess& daemon) {
  return {daemon.SettledDescriptors(), daemon.ScratchFiles().size(), daemon.ResidentBytes()};
}

size_t Sessions(const DaemonProcess& daemon) { return DaemonStatus(daemon.socket()).at("sessions").size(); }

// Starts one client after another as the same rank, each waiting at its gate while the one before it runs, and kills
// each at a random moment: in the handshake, in a registration, with gradients, updates and state in flight.
class Killer {
 public:
  Killer(const DaemonProcess& daemon, uint64_t seed) : daemon_(daemon), random_(seed) { Prepare(); }

  void KillOne() {
    std::unique_ptr<RankProcess> client = std::move(next_);
    client->Go();  // within a millisecond of the death of the one before it
    Prepare();
    if (kills_++ % 10 == 0) {
      INFO(client->output());
      REQUIRE(client->WaitFor("step 2"));  // the rank is not only killed: it works
    }
    std::this_thread::sleep_for(std::chrono::microseconds(std::uniform_int_distribution<int>(0, 40'000)(random_)));
    const bool ran = client->Runs();
    client->WaitFor("error", 0);
    INFO("client " << kills_ << " said: " << client->output());
    REQUIRE(ran);
    client->Kill();
  }
  // The last one is waiting, and has connected to nothing.
  void Stop() { next_.reset(); }

 private:
  void Prepare() { next_ = std::make_unique<RankProcess>(daemon_.socket(), RankProcess::Options{.job = "killed"}); }

  const DaemonProcess& daemon_;
  std::mt19937_64 random_;
  std::unique_ptr<RankProcess> next_;
  int kills_ = 0;
};

}  // namespace

TEST_CASE("C24_ClientsKilledAtRandomMomentsLeaveNothingAndHurtNobody") {
  const int kills = LongForm() ? 1000 : 60;
  const int warm_up = kills / 6;
  DaemonProcess daemon(BusyDaemon());
  Client client = Connect(daemon.socket(), "survivor");
  ReferenceTrainer trainer(client, {"survivor", 60'013, MLPO_BFLOAT16, MLPO_BFLOAT16, 5});
  trainer.Step();
  Killer killer(daemon, 1);
  Footprint before;
  for (int kill = 0; kill < kills; ++kill) {
    if (kill == warm_up) {
      REQUIRE(Eventually([&] { return Sessions(daemon) == 1; }));
      before = Measure(daemon);
    }
    killer.KillOne();
    trainer.Step();
  }
  killer.Stop();
  REQUIRE(daemon.running());
  REQUIRE(Eventually([&] { return Sessions(daemon) == 1; }));
  const Footprint after = Measure(daemon);
  CHECK(after.descriptors == before.descriptors);
  CHECK(before.files == 2);  // the survivor's, one a path
  CHECK(after.files == before.files);
  std::printf("%d kills: %d -> %d descriptors, %zu -> %zu files, %.1f -> %.1f MiB resident\n", kills,
              before.descriptors, after.descriptors, before.files, after.files,
              static_cast<double>(before.resident_bytes) / 1048576,
              static_cast<double>(after.resident_bytes) / 1048576);
  CHECK(after.resident_bytes < before.resident_bytes + kResidentSlackBytes);
  const nlohmann::json status = DaemonStatus(daemon.socket());
  CHECK(status.at("protocol_errors") == 0);
  CHECK(status.at("lost_wakeups") == 0);
  trainer.Step();
  CHECK(trainer.Difference() == "");
  client.Close();
  REQUIRE(Eventually([&] { return Sessions(daemon) == 0; }));
  CHECK(daemon.ScratchGone());
  CHECK(Eventually([&] { return DaemonStatus(daemon.socket()).at("arenas_bytes") == 0; }));
  const nlohmann::json idle = DaemonStatus(daemon.socket());
  CHECK(idle.at("pool").at("cached_blocks") == 0);
  for (const nlohmann::json& path : idle.at("paths")) CHECK(path.at("scratch_bytes") == 0);
}

TEST_CASE("C24_KilledDaemonIsNoticedWithin2sAndTheNextOneStartsAtOnce") {
  DaemonProcess daemon(BusyDaemon());
  for (int round = 0; round < (LongForm() ? 20 : 3); ++round) {
    std::vector<std::unique_ptr<RankProcess>> clients;
    for (int rank = 0; rank < 8; ++rank) {
      clients.push_back(
          std::make_unique<RankProcess>(daemon.socket(), RankProcess::Options{.rank = rank, .world_size = 8}));
      clients.back()->Go();
    }
    for (auto& client : clients) REQUIRE(client->WaitFor("step 2"));
    CHECK(!daemon.ScratchFiles().empty());
    daemon.Signal(SIGKILL);
    const auto killed = Clock::now();
    CHECK(daemon.WaitForEnd() == 128 + SIGKILL);
    for (auto& client : clients) {
      CHECK(client->WaitFor("error", 10'000));
      const double seconds = std::chrono::duration<double>(Clock::now() - killed).count();
      INFO(client->output());
      CHECK(seconds < 2);
      CHECK(client->output().find("error " + std::to_string(MLPO_ERR_DAEMON_DIED)) != std::string::npos);
      CHECK(client->WaitForEnd() == 3);
    }
    daemon.Start();  // the same socket and paths, nothing cleaned by hand
    CHECK(daemon.ScratchFiles().empty());
    Client client = Connect(daemon.socket(), "test", 0, 8);
    ReferenceTrainer trainer(client, {});
    trainer.Step();
    CHECK(trainer.Difference() == "");
  }
}
