// Gradients in two halves (mlpo_prepare_grad, mlpo_request_post), and what looks after many requests at once, against
// a scripted daemon.
#include <poll.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "mlpo/client.h"
#include "proto/command.h"
#include "tests/support/catch.h"
#include "tests/support/client_fixture.h"
#include "tests/support/fake_daemon.h"

namespace {

constexpr int64_t kSecond = 1'000'000'000;
using Script = FakeDaemon::Script;

bool LastErrorHas(const char* text) { return std::strstr(mlpo_last_error(), text) != nullptr; }

std::vector<mlpo_grad_piece> Pieces(uint32_t count, uint64_t elements) {
  std::vector<mlpo_grad_piece> pieces;
  for (uint32_t i = 0; i < count; ++i) pieces.push_back({i * elements, elements, MLPO_GRAD_VALUE, 0});
  return pieces;
}

mlpo_request* Prepare(mlpo_subgroup* subgroup, const std::vector<mlpo_grad_piece>& pieces) {
  mlpo_request* request = nullptr;
  REQUIRE(mlpo_prepare_grad(subgroup, pieces.data(), pieces.size(), &request) == 0);
  return request;
}

// What the daemon got, in its order.
struct Seen {
  std::mutex mutex;
  std::vector<mlpo_submission> all;
};

std::shared_ptr<Script> Recording(Seen* seen) {
  auto script = std::make_shared<Script>();
  script->answer = [seen](const mlpo_submission& submission, const mlpo_hyper&) -> std::optional<FakeAnswer> {
    std::lock_guard lock(seen->mutex);
    seen->all.push_back(submission);
    return std::nullopt;
  };
  return script;
}

bool Within(double seconds, const std::function<bool()>& done) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (!done()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace

TEST_CASE("Deferred.NothingIsSubmittedBeforeThePost") {
  auto script = std::make_shared<Script>();
  FakeDaemon daemon(script);
  Connected client(daemon);
  mlpo_subgroup* subgroup = client.Register("w", 8);
  auto* grad = static_cast<float*>(Info(subgroup).grad);
  mlpo_request* request = Prepare(subgroup, {{0, 8, MLPO_GRAD_VALUE, 0}});
  CHECK(mlpo_request_done(request) == 0);
  CHECK(mlpo_request_wait(request, 20'000'000, nullptr) == -ETIMEDOUT);
  CHECK(daemon.submissions() == 0);
  // What would overtake it is refused.
  mlpo_request* other = nullptr;
  CHECK(mlpo_submit_update(subgroup, nullptr, kSecond, &other) == -EBUSY);
  CHECK(LastErrorHas("wait for their requests"));
  CHECK(mlpo_subgroup_discard(subgroup, 0, kSecond) == -EBUSY);
  CHECK(mlpo_client_discard(client, 0, kSecond) == -EBUSY);
  for (int i = 0; i < 8; ++i) grad[i] = 2;
  REQUIRE(mlpo_request_post(request) == 0);
  mlpo_result result = {};
  result.struct_size = sizeof result;
  REQUIRE(mlpo_request_wait(request, 5 * kSecond, &result) == 0);
  CHECK(result.sum_of_squares == 32);
  CHECK(mlpo_request_post(request) == -EINVAL);
  mlpo_request_free(request);
  script->reads_ring.store(false);
  REQUIRE(mlpo_submit_update(subgroup, nullptr, kSecond, &other) == 0);
  CHECK(mlpo_prepare_grad(subgroup, nullptr, 0, &request) == MLPO_ERR_SLOT_BUSY);
  script->reads_ring.store(true);
  CHECK(mlpo_request_wait(other, 5 * kSecond, nullptr) == 0);
  mlpo_request_free(other);
  mlpo_subgroup_free(subgroup);
}

TEST_CASE("Deferred.AFullRingLosesNothingAndKeepsTheOrder") {
  Seen seen;
  auto script = Recording(&seen);
  FakeDaemon daemon(script);
  constexpr uint32_t kEntries = 8, kPieces = 7, kRequests = 9;
  Connected client(daemon, kEntries);
  std::vector<mlpo_subgroup*> subgroups;
  std::vector<mlpo_request*> requests;
  for (uint32_t i = 0; i < kRequests; ++i) {
    subgroups.push_back(client.Register(("w" + std::to_string(i)).c_str(), kPieces * 2));
    std::memset(Info(subgroups[i]).grad, 0, kPieces * 2 * sizeof(float));
    requests.push_back(Prepare(subgroups[i], Pieces(kPieces, 2)));
  }
  script->reads_ring.store(false);
  const auto before = std::chrono::steady_clock::now();
  for (mlpo_request* request : requests) REQUIRE(mlpo_request_post(request) == 0);
  CHECK(std::chrono::steady_clock::now() - before < std::chrono::seconds(2));
  // Full: 8 in the ring, 55 on the list; a submission that may wait stands behind them.
  mlpo_request* nop = nullptr;
  CHECK(mlpo_submit_nop(client, 50'000'000, &nop) == -ETIMEDOUT);
  CHECK(seen.all.empty());
  script->reads_ring.store(true);
  SECTION("emptied by who waits for the last") {
    for (uint32_t i = kRequests; i-- > 0;) CHECK(mlpo_request_wait(requests[i], 20 * kSecond, nullptr) == 0);
    REQUIRE(mlpo_submit_nop(client, kSecond, &nop) == 0);
  }
  SECTION("emptied by a newer submission, which comes after") {
    REQUIRE(mlpo_submit_nop(client, 20 * kSecond, &nop) == 0);
  }
  CHECK(mlpo_request_wait(nop, 20 * kSecond, nullptr) == 0);
  mlpo_request_free(nop);
  for (mlpo_request* request : requests) CHECK(mlpo_request_wait(request, 20 * kSecond, nullptr) == 0);
  std::lock_guard lock(seen.mutex);
  REQUIRE(seen.all.size() == kRequests * kPieces + 1);
  for (uint32_t i = 0; i < kRequests * kPieces; ++i) {
    CHECK(seen.all[i].op == MLPO_OP_GRAD);
    CHECK(seen.all[i].first == i % kPieces * 2);
  }
  CHECK(seen.all.back().op == MLPO_OP_NOP);
  for (mlpo_request* request : requests) mlpo_request_free(request);
  for (mlpo_subgroup* subgroup : subgroups) mlpo_subgroup_free(subgroup);
}

TEST_CASE("Deferred.ThreadsThatPostAndThreadsThatWait") {
  FakeDaemon daemon;
  constexpr int kThreads = 4, kRounds = 400;
  Connected client(daemon, /*entries=*/8);
  std::atomic<int> failures{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    mlpo_subgroup* subgroup = client.Register(("w" + std::to_string(t)).c_str(), 18);
    threads.emplace_back([subgroup, &failures] {
      struct mlpo_subgroup_info info = {};
      info.struct_size = sizeof info;
      if (mlpo_subgroup_info(subgroup, &info) != 0) ++failures;
      for (int i = 0; i < kRounds; ++i) {
        const auto pieces = Pieces(9, 2);
        mlpo_request *request = nullptr, *update = nullptr;
        if (mlpo_prepare_grad(subgroup, pieces.data(), pieces.size(), &request) != 0) ++failures;
        for (int e = 0; e < 18; ++e) static_cast<float*>(info.grad)[e] = static_cast<float>(i);
        std::thread poster([request, &failures] { failures += mlpo_request_post(request) != 0; });
        mlpo_result result = {};
        result.struct_size = sizeof result;
        if (mlpo_request_wait(request, 20 * kSecond, &result) != 0 || result.sum_of_squares != 18.0 * i * i) ++failures;
        poster.join();
        mlpo_request_free(request);
        if (mlpo_submit_update(subgroup, nullptr, 20 * kSecond, &update) != 0 ||
            mlpo_request_wait(update, 20 * kSecond, nullptr) != 0)
          ++failures;
        mlpo_request_free(update);
      }
      mlpo_subgroup_free(subgroup);
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(failures.load() == 0);
}

TEST_CASE("Deferred.TheEndOfTheSessionEndsAll") {
  Seen seen;
  auto script = Recording(&seen);
  FakeDaemon daemon(script);
  Connected client(daemon, /*entries=*/8);
  mlpo_subgroup* subgroup = client.Register("w", 26);
  std::vector<mlpo_request*> requests;
  for (int i = 0; i < 3; ++i) requests.push_back(Prepare(subgroup, Pieces(13, 2)));
  script->reads_ring.store(false);
  REQUIRE(mlpo_request_post(requests[0]) == 0);  // eight of its pieces are in the ring
  REQUIRE(mlpo_request_post(requests[1]) == 0);  // deferred
  int expected = MLPO_ERR_DAEMON_DIED;
  SECTION("the daemon's death") { daemon.Die(); }
  SECTION("close") {
    REQUIRE(mlpo_client_close(client) == 0);
    expected = MLPO_ERR_CLOSED;
  }
  CHECK(mlpo_request_wait(requests[0], 5 * kSecond, nullptr) == expected);
  CHECK(mlpo_request_wait(requests[1], 5 * kSecond, nullptr) == expected);
  // Not posted: its waiter hears of the end, the post is still due, and everything may be freed before it.
  CHECK(mlpo_request_wait(requests[2], 5 * kSecond, nullptr) == expected);
  mlpo_request_free(requests[2]);
  mlpo_subgroup_free(subgroup);
  mlpo_request_free(requests[0]);
  mlpo_request_free(requests[1]);
  CHECK(mlpo_request_post(requests[2]) == expected);
}

TEST_CASE("Deferred.AbandonedEndsWithItsReason") {
  FakeDaemon daemon;
  Connected client(daemon);
  mlpo_subgroup* subgroup = client.Register("w", 4);
  mlpo_request* request = Prepare(subgroup, Pieces(2, 2));
  std::thread other([request] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    mlpo_request_abandon(request, -EIO, "the copy failed");
  });
  mlpo_result result = {};
  result.struct_size = sizeof result;
  CHECK(mlpo_request_wait(request, 5 * kSecond, &result) == -EIO);
  other.join();
  CHECK(std::string(result.text) == "the copy failed");
  CHECK(daemon.submissions() == 0);
  mlpo_request_free(request);
  CHECK(mlpo_client_discard(client, 0, 5 * kSecond) == 0);
  mlpo_subgroup_free(subgroup);
}

TEST_CASE("Deferred.AwaitSeesEveryEndOnce") {
  auto script = std::make_shared<Script>();
  script->answer = [](const mlpo_submission& submission, const mlpo_hyper&) -> std::optional<FakeAnswer> {
    if (submission.op != MLPO_OP_NOP) return std::nullopt;
    FakeAnswer answer;
    answer.hold = true;
    return answer;
  };
  FakeDaemon daemon(script);
  Connected client(daemon);
  uint64_t seen = 0;
  CHECK(mlpo_client_await(client, &seen, 20'000'000) == -ETIMEDOUT);
  mlpo_request* request = nullptr;
  REQUIRE(mlpo_submit_nop(client, kSecond, &request) == 0);
  CHECK(mlpo_client_await(client, &seen, 20'000'000) == -ETIMEDOUT);
  REQUIRE(Within(5, [&] { return daemon.submissions() == 1; }));
  daemon.ReleaseHeld();
  CHECK(mlpo_client_await(client, &seen, 5 * kSecond) == 0);
  CHECK(mlpo_request_done(request) == 1);
  CHECK(mlpo_client_await(client, &seen, 20'000'000) == -ETIMEDOUT);
  mlpo_request_free(request);
  daemon.Die();
  CHECK(mlpo_client_await(client, &seen, 5 * kSecond) == MLPO_ERR_DAEMON_DIED);
}

TEST_CASE("Deferred.TheWatchedWordCountsUpdatesWhateverTheyEndWith") {
  auto script = std::make_shared<Script>();
  std::atomic<bool> refuse{false}, hold{false};
  script->answer = [&](const mlpo_submission& submission, const mlpo_hyper&) -> std::optional<FakeAnswer> {
    if (submission.op != MLPO_OP_UPDATE || (!refuse && !hold)) return std::nullopt;
    FakeAnswer answer;
    answer.completion.status = refuse ? MLPO_ERR_NOT_FINITE : 0;
    answer.hold = hold;
    return answer;
  };
  FakeDaemon daemon(script);
  Connected client(daemon);
  mlpo_subgroup* subgroup = client.Register("w", 4);
  uint64_t word = 99;
  CHECK(mlpo_subgroup_watch(subgroup, reinterpret_cast<uint64_t*>(reinterpret_cast<char*>(&word) + 1)) == -EINVAL);
  REQUIRE(mlpo_subgroup_watch(subgroup, &word) == 0);
  CHECK(std::atomic_ref(word).load() == 0);
  const auto step = [&](int expected) {
    mlpo_request *grad = nullptr, *update = nullptr;
    REQUIRE(mlpo_submit_grad(subgroup, nullptr, 0, kSecond, &grad) == 0);
    CHECK(Info(subgroup).holds_param == 0);
    REQUIRE(mlpo_submit_update(subgroup, nullptr, kSecond, &update) == 0);
    if (hold) {
      CHECK(Info(subgroup).update_outstanding == 1);
      REQUIRE(Within(5, [&] { return daemon.submissions() == 6; }));
      daemon.Die();
    }
    CHECK(mlpo_request_wait(update, 5 * kSecond, nullptr) == expected);
    mlpo_request_free(grad);
    mlpo_request_free(update);
  };
  step(0);
  CHECK(std::atomic_ref(word).load() == 1);
  CHECK(Info(subgroup).holds_param == 1);
  refuse = true;
  step(MLPO_ERR_NOT_FINITE);
  CHECK(std::atomic_ref(word).load() == 2);
  CHECK(Info(subgroup).updates_ended == 2);
  CHECK(Info(subgroup).epoch == 1);
  CHECK(Info(subgroup).holds_param == 0);
  refuse = false;
  hold = true;
  step(MLPO_ERR_DAEMON_DIED);
  CHECK(std::atomic_ref(word).load() == 3);
  mlpo_subgroup_free(subgroup);
}

TEST_CASE("Deferred.WhetherASlotHoldsParametersIsTold") {
  auto script = std::make_shared<Script>();
  std::atomic<bool> fails{false}, hold{false};
  script->welcome = [](mlpo_welcome* welcome) { welcome->features |= MLPO_FEATURE_SNAPSHOT; };
  script->answer = [&](const mlpo_submission& submission, const mlpo_hyper&) -> std::optional<FakeAnswer> {
    FakeAnswer answer;
    if (submission.op == MLPO_OP_RESTORE && fails) {
      answer.completion.status = MLPO_ERR_IO;
      return answer;
    }
    answer.hold = true;
    return submission.op == MLPO_OP_UPDATE && hold ? std::optional(answer) : std::nullopt;
  };
  FakeDaemon daemon(script);
  Connected client(daemon);
  mlpo_subgroup* subgroup = client.Register("w", 4);
  const auto restore = [&] {
    mlpo_request* request = nullptr;
    REQUIRE(mlpo_submit_restore(subgroup, 1, kSecond, &request) == 0);
    const int code = mlpo_request_wait(request, 5 * kSecond, nullptr);
    mlpo_request_free(request);
    return code;
  };
  CHECK(Info(subgroup).holds_param == 0);
  CHECK(restore() == 0);
  CHECK(Info(subgroup).holds_param == 1);
  CHECK(mlpo_grad_begin(nullptr) == -EINVAL);
  REQUIRE(mlpo_grad_begin(subgroup) == 0);
  CHECK(Info(subgroup).holds_param == 0);
  CHECK(restore() == 0);
  fails = true;
  CHECK(restore() == MLPO_ERR_IO);
  CHECK(Info(subgroup).holds_param == 0);
  // While the daemon has the slot it cannot be written.
  hold = true;
  mlpo_request *grad = nullptr, *update = nullptr;
  REQUIRE(mlpo_submit_grad(subgroup, nullptr, 0, kSecond, &grad) == 0);
  REQUIRE(mlpo_submit_update(subgroup, nullptr, kSecond, &update) == 0);
  CHECK(mlpo_grad_begin(subgroup) == MLPO_ERR_SLOT_BUSY);
  mlpo_request_free(grad);
  mlpo_request_free(update);
  mlpo_subgroup_free(subgroup);
}

TEST_CASE("Deferred.TheArenaIsListedPieceByPiece") {
  FakeDaemon daemon;
  Connected client(daemon);
  void* base = nullptr;
  uint64_t bytes = 0;
  CHECK(mlpo_client_arena(client, 0, &base, &bytes) == -ENOENT);
  mlpo_subgroup* subgroup = client.Register("w", 4);
  REQUIRE(mlpo_client_arena(client, 0, &base, &bytes) == 0);
  auto* grad = static_cast<char*>(Info(subgroup).grad);
  CHECK(grad >= static_cast<char*>(base));
  CHECK(grad + 16 <= static_cast<char*>(base) + bytes);
  CHECK(client.Info().arena_bytes == bytes);
  mlpo_subgroup_free(subgroup);
}
