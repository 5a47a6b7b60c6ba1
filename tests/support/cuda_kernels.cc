#include "tests/support/cuda_kernels.h"

#include <cmath>
#include <cstring>

#include "client/cuda/kernels.h"
#include "daemon/adam/reference.h"

namespace {

using mlpo::cuda::TensorTable;
using mlpo::reference::LoadElement;
using mlpo::reference::StoreElement;

double ChunkSum(const void* data, mlpo_dtype dtype, uint64_t begin, uint64_t end, bool* finite) {
  double lane[16] = {};
  for (uint64_t i = begin; i < end; ++i) {
    const double value = LoadElement(data, dtype, i);
    if (!std::isfinite(value)) *finite = false;
    lane[(i - begin) % 16] += value * value;
  }
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  }
  return lane[0];
}

template <class T>
T Argument(void** arguments, int i) {
  T value;
  std::memcpy(&value, arguments[i], sizeof value);
  return value;
}

}  // namespace

std::function<void()> KernelWork(const std::string& kernel, void** arguments, unsigned grid, unsigned block) {
  if (kernel == "mlpo_copy_if") {
    const auto to = Argument<std::byte*>(arguments, 0);
    const auto from = Argument<const std::byte*>(arguments, 1);
    const auto bytes = Argument<uint64_t>(arguments, 2);
    const auto word = Argument<const uint64_t*>(arguments, 3);
    const auto epoch = Argument<uint64_t>(arguments, 4);
    return [=] {
      if (__atomic_load_n(word, __ATOMIC_ACQUIRE) >= epoch) std::memcpy(to, from, bytes);
    };
  }
  if (kernel == "mlpo_pack") {
    const auto table = Argument<TensorTable>(arguments, 0);
    const auto out = Argument<std::byte*>(arguments, 1);
    const auto out_dtype = static_cast<mlpo_dtype>(Argument<int>(arguments, 2));
    const auto scale = Argument<float>(arguments, 3);
    return [=] {
      uint64_t before = 0;
      for (uint32_t t = 0; t < table.count; ++t) {
        // Only what the launch's blocks cover.
        const uint64_t parts = (t + 1 < table.count ? table.first_part[t + 1] : grid) - table.first_part[t];
        const uint64_t most = parts * mlpo::cuda::kTile;
        for (uint64_t i = 0; i < table.numel[t] && i < most; ++i) {
          const float value = LoadElement(table.data[t], static_cast<mlpo_dtype>(table.dtype[t]), i);
          StoreElement(out, out_dtype, before + i, value * scale);
        }
        before += table.numel[t];
      }
    };
  }
  if (kernel == "mlpo_chunk_sums") {
    const auto table = Argument<TensorTable>(arguments, 0);
    const auto parts = Argument<uint32_t>(arguments, 1);
    const auto sums = Argument<double*>(arguments, 2);
    const auto finite = Argument<int*>(arguments, 3);
    return [=] {
      for (uint32_t t = 0; t < table.count; ++t) {
        const uint32_t end_part = t + 1 < table.count ? table.first_part[t + 1] : parts;
        for (uint32_t part = table.first_part[t]; part < end_part && part < grid * block / 16; ++part) {
          const uint64_t begin = uint64_t{part - table.first_part[t]} * mlpo::cuda::kChunk;
          const uint64_t end = std::min<uint64_t>(begin + mlpo::cuda::kChunk, table.numel[t]);
          bool all_finite = true;
          sums[part] = ChunkSum(table.data[t], static_cast<mlpo_dtype>(table.dtype[t]), begin, end, &all_finite);
          if (!all_finite) *finite = 0;
        }
      }
    };
  }
  if (kernel == "mlpo_add_sums") {
    const auto sums = Argument<const double*>(arguments, 0);
    const auto count = Argument<uint64_t>(arguments, 1);
    const auto sum = Argument<double*>(arguments, 2);
    return [=] {
      double total = 0;
      for (uint64_t i = 0; i < count; ++i) total += sums[i];
      *sum = total;
    };
  }
  return nullptr;
}

void ReferencePack(const std::vector<mlpo_cuda_tensor>& tensors, void* out, int32_t out_dtype, double scale) {
  size_t at = 0;
  for (const mlpo_cuda_tensor& tensor : tensors) {
    for (uint64_t i = 0; i < tensor.numel; ++i, ++at) {
      const float value = LoadElement(tensor.data, static_cast<mlpo_dtype>(tensor.dtype), i);
      StoreElement(out, static_cast<mlpo_dtype>(out_dtype), at, value * static_cast<float>(scale));
    }
  }
}

void ReferenceNorm(const std::vector<mlpo_cuda_tensor>& tensors, double* sum_of_squares, bool* all_finite) {
  *sum_of_squares = 0;
  *all_finite = true;
  for (const mlpo_cuda_tensor& tensor : tensors) {
    for (uint64_t begin = 0; begin < tensor.numel; begin += 65536) {
      const uint64_t end = std::min<uint64_t>(begin + 65536, tensor.numel);
      *sum_of_squares += ChunkSum(tensor.data, static_cast<mlpo_dtype>(tensor.dtype), begin, end, all_finite);
    }
  }
}
