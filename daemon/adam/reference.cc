#include "daemon/adam/reference.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "daemon/adam/kernels.h"

#ifdef __FAST_MATH__
#error "The optimizer's arithmetic is defined to the bit: compile without -ffast-math"
#endif

namespace mlpo::reference {
namespace {

constexpr uint32_t kInfinity32 = 0x7f800000;

// A value / 2^shift of an unsigned integer, to nearest even. 0 < shift < 32.
uint32_t ShiftRightToEven(uint32_t value, int shift) {
  const uint32_t quotient = value >> shift;
  const uint32_t rest = value & ((1u << shift) - 1);
  const uint32_t half = 1u << (shift - 1);
  return quotient + (rest > half || (rest == half && (quotient & 1)));
}

// State and parameters hold one NaN only, since which operand's NaN an addition passes on is up to the compiler.
float OneNan(float value) { return std::isnan(value) ? std::numeric_limits<float>::quiet_NaN() : value; }

float LoadFloat(const float* array, size_t index) { return LoadElement(array, MLPO_FLOAT32, index); }

}  // namespace

float FromBfloat16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

float FromFloat16(uint16_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1f;
  const uint32_t mantissa = bits & 0x3ff;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | kInfinity32 | mantissa << 13);
  if (exponent != 0) return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

uint16_t ToBfloat16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>(ShiftRightToEven(bits, 16));  // a carry out of the mantissa is the next binade, or inf
}

uint16_t ToFloat16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  const int exponent = static_cast<int>(magnitude >> 23) - 127;
  uint32_t half;
  if (magnitude > kInfinity32) {
    half = 0x7e00 | ((magnitude >> 13) & 0x3ff);
  } else if (exponent > 15) {
    half = 0x7c00;
  } else if (exponent >= -14) {
    half = ShiftRightToEven(magnitude - (112u << 23), 13);  // 65520 and above carry into inf
  } else if (exponent >= -25) {                             // subnormal, in units of 2^-24
    half = ShiftRightToEven((magnitude & 0x7fffff) | 0x800000, -1 - exponent);
  } else {
    half = 0;
  }
  return static_cast<uint16_t>(sign | half);
}

float LoadElement(const void* array, mlpo_dtype dtype, size_t index) {
  const auto* at = static_cast<const std::byte*>(array) + index * ElementBytes(dtype);
  if (dtype == MLPO_FLOAT32) {
    float value;
    std::memcpy(&value, at, sizeof value);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, at, sizeof bits);
  return dtype == MLPO_BFLOAT16 ? FromBfloat16(bits) : FromFloat16(bits);
}

void StoreElement(void* array, mlpo_dtype dtype, size_t index, float value) {
  auto* at = static_cast<std::byte*>(array) + index * ElementBytes(dtype);
  if (dtype == MLPO_FLOAT32) {
    std::memcpy(at, &value, sizeof value);
  } else {
    const uint16_t bits = dtype == MLPO_BFLOAT16 ? ToBfloat16(value) : ToFloat16(value);
    std::memcpy(at, &bits, sizeof bits);
  }
}

void Adam(const AdamScalars& s, const AdamRange& range) {
  for (size_t i = 0; i < range.n; ++i) {
    float p = LoadFloat(range.p, i);
    float m = LoadFloat(range.m, i);
    float v = LoadFloat(range.v, i);
    float g = range.grad == nullptr ? 0.0f : LoadElement(range.grad, range.grad_dtype, i);
    g = g * s.grad_scale;
    if (s.l2) {
      const float decayed = s.decay * p;
      g = g + decayed;
    } else {
      p = p * s.decay;
    }
    const float difference = g - m;
    const float toward = difference * s.one_minus_beta1;
    m = OneNan(m + toward);
    const float kept = s.beta2 * v;
    const float scaled = s.one_minus_beta2 * g;
    const float square = scaled * g;
    v = OneNan(kept + square);
    const float root = std::sqrt(v);
    const float corrected = root / s.sqrt_bc2;
    const float denominator = corrected + s.eps;
    const float ratio = m / denominator;
    const float change = s.step_size * ratio;
    p = OneNan(p - change);
    StoreElement(range.p, MLPO_FLOAT32, i, p);
    StoreElement(range.m, MLPO_FLOAT32, i, m);
    StoreElement(range.v, MLPO_FLOAT32, i, v);
    StoreElement(range.param, range.dtype, i, p);
  }
}

void AddSquares(const void* grad, mlpo_dtype dtype, size_t position, size_t n, double* lane) {
  for (size_t i = 0; i < n; ++i) {
    const double value = LoadElement(grad, dtype, i);
    const double square = value * value;
    double& sum = lane[(position + i) % MLPO_STAT_LANES];
    sum = sum + square;
  }
}

void RoundTo(mlpo_dtype dtype, const float* from, void* to, size_t n) {
  for (size_t i = 0; i < n; ++i) StoreElement(to, dtype, i, LoadFloat(from, i));
}

void WidenFrom(mlpo_dtype dtype, const void* from, float* to, size_t n) {
  for (size_t i = 0; i < n; ++i) StoreElement(to, MLPO_FLOAT32, i, LoadElement(from, dtype, i));
}

}  // namespace mlpo::reference

namespace mlpo {

const Kernels& ScalarKernels() {
  static constexpr Kernels kKernels = {"scalar", reference::Adam, reference::AddSquares, reference::RoundTo,
                                       reference::WidenFrom};
  return kKernels;
}

}  // namespace mlpo
