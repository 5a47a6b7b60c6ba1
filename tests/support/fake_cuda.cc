#include "tests/support/fake_cuda.h"

#include <cuda.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/cuda_kernels.h"

namespace {

struct State;
State& Fake();

thread_local bool in_callback = false;
thread_local cudaError_t last_error = cudaSuccess;
thread_local int current_device = 0;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

}  // namespace

struct CUevent_st {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0;  // records enqueued so far
  uint64_t passed = 0;    // the last of them that the stream has got to
};

struct CUstream_st {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> queue;
  uint64_t enqueued = 0, done = 0;
  bool stop = false;
  bool capturing = false;
  bool captures_globally = false;
  bool spoiled = false;  // the capture, by a call that CUDA refuses meanwhile
  std::mt19937_64 random;
  std::thread thread;
};

namespace {

struct State {
  std::mutex mutex;
  std::map<std::string, std::pair<int, int>> failures;  // function -> nth, error
  std::map<std::string, uint64_t> calls;
  std::map<const void*, std::string> functions;  // host stub -> kernel's name
  std::map<uintptr_t, uint64_t> registered;      // by cudaHostRegister
  std::map<uintptr_t, uint64_t> host_allocated;
  std::map<uintptr_t, uint64_t> device_memory;
  std::multiset<std::pair<uintptr_t, uint64_t>> in_flight;  // host memory that enqueued copies name
  std::set<CUstream_st*> streams;
  std::vector<std::unique_ptr<CUevent_st>> dead_events;
  std::string violation;
  int violations = 0;
  std::string violation_told;
  uint64_t seed = 1;

  std::atomic<uint32_t> most_us{0};
  std::atomic<bool> waits{true};
  std::atomic<bool> ignore_events{false};
  std::atomic<int> broken{0};
};

// Never destroyed: streams may run until the very end of the process.
State& Fake() {
  static State* const state = new State();
  return *state;
}

void Violation(const std::string& text) {
  State& fake = Fake();
  std::lock_guard lock(fake.mutex);
  ++fake.violations;
  fake.violation = text;
  if (getenv("FAKE_CUDA_ABORT") != nullptr) {
    fprintf(stderr, "fake_cuda: %s\n", text.c_str());
    abort();
  }
}

cudaError_t Give(cudaError_t error) {
  if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
  return error;
}

// What stands in front of every function.
cudaError_t Enter(const char* function) {
  State& fake = Fake();
  if (in_callback) {
    Violation(std::string(function) + " was called from a stream's call-back");
    return Give(cudaErrorNotPermitted);
  }
  if (const int broken = fake.broken.load(); broken != 0) return Give(static_cast<cudaError_t>(broken));
  std::lock_guard lock(fake.mutex);
  ++fake.calls[function];
  const auto found = fake.failures.find(function);
  if (found != fake.failures.end() && found->second.first > 0 && --found->second.first == 0)
    return Give(static_cast<cudaError_t>(found->second.second));
  return cudaSuccess;
}

#define ENTER(function) \
  if (const cudaError_t entered = Enter(#function); entered != cudaSuccess) return entered

// What must not be called while any thread captures a graph globally, but by threads that are relaxed about it.
cudaError_t RefuseWhileCapturing() {
  if (capture_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  bool refused = false;
  std::lock_guard lock(Fake().mutex);
  for (CUstream_st* stream : Fake().streams) {
    if (!stream->capturing || !stream->captures_globally) continue;
    stream->spoiled = true;
    refused = true;
  }
  return refused ? Give(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

#define ENTER_UNCAPTURED(function) \
  ENTER(function);                 \
  if (const cudaError_t refused = RefuseWhileCapturing(); refused != cudaSuccess) return refused

// The range of `ranges` that holds `at`; end() if none does.
std::map<uintptr_t, uint64_t>::iterator Holding(std::map<uintptr_t, uint64_t>& ranges, uintptr_t at) {
  auto found = ranges.upper_bound(at);
  if (found == ranges.begin()) return ranges.end();
  --found;
  return at < found->first + found->second ? found : ranges.end();
}

bool Overlaps(const std::map<uintptr_t, uint64_t>& ranges, uintptr_t at, uint64_t bytes) {
  auto found = ranges.lower_bound(at + bytes);
  return found != ranges.begin() && (--found, found->first + found->second > at);
}

bool InFlight(const State& fake, uintptr_t at, uint64_t bytes) {
  for (const auto& [first, length] : fake.in_flight) {
    if (first < at + bytes && at < first + length) return true;
  }
  return false;
}

CUstream_st* StreamOf(cudaStream_t stream);

void RunStream(CUstream_st* stream) {
  std::unique_lock lock(stream->mutex);
  for (;;) {
    stream->changed.wait(lock, [stream] { return stream->stop || !stream->queue.empty(); });
    if (stream->queue.empty()) return;
    const std::function<void()> work = std::move(stream->queue.front());
    stream->queue.pop_front();
    lock.unlock();
    if (const uint32_t most_us = Fake().most_us.load(); most_us > 0) {
      const auto us = stream->random() % (most_us + 1);
      if (us > 0) std::this_thread::sleep_for(std::chrono::microseconds(us));
    }
    if (Fake().broken.load() == 0) work();
    lock.lock();
    ++stream->done;
    stream->changed.notify_all();
  }
}

CUstream_st* NewStream() {
  auto* stream = new CUstream_st();
  State& fake = Fake();
  {
    std::lock_guard lock(fake.mutex);
    stream->random.seed(++fake.seed);
    fake.streams.insert(stream);
  }
  stream->thread = std::thread(RunStream, stream);
  return stream;
}

// nullptr, 1 and 2 stand for the default stream.
CUstream_st* StreamOf(cudaStream_t stream) {
  static CUstream_st* const null_stream = NewStream();
  return reinterpret_cast<uintptr_t>(stream) <= 2 ? null_stream : stream;
}

bool Known(cudaStream_t stream) {
  CUstream_st* real = StreamOf(stream);
  State& fake = Fake();
  std::lock_guard lock(fake.mutex);
  return fake.streams.count(real) != 0;
}

void Enqueue(CUstream_st* stream, std::function<void()> work) {
  std::lock_guard lock(stream->mutex);
  stream->queue.push_back(std::move(work));
  ++stream->enqueued;
  stream->changed.notify_all();
}

void AwaitStream(CUstream_st* stream) {
  std::unique_lock lock(stream->mutex);
  const uint64_t target = stream->enqueued;
  stream->changed.wait(lock, [&] { return stream->done >= target; });
}

}  // namespace

extern "C" {

void fake_cuda_delays(uint32_t most_us, uint64_t seed) {
  std::lock_guard lock(Fake().mutex);
  Fake().most_us.store(most_us);
  Fake().seed = seed;
}
void fake_cuda_fail(const char* function, int nth, int error) {
  std::lock_guard lock(Fake().mutex);
  Fake().failures[function] = {error == 0 ? 0 : nth, error};
}
void fake_cuda_offer_waits(int offered) { Fake().waits.store(offered != 0); }
void fake_cuda_ignore_events(int ignored) { Fake().ignore_events.store(ignored != 0); }
void fake_cuda_break(int error) {
  std::lock_guard lock(Fake().mutex);
  Fake().broken.store(error);
  if (error != 0) Fake().in_flight.clear();
}
void fake_cuda_reset(void) {
  State& fake = Fake();
  std::lock_guard lock(fake.mutex);
  fake.failures.clear();
  fake.calls.clear();
  fake.violations = 0;
  fake.violation.clear();
  fake.most_us.store(0);
  fake.waits.store(true);
  fake.ignore_events.store(false);
  fake.broken.store(0);
}
void fake_cuda_enqueue(cudaStream_t stream, void (*function)(void*), void* argument) {
  Enqueue(StreamOf(stream), [function, argument] { function(argument); });
}
int fake_cuda_violations(void) {
  std::lock_guard lock(Fake().mutex);
  return Fake().violations;
}
const char* fake_cuda_last_violation(void) {
  std::lock_guard lock(Fake().mutex);
  Fake().violation_told = Fake().violation;
  return Fake().violation_told.c_str();
}
uint64_t fake_cuda_registered_bytes(void) {
  std::lock_guard lock(Fake().mutex);
  uint64_t bytes = 0;
  for (const auto& [at, length] : Fake().registered) bytes += length;
  return bytes;
}
uint64_t fake_cuda_calls(const char* function) {
  std::lock_guard lock(Fake().mutex);
  return Fake().calls[function];
}
int fake_cuda_pending_error(void) { return last_error; }

// ---- Device ----
cudaError_t cudaGetDeviceCount(int* count) {
  ENTER(cudaGetDeviceCount);
  *count = 2;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  ENTER(cudaGetDevice);
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  ENTER(cudaSetDevice);
  if (device < 0 || device > 1) return Give(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}
cudaError_t cudaGetLastError(void) {
  if (in_callback) Violation("cudaGetLastError was called from a stream's call-back");
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError(void) { return last_error; }
const char* cudaGetErrorName(cudaError_t error) {
  if (error == cudaErrorMemoryAllocation) return "cudaErrorMemoryAllocation";
  return error == cudaSuccess ? "cudaSuccess" : "cudaErrorFake";
}
const char* cudaGetErrorString(cudaError_t error) {
  if (error == cudaErrorMemoryAllocation) return "out of memory";
  return error == cudaSuccess ? "no error" : "an error of the stand-in";
}

// ---- Memory ----
cudaError_t cudaHostRegister(void* at, size_t bytes, unsigned int flags) {
  ENTER_UNCAPTURED(cudaHostRegister);
  State& fake = Fake();
  const auto first = reinterpret_cast<uintptr_t>(at);
  if (at == nullptr || bytes == 0 || first % 4096 != 0 || (flags & ~0xfu) != 0) return Give(cudaErrorInvalidValue);
  bool twice = false;
  {
    std::lock_guard lock(fake.mutex);
    twice = Overlaps(fake.registered, first, bytes) || Overlaps(fake.host_allocated, first, bytes);
    if (!twice) fake.registered[first] = bytes;
  }
  if (!twice) return cudaSuccess;
  Violation("cudaHostRegister of memory that is registered");
  return Give(cudaErrorHostMemoryAlreadyRegistered);
}
cudaError_t cudaHostUnregister(void* at) {
  ENTER(cudaHostUnregister);
  State& fake = Fake();
  const char* wrong = nullptr;
  {
    std::lock_guard lock(fake.mutex);
    const auto found = fake.registered.find(reinterpret_cast<uintptr_t>(at));
    if (found == fake.registered.end()) {
      wrong = "cudaHostUnregister of what is not registered";
    } else {
      if (InFlight(fake, found->first, found->second)) wrong = "cudaHostUnregister while copies are in flight";
      fake.registered.erase(found);
    }
  }
  if (wrong == nullptr) return cudaSuccess;
  Violation(wrong);
  return Give(cudaErrorHostMemoryNotRegistered);
}
cudaError_t cudaHostAlloc(void** at, size_t bytes, unsigned int) {
  ENTER_UNCAPTURED(cudaHostAlloc);
  if (posix_memalign(at, 4096, bytes) != 0) return Give(cudaErrorMemoryAllocation);
  std::lock_guard lock(Fake().mutex);
  Fake().host_allocated[reinterpret_cast<uintptr_t>(*at)] = bytes;
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* at) {
  ENTER(cudaFreeHost);
  std::lock_guard lock(Fake().mutex);
  if (Fake().host_allocated.erase(reinterpret_cast<uintptr_t>(at)) != 1) return Give(cudaErrorInvalidValue);
  free(at);
  return cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void** device, void* at, unsigned int) {
  ENTER(cudaHostGetDevicePointer);
  State& fake = Fake();
  std::lock_guard lock(fake.mutex);
  const auto address = reinterpret_cast<uintptr_t>(at);
  if (Holding(fake.registered, address) == fake.registered.end() &&
      Holding(fake.host_allocated, address) == fake.host_allocated.end())
    return Give(cudaErrorInvalidValue);
  *device = at;
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** at, size_t bytes) {
  ENTER(cudaMalloc);
  *at = malloc(bytes > 0 ? bytes : 1);
  if (*at == nullptr) return Give(cudaErrorMemoryAllocation);
  std::lock_guard lock(Fake().mutex);
  Fake().device_memory[reinterpret_cast<uintptr_t>(*at)] = bytes > 0 ? bytes : 1;
  return cudaSuccess;
}
cudaError_t cudaFree(void* at) {
  ENTER(cudaFree);
  if (at == nullptr) return cudaSuccess;
  std::lock_guard lock(Fake().mutex);
  if (Fake().device_memory.erase(reinterpret_cast<uintptr_t>(at)) != 1) return Give(cudaErrorInvalidValue);
  free(at);
  return cudaSuccess;
}
cudaError_t cudaMallocAsync(void** at, size_t bytes, cudaStream_t) { return cudaMalloc(at, bytes); }
cudaError_t cudaFreeAsync(void* at, cudaStream_t stream) {
  ENTER(cudaFreeAsync);
  Enqueue(StreamOf(stream), [at] {
    std::lock_guard lock(Fake().mutex);
    if (Fake().device_memory.erase(reinterpret_cast<uintptr_t>(at)) == 1) free(at);
  });
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t stream) {
  ENTER(cudaMemsetAsync);
  Enqueue(StreamOf(stream), [=] { memset(at, value, bytes); });
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t given) {
  ENTER(cudaMemcpyAsync);
  if (!Known(given)) return Give(cudaErrorInvalidResourceHandle);
  State& fake = Fake();
  CUstream_st* stream = StreamOf(given);
  if (kind != cudaMemcpyHostToDevice && kind != cudaMemcpyDeviceToHost) return Give(cudaErrorInvalidValue);
  const bool in = kind == cudaMemcpyHostToDevice;
  const auto host = reinterpret_cast<uintptr_t>(in ? from : to);
  const auto device = reinterpret_cast<uintptr_t>(in ? to : from);
  bool crosses = false, pinned = false;
  {
    std::lock_guard lock(fake.mutex);
    const auto memory = Holding(fake.device_memory, device);
    if (memory == fake.device_memory.end() || device + bytes > memory->first + memory->second)
      return Give(cudaErrorInvalidValue);
    const auto found = Holding(fake.registered, host);
    pinned = found != fake.registered.end();
    crosses = pinned ? host + bytes > found->first + found->second : Overlaps(fake.registered, host, bytes);
    if (!crosses) fake.in_flight.insert({host, bytes});
  }
  if (crosses) {
    Violation("a copy crosses from one registration to the next");
    return Give(cudaErrorInvalidValue);
  }
  Enqueue(stream, [=] {
    memcpy(to, from, bytes);
    std::lock_guard lock(Fake().mutex);
    const auto found = Fake().in_flight.find({host, bytes});
    if (found != Fake().in_flight.end()) Fake().in_flight.erase(found);
  });
  if (!pinned) AwaitStream(stream);
  return cudaSuccess;
}

// ---- Streams and events ----
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int) {
  ENTER(cudaStreamCreateWithFlags);
  *stream = NewStream();
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  ENTER(cudaStreamDestroy);
  {
    std::lock_guard lock(Fake().mutex);
    if (Fake().streams.erase(stream) != 1) return Give(cudaErrorInvalidResourceHandle);
  }
  {
    std::lock_guard lock(stream->mutex);
    stream->stop = true;
    stream->changed.notify_all();
  }
  stream->thread.join();  // what was enqueued is done first, as by CUDA
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  ENTER(cudaStreamSynchronize);
  AwaitStream(StreamOf(stream));
  return Fake().broken.load() == 0 ? cudaSuccess : Give(static_cast<cudaError_t>(Fake().broken.load()));
}
cudaError_t cudaStreamQuery(cudaStream_t given) {
  ENTER(cudaStreamQuery);
  CUstream_st* stream = StreamOf(given);
  std::lock_guard lock(stream->mutex);
  return stream->done == stream->enqueued ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  ENTER(cudaStreamIsCapturing);
  if (!Known(stream)) return Give(cudaErrorInvalidResourceHandle);
  std::lock_guard lock(Fake().mutex);
  *status = StreamOf(stream)->capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  // Of the thread alone: it works whatever has become of the device.
  if (in_callback) Violation("cudaThreadExchangeStreamCaptureMode was called from a stream's call-back");
  std::swap(*mode, capture_mode);
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  ENTER(cudaStreamBeginCapture);
  if (reinterpret_cast<uintptr_t>(stream) <= 2) return Give(cudaErrorStreamCaptureUnsupported);
  std::lock_guard lock(Fake().mutex);
  stream->capturing = true;
  stream->captures_globally = mode == cudaStreamCaptureModeGlobal;
  stream->spoiled = false;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  ENTER(cudaStreamEndCapture);
  *graph = nullptr;
  std::lock_guard lock(Fake().mutex);
  stream->capturing = false;
  return stream->spoiled ? Give(cudaErrorStreamCaptureInvalidated) : cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int) {
  ENTER(cudaEventCreateWithFlags);
  *event = new CUevent_st();
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  ENTER(cudaEventDestroy);
  // Streams may still have to get to it, which CUDA allows.
  std::lock_guard lock(Fake().mutex);
  Fake().dead_events.emplace_back(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  ENTER(cudaEventRecord);
  uint64_t number;
  {
    std::lock_guard lock(event->mutex);
    number = ++event->recorded;
  }
  Enqueue(StreamOf(stream), [event, number] {
    std::lock_guard lock(event->mutex);
    event->passed = std::max(event->passed, number);
    event->changed.notify_all();
  });
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  ENTER_UNCAPTURED(cudaEventQuery);
  std::lock_guard lock(event->mutex);
  return event->passed >= event->recorded ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int) {
  ENTER(cudaStreamWaitEvent);
  if (!Fake().ignore_events.load()) fake_cuda_await_event(stream, event);
  return cudaSuccess;
}
void fake_cuda_await_event(cudaStream_t stream, cudaEvent_t event) {
  uint64_t number;
  {
    std::lock_guard lock(event->mutex);
    number = event->recorded;
  }
  Enqueue(StreamOf(stream), [event, number] {
    std::unique_lock lock(event->mutex);
    while (event->passed < number && Fake().broken.load() == 0)
      event->changed.wait_for(lock, std::chrono::milliseconds(5));
  });
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  ENTER(cudaLaunchHostFunc);
  Enqueue(StreamOf(stream), [=] {
    in_callback = true;
    function(argument);
    in_callback = false;
  });
  return cudaSuccess;
}

// ---- Kernels ----
void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* stub, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  std::lock_guard lock(Fake().mutex);
  Fake().functions[stub] = name;
}
cudaError_t __cudaGetKernel(cudaKernel_t*, const void*) { return cudaErrorNotSupported; }
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) { return cudaErrorNotSupported; }
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, CUstream_st*) { return 1; }
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { return cudaErrorNotSupported; }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* stub) {
  ENTER(cudaFuncGetAttributes);
  *attributes = {};
  std::lock_guard lock(Fake().mutex);
  return Fake().functions.count(stub) != 0 ? cudaSuccess : Give(cudaErrorInvalidDeviceFunction);
}
cudaError_t cudaLaunchKernel(const void* stub, dim3 grid, dim3 block, void** arguments, size_t, cudaStream_t given) {
  ENTER(cudaLaunchKernel);
  if (!Known(given)) return Give(cudaErrorInvalidResourceHandle);
  if (grid.x == 0 || grid.y != 1 || grid.z != 1 || block.x == 0 || block.x > 1024)
    return Give(cudaErrorInvalidConfiguration);
  std::string name;
  {
    std::lock_guard lock(Fake().mutex);
    const auto found = Fake().functions.find(stub);
    if (found == Fake().functions.end()) return Give(cudaErrorInvalidDeviceFunction);
    name = found->second;
  }
  // As with CUDA, the arguments are copied now.
  std::function<void()> work = KernelWork(name, arguments, grid.x, block.x);
  if (work == nullptr) {
    Violation("kernel " + name + " has no function that stands for it");
    return Give(cudaErrorInvalidDeviceFunction);
  }
  Enqueue(StreamOf(given), std::move(work));
  return cudaSuccess;
}

// ---- Driver ----
static CUresult FakeAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS && Fake().waits.load() ? 1 : 0;
  return CUDA_SUCCESS;
}
static CUresult FakeWait(CUstream given, CUdeviceptr word, cuuint64_t value, unsigned int flags) {
  const cudaError_t before = last_error;
  const cudaError_t entered = Enter("cuStreamWaitValue64");
  last_error = before;  // the driver's functions leave none
  if (entered != cudaSuccess) return CUDA_ERROR_UNKNOWN;
  if (flags != CU_STREAM_WAIT_VALUE_GEQ || word % 8 != 0) {
    Violation("a wait for a misaligned word, or of a kind that is not offered");
    return CUDA_ERROR_INVALID_VALUE;
  }
  State& fake = Fake();
  bool visible;
  {
    std::lock_guard lock(fake.mutex);
    visible = Holding(fake.registered, word) != fake.registered.end() ||
              Holding(fake.host_allocated, word) != fake.host_allocated.end();
  }
  if (!visible) {
    Violation("a wait for a word that the device does not see");
    return CUDA_ERROR_INVALID_VALUE;
  }
  Enqueue(StreamOf(given), [word, value] {
    const std::atomic_ref<uint64_t> watched(*reinterpret_cast<uint64_t*>(word));
    while (static_cast<int64_t>(watched.load(std::memory_order_acquire) - value) < 0 && Fake().broken.load() == 0)
      std::this_thread::sleep_for(std::chrono::microseconds(20));
  });
  return CUDA_SUCCESS;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned int, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  ENTER(cudaGetDriverEntryPointByVersion);
  *function = nullptr;
  if (strcmp(name, "cuStreamWaitValue64") == 0) *function = reinterpret_cast<void*>(FakeWait);
  if (strcmp(name, "cuDeviceGetAttribute") == 0) *function = reinterpret_cast<void*>(FakeAttribute);
  *found = *function != nullptr ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

}  // extern "C"
