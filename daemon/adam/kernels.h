// Kernels: the functions of kernel.h for one instruction set, as a table. Private to this folder.
//
// Tables are constant and live for ever. The scalar reference is one of them, so it can be forced like any other.
#pragma once

#include <cstddef>
#include <vector>

#include "daemon/adam/kernel.h"

namespace mlpo {

struct Kernels {
  const char* name;  // as SetTarget takes it
  void (*adam)(const AdamScalars& scalars, const AdamRange& range);
  // Adds to lane[0..MLPO_STAT_LANES); position is that of the first element in its chunk.
  void (*add_squares)(const void* grad, mlpo_dtype dtype, size_t position, size_t n, double* lane);
  void (*round_to)(mlpo_dtype dtype, const float* from, void* to, size_t n);
  void (*widen_from)(mlpo_dtype dtype, const void* from, float* to, size_t n);
};

const Kernels& ScalarKernels();
// Those that were compiled and that this CPU can run, best first; without the scalar one.
std::vector<const Kernels*> VectorKernels();

}  // namespace mlpo
