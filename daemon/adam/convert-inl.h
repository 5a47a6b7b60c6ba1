// Loads and stores of any element type as FP32 vectors, for the instruction set at hand: included by kernel.cc once for
// each. Pure functions on registers; arrays may have any alignment.

// Highway's include guard: one inclusion for each set.
#if defined(MLPO_DAEMON_ADAM_CONVERT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MLPO_DAEMON_ADAM_CONVERT_INL_H_
#undef MLPO_DAEMON_ADAM_CONVERT_INL_H_
#else
#define MLPO_DAEMON_ADAM_CONVERT_INL_H_
#endif

#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>

#include "proto/tensor.h"

HWY_BEFORE_NAMESPACE();
namespace mlpo {
namespace HWY_NAMESPACE {

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128

namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::ScalableTag<float>;
using Float = hn::Vec<FloatTag>;
using Bits = hn::Vec<hn::RebindToUnsigned<FloatTag>>;
constexpr size_t kLanes = hn::MaxLanes(FloatTag());

constexpr int kNoGradient = 0;  // beside enum mlpo_dtype's values
constexpr size_t BytesOf(int type) { return type == MLPO_FLOAT32 ? 4 : 2; }

// The same integer arithmetic on every set: the sets' own instructions differ on NaN. But where x86 has F16C (with AVX2
// and up) its instructions give these bits, several times as fast: they round to nearest even whatever MXCSR says, make
// and take denormals, and quieten a NaN with its sign and upper payload. That reading quietens it too is seen nowhere,
// as an update stores one NaN only and the statistics have one.
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2
#define MLPO_F16C 1
#else
#define MLPO_F16C 0
#endif

#if !MLPO_F16C
template <class D>
HWY_INLINE hn::Vec<D> FromFloat16(D d, hn::Vec<hn::RebindToUnsigned<D>> half) {
  const hn::RebindToUnsigned<D> du;
  const hn::RebindToSigned<D> di;
  const auto sign = hn::ShiftLeft<16>(hn::And(half, hn::Set(du, 0x8000u)));
  const auto magnitude = hn::And(half, hn::Set(du, 0x7fffu));
  const auto ordered = hn::BitCast(di, magnitude);
  const auto shifted = hn::ShiftLeft<13>(magnitude);
  const auto normal = hn::Add(shifted, hn::Set(du, 112u << 23));
  const auto special = hn::Or(shifted, hn::Set(du, 0x7f800000u));
  const auto subnormal = hn::BitCast(du, hn::Mul(hn::ConvertTo(d, ordered), hn::Set(d, 0x1p-24f)));
  const auto is_special = hn::RebindMask(du, hn::Gt(ordered, hn::Set(di, 0x7bff)));
  const auto is_subnormal = hn::RebindMask(du, hn::Lt(ordered, hn::Set(di, 0x400)));
  const auto finite = hn::IfThenElse(is_subnormal, subnormal, normal);
  return hn::BitCast(d, hn::Or(sign, hn::IfThenElse(is_special, special, finite)));
}

HWY_INLINE Bits ToFloat16(Float value) {
  const FloatTag d;
  const hn::RebindToUnsigned<FloatTag> du;
  const hn::RebindToSigned<FloatTag> di;
  const Bits bits = hn::BitCast(du, value);
  const Bits sign = hn::And(bits, hn::Set(du, 0x80000000u));
  const Bits magnitude = hn::Xor(bits, sign);
  const auto ordered = hn::BitCast(di, magnitude);
  // Normal: add a bit less than half of what is cut off, and the last kept bit; then shift. Ties go to even.
  const Bits odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 1u));
  const Bits rebiased = hn::Add(magnitude, hn::Set(du, 0u - (112u << 23) + 0xfffu));
  const Bits normal = hn::ShiftRight<13>(hn::Add(rebiased, odd));
  // Subnormal: 0.5's last bit is 2^-24, so that the addition rounds to units of it.
  const Float half = hn::Set(d, 0.5f);
  const Bits subnormal = hn::Sub(hn::BitCast(du, hn::Add(hn::BitCast(d, magnitude), half)), hn::BitCast(du, half));
  const Bits payload = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 0x3ffu));
  const Bits nan = hn::Or(payload, hn::Set(du, 0x7e00u));
  const auto is_nan = hn::RebindMask(du, hn::Gt(ordered, hn::Set(di, 0x7f800000)));
  const auto is_big = hn::RebindMask(du, hn::Gt(ordered, hn::Set(di, 0x477fffff)));
  const auto is_subnormal = hn::RebindMask(du, hn::Lt(ordered, hn::Set(di, 0x38800000)));
  const Bits finite = hn::IfThenElse(is_subnormal, subnormal, normal);
  const Bits above = hn::IfThenElse(is_nan, nan, hn::Set(du, 0x7c00u));
  return hn::Or(hn::ShiftRight<16>(sign), hn::IfThenElse(is_big, above, finite));
}
#endif

// kOneNan: the only NaN is 7FC00000, which rounds like any number.
template <bool kOneNan>
HWY_INLINE Bits ToBfloat16(Float value) {
  const hn::RebindToUnsigned<FloatTag> du;
  const Bits bits = hn::BitCast(du, value);
  const Bits odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
  const Bits rounded = hn::ShiftRight<16>(hn::Add(hn::Add(bits, hn::Set(du, 0x7fffu)), odd));
  if constexpr (kOneNan) return rounded;
  const Bits nan = hn::Or(hn::ShiftRight<16>(bits), hn::Set(du, 0x40u));
  return hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(value)), nan, rounded);
}

// One vector of D's length from an array of kType, which may have any alignment.
template <int kType, class D>
HWY_INLINE hn::Vec<D> LoadElements(D d, const std::byte* from) {
  if constexpr (kType == kNoGradient) {
    return hn::Zero(d);
  } else if constexpr (kType == MLPO_FLOAT32) {
    return hn::LoadU(d, reinterpret_cast<const float*>(from));
  } else {
    const hn::RebindToUnsigned<D> du;
    const hn::Rebind<uint16_t, D> d16;
    const auto narrow = hn::LoadU(d16, reinterpret_cast<const uint16_t*>(from));
    if constexpr (kType == MLPO_BFLOAT16) return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du, narrow)));
    if constexpr (kType == MLPO_FLOAT16) {
#if MLPO_F16C
      return hn::PromoteTo(d, hn::BitCast(hn::Rebind<hwy::float16_t, D>(), narrow));
#else
      return FromFloat16(d, hn::PromoteTo(du, narrow));
#endif
    }
  }
}

template <int kType, bool kOneNan>
HWY_INLINE void StoreElements(Float value, std::byte* to) {
  const FloatTag d;
  if constexpr (kType == MLPO_FLOAT32) {
    hn::StoreU(value, d, reinterpret_cast<float*>(to));
  } else {
    const hn::Rebind<uint16_t, FloatTag> d16;
    auto* out = reinterpret_cast<uint16_t*>(to);
    if constexpr (kType == MLPO_BFLOAT16) {
      hn::StoreU(hn::TruncateTo(d16, ToBfloat16<kOneNan>(value)), d16, out);
    } else {
#if MLPO_F16C
      hn::StoreU(hn::BitCast(d16, hn::DemoteTo(hn::Rebind<hwy::float16_t, FloatTag>(), value)), d16, out);
#else
      hn::StoreU(hn::TruncateTo(d16, ToFloat16(value)), d16, out);
#endif
    }
  }
}

#undef MLPO_F16C
#endif  // not HWY_SCALAR

}  // namespace HWY_NAMESPACE
}  // namespace mlpo
HWY_AFTER_NAMESPACE();

#endif  // include guard
