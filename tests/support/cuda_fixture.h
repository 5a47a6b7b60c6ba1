// Short forms for tests of the CUDA side on the stand-in runtime.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "mlpo/cuda.h"
#include "tests/support/catch.h"
#include "tests/support/client_fixture.h"
#include "tests/support/fake_cuda.h"

inline bool Within(double seconds, const std::function<bool()>& done) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (!done()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

// Checks at its end that nothing happened that CUDA forbids, and that no error is left for the program to find.
class CleanCuda {
 public:
  CleanCuda() { fake_cuda_reset(); }
  ~CleanCuda() {
    INFO(fake_cuda_last_violation());
    CHECK(fake_cuda_violations() == 0);
    CHECK(fake_cuda_pending_error() == 0);
    CHECK(fake_cuda_registered_bytes() == 0);
    fake_cuda_reset();
  }
};

class Stream {
 public:
  Stream() { REQUIRE(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking) == cudaSuccess); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() { CHECK(cudaStreamDestroy(stream_) == cudaSuccess); }
  operator cudaStream_t() const { return stream_; }
  bool Done() const { return cudaStreamQuery(stream_) == cudaSuccess; }

 private:
  cudaStream_t stream_ = nullptr;
};

// Floats in "device memory".
class DeviceFloats {
 public:
  explicit DeviceFloats(size_t count, float value = 0) : count_(count) {
    void* at = nullptr;
    REQUIRE(cudaMalloc(&at, count * sizeof(float)) == cudaSuccess);
    data_ = static_cast<float*>(at);
    for (size_t i = 0; i < count; ++i) data_[i] = value;
  }
  DeviceFloats(const DeviceFloats&) = delete;
  DeviceFloats& operator=(const DeviceFloats&) = delete;
  ~DeviceFloats() { CHECK(cudaFree(data_) == cudaSuccess); }
  operator float*() const { return data_; }
  bool All(float value) const {
    for (size_t i = 0; i < count_; ++i) {
      if (data_[i] != value) return false;
    }
    return true;
  }

 private:
  const size_t count_;
  float* data_ = nullptr;
};

// A client's CUDA side for the length of a scope.
class Attached {
 public:
  explicit Attached(mlpo_client* client, mlpo_cuda_options options = MLPO_CUDA_OPTIONS_INIT) {
    const int code = mlpo_cuda_attach(client, &options, &cuda_);
    INFO(mlpo_last_error());
    REQUIRE(code == 0);
  }
  Attached(const Attached&) = delete;
  Attached& operator=(const Attached&) = delete;
  ~Attached() {
    for (mlpo_cuda_slot* slot : slots_) CHECK(mlpo_cuda_slot_close(slot, 10'000'000'000) == 0);
    CHECK(mlpo_cuda_detach(cuda_) == 0);
  }
  operator mlpo_cuda*() const { return cuda_; }
  mlpo_cuda_slot* Open(mlpo_subgroup* subgroup) {
    mlpo_cuda_slot* slot = nullptr;
    REQUIRE(mlpo_cuda_slot_open(cuda_, subgroup, &slot) == 0);
    slots_.push_back(slot);
    return slot;
  }
  void Close(mlpo_cuda_slot* slot) {
    CHECK(mlpo_cuda_slot_close(slot, 10'000'000'000) == 0);
    std::erase(slots_, slot);
  }
  struct mlpo_cuda_info Info() const {
    struct mlpo_cuda_info info = {};
    info.struct_size = sizeof info;
    REQUIRE(mlpo_cuda_info(cuda_, &info) == 0);
    return info;
  }

 private:
  mlpo_cuda* cuda_ = nullptr;
  std::vector<mlpo_cuda_slot*> slots_;
};
