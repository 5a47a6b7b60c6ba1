// What is in memory that client and daemon share, and in files: of the round that it should be of, and of nobody else.
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <vector>

#include "tests/support/catch.h"
#include "tests/support/daemon_process.h"
#include "tests/support/daemon_status.h"
#include "tests/support/reference_trainer.h"

using namespace mlpo::test;
using mlpo::Client;

namespace {

mlpo_subgroup_options Floats(const char* key, uint64_t numel) {
  mlpo_subgroup_options options = MLPO_SUBGROUP_OPTIONS_INIT;
  options.key = key;
  options.numel = numel;
  options.dtype = MLPO_FLOAT32;
  options.grad_dtype = MLPO_FLOAT32;
  return options;
}

bool AllAre(const float* values, uint64_t count, float value) {
  return std::all_of(values, values + count, [value](float v) { return v == value; });
}

}  // namespace

// Each round fills a gradient with its number, and begins the next one of that subgroup as soon as its update has
// ended: gradients and parameters are the same bytes. With lr 1, beta1 = 0, beta2 = 0 and eps 0 a step is the
// gradient's sign, so that after so many rounds every parameter is the sum of their signs. 10^5 rounds with
// MLPO_LONG=1.
TEST_CASE("C22_NoBufferEverMixesRounds") {
  const uint64_t rounds = LongForm() ? 100'000 : 1'500;
  DaemonProcess daemon({.paths = 2, .memory = "12MiB", .block = "65536"});
  Client client = Connect(daemon.socket());
  struct Group {
    mlpo::Subgroup subgroup;
    uint64_t numel;
    float sum = 0;
    std::unique_ptr<mlpo::Request> update = nullptr;
  };
  std::vector<Group> groups;
  for (const uint64_t numel : {1'024, 1'025, 16'384, 65'537, 262'144, 1'048'576}) {  // 4 KiB to 4 MiB
    const std::string key = "w" + std::to_string(numel);
    groups.push_back({client.Register(Floats(key.c_str(), numel)), numel});
  }
  std::mt19937_64 random(22);
  const auto finish = [](Group& group) {
    if (group.update == nullptr) return;
    group.update->Wait();
    group.update.reset();
    const auto* parameters = static_cast<const float*>(group.subgroup.info().param);
    REQUIRE(AllAre(parameters, group.numel, group.sum));
  };
  for (uint64_t round = 1; round <= rounds; ++round) {
    // Large ones seldom, or they take all the time.
    Group& group = groups[std::min<size_t>(random() % groups.size(), random() % groups.size())];
    finish(group);
    const bool up = random() % 2 == 0;
    const float value = static_cast<float>(round) * (up ? -1 : 1);
    auto* gradient = static_cast<float*>(group.subgroup.info().grad);
    std::fill_n(gradient, group.numel, value);
    group.subgroup.SubmitGrad().Wait();
    mlpo_update_options update = MLPO_UPDATE_OPTIONS_INIT;
    update.lr = 1;
    update.beta1 = update.beta2 = update.eps = update.weight_decay = 0;
    group.update = std::make_unique<mlpo::Request>(group.subgroup.SubmitUpdate(update));
    group.sum += up ? 1 : -1;
  }
  for (Group& group : groups) finish(group);
}

TEST_CASE("C30_NothingOfAJobIsInAnothersMemoryOrToBeReadInItsFiles") {
  constexpr uint64_t kNumel = 200'003;
  DaemonProcess daemon({.paths = 1, .memory = "512KiB"});
  {
    Client client = Connect(daemon.socket(), "first");
    const std::vector<float> secret(kNumel, 1234.5f);
    mlpo_subgroup_options options = Floats("w", kNumel);
    options.initial = secret.data();
    mlpo::Subgroup subgroup = client.Register(options);
    for (int i = 0; i < 2; ++i) {
      std::fill_n(static_cast<float*>(subgroup.info().grad), kNumel, 1234.5f);
      subgroup.SubmitGrad().Wait();
      subgroup.SubmitUpdate(MLPO_UPDATE_OPTIONS_INIT).Wait();
    }
    client.FlushObject("o", secret.data(), kNumel * sizeof(float));
    const std::vector<std::string> files = daemon.ScratchFiles();
    REQUIRE(!files.empty());
    for (const std::string& file : files) {
      CAPTURE(file);
      struct stat st = {};
      REQUIRE(::stat(file.c_str(), &st) == 0);
      CHECK((st.st_mode & 07777) == 0600);
      REQUIRE(::stat(std::filesystem::path(file).parent_path().c_str(), &st) == 0);
      CHECK((st.st_mode & 07777) == 0700);
    }
    client.Close();
  }
  REQUIRE(daemon.ScratchGone());
  Client client = Connect(daemon.socket(), "second");
  mlpo::Subgroup subgroup = client.Register(Floats("w", kNumel));
  const auto info = subgroup.info();
  CHECK(AllAre(static_cast<const float*>(info.grad), kNumel, 0));
  CHECK(AllAre(static_cast<const float*>(info.param), kNumel, 0));
  std::vector<float> state(kNumel, 1);
  for (int part = 0; part < 3; ++part) {
    subgroup.ReadState(0, kNumel, part == 0 ? state.data() : nullptr, part == 1 ? state.data() : nullptr,
                       part == 2 ? state.data() : nullptr);
    CHECK(AllAre(state.data(), kNumel, 0));
  }
  CHECK(!client.ObjectSize("o"));  // names are a job's own
}
