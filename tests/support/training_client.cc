// training_client SOCKET JOB RANK WORLD_SIZE STEPS SEED [ARENA_BYTES]: one rank as a process of its own, for tests that
// stop or kill it. ARENA_BYTES: of its whole arena; 0, the default: it grows by 64 MiB at least.
//
// Waits for a byte (or the end) of its standard input, connects, registers two subgroups and trains them. STEPS > 0: so
// many steps beside the scalar reference, then "equal" (exit code 0) or what differs (1). STEPS 0: for ever, without
// the reference. Lines on standard output: "connected", "registered", "step N". An error of the client library is
// "error CODE TEXT", exit code 3.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "tests/support/reference_trainer.h"

using namespace mlpo::test;
using mlpo::Client;

namespace {

void Say(const std::string& line) {
  std::puts(line.c_str());
  std::fflush(stdout);
}

// Gradients in pieces, updates that overlap, state read and written: whatever a kill may cut through.
[[noreturn]] void Churn(std::vector<std::unique_ptr<ReferenceTrainer>>& trainers) {
  std::vector<float> state(4'096);
  for (int step = 1;; ++step) {
    std::vector<mlpo::Request> requests;
    for (auto& trainer : trainers) {
      const auto info = trainer->subgroup().info();
      std::memset(info.grad, step & 0x3f, info.numel * mlpo::ElementBytes(static_cast<mlpo_dtype>(info.grad_dtype)));
      const uint64_t half = info.numel / 2;
      requests.push_back(trainer->subgroup().SubmitGrad({{half, info.numel - half, MLPO_GRAD_VALUE, 0}}));
      requests.push_back(trainer->subgroup().SubmitGrad({{0, half, MLPO_GRAD_VALUE, 0}}));
      if (step % 7 == 0) {
        trainer->subgroup().Discard(true);
        continue;
      }
      requests.push_back(trainer->SubmitUpdate());
    }
    if (step % 3 == 0) trainers[0]->subgroup().ReadState(1, state.size(), state.data(), nullptr, nullptr);
    if (step % 5 == 0) trainers[1]->subgroup().WriteState(1, state.size(), state.data(), nullptr, nullptr);
    for (mlpo::Request& request : requests) {
      if (step % 7 != 0) request.Wait();  // discarded gradients fail
    }
    Say("step " + std::to_string(step));
  }
}

int Train(char** argv) {
  const auto arena_bytes = static_cast<uint64_t>(argv[7] == nullptr ? 0 : std::atoll(argv[7]));
  Client client = Connect(argv[1], argv[2], std::atoi(argv[3]), std::atoi(argv[4]), arena_bytes);
  Say("connected");
  const auto seed = static_cast<uint64_t>(std::atoll(argv[6]));
  std::vector<std::unique_ptr<ReferenceTrainer>> trainers;
  trainers.push_back(std::make_unique<ReferenceTrainer>(
      client, TrainerOptions{"a", 50'001, MLPO_BFLOAT16, MLPO_BFLOAT16, 2 * seed + 1}));
  trainers.push_back(
      std::make_unique<ReferenceTrainer>(client, TrainerOptions{"b", 12'289, MLPO_FLOAT32, MLPO_FLOAT32, 2 * seed}));
  Say("registered");
  const int steps = std::atoi(argv[5]);
  if (steps == 0) Churn(trainers);
  for (int step = 1; step <= steps; ++step) {
    for (auto& trainer : trainers) trainer->Step();
    Say("step " + std::to_string(step));
  }
  for (auto& trainer : trainers) {
    const std::string difference = trainer->Difference();
    if (difference.empty()) continue;
    Say(difference);
    return 1;
  }
  Say("equal");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 7 && argc != 8) return 64;
  char go;
  (void)!::read(STDIN_FILENO, &go, 1);
  try {
    return Train(argv);
  } catch (const mlpo::Error& error) {
    Say("error " + std::to_string(error.code()) + " " + error.what());
    return 3;
  }
}
