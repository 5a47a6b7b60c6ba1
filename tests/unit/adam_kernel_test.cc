// Every instruction set against the scalar reference, to the bit.
#include <cmath>
#include <limits>

#include "tests/unit/adam_arrays.h"

namespace mlpo::testing {
namespace {

// Twice what any kernel has in flight, so that body and tail take turns several times.
constexpr size_t kEveryLength = 4 * 64 + 1;

// Empty if the active target gives the reference's bits and touches nothing else, else what differs.
std::string Compare(size_t n, mlpo_dtype grad, mlpo_dtype param, bool l2, bool one_place, size_t offset, bool no_grad,
                    Values values) {
  Problem expected(n, grad, param, one_place);
  expected.Fill(n * 31 + offset, values);
  Problem actual(n, grad, param, one_place, offset);
  actual.CopyFrom(expected);
  const AdamScalars scalars = MakeScalars(TypicalHyper(l2 ? MLPO_ADAM : MLPO_ADAMW), 3);
  AdamRange want = expected.Whole();
  AdamRange range = actual.Whole();
  if (no_grad) want.grad = range.grad = nullptr;
  reference::Adam(scalars, want);
  AdamUpdate(scalars, range);
  std::string where = " at n=" + std::to_string(n) + " grad=" + std::to_string(grad) +
                      " param=" + std::to_string(param) + " l2=" + std::to_string(l2) +
                      " offset=" + std::to_string(offset);
  if (!actual.SameBits(expected)) return "bits differ" + where;
  if (!actual.CanariesIntact()) return "a canary is gone" + where;
  if (!one_place && !no_grad && !actual.g.SameBits(expected.g)) return "the gradient was changed" + where;
  return "";
}

// Every pair of types, both modes; in one place where the types allow it.
std::string CompareAllKinds(size_t n, size_t offset, Values values) {
  for (const mlpo_dtype grad : kTypes) {
    for (const mlpo_dtype param : kTypes) {
      for (const bool l2 : {false, true}) {
        std::string difference = Compare(n, grad, param, l2, false, offset, false, values);
        if (difference.empty() && ElementBytes(grad) == ElementBytes(param)) {
          difference = Compare(n, grad, param, l2, true, offset, false, values);
        }
        if (difference.empty()) difference = Compare(n, grad, param, l2, false, offset, true, values);
        if (!difference.empty()) return difference;
      }
    }
  }
  return "";
}

TEST_CASE("C05_EveryLengthAndAlignmentHasTheReferencesBits", "[adam]") {
  OnEachTarget([](const std::string&) {
    for (size_t n = 0; n <= kEveryLength; ++n) {
      for (const size_t offset : {0, 2, 4, 60}) {
        const std::string difference = CompareAllKinds(n, offset, Values::kTypical);
        if (!difference.empty()) FAIL(difference);
      }
    }
  });
}

TEST_CASE("C05_AroundAWholeBlockTheBitsAreTheReferences", "[adam]") {
  OnEachTarget([](const std::string&) {
    for (const size_t n : {(1u << 20) - 1, 1u << 20, (1u << 20) + 1}) {
      CHECK(Compare(n, MLPO_BFLOAT16, MLPO_BFLOAT16, false, true, 2, false, Values::kTypical) == "");
    }
    CHECK(Compare((1u << 20) + 1, MLPO_FLOAT32, MLPO_FLOAT16, true, false, 4, false, Values::kTypical) == "");
  });
}

TEST_CASE("Adam.NanInfinityAndDenormalsHaveTheReferencesBits", "[adam]") {
  OnEachTarget([](const std::string&) {
    for (const size_t n : {1, 17, 4099}) CHECK(CompareAllKinds(n, 0, Values::kAnyBits) == "");
  });
}

TEST_CASE("C05_AnyCutOfTheRangeGivesTheSameBits", "[adam]") {
  const AdamScalars scalars = MakeScalars(TypicalHyper(), 7);
  constexpr size_t kCount = 10007;
  Problem whole(kCount, MLPO_BFLOAT16, MLPO_BFLOAT16, true);
  whole.Fill(5, Values::kTypical);
  Problem start(kCount, MLPO_BFLOAT16, MLPO_BFLOAT16, true);
  start.CopyFrom(whole);
  AdamUpdate(scalars, whole.Whole());
  for (const size_t cut : {1, 3, 16, 63, 1000, 4096, 9999}) {
    Problem cut_up(kCount, MLPO_BFLOAT16, MLPO_BFLOAT16, true);
    cut_up.CopyFrom(start);
    for (size_t first = 0; first < kCount; first += cut) {
      AdamUpdate(scalars, cut_up.Range(first, std::min(cut, kCount - first)));
    }
    INFO("pieces of " << cut);
    CHECK(cut_up.SameBits(whole));
  }
}

TEST_CASE("Adam.DenormalsSurvive", "[adam]") {
  // With FTZ or DAZ, m = 2^-140 would be 0 after the update.
  OnEachTarget([](const std::string&) {
    mlpo_hyper hyper = TypicalHyper();
    hyper.beta1 = 0.5;
    std::vector<float> p(37, 0x1p-130f), m(37, 0x1p-140f), v(37, 0), param(37);
    AdamRange range;
    range.p = p.data();
    range.m = m.data();
    range.v = v.data();
    range.param = param.data();
    range.n = p.size();
    hyper.lr = 0;
    AdamUpdate(MakeScalars(hyper, 1), range);
    CHECK(p == std::vector<float>(37, 0x1p-130f));
    CHECK(m == std::vector<float>(37, 0x1p-141f));
  });
}

TEST_CASE("Adam.NanInTheStateIsAlwaysTheSameNan", "[adam]") {
  OnEachTarget([](const std::string&) {
    std::vector<uint32_t> nans = {0x7f800001, 0xff800001, 0x7fffffff, 0xffc12345};
    std::vector<float> p, m, v(4, 0), grad, param(4);
    for (const uint32_t nan : nans) {
      p.push_back(0);
      m.push_back(std::bit_cast<float>(nan));
      grad.push_back(std::bit_cast<float>(nan ^ 0x00001110));
    }
    AdamRange range;
    range.p = p.data();
    range.m = m.data();
    range.v = v.data();
    range.grad = grad.data();
    range.param = param.data();
    range.n = 4;
    AdamUpdate(MakeScalars(TypicalHyper(), 1), range);
    for (size_t i = 0; i < 4; ++i) {
      for (const float value : {p[i], m[i], v[i], param[i]}) CHECK(std::bit_cast<uint32_t>(value) == 0x7fc00000);
    }
  });
}

}  // namespace
}  // namespace mlpo::testing
