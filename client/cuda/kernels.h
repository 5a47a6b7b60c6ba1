// What is done on the device by kernels of ours: kernels.cu.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace mlpo::cuda {

// Elements of one of the daemon's chunks of a sum of squares, and its lanes (proto/FORMAT.md, section 5).
inline constexpr uint32_t kChunk = 65536;
inline constexpr uint32_t kLanes = 16;
// What one block of a packing kernel does.
inline constexpr uint32_t kTile = 4096;
// Tensors of one launch: as many as fit a kernel's parameters.
inline constexpr uint32_t kTensors = 128;

// A launch's tensors, one after another, cut into parts of `part` elements; each tensor begins a new one.
struct TensorTable {
  const void* data[kTensors];
  uint64_t numel[kTensors];
  uint32_t first_part[kTensors];  // of all parts of the launch
  uint8_t dtype[kTensors];        // MLPO_DTYPE_*
  uint32_t count;
};

// Loads all kernels onto the current device. Else a kernel's first launch would, which may block the caller until the
// device is idle: behind a stream that waits for an update.
cudaError_t LoadKernels();
// Copies if the epoch at `epoch_word` is at least `epoch` when the stream gets there. `from` is mapped host memory.
cudaError_t LaunchCopyIf(void* to, const void* from, uint64_t bytes, uintptr_t epoch_word, uint64_t epoch,
                         cudaStream_t stream);
// out[i] = round(f32(x[i]) * scale) for the tensors' elements one after another. Parts are of kTile.
cudaError_t LaunchPack(const TensorTable& table, uint32_t parts, void* out, int32_t out_dtype, float scale,
                       cudaStream_t stream);
// The sum of squares of each part (of kChunk) to sums[part]; *finite becomes 0 if anything is not finite.
cudaError_t LaunchChunkSums(const TensorTable& table, uint32_t parts, double* sums, int32_t* finite,
                            cudaStream_t stream);
// Adds `count` sums in their order.
cudaError_t LaunchAddSums(const double* sums, uint64_t count, double* sum, cudaStream_t stream);

}  // namespace mlpo::cuda
