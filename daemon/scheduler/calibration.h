// Calibration: measures what paths can do, in pieces: each call starts a few transfers and returns.
//
// For each path alone: writing, then reading what was written, the blocks in flight doubled as long as the speed grows
// by more than 5 %, up to 1 GiB; then both at once, for d. Then all paths together, where devices that share a
// bottleneck show. Each measurement begins after a warm-up and ends after a time and a number of blocks.
//
// Owner: the data thread. No system calls; time is an argument.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "daemon/types/ids.h"
#include "daemon/types/transfer.h"

namespace mlpo {

// What was measured of one path. Bytes and bytes per second.
struct PathMeasurement {
  PathIndex path = 0;
  double read_bytes_per_s = 0;
  double write_bytes_per_s = 0;
  double duplex = 1;  // d of the path model
  uint64_t read_depth_bytes = 0;
  uint64_t write_depth_bytes = 0;
  // Read and written at once, alone and while all the others were busy, too.
  double mixed_bytes_per_s = 0;
  double together_bytes_per_s = 0;
  uint64_t written_bytes = 0;  // to measure it; also of a calibration that failed
};

class Calibration {
 public:
  struct Options {
    std::vector<PathIndex> paths;
    std::vector<FileId> files;         // by number of the path, of all paths
    std::vector<BufferIndex> buffers;  // with random content; at least two a path
    uint64_t block_bytes = 0;          // of one transfer, a whole buffer
    uint64_t offset_bytes = 0;         // where blocks begin in the files
    uint64_t file_blocks = 0;          // each file has room for
    uint64_t first_id = 1;             // of its transfers
    int64_t warm_up_ns = 300'000'000;
    int64_t measure_ns = 700'000'000;
    uint64_t measure_blocks = 8;
    int64_t deadline_ns = 20'000'000'000;  // of one measurement: a path that moves nothing is an error
    uint64_t max_depth_bytes = uint64_t{1} << 30;
  };
  Calibration(Options options, std::function<void(const Transfer&)> start);

  void Begin(int64_t now_ns);
  void TransferDone(const TransferResult& result, int64_t now_ns);
  // Call now and then: deadlines.
  void Tick(int64_t now_ns);
  // Ends it as soon as nothing is in flight.
  void Cancel(std::string why);

  // Nothing is in flight any more, and there is a result or an error.
  bool ended() const { return ended_; }
  const std::string& error() const { return error_; }     // "": it was carried out
  PathIndex failed_path() const { return failed_path_; }  // that the error is of; kNone
  // In the order of Options::paths.
  const std::vector<PathMeasurement>& results() const { return results_; }
  const std::vector<BufferIndex>& buffers() const { return options_.buffers; }

 private:
  enum class Kind { kWrite, kRead, kMixed, kTogether };
  struct Flow {          // one direction of a path, in this measurement
    uint32_t depth = 0;  // blocks kept in flight; 0: none
    uint32_t in_flight = 0;
    int64_t from_ns = 0;  // the first end after the warm-up, from which bytes count; 0: not yet
    int64_t last_ns = 0;
    uint64_t bytes = 0;
    uint64_t blocks = 0;
  };
  struct Lane {                 // a path
    std::array<Flow, 2> flows;  // by Direction
    uint64_t next_write = 0;    // block of the file
    uint64_t next_read = 0;
    std::vector<bool> holds;  // by block of the file: what we wrote
    uint64_t written = 0;     // blocks [0, written) do
  };
  struct InFlight {
    size_t lane;
    Direction direction;
    BufferIndex buffer;
    uint64_t block;
  };

  void BeginMeasurement(int64_t now_ns);
  void Fill(int64_t now_ns);
  void FillFlow(size_t lane, Direction direction);
  bool Enough(const Flow& flow, int64_t now_ns) const;
  bool AllEnough(int64_t now_ns) const;
  void EndMeasurement();
  void Deeper(Direction direction, double speed);
  double Speed(size_t lane, Direction direction) const;
  Flow& flow(size_t lane, Direction direction) { return lanes_[lane].flows[static_cast<size_t>(direction)]; }
  const Flow& flow(size_t lane, Direction direction) const {
    return lanes_[lane].flows[static_cast<size_t>(direction)];
  }
  void Fail(std::string why, PathIndex path = kNone);

  const Options options_;
  const std::function<void(const Transfer&)> start_;
  uint32_t max_depth_ = 1;
  std::vector<BufferIndex> free_;
  std::vector<Lane> lanes_;          // in the order of Options::paths
  std::vector<InFlight> transfers_;  // by id - first_id; those that have ended stay
  uint32_t in_flight_ = 0;
  std::vector<PathMeasurement> results_;

  // The measurement under way.
  Kind kind_ = Kind::kWrite;
  size_t lane_ = 0;
  uint32_t depth_ = 1;
  double best_ = 0;  // of this path and direction, with less in flight
  int64_t began_ns_ = 0;
  bool draining_ = false;  // measured; what is in flight ends

  std::string error_;
  PathIndex failed_path_ = kNone;
  bool failed_ = false;
  bool ended_ = false;
};

}  // namespace mlpo
