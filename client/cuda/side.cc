#include "client/cuda/side.h"

#include <errno.h>
#include <signal.h>
#include <string.h>

#include <algorithm>
#include <new>

#include "client/cuda/kernels.h"
#include "client/src/versioned_struct.h"

using mlpo::client::Deadline;
using mlpo::client::kNsPerMs;
using mlpo::client::MutexLock;
using mlpo::cuda::Fail;
using mlpo::cuda::FailCuda;
using mlpo::cuda::GradCopy;
using mlpo::cuda::OnDevice;
using mlpo::cuda::Passed;
using mlpo::cuda::Taken;
using mlpo::cuda::WordPage;

namespace {

constexpr uint64_t kPieceBytes = uint64_t{1} << 30;
constexpr size_t kPageBytes = 4096;
constexpr size_t kWordsPerPage = kPageBytes / sizeof(uint64_t);
// How often the releaser looks whether CUDA still works.
constexpr int64_t kLookNs = 100 * kNsPerMs;

void Pause() {
  const timespec pause = mlpo::client::ToTimespec(kNsPerMs);
  nanosleep(&pause, nullptr);
}

uint32_t ElementBytes(int32_t dtype) { return dtype == MLPO_DTYPE_FLOAT32 ? 4 : 2; }

void* RunReleaser(void* side) {
  static_cast<mlpo_cuda*>(side)->Release();
  return nullptr;
}

int StartReleaser(mlpo_cuda* side) {
  // Signals are the program's threads' business.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const int error = pthread_create(&side->releaser, nullptr, RunReleaser, side);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (error != 0) return Fail(-error, "no thread for the CUDA side: %s", strerror(error));
  side->releaser_runs = true;
  pthread_setname_np(side->releaser, "mlpo-cuda");
  return 0;
}

void StopReleaser(mlpo_cuda* side) {
  if (!side->releaser_runs) return;
  {
    MutexLock lock(side->lock);
    side->stop = true;
    side->changed.NotifyAll();
  }
  pthread_join(side->releaser, nullptr);
}

int Attach(mlpo_cuda* side, const mlpo_cuda_options& options) {
  int devices = 0;
  cudaError_t error = Taken(cudaGetDeviceCount(&devices));
  if (error != cudaSuccess) return FailCuda(error, "CUDA has no device here");
  if (devices == 0) return Fail(-ENODEV, "CUDA has no device here");
  side->device = options.device;
  if (options.device == -1) {
    error = Taken(cudaGetDevice(&side->device));
    if (error != cudaSuccess) return FailCuda(error, "cudaGetDevice");
  }
  if (side->device < 0 || side->device >= devices)
    return Fail(-EINVAL, "device %d: there are %d", side->device, devices);
  const OnDevice on(side->device);
  if (on.error() != cudaSuccess) return FailCuda(on.error(), "device %d", side->device);
  side->no_pin = options.no_pin != 0;
  side->stream_waits =
      options.no_wait == 0 && side->wait.Find(side->device) && Taken(mlpo::cuda::LoadKernels()) == cudaSuccess;
  side->pins.Open(side->client, options.piece_bytes != 0 ? options.piece_bytes : kPieceBytes);
  if (!side->no_pin) side->pins.Pin(/*again=*/true);  // a failure is told by mlpo_cuda_info
  return StartReleaser(side);
}

bool OfClient(const mlpo_cuda* side, const void* header) {
  void* base = nullptr;
  uint64_t bytes = 0;
  for (uint32_t i = 0; mlpo_client_arena(side->client, i, &base, &bytes) == 0; ++i) {
    if (header >= base && header < static_cast<char*>(base) + bytes) return true;
  }
  return false;
}

// Nobody needs the slot any more.
void Free(mlpo_cuda_slot* slot) {
  mlpo_cuda* side = slot->side;
  MutexLock lock(side->lock);
  for (size_t page = 0; page < side->pages.size(); ++page) {
    const uint64_t* words = side->pages[page].words;
    if (slot->word >= words && slot->word < words + kWordsPerPage)
      side->free_words.push_back(static_cast<uint32_t>(page * kWordsPerPage + static_cast<size_t>(slot->word - words)));
  }
  std::erase(side->slots, slot);
  std::erase(side->waiting, slot);
  delete slot;
}

// No copy of the slot is in flight and no stream waits for it.
bool Idle(mlpo_cuda_slot* slot) {
  mlpo_cuda* side = slot->side;
  {
    MutexLock lock(side->lock);
    side->changed.NotifyAll();
    if (slot->copies > 0) return false;
  }
  if (slot->written != nullptr) {
    if (Passed(slot->written) == cudaErrorNotReady) return false;
    MutexLock lock(side->lock);
    side->GiveEvent(slot->written);
    slot->written = nullptr;
  }
  while (!slot->readers.empty()) {
    // Any other answer than "not ready" is the last one of this event.
    if (Passed(slot->readers.back()) == cudaErrorNotReady) return false;
    MutexLock lock(side->lock);
    side->GiveEvent(slot->readers.back());
    slot->readers.pop_back();
  }
  return true;
}

}  // namespace

int mlpo_cuda::CheckProcess() const {
  if (getpid() == creator) return 0;
  return Fail(MLPO_ERR_FORKED, "the CUDA side belongs to process %d; a forked child cannot use it",
              static_cast<int>(creator));
}

cudaError_t mlpo_cuda::TakeEvent(cudaEvent_t* event) {
  {
    MutexLock guard(lock);
    if (!events.empty()) {
      *event = events.back();
      events.pop_back();
      return cudaSuccess;
    }
  }
  return Taken(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
}

void mlpo_cuda::GiveEvent(cudaEvent_t event) { events.push_back(event); }

void mlpo_cuda::Watch(GradCopy* copy) {
  MutexLock guard(lock);
  copies.push_back(copy);
  ++copy->slot->copies;
  changed.NotifyAll();
}

void mlpo_cuda::Await(mlpo_cuda_slot* slot, uint64_t value) {
  MutexLock guard(lock);
  if (value <= slot->awaited) return;
  slot->awaited = value;
  if (std::find(waiting.begin(), waiting.end(), slot) == waiting.end()) waiting.push_back(slot);
  changed.NotifyAll();
}

void mlpo_cuda::DropEnded() {
  std::erase_if(copies, [this](GradCopy* copy) {
    if (copy->state.load(std::memory_order_acquire) != GradCopy::kPosted && !copy->over) return false;
    --copy->slot->copies;
    GiveEvent(copy->passed);
    delete copy;
    return true;
  });
}

void mlpo_cuda::Release() {
  const OnDevice on(device);  // a device that cannot be chosen fails its events too
  uint64_t seen = 0;
  lock.Lock();
  while (!stop) {
    std::erase_if(waiting, [](const mlpo_cuda_slot* slot) { return slot->Ended() >= slot->awaited; });
    DropEnded();
    if (waiting.empty() && copies.empty()) {
      changed.Wait(lock, Deadline{INT64_MAX});
      continue;
    }
    const bool streams_wait = !waiting.empty();
    lock.Unlock();
    const int code = mlpo_client_await(client, &seen, kLookNs);
    // A call to CUDA might block behind a thread that waits for place in the queue of a stream that waits for us.
    if (code != 0 && !streams_wait) CheckCopies();
    // After the session's end it does not wait any more.
    if (code != 0 && code != -ETIMEDOUT) Pause();
    lock.Lock();
  }
  lock.Unlock();
}

void mlpo_cuda::CheckCopies() {
  std::vector<GradCopy*> looked_at;  // only this thread deletes them
  {
    MutexLock guard(lock);
    looked_at = copies;
  }
  for (GradCopy* copy : looked_at) {
    const cudaError_t error = Passed(copy->passed);
    if (error == cudaErrorNotReady) continue;
    int copying = GradCopy::kCopying;
    if (error != cudaSuccess && copy->state.compare_exchange_strong(copying, GradCopy::kAbandoned)) {
      FailCuda(error, "copying a gradient into its slot");
      mlpo_request_abandon(copy->request, -EIO, mlpo_last_error());
    }
    if (copy->state.load(std::memory_order_acquire) == GradCopy::kAbandoned) copy->over = true;
  }
}

bool mlpo_cuda::TakeWord(mlpo_cuda_slot* slot) {
  MutexLock guard(lock);
  if (free_words.empty()) return false;
  const uint32_t index = free_words.back();
  free_words.pop_back();
  const WordPage& page = pages[index / kWordsPerPage];
  slot->word = page.words + index % kWordsPerPage;
  slot->word_device = page.device + index % kWordsPerPage * sizeof(uint64_t);
  return true;
}

bool mlpo_cuda::AddPage() {
  void* words = nullptr;
  void* on_device = nullptr;
  if (Taken(cudaHostAlloc(&words, kPageBytes, cudaHostAllocPortable | cudaHostAllocMapped)) != cudaSuccess)
    return false;
  if (Taken(cudaHostGetDevicePointer(&on_device, words, 0)) != cudaSuccess) {
    Taken(cudaFreeHost(words));
    return false;
  }
  memset(words, 0, kPageBytes);
  MutexLock guard(lock);
  for (uint32_t i = 0; i < kWordsPerPage; ++i)
    free_words.push_back(static_cast<uint32_t>(pages.size() * kWordsPerPage + i));
  pages.push_back({static_cast<uint64_t*>(words), reinterpret_cast<uintptr_t>(on_device)});
  return true;
}

extern "C" {

int mlpo_cuda_attach(mlpo_client* client, const mlpo_cuda_options* given, mlpo_cuda** out) {
  if (client == nullptr || out == nullptr) return Fail(-EINVAL, "client or cuda is NULL");
  *out = nullptr;
  struct mlpo_client_info about = {};
  about.struct_size = sizeof about;
  if (int code = mlpo_client_info(client, &about); code != 0) return code;
  mlpo_cuda_options options = MLPO_CUDA_OPTIONS_INIT;
  if (given != nullptr) {
    if (int code = mlpo::client::TakeStruct(given, &options, "mlpo_cuda_options"); code != 0) return code;
  }
  if (options.reserved != 0) return Fail(-EINVAL, "mlpo_cuda_options.reserved is not 0");
  if (options.piece_bytes % static_cast<uint64_t>(sysconf(_SC_PAGESIZE)) != 0)
    return Fail(-EINVAL, "piece_bytes is %llu: a multiple of the page is needed",
                static_cast<unsigned long long>(options.piece_bytes));
  auto* side = new (std::nothrow) mlpo_cuda();
  if (side == nullptr) return Fail(-ENOMEM, "no memory for the CUDA side");
  side->client = client;
  side->creator = getpid();
  if (int code = Attach(side, options); code != 0) {
    side->pins.Unpin();
    delete side;
    return code;
  }
  *out = side;
  return 0;
}

int mlpo_cuda_detach(mlpo_cuda* side) {
  if (side == nullptr) return 0;
  if (int code = side->CheckProcess(); code != 0) return code;
  if (!side->slots.empty()) return Fail(-EBUSY, "%zu slots are open; close them first", side->slots.size());
  StopReleaser(side);
  const OnDevice on(side->device);
  side->pins.Unpin();
  for (const cudaEvent_t event : side->events) Taken(cudaEventDestroy(event));
  for (const WordPage& page : side->pages) Taken(cudaFreeHost(page.words));
  delete side;
  return 0;
}

int mlpo_cuda_pin(mlpo_cuda* side) {
  if (side == nullptr) return Fail(-EINVAL, "cuda is NULL");
  if (int code = side->CheckProcess(); code != 0) return code;
  const OnDevice on(side->device);
  return side->pins.Pin(/*again=*/true);
}

int mlpo_cuda_info(mlpo_cuda* side, struct mlpo_cuda_info* info) {
  if (side == nullptr) return Fail(-EINVAL, "cuda is NULL");
  if (int code = side->CheckProcess(); code != 0) return code;
  struct mlpo_cuda_info full = {};
  full.struct_size = sizeof full;
  full.device = side->device;
  full.stream_waits = side->stream_waits ? 1 : 0;
  side->pins.Tell(&full);
  return mlpo::client::GiveStruct(full, info, "mlpo_cuda_info");
}

int mlpo_cuda_slot_open(mlpo_cuda* side, mlpo_subgroup* subgroup, mlpo_cuda_slot** out) {
  if (side == nullptr || subgroup == nullptr || out == nullptr) return Fail(-EINVAL, "cuda, subgroup or slot is NULL");
  *out = nullptr;
  if (int code = side->CheckProcess(); code != 0) return code;
  auto* slot = new (std::nothrow) mlpo_cuda_slot();
  if (slot == nullptr) return Fail(-ENOMEM, "no memory for a slot");
  slot->side = side;
  slot->subgroup = subgroup;
  slot->info.struct_size = sizeof slot->info;
  slot->word = &slot->own_word;
  if (int code = mlpo_subgroup_info(subgroup, &slot->info); code != 0) {
    delete slot;
    return code;
  }
  if (slot->info.keep != 0) {
    delete slot;
    return Fail(-EOPNOTSUPP,
                "the subgroup is registered with keep: streams copy to and from slots that stay where they are");
  }
  if (!OfClient(side, slot->info.epoch_word)) {
    delete slot;
    return Fail(-EINVAL, "the subgroup is of another client than the CUDA side");
  }
  slot->grad_bytes = ElementBytes(slot->info.grad_dtype);
  slot->param_bytes = ElementBytes(slot->info.dtype);
  const OnDevice on(side->device);
  if (!side->no_pin) side->pins.Pin(/*again=*/false);  // a failure is told by mlpo_cuda_info
  // Without a word for the device this slot's updates are waited for by the calling thread.
  if (side->stream_waits) {
    while (!side->TakeWord(slot) && side->AddPage()) continue;
  }
  {
    MutexLock lock(side->lock);
    side->slots.push_back(slot);
  }
  if (int code = mlpo_subgroup_watch(subgroup, slot->word); code != 0) {
    Free(slot);
    return code;
  }
  *out = slot;
  return 0;
}

int mlpo_cuda_slot_close(mlpo_cuda_slot* slot, int64_t timeout_ns) {
  if (slot == nullptr) return 0;
  mlpo_cuda* side = slot->side;
  if (int code = side->CheckProcess(); code != 0) return code;
  const Deadline deadline = Deadline::In(timeout_ns);
  const OnDevice on(side->device);
  for (;;) {
    {
      MutexLock lock(slot->lock);
      if (Idle(slot)) break;
    }
    if (deadline.Passed()) {
      return Fail(-ETIMEDOUT,
                  "copies of the slot are still in flight, or a stream has not got to them; the slot stays "
                  "open");
    }
    Pause();
  }
  mlpo_subgroup_watch(slot->subgroup, nullptr);  // fails on nothing but misuse
  Free(slot);
  return 0;
}

}  // extern "C"
