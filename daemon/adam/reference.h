// The scalar reference: kernel.h's arithmetic in plain loops, one operation a line. It is what the vector kernels must
// equal to the bit, and what runs as target "scalar" or where the CPU has no vector set that we know.
//
// Buffers may have any alignment. Threads: all functions are pure.
#pragma once

#include <cstddef>
#include <cstdint>

#include "daemon/adam/kernel.h"

namespace mlpo::reference {

float FromBfloat16(uint16_t bits);  // exact
float FromFloat16(uint16_t bits);   // exact; NaN keeps sign and payload
uint16_t ToBfloat16(float value);   // to nearest even; NaN is quieted and keeps sign and upper payload
uint16_t ToFloat16(float value);    // the same

// Element `index` of an array of `dtype` at `array`.
float LoadElement(const void* array, mlpo_dtype dtype, size_t index);
void StoreElement(void* array, mlpo_dtype dtype, size_t index, float value);

void Adam(const AdamScalars& scalars, const AdamRange& range);
void AddSquares(const void* grad, mlpo_dtype dtype, size_t position, size_t n, double* lane);
void RoundTo(mlpo_dtype dtype, const float* from, void* to, size_t n);
void WidenFrom(mlpo_dtype dtype, const void* from, float* to, size_t n);

}  // namespace mlpo::reference
