// Threads that may hang, and descriptors whose closing may: nobody waits for them, and what was posted is carried out.
#include "daemon/base/loose_threads.h"

#include <poll.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "daemon/base/close_elsewhere.h"
#include "tests/support/catch.h"
#include "tests/support/slow_close.h"

namespace mlpo::test {
namespace {

using namespace std::chrono_literals;

// Kept by whoever sets it, too: it may still be at it when the other goes on.
using Event = std::shared_ptr<std::promise<void>>;
Event MakeEvent() { return std::make_shared<std::promise<void>>(); }

std::shared_ptr<LooseThreads> Start(uint32_t count) {
  Result<std::shared_ptr<LooseThreads>> threads = LooseThreads::Start("loose", count);
  REQUIRE(threads.ok());
  return *threads;
}

TEST_CASE("LooseThreads.StepsOfOneThreadRunInTheirOrder") {
  const std::shared_ptr<LooseThreads> threads = Start(1);
  std::vector<int> order;
  const Event last = MakeEvent();
  for (int i = 0; i < 100; ++i) threads->Post([&order, i] { order.push_back(i); });
  threads->Post([last] { last->set_value(); });
  last->get_future().wait();
  REQUIRE(order.size() == 100);
  for (int i = 0; i < 100; ++i) CHECK(order[static_cast<size_t>(i)] == i);
}

TEST_CASE("LooseThreads.TheirEndDoesNotWaitAndLosesNothing") {
  std::shared_ptr<LooseThreads> threads = Start(1);
  const Event gate = MakeEvent(), hangs = MakeEvent(), last = MakeEvent();
  threads->Post([gate, hangs] {
    hangs->set_value();
    gate->get_future().wait();
  });
  hangs->get_future().wait();
  auto owned = std::make_shared<int>(1);
  const std::weak_ptr<int> kept = owned;
  threads->Post([owned = std::move(owned)] {});
  threads->Post([last] { last->set_value(); });
  threads.reset();
  CHECK_FALSE(kept.expired());
  gate->set_value();
  last->get_future().wait();
  CHECK(kept.expired());
}

TEST_CASE("LooseThreads.OneThatHangsHoldsUpNoneOfTheOthers") {
  const std::shared_ptr<LooseThreads> threads = Start(2);
  const Event gate = MakeEvent(), hangs = MakeEvent(), other = MakeEvent();
  threads->Post([gate, hangs] {
    hangs->set_value();
    gate->get_future().wait();
  });
  hangs->get_future().wait();
  threads->Post([other] { other->set_value(); });
  CHECK(other->get_future().wait_for(10s) == std::future_status::ready);
  gate->set_value();
}

bool Eventually(const std::function<bool()>& holds) {
  for (int i = 0; i < 2000; ++i) {
    if (holds()) return true;
    std::this_thread::sleep_for(5ms);
  }
  return holds();
}

// A pipe whose writing end is closed says so to its reading end.
bool IsClosed(int read_end) {
  pollfd poll = {read_end, POLLIN, 0};
  return ::poll(&poll, 1, 10'000) == 1 && (poll.revents & POLLHUP) != 0;
}

constexpr uint32_t kUid = 12345, kOther = 12346;

TEST_CASE("CloseElsewhere.ClosesInTheEnd") {
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  const UniqueFd read_end(ends[0]);
  std::vector<UniqueFd> files;
  files.emplace_back(ends[1]);
  files.emplace_back();  // one that was taken
  Result<ForeignFiles> made = ShareForeign(std::move(files), kUid, 3);
  REQUIRE(made.ok());
  ForeignFiles shared = std::move(*made);
  CHECK(CountForeign(kUid) == 3);  // one is still to come
  ForeignFiles second = shared;
  shared.reset();
  pollfd poll = {read_end.get(), POLLIN, 0};
  CHECK(::poll(&poll, 1, 0) == 0);  // somebody has it still
  second.reset();
  CHECK(IsClosed(read_end.get()));
  CHECK(Eventually([] { return CountForeign(kUid) == 0; }));
  CloseElsewhere({}, kUid);
  CHECK(CountForeign(kUid) == 0);
}

size_t ThreadsNamed(const std::string& name) {
  size_t count = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream file(task.path() / "comm");
    std::string comm;
    count += std::getline(file, comm) && comm == name;
  }
  return count;
}

// Closing each of them hangs: they have two threads and their own user's patience, and nobody else's.
TEST_CASE("CloseElsewhere.WhatCannotBeClosedIsCountedAndHasTwoThreads") {
  std::vector<std::unique_ptr<SlowClose>> slow;
  for (int i = 0; i < 8; ++i) {
    slow.push_back(std::make_unique<SlowClose>());
    std::vector<UniqueFd> files;
    files.push_back(slow.back()->Take());
    CloseElsewhere(std::move(files), kUid);
  }
  CHECK(CountForeign(kUid) == 8);
  CHECK(Eventually([] { return ThreadsNamed("mlpo-close") == kCloseThreads; }));
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  const UniqueFd read_end(ends[0]);
  std::vector<UniqueFd> quick;
  quick.emplace_back(ends[1]);
  CloseElsewhere(std::move(quick), kOther);
  CHECK(IsClosed(read_end.get()));
  CHECK(Eventually([] { return CountForeign(kOther) == 0; }));
  CHECK(CountForeign(kUid) == 8);
  CHECK(Eventually([] { return ThreadsNamed("mlpo-close") == kCloseThreads; }));
  for (const auto& one : slow) one->Release();
  CHECK(Eventually([] { return CountForeign(kUid) == 0 && ThreadsNamed("mlpo-close") == 0; }));
}

TEST_CASE("CloseElsewhere.AUserHasAnEighthOfAllDescriptorsAndAllAHalf") {
  struct rlimit limit = {};
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &limit) == 0);
  const auto of_one = static_cast<size_t>((limit.rlim_cur == RLIM_INFINITY ? 65536 : limit.rlim_cur) / 8);
  std::vector<Result<ForeignFiles>> kept;
  for (uint32_t uid = kUid; uid < kUid + 4; ++uid) {
    kept.push_back(ShareForeign({}, uid, of_one));
    CHECK(kept.back().ok());
    const Result<ForeignFiles> more = ShareForeign({}, uid, 1);
    CHECK(more.status().code() == MLPO_E_QUOTA);
    CHECK(CheckForeign(uid).ok());  // all of them may be closed
  }
  CHECK(ShareForeign({}, kUid + 9, of_one).status().code() == MLPO_E_QUOTA);
  kept.clear();
  CHECK(CountForeign(kUid) == 0);
  CHECK(ShareForeign({}, kUid, of_one).ok());
}

}  // namespace
}  // namespace mlpo::test
