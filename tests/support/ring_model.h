// RingModel: the two ends of a session's ring as programs for WeakMemory. The cursors are those of proto/spsc_ring.hpp;
// what lies around them is written out here in the order of the lines that it stands for:
//   SubmitOne        RingEnd::WaitForPlaces, Push, Publish          (client/src/ring_end.cc, ring_wait.cc)
//   SleepOnTail      RingEnd::AwaitTail, SleepOnTail                (client/src/ring_wait.cc)
//   TakeSubmissions  DataLoop::ReadRing                             (daemon/data_loop.cc)
//   SleepInEpoll     DataLoop::Sleep, RingHasWork                   (daemon/data_loop.cc)
//   Answer           CompletionWriter::Write, Publish               (daemon/completion/completion_writer.cc)
// Whoever changes one of these changes it here. No time-outs: the backstops of both ends would hide what is looked for.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>

#include "proto/spsc_ring.hpp"
#include "tests/support/weak_memory.h"

namespace mlpo::test {

// What a checker must find.
enum class RingMistake {
  kNone,
  kNoSecondLookInEpoll,    // the daemon announces that it sleeps, and does not look again
  kNoSecondLookInFutex,    // the client likewise; the futex still compares
  kFutexComparesTooLate,   // the client sleeps on the tail that it reads after its announcement
  kLookBeforeAnnouncing,   // the daemon looks, then announces
  kDoorbellBeforeTail,     // the client looks at the announcement, then shows the tail
  kWakeBeforeTail,         // the daemon likewise
  kReleaseBeforePop,       // places are given back, then read
  kPublishBeforeEntry,     // the tail is shown, then the entry written
  kNoRoomAsked,            // the daemon answers whether or not there is a place
  kMoreInFlightThanPlaces  // the client submits what it has no place for the answer of
};

struct PlainEntry {
  uint64_t value;
};

// `Words`: ModelWords, or one that changes its orders.
template <class Words>
class RingModel {
 public:
  static constexpr uint32_t kSize = 2;

  explicit RingModel(RingMistake mistake = RingMistake::kNone) : mistake_(mistake) {
    memory_.AddWord("submission_tail", &submission_tail_, 0);
    memory_.AddWord("submission_head", &submission_head_, 0);
    memory_.AddWord("doorbell_wanted", &doorbell_wanted_, 0);
    memory_.AddWord("completion_tail", &completion_tail_, 0);
    memory_.AddWord("completion_head", &completion_head_, 0);
    memory_.AddWord("completion_sleepers", &completion_sleepers_, 0);
    for (uint32_t i = 0; i < kSize; ++i) {
      memory_.AddWord("submission[" + std::to_string(i) + "]", &submissions_[i], kNothing);
      memory_.AddWord("completion[" + std::to_string(i) + "]", &completions_[i], kNothing);
    }
    doorbell_ = memory_.AddEvent();
  }
  RingModel(const RingModel&) = delete;
  RingModel& operator=(const RingModel&) = delete;

  // Only submissions: the client never waits for an answer.
  WeakMemory::Result Submissions(uint32_t count) {
    memory_.AddThread("client", [this, count] {
      Producer submissions = SubmissionProducer();
      for (uint32_t i = 0; i < count; ++i) {
        for (;;) {  // it looks every 50 us
          WeakMemory::Here(1, {i, Known(submissions)});
          const int64_t places = submissions.FreeFor(1);
          WeakMemory::Require(places >= 0, "the head is impossible");
          if (places > 0) break;
        }
        SubmitOne(&submissions, i);
      }
      return uint64_t{count};
    });
    memory_.AddThread("daemon", [this, count] {
      Consumer submissions = SubmissionConsumer();
      uint32_t taken = 0;
      while (taken < count) {
        WeakMemory::Here(2, {taken});
        const int64_t waiting = submissions.Available();
        WeakMemory::Require(waiting >= 0 && waiting <= kSize, "the tail is impossible");
        if (waiting > 0) {
          TakeSubmissions(&submissions, waiting, &taken);
        } else {
          SleepInEpoll([&] { return submissions.AvailableBeforeSleep() != 0; });
        }
      }
      return uint64_t{taken};
    });
    return memory_.Explore();
  }

  // Only completions: the daemon waits for places by looking.
  WeakMemory::Result Completions(uint32_t count) {
    memory_.AddThread("daemon", [this, count] {
      Producer completions = CompletionProducer();
      for (uint32_t i = 0; i < count; ++i) {
        for (;;) {
          WeakMemory::Here(1, {i, Known(completions)});
          const int64_t places = completions.FreeFor(1);
          WeakMemory::Require(places >= 0, "the head is impossible");
          if (places > 0 || mistake_ == RingMistake::kNoRoomAsked) break;
        }
        Answer(&completions, i, 1);
      }
      return uint64_t{count};
    });
    memory_.AddThread("client", [this, count] {
      Consumer completions = CompletionConsumer();
      uint32_t reaped = 0;
      while (reaped < count) {
        WeakMemory::Here(2, {reaped});
        if (!Reap(&completions, &reaped)) SleepOnTail(completions);
      }
      return uint64_t{reaped};
    });
    return memory_.Explore();
  }

  // Requests and their answers, with at most as many in flight as there are places. `one_by_one`: the daemon answers
  // one in a turn, so that some wait while it goes on.
  WeakMemory::Result Requests(uint32_t count, bool one_by_one) {
    memory_.AddThread("client", [this, count] {
      Producer submissions = SubmissionProducer();
      Consumer completions = CompletionConsumer();
      uint32_t submitted = 0, reaped = 0;
      const uint32_t most = mistake_ == RingMistake::kMoreInFlightThanPlaces ? 2 * kSize : kSize;
      while (reaped < count) {
        WeakMemory::Here(1, {submitted, reaped, Known(submissions)});
        // A mistaken one that may send more does not look for answers before it has.
        if (most == kSize || submitted - reaped == most || submitted == count) {
          if (Reap(&completions, &reaped)) continue;
        }
        if (submitted < count && submitted - reaped < most) {
          const int64_t places = submissions.FreeFor(1);
          WeakMemory::Require(places >= 0, "the submission head is impossible");
          if (places > 0) SubmitOne(&submissions, submitted++);
          continue;
        }
        SleepOnTail(completions);
      }
      return uint64_t{reaped};
    });
    memory_.AddThread("daemon", [this, count, one_by_one] {
      Consumer submissions = SubmissionConsumer();
      Producer completions = CompletionProducer();
      uint32_t taken = 0, answered = 0;
      while (answered < count) {
        WeakMemory::Here(2, {taken, answered, Known(completions)});
        const int64_t waiting = submissions.Available();
        WeakMemory::Require(waiting >= 0 && waiting <= kSize, "the submission tail is impossible");
        // CompletionWriter::Room
        const auto unanswered = static_cast<int64_t>(taken - answered);
        const int64_t free = waiting == 0 ? 0 : completions.FreeFor(unanswered + waiting);
        WeakMemory::Require(free >= 0, "the completion head is impossible");
        int64_t takes = std::min(waiting, std::max<int64_t>(free - unanswered, 0));
        if (mistake_ == RingMistake::kNoRoomAsked) takes = waiting;
        if (takes > 0) TakeSubmissions(&submissions, takes, &taken);
        const uint32_t answers = one_by_one ? std::min<uint32_t>(taken - answered, 1) : taken - answered;
        if (answers > 0) Answer(&completions, answered, answers);
        answered += answers;
        if (takes > 0 || answers > 0) continue;
        SleepInEpoll([&] {
          WeakMemory::Require(completions.Free() >= 0, "the completion head is impossible");
          if (submissions.AvailableBeforeSleep() == 0) return false;
          const int64_t room = static_cast<int64_t>(taken - answered) + 1;  // as this end sees it after the tail
          return completions.FreeFor(room) >= room;
        });
      }
      return uint64_t{answered};
    });
    return memory_.Explore();
  }

  // A client that stores what it likes to the words that are its own; the daemon takes what it is shown for so many
  // turns. Whatever comes, the daemon's end counts at most the ring's places, reads only entries of the ring, and
  // says so when an index is impossible. The outcome: how often it was.
  WeakMemory::Result HostileClient(uint32_t stores, uint32_t turns) {
    memory_.AddThread("client", [this, stores] {
      static constexpr std::array<uint32_t, 6> kLies = {0, 1, kSize, kSize + 1, 0x80000000u, 0xffffffffu};
      for (uint32_t i = 0; i < stores; ++i) {
        const uint32_t lie = kLies[WeakMemory::Choose(kLies.size())];
        uint32_t* const word = WeakMemory::Choose(2) == 0 ? &submission_tail_ : &completion_head_;
        Words::Store(word, lie, std::memory_order::relaxed);
      }
      return uint64_t{0};
    });
    memory_.AddThread("daemon", [this, turns] {
      Consumer submissions = SubmissionConsumer();
      Producer completions = CompletionProducer();
      uint64_t impossible = 0;
      for (uint32_t turn = 0; turn < turns; ++turn) {
        const int64_t waiting = submissions.Available();
        WeakMemory::Require(waiting >= -1 && waiting <= kSize, "more waits than the ring has places");
        const int64_t places = completions.FreeFor(waiting);
        WeakMemory::Require(places >= -1 && places <= kSize, "more is free than the ring has places");
        if (waiting < 0 || places < 0) {
          ++impossible;
          continue;  // the real one ends the session; this one is to see more
        }
        for (int64_t i = 0; i < std::min(waiting, places); ++i) (void)submissions.Pop();
        submissions.Release();
      }
      return impossible;
    });
    return memory_.Explore();
  }

 private:
  using Producer = SpscProducer<PlainEntry, Words>;
  using Consumer = SpscConsumer<PlainEntry, Words>;
  static constexpr uint64_t kNothing = 0, kSubmission = 100, kCompletion = 200;

  Producer SubmissionProducer() { return {submissions_.data(), kSize, &submission_tail_, &submission_head_}; }
  Consumer SubmissionConsumer() { return {submissions_.data(), kSize, &submission_tail_, &submission_head_}; }
  Producer CompletionProducer() { return {completions_.data(), kSize, &completion_tail_, &completion_head_}; }
  Consumer CompletionConsumer() { return {completions_.data(), kSize, &completion_tail_, &completion_head_}; }

  // What a producer remembers of the other end: places that it believes free. Reads nothing.
  static uint64_t Known(Producer& producer) { return static_cast<uint64_t>(producer.FreeFor(-1)); }

  void SubmitOne(Producer* submissions, uint32_t number) {
    const bool entry_late = mistake_ == RingMistake::kPublishBeforeEntry;
    const bool look_early = mistake_ == RingMistake::kDoorbellBeforeTail;
    const PlainEntry entry = {kSubmission + number};
    bool sleeps = look_early && Producer::ConsumerSleeps(&doorbell_wanted_);
    if (entry_late) {
      Words::Store(&submission_tail_, number + 1, std::memory_order::seq_cst);
      submissions->Push(entry);
    } else {
      submissions->Push(entry);
      submissions->Publish();
    }
    if (!look_early) sleeps = Producer::ConsumerSleeps(&doorbell_wanted_);
    if (sleeps) WeakMemory::SignalEvent(doorbell_);
  }

  void TakeSubmissions(Consumer* submissions, int64_t count, uint32_t* taken) {
    if (mistake_ == RingMistake::kReleaseBeforePop)
      Words::Store(&submission_head_, *taken + static_cast<uint32_t>(count), std::memory_order::release);
    for (int64_t i = 0; i < count; ++i) {
      WeakMemory::Require(submissions->Pop().value == kSubmission + *taken, "a submission is not the one that is due");
      ++*taken;
    }
    if (mistake_ != RingMistake::kReleaseBeforePop) submissions->Release();
  }

  template <class HasWork>
  void SleepInEpoll(HasWork has_work) {
    const bool look_early = mistake_ == RingMistake::kLookBeforeAnnouncing;
    bool work = look_early && has_work();
    Words::Store(&doorbell_wanted_, 1, std::memory_order::seq_cst);
    if (!look_early && mistake_ != RingMistake::kNoSecondLookInEpoll) work = has_work();
    if (!work) WeakMemory::AwaitEvent(doorbell_);
    Words::Store(&doorbell_wanted_, 0, std::memory_order::relaxed);
  }

  // Answers `count` from number `first` on.
  void Answer(Producer* completions, uint32_t first, uint32_t count) {
    const bool look_early = mistake_ == RingMistake::kWakeBeforeTail;
    bool sleeps = look_early && Producer::ConsumerSleeps(&completion_sleepers_);
    for (uint32_t i = 0; i < count; ++i) completions->Push({kCompletion + first + i});
    completions->Publish();
    if (!look_early) sleeps = Producer::ConsumerSleeps(&completion_sleepers_);
    if (sleeps) WeakMemory::FutexWake(&completion_tail_);
  }

  bool Reap(Consumer* completions, uint32_t* reaped) {
    const int64_t available = completions->Available();
    WeakMemory::Require(available >= 0 && available <= kSize, "the completion tail is impossible");
    for (int64_t i = 0; i < available; ++i) {
      WeakMemory::Require(completions->Pop().value == kCompletion + *reaped, "an answer is not the one that is due");
      ++*reaped;
    }
    if (available > 0) completions->Release();
    return available > 0;
  }

  void SleepOnTail(const Consumer& completions) {
    uint32_t empty_tail = completions.empty_tail();
    Words::Add(&completion_sleepers_, 1, std::memory_order::seq_cst);
    bool sleeps = true;
    if (mistake_ == RingMistake::kFutexComparesTooLate) {
      empty_tail = Words::Load(&completion_tail_, std::memory_order::seq_cst);
    } else if (mistake_ != RingMistake::kNoSecondLookInFutex) {
      sleeps = Words::Load(&completion_tail_, std::memory_order::seq_cst) == empty_tail;
    }
    if (sleeps) (void)WeakMemory::FutexWait(&completion_tail_, empty_tail);
    Words::Add(&completion_sleepers_, ~uint32_t{0}, std::memory_order::seq_cst);
  }

  const RingMistake mistake_;
  WeakMemory memory_;
  uint32_t doorbell_ = 0;
  // Only their addresses are used: values are WeakMemory's.
  uint32_t submission_tail_ = 0, submission_head_ = 0, doorbell_wanted_ = 0;
  uint32_t completion_tail_ = 0, completion_head_ = 0, completion_sleepers_ = 0;
  std::array<PlainEntry, kSize> submissions_ = {}, completions_ = {};
};

}  // namespace mlpo::test
