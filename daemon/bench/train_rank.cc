// One rank of "mlpo-bench train": state and gradients random, every step as a trainer does it, and a check of the
// result against the kernel run over the same numbers in this process.
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>
#include <thread>

#include "daemon/adam/kernel.h"
#include "daemon/bench/bench.h"
#include "daemon/types/element_bytes.h"

namespace mlpo::bench {
namespace {

constexpr uint64_t kSubgroupElements = uint64_t{16} << 20;
constexpr uint64_t kTileElements = uint64_t{1} << 20;     // of random numbers, repeated over a subgroup
constexpr uint64_t kCheckedElements = uint64_t{1} << 17;  // at either end of a subgroup
constexpr uint32_t kMostWriters = 8;                      // of one rank's gradients: as fast as a GPU's link

double NowS() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// As a GPU's copy engine writes to host memory: the destination is not read first and takes no place in the caches. A
// plain copy would cost a step more of the memory's time than any trainer does that has a GPU. `to` and `from` are
// aligned to 16 bytes.
void CopyPastCaches(std::byte* to, const std::byte* from, size_t n) {
  size_t at = 0;
#ifdef __SSE2__
  for (; n - at >= sizeof(__m128i); at += sizeof(__m128i)) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + at), _mm_load_si128(reinterpret_cast<const __m128i*>(from + at)));
  }
  _mm_sfence();  // before the daemon is told of them
#endif
  std::memcpy(to + at, from + at, n - at);
}

struct SubgroupDeleter {
  void operator()(mlpo_subgroup* subgroup) const { mlpo_subgroup_free(subgroup); }
};
struct RequestDeleter {
  void operator()(mlpo_request* request) const { mlpo_request_free(request); }
};
using RequestPointer = std::unique_ptr<mlpo_request, RequestDeleter>;

class Rank {
 public:
  // The ranks share the cores.
  Rank(mlpo_client* client, mlpo_dtype dtype, uint32_t rank, uint32_t ranks, uint64_t parameters)
      : client_(client),
        dtype_(dtype),
        writers_(std::clamp(std::thread::hardware_concurrency() / ranks, 1u, kMostWriters)),
        masters_(kTileElements),
        gradient_(kTileElements * ElementBytes(dtype)) {
    std::mt19937_64 random(rank + 1);
    std::normal_distribution<float> normal(0, 1);
    std::vector<float> values(kTileElements);
    for (float& value : masters_) value = 0.02f * normal(random);
    for (float& value : values) value = 1e-3f * normal(random);
    RoundTo(dtype, values.data(), gradient_.data(), kTileElements);
    for (uint64_t at = 0; at < parameters; at += kSubgroupElements) {
      Register(std::min(kSubgroupElements, parameters - at));
    }
  }

  void Gradients() {
    std::vector<RequestPointer> requests;
    for (const auto& subgroup : subgroups_) {
      WriteGradient(subgroup.get());
      mlpo_request* request = nullptr;
      Need(mlpo_submit_grad(subgroup.get(), nullptr, 0, MLPO_FOREVER, &request), "submitting a gradient");
      requests.emplace_back(request);
    }
    WaitForAll(&requests, "a gradient");
  }

  void Updates() {
    ++step_;
    std::vector<RequestPointer> requests;
    for (const auto& subgroup : subgroups_) {
      mlpo_update_options options = MLPO_UPDATE_OPTIONS_INIT;
      mlpo_request* request = nullptr;
      Need(mlpo_submit_update(subgroup.get(), &options, MLPO_FOREVER, &request), "submitting an update");
      requests.emplace_back(request);
    }
    WaitForAll(&requests, "an update");
  }

  // "" or what differs.
  std::string Check() {
    for (size_t i = 0; i < subgroups_.size(); ++i) {
      const uint64_t numel = Info(subgroups_[i].get()).numel;
      const uint64_t count = std::min(numel, kCheckedElements);
      for (const uint64_t first : {uint64_t{0}, numel - count}) {
        if (!Equal(subgroups_[i].get(), first, count)) {
          return "subgroup " + std::to_string(i) + ", elements from " + std::to_string(first) + " on";
        }
      }
    }
    return "";
  }

 private:
  static struct mlpo_subgroup_info Info(mlpo_subgroup* subgroup) {
    struct mlpo_subgroup_info info = {};
    info.struct_size = sizeof info;
    Need(mlpo_subgroup_info(subgroup, &info), "asking about a subgroup");
    return info;
  }

  void Register(uint64_t numel) {
    const std::string key = "subgroup" + std::to_string(subgroups_.size());
    std::vector<float> initial(numel);
    for (uint64_t at = 0; at < numel; at += kTileElements) {
      std::copy_n(masters_.begin(), std::min(kTileElements, numel - at), initial.begin() + static_cast<ptrdiff_t>(at));
    }
    mlpo_subgroup_options options = MLPO_SUBGROUP_OPTIONS_INIT;
    options.key = key.c_str();
    options.numel = numel;
    options.dtype = dtype_;
    options.initial = initial.data();
    mlpo_subgroup* subgroup = nullptr;
    Need(mlpo_subgroup_register(client_, &options, MLPO_FOREVER, &subgroup), "registering " + key);
    subgroups_.emplace_back(subgroup);
  }

  void WriteGradient(mlpo_subgroup* subgroup) const {
    const struct mlpo_subgroup_info info = Info(subgroup);
    const uint64_t bytes = info.numel * ElementBytes(dtype_);
    auto* const to = static_cast<std::byte*>(info.grad);
    const auto write = [this, bytes, to](uint32_t writer) {
      for (uint64_t at = writer * gradient_.size(); at < bytes; at += writers_ * gradient_.size()) {
        CopyPastCaches(to + at, gradient_.data(), std::min(gradient_.size(), bytes - at));
      }
    };
    std::vector<std::jthread> others;
    for (uint32_t writer = 1; writer < writers_; ++writer) others.emplace_back(write, writer);
    write(0);
  }

  void WaitForAll(std::vector<RequestPointer>* requests, const std::string& what) {
    for (const RequestPointer& request : *requests) {
      Need(mlpo_request_wait(request.get(), MLPO_FOREVER, nullptr), "waiting for " + what);
    }
    requests->clear();
  }

  bool Equal(mlpo_subgroup* subgroup, uint64_t first, uint64_t count) {
    std::vector<float> p(count), m(count), v(count), read_p(count), read_m(count), read_v(count);
    std::vector<std::byte> gradient(count * ElementBytes(dtype_)), parameter(count * 4);
    for (uint64_t i = 0; i < count; ++i) {
      const uint64_t place = (first + i) % kTileElements;
      p[i] = masters_[place];
      std::memcpy(&gradient[i * ElementBytes(dtype_)], &gradient_[place * ElementBytes(dtype_)], ElementBytes(dtype_));
    }
    mlpo_hyper hyper = {1e-3, 0.9, 0.999, 1e-8, 0.01, 1.0, MLPO_ADAMW, 0, 0};
    for (uint32_t step = 1; step <= step_; ++step) {
      AdamRange range;
      range.p = p.data();
      range.m = m.data();
      range.v = v.data();
      range.grad = gradient.data();
      range.param = parameter.data();
      range.n = count;
      range.grad_dtype = dtype_;
      range.dtype = dtype_;
      AdamUpdate(MakeScalars(hyper, step), range);
    }
    Need(mlpo_read_state(subgroup, first, count, read_p.data(), read_m.data(), read_v.data(), MLPO_FOREVER),
         "reading state");
    const auto* slot = static_cast<const std::byte*>(Info(subgroup).param) + first * ElementBytes(dtype_);
    const uint64_t bytes = count * sizeof(float);
    return std::memcmp(p.data(), read_p.data(), bytes) == 0 && std::memcmp(m.data(), read_m.data(), bytes) == 0 &&
           std::memcmp(v.data(), read_v.data(), bytes) == 0 &&
           std::memcmp(parameter.data(), slot, count * ElementBytes(dtype_)) == 0;
  }

  mlpo_client* const client_;
  const mlpo_dtype dtype_;
  const uint32_t writers_;
  std::vector<float> masters_;
  std::vector<std::byte> gradient_;
  std::vector<std::unique_ptr<mlpo_subgroup, SubgroupDeleter>> subgroups_;
  uint32_t step_ = 0;
};

// Waits for the parent's "go", or "go SECONDS", and returns the seconds.
double AwaitGo() {
  std::string word;
  double seconds = 0;
  std::string line;
  if (!std::getline(std::cin, line)) throw BenchError("the parent is gone");
  std::istringstream words(line);
  words >> word >> seconds;
  return seconds;
}

}  // namespace

int TrainRank(const std::string& socket, const std::string& job, uint32_t rank, uint32_t ranks, uint64_t parameters,
              uint32_t steps, const std::string& grad, bool free) {
  mlpo_connect_options options = MLPO_CONNECT_OPTIONS_INIT;
  options.socket = socket.c_str();
  options.job = job.c_str();
  options.rank = static_cast<int32_t>(rank);
  options.world_size = static_cast<int32_t>(ranks);
  mlpo_client* client = nullptr;
  Need(mlpo_connect(&options, &client), "connecting");
  nlohmann::json line;
  {
    Rank trainer(client, TypeNamed(grad), rank, ranks, parameters);
    std::cout << "registered" << std::endl;
    AwaitGo();  // all ranks begin together
    line["begin_s"] = NowS();
    for (uint32_t step = 1; step <= steps; ++step) {
      trainer.Gradients();
      if (step == 1 || !free) {
        std::cout << "gradients" << std::endl;
        AwaitGo();
      }
      trainer.Updates();
      line["step_ends_s"].push_back(NowS());
      std::cout << "updated" << std::endl;
      if (step == 1 && free) std::this_thread::sleep_for(std::chrono::duration<double>(AwaitGo()));
    }
    std::cout << line.dump() << std::endl;
    AwaitGo();  // what the check reads is not counted
    std::cout << nlohmann::json{{"check", trainer.Check()}}.dump() << std::endl;
  }
  Need(mlpo_client_close(client), "closing");
  mlpo_client_free(client);
  return 0;
}

}  // namespace mlpo::bench
