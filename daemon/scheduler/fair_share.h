// FairShare: whose block gets the next buffer. Between jobs that wait: whichever has had fewer bytes. Within a job: by
// what each session has left, since a step ends with the slowest rank: all end together, whatever their sizes and
// whenever they began. None gets less than a quarter of an equal share (one with few blocks may be in no such step).
//
// Start-time fair queueing: who is given x bytes at weight w has used x/w more, the one that has used least is next,
// and one that begins to wait does not make up for the time in which it wanted nothing.
//
// Costs O(log n) a block: queues are heaps whose keys are mended when they come to the front, which is enough as `used`
// only grows. Owner: the data thread. No system calls.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace mlpo {

struct TrainingJob;
struct Session;

// Of a session in its job, or of a job.
struct Share {
  double used = 0;
  uint64_t waiting_bytes = 0;
  uint64_t waiting_blocks = 0;
  std::vector<bool> listed;  // by queue: in its LeastUsed
};

// Those that wait in one queue. T has a Share named `share`.
template <class T>
class LeastUsed {
 public:
  explicit LeastUsed(size_t queue) : queue_(queue) {}
  void Add(T* member) {
    if (member->share.listed.size() <= queue_) member->share.listed.resize(queue_ + 1);
    if (member->share.listed[queue_]) return;
    member->share.listed[queue_] = true;
    heap_.push_back({member->share.used, member});
    std::push_heap(heap_.begin(), heap_.end(), Later);
  }
  // The one that has used least; those of which `waits` says no leave. nullptr: none.
  template <class Waits>
  T* Front(Waits waits) {
    while (!heap_.empty()) {
      T* const member = heap_.front().member;
      const bool stays = waits(*member);
      if (stays && heap_.front().used == member->share.used) return member;
      std::pop_heap(heap_.begin(), heap_.end(), Later);
      heap_.pop_back();
      member->share.listed[queue_] = false;
      if (stays) Add(member);
    }
    return nullptr;
  }
  // Before the member goes.
  void Forget(const T* member) {
    std::erase_if(heap_, [&](const Entry& entry) { return entry.member == member; });
    std::make_heap(heap_.begin(), heap_.end(), Later);
  }

 private:
  struct Entry {
    double used;  // when it was put here
    T* member;
  };
  static bool Later(const Entry& a, const Entry& b) { return a.used > b.used; }

  const size_t queue_;
  std::vector<Entry> heap_;
};

class FairShare {
 public:
  explicit FairShare(size_t queues);

  // A block of the session waits in the queue, or waits no more. Before a session or job goes, nothing of it waits.
  void Wait(Session& session, size_t queue, uint64_t bytes);
  void Leave(Session& session, uint64_t bytes);
  // A block that waits, and is about to leave, gets a buffer.
  void Grant(Session& session, uint64_t bytes);
  // Whose block is next in the queue; nullptr if none waits there.
  Session* Next(size_t queue);
  // Whether a is to be served before b.
  static bool Before(const Session& a, const Session& b);

  void Forget(const Session& session);
  void Forget(const TrainingJob& job);

 private:
  std::vector<LeastUsed<TrainingJob>> jobs_;  // by queue
  double job_now_ = 0;                        // `used` of the job that was served last, before
};

}  // namespace mlpo
