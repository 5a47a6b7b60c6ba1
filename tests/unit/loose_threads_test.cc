// Threads that may hang, and descriptors whose closing may: nobody waits for them, and what was posted is carried out.
#include "daemon/base/loose_threads.h"

#include <poll.h>
#include <unistd.h>

#include <chrono>
#include <future>
#include <memory>
#include <utility>
#include <vector>

#include "daemon/base/close_elsewhere.h"
#include "tests/support/catch.h"

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

// A pipe whose writing end is closed says so to its reading end.
bool IsClosed(int read_end) {
  pollfd poll = {read_end, POLLIN, 0};
  return ::poll(&poll, 1, 10'000) == 1 && (poll.revents & POLLHUP) != 0;
}

TEST_CASE("CloseElsewhere.ClosesInTheEnd") {
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  const UniqueFd read_end(ends[0]);
  std::vector<UniqueFd> files;
  files.emplace_back(ends[1]);
  files.emplace_back();  // one that was taken
  std::shared_ptr<std::vector<UniqueFd>> shared = ShareForeign(std::move(files));
  std::shared_ptr<std::vector<UniqueFd>> second = shared;
  shared.reset();
  pollfd poll = {read_end.get(), POLLIN, 0};
  CHECK(::poll(&poll, 1, 0) == 0);  // somebody has it still
  second.reset();
  CHECK(IsClosed(read_end.get()));
  CloseElsewhere({});
}

}  // namespace
}  // namespace mlpo::test
