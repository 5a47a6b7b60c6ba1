// WorkerPool: the daemon's CPU workers, shared by all sessions. A job is cut into pieces; any worker takes the next
// piece.
//
// Jobs start in order of submission, with all workers on the first; when its pieces are taken, they go on with the next
// without waiting for its end. The end of a job's last piece posts it to the done queue. Workers are bound to cores
// (hwloc, within the affinity mask), keep FTZ and DAZ off, block signals and sleep while idle.
// Threads: Submit from any thread. A job is borrowed from Submit until it appears in the done queue, and may then be
// submitted again.
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
  Job* next_job_ = nullptr;  // these two: guarded by the pool's mutex
  uint32_t next_piece_ = 0;
  std::atomic<uint32_t> ended_pieces_{0};  // acq_rel: the last to count sees what all pieces wrote
};

using DoneJobs = MessageQueue<Job*>;

class WorkerPool {
 public:
  struct Options {
    uint32_t workers = 0;  // 0: cores of the affinity mask and cgroup quota, 1-16
    bool pin = true;
  };
  // `done` is borrowed for the pool's life.
  static Result<std::unique_ptr<WorkerPool>> Start(const Options& options, DoneJobs* done);
  ~WorkerPool();  // runs what was submitted to its end, then joins

  void Submit(Job* job);
  uint32_t workers() const;

 private:
  struct Impl;
  explicit WorkerPool(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace mlpo
