// Threads: names, how soon they run, and a queue for what one thread hands to another.
//
// MessageQueue<T>: any number of producers, one consumer. The consumer either waits in Take() or watches event_fd()
// (readable while something may wait) and calls TakeAll(). Unbounded: producers are our own threads, whose work is
// bounded by buffers and requests in flight.
#pragma once

#include <sys/eventfd.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "daemon/base/check.h"
#include "daemon/base/unique_fd.h"

namespace mlpo {

void SetThreadName(const std::string& name);  // cut to 15 bytes
// For a thread that passes on what has ended: it runs as soon as it wakes, even where every core has a worker on it
// that was given its turn a moment ago. Needs no privilege. Does nothing before Linux 6.12, for a thread that somebody
// gave a real-time policy, and where a filter of system calls forbids it.
void TakeShortTurns();

template <class T>
class MessageQueue {
 public:
  MessageQueue() : event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) { MLPO_CHECK(event_); }

  int event_fd() const { return event_.get(); }
  // Whether something waits, without a system call. May be late by one Put that is still going on.
  bool Waits() const { return waits_.load(std::memory_order_acquire); }

  // Makes event_fd() unreadable. Whoever calls it looks at Waits() afterwards: what was put before it is not rung for
  // again.
  void ClearEvent() {
    uint64_t count;
    (void)!::read(event_.get(), &count, sizeof count);  // EAGAIN: it was not readable
  }

  void Put(T message) {
    bool was_empty;
    {
      std::lock_guard lock(mutex_);
      was_empty = messages_.empty();
      messages_.push_back(std::move(message));
      waits_.store(true, std::memory_order_release);
    }
    if (was_empty) {
      const uint64_t one = 1;
      MLPO_CHECK(::write(event_.get(), &one, sizeof one) == sizeof one);
    }
  }

  // Appends everything that waits to *out and makes event_fd() unreadable.
  void TakeAll(std::vector<T>* out) {
    ClearEvent();
    std::lock_guard lock(mutex_);
    waits_.store(false, std::memory_order_relaxed);
    if (out->empty()) {
      out->swap(messages_);
    } else {
      for (T& message : messages_) out->push_back(std::move(message));
      messages_.clear();
    }
  }

 private:
  UniqueFd event_;
  std::mutex mutex_;
  std::vector<T> messages_;         // guarded by mutex_
  std::atomic<bool> waits_{false};  // written under mutex_; Waits() pairs with Put
};

}  // namespace mlpo
