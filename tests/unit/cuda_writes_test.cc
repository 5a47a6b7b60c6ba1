// Gradients that are written into their slot before they are submitted, and parameters that a restore has left there,
// on the stand-in for the CUDA runtime and a scripted daemon, whose update is p -= lr * g.
#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "tests/support/cuda_updates.h"

namespace {

mlpo_cuda_piece InSlot(uint64_t first = 0, uint64_t count = kElements) {
  return {first, count, nullptr, MLPO_GRAD_VALUE, MLPO_CUDA_IN_SLOT};
}

// Submits what was written; the sum of squares that the daemon has found.
double Submit(mlpo_cuda_slot* slot, cudaStream_t stream) {
  const mlpo_cuda_piece piece = InSlot();
  mlpo_request* request = nullptr;
  const int code = mlpo_cuda_copy_grad(slot, &piece, 1, stream, &request);
  INFO(mlpo_last_error());
  REQUIRE(code == 0);
  mlpo_result result = {};
  result.struct_size = sizeof result;
  REQUIRE(End(request, &result) == 0);
  return result.sum_of_squares;
}

}  // namespace

TEST_CASE("CudaWrites.PartsOnSeveralStreamsAreSubmittedBehindAllOfThem") {
  const CleanCuda clean;
  FakeDaemon daemon;
  Connected client(daemon);
  mlpo_subgroup* subgroup = client.Register("w", kElements);
  mlpo_cuda_options options = MLPO_CUDA_OPTIONS_INIT;
  options.piece_bytes = 4096;  // so that copies are cut
  SECTION("pinned") {}
  SECTION("not pinned") { options.no_pin = 1; }
  {
    Attached cuda(client, options);
    mlpo_cuda_slot* slot = cuda.Open(subgroup);
    const Stream writes[3], submits;
    fake_cuda_delays(1000, 3);
    constexpr uint64_t kParts = 10, kEach = kElements / kParts;
    const DeviceFloats overwritten(kElements, 1000);
    for (int round = 1; round <= 10; ++round) {
      const uint64_t before = daemon.submissions();
      REQUIRE(mlpo_cuda_write_grad(slot, 0, kElements, overwritten, writes[round % 3]) == 0);
      std::vector<std::unique_ptr<DeviceFloats>> parts;
      double sum = 0;
      for (uint64_t p = 0; p < kParts; ++p) {
        const auto value = static_cast<float>(round + static_cast<int>(p));
        parts.push_back(std::make_unique<DeviceFloats>(kEach, value));
        REQUIRE(mlpo_cuda_write_grad(slot, p * kEach, kEach, *parts.back(), writes[p % 3]) == 0);
        sum += static_cast<double>(value) * value * kEach;
      }
      CHECK(daemon.submissions() == before);  // nothing is submitted by itself
      CHECK(Submit(slot, submits) == sum);
      CHECK(End(Update(subgroup)) == 0);
    }
  }
  mlpo_subgroup_free(subgroup);
}

TEST_CASE("CudaWrites.WhatIsWrittenCanBeReadAndAddedTo") {
  const CleanCuda clean;
  FakeDaemon daemon;
  Connected client(daemon);
  mlpo_subgroup* subgroup = client.Register("w", kElements);
  {
    Attached cuda(client);
    mlpo_cuda_slot* slot = cuda.Open(subgroup);
    const Stream stream, other;
    const DeviceFloats first(kElements, 3);
    DeviceFloats held(kElements, 0);
    std::atomic<bool> go{false};
    Hold(stream, &go);
    REQUIRE(mlpo_cuda_write_grad(slot, 0, kElements, first, stream) == 0);
    REQUIRE(mlpo_cuda_read_grad(slot, 0, kElements, held, other) == 0);
    CHECK_FALSE(Within(0.05, [&] { return other.Done(); }));
    CHECK(mlpo_cuda_slot_close(slot, kSecond / 50) == -ETIMEDOUT);  // what was written is on its way
    fake_cuda_enqueue(
        other,
        [](void* at) {
          auto* values = static_cast<float*>(at);
          std::for_each(values, values + kElements, [](float& value) { value += 4; });
        },
        static_cast<float*>(held));
    REQUIRE(mlpo_cuda_write_grad(slot, 0, kElements, held, other) == 0);
    go = true;
    CHECK(Submit(slot, stream) == 49.0 * kElements);
    CHECK(held.All(7));
  }
  mlpo_subgroup_free(subgroup);
}

TEST_CASE("CudaWrites.AWriteFollowsWhatReadsTheParametersAndLosesThem") {
  const CleanCuda clean;
  Updates updates;
  FakeDaemon daemon(Scripted(&updates));
  Connected client(daemon);
  mlpo_subgroup* subgroup = client.Register("w", kElements);
  {
    Attached cuda(client);
    mlpo_cuda_slot* slot = cuda.Open(subgroup);
    const Stream stream, slow;
    Gradient(slot, stream);
    CHECK(End(Update(subgroup)) == 0);
    std::atomic<bool> go{false};
    Hold(slow, &go);
    DeviceFloats param(kElements, 7), late(kElements, 7);
    const DeviceFloats grad(kElements, 5);
    REQUIRE(mlpo_cuda_copy_param(slot, 0, kElements, param, slow, 0) == 0);
    REQUIRE(mlpo_cuda_write_grad(slot, 0, kElements, grad, stream) == 0);
    CHECK_FALSE(Within(0.05, [&] { return stream.Done(); }));
    // Nobody takes the gradient for parameters, submitted or not.
    CHECK(Info(subgroup).holds_param == 0);
    CHECK(mlpo_cuda_copy_param(slot, 0, kElements, late, slow, 0) == -ENODATA);
    go = true;
    REQUIRE(cudaStreamSynchronize(slow) == cudaSuccess);
    CHECK(param.All(-1));
    CHECK(Submit(slot, slow) == 25.0 * kElements);
    updates.shut = true;
    mlpo_request* update = Update(subgroup);
    CHECK(mlpo_cuda_write_grad(slot, 0, kElements, grad, stream) == MLPO_ERR_SLOT_BUSY);
    CHECK(mlpo_cuda_read_grad(slot, 0, kElements, late, stream) == MLPO_ERR_SLOT_BUSY);
    REQUIRE(mlpo_cuda_copy_param(slot, 0, kElements, param, stream, kSecond) == 0);
    updates.shut = false;
    CHECK(End(update) == 0);
    REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
    CHECK(param.All(-6));
    CHECK(late.All(7));
  }
  mlpo_subgroup_free(subgroup);
}

TEST_CASE("CudaWrites.WhatARestoreLeavesInTheSlotAreParameters") {
  const CleanCuda clean;
  std::atomic<bool> fails{false};
  auto script = std::make_shared<Script>();
  script->welcome = [](mlpo_welcome* welcome) { welcome->features |= MLPO_FEATURE_SNAPSHOT; };
  script->answer = [&fails](const mlpo_submission& submission, const mlpo_hyper&) -> std::optional<FakeAnswer> {
    if (submission.op != MLPO_OP_RESTORE || !fails) return std::nullopt;
    FakeAnswer answer;
    answer.completion.status = MLPO_ERR_IO;
    return answer;
  };
  FakeDaemon daemon(script);
  Connected client(daemon);
  mlpo_subgroup* subgroup = client.Register("w", kElements);
  {
    Attached cuda(client);
    mlpo_cuda_slot* slot = cuda.Open(subgroup);
    const Stream stream;
    const auto restore = [&] {
      mlpo_request* request = nullptr;
      REQUIRE(mlpo_submit_restore(subgroup, 1, kSecond, &request) == 0);
      return End(request);
    };
    DeviceFloats param(kElements, 7);
    const DeviceFloats grad(kElements, 5);
    CHECK(mlpo_cuda_copy_param(slot, 0, kElements, param, stream, 0) == -ENODATA);
    auto* in_slot = static_cast<float*>(Info(subgroup).param);
    std::fill(in_slot, in_slot + kElements, 9.0f);  // the daemon's work
    CHECK(restore() == 0);
    REQUIRE(mlpo_cuda_copy_param(slot, 0, kElements, param, stream, 0) == 0);
    REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
    CHECK(param.All(9));
    REQUIRE(mlpo_cuda_write_grad(slot, 0, kElements, grad, stream) == 0);
    CHECK(mlpo_cuda_copy_param(slot, 0, kElements, param, stream, 0) == -ENODATA);
    REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
    CHECK(restore() == 0);
    fails = true;
    CHECK(restore() == MLPO_ERR_IO);
    CHECK(mlpo_cuda_copy_param(slot, 0, kElements, param, stream, 0) == -ENODATA);
  }
  mlpo_subgroup_free(subgroup);
}

TEST_CASE("CudaWrites.WrongUseAndFailuresAreNamedAndLeaveNothingHalfDone") {
  const CleanCuda clean;
  FakeDaemon daemon;
  Connected client(daemon);
  mlpo_subgroup* subgroup = client.Register("w", kElements);
  {
    Attached cuda(client);
    mlpo_cuda_slot* slot = cuda.Open(subgroup);
    const Stream stream;
    DeviceFloats grad(kElements, 3);
    mlpo_request* request = nullptr;
    mlpo_cuda_piece piece = InSlot();
    piece.device = grad;
    CHECK(mlpo_cuda_copy_grad(slot, &piece, 1, stream, &request) == -EINVAL);
    piece = InSlot();
    piece.kind = MLPO_GRAD_ZERO;
    CHECK(mlpo_cuda_copy_grad(slot, &piece, 1, stream, &request) == -EINVAL);
    CHECK(LastErrorHas("no VALUE"));
    piece = InSlot();
    piece.flags = 2;
    CHECK(mlpo_cuda_copy_grad(slot, &piece, 1, stream, &request) == -EINVAL);
    CHECK(LastErrorHas("flags is 2"));
    CHECK(request == nullptr);
    CHECK(mlpo_cuda_write_grad(slot, 1, kElements, grad, stream) == -EINVAL);
    CHECK(LastErrorHas("of a subgroup of"));
    CHECK(mlpo_cuda_write_grad(slot, 0, kElements, nullptr, stream) == -EINVAL);
    CHECK(mlpo_cuda_read_grad(slot, kElements, 1, grad, stream) == -EINVAL);
    for (const char* function : {"cudaMemcpyAsync", "cudaEventRecord", "cudaStreamIsCapturing"}) {
      fake_cuda_fail(function, 1, cudaErrorMemoryAllocation);
      CHECK(mlpo_cuda_write_grad(slot, 0, kElements, grad, stream) == -ENOMEM);
      CHECK(LastErrorHas("cudaErrorMemoryAllocation"));
      CHECK(fake_cuda_pending_error() == 0);
    }
    // The event of the write before.
    REQUIRE(mlpo_cuda_write_grad(slot, 0, kElements, grad, stream) == 0);
    fake_cuda_fail("cudaStreamWaitEvent", 1, cudaErrorMemoryAllocation);
    CHECK(mlpo_cuda_read_grad(slot, 0, kElements, grad, stream) == -ENOMEM);
    fake_cuda_fail("cudaStreamWaitEvent", 1, cudaErrorMemoryAllocation);
    CHECK(mlpo_cuda_write_grad(slot, 0, kElements, grad, stream) == -ENOMEM);
    CHECK(Submit(slot, stream) == 9.0 * kElements);
    CHECK(End(Update(subgroup)) == 0);
  }
  mlpo_subgroup_free(subgroup);
}
