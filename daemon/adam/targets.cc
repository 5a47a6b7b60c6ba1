// Which kernel table is in use, and the functions of kernel.h that go through it.
#include <array>
#include <atomic>
#include <cmath>
#include <limits>

#include "daemon/adam/kernels.h"

namespace mlpo {
namespace {

constexpr std::array kKnownTargets = {"scalar", "sse4", "avx2", "avx512", "neon"};

const std::vector<const Kernels*>& Runnable() {  // best first, the scalar one last
  static const std::vector<const Kernels*> kernels = [] {
    std::vector<const Kernels*> all = VectorKernels();
    all.push_back(&ScalarKernels());
    return all;
  }();
  return kernels;
}

// Relaxed: tables are constant, so that no other store has to be seen with the pointer.
std::atomic<const Kernels*> active{nullptr};

const Kernels& Active() {
  const Kernels* kernels = active.load(std::memory_order_relaxed);
  if (kernels == nullptr) {
    kernels = Runnable().front();
    active.store(kernels, std::memory_order_relaxed);
  }
  return *kernels;
}

}  // namespace

std::vector<std::string> RunnableTargets() {
  std::vector<std::string> names;
  for (const Kernels* kernels : Runnable()) {
    if (names.empty() || names.back() != kernels->name) names.emplace_back(kernels->name);
  }
  return names;
}

Status SetTarget(const std::string& target) {
  for (const Kernels* kernels : Runnable()) {
    if (target == "auto" || target == kernels->name) {
      active.store(kernels, std::memory_order_relaxed);
      return {};
    }
  }
  std::string has;
  for (const std::string& name : RunnableTargets()) has += (has.empty() ? "" : ", ") + name;
  for (const char* known : kKnownTargets) {
    if (target == known) {
      return Status(-ENOTSUP, "instruction set '" + target + "' is not offered by this CPU and build, which have " +
                                  has + "; choose one of these or 'auto'");
    }
  }
  return Status::Invalid("instruction set '" + target + "' is not known; known here: auto, " + has);
}

std::string ActiveTarget() { return Active().name; }

void AdamUpdate(const AdamScalars& scalars, const AdamRange& range) { Active().adam(scalars, range); }

void AccumulateStats(const void* grad, mlpo_dtype dtype, size_t position, size_t n, StatLanes* lanes) {
  Active().add_squares(grad, dtype, position, n, lanes->lane);
  for (double& lane : lanes->lane) {
    // Squares of FP32 values cannot overflow FP64, nor can 2^12 of them in a lane: a sum is finite exactly if all its
    // elements are.
    if (std::isfinite(lane)) continue;
    lanes->all_finite = false;
    if (std::isnan(lane)) lane = std::numeric_limits<double>::quiet_NaN();  // else its payload would depend on the set
  }
}

double ReduceLanes(const StatLanes& lanes) {
  double sum[MLPO_STAT_LANES];
  for (size_t i = 0; i < MLPO_STAT_LANES; ++i) sum[i] = lanes.lane[i];
  for (size_t half = MLPO_STAT_LANES / 2; half >= 1; half /= 2) {
    for (size_t i = 0; i < half; ++i) sum[i] = sum[i] + sum[i + half];
  }
  return std::isnan(sum[0]) ? std::numeric_limits<double>::quiet_NaN() : sum[0];
}

void RoundTo(mlpo_dtype dtype, const float* from, void* to, size_t n) { Active().round_to(dtype, from, to, n); }

void WidenFrom(mlpo_dtype dtype, const void* from, float* to, size_t n) { Active().widen_from(dtype, from, to, n); }

}  // namespace mlpo
