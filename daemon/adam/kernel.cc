// The vector kernels, compiled once for each instruction set (foreach_target.h includes this file again and again).
//
// A range is done in whole vectors; what is left goes through the same code in a padded buffer on the stack, so that
// the tail has the body's bits. Nothing of the standard library may be called between HWY_BEFORE_NAMESPACE and
// HWY_AFTER_NAMESPACE: an inline function instantiated there could end up with AVX instructions and be linked into code
// that runs without.
#include "daemon/adam/kernel.h"

#include <cstddef>
#include <cstring>
#include <vector>

#include "daemon/adam/kernels.h"
#include "daemon/base/check.h"

// SVE's vectors have no size known at compile time, which Constants and the statistics' sums need. No CPU of this
// century's second decade has SSSE3 without SSE4.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_SSSE3)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "daemon/adam/kernel.cc"
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "daemon/adam/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace mlpo {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128

const Kernels* TargetKernels() { return nullptr; }  // reference.cc is the scalar kernel

#else

// Elements between what is computed and what is prefetched. On an EPYC of family 25 (Zen 4), 256 to 640 made the kernel
// 5-10 % faster than the CPU's own prefetching alone, 128 and 1024 less. Past the end nothing happens.
constexpr size_t kAhead = 256;

// ---- the update

struct Constants {
  bool l2;
  Float grad_scale, decay, one_minus_beta1, beta2, one_minus_beta2, step_size, sqrt_bc2, eps, nan;
};

HWY_INLINE Float OneNan(Float value, Float nan) { return hn::IfThenElse(hn::IsNaN(value), nan, value); }

// One vector. The mode is a branch that never changes, which costs nothing here and halves what is compiled. Everything
// is loaded before anything is stored, so that grad and param may be one place. The two-operand steps are those of
// reference.cc in its order.
template <int kGrad, int kParam>
HWY_INLINE void UpdateVector(const Constants& c, float* pp, float* mp, float* vp, const std::byte* grad,
                             std::byte* param) {
  const FloatTag d;
  Float p = hn::LoadU(d, pp);
  Float m = hn::LoadU(d, mp);
  Float v = hn::LoadU(d, vp);
  Float g = hn::Mul(LoadElements<kGrad>(d, grad), c.grad_scale);
  if (c.l2) {
    g = hn::Add(g, hn::Mul(c.decay, p));
  } else {
    p = hn::Mul(p, c.decay);
  }
  m = OneNan(hn::Add(m, hn::Mul(hn::Sub(g, m), c.one_minus_beta1)), c.nan);
  v = OneNan(hn::Add(hn::Mul(c.beta2, v), hn::Mul(hn::Mul(c.one_minus_beta2, g), g)), c.nan);
  const Float denominator = hn::Add(hn::Div(hn::Sqrt(v), c.sqrt_bc2), c.eps);
  p = OneNan(hn::Sub(p, hn::Mul(c.step_size, hn::Div(m, denominator))), c.nan);
  hn::StoreU(p, d, pp);
  hn::StoreU(m, d, mp);
  hn::StoreU(v, d, vp);
  StoreElements<kParam, true>(p, param);
}

template <int kGrad, int kParam>
void Update(const AdamScalars& s, const AdamRange& r) {
  const FloatTag d;
  const Constants c = {s.l2,
                       hn::Set(d, s.grad_scale),
                       hn::Set(d, s.decay),
                       hn::Set(d, s.one_minus_beta1),
                       hn::Set(d, s.beta2),
                       hn::Set(d, s.one_minus_beta2),
                       hn::Set(d, s.step_size),
                       hn::Set(d, s.sqrt_bc2),
                       hn::Set(d, s.eps),
                       hn::BitCast(d, hn::Set(hn::RebindToUnsigned<FloatTag>(), 0x7fc00000u))};
  const auto* grad = static_cast<const std::byte*>(r.grad);
  auto* param = static_cast<std::byte*>(r.param);
  float* const p0 = r.p;  // copies: stores could change what r refers to
  float* const m0 = r.m;
  float* const v0 = r.v;
  const size_t whole = r.n - r.n % kLanes;
  for (size_t i = 0; i < whole; i += kLanes) {
    hwy::Prefetch(p0 + i + kAhead);
    hwy::Prefetch(m0 + i + kAhead);
    hwy::Prefetch(v0 + i + kAhead);
    if constexpr (kGrad != kNoGradient) hwy::Prefetch(grad + (i + kAhead) * BytesOf(kGrad));
    UpdateVector<kGrad, kParam>(c, p0 + i, m0 + i, v0 + i, grad + i * BytesOf(kGrad), param + i * BytesOf(kParam));
  }
  const size_t i = whole;
  const size_t rest = r.n - whole;
  if (rest == 0) return;
  HWY_ALIGN float p[kLanes] = {};
  HWY_ALIGN float m[kLanes] = {};
  HWY_ALIGN float v[kLanes] = {};
  HWY_ALIGN std::byte g[4 * kLanes] = {};
  HWY_ALIGN std::byte out[4 * kLanes];
  memcpy(p, r.p + i, rest * 4);
  memcpy(m, r.m + i, rest * 4);
  memcpy(v, r.v + i, rest * 4);
  if (kGrad != kNoGradient) memcpy(g, grad + i * BytesOf(kGrad), rest * BytesOf(kGrad));
  UpdateVector<kGrad, kParam>(c, p, m, v, g, out);
  memcpy(r.p + i, p, rest * 4);
  memcpy(r.m + i, m, rest * 4);
  memcpy(r.v + i, v, rest * 4);
  memcpy(param + i * BytesOf(kParam), out, rest * BytesOf(kParam));
}

using UpdateFunction = void (*)(const AdamScalars&, const AdamRange&);

template <int kGrad>
UpdateFunction ChooseParam(mlpo_dtype dtype) {
  switch (dtype) {
    case MLPO_FLOAT32:
      return Update<kGrad, MLPO_FLOAT32>;
    case MLPO_FLOAT16:
      return Update<kGrad, MLPO_FLOAT16>;
    case MLPO_BFLOAT16:
      return Update<kGrad, MLPO_BFLOAT16>;
  }
  return nullptr;
}

UpdateFunction Choose(const AdamRange& range) {
  if (range.grad == nullptr) return ChooseParam<kNoGradient>(range.dtype);
  switch (range.grad_dtype) {
    case MLPO_FLOAT32:
      return ChooseParam<MLPO_FLOAT32>(range.dtype);
    case MLPO_FLOAT16:
      return ChooseParam<MLPO_FLOAT16>(range.dtype);
    case MLPO_BFLOAT16:
      return ChooseParam<MLPO_BFLOAT16>(range.dtype);
  }
  return nullptr;
}

void Adam(const AdamScalars& scalars, const AdamRange& range) {
  const UpdateFunction update = Choose(range);
  MLPO_CHECK(update != nullptr);
  update(scalars, range);
}

// ---- statistics

using DoubleTag = hn::CappedTag<double, MLPO_STAT_LANES>;
using Double = hn::Vec<DoubleTag>;
constexpr size_t kDoubles = hn::MaxLanes(DoubleTag());
constexpr size_t kSums = MLPO_STAT_LANES / kDoubles;
static_assert(kSums * kDoubles == MLPO_STAT_LANES);

// The 16 elements at `group`, each into its lane. Products are exact, so only the addition rounds.
template <int kType>
HWY_INLINE void AddGroup(const std::byte* group, Double (&sums)[kSums]) {
  const DoubleTag d;
  const hn::Rebind<float, DoubleTag> df;
  for (size_t i = 0; i < kSums; ++i) {
    const auto value = hn::PromoteTo(d, LoadElements<kType>(df, group + i * kDoubles * BytesOf(kType)));
    sums[i] = hn::Add(sums[i], hn::Mul(value, value));
  }
}

// Part of a group, padded with zeros: adding +0 to a sum of squares changes nothing.
template <int kType>
HWY_INLINE void AddPart(const std::byte* from, size_t offset, size_t n, Double (&sums)[kSums]) {
  HWY_ALIGN std::byte group[MLPO_STAT_LANES * 4] = {};
  memcpy(group + offset * BytesOf(kType), from, n * BytesOf(kType));
  AddGroup<kType>(group, sums);
}

template <int kType>
void AddSquaresOf(const void* grad, size_t position, size_t n, double* lane) {
  const DoubleTag d;
  const auto* from = static_cast<const std::byte*>(grad);
  Double sums[kSums];
  for (size_t i = 0; i < kSums; ++i) sums[i] = hn::LoadU(d, lane + i * kDoubles);
  const size_t offset = position % MLPO_STAT_LANES;
  if (offset != 0 && n != 0) {
    const size_t space = MLPO_STAT_LANES - offset;
    const size_t part = n < space ? n : space;
    AddPart<kType>(from, offset, part, sums);
    from += part * BytesOf(kType);
    n -= part;
  }
  for (; n >= MLPO_STAT_LANES; n -= MLPO_STAT_LANES, from += MLPO_STAT_LANES * BytesOf(kType)) {
    AddGroup<kType>(from, sums);
  }
  if (n != 0) AddPart<kType>(from, 0, n, sums);
  for (size_t i = 0; i < kSums; ++i) hn::StoreU(sums[i], d, lane + i * kDoubles);
}

void AddSquares(const void* grad, mlpo_dtype dtype, size_t position, size_t n, double* lane) {
  switch (dtype) {
    case MLPO_FLOAT32:
      return AddSquaresOf<MLPO_FLOAT32>(grad, position, n, lane);
    case MLPO_FLOAT16:
      return AddSquaresOf<MLPO_FLOAT16>(grad, position, n, lane);
    case MLPO_BFLOAT16:
      return AddSquaresOf<MLPO_BFLOAT16>(grad, position, n, lane);
  }
  MLPO_CHECK(!"known dtype");
}

// ---- rounding alone

template <int kType>
void RoundToType(const float* from, void* to, size_t n) {
  const FloatTag d;
  auto* out = static_cast<std::byte*>(to);
  size_t i = 0;
  for (; n - i >= kLanes; i += kLanes) StoreElements<kType, false>(hn::LoadU(d, from + i), out + i * BytesOf(kType));
  if (i == n) return;
  HWY_ALIGN float in[kLanes] = {};
  HWY_ALIGN std::byte rounded[4 * kLanes];
  memcpy(in, from + i, (n - i) * 4);
  StoreElements<kType, false>(hn::Load(d, in), rounded);
  memcpy(out + i * BytesOf(kType), rounded, (n - i) * BytesOf(kType));
}

void RoundTo(mlpo_dtype dtype, const float* from, void* to, size_t n) {
  switch (dtype) {
    case MLPO_FLOAT32:
      return RoundToType<MLPO_FLOAT32>(from, to, n);
    case MLPO_FLOAT16:
      return RoundToType<MLPO_FLOAT16>(from, to, n);
    case MLPO_BFLOAT16:
      return RoundToType<MLPO_BFLOAT16>(from, to, n);
  }
  MLPO_CHECK(!"known dtype");
}

// ---- widening alone

template <int kType>
void WidenFromType(const void* from, float* to, size_t n) {
  const FloatTag d;
  const auto* in = static_cast<const std::byte*>(from);
  size_t i = 0;
  for (; n - i >= kLanes; i += kLanes) hn::StoreU(LoadElements<kType>(d, in + i * BytesOf(kType)), d, to + i);
  if (i == n) return;
  HWY_ALIGN std::byte narrow[4 * kLanes] = {};
  HWY_ALIGN float wide[kLanes];
  memcpy(narrow, in + i * BytesOf(kType), (n - i) * BytesOf(kType));
  hn::Store(LoadElements<kType>(d, narrow), d, wide);
  memcpy(to + i, wide, (n - i) * 4);
}

void WidenFrom(mlpo_dtype dtype, const void* from, float* to, size_t n) {
  switch (dtype) {
    case MLPO_FLOAT32:
      return WidenFromType<MLPO_FLOAT32>(from, to, n);
    case MLPO_FLOAT16:
      return WidenFromType<MLPO_FLOAT16>(from, to, n);
    case MLPO_BFLOAT16:
      return WidenFromType<MLPO_BFLOAT16>(from, to, n);
  }
  MLPO_CHECK(!"known dtype");
}

constexpr const char* TargetName() {
#if HWY_ARCH_X86
  if (HWY_TARGET < HWY_AVX2) return "avx512";  // a lower bit is a better set: AVX3 and what came after it
  if (HWY_TARGET == HWY_AVX2) return "avx2";
  if (HWY_TARGET == HWY_SSE4) return "sse4";
  return "sse2";
#else
  return "neon";
#endif
}

const Kernels* TargetKernels() {
  static constexpr Kernels kKernels = {TargetName(), Adam, AddSquares, RoundTo, WidenFrom};
  return &kKernels;
}

#endif  // not HWY_SCALAR

}  // namespace HWY_NAMESPACE
}  // namespace mlpo
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace mlpo {

HWY_EXPORT(TargetKernels);

std::vector<const Kernels*> VectorKernels() {
  std::vector<const Kernels*> found;
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {  // best first
    hwy::GetChosenTarget().Update(target);
    const Kernels* kernels = HWY_DYNAMIC_DISPATCH(TargetKernels)();
    if (kernels != nullptr) found.push_back(kernels);
  }
  hwy::GetChosenTarget().DeInit();
  return found;
}

}  // namespace mlpo
#endif  // HWY_ONCE
