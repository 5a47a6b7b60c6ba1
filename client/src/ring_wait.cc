// RingEnd's waiting: the sleeper, its followers, and the wake-up protocol of proto/spsc_ring.hpp.
#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "client/src/lent_area.h"
#include "client/src/ring_end.h"
#include "client/src/subgroup.h"

namespace mlpo::client {
namespace {

// Not FUTEX_PRIVATE: the word is shared with the daemon. Waiting works on a read-only mapping of a memfd.
// Returns 0, or the errno: EAGAIN (the word differs), ETIMEDOUT, EINTR.
int FutexWait(const uint32_t* word, uint32_t expected, int64_t timeout_ns) {
  const timespec timeout = ToTimespec(timeout_ns);
  return syscall(SYS_futex, word, FUTEX_WAIT, expected, &timeout, nullptr, 0) == 0 ? 0 : errno;
}

void Pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

template <class Done>
int RingEnd::WaitFor(Done done, Deadline deadline) {
  int code = 0;
  for (;;) {
    Reap();
    if (done()) break;
    if (end_.code != 0) {
      code = end_.Report();
      break;
    }
    if (deadline.Passed()) {
      code = -ETIMEDOUT;
      break;
    }
    if (sleeper_) {
      ++followers_;
      progress_.Wait(lock_, deadline);
      --followers_;
    } else {
      Sleep(deadline);
    }
  }
  // Somebody has to go on watching for those who still wait.
  if (!sleeper_ && followers_ > 0) progress_.NotifyOne();
  return code;
}

int RingEnd::WaitUntilEnded(mlpo_request* request, Deadline deadline) {
  // Relaxed: `ended` is stored with the lock held.
  const int code = WaitFor([request] { return request->ended.load(std::memory_order_relaxed); }, deadline);
  return code == -ETIMEDOUT ? Fail(code, "the request has not ended in time; it goes on") : code;
}

int RingEnd::WaitUntilAnyEnded(mlpo_request* const* requests, size_t count, Deadline deadline, size_t* index) {
  const auto one_has = [requests, count, index] {
    for (size_t i = 0; i < count; ++i) {
      if (!requests[i]->ended.load(std::memory_order_relaxed)) continue;
      *index = i;
      return true;
    }
    return false;
  };
  const int code = WaitFor(one_has, deadline);
  return code == -ETIMEDOUT ? Fail(code, "none of %zu requests has ended in time; they go on", count) : code;
}

int RingEnd::WaitForEnds(uint64_t seen, Deadline deadline) {
  const int code = WaitFor([this, seen] { return ended_ != seen; }, deadline);
  return code == -ETIMEDOUT ? Fail(code, "nothing of the client has ended in time") : code;
}

int RingEnd::WaitForSlot(LentArea* area, mlpo_subgroup* subgroup, Deadline deadline) {
  const int code = WaitFor([area, subgroup] { return area->Take(subgroup); }, deadline);
  if (code != -ETIMEDOUT) return code == 0 ? CheckOpen() : code;
  return Fail(code,
              "no slot of %llu bytes has come back: %u slots have %llu of the lent area's %llu bytes; give back those "
              "whose parameters have been read, and submit gradients before the next ones are made",
              static_cast<unsigned long long>(subgroup->slot_bytes), area->slots(),
              static_cast<unsigned long long>(area->lent_bytes()), static_cast<unsigned long long>(area->bytes()));
}

void RingEnd::WakeWaiters() {
  if (followers_ > 0) progress_.NotifyAll();
  WakeSleeper();
}

int RingEnd::WaitForPlaces(uint32_t count, Deadline deadline) {
  for (;;) {
    int code = WaitFor([this, count] { return deferred_ == nullptr && free_count_ >= count; }, deadline);
    if (code == 0) code = CheckOpen();  // after the end the areas may be unmapped
    if (code == 0) {
      const int64_t places = producer_.FreeFor(count);
      if (places >= static_cast<int64_t>(count)) return CheckOpen();
      if (places < 0) {
        Broken("the daemon's submission index is impossible");
        return CheckOpen();
      }
      // Everything that was submitted there has ended, and only its places are not given back: the daemon is about to.
      if (!deadline.Passed()) {
        lock_.Unlock();
        const timespec pause = ToTimespec(50'000);
        nanosleep(&pause, nullptr);
        lock_.Lock();
        ProbeSession();
        continue;
      }
      code = -ETIMEDOUT;
    }
    return code == -ETIMEDOUT ? Fail(code, "the ring is full: %u requests have not ended", areas_.entries) : code;
  }
}

void RingEnd::Sleep(Deadline deadline) {
  const uint32_t empty_tail = consumer_.empty_tail();
  sleeper_ = true;
  lock_.Unlock();
  const Woken woken = AwaitTail(empty_tail, deadline);
  lock_.Lock();
  sleeper_ = false;
  if (woken == Woken::kLost) lost_wakeups_.fetch_add(1, std::memory_order_relaxed);
  if (SharedWords::Load(&areas_.daemon_lines->completion_tail, std::memory_order_relaxed) == empty_tail) ProbeSession();
}

RingEnd::Woken RingEnd::AwaitTail(uint32_t empty_tail, Deadline deadline) {
  if (Spin(empty_tail)) return Woken::kByDaemon;
  uint32_t* sleepers = &areas_.client_lines->completion_sleepers;
  std::atomic_ref<uint32_t>(*sleepers).fetch_add(1, std::memory_order_seq_cst);  // C1 of spsc_ring.hpp
  const Woken woken = SleepOnTail(empty_tail, deadline);
  std::atomic_ref<uint32_t>(*sleepers).fetch_sub(1, std::memory_order_seq_cst);
  return woken;
}

bool RingEnd::Spin(uint32_t empty_tail) const {
  if (tuning_.spin_ns == 0) return false;
  int64_t until_ns = 0;  // a look at the clock takes as long as a short answer: not before the first looks at the tail
  for (;;) {
    for (int i = 0; i < 32; ++i) {
      // Acquire is Available()'s business; this only looks whether to call it.
      if (SharedWords::Load(&areas_.daemon_lines->completion_tail, std::memory_order_relaxed) != empty_tail)
        return true;
      Pause();
    }
    const int64_t now_ns = NowNs();
    if (until_ns == 0) until_ns = now_ns + tuning_.spin_ns;
    if (now_ns >= until_ns) return false;
  }
}

RingEnd::Woken RingEnd::SleepOnTail(uint32_t empty_tail, Deadline deadline) {
  const uint32_t* tail = &areas_.daemon_lines->completion_tail;
  if (SharedWords::Load(tail, std::memory_order_seq_cst) != empty_tail) return Woken::kByDaemon;  // C2
  // After the end nothing comes but the reason, by the socket.
  const bool ended = session_state() == MLPO_SESSION_ENDED;
  const int64_t slice_ns = ended ? 5 * kNsPerMs : tuning_.slice_ns;
  const int64_t left_ns = deadline.LeftNs();
  const bool whole_slice = left_ns >= slice_ns;
  if (FutexWait(tail, empty_tail, whole_slice ? slice_ns : left_ns) != ETIMEDOUT) return Woken::kByDaemon;
  const uint32_t now_tail = SharedWords::Load(tail, std::memory_order_seq_cst);
  if (now_tail == empty_tail || !whole_slice || ended) return Woken::kByTime;
  // Work was there and no wake-up: either the daemon is just between its two steps, and its wake-up comes now, or it
  // was lost. Still announced, so it must come.
  return FutexWait(tail, now_tail, slice_ns) == ETIMEDOUT ? Woken::kLost : Woken::kByDaemon;
}

void RingEnd::WakeSleeper() {
  if (sleeper_) syscall(SYS_futex, &areas_.daemon_lines->completion_tail, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

void RingEnd::AwaitNoSleeper() {
  // Again and again: the sleeper may have been between its last look and the futex.
  while (sleeper_) {
    WakeSleeper();
    lock_.Unlock();
    const timespec pause = ToTimespec(100'000);
    nanosleep(&pause, nullptr);
    lock_.Lock();
  }
}

void RingEnd::ProbeSession() {
  if (end_.code != 0 || probe_ == nullptr) return;
  Failure failure;
  if (probe_(probe_context_, &failure)) End(failure, /*reap_first=*/true);
}

}  // namespace mlpo::client
