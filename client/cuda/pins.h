// ArenaPins: the pieces of a client's arena that are registered with CUDA in this process.
//
// Threads: all functions from any thread. Registering takes long (a tenth of a second a GiB and more); meanwhile the
// others see what is registered already.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "client/src/lock.h"
#include "mlpo/client.h"
#include "mlpo/cuda.h"

namespace mlpo::cuda {

// A run of bytes that one copy may name: CUDA refuses copies that cross from one registration to the next.
struct Run {
  std::byte* host = nullptr;
  uint64_t bytes = 0;
  std::byte* device = nullptr;  // its address for kernels; nullptr if it is not pinned
};

class ArenaPins {
 public:
  // `piece_bytes`: registered at a time, a multiple of the page.
  void Open(mlpo_client* client, uint64_t piece_bytes);
  // Registers what is not registered yet; with `again` also after a failure before. 0, or why not all is.
  int Pin(bool again);
  // Nothing of the arena is in flight.
  void Unpin();
  // Cuts [at, at + bytes) into runs.
  std::vector<Run> Runs(void* at, uint64_t bytes);
  // The address of `bytes` at `at` for the device, 0 if they are not pinned as one.
  uintptr_t DeviceAddress(const void* at, uint64_t bytes);
  // What of mlpo_cuda_info is the pins'.
  void Tell(struct mlpo_cuda_info* info);

 private:
  void NoteFailure(cudaError_t error, uint64_t bytes, uint64_t total);

  mlpo_client* client_ = nullptr;
  uint64_t piece_bytes_ = 0;
  client::Turn pinning_;  // held while registering
  uint32_t next_arena_ = 0;
  uint64_t next_offset_ = 0;

  client::Mutex lock_;
  std::vector<Run> pinned_;  // guarded by lock_, as the rest
  uint64_t pinned_bytes_ = 0;
  int code_ = 0;
  cudaError_t error_ = cudaSuccess;
  char text_[512] = {};
};

}  // namespace mlpo::cuda
