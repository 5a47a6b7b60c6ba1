// ReferenceTrainer: one subgroup trained through a real daemon, and beside it the same with the scalar reference in
// memory. Both get the same gradients, made from (seed, step, element), so that any two runs can be compared.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <mlpo/client.hpp>
#include <random>
#include <string>
#include <vector>

#include "daemon/adam/kernel.h"
#include "daemon/adam/reference.h"

namespace mlpo::test {

struct TrainerOptions {
  std::string key = "layer";
  uint64_t numel = 10'007;
  mlpo_dtype dtype = MLPO_BFLOAT16;
  mlpo_dtype grad_dtype = MLPO_BFLOAT16;
  uint64_t seed = 1;
  bool keep = false;  // no slot of its own: it has to be lent one
};

class ReferenceTrainer {
 public:
  ReferenceTrainer(Client& client, const TrainerOptions& options)
      : options_(options), p_(options.numel), m_(options.numel), v_(options.numel), expected_(options.numel * 4) {
    std::mt19937_64 random(options.seed);
    std::normal_distribution<float> normal(0, 0.02f);
    for (float& value : p_) value = normal(random);
    mlpo_subgroup_options registration = MLPO_SUBGROUP_OPTIONS_INIT;
    registration.key = options_.key.c_str();
    registration.numel = options_.numel;
    registration.dtype = options_.dtype;
    registration.grad_dtype = options_.grad_dtype;
    registration.initial = p_.data();
    registration.keep = options_.keep ? 1 : 0;
    subgroup_.emplace_back(client.Register(registration));
  }

  Subgroup& subgroup() { return subgroup_.front(); }
  const std::vector<float>& p() const { return p_; }

  // Writes the step's gradient into the slot; the reference keeps its own copy.
  void WriteGradient() {
    MakeGradient();
    RewriteGradient();
  }
  // The step's gradient once more, after what took it was lost; and the state from before that step.
  void RewriteGradient() {
    if (!grad_.empty()) std::memcpy(subgroup().info().grad, grad_.data(), grad_.size());
  }
  void RestoreState() { subgroup().WriteState(0, options_.numel, p_.data(), m_.data(), v_.data()); }
  // All of the reference, as it is after the last step that it made: a checkpoint's state, for a trainer that is
  // restored from it.
  struct Expected {
    std::vector<float> p, m, v;
    std::vector<std::byte> param;
    int64_t step = 0;
  };
  Expected expected() const { return {p_, m_, v_, expected_, referred_}; }
  void GoOnFrom(const Expected& state) {
    p_ = state.p;
    m_ = state.m;
    v_ = state.v;
    expected_ = state.param;
    step_ = referred_ = state.step;
  }
  // The reference alone makes its next step.
  void StepAlone() {
    MakeGradient();
    MakeHyper(0.5);
    StepReference();
  }
  Request SubmitUpdate(double grad_scale = 0.5) {
    MakeHyper(grad_scale);
    mlpo_update_options update = MLPO_UPDATE_OPTIONS_INIT;
    update.lr = hyper_.lr;
    update.grad_scale = grad_scale;
    return subgroup().SubmitUpdate(update);
  }
  // The same step in memory.
  void StepReference() {
    AdamRange range;
    range.p = p_.data();
    range.m = m_.data();
    range.v = v_.data();
    range.grad = grad_.data();
    range.param = expected_.data();
    range.n = options_.numel;
    range.grad_dtype = options_.grad_dtype;
    range.dtype = options_.dtype;
    reference::Adam(MakeScalars(hyper_, step_), range);
    referred_ = step_;
  }
  void Step() {
    WriteGradient();
    subgroup().SubmitGrad().Wait();
    SubmitUpdate().Wait();
    StepReference();
  }
  // Those in the slot, to the bit: they can be read when the session has ended, too.
  bool ParametersAreRight() {
    return std::memcmp(subgroup().info().param, expected_.data(), options_.numel * ElementBytes(options_.dtype)) == 0;
  }
  // Parameters in the slot, and all three parts of the state, to the bit. "" or what differs.
  std::string Difference() {
    if (options_.numel == 0) return "";
    if (step_ > 0 && !ParametersAreRight()) return options_.key + ": parameters in the slot differ";
    std::vector<float> p(options_.numel), m(options_.numel), v(options_.numel);
    subgroup().ReadState(0, options_.numel, p.data(), m.data(), v.data());
    const size_t bytes = options_.numel * sizeof(float);
    if (std::memcmp(p.data(), p_.data(), bytes) != 0) return options_.key + ": master parameters differ";
    if (std::memcmp(m.data(), m_.data(), bytes) != 0) return options_.key + ": first moments differ";
    if (std::memcmp(v.data(), v_.data(), bytes) != 0) return options_.key + ": second moments differ";
    return "";
  }

 private:
  void MakeGradient() {
    ++step_;
    const size_t bytes = ElementBytes(options_.grad_dtype);
    grad_.assign(options_.numel * bytes, std::byte{0});
    std::mt19937_64 random(options_.seed * 1'000'003 + static_cast<uint64_t>(step_));
    std::normal_distribution<float> normal(0, 1e-3f);
    for (size_t i = 0; i < options_.numel; ++i) {
      reference::StoreElement(grad_.data(), options_.grad_dtype, i, normal(random));
    }
  }
  void MakeHyper(double grad_scale) {
    hyper_ = {1e-3 * static_cast<double>(step_), 0.9, 0.999, 1e-8, 0.01, grad_scale, MLPO_ADAMW, 0, 0};
  }

  const TrainerOptions options_;
  std::vector<float> p_, m_, v_;
  std::vector<std::byte> grad_;
  std::vector<std::byte> expected_;
  std::vector<Subgroup> subgroup_;  // one
  mlpo_hyper hyper_ = {};
  int64_t step_ = 0;
  int64_t referred_ = 0;  // that the reference has made
};

inline Client Connect(const std::string& socket, const std::string& job = "test", int rank = 0, int world_size = 1,
                      uint64_t arena_bytes = 0) {
  mlpo_connect_options options = MLPO_CONNECT_OPTIONS_INIT;
  options.socket = socket.c_str();
  options.job = job.c_str();
  options.rank = rank;
  options.world_size = world_size;
  options.arena_bytes = arena_bytes;
  return Client::Connect(options);
}

}  // namespace mlpo::test
