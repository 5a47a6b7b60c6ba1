// State through the staging area: chunks, parts, steps, and what a deadline leaves behind.
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "mlpo/client.h"
#include "tests/support/catch.h"
#include "tests/support/client_fixture.h"
#include "tests/support/fake_daemon.h"

namespace {

constexpr int64_t kSecond = 1'000'000'000;
using Script = FakeDaemon::Script;

std::vector<float> Ramp(size_t count, float base) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = base + static_cast<float>(i);
  return values;
}

}  // namespace

TEST_CASE("State.InitialValuesArriveInChunks") {
  auto script = std::make_shared<Script>();
  script->staging_bytes = 8192;  // two halves of 1024 floats
  FakeDaemon daemon(script);
  Connected client(daemon);
  for (const size_t count : {size_t{1}, size_t{1023}, size_t{1024}, size_t{1025}, size_t{2048}, size_t{10'007}}) {
    const std::vector<float> initial = Ramp(count, 0.5f);
    mlpo_subgroup* subgroup = client.Register(std::to_string(count).c_str(), count, initial.data());
    std::vector<float> master(count, -1), exp_avg(count, -1), exp_avg_sq(count, -1);
    REQUIRE(mlpo_read_state(subgroup, 0, count, master.data(), exp_avg.data(), exp_avg_sq.data(), 10 * kSecond) == 0);
    CHECK(master == initial);
    CHECK(exp_avg == std::vector<float>(count, 0));
    CHECK(exp_avg_sq == std::vector<float>(count, 0));
    mlpo_subgroup_free(subgroup);
  }
}

TEST_CASE("State.PartsAndRangesGoWhereTheyBelong") {
  auto script = std::make_shared<Script>();
  script->staging_bytes = 8192;
  FakeDaemon daemon(script);
  Connected client(daemon);
  constexpr size_t kCount = 5000;
  mlpo_subgroup* subgroup = client.Register("a", kCount);
  std::vector<float> expected[3] = {std::vector<float>(kCount), std::vector<float>(kCount), std::vector<float>(kCount)};
  // Every combination of parts, each over a range of its own.
  for (uint32_t mask = 1; mask < 8; ++mask) {
    const size_t first = mask * 37, count = 4000 + mask;
    std::vector<float> arrays[3];
    for (int part = 0; part < 3; ++part) {
      if ((mask >> part & 1) == 0) continue;
      arrays[part] = Ramp(count, static_cast<float>(mask * 10000 + static_cast<uint32_t>(part) * 100000));
      std::copy(arrays[part].begin(), arrays[part].end(), expected[part].begin() + static_cast<long>(first));
    }
    const auto array = [&](int part) { return arrays[part].empty() ? nullptr : arrays[part].data(); };
    REQUIRE(mlpo_write_state(subgroup, first, count, array(0), array(1), array(2), 10 * kSecond) == 0);
    for (int part = 0; part < 3; ++part) {
      std::vector<float> read(kCount);
      REQUIRE(mlpo_read_state(subgroup, 0, kCount, part == 0 ? read.data() : nullptr, part == 1 ? read.data() : nullptr,
                              part == 2 ? read.data() : nullptr, 10 * kSecond) == 0);
      CHECK(read == expected[part]);
    }
  }
  float one = 0;
  CHECK(mlpo_read_state(subgroup, kCount - 1, 1, &one, nullptr, nullptr, kSecond) == 0);
  CHECK(one == expected[0][kCount - 1]);
  CHECK(mlpo_read_state(subgroup, kCount, 1, &one, nullptr, nullptr, kSecond) == -EINVAL);
  CHECK(mlpo_read_state(subgroup, 1, UINT64_MAX, &one, nullptr, nullptr, kSecond) == -EINVAL);
  CHECK(mlpo_read_state(subgroup, 0, 1, nullptr, nullptr, nullptr, kSecond) == -EINVAL);
  CHECK(mlpo_read_state(subgroup, 0, 0, &one, nullptr, nullptr, kSecond) == 0);
  mlpo_subgroup_free(subgroup);
}

TEST_CASE("State.StepsArePerTensor") {
  FakeDaemon daemon;
  Connected client(daemon);
  mlpo_tensor_spec specs[3] = {};
  const char* names[] = {"x", "y", "z"};
  for (int i = 0; i < 3; ++i) {
    specs[i].struct_size = sizeof specs[i];
    specs[i].name = names[i];
    specs[i].numel = 10;
  }
  mlpo_subgroup_options options = MLPO_SUBGROUP_OPTIONS_INIT;
  options.key = "a";
  options.numel = 30;
  options.tensors = specs;
  options.tensor_count = 3;
  mlpo_subgroup* subgroup = nullptr;
  REQUIRE(mlpo_subgroup_register(client, &options, 5 * kSecond, &subgroup) == 0);
  const int64_t two[] = {1'000'000, int64_t{1} << 40};
  REQUIRE(mlpo_write_steps(subgroup, 1, 2, two, 5 * kSecond) == 0);
  int64_t steps[3] = {-1, -1, -1};
  REQUIRE(mlpo_read_steps(subgroup, 0, 3, steps, 5 * kSecond) == 0);
  CHECK(steps[0] == 0);
  CHECK(steps[1] == 1'000'000);
  CHECK(steps[2] == int64_t{1} << 40);
  const int64_t negative = -1;
  CHECK(mlpo_write_steps(subgroup, 0, 1, &negative, kSecond) == -EINVAL);
  CHECK(mlpo_read_steps(subgroup, 2, 2, steps, kSecond) == -EINVAL);
  mlpo_subgroup_free(subgroup);
}

TEST_CASE("State.FailureOfAChunkIsTheCallsFailure") {
  auto script = std::make_shared<Script>();
  script->staging_bytes = 8192;
  script->answer = [](const mlpo_submission& submission, const mlpo_hyper&) -> std::optional<FakeAnswer> {
    if (submission.op != MLPO_OP_READ_STATE || submission.first != 2048) return std::nullopt;
    FakeAnswer answer;
    answer.completion.status = MLPO_ERR_IO;
    return answer;
  };
  FakeDaemon daemon(script);
  Connected client(daemon);
  const std::vector<float> initial = Ramp(10'000, 1);
  mlpo_subgroup* subgroup = client.Register("a", 10'000, initial.data());
  std::vector<float> read(10'000);
  CHECK(mlpo_read_state(subgroup, 0, 10'000, read.data(), nullptr, nullptr, 10 * kSecond) == MLPO_ERR_IO);
  CHECK(mlpo_read_state(subgroup, 0, 2048, read.data(), nullptr, nullptr, 10 * kSecond) == 0);
  CHECK(std::equal(read.begin(), read.begin() + 2048, initial.begin()));
  mlpo_subgroup_free(subgroup);
}

// C22: a half of the staging area is not used again while a chunk whose caller gave up may still be written into it.
TEST_CASE("C22_StagingIsNotReusedWhileTheDaemonHasIt") {
  auto script = std::make_shared<Script>();
  script->staging_bytes = 8192;
  std::atomic<int> holds{0};
  script->answer = [&](const mlpo_submission& submission, const mlpo_hyper&) -> std::optional<FakeAnswer> {
    if (submission.op != MLPO_OP_READ_STATE || holds.fetch_add(1) != 0) return std::nullopt;
    FakeAnswer answer;
    answer.hold = true;
    return answer;
  };
  FakeDaemon daemon(script);
  Connected client(daemon);
  const std::vector<float> initial = Ramp(512, 1);
  mlpo_subgroup* subgroup = client.Register("a", 512, initial.data());
  std::vector<float> read(512);
  CHECK(mlpo_read_state(subgroup, 0, 512, read.data(), nullptr, nullptr, kSecond / 10) == -ETIMEDOUT);
  // The daemon still has the chunk: the next call waits for it, and gives up like the first.
  const auto submitted = daemon.submissions();
  CHECK(mlpo_read_state(subgroup, 0, 512, read.data(), nullptr, nullptr, kSecond / 10) == -ETIMEDOUT);
  CHECK(daemon.submissions() == submitted);
  daemon.ReleaseHeld();
  CHECK(mlpo_read_state(subgroup, 0, 512, read.data(), nullptr, nullptr, 10 * kSecond) == 0);
  CHECK(read == initial);
  mlpo_subgroup_free(subgroup);
}

TEST_CASE("State.ThreadsTakeTurns") {
  auto script = std::make_shared<Script>();
  script->staging_bytes = 8192;
  FakeDaemon daemon(script);
  Connected client(daemon);
  std::vector<std::thread> threads;
  std::atomic<int> failures{0};
  std::vector<mlpo_subgroup*> subgroups;
  for (int t = 0; t < 4; ++t) subgroups.push_back(client.Register(std::to_string(t).c_str(), 6000));
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < 20; ++round) {
        const std::vector<float> written = Ramp(6000, static_cast<float>(t * 100'000 + round));
        std::vector<float> read(6000);
        if (mlpo_write_state(subgroups[static_cast<size_t>(t)], 0, 6000, nullptr, written.data(), nullptr,
                             20 * kSecond) != 0 ||
            mlpo_read_state(subgroups[static_cast<size_t>(t)], 0, 6000, nullptr, read.data(), nullptr, 20 * kSecond) !=
                0 ||
            read != written) {
          ++failures;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(failures == 0);
  for (mlpo_subgroup* subgroup : subgroups) mlpo_subgroup_free(subgroup);
}
