// Short forms for tests of copies between slots and streams: a scripted daemon, whose update is p -= lr * g.
#pragma once

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <thread>

#include "proto/command.h"
#include "tests/support/cuda_fixture.h"

inline constexpr int64_t kSecond = 1'000'000'000;
inline constexpr uint64_t kElements = 5000;
using Script = FakeDaemon::Script;

inline bool LastErrorHas(const char* text) { return std::strstr(mlpo_last_error(), text) != nullptr; }

// What the daemon does to updates, set while it runs.
struct Updates {
  std::atomic<int> status{0};
  std::atomic<int> delay_ms{0};
  std::atomic<bool> shut{false};  // none goes on until it is open
  std::atomic<bool> hold{false};
};

inline std::shared_ptr<Script> Scripted(Updates* updates) {
  auto script = std::make_shared<Script>();
  script->answer = [updates](const mlpo_submission& submission, const mlpo_hyper&) -> std::optional<FakeAnswer> {
    if (submission.op != MLPO_OP_UPDATE) return std::nullopt;
    std::this_thread::sleep_for(std::chrono::milliseconds(updates->delay_ms.load()));
    while (updates->shut.load()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (updates->status == 0 && !updates->hold) return std::nullopt;
    FakeAnswer answer;
    answer.completion.status = updates->status;
    answer.hold = updates->hold;
    return answer;
  };
  return script;
}

inline mlpo_cuda_piece Whole(const float* device) { return {0, kElements, device, MLPO_GRAD_VALUE, 0}; }

inline mlpo_request* CopyGrad(mlpo_cuda_slot* slot, const float* device, cudaStream_t stream) {
  const mlpo_cuda_piece piece = Whole(device);
  mlpo_request* request = nullptr;
  const int code = mlpo_cuda_copy_grad(slot, &piece, 1, stream, &request);
  INFO(mlpo_last_error());
  REQUIRE(code == 0);
  return request;
}

inline mlpo_request* Update(mlpo_subgroup* subgroup) {
  mlpo_update_options options = MLPO_UPDATE_OPTIONS_INIT;
  options.lr = 1;
  mlpo_request* request = nullptr;
  const int code = mlpo_submit_update(subgroup, &options, 10 * kSecond, &request);
  INFO(mlpo_last_error());
  REQUIRE(code == 0);
  return request;
}

inline int End(mlpo_request* request, mlpo_result* result = nullptr) {
  const int code = mlpo_request_wait(request, 20 * kSecond, result);
  mlpo_request_free(request);
  return code;
}

// The stream goes on when `go` is set.
inline void Hold(cudaStream_t stream, std::atomic<bool>* go) {
  fake_cuda_enqueue(
      stream,
      [](void* flag) {
        while (!static_cast<std::atomic<bool>*>(flag)->load())
          std::this_thread::sleep_for(std::chrono::microseconds(50));
      },
      go);
}

// A gradient that is in, of ones.
inline void Gradient(mlpo_cuda_slot* slot, cudaStream_t stream, float value = 1) {
  const DeviceFloats grad(kElements, value);
  REQUIRE(End(CopyGrad(slot, grad, stream)) == 0);
}
