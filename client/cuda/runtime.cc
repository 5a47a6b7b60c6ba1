#include "client/cuda/runtime.h"

#include <cuda.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "mlpo/client.h"

namespace mlpo::cuda {
namespace {

// The oldest CUDA whose cuStreamWaitValue64 works without a driver setting.
constexpr unsigned int kDriverApi = 12000;

void* DriverFunction(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  if (Taken(cudaGetDriverEntryPointByVersion(name, &function, kDriverApi, cudaEnableDefault, &found)) != cudaSuccess)
    return nullptr;
  return found == cudaDriverEntryPointSuccess ? function : nullptr;
}

int CodeOf(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation:
      return -ENOMEM;
    case cudaErrorInvalidValue:
    case cudaErrorInvalidResourceHandle:
      return -EINVAL;
    case cudaErrorNotSupported:
      return -EOPNOTSUPP;
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorInvalidDevice:
      return -ENODEV;
    case cudaErrorNotPermitted:
      return -EPERM;
    default:
      return -EIO;
  }
}

}  // namespace

int Fail(int code, const char* format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  return mlpo_fail(code, text);
}

int FailCuda(cudaError_t error, const char* format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  return Fail(CodeOf(error), "%s: %s: %s", text, cudaGetErrorName(error), cudaGetErrorString(error));
}

cudaError_t Passed(cudaEvent_t event) {
  const cudaError_t error = Taken(cudaEventQuery(event));
  const bool refused = error == cudaErrorStreamCaptureUnsupported || error == cudaErrorStreamCaptureImplicit;
  return refused ? cudaErrorNotReady : error;
}

OnDevice::OnDevice(int device) {
  error_ = Taken(cudaThreadExchangeStreamCaptureMode(&mode_));
  if (error_ != cudaSuccess) return;
  exchanged_ = true;
  int now = -1;
  error_ = Taken(cudaGetDevice(&now));
  if (error_ != cudaSuccess || now == device) return;
  error_ = Taken(cudaSetDevice(device));
  if (error_ == cudaSuccess) before_ = now;
}

OnDevice::~OnDevice() {
  // They were the thread's a moment ago; a failure here means that CUDA has come to its end.
  if (before_ >= 0) Taken(cudaSetDevice(before_));
  if (exchanged_) Taken(cudaThreadExchangeStreamCaptureMode(&mode_));
}

bool StreamWait::Find(int device) {
  const auto attribute = reinterpret_cast<decltype(&cuDeviceGetAttribute)>(DriverFunction("cuDeviceGetAttribute"));
  int offered = 0;
  if (attribute == nullptr ||
      attribute(&offered, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, device) != CUDA_SUCCESS || offered == 0)
    return false;
  function_ = DriverFunction("cuStreamWaitValue64");
  return function_ != nullptr;
}

bool StreamWait::Enqueue(cudaStream_t stream, uintptr_t word, uint64_t value) const {
  const auto wait = reinterpret_cast<decltype(&cuStreamWaitValue64)>(function_);
  return wait(stream, word, value, CU_STREAM_WAIT_VALUE_GEQ) == CUDA_SUCCESS;
}

}  // namespace mlpo::cuda
