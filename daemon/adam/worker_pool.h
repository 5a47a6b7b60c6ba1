// WorkerPool: the daemon's CPU workers, shared by all sessions. A job is cut into pieces; any worker of the node that
// its memory is on takes the next piece.
//
// A node's jobs start in order of submission, with all its workers on the first; when its pieces are taken, they go on
// with the next without waiting for its end. Workers without work take pieces of another node's jobs where more wait
// than that node's workers have hands: reading across sockets is slower than waiting for the next turn, but not than
// the one after it. The end of a job's last piece posts it to the done queue. Workers are bound to cores (hwloc, within
// the affinity mask), keep FTZ and DAZ off, block signals and sleep while idle.
// Threads: Submit from any thread. A job is borrowed from Submit until it appears in the done queue, and may then be
// submitted again.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "daemon/base/status.h"
#include "daemon/base/thread.h"

namespace mlpo {

class Cores;

// When a worker was on a job: on one piece, or on several with nothing between them.
struct WorkSpan {
  int64_t begin_ns = 0;  // 0: nothing
  int64_t end_ns = 0;
  uint32_t worker = 0;
};

class Job {
 public:
  virtual ~Job() = default;
  // Piece `piece` of `pieces`; called once each, in any order, from several workers at a time.
  virtual void RunPiece(uint32_t piece) = 0;
  uint32_t pieces = 1;  // at least 1; set before Submit
  int node = -1;        // NUMA node of its memory; -1: wherever there is least to do. Set before Submit
  // One for each piece; the first of some that a worker took one after the other has their span. Empty: nobody wants to
  // know.
  std::vector<WorkSpan> spans;

 private:
  friend class WorkerPool;
  Job* next_job_ = nullptr;  // these three: guarded by its group's mutex
  uint32_t next_piece_ = 0;
  uint64_t number_ = 0;                    // of its submission, in its group
  std::atomic<uint32_t> ended_pieces_{0};  // acq_rel: the last to count sees what all pieces wrote
};

using DoneJobs = MessageQueue<Job*>;

class WorkerPool {
 public:
  struct Options {
    uint32_t workers = 0;  // in all; 0: see SplitWorkers (cores.h)
    bool pin = true;
    double parameters_per_s = 0;   // what the paths can have updated; 0: not known
    const Cores* cores = nullptr;  // nullptr: this machine's. Borrowed for Start
  };
  // `done` is borrowed for the pool's life.
  static Result<std::unique_ptr<WorkerPool>> Start(const Options& options, DoneJobs* done);
  ~WorkerPool();  // runs what was submitted to its end, then joins

  void Submit(Job* job);
  uint32_t workers() const;
  uint32_t workers_on(int node) const;  // that a job with this node has

 private:
  struct Impl;
  explicit WorkerPool(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace mlpo
