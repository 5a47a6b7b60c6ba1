// The Adam kernel: gradient upcast, optimizer step and rounding of the parameter in one pass over memory.
//
// Arithmetic (each operation one rounded FP32 operation, nothing contracted):
//     g = f32(grad) * grad_scale
//     AdamW: p = p * decay                 Adam: g = g + decay * p
//     m = m + (g - m) * one_minus_beta1
//     v = beta2 * v + (one_minus_beta2 * g) * g
//     p = p - step_size * (m / (sqrt(v) / sqrt_bc2 + eps))
// The bits are the same for every instruction set, alignment and cut of the range; a NaN that an update makes is
// always 7FC00000. Compiled for all targets with Highway, chosen at run time; reference.h has the scalar reference that
// tests compare with. Callers run with FTZ and DAZ off and round to nearest, as WorkerPool's threads do.
//
// Threads: all functions are thread-safe; SetTarget is called once, before others. AdamUpdate, AccumulateStats,
// ReduceLanes, RoundTo and WidenFrom do not allocate.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "daemon/base/status.h"
#include "daemon/types/element_bytes.h"
#include "proto/abi.h"
#include "proto/command.h"
#include "proto/tensor.h"

namespace mlpo {

struct AdamScalars {
  float grad_scale = 1;
  float decay = 1;  // AdamW: 1 - lr*wd; Adam: wd
  float one_minus_beta1 = 0;
  float beta2 = 0;
  float one_minus_beta2 = 0;
  float step_size = 0;  // lr / bc1
  float sqrt_bc2 = 1;
  float eps = 0;
  bool l2 = false;  // Adam
};

// Formed in FP64 from the FP64 hyper-parameters and rounded once. `step` counts from 1.
AdamScalars MakeScalars(const mlpo_hyper& hyper, int64_t step);

// One range of a block. p, m, v: FP32, updated in place. grad: n elements of grad_dtype, or nullptr for a gradient of
// 0. param: n elements of dtype, gets p rounded to nearest even (NaN stays NaN). grad and param are the same place
// (then their elements have the same size) or do not overlap; no alignment beyond the elements' own is needed.
struct AdamRange {
  float* p = nullptr;
  float* m = nullptr;
  float* v = nullptr;
  const void* grad = nullptr;
  void* param = nullptr;
  size_t n = 0;
  mlpo_dtype grad_dtype = MLPO_FLOAT32;
  mlpo_dtype dtype = MLPO_FLOAT32;
};
void AdamUpdate(const AdamScalars& scalars, const AdamRange& range);

// Sum of squares and finiteness of a gradient, in chunks of MLPO_STAT_CHUNK_ELEMENTS: lane i of a chunk adds the
// squares of elements i, i + 16, i + 32, ... in this order. A square of an FP32 or narrower value is exact in FP64:
// only the additions round.
struct StatLanes {
  double lane[MLPO_STAT_LANES] = {};
  bool all_finite = true;
};
// Adds elements [position, position + n) of a chunk, whose bytes begin at grad. Calls for one chunk come in ascending
// order; the result does not depend on how the chunk is cut into calls.
void AccumulateStats(const void* grad, mlpo_dtype dtype, size_t position, size_t n, StatLanes* lanes);
// ((l0+l8)+(l4+l12)) + ...: a fixed tree: lanes i and i+8, then i and i+4, i and i+2, i and i+1.
double ReduceLanes(const StatLanes& lanes);

// FP32 to dtype, to nearest even, NaN stays NaN (quieted, sign and upper payload kept).
void RoundTo(mlpo_dtype dtype, const float* from, void* to, size_t n);
// The other way, exact; whether a NaN is quieted on the way is the instruction set's.
void WidenFrom(mlpo_dtype dtype, const void* from, float* to, size_t n);

// auto, scalar, avx2, avx512, or another name that RunnableTargets gives. ENOTSUP, naming what the CPU has, if it lacks
// the set; EINVAL if there is no such name.
Status SetTarget(const std::string& target);
std::string ActiveTarget();                  // scalar, sse4, avx2, avx512, ...
std::vector<std::string> RunnableTargets();  // of this build on this CPU, best first; the last is scalar

}  // namespace mlpo
