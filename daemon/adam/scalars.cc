#include <cmath>

#include "daemon/adam/kernel.h"
#include "daemon/base/check.h"

namespace mlpo {

AdamScalars MakeScalars(const mlpo_hyper& hyper, int64_t step) {
  MLPO_CHECK(step >= 1);
  MLPO_CHECK(hyper.mode == MLPO_ADAMW || hyper.mode == MLPO_ADAM);
  double bias_correction1 = 1;
  double bias_correction2 = 1;
  if (!(hyper.flags & MLPO_HYPER_NO_BIAS_CORRECTION)) {
    bias_correction1 = 1 - std::pow(hyper.beta1, static_cast<double>(step));
    bias_correction2 = 1 - std::pow(hyper.beta2, static_cast<double>(step));
  }
  AdamScalars scalars;
  scalars.l2 = hyper.mode == MLPO_ADAM;
  scalars.grad_scale = static_cast<float>(hyper.grad_scale);
  scalars.decay = static_cast<float>(scalars.l2 ? hyper.weight_decay : 1 - hyper.lr * hyper.weight_decay);
  scalars.one_minus_beta1 = static_cast<float>(1 - hyper.beta1);
  scalars.beta2 = static_cast<float>(hyper.beta2);
  scalars.one_minus_beta2 = static_cast<float>(1 - hyper.beta2);
  scalars.step_size = static_cast<float>(hyper.lr / bias_correction1);
  scalars.sqrt_bc2 = static_cast<float>(std::sqrt(bias_correction2));
  scalars.eps = static_cast<float>(hyper.eps);
  return scalars;
}

}  // namespace mlpo
