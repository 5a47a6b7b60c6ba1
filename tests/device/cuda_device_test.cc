// On a GPU: kernels against the scalar reference, copies through a real daemon, waits that are released, one memfd
// registered by two processes, and the bandwidth of our copies beside plain pinned ones. Numbers go to standard output
// as JSON lines. A program of its own: exit code 0 or 1; see tests/device/check.
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "mlpo/cuda.h"
#include "tests/support/cuda_kernels.h"
#include "tests/support/daemon_process.h"

namespace {

using mlpo::test::DaemonProcess;

constexpr int64_t kSecond = 1'000'000'000;

int failures = 0;

void Check(bool holds, const char* what) {
  if (holds) return;
  ++failures;
  std::fprintf(stderr, "FAILED: %s\n", what);
}

// The daemon of the test that runs; -1: none.
pid_t daemon_pid = -1;

// Takes the daemon along. Nothing is freed: that might wait for a device that waits for the daemon.
[[noreturn]] void Die() {
  if (daemon_pid > 0) kill(daemon_pid, SIGKILL);
  std::fflush(nullptr);
  std::_Exit(1);
}

// What the test itself cannot go on without.
void Must(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "FAILED: %s: %s; CUDA: %s\n", what, mlpo_last_error(), cudaGetErrorString(cudaGetLastError()));
  Die();
}
void Must(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "FAILED: %s: %s\n", what, cudaGetErrorString(error));
  Die();
}
void Must(int code, const char* what) { Must(code == 0, what); }

struct DeviceMemory {
  explicit DeviceMemory(size_t bytes) { Must(cudaMalloc(&data, std::max<size_t>(bytes, 1)), "cudaMalloc"); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory() { cudaFree(data); }
  void* data = nullptr;
};

size_t ElementBytes(int32_t dtype) { return dtype == MLPO_DTYPE_FLOAT32 ? 4 : 2; }

bool IsNan(const void* at, int32_t dtype, size_t i) {
  if (dtype == MLPO_DTYPE_FLOAT32) return std::isnan(static_cast<const float*>(at)[i]);
  const uint16_t bits = static_cast<const uint16_t*>(at)[i];
  const uint16_t top = dtype == MLPO_DTYPE_FLOAT16 ? 0x7c00 : 0x7f80;
  return (bits & 0x7fff) > top;
}

// Every bit, but for what a NaN carries.
bool SameElements(const void* a, const void* b, int32_t dtype, size_t count) {
  const size_t bytes = ElementBytes(dtype);
  for (size_t i = 0; i < count; ++i) {
    if (IsNan(a, dtype, i) && IsNan(b, dtype, i)) continue;
    if (std::memcmp(static_cast<const char*>(a) + i * bytes, static_cast<const char*>(b) + i * bytes, bytes) != 0) {
      std::fprintf(stderr, "element %zu of dtype %d differs\n", i, dtype);
      return false;
    }
  }
  return true;
}

void TestKernels() {
  std::mt19937 random(11);
  // All bit patterns of 16-bit types, random patterns of FP32 (NaN, infinities, subnormals among them), ties of
  // rounding.
  std::vector<std::vector<uint32_t>> memory;
  std::vector<mlpo_cuda_tensor> host, device;
  std::vector<std::unique_ptr<DeviceMemory>> copies;
  const auto add = [&](uint64_t numel, int32_t dtype, bool finite) {
    memory.emplace_back(numel + 1);
    auto* halves = reinterpret_cast<uint16_t*>(memory.back().data());
    for (uint64_t i = 0; i < numel; ++i) {
      if (dtype == MLPO_DTYPE_FLOAT32) {
        uint32_t bits = random();
        if (i % 3 == 0) bits = (bits & 0xffff0000u) | 0x8000u;                  // halfway between two bfloat16
        if (finite) bits = (bits & 0x807fffffu) | (100 + random() % 60) << 23;  // about one
        memory.back()[i] = bits;
      } else {
        halves[i] = static_cast<uint16_t>(finite ? random() & 0xbbff : i);
      }
    }
    const size_t bytes = numel * ElementBytes(dtype);
    copies.push_back(std::make_unique<DeviceMemory>(bytes));
    Must(cudaMemcpy(copies.back()->data, memory.back().data(), bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
    host.push_back({memory.back().data(), numel, dtype, 0});
    device.push_back({copies.back()->data, numel, dtype, 0});
  };
  const auto compare = [&](const char* what) {
    uint64_t elements = 0;
    for (const mlpo_cuda_tensor& tensor : host) elements += tensor.numel;
    for (const int32_t dtype : {MLPO_DTYPE_FLOAT32, MLPO_DTYPE_FLOAT16, MLPO_DTYPE_BFLOAT16}) {
      for (const double scale : {1.0, 1 / 3.0, 65536.0}) {
        const DeviceMemory out(elements * 4);
        std::vector<float> got(elements + 1), expected(elements + 1);
        Must(mlpo_cuda_pack(device.data(), device.size(), out.data, dtype, scale, nullptr), "pack");
        Must(cudaMemcpy(got.data(), out.data, elements * ElementBytes(dtype), cudaMemcpyDeviceToHost), "cudaMemcpy");
        ReferencePack(host, expected.data(), dtype, scale);
        Check(SameElements(got.data(), expected.data(), dtype, elements), what);
      }
    }
    const DeviceMemory result(16);
    auto* sum = static_cast<double*>(result.data);
    Must(mlpo_cuda_norm(device.data(), device.size(), sum, reinterpret_cast<int32_t*>(sum + 1), nullptr), "norm");
    double got[2], expected = 0;
    Must(cudaMemcpy(got, result.data, sizeof got, cudaMemcpyDeviceToHost), "cudaMemcpy");
    int32_t finite;
    std::memcpy(&finite, &got[1], sizeof finite);
    bool all_finite = false;
    ReferenceNorm(host, &expected, &all_finite);
    Check((finite != 0) == all_finite, "finiteness");
    Check(all_finite ? got[0] == expected : !std::isfinite(got[0]), "the sum of squares, to the bit");
  };
  for (uint64_t i = 0; i < 200; ++i)
    add(i % 11 == 0 ? 0 : i * 977 % 200'000, static_cast<int32_t>(i % 3) + 1, /*finite=*/true);
  compare("packing finite tensors");
  for (const int32_t dtype : {MLPO_DTYPE_FLOAT32, MLPO_DTYPE_FLOAT16, MLPO_DTYPE_BFLOAT16})
    add(65536, dtype, /*finite=*/false);
  compare("packing every 16-bit pattern");
}

// A client with one subgroup, and its CUDA side.
struct Session {
  explicit Session(const std::string& socket, const char* job, uint64_t numel, int32_t dtype) {
    mlpo_connect_options options = MLPO_CONNECT_OPTIONS_INIT;
    options.socket = socket.c_str();
    options.job = job;
    options.rank = 0;
    options.world_size = 1;
    Must(mlpo_connect(&options, &client), "connect");
    mlpo_subgroup_options wish = MLPO_SUBGROUP_OPTIONS_INIT;
    wish.key = "w";
    wish.numel = numel;
    wish.dtype = dtype;
    Must(mlpo_subgroup_register(client, &wish, 120 * kSecond, &subgroup), "register");
    Must(mlpo_cuda_attach(client, nullptr, &cuda), "attach");
    Must(mlpo_cuda_slot_open(cuda, subgroup, &slot), "open");
    info.struct_size = sizeof info;
    Must(mlpo_cuda_info(cuda, &info), "info");
  }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
  ~Session() {
    Must(mlpo_cuda_slot_close(slot, 60 * kSecond), "close");
    Must(mlpo_cuda_detach(cuda), "detach");
    mlpo_subgroup_free(subgroup);
    mlpo_client_free(client);
  }
  mlpo_request* Grad(const void* device, uint64_t count, cudaStream_t stream) const {
    const mlpo_cuda_piece piece = {0, count, device, MLPO_GRAD_VALUE, 0};
    mlpo_request* request = nullptr;
    Must(mlpo_cuda_copy_grad(slot, &piece, 1, stream, &request), "copy_grad");
    return request;
  }
  // The same of FP32 in two parts, by two streams, which are written first and then submitted.
  mlpo_request* GradInParts(const void* device, uint64_t count, const cudaStream_t* streams) const {
    const auto* at = static_cast<const float*>(device);
    const uint64_t half = count / 2;
    Must(cudaStreamSynchronize(streams[0]), "synchronize");  // the gradient is there for the other stream, too
    Must(mlpo_cuda_write_grad(slot, 0, half, at, streams[0]), "write_grad");
    Must(mlpo_cuda_write_grad(slot, half, count - half, at + half, streams[1]), "write_grad");
    const mlpo_cuda_piece piece = {0, count, nullptr, MLPO_GRAD_VALUE, MLPO_CUDA_IN_SLOT};
    mlpo_request* request = nullptr;
    Must(mlpo_cuda_copy_grad(slot, &piece, 1, streams[0], &request), "copy_grad");
    return request;
  }
  mlpo_client* client = nullptr;
  mlpo_subgroup* subgroup = nullptr;
  mlpo_cuda* cuda = nullptr;
  mlpo_cuda_slot* slot = nullptr;
  struct mlpo_cuda_info info = {};
};

// Moves every parameter by one against its gradient's sign.
mlpo_request* SignUpdate(mlpo_subgroup* subgroup) {
  mlpo_update_options adam = MLPO_UPDATE_OPTIONS_INIT;
  adam.lr = 1;
  adam.beta1 = adam.beta2 = adam.eps = adam.weight_decay = 0;
  mlpo_request* request = nullptr;
  Must(mlpo_submit_update(subgroup, &adam, 60 * kSecond, &request), "update");
  return request;
}

int End(mlpo_request* request, mlpo_result* result = nullptr) {
  const int code = mlpo_request_wait(request, 60 * kSecond, result);
  mlpo_request_free(request);
  return code;
}

void TestRounds(const std::string& socket) {
  constexpr uint64_t kElements = 1'000'003;
  const Session session(socket, "rounds", kElements, MLPO_DTYPE_FLOAT32);
  std::printf("{\"name\": \"attach\", \"arena_bytes\": %llu, \"pinned_bytes\": %llu, \"stream_waits\": %d}\n",
              static_cast<unsigned long long>(session.info.arena_bytes),
              static_cast<unsigned long long>(session.info.pinned_bytes), session.info.stream_waits);
  Check(session.info.pinned_bytes == session.info.arena_bytes, session.info.pin_text);
  cudaStream_t streams[2];
  for (cudaStream_t& stream : streams) Must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  const DeviceMemory grad(kElements * 4), param(kElements * 4);
  std::vector<float> values(kElements), got(kElements), expected(kElements, 0);
  std::mt19937 random(3);
  for (int round = 1; round <= 30; ++round) {
    double sum = 0;
    for (uint64_t i = 0; i < kElements; ++i) {
      values[i] = static_cast<float>(1 + random() % 8) * (random() % 2 == 0 ? 1.0f : -1.0f);
      sum += static_cast<double>(values[i]) * values[i];
      expected[i] -= values[i] > 0 ? 1.0f : -1.0f;
    }
    Must(cudaMemcpyAsync(grad.data, values.data(), kElements * 4, cudaMemcpyHostToDevice, streams[0]), "cudaMemcpy");
    mlpo_result result = {};
    result.struct_size = sizeof result;
    const bool in_parts = round % 2 == 0;
    mlpo_request* gradient =
        in_parts ? session.GradInParts(grad.data, kElements, streams) : session.Grad(grad.data, kElements, streams[0]);
    Must(End(gradient, &result), "the gradient");
    Check(result.sum_of_squares == sum, "the gradient's bytes are of this round");
    mlpo_request* update = SignUpdate(session.subgroup);
    Must(mlpo_cuda_copy_param(session.slot, 0, kElements, param.data, streams[1], 60 * kSecond), "copy_param");
    Must(cudaMemcpyAsync(got.data(), param.data, kElements * 4, cudaMemcpyDeviceToHost, streams[1]), "cudaMemcpy");
    Must(cudaStreamSynchronize(streams[1]), "a stream that waited for an update");
    Must(End(update), "the update");
    Check(got == expected, "the parameters on the device are of this round");
  }
  // An update that is refused (its gradient is not finite): released, and nothing copied.
  values.assign(kElements, INFINITY);
  Must(cudaMemcpyAsync(grad.data, values.data(), kElements * 4, cudaMemcpyHostToDevice, streams[0]), "cudaMemcpy");
  Must(End(session.Grad(grad.data, kElements, streams[0])), "the gradient");
  mlpo_request* update = SignUpdate(session.subgroup);
  const int copied = mlpo_cuda_copy_param(session.slot, 0, kElements, param.data, streams[1], 60 * kSecond);
  Check(copied == 0 || copied == -ENODATA, "copy_param behind an update that fails");  // or it has failed already
  Must(cudaMemcpyAsync(got.data(), param.data, kElements * 4, cudaMemcpyDeviceToHost, streams[1]), "cudaMemcpy");
  Must(cudaStreamSynchronize(streams[1]), "a stream that waited for an update that failed");
  Check(End(update) == MLPO_ERR_NOT_FINITE, "an update with infinities is refused");
  Check(got == expected, "after a failed update the parameters on the device are what they were");
  for (cudaStream_t stream : streams) Must(cudaStreamDestroy(stream), "stream");
}

// A stream waits for an update of a daemon that is killed, or stopped and never goes on.
void TestDaemonDies(DaemonProcess& daemon) {
  constexpr uint64_t kElements = 10'000;
  const Session session(daemon.socket(), "dies", kElements, MLPO_DTYPE_FLOAT32);
  const DeviceMemory grad(kElements * 4), param(kElements * 4);
  std::vector<float> ones(kElements, 1), sevens(kElements, 7), got(kElements);
  Must(cudaMemcpy(grad.data, ones.data(), kElements * 4, cudaMemcpyHostToDevice), "cudaMemcpy");
  Must(cudaMemcpy(param.data, sevens.data(), kElements * 4, cudaMemcpyHostToDevice), "cudaMemcpy");
  cudaStream_t stream;
  Must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  Must(End(session.Grad(grad.data, kElements, stream)), "the gradient");
  daemon.Signal(SIGSTOP);
  mlpo_request* update = SignUpdate(session.subgroup);
  Must(mlpo_cuda_copy_param(session.slot, 0, kElements, param.data, stream, 60 * kSecond), "copy_param");
  usleep(100'000);
  Check(cudaStreamQuery(stream) == cudaErrorNotReady, "the stream waits");
  cudaGetLastError();
  daemon.Signal(SIGKILL);
  const auto from = std::chrono::steady_clock::now();
  Must(cudaStreamSynchronize(stream), "a stream that waited when the daemon died");
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - from;
  std::printf("{\"name\": \"daemon_death\", \"released_after_s\": %.3f}\n", took.count());
  Check(took.count() < 3, "released within 3 s of the daemon's death");
  Check(End(update) == MLPO_ERR_DAEMON_DIED, "the update's request says why");
  Must(cudaMemcpy(got.data(), param.data, kElements * 4, cudaMemcpyDeviceToHost), "cudaMemcpy");
  Check(got == sevens, "nothing was copied");
  Must(cudaStreamDestroy(stream), "stream");
}

// In a child, which has not used CUDA before: registers a memfd that the parent has registered too, and doubles what is
// in it.
int DoubleInChild(int memfd, size_t bytes, int from_parent, int to_parent) {
  char go;
  if (read(from_parent, &go, 1) != 1) return 2;
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0);
  if (at == MAP_FAILED) return 3;
  if (cudaHostRegister(at, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped) != cudaSuccess) return 4;
  const uint64_t numel = bytes / 4;
  void* device = nullptr;
  if (cudaMalloc(&device, bytes) != cudaSuccess) return 5;
  if (cudaMemcpyAsync(device, at, bytes, cudaMemcpyHostToDevice, nullptr) != cudaSuccess) return 6;
  const mlpo_cuda_tensor tensor = {device, numel, MLPO_DTYPE_FLOAT32, 0};
  if (mlpo_cuda_pack(&tensor, 1, device, MLPO_DTYPE_FLOAT32, 2, nullptr) != 0) return 7;
  if (cudaMemcpyAsync(at, device, bytes, cudaMemcpyDeviceToHost, nullptr) != cudaSuccess) return 8;
  if (cudaStreamSynchronize(nullptr) != cudaSuccess) return 9;
  if (write(to_parent, "d", 1) != 1) return 10;
  return cudaHostUnregister(at) == cudaSuccess ? 0 : 11;
}

struct SharedMemory {
  int memfd = -1;
  int to_child = -1, from_child = -1;
  pid_t child = -1;
  static constexpr size_t kBytes = size_t{64} << 20;
};

// Before this process uses CUDA: a forked child could not.
SharedMemory StartChild() {
  SharedMemory shared;
  shared.memfd = memfd_create("shared", MFD_CLOEXEC);
  int down[2], up[2];
  Must(shared.memfd >= 0 && ftruncate(shared.memfd, SharedMemory::kBytes) == 0 && pipe(down) == 0 && pipe(up) == 0,
       "memfd and pipes");
  shared.child = fork();
  Must(shared.child >= 0, "fork");
  if (shared.child == 0) {
    close(down[1]);
    _exit(DoubleInChild(shared.memfd, SharedMemory::kBytes, down[0], up[1]));
  }
  close(down[0]);
  close(up[1]);
  shared.to_child = down[1];
  shared.from_child = up[0];
  return shared;
}

void TestTwoProcesses(const SharedMemory& shared) {
  constexpr size_t kBytes = SharedMemory::kBytes;
  auto* at = static_cast<float*>(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, shared.memfd, 0));
  Must(at != MAP_FAILED, "mmap");
  Must(cudaHostRegister(at, kBytes, cudaHostRegisterPortable | cudaHostRegisterMapped), "registering first");
  const DeviceMemory device(kBytes);
  std::vector<float> values(kBytes / 4), got(kBytes / 4);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 1000);
  Must(cudaMemcpy(device.data, values.data(), kBytes, cudaMemcpyHostToDevice), "cudaMemcpy");
  Must(cudaMemcpyAsync(at, device.data, kBytes, cudaMemcpyDeviceToHost, nullptr), "cudaMemcpyAsync");
  Must(cudaStreamSynchronize(nullptr), "synchronize");
  char done = 0;
  const bool told = write(shared.to_child, "g", 1) == 1 && read(shared.from_child, &done, 1) == 1;
  int status = 0;
  Must(waitpid(shared.child, &status, 0) == shared.child, "waitpid");
  Check(told && status == 0, "the second process registered the same memory and copied both ways");
  if (status != 0) std::fprintf(stderr, "it ended with %d\n", WIFEXITED(status) ? WEXITSTATUS(status) : -status);
  Must(cudaMemcpyAsync(device.data, at, kBytes, cudaMemcpyHostToDevice, nullptr), "cudaMemcpyAsync");
  Must(cudaMemcpy(got.data(), device.data, kBytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
  bool doubled = true;
  for (size_t i = 0; i < values.size(); ++i) doubled = doubled && got[i] == 2 * values[i];
  Check(doubled, "what the second process wrote by its GPU copies is there");
  Must(cudaHostUnregister(at), "unregistering");
  munmap(at, kBytes);
  std::printf("{\"name\": \"two_processes\", \"registered_bytes\": %zu, \"ok\": %s}\n", kBytes,
              told && status == 0 && doubled ? "true" : "false");
}

// Bytes per second of `copy`, the median of five; `before` each of them is not timed.
double Speed(
    size_t bytes, cudaStream_t stream, const std::function<void()>& copy, const std::function<void()>& before = [] {}) {
  std::vector<double> speeds;
  for (int i = 0; i < 6; ++i) {
    before();
    Must(cudaStreamSynchronize(stream), "synchronize");
    const auto from = std::chrono::steady_clock::now();
    copy();
    Must(cudaStreamSynchronize(stream), "synchronize");
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - from;
    if (i > 0) speeds.push_back(static_cast<double>(bytes) / took.count());  // the first warms up
  }
  std::sort(speeds.begin(), speeds.end());
  return speeds[speeds.size() / 2];
}

void PrintRatio(const char* name, double ours, double plain) {
  std::printf("{\"name\": \"%s\", \"bytes_per_s\": %.4g, \"plain_pinned_bytes_per_s\": %.4g, \"ratio\": %.3f}\n", name,
              ours, plain, ours / plain);
}

void MeasureBandwidth(const std::string& socket) {
  constexpr uint64_t kElements = uint64_t{128} << 20;
  constexpr size_t kBytes = kElements * 2;
  const Session session(socket, "bandwidth", kElements, MLPO_DTYPE_BFLOAT16);
  cudaStream_t stream;
  Must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  const DeviceMemory device(kBytes), gradient(kBytes);
  // Finite, and not 0, which has no sign.
  Must(cudaMemset(gradient.data, 0x3f, kBytes), "cudaMemset");
  void* pinned = nullptr;
  Must(cudaHostAlloc(&pinned, kBytes, cudaHostAllocDefault), "cudaHostAlloc");
  const double out = Speed(kBytes, stream, [&] {
    Must(cudaMemcpyAsync(pinned, gradient.data, kBytes, cudaMemcpyDeviceToHost, stream), "cudaMemcpyAsync");
  });
  const double in = Speed(kBytes, stream, [&] {
    Must(cudaMemcpyAsync(device.data, pinned, kBytes, cudaMemcpyHostToDevice, stream), "cudaMemcpyAsync");
  });
  mlpo_request* request = nullptr;
  const double grad = Speed(
      kBytes, stream, [&] { request = session.Grad(gradient.data, kElements, stream); },
      [&] {
        if (request == nullptr) return;
        // The daemon is done with the one before, and has forgotten it: a window's pieces may not overlap.
        Must(End(request), "the gradient");
        Must(mlpo_client_discard(session.client, 0, 60 * kSecond), "discard");
      });
  Must(End(request), "the gradient");
  Must(End(SignUpdate(session.subgroup)), "the update");
  const double param = Speed(kBytes, stream, [&] {
    Must(mlpo_cuda_copy_param(session.slot, 0, kElements, device.data, stream, 60 * kSecond), "copy_param");
  });
  PrintRatio("copy_param", param, in);
  // The copy behind a wait, by a kernel: from the update's end on.
  double waited = 0;
  for (int i = 0; i < 3; ++i) {
    Must(End(session.Grad(gradient.data, kElements, stream)), "the gradient");
    cudaEvent_t begin, end;
    Must(cudaEventCreate(&begin), "event");
    Must(cudaEventCreate(&end), "event");
    mlpo_request* update = SignUpdate(session.subgroup);
    Must(mlpo_cuda_wait(session.slot, stream, 60 * kSecond), "wait");
    Must(cudaEventRecord(begin, stream), "record");
    Must(mlpo_cuda_copy_param(session.slot, 0, kElements, device.data, stream, 60 * kSecond), "copy_param");
    Must(cudaEventRecord(end, stream), "record");
    Must(cudaStreamSynchronize(stream), "synchronize");
    Must(End(update), "the update");
    float ms = 0;
    Must(cudaEventElapsedTime(&ms, begin, end), "elapsed");
    waited = std::max(waited, kBytes / (ms / 1e3));
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
  }
  PrintRatio("copy_param_behind_wait", waited, in);
  PrintRatio("copy_grad", grad, out);
  Must(cudaFreeHost(pinned), "cudaFreeHost");
  Must(cudaStreamDestroy(stream), "stream");
}

void MeasureKernels() {
  constexpr uint64_t kElements = uint64_t{256} << 20;
  const DeviceMemory in(kElements * 4), out(kElements * 2), result(16);
  Must(cudaMemset(in.data, 0, kElements * 4), "cudaMemset");
  const mlpo_cuda_tensor tensor = {in.data, kElements, MLPO_DTYPE_FLOAT32, 0};
  auto* sum = static_cast<double*>(result.data);
  const double packed = Speed(kElements * 6, nullptr, [&] {
    Must(mlpo_cuda_pack(&tensor, 1, out.data, MLPO_DTYPE_BFLOAT16, 0.5, nullptr), "pack");
  });
  const double normed = Speed(kElements * 4, nullptr, [&] {
    Must(mlpo_cuda_norm(&tensor, 1, sum, reinterpret_cast<int32_t*>(sum + 1), nullptr), "norm");
  });
  std::printf("{\"name\": \"pack\", \"bytes_per_s\": %.4g}\n{\"name\": \"norm\", \"bytes_per_s\": %.4g}\n", packed,
              normed);
}

// A test with a daemon of its own. One that does not start is a failure; what needs none goes on.
void WithDaemon(const DaemonProcess::Options& options, const std::function<void(DaemonProcess&)>& test) {
  try {
    DaemonProcess daemon(options);
    daemon_pid = daemon.pid();
    test(daemon);
  } catch (const std::exception& error) {
    Check(false, error.what());
  }
  daemon_pid = -1;
}

}  // namespace

int main() {
  const SharedMemory shared = StartChild();
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "skipped: CUDA has no device here\n");
    close(shared.to_child);  // ends the child
    int status;
    waitpid(shared.child, &status, 0);
    return 77;
  }
  cudaDeviceProp about;
  Must(cudaGetDeviceProperties(&about, 0), "cudaGetDeviceProperties");
  std::printf("{\"name\": \"device\", \"model\": \"%s\", \"compute_capability\": \"%d.%d\"}\n", about.name, about.major,
              about.minor);
  TestTwoProcesses(shared);
  TestKernels();
  DaemonProcess::Options large;
  large.memory = "4GiB";
  large.block = "1048576";
  WithDaemon(large, [](DaemonProcess& daemon) {
    TestRounds(daemon.socket());
    MeasureBandwidth(daemon.socket());
  });
  WithDaemon({}, TestDaemonDies);
  MeasureKernels();
  std::fprintf(stderr, "%s\n", failures == 0 ? "passed" : "FAILED");
  return failures == 0 ? 0 : 1;
}
