// LiveCounters: what the main and the data thread leave for whoever looks without asking them: the counters file, and
// the watchdog, which is fed as long as both beat.
//
// Threads: main beats and stores main's values, data beats in each turn of its loop and stores data's values a few
// times a second; any thread takes. Data never waits: it skips a store while somebody takes. Times are monotonic.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <utility>

#include "daemon/types/snapshot.h"

namespace mlpo {

class LiveCounters {
 public:
  // Once, before the threads: what does not change, with an entry for each path. `started_ns` counts as both threads'
  // first beat.
  void Prepare(Snapshot fixed, int64_t started_ns) {
    snapshot_ = std::move(fixed);
    started_ns_ = started_ns;
    BeatMain(started_ns);
    BeatData(started_ns);
  }

  void BeatMain(int64_t now_ns) { main_beat_ns_.store(now_ns, std::memory_order_relaxed); }
  void BeatData(int64_t now_ns) { data_beat_ns_.store(now_ns, std::memory_order_relaxed); }
  int64_t main_beat_ns() const { return main_beat_ns_.load(std::memory_order_relaxed); }
  int64_t data_beat_ns() const { return data_beat_ns_.load(std::memory_order_relaxed); }
  int64_t started_ns() const { return started_ns_; }

  // `store(snapshot)` changes the caller's values of the snapshot.
  template <class Store>
  void Update(Store&& store) {
    const std::lock_guard lock(mutex_);
    store(&snapshot_);
  }
  template <class Store>
  void TryUpdate(Store&& store) {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (lock) store(&snapshot_);
  }
  Snapshot Take() const {
    const std::lock_guard lock(mutex_);
    return snapshot_;
  }

 private:
  int64_t started_ns_ = 0;
  std::atomic<int64_t> main_beat_ns_{0};  // relaxed: a time, nothing is read because of it
  std::atomic<int64_t> data_beat_ns_{0};
  mutable std::mutex mutex_;
  Snapshot snapshot_;  // guarded by mutex_; no sessions in it, only their totals
};

}  // namespace mlpo
