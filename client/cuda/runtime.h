// What the CUDA side asks of the CUDA runtime beyond plain calls: errors, the device, and the driver's stream waits.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace mlpo::cuda {

// Makes the text this thread's mlpo_last_error() and returns `code`.
int Fail(int code, const char* format, ...) __attribute__((format(printf, 2, 3)));
// The same with CUDA's name and text of `error` at the end; returns what it is as a code.
int FailCuda(cudaError_t error, const char* format, ...) __attribute__((format(printf, 2, 3)));

// Takes the error of a call of ours out of the runtime, so that the program does not find it as its own. An error that
// the program left there before is not touched unless ours has replaced it ("not ready" does in some versions).
inline cudaError_t Taken(cudaError_t error) {
  if (error != cudaSuccess && cudaPeekAtLastError() == error) cudaGetLastError();
  return error;
}

// Whether an event has passed: cudaSuccess, cudaErrorNotReady, or the error that it ended with. A refusal because of a
// graph that is being captured is no answer: not ready.
cudaError_t Passed(cudaEvent_t event);

// Makes a device the calling thread's for a scope, and lets its calls be, whatever graph another thread captures: CUDA
// would refuse them and invalidate that capture. Nothing that is called here belongs into a graph.
class OnDevice {
 public:
  explicit OnDevice(int device);
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  ~OnDevice();
  // cudaSuccess, or why the device could not be chosen.
  cudaError_t error() const { return error_; }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;  // exchanged for the thread's, if so
  bool exchanged_ = false;
  int before_ = -1;  // to go back to, -1: nothing to do
  cudaError_t error_ = cudaSuccess;
};

// cuStreamWaitValue64, which the runtime does not offer. Constant after Find().
class StreamWait {
 public:
  // True if streams of the device can wait for 64-bit words in mapped host memory.
  bool Find(int device);
  // Lets the stream wait until *word >= value, as signed 64-bit distance. False if the driver refuses.
  bool Enqueue(cudaStream_t stream, uintptr_t word, uint64_t value) const;

 private:
  void* function_ = nullptr;
};

}  // namespace mlpo::cuda
