// WorkerPool: the daemon's CPU workers, shared by all sessions. A job is cut into pieces; any worker takes the next
// piece.
//
// Jobs start in order of submission; the last piece's end posts the job to the done queue. Workers are bound to
// cores (hwloc, within affinity mask and cgroup), keep FTZ and DAZ off, and sleep while idle.
// Threads: Submit from the data thread. A job is borrowed from Submit until it appears in the done queue.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "daemon/base/status.h"
#include "daemon/base/thread.h"

namespace mlpo {

class Job {
 public:
  virtual ~Job() = default;
  // Piece `piece` of `pieces`; called once each, in any order, from several workers at a time.
  virtual void RunPiece(uint32_t piece) = 0;
  uint32_t pieces = 1;  // at least 1; set before Submit

 private:
  friend class WorkerPool;
  std::atomic<uint32_t> next_piece_{0};
  std::atomic<uint32_t> ended_pieces_{0};
};

using DoneJobs = MessageQueue<Job*>;

class WorkerPool {
 public:
  struct Options {
    uint32_t workers = 0;  // 0: cores of the affinity mask and cgroup quota, 1-16
    bool pin = true;
  };
  static Result<std::unique_ptr<WorkerPool>> Start(const Options& options, DoneJobs* done);
  ~WorkerPool();  // ends the pieces that run; jobs must have been waited for

  void Submit(Job* job);
  uint32_t workers() const;

 private:
  struct Impl;
  explicit WorkerPool(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace mlpo
