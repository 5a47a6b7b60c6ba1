#include "tests/support/simulated_path.h"

#include <algorithm>
#include <cmath>

namespace mlpo::test {

void SimulatedPath::Start(const Transfer& transfer, int64_t now_ns) {
  Progress(now_ns);
  queue_[transfer.direction == Direction::kRead ? 0 : 1].push_back({transfer, static_cast<double>(transfer.bytes)});
  Plan();
}

void SimulatedPath::ChangeSpeed(int64_t at_ns, Speed speed, int64_t now_ns) {
  changes_.push_back({at_ns, speed});
  Progress(now_ns);
  Plan();
}

void SimulatedPath::SetJitter(Jitter jitter, int64_t now_ns) {
  jitters_ = true;
  jitter_ = jitter;
  random_.seed(jitter.seed);
  slow_ = true;  // ends at once: a pause comes first
  toggle_ns_ = now_ns;
  Progress(now_ns);
  Plan();
}

double SimulatedPath::Rate(size_t direction) const {
  if (queue_[direction].empty()) return 0;
  double share = queue_[1 - direction].empty() ? 1 : std::min(1.0, 1 / (2 * speed_.duplex));
  if (slow_) share *= jitter_.factor;
  return share * (direction == 0 ? speed_.read_bytes_per_s : speed_.write_bytes_per_s) / 1e9;
}

// What was moved since the last look, at a speed that has not changed in between: Plan would have had us look then.
// After that, the speed of now.
void SimulatedPath::Progress(int64_t now_ns) {
  const std::array<double, 2> rates = {Rate(0), Rate(1)};
  for (size_t i = 0; i < 2; ++i) {
    if (!queue_[i].empty()) queue_[i].front().left_bytes -= rates[i] * static_cast<double>(now_ns - counted_ns_);
  }
  counted_ns_ = now_ns;
  while (!changes_.empty() && changes_.front().first <= now_ns) {
    speed_ = changes_.front().second;
    changes_.pop_front();
  }
  std::exponential_distribution<double> pause(1 / static_cast<double>(jitter_.mean_pause_ns));
  while (jitters_ && toggle_ns_ <= now_ns) {
    slow_ = !slow_;
    toggle_ns_ += 1 + (slow_ ? jitter_.slow_ns : static_cast<int64_t>(pause(random_)));
  }
}

void SimulatedPath::Plan() {
  next_ns_ = kNever;
  for (size_t i = 0; i < 2; ++i) {
    const double rate = Rate(i);
    if (rate <= 0) continue;
    const double ns = std::ceil(std::max(0.0, queue_[i].front().left_bytes) / rate);
    next_ns_ = std::min(next_ns_, counted_ns_ + static_cast<int64_t>(ns));
    if (jitters_) next_ns_ = std::min(next_ns_, toggle_ns_);
  }
  const bool busy = !queue_[0].empty() || !queue_[1].empty();
  if (busy && !changes_.empty()) next_ns_ = std::min(next_ns_, changes_.front().first);
}

std::vector<std::pair<Transfer, int64_t>> SimulatedPath::Advance(int64_t now_ns) {
  const std::array<double, 2> rates = {Rate(0), Rate(1)};
  const int64_t end_ns = now_ns + speed_.latency_ns;
  Progress(now_ns);
  std::vector<std::pair<Transfer, int64_t>> ended;
  for (size_t i = 0; i < 2; ++i) {
    // A nanosecond's worth may be left: times are whole.
    if (rates[i] <= 0 || queue_[i].front().left_bytes > rates[i]) continue;
    ended.push_back({queue_[i].front().transfer, end_ns});
    queue_[i].pop_front();
  }
  Plan();
  return ended;
}

}  // namespace mlpo::test
