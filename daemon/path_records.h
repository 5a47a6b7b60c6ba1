// PathRecords: what the daemon keeps on each path for the next one (what has been written there in all, what was
// measured), and what a path can do by that and by its configuration.
//
// Now and then, and at the end, records are saved; meanwhile each path's lock is shown to be alive.
//
// Threads: what is known is main's. The files are the paths' keepers', who are asked by housekeeping.
#pragma once

#include <boost/asio/steady_timer.hpp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "daemon/config/config.h"
#include "daemon/io/path.h"
#include "daemon/io/path_keeper.h"
#include "daemon/io/path_record.h"
#include "daemon/scheduler/path_model.h"
#include "daemon/threads.h"
#include "daemon/types/snapshot.h"

namespace mlpo {

// What the paths can have updated by their declared limits, in parameters a second; 0: not all have declared theirs.
double ParametersPerS(const std::vector<PathConfig>& paths);

class PathRecords {
 public:
  // Borrowed, as long as anything that was posted may be carried out.
  struct Parts {
    const Config* config = nullptr;
    Threads* threads = nullptr;
    std::vector<Path*> paths;
    std::vector<PathKeeper*> keepers;                                  // per path
    std::function<void(std::function<void(Snapshot)>)> take_snapshot;  // in main; so is what it calls
  };

  // Reads nothing: the paths have their records.
  explicit PathRecords(Parts parts);

  // ---- Main thread ----
  // How much has been written to each path, for the next daemon. Now and then, from the first call on.
  void StoreRecords();
  const std::vector<PathRecord>& records() const { return records_; }
  const std::vector<PathParameters>& parameters() const { return parameters_; }
  uint64_t written_before(size_t path) const { return written_before_[path]; }
  // That the data thread does not count.
  void AddWritten(size_t path, uint64_t bytes) { written_before_[path] += bytes; }
  // Takes it over; SaveRecord makes it last.
  void SetCalibration(size_t path, const PathRecord::Calibration& measured);
  // Of what is declared, or was measured, this is this node's; other nodes use the path, too. As configured at first.
  double part(size_t path) const { return node_parts_[path]; }
  void SetPart(size_t path, double part);

  // ---- Housekeeping thread ----
  // The last time: `snapshot` was taken after the data thread's end, when main does nothing here any more.
  void SaveRecords(const Snapshot& snapshot);
  // "" or why it was not.
  std::string SaveRecord(size_t path, const PathRecord& record);

 private:
  std::vector<std::pair<size_t, PathRecord>> TakeLifetimes(const Snapshot& snapshot);

  const Parts parts_;
  std::vector<PathRecord> records_;         // per path, as last saved
  std::vector<PathParameters> parameters_;  // per path
  std::vector<double> node_parts_;          // per path
  std::vector<uint64_t> written_before_;    // per path, by earlier daemons
  boost::asio::steady_timer records_due_;
};

}  // namespace mlpo
