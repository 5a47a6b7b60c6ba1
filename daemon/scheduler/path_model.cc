#include "daemon/scheduler/path_model.h"

#include <algorithm>
#include <cmath>

#include "daemon/base/check.h"
#include "daemon/base/clock.h"

namespace mlpo {
namespace {

// Blocks in flight, at least: throttles and many devices give time in intervals, in which two may end together. More
// than needed only takes buffers from the cache.
constexpr uint32_t kMinQueueBlocks = 3;
// Without measurement, what a path moves in this time, while it is told of the next, comes to them.
constexpr double kQueueSeconds = 0.005;
constexpr uint32_t kDefaultQueueBlocks = 4;  // at most, without measurement
// The other direction had something in flight for less of the time: it did not matter.
constexpr double kAlone = 0.1;
// d up to which the directions do not disturb each other.
constexpr double kFullDuplex = 0.55;
constexpr double kMinDuplex = 0.5;
constexpr double kMaxDuplex = 2;
// d from which the directions are taken to share the path's time rather than to be independent.
constexpr double kDisturbed = 0.75;
// While nothing is in flight caches empty and throttles save up, for so long: what comes next is fast for it.
constexpr int64_t kSavedNs = 100 * kNsPerMs;
// With pauses of more than this part of the time, a direction that limits its path may have too little to do: more will
// show whether it can do it, and is given bit by bit.
constexpr double kSparse = 0.3;
constexpr double kBit = 0.2;
// Transfers of less than this part of a block say more about latency than about bandwidth.
constexpr uint64_t kSmallPart = 2;

double Mean(double a, double b) { return (a + b) / 2; }

bool Near(double a, double b) { return std::abs(a / b - 1) <= PathModel::kDeadBand; }

// Of whole blocks in flight: what was measured, and one that waits already, or else by the speed.
uint32_t QueueBlocksFor(uint64_t depth_bytes, double bytes_per_s, uint64_t block_bytes) {
  const double block = static_cast<double>(block_bytes);
  if (depth_bytes > 0) {
    return std::max(kMinQueueBlocks, static_cast<uint32_t>((depth_bytes + block_bytes / 2) / block_bytes) + 1);
  }
  if (bytes_per_s <= 0) return kDefaultQueueBlocks;
  const double blocks = kMinQueueBlocks + bytes_per_s * kQueueSeconds / block;
  return static_cast<uint32_t>(std::min<double>(blocks, kDefaultQueueBlocks));
}

double& Speed(PathParameters& path, Direction direction) {
  return direction == Direction::kRead ? path.read_bytes_per_s : path.write_bytes_per_s;
}

// Whether a path would be worth more if this direction were faster.
bool Limits(const PathParameters& path, Direction direction) {
  const double r = 1 / path.read_bytes_per_s;
  const double w = 1 / path.write_bytes_per_s;
  const double mine = direction == Direction::kRead ? r : w;
  return std::max(mine, path.duplex * (r + w)) >= std::max(r, w) * (1 - PathModel::kDeadBand);
}

// What the policy goes by; 0: not known.
double Claim(const PathParameters& path, Policy policy) {
  if (policy == Policy::kRatio) return path.weight;
  if (policy == Policy::kAdaptive) return PathWorth(path);
  if (path.read_bytes_per_s <= 0 || path.write_bytes_per_s <= 0)
    return std::max(path.read_bytes_per_s, path.write_bytes_per_s);
  return std::min(path.read_bytes_per_s, path.write_bytes_per_s);
}

}  // namespace

const char* Name(SpeedOrigin origin) {
  switch (origin) {
    case SpeedOrigin::kDeclared:
      return "declared";
    case SpeedOrigin::kCalibrated:
      return "calibrated";
    case SpeedOrigin::kLearned:
      return "learned";
    case SpeedOrigin::kDefault:
      break;
  }
  return "default";
}

double PathWorth(const PathParameters& path) {
  double read = path.read_bytes_per_s, write = path.write_bytes_per_s;
  if (read <= 0 && write <= 0) return 0;
  if (read <= 0) read = write;
  if (write <= 0) write = read;
  if (path.write_budget_bytes_per_s > 0) write = std::min(write, path.write_budget_bytes_per_s);
  const double r = 1 / read;
  const double w = 1 / write;
  return 1 / std::max({r, w, path.duplex * (r + w)});
}

std::vector<double> PathShares(const std::vector<PathParameters>& paths, Policy policy) {
  std::vector<double> claims;
  double sum = 0;
  int known = 0;
  for (const PathParameters& path : paths) {
    claims.push_back(Claim(path, policy));
    sum += claims.back();
    known += claims.back() > 0;
  }
  const double unknown = known > 0 ? sum / known : 1;
  sum = 0;
  for (double& claim : claims) {
    if (claim <= 0) claim = unknown;
    sum += claim;
  }
  for (double& claim : claims) claim /= sum;
  return claims;
}

PathModel::PathModel(Options options) : options_(std::move(options)), random_(options_.seed) {
  for (const PathParameters& parameters : options_.paths) {
    State path;
    path.known = parameters;
    path.duplex_settled = parameters.duplex_known;
    for (Flow& flow : path.flows) flow.queue = flow.any = NewWindow();
    paths_.push_back(path);
  }
  shares_ = PathShares(options_.paths, options_.policy);
  targets_.resize(paths_.size());
  SetBuffers(options_.buffers);
}

void PathModel::SetBuffers(uint32_t buffers) {
  path_blocks_ = std::max<uint32_t>(1, buffers / static_cast<uint32_t>(paths_.size() + 1));
  Settle();
}

void PathModel::SetPath(PathIndex index, const PathParameters& parameters) {
  State& path = paths_[index];
  path.known = parameters;
  path.duplex_settled = parameters.duplex_known;
  path.mix_learned = false;
  for (Flow& flow : path.flows) {
    flow.queue = flow.any = NewWindow();
    flow.mixed_cost = {};
  }
  std::vector<PathParameters> all;
  for (const State& each : paths_) all.push_back(each.known);
  shares_ = PathShares(all, options_.policy);
  Settle();
}

// Everything that follows from the speeds.
void PathModel::Settle() {
  std::vector<PathParameters> known;
  for (State& path : paths_) known.push_back(path.known);
  if (options_.policy == Policy::kAdaptive) shares_ = PathShares(known);
  for (size_t i = 0; i < paths_.size(); ++i) {
    State& path = paths_[i];
    path.worth = PathWorth(path.known);
    // One that nothing is known of is taken to do as its share says.
    const auto cost = [&](double speed) {
      return 1 / (speed > 0 ? speed : path.worth > 0 ? path.worth : shares_[i] * 1e9);
    };
    path.read_cost = cost(path.known.read_bytes_per_s);
    path.write_cost = cost(path.known.write_bytes_per_s);
    for (const Direction direction : {Direction::kRead, Direction::kWrite}) {
      Flow& flow = path.flows[static_cast<size_t>(direction)];
      const bool reads = direction == Direction::kRead;
      const uint32_t blocks = QueueBlocksFor(reads ? path.known.read_depth_bytes : path.known.write_depth_bytes,
                                             Speed(path.known, direction), options_.block_bytes);
      flow.queue_blocks = std::min(options_.queue_blocks > 0 ? options_.queue_blocks : blocks, path_blocks_);
      // Two less than the queue, one of which only waits: a block that has just ended may be replaced a moment later.
      flow.busy_blocks = std::max(3u, std::min(blocks, flow.queue_blocks)) - 2;
    }
  }
}

uint32_t PathModel::QueueBlocks(Direction direction) const {
  uint32_t blocks = 0;
  for (size_t i = 0; i < paths_.size(); ++i) blocks += QueueBlocks(static_cast<PathIndex>(i), direction);
  return blocks;
}

double PathModel::ReadSeconds(PathIndex index, double read_bytes, double write_bytes) const {
  const State& path = paths_[index];
  const double read_s = read_bytes * path.read_cost;
  const double write_s = write_bytes * path.write_cost;
  return std::max(read_s, path.known.duplex * (read_s + write_s));
}

const std::vector<double>& PathModel::Targets(double total_bytes, const std::vector<double>& room_bytes) {
  const double probe = static_cast<double>(kProbeBlocks * options_.block_bytes);
  double left = total_bytes;
  double claims = 0;  // of paths that are not filled
  for (size_t i = 0; i < paths_.size(); ++i) {
    targets_[i] = -1;
    if (room_bytes[i] <= 0) {
      targets_[i] = 0;
    } else if (shares_[i] < kProbeShare && shares_[i] * total_bytes < probe && options_.policy == Policy::kAdaptive) {
      targets_[i] = std::min({probe, room_bytes[i], left});
      left -= targets_[i];
    } else {
      claims += shares_[i];
    }
  }
  for (bool again = true; again;) {
    again = false;
    const double each = claims > 0 ? left / claims : 0;
    for (size_t i = 0; i < paths_.size(); ++i) {
      if (targets_[i] >= 0 || shares_[i] * each <= room_bytes[i]) continue;
      targets_[i] = room_bytes[i];
      left -= room_bytes[i];
      claims -= shares_[i];
      again = true;
    }
    for (size_t i = 0; i < paths_.size() && !again; ++i) {
      if (targets_[i] < 0) targets_[i] = shares_[i] * each;
    }
  }
  return targets_;
}

// ---- Learning ----

PathModel::Mark PathModel::Now(State& path, int64_t now_ns) {
  if (path.flows[0].in_flight > 0 && path.flows[1].in_flight > 0) path.shared_ns += now_ns - path.shared_at_ns;
  path.shared_at_ns = now_ns;
  return {now_ns, path.shared_ns};
}

PathModel::Window PathModel::NewWindow() {
  Window window;
  window.length_ns = kWindowNs + static_cast<int64_t>(random_() % kWindowNs);
  return window;
}

void PathModel::Add(Window& window, Mark from, Mark to, uint64_t bytes) {
  window.bytes += bytes;
  window.busy_ns += to.at_ns - from.at_ns;
  window.shared_ns += to.shared_ns - from.shared_ns;
  ++window.blocks;
}

void PathModel::Started(PathIndex index, Direction direction, int64_t now_ns) {
  State& path = paths_[index];
  Flow& flow = path.flows[static_cast<size_t>(direction)];
  const Mark now = Now(path, now_ns);
  if (flow.in_flight++ == 0) {
    flow.started = now;
    const int64_t saved_ns = std::min(now_ns - flow.ended.at_ns, kSavedNs);
    flow.queue.saved_ns += saved_ns;
    flow.any.saved_ns += saved_ns;
  }
  if (!flow.queued && flow.in_flight >= flow.busy_blocks) {
    flow.queued = true;
    flow.queued_since = now;
  }
  SetHang(path);
}

// Kept rather than asked for: the scheduler looks at it for every path several times a call.
void PathModel::SetHang(State& path) {
  path.hangs_ns = std::numeric_limits<int64_t>::max();
  for (const Flow& flow : path.flows) {
    if (flow.in_flight == 0) continue;
    path.hangs_ns = std::min(path.hangs_ns, Later(flow.started, flow.ended).at_ns + kHangNs);
  }
}

bool PathModel::Ended(PathIndex index, Direction direction, uint64_t bytes, bool ok, int64_t now_ns) {
  State& path = paths_[index];
  Flow& flow = path.flows[static_cast<size_t>(direction)];
  MLPO_CHECK(flow.in_flight > 0);
  const Mark now = Now(path, now_ns);
  // A path works on what is in flight one after another: what ended now was begun when the one before ended.
  const Mark begun = Later(flow.started, flow.ended);
  const bool hung = now_ns - begun.at_ns >= kHangNs && !flow.hung;
  if (hung) {
    flow.hung = true;
    flow.queue = flow.any = NewWindow();
  }
  const bool counts = ok && !hung && bytes >= options_.block_bytes / kSmallPart;
  if (counts) Add(flow.any, begun, now, bytes);
  // Of one that ends after the queue has filled up, an unknown part was done before.
  if (counts && flow.queued && (flow.busy_blocks == 1 || flow.queued_since.at_ns <= flow.ended.at_ns)) {
    Add(flow.queue, Later(flow.queued_since, flow.ended), now, bytes);
  }
  flow.ended = now;
  if (--flow.in_flight < flow.busy_blocks) flow.queued = false;
  SetHang(path);
  if (!options_.learn) return false;
  bool learned = MaybeLearn(path, direction, flow.queue, true);
  if (flow.busy_blocks > 1) learned |= MaybeLearn(path, direction, flow.any, false);
  return learned;
}

bool PathModel::MaybeLearn(State& path, Direction direction, Window& window, bool queued) {
  if (window.blocks < kWindowBlocks || window.busy_ns < window.length_ns) return false;
  const double busy = static_cast<double>(window.busy_ns);
  const double bytes = static_cast<double>(window.bytes);
  const auto saved = static_cast<double>(window.saved_ns);
  Cost cost{busy / kNsPerS / bytes, (busy + saved) / kNsPerS / bytes};
  if (saved > kSparse * busy && Limits(path.known, direction)) {
    cost.most = std::clamp((1 - kBit) / Speed(path.known, direction), cost.least, cost.most);
  }
  const double shared = static_cast<double>(window.shared_ns) / busy;
  window = NewWindow();
  path.flows[static_cast<size_t>(direction)].hung = false;
  bool learned = false;
  if (queued) {
    learned = Learn(path, direction, cost, shared);
  } else if (double& speed = Speed(path.known, direction); speed <= 0 || cost.most * speed < 1 - kDeadBand) {
    speed = speed <= 0 ? 1 / cost.least : 1 / Mean(1 / speed, cost.most);
    learned = true;
  }
  if (!learned) return false;
  path.known.origin = SpeedOrigin::kLearned;
  Settle();
  return true;
}

// `cost`: of one direction, of which `shared` with the other one. Whether anything changed.
bool PathModel::Learn(State& path, Direction direction, Cost cost, double shared) {
  PathParameters& known = path.known;
  double& speed = Speed(known, direction);
  if (speed <= 0) {
    speed = 1 / cost.least;
    return true;
  }
  if (shared <= kAlone || (path.duplex_settled && known.duplex <= kFullDuplex)) {
    const double seen = cost.Nearest(1 / speed);
    if (Near(seen, 1 / speed)) return false;
    const auto alone = [&] { return 1 / known.read_bytes_per_s + 1 / known.write_bytes_per_s; };
    const double mix = path.mix_learned ? known.duplex * alone() : 0;  // which this window says nothing about
    speed = 1 / Mean(1 / speed, seen);
    if (mix > 0) known.duplex = std::clamp(mix / alone(), kMinDuplex, kMaxDuplex);
    return true;
  }
  Flow& flow = path.flows[static_cast<size_t>(direction)];
  flow.mixed_cost = cost;
  flow.mixed_shared = shared;
  if (path.flows[0].mixed_cost.least <= 0 || path.flows[1].mixed_cost.least <= 0) return false;
  const bool learned = LearnMix(path);
  for (Flow& each : path.flows) each.mixed_cost = {};
  return learned;
}

// From a mixed window of each direction. Where one disturbs the other, what all bytes took counts; else the slower one.
bool PathModel::LearnMix(State& path) {
  PathParameters& known = path.known;
  const Flow& read = path.flows[static_cast<size_t>(Direction::kRead)];
  const Flow& write = path.flows[static_cast<size_t>(Direction::kWrite)];
  double r = 1 / known.read_bytes_per_s;
  double w = 1 / known.write_bytes_per_s;
  const double believed = std::max({r, w, known.duplex * (r + w)});
  const Cost slower{std::max(read.mixed_cost.least, write.mixed_cost.least),
                    std::max(read.mixed_cost.most, write.mixed_cost.most)};
  double cost = slower.Nearest(believed);  // of a byte read and a byte written
  if (known.duplex > kDisturbed) {
    // In a second that both shared, each direction was busy 1/shared seconds, and the path one less than their sum.
    const double read_s = 1 / read.mixed_shared;
    const double write_s = 1 / write.mixed_shared;
    const double alone_s = read_s / read.mixed_cost.least * r + write_s / write.mixed_cost.least * w;
    cost = (read_s + write_s - 1) / alone_s * (r + w);
  }
  if (Near(cost, believed)) {
    path.duplex_settled = true;
    return false;
  }
  cost = Mean(cost, believed);
  if (path.duplex_settled) {  // the device is what it was, and slower or faster
    r *= cost / believed;
    w *= cost / believed;
  } else {
    // No direction takes longer alone than with the other one, nor is it disturbed without limit.
    r = std::min(r, cost);
    w = std::min(w, cost);
    const double stretch = std::max(1.0, cost / (kMaxDuplex * (r + w)));
    r *= stretch;
    w *= stretch;
    known.duplex = std::max(kMinDuplex, cost / (r + w));
    path.mix_learned = true;
  }
  known.read_bytes_per_s = 1 / r;
  known.write_bytes_per_s = 1 / w;
  return true;
}

}  // namespace mlpo
