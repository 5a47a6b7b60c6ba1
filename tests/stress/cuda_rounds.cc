// Rounds of gradients and parameters between several streams with random delays and a real daemon, on the stand-in for
// the CUDA runtime: no byte may come from another round.
//
// Every subgroup walks through rounds by itself: its stream fills a gradient on the device and copies it into the slot,
// in pieces on two streams; the sum of squares that the daemon reports must be this round's. The update (beta1 = beta2
// = eps = 0, lr = 1) moves every parameter by exactly one against its gradient's sign, so that the parameters after
// each round are known. They are copied to the device on a third stream, which waits for the update; that stream then
// compares them. The next round's gradient is under way meanwhile, and overwrites the slot.
//
// cuda_rounds [ROUNDS] [--break]: rounds of each subgroup; --break: gradients do not wait for what reads the slot,
// which must be noticed.
#include <signal.h>
#include <sys/types.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "mlpo/cuda.h"
#include "tests/support/daemon_process.h"
#include "tests/support/fake_cuda.h"

namespace {

constexpr int64_t kSecond = 1'000'000'000;
constexpr int kSubgroups = 6, kStreams = 4, kPieces = 12;
constexpr uint64_t kElements = 240;

std::atomic<uint64_t> wrong_bytes{0};
std::atomic<pid_t> daemon_pid{0};

[[noreturn]] void Die(const char* what) {
  std::fprintf(stderr, "FAILED: %s: %s\n", what, mlpo_last_error());
  std::fflush(stderr);
  if (daemon_pid.load() > 0) kill(daemon_pid.load(), SIGKILL);
  std::_Exit(1);
}

void Must(int code, const char* what) {
  if (code != 0) Die(what);
}

// Of a round: never 0, and small enough that every sum is exact.
float Gradient(uint64_t subgroup, uint64_t round, uint64_t element) {
  uint64_t x = (subgroup << 48) ^ (round << 16) ^ element;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  x ^= x >> 31;
  const auto magnitude = static_cast<float>(1 + x % 100);
  return (x >> 32) % 2 == 0 ? magnitude : -magnitude;
}

// Something that a stream does.
struct Fill {
  float* device;
  uint64_t subgroup, round;
};
void RunFill(void* argument) {
  const std::unique_ptr<Fill> fill(static_cast<Fill*>(argument));
  for (uint64_t i = 0; i < kElements; ++i) fill->device[i] = Gradient(fill->subgroup, fill->round, i);
}
struct Compare {
  const float* device;
  std::vector<float> expected;
  uint64_t subgroup, round;
};
void RunCompare(void* argument) {
  const std::unique_ptr<Compare> compare(static_cast<Compare*>(argument));
  for (uint64_t i = 0; i < kElements; ++i) {
    if (compare->device[i] == compare->expected[i]) continue;
    if (wrong_bytes.fetch_add(1) == 0)
      std::fprintf(stderr, "subgroup %llu, round %llu, element %llu: %g instead of %g\n",
                   static_cast<unsigned long long>(compare->subgroup), static_cast<unsigned long long>(compare->round),
                   static_cast<unsigned long long>(i), static_cast<double>(compare->device[i]),
                   static_cast<double>(compare->expected[i]));
    return;
  }
}

float* Device(size_t count) {
  void* at = nullptr;
  if (cudaMalloc(&at, count * sizeof(float)) != cudaSuccess) Die("cudaMalloc");
  return static_cast<float*>(at);
}

void Walk(mlpo_client* client, mlpo_cuda* cuda, uint64_t number, uint64_t rounds, const cudaStream_t* streams) {
  mlpo_subgroup_options options = MLPO_SUBGROUP_OPTIONS_INIT;
  const std::string key = "w" + std::to_string(number);
  options.key = key.c_str();
  options.numel = kElements;
  mlpo_subgroup* subgroup;
  mlpo_cuda_slot* slot;
  Must(mlpo_subgroup_register(client, &options, 60 * kSecond, &subgroup), "register");
  Must(mlpo_cuda_slot_open(cuda, subgroup, &slot), "open");
  std::mt19937 random(static_cast<uint32_t>(number));
  float *grad = Device(kElements), *param = Device(kElements);
  std::vector<float> expected(kElements, 0);
  // Behind the fill, and behind the comparison.
  cudaEvent_t filled, compared;
  if (cudaEventCreateWithFlags(&filled, 0) != cudaSuccess || cudaEventCreateWithFlags(&compared, 0) != cudaSuccess)
    Die("cudaEventCreate");
  for (uint64_t round = 1; round <= rounds && wrong_bytes.load() == 0; ++round) {
    // The device's gradient may be overwritten when the requests of the round before have ended, which they have.
    cudaStream_t first = streams[random() % kStreams], second = streams[random() % kStreams];
    fake_cuda_enqueue(first, RunFill, new Fill{grad, number, round});
    if (cudaEventRecord(filled, first) != cudaSuccess) Die("record");
    if (second != first) fake_cuda_await_event(second, filled);
    std::vector<mlpo_cuda_piece> pieces;
    double sum = 0;
    for (uint64_t p = 0; p < kPieces; ++p)
      pieces.push_back(
          {p * kElements / kPieces, kElements / kPieces, grad + p * kElements / kPieces, MLPO_GRAD_VALUE, 0});
    for (uint64_t i = 0; i < kElements; ++i) {
      const float g = Gradient(number, round, i);
      sum += static_cast<double>(g) * g;
      expected[i] -= g > 0 ? 1.0f : -1.0f;
    }
    // Half of the time it is written first, by both streams in turns, and submitted as it is in the slot.
    if (random() % 2 == 0) {
      for (mlpo_cuda_piece& piece : pieces) {
        const cudaStream_t writes = random() % 2 == 0 ? first : second;
        Must(mlpo_cuda_write_grad(slot, piece.first, piece.count, piece.device, writes), "write_grad");
        piece.device = nullptr;
        piece.flags = MLPO_CUDA_IN_SLOT;
      }
    }
    const size_t cut = random() % (kPieces + 1);
    mlpo_request* requests[2] = {};
    if (cut > 0) Must(mlpo_cuda_copy_grad(slot, pieces.data(), cut, first, &requests[0]), "copy_grad");
    if (cut < kPieces)
      Must(mlpo_cuda_copy_grad(slot, pieces.data() + cut, kPieces - cut, second, &requests[1]), "copy_grad");
    double seen = 0;
    bool complete = false;
    for (mlpo_request* request : requests) {
      if (request == nullptr) continue;
      mlpo_result result = {};
      result.struct_size = sizeof result;
      Must(mlpo_request_wait(request, 60 * kSecond, &result), "the gradient");
      mlpo_request_free(request);
      seen = result.window_complete != 0 ? result.sum_of_squares : complete ? seen : seen + result.sum_of_squares;
      complete = complete || result.window_complete != 0;
    }
    if (!complete || seen != sum) {
      wrong_bytes.fetch_add(1);
      std::fprintf(stderr, "subgroup %llu, round %llu: the sum of squares is %.17g instead of %.17g\n",
                   static_cast<unsigned long long>(number), static_cast<unsigned long long>(round), seen, sum);
    }
    mlpo_update_options adam = MLPO_UPDATE_OPTIONS_INIT;
    adam.lr = 1;
    adam.beta1 = adam.beta2 = adam.eps = adam.weight_decay = 0;
    mlpo_request* update;
    Must(mlpo_submit_update(subgroup, &adam, 60 * kSecond, &update), "update");
    cudaStream_t out = streams[random() % kStreams];
    // The device's parameters are read by the comparison of the round before, perhaps on another stream.
    fake_cuda_await_event(out, compared);
    Must(mlpo_cuda_copy_param(slot, 0, kElements, param, out, 60 * kSecond), "copy_param");
    fake_cuda_enqueue(out, RunCompare, new Compare{param, expected, number, round});
    if (cudaEventRecord(compared, out) != cudaSuccess) Die("record");
    // Half of the time nobody of this thread takes the completion in before it has to.
    if (random() % 2 == 0) Must(mlpo_request_wait(update, 60 * kSecond, nullptr), "the update");
    struct mlpo_subgroup_info info = {};
    info.struct_size = sizeof info;
    do {
      Must(mlpo_subgroup_info(subgroup, &info), "info");
      if (info.update_outstanding != 0) std::this_thread::sleep_for(std::chrono::microseconds(20));
    } while (info.update_outstanding != 0);
    if (info.epoch != round) Die("an update failed");
    mlpo_request_free(update);
  }
  Must(mlpo_cuda_slot_close(slot, 60 * kSecond), "close");
  // The last comparison.
  for (int i = 0; i < kStreams; ++i) {
    if (cudaStreamSynchronize(streams[i]) != cudaSuccess) Die("synchronize");
  }
  cudaEventDestroy(filled);
  cudaEventDestroy(compared);
  cudaFree(grad);
  cudaFree(param);
  mlpo_subgroup_free(subgroup);
}

}  // namespace

int main(int argc, char** argv) {
  const bool with_fault = argc > 1 && std::strcmp(argv[argc - 1], "--break") == 0;
  const char* const wish = std::getenv("MLPO_LONG");
  uint64_t rounds = wish != nullptr && *wish != '\0' ? 100'000 / kSubgroups + 1 : 500;
  if (argc > (with_fault ? 2 : 1)) rounds = std::strtoull(argv[1], nullptr, 10);
  const mlpo::test::DaemonProcess daemon;
  daemon_pid.store(daemon.pid());
  const std::string socket = daemon.socket();
  mlpo_connect_options options = MLPO_CONNECT_OPTIONS_INIT;
  options.socket = socket.c_str();
  options.job = "cuda_rounds";
  options.rank = 0;
  options.world_size = 1;
  options.ring_entries = 8;  // a gradient has 12 pieces: call-backs find the ring full
  mlpo_client* client;
  Must(mlpo_connect(&options, &client), "connect");
  mlpo_cuda_options cuda_options = MLPO_CUDA_OPTIONS_INIT;
  cuda_options.piece_bytes = 4096;
  mlpo_cuda* cuda;
  Must(mlpo_cuda_attach(client, &cuda_options, &cuda), "attach");
  cudaStream_t streams[kStreams];
  for (cudaStream_t& stream : streams) {
    if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) Die("stream");
  }
  fake_cuda_delays(with_fault ? 2000 : 60, 7);
  fake_cuda_ignore_events(with_fault ? 1 : 0);
  std::vector<std::thread> threads;
  for (uint64_t i = 0; i < kSubgroups; ++i)
    threads.emplace_back([=, &streams] { Walk(client, cuda, i, rounds, streams); });
  for (std::thread& thread : threads) thread.join();
  for (cudaStream_t stream : streams) {
    if (cudaStreamDestroy(stream) != cudaSuccess) Die("stream");
  }
  Must(mlpo_cuda_detach(cuda), "detach");
  mlpo_client_free(client);
  std::printf("%llu rounds of %d subgroups\n", static_cast<unsigned long long>(rounds), kSubgroups);
  if (fake_cuda_violations() > 0) std::printf("VIOLATION: %s\n", fake_cuda_last_violation());
  if (wrong_bytes > 0) std::printf("WRONG BYTES: %llu times\n", static_cast<unsigned long long>(wrong_bytes.load()));
  return wrong_bytes > 0 || fake_cuda_violations() > 0 ? 1 : 0;
}
