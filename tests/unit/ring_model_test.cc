// The ring's two ends in every way that the memory model lets them run, and mistakes that this must find.
#include "tests/support/ring_model.h"

#include <cstdio>
#include <set>
#include <vector>

#include "tests/support/catch.h"
#include "tests/support/weak_memory.h"

namespace mlpo::test {
namespace {

using Order = std::memory_order;
using Outcomes = std::set<std::vector<uint64_t>>;

// ---- The machine itself: what is known of small programs ----
// Which outcomes there are is said by the C++ standard ([atomics.order], [intro.races]) and by Batty, Owens, Sarkar,
// Sewell and Weber, "Mathematizing C++ Concurrency" (2011). An outcome is one number a thread, its reads as decimal
// digits.

struct Litmus {
  Litmus() {
    memory.AddWord("x", &x, 0);
    memory.AddWord("y", &y, 0);
  }
  void Thread(std::function<uint64_t()> body) { memory.AddThread("T" + std::to_string(++threads), std::move(body)); }
  Outcomes Run() {
    const WeakMemory::Result result = memory.Explore();
    INFO(result.violation);
    REQUIRE(result.violation.empty());
    REQUIRE(result.complete);
    return result.outcomes;
  }
  WeakMemory memory;
  uint32_t x = 0, y = 0;
  int threads = 0;
};

Outcomes StoreBuffering(Order store, Order load) {
  Litmus l;
  l.Thread([&] { return WeakMemory::Store(&l.x, 1, store), WeakMemory::Load(&l.y, load); });
  l.Thread([&] { return WeakMemory::Store(&l.y, 1, store), WeakMemory::Load(&l.x, load); });
  return l.Run();
}

Outcomes MessagePassing(Order store, Order load) {
  Litmus l;
  l.Thread([&] {
    WeakMemory::Store(&l.x, 1, Order::relaxed);
    WeakMemory::Store(&l.y, 1, store);
    return uint64_t{0};
  });
  l.Thread([&] {
    const uint64_t flag = WeakMemory::Load(&l.y, load);
    return 10 * flag + WeakMemory::Load(&l.x, Order::relaxed);
  });
  return l.Run();
}

// Two readers of two words that two writers write.
Outcomes IndependentReads(Order store, Order load) {
  Litmus l;
  l.Thread([&] { return WeakMemory::Store(&l.x, 1, store), uint64_t{0}; });
  l.Thread([&] { return WeakMemory::Store(&l.y, 1, store), uint64_t{0}; });
  l.Thread([&] {
    const uint64_t first = WeakMemory::Load(&l.x, load);
    return 10 * first + WeakMemory::Load(&l.y, load);
  });
  l.Thread([&] {
    const uint64_t first = WeakMemory::Load(&l.y, load);
    return 10 * first + WeakMemory::Load(&l.x, load);
  });
  return l.Run();
}

Outcomes WriteToReadCausality(Order store, Order load) {
  Litmus l;
  l.Thread([&] { return WeakMemory::Store(&l.x, 1, store), uint64_t{0}; });
  l.Thread([&] {
    const uint64_t seen = WeakMemory::Load(&l.x, load);
    WeakMemory::Store(&l.y, 1, store);
    return seen;
  });
  l.Thread([&] {
    const uint64_t seen = WeakMemory::Load(&l.y, load);
    return 10 * seen + WeakMemory::Load(&l.x, Order::relaxed);
  });
  return l.Run();
}

TEST_CASE("WeakMemory.StoreBuffering") {
  const Outcomes with = {{0, 0}, {0, 1}, {1, 0}, {1, 1}}, without = {{0, 1}, {1, 0}, {1, 1}};
  CHECK(StoreBuffering(Order::relaxed, Order::relaxed) == with);
  CHECK(StoreBuffering(Order::release, Order::acquire) == with);
  CHECK(StoreBuffering(Order::seq_cst, Order::acquire) == with);
  CHECK(StoreBuffering(Order::release, Order::seq_cst) == with);
  CHECK(StoreBuffering(Order::seq_cst, Order::seq_cst) == without);
}

TEST_CASE("WeakMemory.MessagePassing") {
  const Outcomes with = {{0, 0}, {0, 1}, {0, 10}, {0, 11}}, without = {{0, 0}, {0, 1}, {0, 11}};
  CHECK(MessagePassing(Order::relaxed, Order::relaxed) == with);
  CHECK(MessagePassing(Order::release, Order::relaxed) == with);
  CHECK(MessagePassing(Order::relaxed, Order::acquire) == with);
  CHECK(MessagePassing(Order::release, Order::acquire) == without);
  CHECK(MessagePassing(Order::seq_cst, Order::seq_cst) == without);
}

TEST_CASE("WeakMemory.ReadsOfOneWordNeverGoBack") {
  Litmus l;
  l.Thread([&] {
    WeakMemory::Store(&l.x, 1, Order::relaxed);
    WeakMemory::Store(&l.x, 2, Order::relaxed);
    return uint64_t{0};
  });
  l.Thread([&] {
    const uint64_t first = WeakMemory::Load(&l.x, Order::relaxed);
    return 10 * first + WeakMemory::Load(&l.x, Order::relaxed);
  });
  CHECK(l.Run() == Outcomes{{0, 0}, {0, 1}, {0, 2}, {0, 11}, {0, 12}, {0, 22}});
}

TEST_CASE("WeakMemory.TwoReadersAgreeOnlyWhereAllIsSeqCst") {
  const std::vector<uint64_t> disagree = {0, 0, 10, 10};
  CHECK(IndependentReads(Order::release, Order::acquire).contains(disagree));
  CHECK(IndependentReads(Order::relaxed, Order::relaxed).contains(disagree));
  const Outcomes agreed = IndependentReads(Order::seq_cst, Order::seq_cst);
  CHECK(!agreed.contains(disagree));
  CHECK(agreed.size() == 15);  // all others of the 16
}

TEST_CASE("WeakMemory.WhatWasSeenByWayOfAnother") {
  const std::vector<uint64_t> late = {0, 1, 10};
  CHECK(WriteToReadCausality(Order::relaxed, Order::relaxed).contains(late));
  CHECK(!WriteToReadCausality(Order::release, Order::acquire).contains(late));
}

TEST_CASE("WeakMemory.AddsAreNeverLost") {
  Litmus l;
  for (int i = 0; i < 3; ++i) l.Thread([&] { return WeakMemory::Add(&l.x, 1, Order::relaxed); });
  CHECK(l.Run() == Outcomes{{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}});
}

TEST_CASE("WeakMemory.AReleaseSequenceGoesThroughAnAdd") {
  for (const Order first : {Order::release, Order::relaxed}) {
    Litmus l;
    l.Thread([&] {
      WeakMemory::Store(&l.x, 1, Order::relaxed);
      return WeakMemory::Add(&l.y, 1, first);
    });
    l.Thread([&] { return WeakMemory::Add(&l.y, 1, Order::relaxed); });
    l.Thread([&] {
      const uint64_t count = WeakMemory::Load(&l.y, Order::acquire);
      return 10 * count + WeakMemory::Load(&l.x, Order::relaxed);
    });
    // It sees the second add, which came after the first one, and not what the first one released.
    CHECK(l.Run().contains({0, 1, 20}) == (first == Order::relaxed));
  }
}

TEST_CASE("WeakMemory.SleepersAreWokenOrReported") {
  for (const bool wakes : {true, false}) {
    Litmus l;
    l.Thread([&] {
      WeakMemory::Store(&l.x, 1, Order::relaxed);
      if (wakes) WeakMemory::FutexWake(&l.x);
      return uint64_t{0};
    });
    l.Thread([&] { return uint64_t{WeakMemory::FutexWait(&l.x, 0)}; });
    const WeakMemory::Result result = l.memory.Explore();
    CAPTURE(result.violation);
    CHECK(result.violation.empty() == wakes);
    if (wakes) CHECK(result.outcomes == Outcomes{{0, 0}, {0, 1}});
    if (!wakes) CHECK(result.violation.find("nobody wakes T2") == 0);
  }
}

TEST_CASE("WeakMemory.EventsAreKeptUntilSomebodyWaits") {
  Litmus l;
  const uint32_t event = l.memory.AddEvent();
  l.Thread([&] { return WeakMemory::SignalEvent(event), WeakMemory::SignalEvent(event), uint64_t{0}; });
  l.Thread([&] { return WeakMemory::AwaitEvent(event), uint64_t{0}; });
  CHECK(l.Run() == Outcomes{{0, 0}});
  l.Thread([&] { return WeakMemory::AwaitEvent(event), uint64_t{0}; });  // both signals may have been one event
  CHECK(l.memory.Explore().violation.find("nobody wakes") == 0);
}

TEST_CASE("WeakMemory.LoopsEndWhereNothingChanges") {
  Litmus l;
  l.Thread([&] { return WeakMemory::Store(&l.x, 1, Order::relaxed), uint64_t{0}; });
  l.Thread([&] {
    do WeakMemory::Here(1, {});
    while (WeakMemory::Load(&l.x, Order::relaxed) == 0);
    return uint64_t{1};
  });
  CHECK(l.Run() == Outcomes{{0, 1}});
}

TEST_CASE("WeakMemory.TheModelsOwnLimitsAreReported") {
  Litmus two;
  for (int i = 0; i < 2; ++i) two.Thread([&] { return WeakMemory::Store(&two.x, 1, Order::relaxed), uint64_t{0}; });
  CHECK(two.memory.Explore().violation.find("second thread that stores to x") != std::string::npos);
  Litmus other;
  other.Thread([&] { return WeakMemory::Load(&other, Order::relaxed); });
  CHECK(other.memory.Explore().violation.find("no word of the model") != std::string::npos);
  Litmus many;
  many.Thread([] { return uint64_t{WeakMemory::Choose(50)}; });
  CHECK(!many.memory.Explore(10).complete);
}

// ---- The ring ----

// seq_cst taken for acquire and release, as if it cost nothing.
struct WordsWithoutTotalOrder : ModelWords {
  static uint32_t Load(const uint32_t* word, Order order) {
    return ModelWords::Load(word, order == Order::seq_cst ? Order::acquire : order);
  }
  static void Store(uint32_t* word, uint32_t value, Order order) {
    ModelWords::Store(word, value, order == Order::seq_cst ? Order::release : order);
  }
  static uint32_t Add(uint32_t* word, uint32_t value, Order) { return ModelWords::Add(word, value, Order::acq_rel); }
};
// Producers that do not release, so that entries come later than their tail.
struct WordsThatStoreRelaxed : ModelWords {
  static void Store(uint32_t* word, uint32_t value, Order) { ModelWords::Store(word, value, Order::relaxed); }
};
// Consumers that do not acquire.
struct WordsThatLoadRelaxed : ModelWords {
  static uint32_t Load(const uint32_t* word, Order) { return ModelWords::Load(word, Order::relaxed); }
};

// A sanitizer makes each state ten times as dear, and looks at this one thread only.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr uint32_t kEntries = 3, kRequests = 2;
#else
constexpr uint32_t kEntries = 4, kRequests = 3;
#endif

void IsRight(const char* what, const WeakMemory::Result& result) {
  INFO(what << ": " << result.violation);
  CHECK(result.violation == "");
  CHECK(result.complete);
  std::printf("%s: %llu states\n", what, static_cast<unsigned long long>(result.states));
}
void IsFound(const char* what, const WeakMemory::Result& result, const char* text) {
  INFO(what << ": " << result.violation);
  CHECK(result.violation.find(text) != std::string::npos);
}

TEST_CASE("RingModel.SubmissionsComeWholeInOrderAndWakeTheDaemon") {
  for (uint32_t count = 1; count <= kEntries; ++count) {
    const WeakMemory::Result result = RingModel<ModelWords>().Submissions(count);
    IsRight("submissions", result);
    CHECK(result.outcomes == Outcomes{{count, count}});
  }
}

TEST_CASE("RingModel.CompletionsComeWholeInOrderAndWakeTheClient") {
  for (uint32_t count = 1; count <= kEntries; ++count) {
    const WeakMemory::Result result = RingModel<ModelWords>().Completions(count);
    IsRight("completions", result);
    CHECK(result.outcomes == Outcomes{{count, count}});
  }
}

TEST_CASE("RingModel.EveryRequestIsAnswered") {
  for (const bool one_by_one : {false, true}) {
    const WeakMemory::Result result = RingModel<ModelWords>().Requests(kRequests, one_by_one);
    IsRight("requests", result);
    CHECK(result.outcomes == Outcomes{{kRequests, kRequests}});
  }
}

TEST_CASE("RingModel.AHostileClientIsCountedRightWhateverItStores") {
  const WeakMemory::Result result = RingModel<ModelWords>().HostileClient(2, 3);
  IsRight("hostile client", result);
  CHECK(result.outcomes.contains({0, 0}));  // nothing was seen
  CHECK(result.outcomes.contains({0, 3}));  // an impossible index in each turn
}

TEST_CASE("RingModel.WeakerOrdersAreFound") {
  IsFound("submissions", RingModel<WordsWithoutTotalOrder>().Submissions(2), "nobody wakes daemon");
  IsFound("completions", RingModel<WordsWithoutTotalOrder>().Completions(2), "nobody wakes client");
  // These lose wake-ups and entries: whichever is met first.
  IsFound("submissions", RingModel<WordsThatStoreRelaxed>().Submissions(1), "daemon");
  IsFound("completions", RingModel<WordsThatStoreRelaxed>().Completions(1), "client");
  IsFound("submissions", RingModel<WordsThatLoadRelaxed>().Submissions(1), "daemon");
  IsFound("completions", RingModel<WordsThatLoadRelaxed>().Completions(1), "client");
}

TEST_CASE("RingModel.MistakesAreFound") {
  using Model = RingModel<ModelWords>;
  IsFound("no second look", Model(RingMistake::kNoSecondLookInEpoll).Submissions(1), "nobody wakes daemon");
  IsFound("look, then announce", Model(RingMistake::kLookBeforeAnnouncing).Submissions(1), "nobody wakes daemon");
  IsFound("doorbell, then tail", Model(RingMistake::kDoorbellBeforeTail).Submissions(1), "nobody wakes daemon");
  IsFound("wake, then tail", Model(RingMistake::kWakeBeforeTail).Completions(1), "nobody wakes client");
  IsFound("compares too late", Model(RingMistake::kFutexComparesTooLate).Completions(1), "nobody wakes client");
  IsFound("release, then pop", Model(RingMistake::kReleaseBeforePop).Submissions(3), "not the one that is due");
  IsFound("publish, then write", Model(RingMistake::kPublishBeforeEntry).Submissions(1), "not the one that is due");
  IsFound("no room asked", Model(RingMistake::kNoRoomAsked).Completions(3), "client: ");
  IsFound("too many in flight", Model(RingMistake::kMoreInFlightThanPlaces).Requests(4, false), "nobody wakes");
  // The futex compares as well, in the kernel: the look before it only saves a system call.
  IsRight("no look before the futex", Model(RingMistake::kNoSecondLookInFutex).Completions(2));
}

}  // namespace
}  // namespace mlpo::test
