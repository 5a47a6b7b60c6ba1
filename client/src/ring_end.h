// RingEnd: the client's end of a session's ring: submissions out, completions in, and how threads wait.
//
// Threads: every member function but lock(), lost_wakeups() and FreeInChild() is called with lock() held. Waiting
// functions give the lock up meanwhile.
//
// Waiting. At most one thread at a time watches the ring (spins, then sleeps in the futex): the sleeper. The others
// wait on a process-private condition. Whoever reaps completions tells all of them; whoever leaves while nobody is
// the sleeper wakes one of them to take the role. So a completion wakes one thread of this process, and no completion
// is left alone: the sleeper sleeps on the tail value up to which everything was reaped before it slept.
//
// In flight. At most `entries` submissions are un-reaped at a time, so that the daemon always has a place for its
// completion and never waits for us. user_data names a place in the table of flights and its generation: a value
// that names none ends the session instead of being believed.
//
// Deferred. Who may not wait posts to a list when the ring is full. Every Reap() moves it on, and WaitForPlaces() gives
// no place away before the list is empty: so submissions keep their order, and nothing stays behind.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "client/src/clock.h"
#include "client/src/error.h"
#include "client/src/lock.h"
#include "client/src/request.h"
#include "proto/ring.h"
#include "proto/spsc_ring.hpp"

struct mlpo_subgroup;

namespace mlpo::client {

class LentArea;

// The mapped areas; they outlive the session's last use of the ring. Checked when they were mapped.
struct RingAreas {
  mlpo_client_lines* client_lines = nullptr;
  const mlpo_daemon_lines* daemon_lines = nullptr;
  mlpo_submission* submissions = nullptr;
  mlpo_hyper* hypers = nullptr;
  const mlpo_completion* completions = nullptr;
  const mlpo_error_record* errors = nullptr;
  uint32_t entries = 0;
  int doorbell = -1;  // eventfd
};

struct WaitTuning {
  int64_t spin_ns = 20'000;
  // How long one sleep in the futex lasts before the daemon's life is looked at. Work that is found then instead of by
  // a wake-up is a bug of one of the ends, and counted.
  int64_t slice_ns = 250 * kNsPerMs;
};

// Looks whether the session has ended (without blocking, ring lock held) and says why in *failure.
using Probe = bool (*)(void* context, Failure* failure);

class RingEnd {
 public:
  // Frees memory. All that may be done in a forked child, where destroying the lock could wait for ever.
  void ReleaseMemory();

  int Open(const RingAreas& areas, const WaitTuning& tuning, Probe probe, void* probe_context);

  Mutex& lock() { return lock_; }
  // 0, or why the session has ended; with the text in mlpo_last_error().
  int CheckOpen() const { return end_.code == 0 ? 0 : end_.Report(); }
  int end_code() const { return end_.code; }

  // Waits until `count` <= entries submissions fit; then they do until the lock is given up.
  int WaitForPlaces(uint32_t count, Deadline deadline);
  // A request of `submissions` submissions; nullptr when memory is out.
  mlpo_request* NewRequest(mlpo_client* client, uint32_t submissions);
  void FreeRequest(mlpo_request* request);
  static void FreeInChild(mlpo_request* request);
  // Writes one submission (user_data is set here) for `request`; `hyper` and `subgroup` may be nullptr.
  void Push(mlpo_submission submission, const mlpo_hyper* hyper, mlpo_request* request, mlpo_subgroup* subgroup);
  // Push() for each piece of a gradient.
  void PushPieces(mlpo_subgroup* subgroup, const mlpo_grad_piece* pieces, uint32_t count, mlpo_request* request);
  // Shows the daemon what was pushed and wakes it if it sleeps.
  void Publish();

  // Makes a request for pieces of a gradient (which it takes over: malloc'ed) that Post() will submit. Like those in
  // the ring it keeps its subgroup, and the client as well, which the caller of Post or Abandon gives back.
  mlpo_request* Prepare(mlpo_client* client, mlpo_subgroup* subgroup, mlpo_grad_piece* pieces, uint32_t count);
  // Never waits: what the ring has no place for goes to the list of the deferred. After the session's end the request
  // ends with its reason, which is returned.
  int Post(mlpo_request* request);
  void Abandon(mlpo_request* request, int code, const char* text);

  // Takes in every completion that is there, and fills the places with what was deferred.
  void Reap();
  // 0 when the request has ended, whatever with; -ETIMEDOUT.
  int WaitUntilEnded(mlpo_request* request, Deadline deadline);
  // 0 when one of them has ended: *index is the first that has; -ETIMEDOUT.
  int WaitUntilAnyEnded(mlpo_request* const* requests, size_t count, Deadline deadline, size_t* index);
  // Waits until ended() differs from `seen`; -ETIMEDOUT, or why the session has ended.
  int WaitForEnds(uint64_t seen, Deadline deadline);
  // Waits until the subgroup has a slot of the lent area; -ETIMEDOUT.
  int WaitForSlot(LentArea* area, mlpo_subgroup* subgroup, Deadline deadline);
  // What somebody may wait for has changed without a completion.
  void WakeWaiters();
  // Submissions that have ended, or were abandoned.
  uint64_t ended() const { return ended_; }
  // Prepared requests that were neither posted (to their last piece) nor abandoned.
  uint32_t unposted() const { return unposted_; }

  // Ends the session for this process: everything in flight ends with `failure`, and so does everything later. What
  // the daemon completed before is taken in first, unless the ring cannot be trusted.
  void End(const Failure& failure, bool reap_first);
  // End() by the caller's wish: stands above any earlier reason.
  void Close(const Failure& closed);
  // Returns when no thread watches the ring any more. After End().
  void AwaitNoSleeper();
  // Probes the session now.
  void ProbeSession();

  uint32_t session_state() const;
  // How often the session has been asked for a checkpoint. Takes no lock.
  uint32_t checkpoint_requests() const;
  uint32_t entries() const { return areas_.entries; }
  uint64_t lost_wakeups() const { return lost_wakeups_.load(std::memory_order_relaxed); }

 private:
  struct Flight {  // one submission that has not been reaped
    mlpo_request* request = nullptr;
    mlpo_subgroup* subgroup = nullptr;
    uint32_t generation = 0;
    uint16_t op = 0;
    bool used = false;
  };
  enum class Woken { kByDaemon, kByTime, kLost };

  template <class Done>
  int WaitFor(Done done, Deadline deadline);
  void Sleep(Deadline deadline);
  Woken AwaitTail(uint32_t empty_tail, Deadline deadline);
  Woken SleepOnTail(uint32_t empty_tail, Deadline deadline);
  bool Spin(uint32_t empty_tail) const;
  bool TakeIn(const mlpo_completion& completion);
  void EndFlight(uint32_t index, const Outcome& outcome);
  void Broken(const char* format, ...) __attribute__((format(printf, 2, 3)));
  void FailFlights();
  void PushDeferred();
  void LeavePrepared(mlpo_request* request);
  void FailRest(mlpo_request* request, int code, const char* text);
  void WakeSleeper();

  Mutex lock_;
  Condition progress_;
  RingAreas areas_;
  WaitTuning tuning_;
  Probe probe_ = nullptr;
  void* probe_context_ = nullptr;

  SpscProducer<mlpo_submission> producer_;
  SpscConsumer<mlpo_completion> consumer_;
  Flight* flights_ = nullptr;         // entries of them
  uint32_t* free_flights_ = nullptr;  // a stack of indices
  uint32_t free_count_ = 0;
  mlpo_request* free_requests_ = nullptr;
  // Posted requests with pieces that are not in the ring, in the order in which they were posted.
  mlpo_request* deferred_ = nullptr;
  mlpo_request** deferred_end_ = &deferred_;
  uint64_t ended_ = 0;
  uint32_t unposted_ = 0;
  bool sleeper_ = false;
  uint32_t followers_ = 0;  // threads that wait on progress_
  Failure end_;
  std::atomic<uint64_t> lost_wakeups_{0};  // relaxed: a count
};

}  // namespace mlpo::client
