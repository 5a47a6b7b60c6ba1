// Conversions between FP32 and the 16-bit types.
#include <array>
#include <cmath>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "tests/unit/adam_arrays.h"

namespace mlpo::testing {
namespace {

uint16_t RoundBits(mlpo_dtype dtype, uint32_t bits) {
  // Thirty-three of them: body and tail, which must agree.
  const std::vector<float> in(33, std::bit_cast<float>(bits));
  std::vector<uint16_t> out(33, 0xdead);
  RoundTo(dtype, in.data(), out.data(), in.size());
  REQUIRE(out == std::vector<uint16_t>(33, out[0]));
  return out[0];
}

TEST_CASE("C07_TiesInfinitiesAndNanRoundAsStated", "[adam]") {
  OnEachTarget([](const std::string&) {
    const auto bf16 = [](uint32_t bits) { return RoundBits(MLPO_BFLOAT16, bits); };
    CHECK(bf16(0x3f808000) == 0x3f80);
    CHECK(bf16(0x3f818000) == 0x3f82);
    CHECK(bf16(0x7f7fffff) == 0x7f80);
    CHECK(bf16(0x00008001) == 0x0001);
    CHECK(bf16(0x80008000) == 0x8000);
    CHECK(bf16(0x7f800000) == 0x7f80);
    CHECK(bf16(0x7f800001) == 0x7fc0);
    CHECK(bf16(0x7fffffff) == 0x7fff);
    CHECK(bf16(0xffaa5555) == 0xffea);  // sign and upper payload stay
    const auto fp16 = [](uint32_t bits) { return RoundBits(MLPO_FLOAT16, bits); };
    CHECK(fp16(0x477fefff) == 0x7bff);
    CHECK(fp16(0x477ff000) == 0x7c00);
    CHECK(fp16(0x33000000) == 0x0000);
    CHECK(fp16(0x33000001) == 0x0001);
    CHECK(fp16(0x7f800000) == 0x7c00);
    CHECK(fp16(0xff800000) == 0xfc00);
    CHECK(fp16(0x7f800001) == 0x7e00);
    CHECK(fp16(0xffffffff) == 0xffff);
    CHECK(fp16(0x80000001) == 0x8000);
  });
}

// To nearest even through FP64 arithmetic: what `value` is in units of the last place there, rounded by nearbyint.
uint16_t ToFloat16ByArithmetic(float value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::abs(static_cast<double>(value));
  if (magnitude >= 65520) return sign | 0x7c00;
  const int exponent = std::max(magnitude == 0 ? -14 : std::ilogb(magnitude), -14);
  const double units = std::nearbyint(std::ldexp(magnitude, 10 - exponent));
  // units is 0..2048; an implicit bit adds one to the exponent field, and so does a carry.
  return static_cast<uint16_t>(sign | (static_cast<int>(units) + ((exponent + 14) << 10)));
}

uint16_t ToBfloat16ByArithmetic(float value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::abs(static_cast<double>(value));
  if (std::isinf(magnitude)) return sign | 0x7f80;
  const int exponent = std::max(magnitude == 0 ? -126 : std::ilogb(magnitude), -126);
  const double units = std::nearbyint(std::ldexp(magnitude, 7 - exponent));
  return static_cast<uint16_t>(sign | (static_cast<int>(units) + ((exponent + 126) << 7)));
}

#if defined(__x86_64__)
__attribute__((target("avx,f16c"))) void ToFloat16ByCpu(const float* from, uint16_t* to, size_t n) {
  for (size_t i = 0; i < n; i += 4) {
    const __m128i half = _mm_cvtps_ph(_mm_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to + i), half);
  }
}
bool CpuConvertsFloat16() { return __builtin_cpu_supports("f16c"); }
#else
void ToFloat16ByCpu(const float*, uint16_t*, size_t) {}
bool CpuConvertsFloat16() { return false; }
#endif

// The patterns begin, begin + stride, ... in chunks; all 2^32 with stride 1.
template <class Check>
void OverPatterns(uint64_t stride, Check check) {
  constexpr size_t kChunk = 1 << 16;
  std::vector<float> in(kChunk);
  for (uint64_t begin = 0; begin < (1ull << 32); begin += stride * kChunk) {
    for (size_t i = 0; i < kChunk; ++i) in[i] = std::bit_cast<float>(static_cast<uint32_t>(begin + i * stride));
    check(in);
  }
}

// Odd, so that every low half comes up.
uint64_t Stride() {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  return LongTests() ? 1 : 4'099;
#else
  return LongTests() ? 1 : 251;
#endif
}

TEST_CASE("C07_VectorRoundingEqualsTheScalarOneForAllPatterns", "[adam]") {
  OverPatterns(Stride(), [](const std::vector<float>& in) {
    for (const mlpo_dtype dtype : {MLPO_BFLOAT16, MLPO_FLOAT16}) {
      std::vector<uint16_t> expected(in.size()), actual(in.size());
      reference::RoundTo(dtype, in.data(), expected.data(), in.size());
      for (const std::string& target : RunnableTargets()) {
        REQUIRE(SetTarget(target).ok());
        RoundTo(dtype, in.data(), actual.data(), in.size());
        INFO(target << " from " << std::hex << std::bit_cast<uint32_t>(in[0]));
        REQUIRE(actual == expected);
      }
    }
  });
  REQUIRE(SetTarget("auto").ok());
}

TEST_CASE("C07_ScalarRoundingEqualsArithmetic", "[adam]") {
  size_t wrong = 0;
  OverPatterns(LongTests() ? 1 : 10'007, [&](const std::vector<float>& in) {
    for (const float value : in) {
      if (std::isnan(value)) continue;
      wrong += reference::ToFloat16(value) != ToFloat16ByArithmetic(value);
      wrong += reference::ToBfloat16(value) != ToBfloat16ByArithmetic(value);
    }
  });
  CHECK(wrong == 0);
}

TEST_CASE("C07_Fp16RoundingEqualsTheCpusOwn", "[adam]") {
  if (!CpuConvertsFloat16()) {
    WARN("skipped: this CPU has no F16C to compare with");
    return;
  }
  std::vector<uint16_t> expected(1 << 16), actual(1 << 16);
  OverPatterns(Stride(), [&](const std::vector<float>& in) {
    ToFloat16ByCpu(in.data(), expected.data(), in.size());
    RoundTo(MLPO_FLOAT16, in.data(), actual.data(), in.size());
    REQUIRE(actual == expected);
  });
}

TEST_CASE("C07_UpcastsAreExactAndComeBack", "[adam]") {
  std::vector<uint16_t> all(1 << 16);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  for (size_t i = 0; i < all.size(); ++i) {
    const float value = reference::FromFloat16(all[i]);
    const int exponent = (all[i] >> 10) & 31;
    const double fraction = (all[i] & 1023) / 1024.0;
    if (exponent == 31) {
      CHECK(std::isnan(value) == (fraction != 0));
      if (fraction == 0) CHECK(std::isinf(value));
    } else {
      const double magnitude = exponent == 0 ? std::ldexp(fraction, -14) : std::ldexp(1 + fraction, exponent - 15);
      if (value != (all[i] >> 15 ? -magnitude : magnitude)) FAIL("FP16 " << all[i] << " became " << value);
    }
  }
  // Through the kernel: with p = m = v = 0, lr = 0 and beta1 = 0, m becomes the gradient itself.
  OnEachTarget([&](const std::string&) {
    mlpo_hyper hyper = TypicalHyper();
    hyper.beta1 = hyper.lr = 0;
    hyper.grad_scale = 1;
    for (const mlpo_dtype dtype : {MLPO_FLOAT16, MLPO_BFLOAT16}) {
      std::vector<float> p(all.size(), 0), m(all.size(), 0), v(all.size(), 0), param(all.size());
      AdamRange range;
      range.p = p.data();
      range.m = m.data();
      range.v = v.data();
      range.grad = all.data();
      range.grad_dtype = dtype;
      range.param = param.data();
      range.n = all.size();
      AdamUpdate(MakeScalars(hyper, 1), range);
      std::vector<uint16_t> back(all.size());
      RoundTo(dtype, m.data(), back.data(), back.size());
      size_t wrong = 0;
      for (size_t i = 0; i < all.size(); ++i) {
        const float expected = dtype == MLPO_FLOAT16 ? reference::FromFloat16(all[i]) : reference::FromBfloat16(all[i]);
        if (std::isnan(expected)) {
          wrong += !std::isnan(m[i]);
        } else {
          wrong += m[i] != expected || (back[i] != all[i] && all[i] != 0x8000);  // 0 + -0 is 0
        }
      }
      CHECK(wrong == 0);
    }
  });
}

}  // namespace
}  // namespace mlpo::testing
