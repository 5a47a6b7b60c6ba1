// What the tests of daemon/adam share: guarded arrays, inputs with every kind of value, walks over instruction sets.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "daemon/adam/kernel.h"
#include "daemon/adam/reference.h"
#include "tests/support/catch.h"

namespace mlpo::testing {

inline constexpr mlpo_dtype kTypes[] = {MLPO_FLOAT32, MLPO_FLOAT16, MLPO_BFLOAT16};

// Long forms run with MLPO_LONG=1.
inline bool LongTests() {
  const char* value = std::getenv("MLPO_LONG");
  return value != nullptr && std::string(value) != "0" && *value != '\0';
}

// splitmix64: small, good enough, the same everywhere.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t Next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  double Uniform(double from, double to) { return from + (to - from) * static_cast<double>(Next() >> 11) * 0x1p-53; }

 private:
  uint64_t state_;
};

// An array between two canaries, its base `offset` bytes after a 64-byte boundary.
class Guarded {
 public:
  Guarded(size_t bytes, size_t offset) : bytes_(bytes), store_(bytes + offset + 2 * kGuard + 64, kCanary) {
    const auto address = reinterpret_cast<uintptr_t>(store_.data()) + kGuard;
    begin_ = kGuard + (64 - address % 64) % 64 + offset;
  }
  std::byte* data() { return store_.data() + begin_; }
  const std::byte* data() const { return store_.data() + begin_; }
  float* floats() { return reinterpret_cast<float*>(data()); }
  size_t bytes() const { return bytes_; }
  bool CanariesIntact() const {
    for (size_t i = 0; i < store_.size(); ++i) {
      if ((i < begin_ || i >= begin_ + bytes_) && store_[i] != kCanary) return false;
    }
    return true;
  }
  bool SameBits(const Guarded& other) const {
    return bytes_ == other.bytes_ && std::memcmp(data(), other.data(), bytes_) == 0;
  }
  void CopyFrom(const Guarded& other) { std::memcpy(data(), other.data(), bytes_); }

 private:
  static constexpr size_t kGuard = 256;
  static constexpr std::byte kCanary{0xa5};
  size_t bytes_;
  std::vector<std::byte> store_;
  size_t begin_;
};

enum class Values { kTypical, kAnyBits };

// Typical: what training has, some zeros and denormals among it. AnyBits: every class of value, NaNs and infinities
// too.
inline float RandomFloat(Random* random, Values values, double scale) {
  const uint64_t kind = random->Next() % 16;
  if (values == Values::kAnyBits && kind < 12) return std::bit_cast<float>(static_cast<uint32_t>(random->Next()));
  if (kind == 12) return 0;
  if (kind == 13) return std::bit_cast<float>(static_cast<uint32_t>(random->Next() & 0x807fffff));
  return static_cast<float>(random->Uniform(-scale, scale));
}

inline void FillFloats(Random* random, Values values, double scale, float* array, size_t n) {
  for (size_t i = 0; i < n; ++i) array[i] = RandomFloat(random, values, scale);
}

// The state of n parameters, gradient and parameter in one place or two.
struct Problem {
  Problem(size_t count, mlpo_dtype grad, mlpo_dtype param, bool same_place, size_t offset = 0)
      : n(count),
        grad_dtype(grad),
        dtype(param),
        one_place(same_place),
        p(4 * n, offset % 4 ? 0 : offset),
        m(4 * n, offset % 4 ? 0 : offset),
        v(4 * n, offset % 4 ? 0 : offset),
        g(ElementBytes(grad) * n, offset % ElementBytes(grad) ? 0 : offset),
        out(ElementBytes(param) * n, offset % ElementBytes(param) ? 0 : offset) {}

  void Fill(uint64_t seed, Values values) {
    Random random(seed);
    FillFloats(&random, values, 1, p.floats(), n);
    FillFloats(&random, values, 0.1, m.floats(), n);
    FillFloats(&random, values, 0.01, v.floats(), n);
    if (values == Values::kTypical) {
      for (size_t i = 0; i < n; ++i) v.floats()[i] = std::abs(v.floats()[i]);
    }
    for (size_t i = 0; i < n; ++i) {
      reference::StoreElement(g.data(), grad_dtype, i, RandomFloat(&random, values, 0.1));
    }
  }
  void CopyFrom(const Problem& other) {
    p.CopyFrom(other.p);
    m.CopyFrom(other.m);
    v.CopyFrom(other.v);
    g.CopyFrom(other.g);
  }
  AdamRange Range(size_t first, size_t count) {
    AdamRange range;
    range.p = p.floats() + first;
    range.m = m.floats() + first;
    range.v = v.floats() + first;
    range.grad = g.data() + first * ElementBytes(grad_dtype);
    range.param = Param().data() + first * ElementBytes(dtype);
    range.n = count;
    range.grad_dtype = grad_dtype;
    range.dtype = dtype;
    return range;
  }
  AdamRange Whole() { return Range(0, n); }
  Guarded& Param() { return one_place ? g : out; }
  bool SameBits(Problem& other) {
    return p.SameBits(other.p) && m.SameBits(other.m) && v.SameBits(other.v) && Param().SameBits(other.Param());
  }
  bool CanariesIntact() const {
    return p.CanariesIntact() && m.CanariesIntact() && v.CanariesIntact() && g.CanariesIntact() && out.CanariesIntact();
  }

  size_t n;
  mlpo_dtype grad_dtype;
  mlpo_dtype dtype;
  bool one_place;
  Guarded p, m, v, g, out;
};

inline mlpo_hyper TypicalHyper(uint32_t mode = MLPO_ADAMW) {
  mlpo_hyper hyper = {};
  hyper.lr = 1e-3;
  hyper.beta1 = 0.9;
  hyper.beta2 = 0.999;
  hyper.eps = 1e-8;
  hyper.weight_decay = 0.01;
  hyper.grad_scale = 0.75;
  hyper.mode = mode;
  return hyper;
}

// Runs `test(name)` with each instruction set that this build and CPU have, then goes back to auto.
template <class Test>
void OnEachTarget(Test test) {
  for (const std::string& target : RunnableTargets()) {
    INFO("target " << target);
    REQUIRE(SetTarget(target).ok());
    test(target);
  }
  REQUIRE(SetTarget("auto").ok());
}

}  // namespace mlpo::testing
