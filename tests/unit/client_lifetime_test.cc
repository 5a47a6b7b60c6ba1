// How sessions end: the daemon's death and stop, close while others wait, fork.
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

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
using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

std::shared_ptr<Script> HoldsEverything() {
  auto script = std::make_shared<Script>();
  script->answer = [](const mlpo_submission& submission, const mlpo_hyper&) -> std::optional<FakeAnswer> {
    FakeAnswer answer;
    answer.hold = true;
    answer.completion.value = submission.epoch;
    return answer;
  };
  return script;
}

// Eight threads that wait for requests which nobody will answer.
class EightWaiters {
 public:
  explicit EightWaiters(mlpo_client* client) {
    for (int t = 0; t < 8; ++t) {
      threads_.emplace_back([this, client, t] {
        mlpo_request* request = nullptr;
        int code = mlpo_submit_nop(client, kSecond, &request);
        waiting_.fetch_add(1);
        if (code == 0) code = mlpo_request_wait(request, t % 2 == 0 ? MLPO_FOREVER : 60 * kSecond, nullptr);
        ended_[t] = Clock::now();
        codes_[t] = code;
        texts_[t] = mlpo_last_error();
        mlpo_request_free(request);
      });
    }
    while (waiting_.load() < 8) std::this_thread::yield();
    // They have submitted; give them the time to fall asleep, whatever the scheduler does. Nothing depends on it.
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  void Expect(int code, Clock::time_point since, double within_s, const std::string& text) {
    for (std::thread& thread : threads_) thread.join();
    for (int t = 0; t < 8; ++t) {
      CHECK(codes_[t] == code);
      CHECK(texts_[t].find(text) != std::string::npos);
      CHECK(std::chrono::duration<double>(ended_[t] - since).count() < within_s);
    }
  }

 private:
  std::vector<std::thread> threads_;
  std::atomic<int> waiting_{0};
  int codes_[8] = {};
  std::string texts_[8];
  Clock::time_point ended_[8];
};

// A FakeDaemon in a process of its own, to be killed.
class DaemonProcess {
 public:
  explicit DaemonProcess(std::shared_ptr<Script> script) {
    int ready[2];
    REQUIRE(pipe(ready) == 0);
    pid_ = fork();
    if (pid_ == 0) {
      FakeDaemon daemon(std::move(script));
      const std::string& path = daemon.socket();
      if (write(ready[1], path.c_str(), path.size() + 1) < 0) _exit(1);
      for (;;) pause();
    }
    close(ready[1]);
    char path[256] = {};
    REQUIRE(read(ready[0], path, sizeof path - 1) > 0);
    close(ready[0]);
    socket_ = path;
  }
  ~DaemonProcess() {
    Kill();
    std::filesystem::remove_all(std::filesystem::path(socket_).parent_path());
  }
  void Kill() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }
  const std::string& socket() const { return socket_; }

 private:
  pid_t pid_ = -1;
  std::string socket_;
};

}  // namespace

// C24: every waiter has its error within 2 s, by looking at the process and not by its own deadline.
TEST_CASE("C24_KilledDaemonEndsEightWaitersWithinTwoSeconds") {
  DaemonProcess daemon(HoldsEverything());
  mlpo_connect_options options = ConnectTo(daemon.socket());
  mlpo_client* client = nullptr;
  REQUIRE(mlpo_connect(&options, &client) == 0);
  EightWaiters waiters(client);
  const auto killed = Clock::now();
  daemon.Kill();
  waiters.Expect(MLPO_ERR_DAEMON_DIED, killed, 2.0, "went away");
  CHECK(mlpo_client_alive(client) == MLPO_ERR_DAEMON_DIED);
  mlpo_request* request = nullptr;
  CHECK(mlpo_submit_nop(client, kSecond, &request) == MLPO_ERR_DAEMON_DIED);
  mlpo_subgroup_options subgroup_options = MLPO_SUBGROUP_OPTIONS_INIT;
  subgroup_options.key = "a";
  mlpo_subgroup* subgroup = nullptr;
  CHECK(mlpo_subgroup_register(client, &subgroup_options, kSecond, &subgroup) == MLPO_ERR_DAEMON_DIED);
  mlpo_client_free(client);
}

TEST_CASE("Lifetime.DaemonThatDiesDuringARegistrationEndsIt") {
  auto script = std::make_shared<Script>();
  script->frame = [](int, const mlpo_frame&) { return true; };  // never answers
  DaemonProcess daemon(script);
  mlpo_connect_options options = ConnectTo(daemon.socket());
  mlpo_client* client = nullptr;
  REQUIRE(mlpo_connect(&options, &client) == 0);
  std::thread killer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    daemon.Kill();
  });
  mlpo_subgroup_options subgroup_options = MLPO_SUBGROUP_OPTIONS_INIT;
  subgroup_options.key = "a";
  mlpo_subgroup* subgroup = nullptr;
  const auto start = Clock::now();
  CHECK(mlpo_subgroup_register(client, &subgroup_options, MLPO_FOREVER, &subgroup) == MLPO_ERR_DAEMON_DIED);
  CHECK(SecondsSince(start) < 2.1);
  killer.join();
  mlpo_client_free(client);
}

TEST_CASE("Lifetime.ErrorFrameSaysWhyTheSessionEnded") {
  FakeDaemon daemon(HoldsEverything());
  Connected client(daemon);
  EightWaiters waiters(client);
  const auto ended = Clock::now();
  daemon.EndSessions(MLPO_SESSION_ENDED, MLPO_ERR_QUOTA, "an administrator ended the session");
  waiters.Expect(MLPO_ERR_QUOTA, ended, 2.0, "an administrator");
  CHECK(mlpo_client_alive(client) == MLPO_ERR_QUOTA);
}

TEST_CASE("Lifetime.OrderlyStopIsShutdown") {
  FakeDaemon daemon(HoldsEverything());
  Connected client(daemon);
  mlpo_request* request = nullptr;
  REQUIRE(mlpo_submit_nop(client, kSecond, &request) == 0);
  while (daemon.submissions() == 0) std::this_thread::yield();
  daemon.EndSessions(MLPO_SESSION_DRAINING, 0, "");
  // New work is refused, what was accepted is still waited for.
  mlpo_request* refused = nullptr;
  CHECK(mlpo_submit_nop(client, kSecond, &refused) == -ESHUTDOWN);
  CHECK(mlpo_client_alive(client) == 0);
  CHECK(mlpo_request_wait(request, 0, nullptr) == -ETIMEDOUT);
  daemon.ReleaseHeld();
  CHECK(mlpo_request_wait(request, 5 * kSecond, nullptr) == 0);
  mlpo_request_free(request);
  daemon.EndSessions(MLPO_SESSION_ENDED, 0, "");
  const auto start = Clock::now();
  int code = 0;
  while ((code = mlpo_client_alive(client)) == 0 && SecondsSince(start) < 2) std::this_thread::yield();
  CHECK(code == -ESHUTDOWN);
}

TEST_CASE("Lifetime.CompletionsPublishedBeforeTheEndCount") {
  auto script = std::make_shared<Script>();
  FakeDaemon daemon(script);
  Connected client(daemon);
  mlpo_request* request = nullptr;
  REQUIRE(mlpo_submit_nop(client, kSecond, &request) == 0);
  while (daemon.submissions() == 0) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // to let it publish; later would only be another test
  daemon.Die();
  CHECK(mlpo_client_alive(client) == MLPO_ERR_DAEMON_DIED);
  CHECK(mlpo_request_wait(request, kSecond, nullptr) == 0);
  mlpo_request_free(request);
}

TEST_CASE("Lifetime.CloseEndsEightWaiters") {
  FakeDaemon daemon(HoldsEverything());
  Connected client(daemon);
  EightWaiters waiters(client);
  const auto closed = Clock::now();
  CHECK(mlpo_client_close(client) == 0);
  waiters.Expect(MLPO_ERR_CLOSED, closed, 1.0, "closed");
  CHECK(mlpo_client_close(client) == 0);
  CHECK(mlpo_client_alive(client) == MLPO_ERR_CLOSED);
  mlpo_request* request = nullptr;
  CHECK(mlpo_submit_nop(client, kSecond, &request) == MLPO_ERR_CLOSED);
  const auto start = Clock::now();
  while (daemon.byes() == 0 && SecondsSince(start) < 2) std::this_thread::yield();
  CHECK(daemon.byes() == 1);
}

TEST_CASE("Lifetime.CloseEndsARegistrationThatWaits") {
  auto script = std::make_shared<Script>();
  std::atomic<bool> asked{false};
  script->frame = [&](int, const mlpo_frame& frame) {
    if (frame.type == MLPO_FRAME_REGISTER_END) asked.store(true);
    return true;
  };
  FakeDaemon daemon(script);
  Connected client(daemon);
  int code = 0;
  std::thread registering([&] {
    mlpo_subgroup_options options = MLPO_SUBGROUP_OPTIONS_INIT;
    options.key = "a";
    mlpo_subgroup* subgroup = nullptr;
    code = mlpo_subgroup_register(client, &options, MLPO_FOREVER, &subgroup);
  });
  while (!asked.load()) std::this_thread::yield();
  CHECK(mlpo_client_close(client) == 0);
  registering.join();
  CHECK(code == MLPO_ERR_CLOSED);
}

TEST_CASE("Lifetime.ObjectsMayOutliveTheirClient") {
  FakeDaemon daemon(HoldsEverything());
  mlpo_connect_options options = ConnectTo(daemon.socket());
  mlpo_client* client = nullptr;
  REQUIRE(mlpo_connect(&options, &client) == 0);
  mlpo_subgroup_options subgroup_options = MLPO_SUBGROUP_OPTIONS_INIT;
  subgroup_options.key = "a";
  subgroup_options.numel = 10;
  mlpo_subgroup* subgroup = nullptr;
  REQUIRE(mlpo_subgroup_register(client, &subgroup_options, 5 * kSecond, &subgroup) == 0);
  mlpo_request *update = nullptr, *more = nullptr;
  REQUIRE(mlpo_submit_update(subgroup, nullptr, kSecond, &update) == 0);
  mlpo_client_free(client);
  CHECK(mlpo_request_wait(update, kSecond, nullptr) == MLPO_ERR_CLOSED);
  CHECK(mlpo_submit_grad(subgroup, nullptr, 0, kSecond, &more) == MLPO_ERR_CLOSED);
  mlpo_subgroup_free(subgroup);
  mlpo_request_free(update);
}

TEST_CASE("Lifetime.SubgroupFreedWithItsUpdateInFlight") {
  auto script = HoldsEverything();
  FakeDaemon daemon(script);
  Connected client(daemon);
  mlpo_subgroup* subgroup = client.Register("a", 10);
  mlpo_request* update = nullptr;
  REQUIRE(mlpo_submit_update(subgroup, nullptr, kSecond, &update) == 0);
  mlpo_subgroup_free(subgroup);
  daemon.ReleaseHeld();
  CHECK(mlpo_request_wait(update, 5 * kSecond, nullptr) == 0);
  mlpo_request_free(update);
}

// C28: the child gets an error, and its end leaves the parent's session alone.
TEST_CASE("C28_ForkedChildrenAreRefusedAndLeaveTheParentAlone") {
  FakeDaemon daemon;
  Connected client(daemon);
  mlpo_subgroup* subgroup = client.Register("a", 1000);
  auto* grad = static_cast<float*>(Info(subgroup).grad);
  for (int i = 0; i < 1000; ++i) grad[i] = 1;
  mlpo_request* in_flight = nullptr;
  REQUIRE(mlpo_submit_nop(client, kSecond, &in_flight) == 0);
  // A thread that waits, with locks and counts of its own, while the children are made.
  std::atomic<bool> stop{false};
  std::atomic<int> failures{0};
  std::thread busy([&] {
    while (!stop.load()) {
      mlpo_request* request = nullptr;
      if (mlpo_submit_nop(client, 5 * kSecond, &request) != 0 || mlpo_request_wait(request, 5 * kSecond, nullptr) != 0)
        ++failures;
      mlpo_request_free(request);
    }
  });
  std::vector<pid_t> children;
  for (int child = 0; child < 8; ++child) {
    const pid_t pid = fork();
    if (pid == 0) {
      alarm(20);  // a child that hangs is a failure, not a hung test
      mlpo_request* request = nullptr;
      int wrong = 0;
      wrong += mlpo_submit_nop(client, kSecond, &request) != MLPO_ERR_FORKED;
      wrong += mlpo_request_wait(in_flight, kSecond, nullptr) != MLPO_ERR_FORKED;
      wrong += mlpo_request_done(in_flight) != MLPO_ERR_FORKED;
      wrong += mlpo_submit_grad(subgroup, nullptr, 0, kSecond, &request) != MLPO_ERR_FORKED;
      wrong += mlpo_submit_update(subgroup, nullptr, kSecond, &request) != MLPO_ERR_FORKED;
      wrong += mlpo_client_alive(client) != MLPO_ERR_FORKED;
      wrong += mlpo_client_close(client) != MLPO_ERR_FORKED;
      wrong += mlpo_subgroup_discard(subgroup, 0, kSecond) != MLPO_ERR_FORKED;
      float value;
      wrong += mlpo_read_state(subgroup, 0, 1, &value, nullptr, nullptr, kSecond) != MLPO_ERR_FORKED;
      struct mlpo_client_info info = {};
      info.struct_size = sizeof info;
      wrong += mlpo_client_info(client, &info) != MLPO_ERR_FORKED;
      wrong += std::strstr(mlpo_last_error(), "must connect itself") == nullptr;
      if (child % 2 == 0) {
        mlpo_request_free(in_flight);
        mlpo_subgroup_free(subgroup);
        mlpo_client_free(client);
      }
      if (child % 4 == 1) kill(getpid(), SIGKILL);
      _exit(wrong);
    }
    REQUIRE(pid > 0);
    children.push_back(pid);
  }
  for (size_t child = 0; child < children.size(); ++child) {
    int status = 0;
    REQUIRE(waitpid(children[child], &status, 0) == children[child]);
    if (child % 4 == 1) {
      CHECK((WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL));
    } else {
      CHECK((WIFEXITED(status) && WEXITSTATUS(status) == 0));
    }
  }
  stop.store(true);
  busy.join();
  CHECK(failures == 0);
  CHECK(mlpo_client_alive(client) == 0);
  CHECK(daemon.byes() == 0);
  CHECK(mlpo_request_wait(in_flight, 5 * kSecond, nullptr) == 0);
  mlpo_request_free(in_flight);
  mlpo_request* request = nullptr;
  mlpo_result result = {};
  result.struct_size = sizeof result;
  REQUIRE(mlpo_submit_grad(subgroup, nullptr, 0, kSecond, &request) == 0);
  CHECK(mlpo_request_wait(request, 5 * kSecond, &result) == 0);
  CHECK(result.sum_of_squares == 1000);
  mlpo_request_free(request);
  mlpo_subgroup_free(subgroup);
}

// C31, the other way round: what the daemon's words say is checked as well.
TEST_CASE("C31_ImpossibleIndicesEndTheSession") {
  for (const bool completion : {true, false}) {
    auto script = std::make_shared<Script>();
    std::atomic<bool> spoilt{false};
    script->after_publish = [completion, &spoilt](FakeRing& ring) {
      uint32_t* word = completion ? &ring.daemon_lines()->completion_tail : &ring.daemon_lines()->submission_head;
      std::atomic_ref<uint32_t>(*word).store(1u << 31);
      spoilt.store(true);
    };
    FakeDaemon daemon(script);
    Connected client(daemon, 8);
    mlpo_request* request = nullptr;
    REQUIRE(mlpo_submit_nop(client, kSecond, &request) == 0);
    int code = mlpo_request_wait(request, 5 * kSecond, nullptr);
    mlpo_request_free(request);
    // A word is looked at again when what was seen of it does not do any more: after as many as the ring has places.
    for (int i = 0; code == 0 && i < 8; ++i) {
      while (!spoilt.exchange(false)) std::this_thread::yield();
      request = nullptr;
      code = mlpo_submit_nop(client, kSecond, &request);
      if (code != 0) CHECK(request == nullptr);
      if (code == 0) code = mlpo_request_wait(request, 5 * kSecond, nullptr);
      mlpo_request_free(request);
    }
    CHECK(code == MLPO_ERR_PROTOCOL);
    CHECK(std::strstr(mlpo_last_error(), "index is impossible") != nullptr);
  }
}
