// Submissions and completions through the client library, against a scripted daemon.
#include <chrono>
#include <cmath>
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

bool LastErrorHas(const char* text) { return std::strstr(mlpo_last_error(), text) != nullptr; }

}  // namespace

TEST_CASE("Requests.NopEndsOnce") {
  FakeDaemon daemon;
  Connected client(daemon);
  mlpo_request* request = nullptr;
  REQUIRE(mlpo_submit_nop(client, kSecond, &request) == 0);
  mlpo_result result = {};
  result.struct_size = sizeof result;
  CHECK(mlpo_request_wait(request, 5 * kSecond, &result) == 0);
  CHECK(result.status == 0);
  CHECK(mlpo_request_done(request) == 1);
  mlpo_request_free(request);
  CHECK(daemon.submissions() == 1);
}

TEST_CASE("Requests.EightThreadsEachGetTheirOwn") {
  auto script = std::make_shared<Script>();
  // The daemon answers out of order, so that threads reap each other's completions.
  script->answer = [n = 0](const mlpo_submission&, const mlpo_hyper&) mutable -> std::optional<FakeAnswer> {
    FakeAnswer answer;
    answer.completion.value = static_cast<uint64_t>(++n);
    return answer;
  };
  FakeDaemon daemon(script);
  Connected client(daemon, /*entries=*/16);
  constexpr int kThreads = 8, kEach = 2000;
  std::vector<std::thread> threads;
  std::vector<uint64_t> seen(kThreads * kEach + 1, 0);
  std::atomic<int> failures{0};
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < kEach; ++i) {
        mlpo_request* request = nullptr;
        mlpo_result result = {};
        result.struct_size = sizeof result;
        if (mlpo_submit_nop(client, 20 * kSecond, &request) != 0 ||
            mlpo_request_wait(request, 20 * kSecond, &result) != 0 || result.value >= seen.size()) {
          ++failures;
        } else {
          std::atomic_ref<uint64_t>(seen[result.value]).fetch_add(1);
        }
        mlpo_request_free(request);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(failures == 0);
  int once = 0;
  for (size_t i = 1; i < seen.size(); ++i) once += seen[i] == 1;
  CHECK(once == kThreads * kEach);
  CHECK(client.Info().lost_wakeups == 0);
}

TEST_CASE("Requests.WaitAnyTellsWhichHasEnded") {
  auto script = std::make_shared<Script>();
  std::atomic<int> answers{0};  // by two connections' threads
  script->answer = [&answers](const mlpo_submission&, const mlpo_hyper&) -> std::optional<FakeAnswer> {
    FakeAnswer answer;
    answer.hold = ++answers != 3;  // only the third is answered at once
    return answer;
  };
  FakeDaemon daemon(script);
  Connected client(daemon);
  std::vector<mlpo_request*> requests(4);
  for (mlpo_request*& request : requests) REQUIRE(mlpo_submit_nop(client, kSecond, &request) == 0);
  size_t index = 99;
  CHECK(mlpo_wait_any(requests.data(), 4, 5 * kSecond, &index) == 0);
  CHECK(index == 2);
  CHECK(mlpo_wait_any(requests.data(), 4, 0, &index) == 0);  // again: it does not use anything up
  CHECK(index == 2);
  mlpo_request* held[] = {requests[3], requests[0], requests[1]};
  const auto start = std::chrono::steady_clock::now();
  CHECK(mlpo_wait_any(held, 3, kSecond / 5, &index) == -ETIMEDOUT);
  CHECK(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() >= 0.2);
  CHECK(LastErrorHas("none of 3 requests"));

  // A thread that waits for one and a thread that waits for any of the others: both are woken.
  std::atomic<int> woken{0};
  std::vector<std::thread> threads;
  threads.emplace_back([&] { woken += mlpo_request_wait(requests[0], 20 * kSecond, nullptr) == 0; });
  threads.emplace_back([&] {
    size_t which = 99;
    woken += mlpo_wait_any(&requests[1], 1, 20 * kSecond, &which) == 0 && which == 0;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  daemon.ReleaseHeld();
  for (std::thread& thread : threads) thread.join();
  CHECK(woken == 2);
  CHECK(client.Info().lost_wakeups == 0);

  Connected other(daemon);
  mlpo_request* foreign = nullptr;
  REQUIRE(mlpo_submit_nop(other, kSecond, &foreign) == 0);
  mlpo_request* mixed[] = {requests[0], foreign};
  CHECK(mlpo_wait_any(mixed, 2, 0, &index) == -EINVAL);
  CHECK(LastErrorHas("requests[1] is of another client"));
  mlpo_request* with_null[] = {requests[0], nullptr};
  CHECK(mlpo_wait_any(with_null, 2, 0, &index) == -EINVAL);
  CHECK(mlpo_wait_any(nullptr, 1, 0, &index) == -EINVAL);
  CHECK(mlpo_wait_any(mixed, 0, 0, &index) == -EINVAL);
  mlpo_request_free(foreign);
  for (mlpo_request* request : requests) mlpo_request_free(request);
}

TEST_CASE("Requests.WaitAnyEndsWithTheDaemon") {
  auto script = std::make_shared<Script>();
  script->answer = [](const mlpo_submission&, const mlpo_hyper&) -> std::optional<FakeAnswer> {
    FakeAnswer answer;
    answer.hold = true;
    return answer;
  };
  FakeDaemon daemon(script);
  Connected client(daemon);
  mlpo_request* requests[2] = {};
  for (mlpo_request*& request : requests) REQUIRE(mlpo_submit_nop(client, kSecond, &request) == 0);
  std::thread killer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    daemon.Die();
  });
  size_t index = 99;
  CHECK(mlpo_wait_any(requests, 2, 20 * kSecond, &index) == 0);  // both have ended, with the session's reason
  CHECK(index == 0);
  CHECK(mlpo_request_wait(requests[0], 0, nullptr) == MLPO_ERR_DAEMON_DIED);
  killer.join();
  for (mlpo_request* request : requests) mlpo_request_free(request);
}

TEST_CASE("Requests.LostWakeUpIsFoundAndCounted") {
  auto script = std::make_shared<Script>();
  std::atomic<int> delay_ms{100};
  script->answer = [&](const mlpo_submission&, const mlpo_hyper&) -> std::optional<FakeAnswer> {
    std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms.load()));
    return std::nullopt;
  };
  FakeDaemon daemon(script);
  Connected client(daemon);
  const auto round_trip = [&] {
    mlpo_request* request = nullptr;
    REQUIRE(mlpo_submit_nop(client, kSecond, &request) == 0);
    CHECK(mlpo_request_wait(request, MLPO_FOREVER, nullptr) == 0);
    mlpo_request_free(request);
  };
  // Longer than one sleep, but woken: nothing to count.
  delay_ms = 400;
  round_trip();
  CHECK(client.Info().lost_wakeups == 0);
  delay_ms = 100;
  script->wakes = false;
  const auto start = std::chrono::steady_clock::now();
  round_trip();
  CHECK(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() < 2);
  CHECK(client.Info().lost_wakeups == 1);
}

TEST_CASE("Requests.FreeingLeavesTheLastErrorAlone") {
  FakeDaemon daemon;
  mlpo_connect_options options = ConnectTo(daemon.socket());
  mlpo_client* client = nullptr;
  REQUIRE(mlpo_connect(&options, &client) == 0);
  mlpo_request* request = nullptr;
  REQUIRE(mlpo_submit_nop(client, kSecond, &request) == 0);
  REQUIRE(mlpo_request_wait(request, 5 * kSecond, nullptr) == 0);
  CHECK(mlpo_client_discard(client, 7, kSecond) == -EINVAL);
  const std::string text = mlpo_last_error();
  CHECK(text == "overflow is 7, neither 0 nor 1");
  CHECK(mlpo_client_alive(client) == 0);
  mlpo_request_free(request);
  daemon.Die();
  mlpo_client_free(client);
  CHECK(mlpo_last_error() == text);
}

TEST_CASE("Requests.FullRingEndsAtTheDeadline") {
  auto script = std::make_shared<Script>();
  script->reads_ring = false;
  FakeDaemon daemon(script);
  Connected client(daemon, /*entries=*/8);
  std::vector<mlpo_request*> requests(8);
  for (mlpo_request*& request : requests) REQUIRE(mlpo_submit_nop(client, 0, &request) == 0);
  mlpo_request* extra = nullptr;
  const auto start = std::chrono::steady_clock::now();
  CHECK(mlpo_submit_nop(client, kSecond / 5, &extra) == -ETIMEDOUT);
  const double waited = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  CHECK(waited >= 0.2);
  CHECK(waited < 2);
  CHECK(extra == nullptr);
  CHECK(LastErrorHas("ring is full"));
  CHECK(mlpo_request_wait(requests[0], 0, nullptr) == -ETIMEDOUT);
  script->reads_ring = true;
  for (mlpo_request* request : requests) {
    CHECK(mlpo_request_wait(request, 5 * kSecond, nullptr) == 0);
    mlpo_request_free(request);
  }
  REQUIRE(mlpo_submit_nop(client, kSecond, &extra) == 0);
  CHECK(mlpo_request_wait(extra, 5 * kSecond, nullptr) == 0);
  mlpo_request_free(extra);
}

TEST_CASE("Requests.RequestFreedBeforeItsEndGivesItsPlaceBack") {
  FakeDaemon daemon;
  Connected client(daemon, /*entries=*/8);
  for (int i = 0; i < 1000; ++i) {
    mlpo_request* request = nullptr;
    REQUIRE(mlpo_submit_nop(client, 5 * kSecond, &request) == 0);
    mlpo_request_free(request);
  }
  mlpo_request* last = nullptr;
  REQUIRE(mlpo_submit_nop(client, 5 * kSecond, &last) == 0);
  CHECK(mlpo_request_wait(last, 5 * kSecond, nullptr) == 0);
  mlpo_request_free(last);
  CHECK(daemon.submissions() == 1001);
}

TEST_CASE("Requests.FailureCarriesTheErrorRecord") {
  auto script = std::make_shared<Script>();
  script->answer = [](const mlpo_submission&, const mlpo_hyper&) -> std::optional<FakeAnswer> {
    FakeAnswer answer;
    answer.completion.status = MLPO_ERR_IO;
    mlpo_error_record record = {};
    record.status = MLPO_ERR_IO;
    record.os_errno = ENOSPC;
    record.tensor = 4;
    record.block = 5;
    record.path = 6;
    record.first = 1000;
    record.count = 2000;
    std::strcpy(record.text, "path nvme0: no space");
    answer.record = record;
    return answer;
  };
  FakeDaemon daemon(script);
  Connected client(daemon);
  mlpo_request* request = nullptr;
  REQUIRE(mlpo_submit_nop(client, kSecond, &request) == 0);
  mlpo_result result = {};
  result.struct_size = sizeof result;
  CHECK(mlpo_request_wait(request, 5 * kSecond, &result) == MLPO_ERR_IO);
  CHECK(result.status == MLPO_ERR_IO);
  CHECK(result.os_errno == ENOSPC);
  CHECK(result.tensor == 4);
  CHECK(result.block == 5);
  CHECK(result.path == 6);
  CHECK(result.first == 1000);
  CHECK(result.count == 2000);
  CHECK(std::string(result.text) == "path nvme0: no space");
  CHECK(std::string(mlpo_last_error()) == "path nvme0: no space");
  mlpo_request_free(request);
  CHECK(mlpo_client_alive(client) == 0);
}

TEST_CASE("Requests.UpdateUsesTheSlotAndTheHyperParameters") {
  FakeDaemon daemon;
  Connected client(daemon);
  mlpo_subgroup* subgroup = client.Register("a", 1000);
  struct mlpo_subgroup_info info = Info(subgroup);
  auto* grad = static_cast<float*>(info.grad);
  for (int step = 1; step <= 20; ++step) {
    for (int i = 0; i < 1000; ++i) grad[i] = static_cast<float>(i % 7);
    mlpo_request* request = nullptr;
    REQUIRE(mlpo_submit_grad(subgroup, nullptr, 0, kSecond, &request) == 0);
    mlpo_result result = {};
    result.struct_size = sizeof result;
    REQUIRE(mlpo_request_wait(request, 5 * kSecond, &result) == 0);
    mlpo_request_free(request);
    // 142 full periods of 0..6 (squares sum to 91), then 0..5 (55).
    CHECK(result.sum_of_squares == 142 * 91 + 55);
    CHECK(result.all_finite == 1);
    CHECK(result.window_complete == 1);
    mlpo_update_options options = MLPO_UPDATE_OPTIONS_INIT;
    options.lr = 0.25;
    options.grad_scale = 2;
    REQUIRE(mlpo_submit_update(subgroup, &options, kSecond, &request) == 0);
    REQUIRE(mlpo_request_wait(request, 5 * kSecond, &result) == 0);
    mlpo_request_free(request);
    CHECK(result.value == static_cast<uint64_t>(step));
    CHECK(Info(subgroup).epoch == static_cast<uint32_t>(step));
    CHECK(*info.epoch_word == static_cast<uint64_t>(step));
    const auto* param = static_cast<const float*>(info.param);
    for (int i = 0; i < 1000; ++i) REQUIRE(param[i] == -0.5f * static_cast<float>(i % 7) * static_cast<float>(step));
  }
  mlpo_subgroup_free(subgroup);
}

TEST_CASE("Requests.SlotIsBusyFromUpdateToItsEnd") {
  auto script = std::make_shared<Script>();
  script->answer = [](const mlpo_submission& submission, const mlpo_hyper&) -> std::optional<FakeAnswer> {
    if (submission.op != MLPO_OP_UPDATE) return std::nullopt;
    FakeAnswer answer;
    answer.hold = true;
    answer.completion.value = submission.epoch;
    return answer;
  };
  FakeDaemon daemon(script);
  Connected client(daemon);
  mlpo_subgroup* subgroup = client.Register("a", 10);
  mlpo_request *update = nullptr, *refused = nullptr, *grad = nullptr;
  REQUIRE(mlpo_submit_update(subgroup, nullptr, kSecond, &update) == 0);
  CHECK(mlpo_submit_update(subgroup, nullptr, kSecond, &refused) == MLPO_ERR_SLOT_BUSY);
  CHECK(mlpo_submit_grad(subgroup, nullptr, 0, kSecond, &refused) == MLPO_ERR_SLOT_BUSY);
  CHECK(refused == nullptr);
  CHECK(Info(subgroup).epoch == 0);
  daemon.ReleaseHeld();
  CHECK(mlpo_request_wait(update, 5 * kSecond, nullptr) == 0);
  CHECK(Info(subgroup).epoch == 1);
  CHECK(mlpo_submit_grad(subgroup, nullptr, 0, kSecond, &grad) == 0);
  mlpo_request_free(update);
  mlpo_request_free(grad);
  mlpo_subgroup_free(subgroup);
}

TEST_CASE("Requests.FailedUpdateIsRepeatedWithItsEpoch") {
  auto script = std::make_shared<Script>();
  auto epochs = std::make_shared<std::vector<uint32_t>>();
  script->answer = [epochs](const mlpo_submission& submission, const mlpo_hyper&) -> std::optional<FakeAnswer> {
    if (submission.op != MLPO_OP_UPDATE) return std::nullopt;
    epochs->push_back(submission.epoch);
    FakeAnswer answer;
    answer.completion.status = epochs->size() < 3 ? MLPO_ERR_TORN : 0;
    answer.completion.value = submission.epoch;
    return answer;
  };
  FakeDaemon daemon(script);
  Connected client(daemon);
  mlpo_subgroup* subgroup = client.Register("a", 10);
  for (int i = 0; i < 4; ++i) {
    mlpo_request* update = nullptr;
    REQUIRE(mlpo_submit_update(subgroup, nullptr, kSecond, &update) == 0);
    CHECK(mlpo_request_wait(update, 5 * kSecond, nullptr) == (i < 2 ? MLPO_ERR_TORN : 0));
    mlpo_request_free(update);
  }
  CHECK(Info(subgroup).epoch == 2);
  daemon.Die();  // so that its thread is done with the record
  CHECK(*epochs == std::vector<uint32_t>{1, 1, 1, 2});
  mlpo_subgroup_free(subgroup);
}

TEST_CASE("Requests.HyperParametersOutOfRangeAreNamed") {
  FakeDaemon daemon;
  Connected client(daemon);
  mlpo_subgroup* subgroup = client.Register("a", 10);
  struct Case {
    const char* name;
    double mlpo_update_options::*field;
    double value;
  };
  const double nan = std::nan(""), inf = INFINITY;
  const Case cases[] = {
      {"lr", &mlpo_update_options::lr, nan},
      {"lr", &mlpo_update_options::lr, inf},
      {"lr", &mlpo_update_options::lr, -1e-3},
      {"beta1", &mlpo_update_options::beta1, 1.0},
      {"beta1", &mlpo_update_options::beta1, -0.1},
      {"beta2", &mlpo_update_options::beta2, nan},
      {"beta2", &mlpo_update_options::beta2, 1.5},
      {"eps", &mlpo_update_options::eps, -1e-8},
      {"eps", &mlpo_update_options::eps, inf},
      {"weight_decay", &mlpo_update_options::weight_decay, -0.01},
      {"grad_scale", &mlpo_update_options::grad_scale, -inf},
      {"grad_scale", &mlpo_update_options::grad_scale, nan},
  };
  for (const Case& c : cases) {
    mlpo_update_options options = MLPO_UPDATE_OPTIONS_INIT;
    options.*c.field = c.value;
    mlpo_request* request = nullptr;
    INFO(c.name << " = " << c.value);
    CHECK(mlpo_submit_update(subgroup, &options, kSecond, &request) == -EINVAL);
    CHECK(request == nullptr);
    char value[32];
    std::snprintf(value, sizeof value, "%s is %g", c.name, c.value);
    CHECK(LastErrorHas(value));
  }
  mlpo_update_options options = MLPO_UPDATE_OPTIONS_INIT;
  mlpo_request* request = nullptr;
  options.mode = 3;
  CHECK(mlpo_submit_update(subgroup, &options, kSecond, &request) == -EINVAL);
  CHECK(LastErrorHas("mode is 3"));
  // The edges are allowed.
  options = MLPO_UPDATE_OPTIONS_INIT;
  options.lr = options.beta1 = options.beta2 = options.eps = options.weight_decay = 0;
  options.grad_scale = -1;
  CHECK(mlpo_submit_update(subgroup, &options, kSecond, &request) == 0);
  CHECK(mlpo_request_wait(request, 5 * kSecond, nullptr) == 0);
  mlpo_request_free(request);
  CHECK(daemon.submissions() == 1);
  mlpo_subgroup_free(subgroup);
}

TEST_CASE("Requests.PiecesAreCheckedAndEndTogether") {
  FakeDaemon daemon;
  Connected client(daemon, /*entries=*/8);
  mlpo_subgroup* subgroup = client.Register("a", 100);
  mlpo_request* request = nullptr;
  const mlpo_grad_piece outside[] = {{90, 11, MLPO_GRAD_VALUE, 0}};
  CHECK(mlpo_submit_grad(subgroup, outside, 1, kSecond, &request) == -EINVAL);
  const mlpo_grad_piece wraps[] = {{UINT64_MAX, 2, MLPO_GRAD_VALUE, 0}};
  CHECK(mlpo_submit_grad(subgroup, wraps, 1, kSecond, &request) == -EINVAL);
  const mlpo_grad_piece unknown[] = {{0, 1, 4, 0}};
  CHECK(mlpo_submit_grad(subgroup, unknown, 1, kSecond, &request) == -EINVAL);
  CHECK(LastErrorHas("kind is 4"));
  CHECK(mlpo_submit_grad(subgroup, outside, 0, kSecond, &request) == -EINVAL);
  CHECK(daemon.submissions() == 0);

  // 100 pieces through a ring of 8.
  auto* grad = static_cast<float*>(Info(subgroup).grad);
  std::vector<mlpo_grad_piece> pieces;
  for (uint64_t i = 0; i < 100; ++i) {
    grad[i] = 2;
    pieces.push_back({i, 1, static_cast<uint32_t>(i % 2 == 0 ? MLPO_GRAD_VALUE : MLPO_GRAD_ZERO), 0});
  }
  REQUIRE(mlpo_submit_grad(subgroup, pieces.data(), pieces.size(), 5 * kSecond, &request) == 0);
  mlpo_result result = {};
  result.struct_size = sizeof result;
  CHECK(mlpo_request_wait(request, 5 * kSecond, &result) == 0);
  CHECK(result.sum_of_squares == 50 * 4);
  CHECK(result.all_finite == 1);
  CHECK(daemon.submissions() == 100);
  mlpo_request_free(request);
  mlpo_subgroup_free(subgroup);
}

TEST_CASE("Requests.WindowCompleteStandsAboveThePieces") {
  auto script = std::make_shared<Script>();
  script->answer = [](const mlpo_submission& submission, const mlpo_hyper&) -> std::optional<FakeAnswer> {
    if (submission.op != MLPO_OP_GRAD) return std::nullopt;
    FakeAnswer answer;
    const bool last = submission.first == 20;
    const double sum = last ? 1000 : 1;
    std::memcpy(&answer.completion.value, &sum, sizeof sum);
    answer.completion.flags = last ? MLPO_COMPLETION_WINDOW_COMPLETE : MLPO_COMPLETION_ALL_FINITE;
    return answer;
  };
  FakeDaemon daemon(script);
  Connected client(daemon);
  mlpo_subgroup* subgroup = client.Register("a", 40);
  // The one that completes the window may come before, between or after the others.
  const uint64_t orders[3][3] = {{20, 0, 10}, {0, 20, 10}, {0, 10, 20}};
  for (const auto& order : orders) {
    std::vector<mlpo_grad_piece> pieces;
    for (const uint64_t first : order) pieces.push_back({first, 10, MLPO_GRAD_VALUE, 0});
    mlpo_request* request = nullptr;
    REQUIRE(mlpo_submit_grad(subgroup, pieces.data(), 3, kSecond, &request) == 0);
    mlpo_result result = {};
    result.struct_size = sizeof result;
    CHECK(mlpo_request_wait(request, 5 * kSecond, &result) == 0);
    CHECK(result.window_complete == 1);
    CHECK(result.sum_of_squares == 1000);
    CHECK(result.all_finite == 0);
    mlpo_request_free(request);
  }
  mlpo_subgroup_free(subgroup);
}

TEST_CASE("Requests.FirstFailureOfSeveralPiecesWins") {
  auto script = std::make_shared<Script>();
  script->answer = [](const mlpo_submission& submission, const mlpo_hyper&) -> std::optional<FakeAnswer> {
    if (submission.op != MLPO_OP_GRAD || submission.first == 0) return std::nullopt;
    FakeAnswer answer;
    answer.completion.status = submission.first == 10 ? MLPO_ERR_COVERAGE : MLPO_ERR_EPOCH;
    return answer;
  };
  FakeDaemon daemon(script);
  Connected client(daemon);
  mlpo_subgroup* subgroup = client.Register("a", 30);
  const mlpo_grad_piece pieces[] = {
      {0, 10, MLPO_GRAD_VALUE, 0}, {10, 10, MLPO_GRAD_VALUE, 0}, {20, 10, MLPO_GRAD_VALUE, 0}};
  mlpo_request* request = nullptr;
  REQUIRE(mlpo_submit_grad(subgroup, pieces, 3, kSecond, &request) == 0);
  mlpo_result result = {};
  result.struct_size = sizeof result;
  CHECK(mlpo_request_wait(request, 5 * kSecond, &result) == MLPO_ERR_COVERAGE);
  CHECK(result.sum_of_squares == 0);
  CHECK(result.all_finite == 0);
  mlpo_request_free(request);
  mlpo_subgroup_free(subgroup);
}

// C12: a completion is matched by an identity that is never reused while anything could still name it.
TEST_CASE("C12_CompletionOfAnUnknownRequestEndsTheSession") {
  for (const uint64_t wrong : {uint64_t{0}, uint64_t{5}, uint64_t{1} << 40, UINT64_MAX, uint64_t{2} << 32}) {
    auto script = std::make_shared<Script>();
    script->before_publish = [wrong](FakeRing& ring) {
      auto* completion = reinterpret_cast<mlpo_completion*>(ring.daemon + MLPO_RING_HEADER_BYTES);
      completion->user_data = wrong;
    };
    FakeDaemon daemon(script);
    Connected client(daemon, /*entries=*/8);
    mlpo_request* request = nullptr;
    REQUIRE(mlpo_submit_nop(client, kSecond, &request) == 0);
    CHECK(mlpo_request_wait(request, 5 * kSecond, nullptr) == MLPO_ERR_PROTOCOL);
    CHECK(LastErrorHas("not in flight"));
    CHECK(mlpo_client_alive(client) == MLPO_ERR_PROTOCOL);
    mlpo_request_free(request);
  }
}

TEST_CASE("Requests.SpoiledCompletionsEndTheSession") {
  using Spoil = void (*)(mlpo_completion*);
  const Spoil spoils[] = {
      [](mlpo_completion* c) { c->status = 1; },
      [](mlpo_completion* c) { c->reserved = 1; },
      [](mlpo_completion* c) { c->flags = 8; },
      [](mlpo_completion* c) {
        c->flags = MLPO_COMPLETION_ERROR_RECORD;
        c->detail = 8;
      },
  };
  for (const Spoil spoil : spoils) {
    auto script = std::make_shared<Script>();
    script->before_publish = [spoil](FakeRing& ring) {
      spoil(reinterpret_cast<mlpo_completion*>(ring.daemon + MLPO_RING_HEADER_BYTES));
    };
    FakeDaemon daemon(script);
    Connected client(daemon, /*entries=*/8);
    mlpo_request* request = nullptr;
    REQUIRE(mlpo_submit_nop(client, kSecond, &request) == 0);
    CHECK(mlpo_request_wait(request, 5 * kSecond, nullptr) == MLPO_ERR_PROTOCOL);
    mlpo_request_free(request);
  }
}

TEST_CASE("Requests.DiscardReachesTheDaemonWithItsReason") {
  auto script = std::make_shared<Script>();
  auto seen = std::make_shared<std::vector<std::pair<uint32_t, uint32_t>>>();
  script->answer = [seen](const mlpo_submission& submission, const mlpo_hyper&) -> std::optional<FakeAnswer> {
    if (submission.op == MLPO_OP_DISCARD) seen->push_back({submission.subgroup, submission.arg});
    return std::nullopt;
  };
  FakeDaemon daemon(script);
  Connected client(daemon);
  mlpo_subgroup* subgroup = client.Register("a", 10);
  CHECK(mlpo_subgroup_discard(subgroup, 0, 5 * kSecond) == 0);
  CHECK(mlpo_client_discard(client, 1, 5 * kSecond) == 0);
  CHECK(mlpo_client_discard(client, 2, 5 * kSecond) == -EINVAL);
  daemon.Die();  // so that its thread is done with the record
  REQUIRE(seen->size() == 2);
  CHECK((*seen)[0] == std::pair<uint32_t, uint32_t>{1, MLPO_DISCARD_USER});
  CHECK((*seen)[1] == std::pair<uint32_t, uint32_t>{MLPO_ALL_SUBGROUPS, MLPO_DISCARD_OVERFLOW});
  mlpo_subgroup_free(subgroup);
}

TEST_CASE("Requests.OlderAndNewerCallersStructs") {
  FakeDaemon daemon;
  Connected client(daemon);
  mlpo_subgroup* subgroup = client.Register("a", 10);
  mlpo_request* request = nullptr;
  // An older caller knows nothing of the last fields: they take their defaults.
  mlpo_update_options older = MLPO_UPDATE_OPTIONS_INIT;
  older.struct_size = offsetof(mlpo_update_options, mode);
  older.mode = 99;
  REQUIRE(mlpo_submit_update(subgroup, &older, kSecond, &request) == 0);
  mlpo_result result = {};
  result.struct_size = offsetof(mlpo_result, sum_of_squares);
  result.sum_of_squares = -1;
  CHECK(mlpo_request_wait(request, 5 * kSecond, &result) == 0);
  CHECK(result.sum_of_squares == -1);
  mlpo_request_free(request);
  // A newer caller may have more, as long as it asks for nothing there.
  struct Newer {
    mlpo_update_options known;
    uint64_t more;
  } newer = {MLPO_UPDATE_OPTIONS_INIT, 0};
  newer.known.struct_size = sizeof newer;
  REQUIRE(mlpo_submit_update(subgroup, &newer.known, kSecond, &request) == 0);
  CHECK(mlpo_request_wait(request, 5 * kSecond, nullptr) == 0);
  mlpo_request_free(request);
  newer.more = 1;
  CHECK(mlpo_submit_update(subgroup, &newer.known, kSecond, &request) == -EINVAL);
  mlpo_subgroup_free(subgroup);
}
