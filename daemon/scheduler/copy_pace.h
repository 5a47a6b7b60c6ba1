// CopyPace: how fast a checkpoint's blocks are copied beside training: whatever nobody else wants, and never less than
// a small share of what its target can write. So training hardly notices it, and its end can be told. Saves to one
// target have one pace together: a node's ranks save at the same time, and their shares would add up.
//
// Owner: the data thread. No system calls; time is an argument.
#pragma once

#include <cstdint>

namespace mlpo {

class CopyPace {
 public:
  struct Options {
    double share = 0.05;           // of the target's write speed, at least
    double write_bytes_per_s = 0;  // of the target; 0: not known, learned from the copies
    uint64_t burst_bytes = 0;      // so much may be saved up: two blocks
    uint64_t target = 0;           // its device: who saves to the same has the same pace; 0: not known, nobody
  };

  CopyPace(const Options& options, int64_t now_ns);

  // Whether a copy may go before what others want of the paths. It is Begun then.
  bool MayPress(uint64_t bytes, int64_t now_ns);
  // A copy begins, pressed or because nobody else wants anything: both count.
  void Begun(uint64_t bytes, int64_t now_ns);
  // One of `together` that are written at a time has been written.
  void Ended(uint64_t bytes, int64_t took_ns, uint32_t together);

  double least_bytes_per_s() const { return options_.share * write_bytes_per_s_; }
  double write_bytes_per_s() const { return write_bytes_per_s_; }
  // By when a copy of so many bytes may press, if it may not now.
  int64_t PressNs(uint64_t bytes, int64_t now_ns);
  // The time that this many bytes take at most, while the target writes as it does.
  double BoundSeconds(uint64_t bytes) const { return static_cast<double>(bytes) / least_bytes_per_s(); }

 private:
  void Earn(int64_t now_ns);

  const Options options_;
  double write_bytes_per_s_;
  double credit_bytes_ = 0;
  int64_t earned_ns_;  // until when credit has been added
};

}  // namespace mlpo
