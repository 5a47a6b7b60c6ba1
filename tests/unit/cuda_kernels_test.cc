// What mlpo_cuda_pack and mlpo_cuda_norm launch, on the stand-in for the CUDA runtime, whose kernels are the scalar
// reference: lists of tensors, how they are cut into launches, wrong arguments. The kernels' own arithmetic needs a
// GPU: tests/device.
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "tests/support/cuda_fixture.h"
#include "tests/support/cuda_kernels.h"

namespace {

struct Tensors {
  std::vector<std::vector<float>> memory;
  std::vector<mlpo_cuda_tensor> list;
  uint64_t elements = 0;

  void Add(uint64_t numel, int32_t dtype, std::mt19937& random) {
    std::normal_distribution<float> values;
    memory.emplace_back(numel + 1);
    for (float& value : memory.back()) value = values(random);
    // As bits of a 16-bit type: any finite pattern.
    if (dtype != MLPO_DTYPE_FLOAT32) {
      auto* bits = reinterpret_cast<uint16_t*>(memory.back().data());
      for (uint64_t i = 0; i < numel; ++i) bits[i] = static_cast<uint16_t>(random() & 0xbbff);
    }
    list.push_back({memory.back().data(), numel, dtype, 0});
    elements += numel;
  }
};

}  // namespace

TEST_CASE("CudaKernels.ListsAreCutIntoLaunchesAndEveryElementIsThereOnce") {
  const CleanCuda clean;
  std::mt19937 random(5);
  Tensors tensors;
  size_t launches = 1;
  SECTION("none") {}
  SECTION("one") { tensors.Add(70'001, MLPO_DTYPE_FLOAT32, random); }
  SECTION("more than a launch takes, some of them empty, of all types") {
    for (uint64_t i = 0; i < 300; ++i) tensors.Add(i % 7 == 0 ? 0 : i * 31, static_cast<int32_t>(i % 3) + 1, random);
    launches = 3;
  }
  if (tensors.list.empty()) launches = 0;
  Stream stream;
  for (const int32_t dtype : {MLPO_DTYPE_FLOAT32, MLPO_DTYPE_FLOAT16, MLPO_DTYPE_BFLOAT16}) {
    std::vector<float> out(tensors.elements + 1, 77), expected(tensors.elements + 1, 77);
    const uint64_t before = fake_cuda_calls("cudaLaunchKernel");
    REQUIRE(mlpo_cuda_pack(tensors.list.data(), tensors.list.size(), out.data(), dtype, 1 / 3.0, stream) == 0);
    CHECK(fake_cuda_calls("cudaLaunchKernel") - before == launches);
    REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
    ReferencePack(tensors.list, expected.data(), dtype, 1 / 3.0);
    CHECK(std::memcmp(out.data(), expected.data(), out.size() * sizeof(float)) == 0);
  }
  double sum = -1, expected = -1;
  int32_t finite = -1;
  bool all_finite = false;
  REQUIRE(mlpo_cuda_norm(tensors.list.data(), tensors.list.size(), &sum, &finite, stream) == 0);
  REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
  ReferenceNorm(tensors.list, &expected, &all_finite);
  CHECK(sum == expected);
  CHECK(finite == 1);
  if (tensors.elements == 0) return;
  tensors.memory.back()[0] = INFINITY;  // the last has elements: 299 % 7 != 0
  if (tensors.list.back().dtype != MLPO_DTYPE_FLOAT32)
    reinterpret_cast<uint16_t*>(tensors.memory.back().data())[0] = 0x7f80;
  REQUIRE(mlpo_cuda_norm(tensors.list.data(), tensors.list.size(), &sum, &finite, stream) == 0);
  REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
  CHECK(finite == 0);
}

TEST_CASE("CudaKernels.WrongArgumentsAreNamed") {
  const CleanCuda clean;
  Stream stream;
  float memory[4] = {};
  mlpo_cuda_tensor tensor = {memory, 4, MLPO_DTYPE_FLOAT32, 0};
  double sum;
  int32_t finite;
  CHECK(mlpo_cuda_pack(&tensor, 1, nullptr, MLPO_DTYPE_FLOAT32, 1, stream) == -EINVAL);
  CHECK(mlpo_cuda_pack(&tensor, 1, memory, 4, 1, stream) == -EINVAL);
  CHECK(mlpo_cuda_pack(&tensor, 1, memory, MLPO_DTYPE_FLOAT32, NAN, stream) == -EINVAL);
  CHECK(mlpo_cuda_pack(nullptr, 1, memory, MLPO_DTYPE_FLOAT32, 1, stream) == -EINVAL);
  tensor.data = reinterpret_cast<char*>(memory) + 2;
  CHECK(mlpo_cuda_norm(&tensor, 1, &sum, &finite, stream) == -EINVAL);
  tensor.data = nullptr;
  CHECK(mlpo_cuda_norm(&tensor, 1, &sum, &finite, stream) == -EINVAL);
  tensor = {memory, 4, 0, 0};
  CHECK(mlpo_cuda_norm(&tensor, 1, &sum, &finite, stream) == -EINVAL);
  tensor.dtype = MLPO_DTYPE_FLOAT32;
  CHECK(mlpo_cuda_norm(&tensor, 1, nullptr, &finite, stream) == -EINVAL);
  for (const char* function : {"cudaMalloc", "cudaMemsetAsync", "cudaLaunchKernel", "cudaFreeAsync"}) {
    fake_cuda_fail(function, 1, cudaErrorMemoryAllocation);
    CHECK(mlpo_cuda_norm(&tensor, 1, &sum, &finite, stream) == -ENOMEM);
    CHECK(fake_cuda_pending_error() == 0);
  }
}
