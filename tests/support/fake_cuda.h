// A stand-in for the CUDA runtime (libcudart.so.13) and the few functions of the driver that the CUDA side asks for, to
// test its host logic without a GPU. "Device memory" is memory of this process; a stream is a thread that does what was
// enqueued, in order, with a random delay before each thing; kernels are host functions (cuda_kernels.h).
//
// It refuses what CUDA refuses, and counts as violations what honest code never does: calls from a stream's call-back,
// registering twice, unregistering what is not registered, a wait for a misaligned word or one in memory that the
// device cannot see, copies that cross from one registration to the next, freeing memory or registrations that a copy
// in flight still needs. While a graph is captured globally it refuses, and spoils the capture by, what threads that
// are not relaxed (cudaThreadExchangeStreamCaptureMode) ask of events and register. A copy with host memory that is not
// registered blocks the caller, as CUDA's do.
//
// These functions are the library's own; all are thread-safe.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

extern "C" {

// Up to `most_us` microseconds before each thing that a stream does; 0: none.
void fake_cuda_delays(uint32_t most_us, uint64_t seed);
// The `nth` call from now on (1: the next) of a function, named as in the API, fails with `error`; 0 ends that.
void fake_cuda_fail(const char* function, int nth, int error);
// Whether streams can wait for words (the attribute of the device). On at first.
void fake_cuda_offer_waits(int offered);
// cudaStreamWaitEvent, also while that is made to do nothing.
void fake_cuda_await_event(cudaStream_t stream, cudaEvent_t event);
// For a test of a test: cudaStreamWaitEvent does nothing.
void fake_cuda_ignore_events(int ignored);
// From now on the device has failed: nothing enqueued is done any more, no call-back runs, every call says `error`.
void fake_cuda_break(int error);
// As new: nothing is broken or fails, waits are offered, no delays, no violations. Streams and memory stay.
void fake_cuda_reset(void);

// Has `function` called by the stream, as a kernel would be.
void fake_cuda_enqueue(cudaStream_t stream, void (*function)(void*), void* argument);

int fake_cuda_violations(void);
const char* fake_cuda_last_violation(void);  // "" if none; valid until the next
uint64_t fake_cuda_registered_bytes(void);
uint64_t fake_cuda_calls(const char* function);
// What the program left to be found by cudaGetLastError, of this thread.
int fake_cuda_pending_error(void);

}  // extern "C"
