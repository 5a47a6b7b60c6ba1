// PathModel: what each path can do, learned from what it does; what it is worth, which share it should hold, and how
// much should be in flight on it.
//
//     time(R, W) = max(R/r, W/w, d*(R/r + W/w))      for R bytes read and W written
//
// d = 1/2 is full duplex, 1 half duplex, more where mixing hurts. Every block written to a path is read back from it,
// so R = W counts: a path is worth e = 1 / max(1/r, 1/w, d*(1/r + 1/w)) bytes read and written per second, and the
// shortest step has each path hold the share e / sum(e). A write budget caps w.
//
// Learning. Each direction of a path has a clock that runs while enough is queued in it to keep the path busy, so that
// a direction that waits for the other one (reads of a path that writes slowly) never seems slow. A window ends after
// kWindowNs or more of that clock (drawn anew each time: nodes that share a file system must not swing together) and
// kWindowBlocks.
//  - Where full duplex is known (declared, measured or learned), each direction's windows teach its speed.
//  - Else what a direction does alone teaches its speed, and what both do in the same time teaches d until it is known,
//    and from then on how fast the path is.
// With less queued, a window may raise r or w, never lower them.
//
// Throttles and caches give some time too much and then too little. A window that shows no more than that goes on, so
// that a halved path is seen at once, and a few percent when they are certain. After a pause a path is fast for a
// moment: a speed is lowered by what a window shows without its pauses, and raised by what it shows with them. What is
// averaged is time per byte, with gain 1/2, and a dead band of 2 % moves nothing. A path that hung is not slow: a
// window in which it did is dropped, but not the one after it, too.
//
// Owner: the data thread. No system calls; time is an argument.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "daemon/types/ids.h"
#include "daemon/types/transfer.h"

namespace mlpo {

enum class Policy : uint8_t {
  kAdaptive,      // shares by worth
  kProportional,  // whole subgroups by min(r, w), as known at the start
  kRatio,         // the weights that the user gave
};

// Where a path's speeds are from.
enum class SpeedOrigin : uint8_t { kDefault, kDeclared, kCalibrated, kLearned };

struct PathParameters {
  double read_bytes_per_s = 0;  // 0: not known
  double write_bytes_per_s = 0;
  double duplex = 1;                    // d
  uint64_t capacity_bytes = 0;          // of extents; 0: no limit of ours
  bool duplex_known = false;            // declared or measured: a property of the device, which is not learned
  double weight = 1;                    // policy kRatio
  double write_budget_bytes_per_s = 0;  // 0: none
  uint64_t read_depth_bytes = 0;        // in flight that reach the speed, as measured; 0: not known
  uint64_t write_depth_bytes = 0;
  SpeedOrigin origin = SpeedOrigin::kDefault;
  double granted_bytes_per_s = 0;  // of its worth, beside other nodes that use the path; 0: all of it
};

const char* Name(SpeedOrigin origin);

// e of the model; 0 if neither speed is known; with one of them the other is taken to be equal.
double PathWorth(const PathParameters& path);
// Shares that sum to 1; a path without known speeds counts as the mean of those that have some.
std::vector<double> PathShares(const std::vector<PathParameters>& paths, Policy policy = Policy::kAdaptive);

class PathModel {
 public:
  static constexpr int64_t kWindowNs = 500'000'000;  // of busy time, at least
  static constexpr uint32_t kWindowBlocks = 16;
  // Something is in flight, and nothing has come of it for so long: the path hangs. More than the usual hiccup of a
  // parallel file system.
  static constexpr int64_t kHangNs = 5'000'000'000;
  static constexpr int64_t kLongHangNs = 120'000'000'000;  // nobody knows any more what became of what it has
  static constexpr double kDeadBand = 0.02;
  static constexpr double kProbeShare = 0.02;  // a path below it keeps kProbeBlocks a session
  static constexpr uint32_t kProbeBlocks = 2;

  struct Options {
    Policy policy = Policy::kAdaptive;
    bool learn = true;
    uint64_t seed = 0;          // of the windows' lengths; another on each node
    uint64_t block_bytes = 0;   // of a whole block's buffer
    uint32_t buffers = 0;       // of the pool
    uint32_t queue_blocks = 0;  // in flight per path and direction; 0: by measurement or speed
    std::vector<PathParameters> paths;
  };
  explicit PathModel(Options options);

  // The pool has grown.
  void SetBuffers(uint32_t buffers);

  // Of a path, from now on: measured anew. What it is granted stays.
  void SetPath(PathIndex path, const PathParameters& parameters);
  // The same for a path of which nothing was learned yet; what was says more.
  void Assume(PathIndex path, const PathParameters& parameters);
  // The path counts as worth no more than this, whatever it can do; 0: as what it can. So the nodes' word can only make
  // less use of a path than its own speeds say. Differences within the dead band are none.
  void Grant(PathIndex path, double bytes_per_s);

  // As now believed.
  const PathParameters& path(PathIndex path) const { return paths_[path].known; }
  double worth(PathIndex path) const { return paths_[path].worth; }
  // By its own speeds.
  double seen_worth(PathIndex path) const;
  double share(PathIndex path) const { return shares_[path]; }
  // How long reading takes, for comparison between paths, while so much is written that may hinder it.
  double ReadSeconds(PathIndex path, double read_bytes, double write_bytes) const;
  Policy policy() const { return options_.policy; }
  // Blocks that may be in flight in one direction, at least 1.
  uint32_t QueueBlocks(PathIndex path, Direction direction) const { return flow(path, direction).queue_blocks; }
  // Of all paths.
  uint32_t QueueBlocks(Direction direction) const;
  // Blocks in flight on one path, both directions together, at most: a hung one must not take the pool.
  uint32_t path_blocks() const { return path_blocks_; }

  // How much of `total_bytes` each path should hold if it may hold at most room_bytes[path]: what is too much for one
  // is shared out among the others. The result is valid until the next call.
  const std::vector<double>& Targets(double total_bytes, const std::vector<double>& room_bytes);

  // Transfers of blocks, as they happen.
  void Started(PathIndex path, Direction direction, int64_t now_ns);
  // Whether what is believed has changed.
  bool Ended(PathIndex path, Direction direction, uint64_t bytes, bool ok, int64_t now_ns);
  // In either direction.
  bool IsHanging(PathIndex path, int64_t now_ns) const { return now_ns >= paths_[path].hangs_ns; }
  // Since something last came of a direction; 0 if it does not hang. One may hang while the other moves.
  int64_t HungNs(PathIndex path, Direction direction, int64_t now_ns) const {
    const Flow& of = flow(path, direction);
    const int64_t quiet_ns = now_ns - Later(of.started, of.ended).at_ns;
    return of.in_flight > 0 && quiet_ns >= kHangNs ? quiet_ns : 0;
  }

 private:
  struct Mark {  // a moment of a path
    int64_t at_ns = 0;
    int64_t shared_ns = 0;  // how long both directions have had something in flight till then
    int64_t busy_ns = 0;    // and together enough
  };
  struct Spent {
    int64_t busy_ns = 0;
    int64_t shared_ns = 0;  // of it, while the other direction had something in flight
    int64_t saved_ns = 0;   // of the pauses between
  };
  struct Window {  // of one direction
    uint64_t bytes = 0;
    Spent spent;
    int64_t pause_ns = 0;  // before what comes next; in `spent` if that counts
    uint32_t blocks = 0;
    int64_t length_ns = 0;  // when it is enough
  };
  struct Shared {  // of a path, while both directions had something in flight, and together enough
    int64_t from_busy_ns = 0;
    double work_s = 0;  // what was done, as long as it would take alone, as believed when it was done
    int64_t saved_ns = 0;
    int64_t pause_ns = 0;
    uint64_t bytes = 0;
    uint32_t blocks = 0;
    int64_t length_ns = 0;
  };
  struct Cost {  // seconds of a window, with its pauses not counted, and counted
    double least = 0;
    double most = 0;
    double Nearest(double believed) const { return std::clamp(believed, least, most); }
  };
  struct Flow {  // one direction of a path
    uint32_t queue_blocks = 1;
    uint32_t busy_blocks = 1;  // in flight that keep the path busy
    uint32_t in_flight = 0;
    bool queued = false;  // busy_blocks or more are
    Mark queued_since;
    Mark started;                 // when in_flight rose from 0
    Mark ended;                   // of the last transfer
    bool hung = false;            // and windows were dropped for it since the last one that was full
    Window any;                   // while one was in flight
    Window queue;                 // while busy_blocks were; until full duplex is known, of what was alone
    Window mixed;                 // as queue, of what was mostly shared; until d is known
    uint32_t sparse_windows = 0;  // in a row
    bool alone_known = false;     // what it does alone was declared or seen
  };
  struct State {
    PathParameters known;
    std::array<Flow, 2> flows;  // by Direction
    Mark looked;
    Shared shared;                // where d is known and not full duplex
    uint32_t sparse_windows = 0;  // of them, in a row
    bool mix_learned = false;     // d is from mixed windows
    bool duplex_settled = false;  // d is known, or was confirmed: what changes now are the speeds
    double worth = 0;
    double read_cost = 0;  // seconds a byte
    double write_cost = 0;
    int64_t hangs_ns = std::numeric_limits<int64_t>::max();  // when it will, unless a transfer ends before
  };

  const Flow& flow(PathIndex path, Direction direction) const {
    return paths_[path].flows[static_cast<size_t>(direction)];
  }
  static int64_t SavedNs(const State& path, Direction direction, int64_t now_ns);
  static Mark Later(Mark a, Mark b) { return a.at_ns > b.at_ns ? a : b; }
  Mark Now(State& path, int64_t now_ns);
  int64_t NewLength();
  Window NewWindow();
  Shared NewShared(const State& path);
  void Begin(State& path, const PathParameters& parameters);
  void ForgetWindows(State& path);
  static void Add(Window& window, bool counts, Mark from, Mark to, uint64_t bytes);
  void AddShared(State& path, Direction direction, Mark from, Mark to, uint64_t bytes);
  static bool IsFullDuplex(const State& path);
  static Cost CostOf(const Spent& spent, double believed_s, uint32_t sparse_windows);
  static uint32_t SparseWindows(const Spent& spent, uint32_t before);
  static bool IsUnsure(const Spent& spent, double believed_s, int64_t slack_ns);
  bool MaybeLearn(State& path, Direction direction, Window& window, bool queued);
  bool MaybeLearnMix(State& path);
  bool MaybeLearnShared(State& path);
  bool Learned(State& path);
  void Settle();
  static void SetHang(State& path);

  const Options options_;
  uint32_t path_blocks_ = 1;
  std::mt19937_64 random_;
  std::vector<State> paths_;
  std::vector<double> shares_;
  std::vector<double> targets_;
};

}  // namespace mlpo
