#include "daemon/scheduler/path_model.h"

#include <algorithm>
#include <cmath>
#include <utility>

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
// The other direction had something in flight for less of a transfer's time: it did not matter.
constexpr double kAlone = 0.1;
// d up to which the directions do not disturb each other.
constexpr double kFullDuplex = 0.55;
// Least d of a path that was confirmed not to be such.
constexpr double kLeastShared = 0.56;
constexpr double kMinDuplex = 0.5;
constexpr double kMaxDuplex = 2;
// While nothing is in flight caches empty and throttles save up, for so long: what comes next is fast for it. And a
// window of one direction may have so much more or less of its path's time than is its due.
constexpr int64_t kSavedNs = 100 * kNsPerMs;
// A window of both may.
constexpr int64_t kSlackNs = 500 * kNsPerMs;
// So long a window goes on that has no pauses and shows nothing that this would not explain.
constexpr int64_t kLongestNs = 16 * kNsPerS;
// With pauses of more than this part of the time, so many windows in a row, what limits its path may have too little to
// do: more will show whether it can do it, and is given bit by bit, more with each such window.
constexpr double kSparse = 0.3;
constexpr uint32_t kSparseWindows = 3;
constexpr double kBit = 0.2;
constexpr double kLargestBit = 0.5;
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
  const double worth = 1 / std::max({r, w, path.duplex * (r + w)});
  return path.granted_bytes_per_s > 0 ? std::min(worth, path.granted_bytes_per_s) : worth;
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
    paths_.emplace_back();
    Begin(paths_.back(), parameters);
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
  const double granted = paths_[index].known.granted_bytes_per_s;
  Begin(paths_[index], parameters);
  paths_[index].known.granted_bytes_per_s = granted;
  std::vector<PathParameters> all;
  for (const State& each : paths_) all.push_back(each.known);
  shares_ = PathShares(all, options_.policy);
  Settle();
}

void PathModel::Assume(PathIndex index, const PathParameters& parameters) {
  if (paths_[index].known.origin != SpeedOrigin::kLearned) SetPath(index, parameters);
}

void PathModel::Grant(PathIndex index, double bytes_per_s) {
  double& granted = paths_[index].known.granted_bytes_per_s;
  if (granted > 0 && bytes_per_s > 0 && Near(bytes_per_s, granted)) return;
  granted = bytes_per_s;
  Settle();
}

double PathModel::seen_worth(PathIndex path) const {
  PathParameters known = paths_[path].known;
  known.granted_bytes_per_s = 0;
  return PathWorth(known);
}

// With what is said of it, and nothing learned.
void PathModel::Begin(State& path, const PathParameters& parameters) {
  path.known = parameters;
  path.duplex_settled = parameters.duplex_known;
  path.mix_learned = false;
  path.sparse_windows = 0;
  for (const Direction direction : {Direction::kRead, Direction::kWrite}) {
    Flow& flow = path.flows[static_cast<size_t>(direction)];
    flow.sparse_windows = 0;
    flow.hung = false;
    flow.alone_known = Speed(path.known, direction) > 0;
  }
  ForgetWindows(path);
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
      // Half of what the path may have in flight may be the other direction's: so one less than half, at most.
      const uint32_t most = std::max(path_blocks_ / 2, 2u) - 1;
      flow.busy_blocks = std::min(most, std::max(3u, std::min(blocks, flow.queue_blocks)) - 2);
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
  const auto& [a, b] = path.flows;
  const int64_t passed_ns = now_ns - path.looked.at_ns;
  path.looked.at_ns = now_ns;
  if (a.in_flight > 0 && b.in_flight > 0) {
    path.looked.shared_ns += passed_ns;
    if (a.in_flight + b.in_flight >= std::max(a.busy_blocks, b.busy_blocks)) path.looked.busy_ns += passed_ns;
  }
  return path.looked;
}

int64_t PathModel::NewLength() { return kWindowNs + static_cast<int64_t>(random_() % kWindowNs); }

PathModel::Window PathModel::NewWindow() {
  Window window;
  window.length_ns = NewLength();
  return window;
}

PathModel::Shared PathModel::NewShared(const State& path) {
  Shared shared;
  shared.from_busy_ns = path.looked.busy_ns;
  shared.length_ns = NewLength();
  return shared;
}

void PathModel::ForgetWindows(State& path) {
  for (Flow& flow : path.flows) {
    for (Window* window : {&flow.any, &flow.queue, &flow.mixed}) *window = NewWindow();
  }
  path.shared = NewShared(path);
}

void PathModel::Add(Window& window, bool counts, Mark from, Mark to, uint64_t bytes) {
  const int64_t pause_ns = std::exchange(window.pause_ns, 0);
  if (!counts) return;
  window.bytes += bytes;
  window.spent.busy_ns += to.at_ns - from.at_ns;
  window.spent.shared_ns += to.shared_ns - from.shared_ns;
  window.spent.saved_ns += pause_ns;
  ++window.blocks;
}

// A transfer, so far as it was beside the other direction, where it does 1/2d of what it does alone.
void PathModel::AddShared(State& path, Direction direction, Mark from, Mark to, uint64_t bytes) {
  Shared& window = path.shared;
  const int64_t pause_ns = std::exchange(window.pause_ns, 0);
  const int64_t busy_ns = to.busy_ns - from.busy_ns;
  if (busy_ns <= 0 || Speed(path.known, direction) <= 0) return;
  const double beside_s = Seconds(to.shared_ns - from.shared_ns) / (2 * path.known.duplex);
  const double alone_s = Seconds((to.at_ns - from.at_ns) - (to.shared_ns - from.shared_ns));
  const double part = Seconds(busy_ns) / (2 * path.known.duplex) / (alone_s + beside_s);
  window.work_s += part * static_cast<double>(bytes) / Speed(path.known, direction);
  window.saved_ns += pause_ns;
  window.bytes += bytes;
  ++window.blocks;
}

void PathModel::Started(PathIndex index, Direction direction, int64_t now_ns) {
  State& path = paths_[index];
  Flow& flow = path.flows[static_cast<size_t>(direction)];
  const Mark now = Now(path, now_ns);
  if (flow.in_flight == 0) {
    flow.started = now;
    const int64_t saved_ns = SavedNs(path, direction, now_ns);
    for (Window* window : {&flow.any, &flow.queue, &flow.mixed}) window->pause_ns += saved_ns;
    path.shared.pause_ns += saved_ns;
  }
  ++flow.in_flight;
  if (!flow.queued && flow.in_flight >= flow.busy_blocks) {
    flow.queued = true;
    flow.queued_since = now;
  }
  SetHang(path);
}

// What a direction that begins anew has saved up. Where the directions share the path's time, one alone saves nothing.
int64_t PathModel::SavedNs(const State& path, Direction direction, int64_t now_ns) {
  const size_t own = static_cast<size_t>(direction);
  const Flow& other = path.flows[1 - own];
  int64_t since_ns = path.flows[own].ended.at_ns;
  if (path.known.duplex > kFullDuplex) {
    if (other.in_flight > 0) return 0;
    since_ns = std::max(since_ns, other.ended.at_ns);
  }
  return std::min(now_ns - since_ns, kSavedNs);
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
    flow.any = flow.queue = flow.mixed = NewWindow();
  }
  if (hung || !ok) path.shared = NewShared(path);
  const bool counts = ok && !hung && bytes >= options_.block_bytes / kSmallPart;
  if (counts) Add(flow.any, true, begun, now, bytes);
  // Of one that ends after the queue has filled up, an unknown part was done before.
  if (counts && flow.queued && (flow.busy_blocks == 1 || flow.queued_since.at_ns <= flow.ended.at_ns)) {
    const Mark from = Later(flow.queued_since, flow.ended);
    const auto took = static_cast<double>(now.at_ns - from.at_ns);
    const auto shared = static_cast<double>(now.shared_ns - from.shared_ns);
    Add(flow.queue, IsFullDuplex(path) || shared <= kAlone * took, from, now, bytes);
    Add(flow.mixed, !path.duplex_settled && shared > 0.5 * took, from, now, bytes);
  }
  if (ok && !hung && path.duplex_settled && !IsFullDuplex(path)) AddShared(path, direction, begun, now, bytes);
  flow.ended = now;
  if (--flow.in_flight < flow.busy_blocks) flow.queued = false;
  SetHang(path);
  if (!options_.learn) return false;
  bool learned = MaybeLearn(path, direction, flow.queue, true);
  if (flow.busy_blocks > 1) learned |= MaybeLearn(path, direction, flow.any, false);
  return (path.duplex_settled ? MaybeLearnShared(path) : MaybeLearnMix(path)) || learned;
}

// And known to be.
bool PathModel::IsFullDuplex(const State& path) { return path.duplex_settled && path.known.duplex <= kFullDuplex; }

// What a window took for which `believed_s` were expected; less, after so many sparse ones in a row.
PathModel::Cost PathModel::CostOf(const Spent& spent, double believed_s, uint32_t sparse_windows) {
  Cost cost{Seconds(spent.busy_ns), Seconds(spent.busy_ns + spent.saved_ns)};
  if (sparse_windows < kSparseWindows) return cost;
  const double bit = std::min(kBit * (sparse_windows - kSparseWindows + 1), kLargestBit);
  cost.most = std::clamp((1 - bit) * believed_s, cost.least, cost.most);
  return cost;
}

// Sparse windows in a row, `before` of them before this one.
uint32_t PathModel::SparseWindows(const Spent& spent, uint32_t before) {
  return static_cast<double>(spent.saved_ns) > kSparse * static_cast<double>(spent.busy_ns) ? before + 1 : 0;
}

// Whether a window is to go on, since what is believed may be true.
bool PathModel::IsUnsure(const Spent& spent, double believed_s, int64_t slack_ns) {
  return spent.busy_ns < kLongestNs && spent.saved_ns < slack_ns &&
         std::abs(Seconds(spent.busy_ns) - believed_s) < Seconds(slack_ns);
}

bool PathModel::MaybeLearn(State& path, Direction direction, Window& window, bool queued) {
  if (window.blocks < kWindowBlocks || window.spent.busy_ns < window.length_ns) return false;
  Flow& flow = path.flows[static_cast<size_t>(direction)];
  PathParameters& known = path.known;
  double& speed = Speed(known, direction);
  const auto bytes = static_cast<double>(window.bytes);
  const double believed_s = speed > 0 ? bytes / speed : 0;
  if (queued) flow.hung = false;
  const int64_t slack_ns = IsFullDuplex(path) ? kSavedNs : kSlackNs;
  if (speed > 0 && IsUnsure(window.spent, believed_s, slack_ns)) return false;
  const Spent spent = std::exchange(window, NewWindow()).spent;
  if (speed <= 0) {
    speed = bytes / Seconds(spent.busy_ns);
    flow.alone_known = queued;
    return Learned(path);
  }
  if (queued) flow.sparse_windows = SparseWindows(spent, flow.sparse_windows);
  const uint32_t sparse_windows = Limits(known, direction) ? flow.sparse_windows : 0;
  const Cost cost = CostOf(spent, believed_s, sparse_windows);
  const double slower = cost.Nearest(believed_s) / believed_s;
  if (Near(slower, 1)) return false;
  if (!queued) {
    if (slower > 1) return false;
    speed /= Mean(1, slower);
    return Learned(path);
  }
  const bool first = !std::exchange(flow.alone_known, true);
  const auto both = [&] { return 1 / known.read_bytes_per_s + 1 / known.write_bytes_per_s; };
  // What a byte read and one written take at once, of which this window says nothing. Once d is known, and was not
  // taken from a wrong speed, it is the device that has changed.
  const bool keep_mix = path.mix_learned && !IsFullDuplex(path) && (first || !path.duplex_settled);
  const double mix = keep_mix ? known.duplex * both() : 0;
  speed /= first ? slower : Mean(1, slower);
  if (mix > 0) known.duplex = std::clamp(mix / both(), path.duplex_settled ? kLeastShared : kMinDuplex, kMaxDuplex);
  return Learned(path);
}

// d, from what both directions did in the same time.
bool PathModel::MaybeLearnMix(State& path) {
  PathParameters& known = path.known;
  if (known.read_bytes_per_s <= 0 || known.write_bytes_per_s <= 0) return false;
  uint32_t blocks = 0;
  int64_t length_ns = 0;
  Spent spent;
  double work_s = 0;  // that was done beside the other direction, as long as it would take alone
  for (const Direction direction : {Direction::kRead, Direction::kWrite}) {
    const Window& window = path.flows[static_cast<size_t>(direction)].mixed;
    if (window.blocks < kWindowBlocks / 4 || window.spent.busy_ns <= 0) return false;
    blocks += window.blocks;
    length_ns += window.length_ns;
    spent.busy_ns += window.spent.busy_ns;
    spent.shared_ns += window.spent.shared_ns;
    spent.saved_ns += window.spent.saved_ns;
    const double shared_s = Seconds(window.spent.shared_ns);
    const double alone_s = Seconds(window.spent.busy_ns) - shared_s;
    const double all_s = static_cast<double>(window.bytes) / Speed(known, direction);
    // Beside the other one a direction does at least 1/2kMaxDuplex of what it does alone.
    work_s += std::max(all_s - alone_s, all_s * shared_s / (alone_s + shared_s) / (2 * kMaxDuplex));
  }
  if (blocks < kWindowBlocks || spent.busy_ns < length_ns) return false;
  for (Flow& flow : path.flows) {
    flow.mixed = NewWindow();
    flow.hung = false;
  }
  spent.shared_ns /= 2;  // each has counted it
  const Cost duplex{Seconds(spent.shared_ns) / work_s, Seconds(spent.shared_ns + spent.saved_ns) / work_s};
  const double before = known.duplex;
  const double seen = Mean(before, duplex.Nearest(before));
  known.duplex = std::clamp(seen, kMinDuplex, kMaxDuplex);
  const double slower = seen / known.duplex;  // what d cannot be is speed
  known.read_bytes_per_s /= slower;
  known.write_bytes_per_s /= slower;
  path.mix_learned = true;
  // Of directions that were only seen beside each other, all would seem to be full duplex.
  const bool alone_known = path.flows[0].alone_known || path.flows[1].alone_known;
  if (Near(duplex.least, known.duplex) && (alone_known || known.duplex > kFullDuplex)) {
    path.duplex_settled = true;
    ForgetWindows(path);
  }
  const bool changed = known.duplex != before || slower != 1;
  return changed && Learned(path);
}

// How fast a path is where d is known.
bool PathModel::MaybeLearnShared(State& path) {
  PathParameters& known = path.known;
  const Shared& window = path.shared;
  const int64_t busy_ns = path.looked.busy_ns - window.from_busy_ns;
  if (window.blocks < kWindowBlocks || busy_ns < window.length_ns) return false;
  const double believed_s = known.duplex * window.work_s;
  const bool small = window.bytes < window.blocks * options_.block_bytes / kSmallPart / 2;
  const Spent spent{.busy_ns = busy_ns, .shared_ns = busy_ns, .saved_ns = window.saved_ns};
  if (!small && IsUnsure(spent, believed_s, kSlackNs)) return false;
  path.shared = NewShared(path);
  for (Flow& flow : path.flows) flow.hung = false;
  if (small) return false;
  path.sparse_windows = SparseWindows(spent, path.sparse_windows);
  const Cost cost = CostOf(spent, believed_s, path.sparse_windows);
  const double slower = cost.Nearest(believed_s) / believed_s;
  if (Near(slower, 1)) return false;
  known.read_bytes_per_s /= Mean(1, slower);
  known.write_bytes_per_s /= Mean(1, slower);
  return Learned(path);
}

bool PathModel::Learned(State& path) {
  path.known.origin = SpeedOrigin::kLearned;
  Settle();
  return true;
}

}  // namespace mlpo
