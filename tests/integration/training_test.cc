// A client trains through a real daemon: every bit is the reference's, in whatever configuration.
#include <csignal>
#include <cstring>
#include <memory>

#include "tests/support/catch.h"
#include "tests/support/daemon_process.h"
#include "tests/support/reference_trainer.h"

using namespace mlpo::test;
using mlpo::Client;

namespace {

// Several subgroups, larger together than any pool used here but the largest; odd sizes; all kinds of types.
void TrainAndCompare(const DaemonProcess::Options& options, int steps) {
  DaemonProcess daemon(options);
  Client client = Connect(daemon.socket());
  std::vector<std::unique_ptr<ReferenceTrainer>> trainers;
  const TrainerOptions kinds[] = {
      {"bf16", 50'001, MLPO_BFLOAT16, MLPO_BFLOAT16, 1}, {"fp16", 8'192, MLPO_FLOAT16, MLPO_FLOAT16, 2},
      {"fp32", 12'289, MLPO_FLOAT32, MLPO_FLOAT32, 3},   {"mixed", 4'097, MLPO_BFLOAT16, MLPO_FLOAT32, 4},
      {"three", 3, MLPO_BFLOAT16, MLPO_BFLOAT16, 5},     {"one", 1, MLPO_FLOAT32, MLPO_BFLOAT16, 6},
      {"none", 0, MLPO_BFLOAT16, MLPO_BFLOAT16, 7},
  };
  for (const TrainerOptions& kind : kinds) trainers.push_back(std::make_unique<ReferenceTrainer>(client, kind));
  for (int step = 0; step < steps; ++step) {
    for (auto& trainer : trainers) trainer->WriteGradient();
    for (auto& trainer : trainers) trainer->subgroup().SubmitGrad().Wait();
    std::vector<mlpo::Request> updates;
    for (auto& trainer : trainers) updates.push_back(trainer->SubmitUpdate());
    for (mlpo::Request& update : updates) update.Wait();
    for (auto& trainer : trainers) trainer->StepReference();
  }
  for (auto& trainer : trainers) CHECK(trainer->Difference() == "");
  client = Connect(daemon.socket(), "other");  // ends the first session
  CHECK(daemon.ScratchGone());
}

// An arena with room for 5 of 28 slots: all gradients are made and kept before the first update.
void TrainWithFewSlots(const DaemonProcess::Options& options, int steps) {
  constexpr uint64_t kElements = 25'003, kArena = 1 << 20;
  DaemonProcess daemon(options);
  Client client = Connect(daemon.socket(), "test", 0, 1, kArena);
  const mlpo_dtype types[][2] = {{MLPO_BFLOAT16, MLPO_BFLOAT16},
                                 {MLPO_FLOAT16, MLPO_FLOAT16},
                                 {MLPO_FLOAT32, MLPO_BFLOAT16},
                                 {MLPO_BFLOAT16, MLPO_FLOAT32}};
  std::vector<std::unique_ptr<ReferenceTrainer>> trainers;
  for (uint64_t i = 0; i < 28; ++i) {
    const auto& [dtype, grad_dtype] = types[i % 4];
    trainers.push_back(std::make_unique<ReferenceTrainer>(
        client, TrainerOptions{"s" + std::to_string(i), kElements + i, dtype, grad_dtype, i + 1, true}));
  }
  for (int step = 0; step < steps; ++step) {
    std::vector<mlpo::Request> grads;
    for (auto& trainer : trainers) {
      trainer->subgroup().LendSlot();
      trainer->WriteGradient();
      grads.push_back(trainer->subgroup().SubmitGrad());
    }
    for (mlpo::Request& grad : grads) CHECK(grad.Wait().window_complete == 1);
    for (auto& trainer : trainers) CHECK(trainer->subgroup().info().grad == nullptr);  // its slot has gone back
    std::vector<mlpo::Request> updates;
    const auto finish = [&](size_t i) {
      updates[i].Wait();
      trainers[i]->StepReference();
      CHECK(trainers[i]->Difference() == "");
      CHECK(trainers[i]->subgroup().info().holds_param == 1);
      CHECK(*trainers[i]->subgroup().info().epoch_word == static_cast<uint64_t>(step) + 1);
      trainers[i]->subgroup().GiveSlotBack();
      CHECK(trainers[i]->subgroup().info().param == nullptr);
    };
    for (size_t i = 0; i < trainers.size(); ++i) {
      updates.push_back(trainers[i]->SubmitUpdate());
      if (i >= 3) finish(i - 3);
    }
    for (size_t i = trainers.size() - 3; i < trainers.size(); ++i) finish(i);
  }
  CHECK(client.info().arena_bytes <= kArena);
}

}  // namespace

TEST_CASE("Training.AllInHostMemory") { TrainAndCompare({.paths = 1, .memory = "16MiB"}, 4); }
TEST_CASE("Training.OnePathPoolOfThreeBuffers") { TrainAndCompare({.paths = 1, .memory = "147456"}, 4); }
TEST_CASE("Training.TwoPathsPoolOfThreeBuffers") { TrainAndCompare({.paths = 2, .memory = "147456"}, 4); }
TEST_CASE("Training.ThreePathsSmallPool") { TrainAndCompare({.paths = 3, .memory = "512KiB"}, 4); }
TEST_CASE("Training.ThreadEngine") { TrainAndCompare({.paths = 2, .memory = "256KiB", .engine = "threads"}, 4); }
TEST_CASE("Training.ScalarKernel") {
  TrainAndCompare({.paths = 2, .memory = "256KiB", .environment = {"MLPO_ADAM__TARGET=scalar"}}, 4);
}
TEST_CASE("Training.GradientsFlushedTwoPathsPoolOfThreeBuffers") {
  TrainAndCompare({.paths = 2, .memory = "147456", .environment = {"MLPO_SCHEDULER__GRADIENTS=flushed"}}, 4);
}
TEST_CASE("Training.GradientsFlushedAllInHostMemory") {
  TrainAndCompare({.paths = 1, .memory = "16MiB", .environment = {"MLPO_SCHEDULER__GRADIENTS=flushed"}}, 4);
}
TEST_CASE("Training.FewSlotsTwoPathsPoolOfThreeBuffers") { TrainWithFewSlots({.paths = 2, .memory = "147456"}, 3); }
TEST_CASE("Training.FewSlotsAllInHostMemory") { TrainWithFewSlots({.paths = 1, .memory = "64MiB"}, 3); }
TEST_CASE("Training.FewSlotsGradientsFlushed") {
  TrainWithFewSlots({.paths = 2, .memory = "512KiB", .environment = {"MLPO_SCHEDULER__GRADIENTS=flushed"}}, 2);
}
TEST_CASE("Training.LargeBlocks") { TrainAndCompare({.paths = 2, .memory = "8MiB", .block = "65536"}, 4); }

TEST_CASE("Training.DrainsOnSigtermAndExitsWith0") {
  DaemonProcess daemon;
  Client client = Connect(daemon.socket());
  ReferenceTrainer trainer(client, {});
  trainer.Step();
  daemon.Signal(SIGTERM);
  CHECK(daemon.WaitForEnd() == 0);
  CHECK(daemon.ScratchFiles().empty());
  CHECK_THROWS_AS(client.SubmitNop().Wait(), mlpo::Error);
}
