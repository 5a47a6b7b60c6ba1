// StepBook: accounts for each session's time, step by step (types/step_record.h), and for the paths' and workers'.
//
// The scheduler tells what happens, in calls that only count. What a moment is counted as follows from what is so when
// the scheduler has done with a call: a session that something has happened to is looked at again when time goes on.
// That costs a few additions a block, and nothing for sessions that nothing happens to.
//
// Owner: the data thread.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "daemon/scheduler/trace_log.h"
#include "daemon/types/snapshot.h"
#include "daemon/types/step_record.h"
#include "daemon/types/transfer.h"

namespace mlpo {

// The time in which there is at least one of something.
class BusyClock {
 public:
  void Begin(int64_t now_ns) {
    if (count_++ == 0) since_ns_ = now_ns;
  }
  void End(int64_t now_ns) {
    if (--count_ == 0) total_ns_ += now_ns - since_ns_;
  }
  int64_t At(int64_t now_ns) const { return total_ns_ + (count_ > 0 ? now_ns - since_ns_ : 0); }

 private:
  uint32_t count_ = 0;
  int64_t since_ns_ = 0;
  int64_t total_ns_ = 0;
};

// The transfers of a path, all or one session's.
class PathClock {
 public:
  void Begin(Direction direction, int64_t now_ns);
  void End(Direction direction, uint64_t bytes, int64_t now_ns);
  PathUse At(int64_t now_ns) const;

 private:
  BusyClock read_, write_, any_;
  uint64_t read_bytes_ = 0;
  uint64_t written_bytes_ = 0;
};

// In a Session: its account.
class SessionSteps {
 public:
  explicit SessionSteps(size_t paths) : paths_(paths) { total_.paths.resize(paths); }
  SessionId id = 0;  // for the trace

 private:
  friend class StepBook;

  std::vector<PathClock> paths_;
  StepRecord total_;                 // of the session's life, up to ended_ns; its paths only after Sum()
  StepPart part_ = StepPart::kIdle;  // that counts from there on
  bool touched_ = false;             // it is to be looked at again
  bool by_buffers_ = false;          // and when there are free buffers, or are no more
  uint32_t adam_ = 0;                // blocks that workers have for an UPDATE
  uint32_t copies_ = 0;              // and for something else
  uint32_t grads_ = 0;               // GRADs that workers have
  uint32_t ops_ = 0;                 // other operations on subgroups, begun and not ended
  uint32_t reads_ = 0;               // in flight
  uint64_t waiting_ = 0;             // blocks that wait for a buffer or a path

  bool open_ = false;
  uint64_t number_ = 1;         // of the open step, else of the next one
  uint64_t updating_ = 0;       // UPDATEs of this step, accepted and not ended
  uint64_t updated_ = 0;        // subgroups, in this step
  bool next_begun_ = false;     // a subgroup has gone on to the next step while others are in this one
  uint64_t next_updating_ = 0;  // as above, of that one
  uint64_t next_updated_ = 0;
  StepRecord at_end_;               // total_ at the end of the step before,
  StepRecord at_begin_;             // at the begin of this one,
  StepRecord at_update_;            // and at the end of its last UPDATE so far; number 0: there is none
  std::deque<StepRecord> history_;  // at most kHistory, oldest first
};

// In a Subgroup: the steps that its UPDATEs are of.
struct SubgroupSteps {
  uint64_t step = 0;     // of its window or UPDATE
  uint64_t updated = 0;  // of its last UPDATE that succeeded
};

class StepBook {
 public:
  static constexpr size_t kHistory = 8;

  // `trace` is told of steps that end; borrowed.
  StepBook(size_t paths, TraceLog* trace) : trace_(trace), paths_(paths) {}

  // First in each call of the scheduler: what is so now has been so since the call before. `buffer_free`: a buffer is
  // to be had without a flush.
  void Settle(int64_t now_ns, bool buffer_free);

  void TransferBegins(SessionSteps& session, const Transfer& transfer);
  void TransferEnds(SessionSteps& session, const Transfer& transfer, uint64_t bytes);
  void BlockWaits(SessionSteps& session);  // for a buffer or a path
  void BlockWaitsNoMore(SessionSteps& session);
  void WorkBegins(SessionSteps& session, bool adam);
  void WorkEnds(SessionSteps& session, bool adam);
  // Checksums of a block that is to be written: for a step that is a part of the write.
  void ChecksumsBegin() { workers_.Begin(now_ns_); }
  void ChecksumsEnd() { workers_.End(now_ns_); }
  void GradBegins(SessionSteps& session, SubgroupSteps& subgroup);
  void GradEnds(SessionSteps& session);
  void OpBegins(SessionSteps& session);  // on a subgroup, not GRAD
  void OpEnds(SessionSteps& session);
  void UpdateAccepted(SessionSteps& session, SubgroupSteps& subgroup);
  enum class Found { kCached, kPrefetched, kAway, kZero };
  void UpdateWants(SessionSteps& session, Found found);
  // `epoch`: reached; 0: it failed. `subgroups`: that the session has.
  void UpdateEnds(SessionSteps& session, SubgroupSteps& subgroup, uint64_t epoch, uint64_t subgroups);
  // The last window that was open has been discarded.
  void AllDiscarded(SessionSteps& session);
  // The session is about to go.
  void Forget(SessionSteps& session);

  void Fill(const SessionSteps& session, SessionSnapshot* snapshot, int64_t now_ns, bool buffer_free) const;
  void Fill(PathIndex path, PathSnapshot* snapshot, int64_t now_ns) const;
  const StepTotals& totals() const { return totals_; }
  int64_t WorkersBusyNs(int64_t now_ns) const { return workers_.At(now_ns); }

 private:
  void Touch(SessionSteps& session);
  static StepPart Judge(const SessionSteps& session, bool buffer_free);
  void Sum(SessionSteps& session);
  void Join(SessionSteps& session, SubgroupSteps& subgroup);
  void Open(SessionSteps& session);
  void Close(SessionSteps& session, bool skipped = false);
  void CloseIfDone(SessionSteps& session, uint64_t subgroups);
  static StepRecord Difference(const SessionSteps& session, const StepRecord& end);

  TraceLog* const trace_;
  int64_t now_ns_ = 0;        // of the call that is being carried out
  bool buffer_free_ = false;  // since the call before
  std::vector<SessionSteps*> touched_;
  std::vector<SessionSteps*> by_buffers_;  // SessionSteps::by_buffers_
  std::vector<PathClock> paths_;
  BusyClock workers_;
  StepTotals totals_;
};

}  // namespace mlpo
