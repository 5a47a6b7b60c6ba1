// "mlpo-bench ring": NOPs through the ring of a running daemon: one at a time while both ends are awake, one at a time
// with a pause so that both sleep, and in batches.
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>

#include "daemon/bench/bench.h"

namespace mlpo::bench {
namespace {

int64_t NowNs() { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }

void Nop(mlpo_client* client) {
  mlpo_request* request = nullptr;
  Need(mlpo_submit_nop(client, MLPO_FOREVER, &request), "submitting a NOP");
  Need(mlpo_request_wait(request, MLPO_FOREVER, nullptr), "waiting for a NOP");
  mlpo_request_free(request);
}

nlohmann::json RoundTrips(mlpo_client* client, uint64_t count, int64_t pause_ns) {
  std::vector<int64_t> times(count);
  for (int64_t& time : times) {
    if (pause_ns > 0) {
      const timespec pause = {0, pause_ns};
      ::nanosleep(&pause, nullptr);
    }
    const int64_t start_ns = NowNs();
    Nop(client);
    time = NowNs() - start_ns;
  }
  std::sort(times.begin(), times.end());
  return {{"p50", times[count / 2]}, {"p99", times[count * 99 / 100]}};
}

double BatchesPerSecond(mlpo_client* client, uint64_t count) {
  constexpr uint64_t kBatch = 256;
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

}  // namespace

int Ring(const std::string& socket, uint64_t operations, bool json) {
  const std::string job = "bench-" + std::to_string(::getpid());
  mlpo_connect_options options = MLPO_CONNECT_OPTIONS_INIT;
  options.socket = socket.empty() ? nullptr : socket.c_str();
  options.job = job.c_str();
  options.rank = 0;
  options.world_size = 1;
  mlpo_client* client = nullptr;
  Need(mlpo_connect(&options, &client), "connecting");
  RoundTrips(client, 1000, 0);  // warm-up
  nlohmann::json result;
  result["awake_ns"] = RoundTrips(client, operations, 0);
  result["asleep_ns"] = RoundTrips(client, std::min<uint64_t>(operations, 2000), 1'000'000);
  result["operations_per_s"] = BatchesPerSecond(client, operations);
  struct mlpo_client_info info = {};
  info.struct_size = sizeof info;
  Need(mlpo_client_info(client, &info), "asking about the client");
  result["lost_wakeups"] = info.lost_wakeups;
  Need(mlpo_client_close(client), "closing");
  mlpo_client_free(client);
  Print(result, json);
  return 0;
}

}  // namespace mlpo::bench
