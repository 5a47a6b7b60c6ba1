// How long the Adam workers take for a job, from its submission to its end.
#pragma once

#include <poll.h>

#include <vector>

#include "daemon/adam/worker_pool.h"
#include "daemon/base/clock.h"
#include "daemon/bench/bench.h"

namespace mlpo::bench {

// Nothing else may be submitted to `workers`, which post to `done`, meanwhile.
inline double SecondsOf(Job& job, WorkerPool& workers, DoneJobs& done) {
  constexpr int kDeadlineMs = 60'000;
  const int64_t start_ns = NowNs();
  workers.Submit(&job);
  std::vector<Job*> ended;
  while (ended.empty()) {
    pollfd wait = {done.event_fd(), POLLIN, 0};
    if (::poll(&wait, 1, kDeadlineMs) == 0) throw BenchError("the workers do not end");
    done.TakeAll(&ended);
  }
  return static_cast<double>(NowNs() - start_ns) * 1e-9;
}

}  // namespace mlpo::bench
