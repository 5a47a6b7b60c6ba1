// The update against values that were worked out elsewhere: closed forms in FP64.
#include <cmath>

#include "tests/unit/adam_arrays.h"

namespace mlpo::testing {
namespace {

struct State {
  double p = 0, m = 0, v = 0;
};

// One step in FP64, as torch.optim defines it.
State ExactStep(const mlpo_hyper& hyper, double step, State s, double grad) {
  double g = grad * hyper.grad_scale;
  if (hyper.mode == MLPO_ADAM) {
    g += hyper.weight_decay * s.p;
  } else {
    s.p *= 1 - hyper.lr * hyper.weight_decay;
  }
  s.m = hyper.beta1 * s.m + (1 - hyper.beta1) * g;
  s.v = hyper.beta2 * s.v + (1 - hyper.beta2) * g * g;
  const bool corrected = !(hyper.flags & MLPO_HYPER_NO_BIAS_CORRECTION);
  const double m = corrected ? s.m / (1 - std::pow(hyper.beta1, step)) : s.m;
  const double v = corrected ? s.v / (1 - std::pow(hyper.beta2, step)) : s.v;
  s.p -= hyper.lr * m / (std::sqrt(v) + hyper.eps);
  return s;
}

// The kernel on n equal elements, so that body and tail are both used; they must agree.
class Run {
 public:
  explicit Run(double p) : p_(kCount, static_cast<float>(p)), m_(kCount, 0), v_(kCount, 0), param_(kCount) {}
  State Step(const mlpo_hyper& hyper, int64_t step, float grad) {
    const std::vector<float> gradients(kCount, grad);
    AdamRange range;
    range.p = p_.data();
    range.m = m_.data();
    range.v = v_.data();
    range.grad = gradients.data();
    range.param = param_.data();
    range.n = kCount;
    AdamUpdate(MakeScalars(hyper, step), range);
    for (const std::vector<float>* array : {&p_, &m_, &v_})
      REQUIRE(*array == std::vector<float>(kCount, array->front()));
    REQUIRE(param_ == p_);
    return Now();
  }
  State Now() const { return {p_[0], m_[0], v_[0]}; }

 private:
  static constexpr size_t kCount = 37;
  std::vector<float> p_, m_, v_, param_;
};

mlpo_hyper PlainHyper() {
  mlpo_hyper hyper = TypicalHyper();
  hyper.weight_decay = 0;
  hyper.grad_scale = 1;
  return hyper;
}

void CheckNear(double actual, double expected, double relative) {
  CHECK(std::abs(actual - expected) <= relative * std::abs(expected));
}

TEST_CASE("C01_AThousandStepsFollowTheClosedForm", "[adam]") {
  OnEachTarget([](const std::string&) {
    mlpo_hyper hyper = PlainHyper();
    hyper.lr = 0x1p-10;
    Run run(0);
    for (int64_t step = 1; step <= 1000; ++step) {
      const State before = run.Now();
      const State exact = ExactStep(hyper, static_cast<double>(step), before, 1);
      const State after = run.Step(hyper, step, 1);
      if (step == 1) CHECK(static_cast<float>(after.v) == 0.001f);  // 0.00099998713 if 1 - beta2 is formed in FP32
      CheckNear(after.p, exact.p, 1e-6);
      CheckNear(after.m, exact.m, 1e-6);
      CheckNear(after.v, exact.v, 1e-6);
    }
    CHECK(std::abs(run.Now().p - -0.9765625) <= 1e-5);
    CHECK(std::abs(run.Now().v - 0.63230) <= 1e-5);
  });
}

TEST_CASE("C01_StepJumpsChangedBetasAndLateStepsFollowTheClosedForm", "[adam]") {
  OnEachTarget([](const std::string&) {
    mlpo_hyper hyper = PlainHyper();
    Run run(0.5);
    for (const int64_t step : {1, 2, 5, 6, 999'999, 1'000'000}) {
      if (step == 6) {
        hyper.beta1 = 0.8;
        hyper.beta2 = 0.95;
      }
      const State exact = ExactStep(hyper, static_cast<double>(step), run.Now(), 0.25);
      const State after = run.Step(hyper, step, 0.25f);
      INFO("step " << step);
      CheckNear(after.p, exact.p, 1e-6);
      CheckNear(after.m, exact.m, 1e-6);
      CheckNear(after.v, exact.v, 1e-6);
    }
  });
}

State ThreeSteps(uint32_t mode, uint32_t flags, const double (&decays)[3]) {
  mlpo_hyper hyper = PlainHyper();
  hyper.lr = 1e-2;
  hyper.mode = mode;
  hyper.flags = flags;
  Run run(1);
  const float gradients[] = {0.5f, 0.25f, -0.125f};
  for (int i = 0; i < 3; ++i) {
    hyper.weight_decay = decays[i];
    run.Step(hyper, i + 1, gradients[i]);
  }
  return run.Now();
}

TEST_CASE("C02_BothKindsOfWeightDecayHaveTheirValues", "[adam]") {
  OnEachTarget([](const std::string&) {
    const State adamw = ThreeSteps(MLPO_ADAMW, 0, {0.1, 0.1, 0.1});
    CheckNear(adamw.p, 0.972073901, 1e-6);
    CheckNear(adamw.m, 0.0505, 1e-6);
    CheckNear(adamw.v, 3.2756275e-4, 1e-6);
    const State adam = ThreeSteps(MLPO_ADAM, 0, {0.1, 0.1, 0.1});
    CheckNear(adam.p, 0.973349532, 1e-6);
    CheckNear(adam.m, 0.0773146583, 1e-6);
    CheckNear(adam.v, 4.8168605e-4, 1e-6);
  });
}

TEST_CASE("C02_DecayIsReadAtEachStep", "[adam]") {
  OnEachTarget([](const std::string&) { CheckNear(ThreeSteps(MLPO_ADAMW, 0, {0.1, 0, 0.05}).p, 0.973551752, 1e-6); });
}

TEST_CASE("C02_BiasCorrectionCanBeOff", "[adam]") {
  OnEachTarget([](const std::string&) {
    CheckNear(ThreeSteps(MLPO_ADAMW, MLPO_HYPER_NO_BIAS_CORRECTION, {0.1, 0.1, 0.1}).p, 0.897966715, 1e-6);
    CheckNear(ThreeSteps(MLPO_ADAM, MLPO_HYPER_NO_BIAS_CORRECTION, {0.1, 0.1, 0.1}).p, 0.892953769, 1e-6);
  });
}

double Ulp(double of) {
  const float value = static_cast<float>(std::abs(of));
  return static_cast<double>(std::nextafter(value, INFINITY)) - static_cast<double>(value);
}

struct Ulps {
  double p = 0, m = 0, v = 0;
};

// How far one kernel step is from FP64 at most. States are such as training reaches: p changes by a few times lr.
Ulps WorstOfOneStep(const mlpo_hyper& hyper, int64_t step) {
  constexpr size_t kCount = 100'003;
  Random random(static_cast<uint64_t>(step) + hyper.mode);
  Problem problem(kCount, MLPO_FLOAT32, MLPO_FLOAT32, false);
  for (size_t i = 0; i < kCount; ++i) {
    const double p = random.Uniform(-1, 1);
    const double decay = hyper.mode == MLPO_ADAM ? hyper.weight_decay * std::abs(p) : 0;
    const double size = std::max(std::exp(random.Uniform(-14, 2)), decay);
    problem.p.floats()[i] = static_cast<float>(p);
    problem.m.floats()[i] = static_cast<float>(random.Uniform(-size, size));
    problem.v.floats()[i] = static_cast<float>(random.Uniform(0.2, 1) * size * size);
    reinterpret_cast<float*>(problem.g.data())[i] = static_cast<float>(random.Uniform(-size, size));
  }
  Problem after(kCount, MLPO_FLOAT32, MLPO_FLOAT32, false);
  after.CopyFrom(problem);
  AdamUpdate(MakeScalars(hyper, step), after.Whole());
  Ulps worst;
  for (size_t i = 0; i < kCount; ++i) {
    const State old = {problem.p.floats()[i], problem.m.floats()[i], problem.v.floats()[i]};
    const double grad = reinterpret_cast<const float*>(problem.g.data())[i];
    const State exact = ExactStep(hyper, static_cast<double>(step), old, grad);
    // Where the decay and the gradient cancel, the parts' size counts, as it does for m and p.
    const double decay = hyper.mode == MLPO_ADAM ? std::abs(hyper.weight_decay * old.p) : 0;
    const double g = std::max(std::abs(grad), decay);
    const double v = std::max(exact.v, hyper.beta2 * old.v + (1 - hyper.beta2) * g * g);
    const double p = std::max({std::abs(old.p), std::abs(exact.p), hyper.lr});
    worst.v = std::max(worst.v, std::abs(after.v.floats()[i] - exact.v) / Ulp(v));
    worst.m = std::max(worst.m, std::abs(after.m.floats()[i] - exact.m) / Ulp(std::max(std::abs(old.m), g)));
    worst.p = std::max(worst.p, std::abs(after.p.floats()[i] - exact.p) / Ulp(p));
  }
  return worst;
}

TEST_CASE("Adam.OneStepIsWithinAFewUlpsOfFp64", "[adam]") {
  for (const uint32_t mode : {MLPO_ADAMW, MLPO_ADAM}) {
    for (const int64_t step : {5, 100, 100'000}) {
      mlpo_hyper hyper = TypicalHyper(mode);
      hyper.grad_scale = 1;
      const Ulps worst = WorstOfOneStep(hyper, step);
      INFO("mode " << mode << " step " << step);
      // L2's gradient comes with up to 1.5 ULP of its own (a product and a sum), and v has its square.
      CHECK(worst.v <= (mode == MLPO_ADAM ? 5 : 2));
      CHECK(worst.m <= 2);
      CHECK(worst.p <= 3);
    }
  }
}

TEST_CASE("Adam.ScalarsAreFormedInFp64AndRoundedOnce", "[adam]") {
  mlpo_hyper hyper = TypicalHyper();
  const AdamScalars adamw = MakeScalars(hyper, 1);
  CHECK(adamw.one_minus_beta2 == static_cast<float>(0.001));  // 1.0f - 0.999f is 0.00099998713
  CHECK(adamw.one_minus_beta1 == static_cast<float>(0.1));
  CHECK(adamw.decay == static_cast<float>(0.99999));
  CHECK(adamw.step_size == static_cast<float>(0.01));  // lr / (1 - beta1)
  CHECK(adamw.sqrt_bc2 == static_cast<float>(std::sqrt(0.001)));
  CHECK(!adamw.l2);
  hyper.mode = MLPO_ADAM;
  hyper.flags = MLPO_HYPER_NO_BIAS_CORRECTION;
  const AdamScalars adam = MakeScalars(hyper, 1);
  CHECK(adam.decay == 0.01f);
  CHECK(adam.step_size == 0.001f);
  CHECK(adam.sqrt_bc2 == 1.0f);
  CHECK(adam.l2);
}

}  // namespace
}  // namespace mlpo::testing
