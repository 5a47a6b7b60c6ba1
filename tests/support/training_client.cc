// training_client SOCKET JOB RANK WORLD_SIZE STEPS SEED [ARENA_BYTES [DIRECTORY RUN]]: one rank as a process of its
// own, for tests that stop or kill it. ARENA_BYTES: of its whole arena; 0, the default: it grows by 64 MiB at least.
//
// Waits for a byte (or the end) of its standard input, connects, registers two subgroups and trains them. STEPS > 0: so
// many steps beside the scalar reference, then "equal" (exit code 0) or what differs (1). STEPS 0: for ever, without
// the reference. Lines on standard output: "connected", "registered", "step N". An error of the client library is
// "error CODE TEXT", exit code 3.
//
// With DIRECTORY it restores the newest checkpoint there, compares all of it, and trains and saves for ever, under two
// tags in turn, each over its last one; all ranks at the same steps. RUN is another number each time that the job is
// started. In DIRECTORY-expected is what the reference says of each save. Lines: "restored N" or "new",
// when the state has been compared; "saved N", when the parts of all ranks are there. Exit code 1 if what was restored
// is not what was saved, 4 with "parted" if another one was completed, by a save of before, between two ranks'
// restores.
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/checkpoints.h"
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

// ---- Saving and restoring ----

using Trainers = std::vector<std::unique_ptr<ReferenceTrainer>>;
namespace fs = std::filesystem;

constexpr int kStepsPerSave = 3;

// What the reference says of this rank's saves, in a file each, and up to where each rank has saved.
class Book {
 public:
  Book(const std::string& directory, int rank, int world_size)
      : folder_(directory + "-expected"), rank_(rank), world_size_(world_size) {
    fs::create_directories(folder_);
  }

  void Write(int64_t step, const Trainers& trainers) const {
    const fs::path name = File("state", rank_, step);
    std::ofstream file(name.string() + ".new", std::ios::binary | std::ios::trunc);
    for (const auto& trainer : trainers) {
      const ReferenceTrainer::Expected state = trainer->expected();
      for (const std::vector<float>* part : {&state.p, &state.m, &state.v}) Put(file, part->data(), part->size() * 4);
      Put(file, state.param.data(), state.param.size());
    }
    file.close();
    if (!file) throw std::runtime_error("cannot write " + name.string());
    fs::rename(name.string() + ".new", name);
  }

  void Read(int64_t step, const Trainers& trainers) const {
    std::ifstream file(File("state", rank_, step), std::ios::binary);
    for (const auto& trainer : trainers) {
      ReferenceTrainer::Expected state = trainer->expected();  // for its sizes
      for (std::vector<float>* part : {&state.p, &state.m, &state.v}) Get(file, part->data(), part->size() * 4);
      Get(file, state.param.data(), state.param.size());
      state.step = step;
      trainer->GoOnFrom(state);
    }
    if (!file) throw std::runtime_error("nothing is known of step " + std::to_string(step));
  }

  // Those before that checkpoint, which is complete, are not needed any more.
  void Forget(int64_t before) const {
    std::error_code ignored;  // the other ranks forget, too
    for (const auto& entry : fs::directory_iterator(folder_, ignored)) {
      const std::string name = entry.path().filename(), mine = "state-" + std::to_string(rank_) + "-";
      if (name.rfind(mine, 0) == 0 && std::atoll(name.c_str() + mine.size()) < before) fs::remove(entry, ignored);
    }
  }

  // Of this run: which checkpoint all ranks restore. Step 0: none.
  struct Choice {
    int64_t step = 0;
    std::string tag;
  };
  void Choose(const Choice& choice, const std::string& run) const {
    const fs::path name = folder_ / ("done-" + run + "-choice");
    std::ofstream file(name.string() + ".new", std::ios::trunc);
    file << choice.step << " " << choice.tag << "\n";
    file.close();
    if (!file) throw std::runtime_error("cannot write " + name.string());
    fs::rename(name.string() + ".new", name);
  }
  Choice Chosen(const std::string& run) const {
    const fs::path name = folder_ / ("done-" + run + "-choice");
    AwaitFile(name, "rank 0 chooses no checkpoint");
    Choice choice;
    std::ifstream(name) >> choice.step >> choice.tag;
    return choice;
  }

  // Until every rank has come to this step of this run: or one is two saves ahead, and no two parts belong together.
  void Await(int64_t step, const std::string& run) const {
    std::ofstream(File("done-" + run, rank_, step)).close();
    for (int rank = 0; rank < world_size_; ++rank)
      AwaitFile(File("done-" + run, rank, step), "another rank does not save");
  }

 private:
  static void AwaitFile(const fs::path& name, const char* problem) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!fs::exists(name)) {
      if (std::chrono::steady_clock::now() > deadline) throw std::runtime_error(problem);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  fs::path File(const std::string& what, int rank, int64_t step) const {
    return folder_ / (what + "-" + std::to_string(rank) + "-" + std::to_string(step));
  }
  static void Put(std::ofstream& file, const void* data, size_t bytes) {
    file.write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
  }
  static void Get(std::ifstream& file, void* data, size_t bytes) {
    file.read(static_cast<char*>(data), static_cast<std::streamsize>(bytes));
  }

  const fs::path folder_;
  const int rank_, world_size_;
};

// Rank 0's newest complete checkpoint, by all ranks. Its step; 0: there is none; -1: it is another one already.
int64_t RestoreNewest(Client& client, const std::string& directory, const Trainers& trainers, const Book& book,
                      const std::string& run, bool chooses) {
  Book::Choice choice;
  if (!chooses) choice = book.Chosen(run);
  std::unique_ptr<Restoring> restoring;
  try {
    if (chooses || choice.step > 0) restoring = std::make_unique<Restoring>(client, directory, choice.tag);
  } catch (const mlpo::Error& error) {
    if (!chooses || error.code() != -ENOENT) throw;
  }
  if (chooses) {
    if (restoring != nullptr) choice = {static_cast<int64_t>(restoring->step()), restoring->tag()};
    book.Choose(choice, run);
  }
  if (restoring == nullptr) return 0;
  if (static_cast<int64_t>(restoring->step()) != choice.step) return -1;
  std::vector<mlpo::Request> requests;
  for (const auto& trainer : trainers) requests.push_back(restoring->Submit(trainer->subgroup()));
  for (mlpo::Request& request : requests) request.Wait();
  restoring->End();
  return choice.step;
}

int SaveForEver(Client& client, Trainers& trainers, char** argv) {
  const std::string directory = argv[8], run = argv[9];
  const int rank = std::atoi(argv[3]);
  const Book book(directory, rank, std::atoi(argv[4]));
  int64_t step = RestoreNewest(client, directory, trainers, book, run, rank == 0);
  if (step < 0) {
    Say("parted");
    return 4;
  }
  if (step > 0) {
    book.Read(step, trainers);
    book.Forget(step);
  }
  for (const auto& trainer : trainers) {
    if (const std::string difference = trainer->Difference(); !difference.empty()) {
      Say("restored step " + std::to_string(step) + " is another one: " + difference);
      return 1;
    }
  }
  Say(step > 0 ? "restored " + std::to_string(step) : "new");
  for (uint64_t saves = 0;; ++saves) {
    for (int i = 0; i < kStepsPerSave; ++i) {
      for (const auto& trainer : trainers) trainer->Step();
    }
    step += kStepsPerSave;
    book.Write(step, trainers);
    std::array<uint8_t, 16> attempt{};
    const auto number = static_cast<uint64_t>(std::atoll(run.c_str()));
    std::memcpy(attempt.data(), &number, sizeof number);
    std::memcpy(attempt.data() + sizeof number, &step, sizeof step);
    Save save(client, directory, saves % 2 == 0 ? "even" : "odd", static_cast<uint64_t>(step), /*overwrite=*/true,
              attempt.data());
    mlpo::Request take = save.Take(), saved = save.Saved();
    take.Wait();
    for (const auto& trainer : trainers) trainer->Step();  // beside it
    ++step;
    if (saved.Wait().value == 1) {
      Say("saved " + std::to_string(step - 1));
      book.Forget(step - 1);
    }
    book.Await(step, run);
  }
}

int Train(char** argv, bool saves) {
  const auto arena_bytes = static_cast<uint64_t>(argv[7] == nullptr ? 0 : std::atoll(argv[7]));
  Client client = Connect(argv[1], argv[2], std::atoi(argv[3]), std::atoi(argv[4]), arena_bytes);
  Say("connected");
  const auto seed = static_cast<uint64_t>(std::atoll(argv[6]));
  const std::string rank = saves ? argv[3] : "";  // in a checkpoint each tensor is a name of its own
  Trainers trainers;
  trainers.push_back(std::make_unique<ReferenceTrainer>(
      client, TrainerOptions{"a" + rank, 50'001, MLPO_BFLOAT16, MLPO_BFLOAT16, 2 * seed + 1}));
  trainers.push_back(std::make_unique<ReferenceTrainer>(
      client, TrainerOptions{"b" + rank, 12'289, MLPO_FLOAT32, MLPO_FLOAT32, 2 * seed}));
  Say("registered");
  if (saves) return SaveForEver(client, trainers, argv);
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
  if (argc != 7 && argc != 8 && argc != 10) return 64;
  char go;
  (void)!::read(STDIN_FILENO, &go, 1);
  try {
    return Train(argv, argc == 10);
  } catch (const mlpo::Error& error) {
    Say("error " + std::to_string(error.code()) + " " + error.what());
    return 3;
  } catch (const std::exception& error) {  // of the test itself
    Say(std::string("broken ") + error.what());
    return 2;
  }
}
