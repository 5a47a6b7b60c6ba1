// PathKeeper: the thread for what may block on one path's file system: files made, reserved, removed; probes; records.
//
// A file system that hangs (a stuck NFS or Lustre) keeps its own keeper, and nobody else: who asks gives a time that he
// waits at most, and while a job is late everybody is refused at once. What comes after all is undone by `late`.
//
// Any thread may post and ask; jobs run in the keeper's thread, in their order. The destructor waits for all of them,
// however long (the daemon's end has a deadline of its own).
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "daemon/base/clock.h"
#include "daemon/base/status.h"

namespace mlpo {

class PathKeeper {
 public:
  // `name`: the path's, for the thread. Fails where the limit on threads is reached.
  static Result<std::unique_ptr<PathKeeper>> Start(const std::string& name);
  ~PathKeeper();
  PathKeeper(const PathKeeper&) = delete;
  PathKeeper& operator=(const PathKeeper&) = delete;

  // Nobody waits for it. It may hang, and then counts as late after `patience`.
  void Post(std::function<void()> work, std::chrono::nanoseconds patience);

  // What `work` answers; nothing if it has not ended within `patience`, or at once if the keeper is stuck. Then
  // `late` gets the answer in the keeper's thread when it comes after all, or is not called if `work` never began.
  template <class T>
  std::optional<T> Ask(std::function<T()> work, std::chrono::nanoseconds patience,
                       std::function<void(T)> late = nullptr);

  // What it works on should have ended long ago.
  bool stuck() const;

 private:
  struct Job {
    std::function<void()> work;
    std::chrono::nanoseconds patience;
  };
  // Of one Ask, shared by who asks and the job.
  template <class T>
  struct Answer {
    std::mutex mutex;
    std::condition_variable came;
    bool abandoned = false;  // who asked has gone
    std::optional<T> value;
  };

  PathKeeper() = default;
  void Run(const std::string& name);

  mutable std::mutex mutex_;
  std::condition_variable work_;
  std::deque<Job> jobs_;    // guarded by mutex_
  int64_t late_at_ns_ = 0;  // when the job at work is; 0: none is. Guarded by mutex_
  bool stopping_ = false;   // guarded by mutex_
  std::thread thread_;
};

template <class T>
std::optional<T> PathKeeper::Ask(std::function<T()> work, std::chrono::nanoseconds patience,
                                 std::function<void(T)> late) {
  if (stuck()) return std::nullopt;
  const auto answer = std::make_shared<Answer<T>>();
  Post(
      [answer, work = std::move(work), late = std::move(late)] {
        {
          const std::lock_guard lock(answer->mutex);
          if (answer->abandoned) return;
        }
        T value = work();
        {
          const std::lock_guard lock(answer->mutex);
          if (!answer->abandoned) {
            answer->value = std::move(value);
            answer->came.notify_one();
            return;
          }
        }
        if (late) late(std::move(value));
      },
      patience);
  std::unique_lock lock(answer->mutex);
  if (!answer->came.wait_for(lock, patience, [&] { return answer->value.has_value(); })) answer->abandoned = true;
  return std::move(answer->value);
}

}  // namespace mlpo
