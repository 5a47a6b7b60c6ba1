#include "daemon/scheduler/calibration.h"

#include <algorithm>
#include <system_error>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/base/clock.h"

namespace mlpo {
namespace {

constexpr double kGrowth = 1.05;  // with less, more in flight gains nothing

}  // namespace

Calibration::Calibration(Options options, std::function<void(const Transfer&)> start)
    : options_(std::move(options)), start_(std::move(start)), free_(options_.buffers), lanes_(options_.paths.size()) {
  MLPO_CHECK(!lanes_.empty() && options_.buffers.size() >= 2 * lanes_.size() && options_.file_blocks > 0);
  // All paths together need as much in each direction as one did alone.
  const uint64_t buffers = options_.buffers.size() / (2 * lanes_.size());
  max_depth_ = static_cast<uint32_t>(std::clamp<uint64_t>(
      std::min({buffers, options_.max_depth_bytes / options_.block_bytes, options_.file_blocks}), 1, 1024));
  for (Lane& lane : lanes_) lane.holds.resize(options_.file_blocks);
  for (const PathIndex path : options_.paths) {
    results_.emplace_back();
    results_.back().path = path;
  }
}

void Calibration::Begin(int64_t now_ns) { BeginMeasurement(now_ns); }

void Calibration::BeginMeasurement(int64_t now_ns) {
  began_ns_ = now_ns;
  draining_ = false;
  for (Lane& lane : lanes_) lane.flows = {};
  for (size_t i = 0; i < lanes_.size(); ++i) {
    if (kind_ != Kind::kTogether && i != lane_) continue;
    const PathMeasurement& result = results_[i];
    const auto blocks = [&](uint64_t bytes) { return static_cast<uint32_t>(bytes / options_.block_bytes); };
    flow(i, Direction::kWrite).depth = kind_ == Kind::kWrite  ? depth_
                                       : kind_ == Kind::kRead ? 0
                                                              : blocks(result.write_depth_bytes);
    flow(i, Direction::kRead).depth = kind_ == Kind::kRead    ? depth_
                                      : kind_ == Kind::kWrite ? 0
                                                              : blocks(result.read_depth_bytes);
  }
  Fill(now_ns);
}

void Calibration::Fill(int64_t now_ns) {
  if (failed_ || AllEnough(now_ns)) draining_ = true;
  if (!draining_) {
    for (size_t i = 0; i < lanes_.size(); ++i) {
      FillFlow(i, Direction::kWrite);
      FillFlow(i, Direction::kRead);
    }
    return;
  }
  if (in_flight_ > 0) return;
  if (failed_) {
    ended_ = true;
    return;
  }
  EndMeasurement();
  if (!ended_) BeginMeasurement(now_ns);
}

void Calibration::FillFlow(size_t index, Direction direction) {
  Lane& lane = lanes_[index];
  Flow& flow = this->flow(index, direction);
  const bool writes = direction == Direction::kWrite;
  while (flow.in_flight < flow.depth && !free_.empty() && (writes || lane.written > 0)) {
    uint64_t& next = writes ? lane.next_write : lane.next_read;
    if (next >= (writes ? options_.file_blocks : lane.written)) next = 0;
    Transfer transfer;
    transfer.id = options_.first_id + transfers_.size();
    transfer.direction = direction;
    transfer.path = options_.paths[index];
    transfer.file = options_.files[transfer.path];
    transfer.buffer = free_.back();
    transfer.offset = options_.offset_bytes + next * options_.block_bytes;
    transfer.bytes = options_.block_bytes;
    free_.pop_back();
    transfers_.push_back({index, direction, transfer.buffer, next});
    ++next;
    ++flow.in_flight;
    ++in_flight_;
    start_(transfer);
  }
}

void Calibration::TransferDone(const TransferResult& result, int64_t now_ns) {
  MLPO_CHECK(result.id >= options_.first_id && result.id - options_.first_id < transfers_.size());
  const InFlight done = transfers_[result.id - options_.first_id];
  Lane& lane = lanes_[done.lane];
  Flow& flow = this->flow(done.lane, done.direction);
  free_.push_back(done.buffer);
  --flow.in_flight;
  --in_flight_;
  if (result.error != 0) {
    Fail(std::string(done.direction == Direction::kRead ? "reading" : "writing") + ": " +
             std::generic_category().message(result.error),
         result.path);
  }
  if (done.direction == Direction::kWrite) results_[done.lane].written_bytes += result.bytes;
  if (done.direction == Direction::kWrite && result.error == 0) {
    lane.holds[done.block] = true;
    while (lane.written < lane.holds.size() && lane.holds[lane.written]) ++lane.written;
  }
  if (flow.from_ns != 0) {
    flow.bytes += result.bytes;
    ++flow.blocks;
    flow.last_ns = now_ns;
  } else if (now_ns - began_ns_ >= options_.warm_up_ns) {
    flow.from_ns = flow.last_ns = now_ns;
  }
  Fill(now_ns);
}

void Calibration::Tick(int64_t now_ns) {
  if (ended_ || failed_ || now_ns - began_ns_ < options_.deadline_ns) return;
  Fail("a measurement was not done after " + std::to_string(options_.deadline_ns / kNsPerS) + " s",
       kind_ == Kind::kTogether ? kNone : options_.paths[lane_]);
  Fill(now_ns);
}

void Calibration::Cancel(std::string why) {
  Fail(std::move(why));
  if (in_flight_ == 0) ended_ = true;
}

void Calibration::Fail(std::string why, PathIndex path) {
  if (failed_ || ended_) return;
  failed_path_ = path;
  failed_ = true;
  error_ = std::move(why);
}

bool Calibration::Enough(const Flow& flow, int64_t now_ns) const {
  if (flow.depth == 0) return true;
  return flow.from_ns != 0 && now_ns - flow.from_ns >= options_.measure_ns &&
         flow.blocks >= std::max<uint64_t>(options_.measure_blocks, 2 * flow.depth);
}

bool Calibration::AllEnough(int64_t now_ns) const {
  return std::all_of(lanes_.begin(), lanes_.end(),
                     [&](const Lane& lane) { return Enough(lane.flows[0], now_ns) && Enough(lane.flows[1], now_ns); });
}

double Calibration::Speed(size_t lane, Direction direction) const {
  const Flow& measured = flow(lane, direction);
  return static_cast<double>(measured.bytes) * kNsPerS /
         static_cast<double>(std::max<int64_t>(1, measured.last_ns - measured.from_ns));
}

// Twice as much in flight, if that gained something and is to be had; else the next kind of measurement.
void Calibration::Deeper(Direction direction, double speed) {
  PathMeasurement& result = results_[lane_];
  const bool reads = direction == Direction::kRead;
  const bool grew = speed > kGrowth * best_;
  if (grew) {
    (reads ? result.read_depth_bytes : result.write_depth_bytes) = depth_ * options_.block_bytes;
  }
  best_ = std::max(best_, speed);
  (reads ? result.read_bytes_per_s : result.write_bytes_per_s) = best_;
  if (grew && depth_ < max_depth_) {
    depth_ = std::min(2 * depth_, max_depth_);
    return;
  }
  kind_ = reads ? Kind::kMixed : Kind::kRead;
  depth_ = 1;
  best_ = 0;
}

void Calibration::EndMeasurement() {
  if (kind_ == Kind::kWrite) return Deeper(Direction::kWrite, Speed(lane_, Direction::kWrite));
  if (kind_ == Kind::kRead) return Deeper(Direction::kRead, Speed(lane_, Direction::kRead));
  if (kind_ == Kind::kTogether) {
    for (size_t i = 0; i < lanes_.size(); ++i) {
      results_[i].together_bytes_per_s = Speed(i, Direction::kRead) + Speed(i, Direction::kWrite);
    }
    ended_ = true;
    return;
  }
  PathMeasurement& result = results_[lane_];
  const double read = Speed(lane_, Direction::kRead);
  const double write = Speed(lane_, Direction::kWrite);
  result.mixed_bytes_per_s = read + write;
  result.duplex = std::clamp(1 / (read / result.read_bytes_per_s + write / result.write_bytes_per_s), 0.5, 2.0);
  kind_ = Kind::kWrite;
  if (++lane_ < lanes_.size()) return;
  kind_ = Kind::kTogether;
}

}  // namespace mlpo
