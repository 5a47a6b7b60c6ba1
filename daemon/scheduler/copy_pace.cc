#include "daemon/scheduler/copy_pace.h"

#include <algorithm>

#include "daemon/base/check.h"

namespace mlpo {
namespace {

constexpr double kUnknownBytesPerS = 64e6;  // of a target that nothing has been written to yet
constexpr double kSlowestBytesPerS = 1e6;   // a bound is a number, however slow the target is
constexpr double kGain = 0.25;
constexpr double kNsPerSecond = 1e9;

}  // namespace

CopyPace::CopyPace(const Options& options, int64_t now_ns)
    : options_(options),
      write_bytes_per_s_(options.write_bytes_per_s > 0 ? options.write_bytes_per_s : kUnknownBytesPerS),
      earned_ns_(now_ns) {
  MLPO_CHECK(options.share > 0 && options.share <= 1 && options.burst_bytes > 0);
}

void CopyPace::Earn(int64_t now_ns) {
  if (now_ns <= earned_ns_) return;
  credit_bytes_ += least_bytes_per_s() * static_cast<double>(now_ns - earned_ns_) / kNsPerSecond;
  credit_bytes_ = std::min(credit_bytes_, static_cast<double>(options_.burst_bytes));
  earned_ns_ = now_ns;
}

bool CopyPace::MayPress(uint64_t bytes, int64_t now_ns) {
  Earn(now_ns);
  // A block larger than what may be saved up goes as soon as all of that has been.
  return credit_bytes_ >= static_cast<double>(std::min(bytes, options_.burst_bytes));
}

// What was copied while nobody minded makes no debt: the share is the least, not the mean.
void CopyPace::Begun(uint64_t bytes, int64_t now_ns) {
  Earn(now_ns);
  credit_bytes_ = std::max(0.0, credit_bytes_ - static_cast<double>(bytes));
}

void CopyPace::Ended(uint64_t bytes, int64_t took_ns, uint32_t together) {
  if (options_.write_bytes_per_s > 0 || took_ns <= 0) return;
  const double seen = static_cast<double>(bytes) * together * kNsPerSecond / static_cast<double>(took_ns);
  write_bytes_per_s_ = std::max(kSlowestBytesPerS, write_bytes_per_s_ + kGain * (seen - write_bytes_per_s_));
}

int64_t CopyPace::PressNs(uint64_t bytes, int64_t now_ns) {
  Earn(now_ns);
  const double missing = static_cast<double>(std::min(bytes, options_.burst_bytes)) - credit_bytes_;
  return missing <= 0 ? now_ns : now_ns + static_cast<int64_t>(missing / least_bytes_per_s() * kNsPerSecond) + 1;
}

}  // namespace mlpo
