// Kernels. Compiled by nvcc alone, without the project's other headers but kernels.h; arithmetic is IEEE: no fast-math,
// no contraction (-fmad=false), so that it gives the daemon's bits.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <initializer_list>

#include "client/cuda/kernels.h"

namespace {

using mlpo::cuda::kChunk;
using mlpo::cuda::kLanes;
using mlpo::cuda::kTile;
using mlpo::cuda::TensorTable;

// As in mlpo/client.h.
constexpr int kFloat32 = 1, kFloat16 = 2;  // else bfloat16

constexpr unsigned kThreads = 256;
// Enough to have what PCIe or NVLink-C2C keeps in flight, and few enough to leave the device to others.
constexpr unsigned kCopyBlocks = 32;

template <class Unit>
__device__ void CopyUnits(unsigned char* to, const unsigned char* from, uint64_t bytes) {
  auto* out = reinterpret_cast<Unit*>(to);
  const auto* in = reinterpret_cast<const volatile Unit*>(from);
  const uint64_t stride = uint64_t{gridDim.x} * blockDim.x;
  const uint64_t units = bytes / sizeof(Unit);
  for (uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < units; i += stride) out[i] = in[i];
}

__device__ void CopyVectors(unsigned char* to, const unsigned char* from, uint64_t bytes) {
  auto* out = reinterpret_cast<uint4*>(to);
  const auto* in = reinterpret_cast<const uint4*>(from);
  const uint64_t stride = uint64_t{gridDim.x} * blockDim.x;
  const uint64_t units = bytes / sizeof(uint4);
  uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  // Four loads in flight a thread. __ldcv: never from a cache, the host writes this memory.
  for (; i + 3 * stride < units; i += 4 * stride) {
    const uint4 a = __ldcv(in + i), b = __ldcv(in + i + stride);
    const uint4 c = __ldcv(in + i + 2 * stride), d = __ldcv(in + i + 3 * stride);
    out[i] = a;
    out[i + stride] = b;
    out[i + 2 * stride] = c;
    out[i + 3 * stride] = d;
  }
  for (; i < units; i += stride) out[i] = __ldcv(in + i);
}

__device__ float Load(const void* data, int dtype, uint64_t i) {
  if (dtype == kFloat32) return static_cast<const float*>(data)[i];
  if (dtype == kFloat16) return __half2float(static_cast<const __half*>(data)[i]);
  return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]);
}

__device__ void Store(void* out, int dtype, uint64_t i, float value) {
  if (dtype == kFloat32) {
    static_cast<float*>(out)[i] = value;
  } else if (dtype == kFloat16) {
    static_cast<__half*>(out)[i] = __float2half_rn(value);
  } else {
    static_cast<__nv_bfloat16*>(out)[i] = __float2bfloat16_rn(value);
  }
}

// The tensor that a part belongs to.
__device__ uint32_t FindTensor(const TensorTable& table, uint32_t part) {
  uint32_t low = 0, high = table.count;
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    if (table.first_part[middle] <= part) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace

extern "C" {

__global__ void __launch_bounds__(kThreads) mlpo_copy_if(unsigned char* to, const unsigned char* from, uint64_t bytes,
                                                         const uint64_t* epoch_word, uint64_t epoch) {
  __shared__ bool updated;
  if (threadIdx.x == 0) updated = __ldcv(epoch_word) >= epoch;
  __syncthreads();
  if (!updated) return;
  // Elements have 2 or 4 bytes, and what is copied is whole ones.
  const auto low = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from);
  uint64_t done = 0;
  if (low % 16 == 0) {
    CopyVectors(to, from, bytes);
    done = bytes / 16 * 16;
  } else if (low % 4 == 0) {
    CopyUnits<uint32_t>(to, from, bytes);
    done = bytes / 4 * 4;
  }
  CopyUnits<uint16_t>(to + done, from + done, bytes - done);
}

__global__ void __launch_bounds__(kThreads)
    mlpo_pack(const __grid_constant__ TensorTable table, unsigned char* out, int out_dtype, float scale) {
  const uint32_t tensor = FindTensor(table, blockIdx.x);
  uint64_t before = 0;  // elements of the tensors in front
  for (uint32_t t = 0; t < tensor; ++t) before += table.numel[t];
  const uint64_t begin = uint64_t{blockIdx.x - table.first_part[tensor]} * kTile;
  const uint64_t end = min(begin + kTile, table.numel[tensor]);
  for (uint64_t i = begin + threadIdx.x; i < end; i += kThreads)
    Store(out, out_dtype, before + i, Load(table.data[tensor], table.dtype[tensor], i) * scale);
}

// 16 threads a chunk: one a lane.
__global__ void __launch_bounds__(kThreads)
    mlpo_chunk_sums(const __grid_constant__ TensorTable table, uint32_t parts, double* sums, int* finite) {
  const uint32_t part = blockIdx.x * (kThreads / kLanes) + threadIdx.x / kLanes;
  const uint32_t lane = threadIdx.x % kLanes;
  double sum = 0;
  bool all_finite = true;
  if (part < parts) {
    const uint32_t tensor = FindTensor(table, part);
    const void* data = table.data[tensor];
    const int dtype = table.dtype[tensor];
    const uint64_t begin = uint64_t{part - table.first_part[tensor]} * kChunk;
    const uint64_t end = min(begin + kChunk, table.numel[tensor]);
#pragma unroll 16
    for (uint64_t i = begin + lane; i < end; i += kLanes) {
      const double value = Load(data, dtype, i);
      all_finite = all_finite && isfinite(value);
      sum += value * value;  // the square of a float is exact in a double
    }
  }
  for (uint32_t half = kLanes / 2; half > 0; half /= 2) sum += __shfl_down_sync(0xffffffff, sum, half, kLanes);
  if (!all_finite) *finite = 0;
  if (lane == 0 && part < parts) sums[part] = sum;
}

__global__ void mlpo_add_sums(const double* sums, uint64_t count, double* sum) {
  double total = 0;
#pragma unroll 8
  for (uint64_t i = 0; i < count; ++i) total += sums[i];
  *sum = total;
}

}  // extern "C"

namespace mlpo::cuda {

cudaError_t LoadKernels() {
  cudaFuncAttributes attributes;
  for (const void* kernel :
       {reinterpret_cast<const void*>(mlpo_copy_if), reinterpret_cast<const void*>(mlpo_pack),
        reinterpret_cast<const void*>(mlpo_chunk_sums), reinterpret_cast<const void*>(mlpo_add_sums)}) {
    if (cudaError_t error = cudaFuncGetAttributes(&attributes, kernel); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// By cudaLaunchKernel, which returns its own error: <<<>>> leaves it where errors of the program may lie.

cudaError_t LaunchCopyIf(void* to, const void* from, uint64_t bytes, uintptr_t epoch_word, uint64_t epoch,
                         cudaStream_t stream) {
  const uint64_t blocks = (bytes / 16 + kThreads - 1) / kThreads;
  const auto grid = static_cast<unsigned>(blocks < 1 ? 1 : blocks < kCopyBlocks ? blocks : kCopyBlocks);
  void* arguments[] = {&to, &from, &bytes, &epoch_word, &epoch};
  return cudaLaunchKernel(mlpo_copy_if, dim3(grid), dim3(kThreads), arguments, 0, stream);
}

cudaError_t LaunchPack(const TensorTable& table, uint32_t parts, void* out, int32_t out_dtype, float scale,
                       cudaStream_t stream) {
  void* arguments[] = {const_cast<TensorTable*>(&table), &out, &out_dtype, &scale};
  return cudaLaunchKernel(mlpo_pack, dim3(parts), dim3(kThreads), arguments, 0, stream);
}

cudaError_t LaunchChunkSums(const TensorTable& table, uint32_t parts, double* sums, int32_t* finite,
                            cudaStream_t stream) {
  constexpr uint32_t kPartsPerBlock = kThreads / kLanes;
  void* arguments[] = {const_cast<TensorTable*>(&table), &parts, &sums, &finite};
  return cudaLaunchKernel(mlpo_chunk_sums, dim3((parts + kPartsPerBlock - 1) / kPartsPerBlock), dim3(kThreads),
                          arguments, 0, stream);
}

cudaError_t LaunchAddSums(const double* sums, uint64_t count, double* sum, cudaStream_t stream) {
  void* arguments[] = {&sums, &count, &sum};
  return cudaLaunchKernel(mlpo_add_sums, dim3(1), dim3(1), arguments, 0, stream);
}

}  // namespace mlpo::cuda
