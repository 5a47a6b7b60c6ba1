// Locks of this process. pthreads directly: the library must not need libstdc++, and pthread_cond_timedwait on the
// monotonic clock is what ThreadSanitizer knows.
#pragma once

#include <pthread.h>
#include <stdlib.h>

#include <cstdint>

#include "client/src/clock.h"

namespace mlpo::client {

class Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;
  ~Mutex() { pthread_mutex_destroy(&mutex_); }

  void Lock() {
    if (pthread_mutex_lock(&mutex_) != 0) abort();  // only on misuse of ours
  }
  void Unlock() { pthread_mutex_unlock(&mutex_); }
  bool TryLock() { return pthread_mutex_trylock(&mutex_) == 0; }

 private:
  friend class Condition;
  pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
};

class MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) : mutex_(mutex) { mutex_.Lock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;
  ~MutexLock() { mutex_.Unlock(); }

 private:
  Mutex& mutex_;
};

class Condition {
 public:
  Condition() {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&condition_, &attributes);
    pthread_condattr_destroy(&attributes);
  }
  Condition(const Condition&) = delete;
  Condition& operator=(const Condition&) = delete;
  ~Condition() { pthread_cond_destroy(&condition_); }

  // Spurious returns happen; the caller looks at its own condition and at the clock.
  void Wait(Mutex& mutex, Deadline deadline) {
    if (deadline.at_ns == INT64_MAX) {
      pthread_cond_wait(&condition_, &mutex.mutex_);
    } else {
      const timespec at = ToTimespec(deadline.at_ns);
      pthread_cond_timedwait(&condition_, &mutex.mutex_, &at);
    }
  }
  void NotifyOne() { pthread_cond_signal(&condition_); }
  void NotifyAll() { pthread_cond_broadcast(&condition_); }

 private:
  pthread_cond_t condition_;
};

// A lock that may be held across waits, and that others wait for no longer than their own deadline.
class Turn {
 public:
  // False when the deadline passed.
  bool Acquire(Deadline deadline) {
    MutexLock lock(mutex_);
    while (taken_) {
      if (deadline.Passed()) return false;
      free_.Wait(mutex_, deadline);
    }
    taken_ = true;
    return true;
  }
  bool TryAcquire() { return Acquire(Deadline{0}); }
  void Release() {
    MutexLock lock(mutex_);
    taken_ = false;
    free_.NotifyOne();
  }

 private:
  Mutex mutex_;
  Condition free_;
  bool taken_ = false;  // guarded by mutex_
};

class TurnHolder {
 public:
  TurnHolder(Turn& turn, Deadline deadline) : turn_(turn), held_(turn.Acquire(deadline)) {}
  TurnHolder(const TurnHolder&) = delete;
  TurnHolder& operator=(const TurnHolder&) = delete;
  ~TurnHolder() {
    if (held_) turn_.Release();
  }
  bool held() const { return held_; }

 private:
  Turn& turn_;
  const bool held_;
};

}  // namespace mlpo::client
