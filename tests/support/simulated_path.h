// SimulatedPath: a device in virtual time.
//
// It serves the transfers of a direction one after another. While it has work in one direction only, it has that
// direction's speed; while in both, each has the share of its speed that duplex d allows, so that R bytes read and W
// written beside each other take max(R/r, W/w, d(R/r + W/w)): d = 1/2 full duplex, 1 half, up to 2 where mixing hurts.
// Speeds may change, tremble, stop and come back.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <random>
#include <utility>
#include <vector>

#include "daemon/types/transfer.h"

namespace mlpo::test {

class SimulatedPath {
 public:
  static constexpr int64_t kNever = INT64_MAX;
  struct Speed {
    double read_bytes_per_s = 1e9;
    double write_bytes_per_s = 1e9;
    double duplex = 0.5;
    int64_t latency_ns = 0;  // from a transfer's last byte to its end; others go on meanwhile
  };
  // A tenth of its speed for half a second, now and then: each pause between has a random length.
  struct Jitter {
    double factor = 0.1;
    int64_t slow_ns = 500'000'000;
    int64_t mean_pause_ns = 5'000'000'000;
    uint64_t seed = 1;
  };

  explicit SimulatedPath(Speed speed) : speed_(speed) {}

  void Start(const Transfer& transfer, int64_t now_ns);
  // When something is to be done; kNever while nothing moves.
  int64_t next_ns() const { return next_ns_; }
  // Call at next_ns(): what has been transferred, each to end at the time beside it.
  std::vector<std::pair<Transfer, int64_t>> Advance(int64_t now_ns);

  // From a time on; changes are given in their order. A speed of 0 hangs the path.
  void ChangeSpeed(int64_t at_ns, Speed speed, int64_t now_ns);
  void SetJitter(Jitter jitter, int64_t now_ns);

 private:
  struct Served {
    Transfer transfer;
    double left_bytes;
  };

  double Rate(size_t direction) const;  // bytes a nanosecond
  void Progress(int64_t now_ns);
  void Plan();

  Speed speed_;
  std::array<std::deque<Served>, 2> queue_;  // read, write
  int64_t counted_ns_ = 0;                   // progress is counted up to here
  int64_t next_ns_ = kNever;
  std::deque<std::pair<int64_t, Speed>> changes_;
  bool jitters_ = false;
  Jitter jitter_;
  std::mt19937_64 random_;
  bool slow_ = false;
  int64_t toggle_ns_ = kNever;  // `slow_` changes
};

}  // namespace mlpo::test
