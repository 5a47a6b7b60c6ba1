// A keeper whose path hangs: who asks waits as long as he said, once; what comes late is undone.
#include "daemon/io/path_keeper.h"

#include <algorithm>
#include <atomic>
#include <future>
#include <vector>

#include "tests/support/catch.h"

namespace mlpo::test {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

std::unique_ptr<PathKeeper> StartKeeper() {
  Result<std::unique_ptr<PathKeeper>> keeper = PathKeeper::Start("p");
  REQUIRE(keeper.ok());
  return std::move(*keeper);
}

// Something that hangs until it is let go; at the end of the test at the latest.
class Hang {
 public:
  ~Hang() { LetGo(); }
  std::shared_future<void> gate() const { return gate_; }
  void LetGo() {
    if (!std::exchange(open_, true)) promise_.set_value();
  }

 private:
  std::promise<void> promise_;
  std::shared_future<void> gate_{promise_.get_future()};
  bool open_ = false;
};

bool Eventually(const std::function<bool()>& holds) {
  for (const auto deadline = Clock::now() + 10s; Clock::now() < deadline;) {
    if (holds()) return true;
    std::this_thread::sleep_for(1ms);
  }
  return false;
}

TEST_CASE("PathKeeper.AnswersInOrder") {
  const auto keeper = StartKeeper();
  std::vector<int> done;
  for (int i = 0; i < 100; ++i) keeper->Post([&done, i] { done.push_back(i); }, 10s);
  const auto answer = keeper->Ask<size_t>([&] { return done.size(); }, 10s);
  REQUIRE(answer.has_value());
  CHECK(*answer == 100);
  CHECK(std::is_sorted(done.begin(), done.end()));
  CHECK_FALSE(keeper->stuck());
}

TEST_CASE("PathKeeper.AnAnswerMayBeMovedOnly") {
  const auto keeper = StartKeeper();
  auto answer = keeper->Ask<std::unique_ptr<int>>([] { return std::make_unique<int>(7); }, 10s);
  REQUIRE((answer && *answer));
  CHECK(**answer == 7);
}

TEST_CASE("PathKeeper.WhoAsksAHangingOneWaitsOnce") {
  std::atomic<int> undone{0}, begun{0};
  const auto keeper = StartKeeper();
  Hang hang;
  const auto ask = [&] {
    return keeper->Ask<int>(
        [&begun, gate = hang.gate()] {
          ++begun;
          gate.wait();
          return 5;
        },
        100ms, [&](int value) { undone += value; });
  };
  auto start = Clock::now();
  CHECK_FALSE(ask().has_value());
  CHECK(Clock::now() - start >= 100ms);
  REQUIRE(Eventually([&] { return keeper->stuck(); }));
  start = Clock::now();
  for (int i = 0; i < 20; ++i) CHECK_FALSE(ask().has_value());
  CHECK(Clock::now() - start < 100ms);
  CHECK(undone == 0);
  hang.LetGo();
  REQUIRE(Eventually([&] { return undone == 5; }));
  REQUIRE(Eventually([&] { return !keeper->stuck(); }));
  CHECK(begun == 1);  // those that were refused have left nothing behind
  const auto again = keeper->Ask<int>([] { return 6; }, 10s);
  CHECK((again && *again == 6));
}

// One that was still in the queue when its asker went is not carried out: nobody would know of what it made.
TEST_CASE("PathKeeper.WhatNobodyWaitsForIsNotBegun") {
  std::atomic<int> begun{0}, undone{0};
  const auto keeper = StartKeeper();
  Hang hang;
  keeper->Post([gate = hang.gate()] { gate.wait(); }, 1h);  // slow, not late
  CHECK_FALSE(keeper->Ask<int>([&] { return ++begun; }, 50ms, [&](int) { ++undone; }).has_value());
  hang.LetGo();
  REQUIRE(keeper->Ask<int>([] { return 1; }, 10s).has_value());
  CHECK(begun == 0);
  CHECK(undone == 0);
}

TEST_CASE("PathKeeper.ItsEndWaitsForWhatWasPosted") {
  std::atomic<int> done{0};
  {
    const auto keeper = StartKeeper();
    for (int i = 0; i < 50; ++i) keeper->Post([&] { ++done; }, 1s);
  }
  CHECK(done == 50);
}

TEST_CASE("PathKeeper.ManyAskAtOnce") {
  const auto keeper = StartKeeper();
  std::atomic<int> right{0};
  int counter = 0;  // the keeper's thread's
  std::vector<std::thread> askers;
  for (int i = 0; i < 8; ++i) {
    askers.emplace_back([&] {
      for (int j = 0; j < 200; ++j) right += keeper->Ask<int>([&] { return ++counter; }, 30s).has_value();
    });
  }
  for (std::thread& asker : askers) asker.join();
  CHECK(right == 1600);
  CHECK(keeper->Ask<int>([&] { return counter; }, 10s) == 1600);
}

}  // namespace
}  // namespace mlpo::test
