// Lists of device tensors for the kernels.
#include <errno.h>

#include <cmath>

#include "client/cuda/kernels.h"
#include "client/cuda/runtime.h"
#include "mlpo/cuda.h"

namespace mlpo::cuda {
namespace {

bool KnownType(int32_t dtype) { return dtype >= MLPO_DTYPE_FLOAT32 && dtype <= MLPO_DTYPE_BFLOAT16; }

uint64_t ElementBytes(int32_t dtype) { return dtype == MLPO_DTYPE_FLOAT32 ? 4 : 2; }

int CheckTensors(const mlpo_cuda_tensor* tensors, size_t count) {
  if (tensors == nullptr && count > 0) return Fail(-EINVAL, "tensors is NULL");
  for (size_t i = 0; i < count; ++i) {
    const mlpo_cuda_tensor& tensor = tensors[i];
    if (!KnownType(tensor.dtype)) return Fail(-EINVAL, "tensors[%zu].dtype is %d", i, tensor.dtype);
    if (tensor.reserved != 0) return Fail(-EINVAL, "tensors[%zu].reserved is not 0", i);
    if (tensor.data == nullptr && tensor.numel > 0) return Fail(-EINVAL, "tensors[%zu].data is NULL", i);
    if (reinterpret_cast<uintptr_t>(tensor.data) % ElementBytes(tensor.dtype) != 0)
      return Fail(-EINVAL, "tensors[%zu].data is not a multiple of its element", i);
  }
  return 0;
}

// A launch's share of a list: tensors from *next on, cut into parts of `part` elements. A tensor of more parts than a
// launch may have goes on in the next one.
class Launches {
 public:
  Launches(const mlpo_cuda_tensor* tensors, size_t count, uint32_t part)
      : tensors_(tensors), count_(count), part_(part) {}

  // False when nothing is left.
  bool Next() {
    table_.count = 0;
    parts_ = 0;
    elements_ = 0;
    while (next_ < count_ && table_.count < kTensors && parts_ < kMostParts) {
      const mlpo_cuda_tensor& tensor = tensors_[next_];
      const uint64_t most = uint64_t{kMostParts - parts_} * part_;
      const uint64_t left = tensor.numel - done_;
      const uint64_t taken = left < most ? left : most;
      const uint32_t place = table_.count++;
      table_.data[place] = static_cast<const char*>(tensor.data) + done_ * ElementBytes(tensor.dtype);
      table_.numel[place] = taken;
      table_.first_part[place] = parts_;
      table_.dtype[place] = static_cast<uint8_t>(tensor.dtype);
      parts_ += static_cast<uint32_t>((taken + part_ - 1) / part_);
      elements_ += taken;
      done_ += taken;
      if (done_ == tensor.numel) {
        ++next_;
        done_ = 0;
      }
    }
    return table_.count > 0;
  }
  const TensorTable& table() const { return table_; }
  uint32_t parts() const { return parts_; }
  uint64_t elements() const { return elements_; }

 private:
  // A grid's limit is 2^31 - 1; less, so that the sums of one launch fit anywhere.
  static constexpr uint32_t kMostParts = 1u << 24;

  const mlpo_cuda_tensor* tensors_;
  const size_t count_;
  const uint32_t part_;
  size_t next_ = 0;
  uint64_t done_ = 0;  // elements of tensor `next_`
  TensorTable table_;
  uint32_t parts_ = 0;
  uint64_t elements_ = 0;
};

cudaError_t EnqueueNorm(const mlpo_cuda_tensor* tensors, size_t count, double* sums, uint64_t chunks,
                        double* sum_of_squares, int32_t* all_finite, cudaStream_t stream) {
  // Any byte but 0 says "true"; kernels only ever store 0.
  cudaError_t error = cudaMemsetAsync(all_finite, 0, sizeof *all_finite, stream);
  if (error == cudaSuccess) error = cudaMemsetAsync(all_finite, 1, 1, stream);
  uint64_t done = 0;
  for (Launches launches(tensors, count, kChunk); error == cudaSuccess && launches.Next(); done += launches.parts()) {
    if (launches.parts() > 0)
      error = LaunchChunkSums(launches.table(), launches.parts(), sums + done, all_finite, stream);
  }
  if (error == cudaSuccess) error = LaunchAddSums(sums, chunks, sum_of_squares, stream);
  return error;
}

}  // namespace
}  // namespace mlpo::cuda

using mlpo::cuda::Fail;
using mlpo::cuda::FailCuda;
using mlpo::cuda::Taken;

extern "C" {

int mlpo_cuda_pack(const mlpo_cuda_tensor* tensors, size_t count, void* out, int32_t out_dtype, double scale,
                   mlpo_cuda_stream stream) {
  if (int code = mlpo::cuda::CheckTensors(tensors, count); code != 0) return code;
  if (!mlpo::cuda::KnownType(out_dtype)) return Fail(-EINVAL, "out_dtype is %d", out_dtype);
  const uint64_t out_bytes = mlpo::cuda::ElementBytes(out_dtype);
  if (out == nullptr || reinterpret_cast<uintptr_t>(out) % out_bytes != 0)
    return Fail(-EINVAL, "out is NULL or not a multiple of its element");
  if (std::isnan(scale)) return Fail(-EINVAL, "scale is not a number");
  auto* to = static_cast<char*>(out);
  for (mlpo::cuda::Launches launches(tensors, count, mlpo::cuda::kTile); launches.Next();) {
    if (launches.parts() == 0) continue;
    const cudaError_t error = Taken(
        mlpo::cuda::LaunchPack(launches.table(), launches.parts(), to, out_dtype, static_cast<float>(scale), stream));
    if (error != cudaSuccess) return FailCuda(error, "launching the packing of %zu tensors", count);
    to += launches.elements() * out_bytes;
  }
  return 0;
}

int mlpo_cuda_norm(const mlpo_cuda_tensor* tensors, size_t count, double* sum_of_squares, int32_t* all_finite,
                   mlpo_cuda_stream stream) {
  if (int code = mlpo::cuda::CheckTensors(tensors, count); code != 0) return code;
  if (sum_of_squares == nullptr || all_finite == nullptr) return Fail(-EINVAL, "sum_of_squares or all_finite is NULL");
  uint64_t chunks = 0;
  for (size_t i = 0; i < count; ++i) chunks += (tensors[i].numel + mlpo::cuda::kChunk - 1) / mlpo::cuda::kChunk;
  void* sums = nullptr;
  cudaError_t error = Taken(cudaMallocAsync(&sums, (chunks + 1) * sizeof(double), stream));
  if (error != cudaSuccess) return FailCuda(error, "memory for %llu sums", static_cast<unsigned long long>(chunks));
  error = Taken(
      mlpo::cuda::EnqueueNorm(tensors, count, static_cast<double*>(sums), chunks, sum_of_squares, all_finite, stream));
  const cudaError_t freed = Taken(cudaFreeAsync(sums, stream));
  if (error == cudaSuccess) error = freed;
  return error == cudaSuccess ? 0 : FailCuda(error, "launching the norm of %zu tensors", count);
}

}  // extern "C"
