// CalibrationRuns: carries a calibration (mlpo-ctl bench) through the threads: files (housekeeping), buffers that the
// scheduler lends (data), their content (housekeeping), measuring (data), saving (housekeeping), answer (main).
//
// Owns the run that is under way; its files are a storage beside the sessions'. What is measured becomes the paths'
// parameters (PathRecords, the scheduler) and the shares of new sessions. Each step has the run for itself; whatever
// makes it unwanted meanwhile is told by one flag. There is one at a time: the control server sees to that.
//
// Functions are called in main if nothing else is said, and return at once.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "daemon/base/status.h"
#include "daemon/control/control_server.h"
#include "daemon/data_loop.h"
#include "daemon/io/buffer_pool.h"
#include "daemon/io/path.h"
#include "daemon/path_commands.h"
#include "daemon/path_records.h"
#include "daemon/session/session_server.h"
#include "daemon/storages.h"
#include "daemon/threads.h"

namespace mlpo {

class CalibrationRuns {
 public:
  // Borrowed, as long as anything that was posted may be carried out.
  struct Parts {
    Threads* threads = nullptr;
    DataLoop* loop = nullptr;
    const SessionServer* sessions = nullptr;
    Storages* storages = nullptr;
    PathRecords* records = nullptr;
    const PathCommands* commands = nullptr;
    BufferPool* pool = nullptr;
    std::vector<Path*> paths;
    std::function<void()> ended;  // called in main, after the answer: nothing of it is there any more
  };

  explicit CalibrationRuns(Parts parts) : parts_(std::move(parts)) {}

  // Answers later, in main, with JSON or an error.
  void Bench(const BenchRequest& request, std::function<void(Result<std::string>)> answer);
  // Nobody asks for it any more.
  void StopBench();
  // `why`: a constant. The loop ends by itself what is being measured.
  void BenchUnwanted(const char* why);

 private:
  struct BenchRun;

  void LendToBench(const std::shared_ptr<BenchRun>& run);  // data thread
  void EndBench(const std::shared_ptr<BenchRun>& run);

  const Parts parts_;
  std::weak_ptr<BenchRun> bench_;  // the one under way
};

}  // namespace mlpo
