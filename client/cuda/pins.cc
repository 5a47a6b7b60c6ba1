#include "client/cuda/pins.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>

#include "client/cuda/runtime.h"

namespace mlpo::cuda {
namespace {

uint64_t ArenaBytes(mlpo_client* client) {
  struct mlpo_client_info info = {};
  info.struct_size = sizeof info;
  return mlpo_client_info(client, &info) == 0 ? info.arena_bytes : 0;
}

// "ulimit -l is 8192 KiB".
void LockedLimit(char (&text)[64]) {
  rlimit limit = {};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
    snprintf(text, sizeof text, "ulimit -l is unlimited");
  } else {
    snprintf(text, sizeof text, "ulimit -l is %llu KiB", static_cast<unsigned long long>(limit.rlim_cur / 1024));
  }
}

}  // namespace

void ArenaPins::Open(mlpo_client* client, uint64_t piece_bytes) {
  client_ = client;
  piece_bytes_ = piece_bytes;
}

int ArenaPins::Pin(bool again) {
  const client::TurnHolder turn(pinning_, client::Deadline{INT64_MAX});
  {
    client::MutexLock lock(lock_);
    if (code_ != 0 && !again) return mlpo_fail(code_, text_);
    code_ = 0;
    error_ = cudaSuccess;
    text_[0] = '\0';
  }
  for (;; ++next_arena_, next_offset_ = 0) {
    void* base = nullptr;
    uint64_t total = 0;
    const int listed = mlpo_client_arena(client_, next_arena_, &base, &total);
    if (listed == -ENOENT) return 0;
    if (listed != 0) return listed;
    for (; next_offset_ < total;) {
      Run run{static_cast<std::byte*>(base) + next_offset_, std::min(piece_bytes_, total - next_offset_), nullptr};
      cudaError_t error =
          Taken(cudaHostRegister(run.host, run.bytes, cudaHostRegisterPortable | cudaHostRegisterMapped));
      if (error == cudaSuccess) {
        void* device = nullptr;
        error = Taken(cudaHostGetDevicePointer(&device, run.host, 0));
        run.device = static_cast<std::byte*>(device);
        if (error != cudaSuccess) Taken(cudaHostUnregister(run.host));
      }
      client::MutexLock lock(lock_);
      if (error != cudaSuccess) {
        NoteFailure(error, run.bytes, ArenaBytes(client_));
        return mlpo_fail(code_, text_);
      }
      pinned_.push_back(run);
      pinned_bytes_ += run.bytes;
      next_offset_ += run.bytes;
    }
  }
}

// Lock held.
void ArenaPins::NoteFailure(cudaError_t error, uint64_t bytes, uint64_t total) {
  char limit[64];
  LockedLimit(limit);
  code_ =
      FailCuda(error,
               "%llu of %llu bytes of the arena are pinned, the others are copied without, which blocks the caller. "
               "Raise the limit on locked memory (%s; LimitMEMLOCK of a unit, --ulimit memlock of a container) or "
               "free memory. cudaHostRegister of %llu bytes",
               static_cast<unsigned long long>(pinned_bytes_), static_cast<unsigned long long>(total), limit,
               static_cast<unsigned long long>(bytes));
  error_ = error;
  snprintf(text_, sizeof text_, "%s", mlpo_last_error());
}

void ArenaPins::Unpin() {
  const client::TurnHolder turn(pinning_, client::Deadline{INT64_MAX});
  client::MutexLock lock(lock_);
  // It fails only if CUDA has come to its end, and the registrations with it.
  for (const Run& run : pinned_) Taken(cudaHostUnregister(run.host));
  pinned_.clear();
  pinned_bytes_ = 0;
  next_arena_ = 0;
  next_offset_ = 0;
}

std::vector<Run> ArenaPins::Runs(void* at, uint64_t bytes) {
  std::vector<Run> runs;
  client::MutexLock lock(lock_);
  for (auto* host = static_cast<std::byte*>(at); bytes > 0;) {
    Run run{host, bytes, nullptr};
    for (const Run& pin : pinned_) {
      if (host >= pin.host && host < pin.host + pin.bytes) {
        const auto offset = static_cast<uint64_t>(host - pin.host);
        run.bytes = std::min(bytes, pin.bytes - offset);
        run.device = pin.device + offset;
        break;
      }
      // Not pinned up to where the next pin begins.
      if (pin.host > host) run.bytes = std::min(run.bytes, static_cast<uint64_t>(pin.host - host));
    }
    runs.push_back(run);
    host += run.bytes;
    bytes -= run.bytes;
  }
  return runs;
}

uintptr_t ArenaPins::DeviceAddress(const void* at, uint64_t bytes) {
  const std::vector<Run> runs = Runs(const_cast<void*>(at), bytes);
  return runs.size() == 1 ? reinterpret_cast<uintptr_t>(runs[0].device) : 0;
}

void ArenaPins::Tell(struct mlpo_cuda_info* info) {
  info->arena_bytes = ArenaBytes(client_);
  client::MutexLock lock(lock_);
  info->pinned_bytes = pinned_bytes_;
  info->pin_code = code_;
  info->cuda_error = error_;
  memcpy(info->pin_text, text_, sizeof text_);
}

}  // namespace mlpo::cuda
