// "mlpo-bench ring": NOPs through the ring of a real daemon: one at a time while both ends are awake, one at a time
// with a pause so that both sleep, and in batches; beside what the same two cores do without a daemon. This thread is
// bound to one core, the daemon's data thread to another. Five rounds of everything, taking turns, so that all see the
// same machine; medians over the rounds.
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "daemon/bench/bench.h"
#include "daemon/bench/cores.h"
#include "daemon/bench/own_daemon.h"
#include "daemon/bench/ping_pong.h"

namespace mlpo::bench {
namespace {

constexpr int kRounds = 5;
constexpr int64_t kPauseNs = 1'000'000;  // both ends sleep long before it is over
constexpr uint64_t kMostAsleep = 400;    // a round; they take a pause each
constexpr uint64_t kBatch = 256;
constexpr uint64_t kPoolBytes = 64u << 20;

void Nop(mlpo_client* client) {
  mlpo_request* request = nullptr;
  Need(mlpo_submit_nop(client, MLPO_FOREVER, &request), "submitting a NOP");
  Need(mlpo_request_wait(request, MLPO_FOREVER, nullptr), "waiting for a NOP");
  mlpo_request_free(request);
}

std::vector<int64_t> RoundTrips(mlpo_client* client, uint64_t count, int64_t pause_ns) {
  std::vector<int64_t> times(count);
  for (int64_t& time : times) {
    if (pause_ns > 0) SleepNs(pause_ns);
    const int64_t start_ns = NowNs();
    Nop(client);
    time = NowNs() - start_ns;
  }
  return times;
}

double BatchesPerSecond(mlpo_client* client, uint64_t count) {
  std::vector<mlpo_request*> requests(kBatch);
  const int64_t start_ns = NowNs();
  for (uint64_t done = 0; done < count; done += kBatch) {
    for (mlpo_request*& request : requests) {
      Need(mlpo_submit_nop(client, MLPO_FOREVER, &request), "submitting a NOP");
    }
    for (mlpo_request* request : requests) {
      Need(mlpo_request_wait(request, MLPO_FOREVER, nullptr), "waiting for a NOP");
      mlpo_request_free(request);
    }
  }
  return static_cast<double>((count + kBatch - 1) / kBatch * kBatch) * 1e9 / static_cast<double>(NowNs() - start_ns);
}

// The percentiles of one kind of round trip, one value of each a round.
struct Percentiles {
  std::vector<double> p50, p99;

  void Add(std::vector<int64_t> times) {
    std::sort(times.begin(), times.end());
    p50.push_back(static_cast<double>(times[times.size() / 2]));
    p99.push_back(static_cast<double>(times[times.size() * 99 / 100]));
  }
  nlohmann::json Medians() const { return {{"p50", Median(p50)}, {"p99", Median(p99)}}; }
};

double MedianRatio(const std::vector<double>& ours, const std::vector<double>& bare) {
  std::vector<double> ratios;
  for (size_t i = 0; i < ours.size(); ++i) ratios.push_back(ours[i] / bare[i]);
  return Median(ratios);
}

}  // namespace

int Ring(const RingOptions& options) {
  if (options.socket.empty() && !InOwnDaemon()) {
    const ScratchFolder folder;
    OwnDaemon daemon;
    daemon.config = "[memory]\nblock = \"64Ki\"\n[[path]]\ndirectory = " + nlohmann::json(folder.path()).dump() + "\n";
    daemon.pool_bytes = kPoolBytes;
    return RunInOwnDaemon(daemon, options.arguments);
  }
  const auto [core, peer_core] = TwoCores();
  const std::string job = "bench-" + std::to_string(::getpid());
  mlpo_connect_options connect = MLPO_CONNECT_OPTIONS_INIT;
  connect.socket = options.socket.empty() ? nullptr : options.socket.c_str();
  connect.job = job.c_str();
  connect.rank = 0;
  connect.world_size = 1;
  mlpo_client* client = nullptr;
  Need(mlpo_connect(&connect, &client), "connecting");
  struct mlpo_client_info info = {};
  info.struct_size = sizeof info;
  Need(mlpo_client_info(client, &info), "asking about the client");
  nlohmann::json result;
  const CatchInterrupts catching;  // a daemon that stays gets its thread back unbound
  {
    const Pinned pinned(0, core);
    const Pinned pinned_peer(ThreadNamed(DaemonStatus(info.socket)["pid"].get<pid_t>(), "mlpo-data"), peer_core);
    const uint64_t awake = std::max<uint64_t>(options.operations / kRounds, 1);
    const uint64_t asleep = std::min(awake, kMostAsleep);
    RoundTrips(client, 1000, 0);  // warm-up
    Percentiles awakes, asleeps, bares, eventfds;
    std::vector<double> rates;
    for (int round = 0; round < kRounds; ++round) {
      awakes.Add(RoundTrips(client, awake, 0));
      bares.Add(BarePingPong(peer_core, awake));
      asleeps.Add(RoundTrips(client, asleep, kPauseNs));
      eventfds.Add(EventfdPingPong(peer_core, asleep, kPauseNs));
      rates.push_back(BatchesPerSecond(client, awake));
      CheckInterrupted();
    }
    result["awake_ns"] = awakes.Medians();
    result["asleep_ns"] = asleeps.Medians();
    result["bare_pingpong_ns"] = bares.Medians();
    result["eventfd_ns"] = eventfds.Medians();
    result["awake_ratio"] = MedianRatio(awakes.p50, bares.p50);
    result["asleep_ratio"] = MedianRatio(asleeps.p50, eventfds.p50);
    result["operations_per_s"] = Median(rates);
  }
  Need(mlpo_client_info(client, &info), "asking about the client");
  result["lost_wakeups"] = info.lost_wakeups;
  Need(mlpo_client_close(client), "closing");
  mlpo_client_free(client);
  Print(result, options.json);
  return 0;
}

}  // namespace mlpo::bench
