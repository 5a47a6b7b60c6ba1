// RateMeter: bytes per second over the last seconds.
//
// Owner: one thread.
#pragma once

#include <array>
#include <cstdint>

#include "daemon/base/clock.h"

namespace mlpo {

class RateMeter {
 public:
  void Add(uint64_t bytes, int64_t now_ns) {
    const int64_t second = now_ns / kNsPerS;
    Bucket& bucket = buckets_[static_cast<size_t>(second) % buckets_.size()];
    if (bucket.second != second) bucket = Bucket{second, 0};
    bucket.bytes += bytes;
  }
  // Over the last four whole seconds.
  double PerSecond(int64_t now_ns) const {
    const int64_t second = now_ns / kNsPerS;
    uint64_t bytes = 0;
    for (const Bucket& bucket : buckets_) {
      if (bucket.second < second && bucket.second >= second - kSeconds) bytes += bucket.bytes;
    }
    return static_cast<double>(bytes) / kSeconds;
  }

 private:
  static constexpr int64_t kSeconds = 4;
  struct Bucket {
    int64_t second = -1;
    uint64_t bytes = 0;
  };
  std::array<Bucket, kSeconds + 1> buckets_;
};

}  // namespace mlpo
