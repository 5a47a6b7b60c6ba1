// WeakMemory: runs small programs of several threads in every way that the C++ memory model lets them run, and says
// what comes out. A model checker for code that takes its accesses to shared words as a parameter
// (proto/spsc_ring.hpp).
//
// Words. A word is the history of what was stored to it. Each thread has a view: for each word the oldest entry that it
// may still see. A load takes any entry that is not older; acquire takes over the view that the entry was stored with,
// release stores with the thread's own. A read-modify-write takes the newest entry and goes on with its view (release
// sequences). For seq_cst there is besides, for each word, the newest entry that a seq_cst access has touched: no
// later seq_cst load sees an older one. What this cannot show are cycles of program order and reads-from (load
// buffering) and of the seq_cst order and relaxed reads-from. A word has one thread that stores to it, or is only
// added to: a second one is reported.
//
// Kernel. A futex compares with the newest value and sleeps in one step; an event is an eventfd that is watched
// edge-triggered. There are no time-outs, so a thread that nobody wakes sleeps for ever, and that is reported.
//
// Search. Depth first over all states, each access to a word being a step. A thread is a plain function; it is run from
// its start with the values that its accesses have had so far, and leaves by an exception at the first one beyond them.
// So it must depend on nothing but them, and may have no effect outside. A state that was there before is not
// entered again, which also ends loops: Here() says what of the past still matters. Deterministic; one real thread.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <initializer_list>
#include <map>
#include <set>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace mlpo::test {

class WeakMemory {
 public:
  static constexpr size_t kMaxWords = 12;
  using Order = std::memory_order;

  // ---- Set-up ----

  // A shared word, found again by its address.
  void AddWord(const std::string& name, const void* address, uint64_t value) {
    Expect(word_names_.size() < kMaxWords, "too many words");
    words_by_address_[address] = static_cast<uint8_t>(word_names_.size());
    word_names_.push_back(name);
    start_values_.push_back(value);
  }
  // An eventfd.
  uint32_t AddEvent() { return events_++; }
  // What `body` returns becomes part of the outcome.
  void AddThread(const std::string& name, std::function<uint64_t()> body) {
    thread_names_.push_back(name);
    bodies_.push_back(std::move(body));
  }

  // ---- In a thread's body ----

  static uint64_t Load(const void* word, Order order) { return Now().Access({Op::kLoad, Now().Find(word), order, 0}); }
  static void Store(const void* word, uint64_t value, Order order) {
    Now().Access({Op::kStore, Now().Find(word), order, value});
  }
  // Adds to a word of 32 bits; what it was.
  static uint64_t Add(const void* word, uint32_t value, Order order) {
    return Now().Access({Op::kAdd, Now().Find(word), order, value});
  }
  // False if the word was not as expected.
  static bool FutexWait(const void* word, uint64_t expected) {
    return Now().Access({Op::kFutexWait, Now().Find(word), Order::relaxed, expected}) != 0;
  }
  static void FutexWake(const void* word) { Now().Access({Op::kFutexWake, Now().Find(word), Order::relaxed, 0}); }
  static void SignalEvent(uint32_t event) {
    Now().Access({Op::kSignal, static_cast<uint8_t>(event), Order::relaxed, 0});
  }
  static void AwaitEvent(uint32_t event) { Now().Access({Op::kAwait, static_cast<uint8_t>(event), Order::relaxed, 0}); }
  // Each of 0 .. n - 1 is tried.
  static uint32_t Choose(uint32_t n) {
    return static_cast<uint32_t>(Now().Access({Op::kChoose, 0, Order::relaxed, n}));
  }
  // At this place (a number of the body's own) the thread's future depends only on `locals` and what it reads later.
  static void Here(uint64_t place, std::initializer_list<uint64_t> locals) {
    Digest digest = {place, ~place};
    for (const uint64_t local : locals) digest = Mix(digest, local);
    Now().digest_ = digest;
  }
  static void Require(bool holds, const char* what) {
    if (!holds) throw Violation{what};
  }

  // ---- Search ----

  struct Result {
    uint64_t states = 0;
    std::string violation;                     // "": none; else what, and the steps that led there
    bool complete = false;                     // every state was seen
    std::set<std::vector<uint64_t>> outcomes;  // what the threads returned
  };
  // Ends at the first violation, or after `most_states`.
  Result Explore(uint64_t most_states = 3'000'000);

 private:
  using View = std::array<uint8_t, kMaxWords>;  // an entry's index, for each word
  using Digest = std::pair<uint64_t, uint64_t>;
  struct Op {
    enum Kind : uint8_t { kLoad, kStore, kAdd, kFutexWait, kFutexWake, kSignal, kAwait, kChoose } kind = kLoad;
    uint8_t word = 0;  // or event
    Order order = Order::relaxed;
    uint64_t value = 0;
  };
  struct Entry {
    uint64_t value = 0;
    View view = {};
  };
  enum class Status : uint8_t { kReady, kAsleep, kFinished };
  struct Thread {
    std::vector<uint64_t> log;  // the values that its accesses have had
    Digest digest;
    View view = {};
    Status status = Status::kReady;
    Op next;
    uint64_t result = 0;
  };
  struct State {
    std::array<std::vector<Entry>, kMaxWords> words;
    View newest_sc = {};
    std::array<uint8_t, kMaxWords> writers;
    std::vector<bool> events;
    std::vector<Thread> threads;
    std::string violation;
  };
  struct Move {
    uint8_t thread = 0;
    uint32_t choice = 0;
  };
  struct Frame {
    State state;
    std::vector<Move> moves;
    size_t next = 0;
  };
  struct Pause {};
  struct Violation {
    const char* what;
  };
  struct DigestHash {
    size_t operator()(const Digest& digest) const { return static_cast<size_t>(digest.first); }
  };
  static constexpr uint8_t kNobody = 0xff, kAdders = 0xfe;

  static WeakMemory& Now() {
    Expect(running_ != nullptr, "a body's function is called outside of a body");
    return *running_;
  }
  // For faults of the test itself.
  static void Expect(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "WeakMemory: %s\n", what);
    std::abort();
  }
  static uint64_t Scramble(uint64_t x) {
    x += 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
  }
  // Two unlike halves: 128 bits, so that two states are never taken for one.
  static Digest Mix(Digest digest, uint64_t value) {
    return {Scramble(digest.first ^ Scramble(value)), Scramble(digest.second + 3 * Scramble(~value))};
  }
  static bool Acquires(Order order) {
    return order == Order::acquire || order == Order::acq_rel || order == Order::seq_cst;
  }
  static bool Releases(Order order) {
    return order == Order::release || order == Order::acq_rel || order == Order::seq_cst;
  }
  static void Join(View* view, const View& other) {
    for (size_t w = 0; w < kMaxWords; ++w) (*view)[w] = std::max((*view)[w], other[w]);
  }

  uint8_t Find(const void* word) const {
    const auto found = words_by_address_.find(word);
    if (found == words_by_address_.end()) throw Violation{"access to memory that is no word of the model"};
    return found->second;
  }
  uint64_t Access(const Op& op) {
    if (cursor_ == log_->size()) {
      next_ = op;
      throw Pause{};
    }
    const uint64_t value = (*log_)[cursor_++];
    digest_ = Mix(digest_, value);
    return value;
  }

  void Advance(State* state, size_t index);
  std::vector<Move> Moves(const State& state) const;
  void Apply(State* state, const Move& move);
  void Append(State* state, size_t thread, Op op, uint64_t value, const View* goes_on);
  void Claim(State* state, size_t thread, uint8_t word, uint8_t as);
  void Forget(State* state) const;
  Digest Key(const State& state) const;
  std::string Tell(const State& before, const State& after, const Move& move) const;
  std::string Stuck(const State& state) const;

  std::map<const void*, uint8_t> words_by_address_;
  std::vector<std::string> word_names_, thread_names_;
  std::vector<uint64_t> start_values_;
  std::vector<std::function<uint64_t()>> bodies_;
  uint32_t events_ = 0;
  // Of the body that runs.
  inline static WeakMemory* running_ = nullptr;
  const std::vector<uint64_t>* log_ = nullptr;
  size_t cursor_ = 0;
  Digest digest_;
  Op next_;
};

// For code that takes its words as a parameter.
struct ModelWords {
  static uint32_t Load(const uint32_t* word, std::memory_order order) {
    return static_cast<uint32_t>(WeakMemory::Load(word, order));
  }
  static void Store(uint32_t* word, uint32_t value, std::memory_order order) { WeakMemory::Store(word, value, order); }
  static uint32_t Add(uint32_t* word, uint32_t value, std::memory_order order) {
    return static_cast<uint32_t>(WeakMemory::Add(word, value, order));
  }
  static uint64_t LoadPart(const uint64_t* part) { return WeakMemory::Load(part, std::memory_order::relaxed); }
  static void StorePart(uint64_t* part, uint64_t value) { WeakMemory::Store(part, value, std::memory_order::relaxed); }
};

}  // namespace mlpo::test
