#include "daemon/plan.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <numeric>
#include <utility>

#include "daemon/adam/cores.h"
#include "daemon/config/units.h"
#include "daemon/io/byte_text.h"
#include "daemon/io/extent_store.h"
#include "daemon/scheduler/scheduler.h"
#include "daemon/session/arena.h"
#include "daemon/session/registration.h"

namespace mlpo {
namespace {

constexpr uint64_t kStateBytes = 12;  // per parameter
constexpr double kSecondsPerDay = 86400;
constexpr uint64_t kFewestBuffers = 3;  // with which a daemon starts
constexpr uint64_t kGoodBuffers = 16;   // with fewer the paths wait for buffers
constexpr double kGenerousPool = 1.1;   // of the state: more is of no use
constexpr uint64_t kGoodDays = 365;     // till a drive has been written as often as it is rated for
constexpr uint64_t kGB = 1'000'000'000;

uint64_t RoundedUp(uint64_t value, uint64_t divisor) { return (value + divisor - 1) / divisor; }
// For messages, which have whole bytes.
std::string BytesText(double bytes) { return ByteText(static_cast<uint64_t>(bytes)); }
std::string NumberText(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

// Bytes a day, as a setting takes them.
uint64_t YearsBudget(uint64_t rated_bytes) { return std::max<uint64_t>(2, rated_bytes / kGoodDays / kGB) * kGB; }

class Planner {
 public:
  explicit Planner(const PlanRequest& request) : request_(request) {}

  Plan Make() {
    Memory();
    Step();
    for (size_t i = 0; i < request_.paths.size(); ++i) LookAtPath(i);
    LookAtSpace();
    LookAtMemory();
    LookAtPool();
    LookAtAdam();
    return std::move(plan_);
  }

 private:
  void Memory() {
    const uint64_t of_rank = RoundedUp(request_.parameters, request_.ranks);
    const uint64_t ranks = request_.ranks / request_.nodes;
    plan_.parameters = std::min(request_.parameters, of_rank * ranks);
    plan_.blocks = ranks * RoundedUp(of_rank, request_.block_elements);
    plan_.buffer_bytes = Scheduler::BufferBytes(request_.block_elements);
    plan_.state_bytes = plan_.blocks * plan_.buffer_bytes;
    plan_.pool_bytes = request_.pool_bytes > 0 ? request_.pool_bytes : request_.node_memory_bytes / 4;
    plan_.buffers = plan_.pool_bytes / plan_.buffer_bytes;
    SubgroupSpec spec;  // as if a rank had one
    spec.dtype = request_.dtype;
    spec.grad_dtype = request_.grad_dtype;
    spec.numel = of_rank;
    plan_.arena_bytes = ranks * std::max(LayOutSlot(spec).bytes, Arena::kMinMemfdBytes);
  }

  void Step() {
    const uint64_t kept = std::min(plan_.blocks, plan_.buffers);
    plan_.cached_share = static_cast<double>(kept) / static_cast<double>(plan_.blocks);
    plan_.bytes = static_cast<double>((plan_.blocks - kept) * plan_.buffer_bytes);

    PathModel::Options options;
    options.block_bytes = plan_.buffer_bytes;
    options.buffers = static_cast<uint32_t>(std::min<uint64_t>(plan_.buffers, std::numeric_limits<uint32_t>::max()));
    std::vector<double> room;
    for (const PlanPath& path : request_.paths) {
      options.paths.push_back(path.speeds);
      const uint64_t extents = path.speeds.capacity_bytes / plan_.buffer_bytes;
      room.push_back(path.speeds.capacity_bytes == 0 ? std::numeric_limits<double>::infinity()
                                                     : static_cast<double>(extents * plan_.buffer_bytes));
    }
    PathModel model(std::move(options));
    const std::vector<double> state = model.Targets(static_cast<double>(plan_.state_bytes), room);
    const std::vector<double> moved = model.Targets(plan_.bytes, room);
    double worth = 0;
    for (size_t i = 0; i < request_.paths.size(); ++i) {
      const PlanPath& asked = request_.paths[i];
      Plan::Path path;
      path.worth_bytes_per_s = model.worth(static_cast<PathIndex>(i));
      worth += path.worth_bytes_per_s;
      path.share = plan_.bytes > 0 ? moved[i] / plan_.bytes : model.share(static_cast<PathIndex>(i));
      path.bytes = moved[i];
      path.time_s = moved[i] / path.worth_bytes_per_s;
      path.limit = LimitOf(asked.speeds);
      path.state_bytes = state[i];
      path.reserve_bytes = std::min(room[i], std::ceil(ExtentStore::kReserve * state[i]));
      plan_.transfer_s = std::max(plan_.transfer_s, path.time_s);
      if (path.bytes > 0) path.steps_to_rating = static_cast<double>(asked.rated_bytes) / path.bytes;
      plan_.paths.push_back(path);
    }

    plan_.workers = request_.workers;
    // On one NUMA node, with as many cores as it likes.
    if (plan_.workers == 0)
      plan_.workers = SplitWorkers({std::numeric_limits<uint32_t>::max()},
                                   {.parameters_per_s = worth / kStateBytes, .cpu_quota = {}})[0];
    plan_.adam_s = static_cast<double>(plan_.parameters) / (plan_.workers * kParametersPerWorkerPerS);
    plan_.ideal_s = std::max(plan_.transfer_s, plan_.adam_s);
    for (Plan::Path& path : plan_.paths) path.days_to_rating = path.steps_to_rating * plan_.ideal_s / kSecondsPerDay;
  }

  // The largest of what PathWorth takes the largest of.
  static const char* LimitOf(const PathParameters& path) {
    const double budget = path.write_budget_bytes_per_s;
    const double r = 1 / path.read_bytes_per_s;
    const double w = 1 / (budget > 0 ? std::min(path.write_bytes_per_s, budget) : path.write_bytes_per_s);
    if (path.duplex * (r + w) > std::max(r, w)) return "both";
    return r > w ? "reading" : "writing";
  }

  void Find(Level level, const char* check, std::string path, std::string what, std::string advice) {
    plan_.findings.push_back({check, std::move(path), level, std::move(what), std::move(advice)});
  }

  void LookAtPath(size_t i) {
    const PlanPath& asked = request_.paths[i];
    const Plan::Path& path = plan_.paths[i];
    const double worth = std::accumulate(plan_.paths.begin(), plan_.paths.end(), 0.0,
                                         [](double sum, const Plan::Path& p) { return sum + p.worth_bytes_per_s; });
    const double due = path.worth_bytes_per_s / worth;
    if (due < PathModel::kProbeShare)
      Find(Level::kWarning, "path", asked.name, "is worth " + NumberText(100 * due, 1) + " % of all paths together",
           "leave it out, or check its speeds");
    if (asked.speeds.capacity_bytes > 0 && path.bytes < 0.99 * due * plan_.bytes)
      Find(Level::kWarning, "path", asked.name,
           "has room for " + ByteText(asked.speeds.capacity_bytes) + ", and its speed is worth " +
               BytesText(due * plan_.bytes) + " of the state: the other paths have more to do",
           "give it a larger capacity");
    if (path.days_to_rating > 0 && path.days_to_rating < static_cast<double>(kGoodDays))
      Find(Level::kWarning, "wear", asked.name,
           "in " + NumberText(path.days_to_rating, 0) + " days of steps without a pause " +
               ByteText(asked.rated_bytes) + " are written, all that it is rated for",
           "a larger pool writes less; with write_budget = \"" + FormatBudget(YearsBudget(asked.rated_bytes)) +
               "\" the path lasts a year");
  }

  void LookAtSpace() {
    const uint64_t all = AllRoom();
    if (all == 0) return;
    if (all < plan_.state_bytes)
      Find(Level::kError, "space", "",
           "the paths have room for " + ByteText(all) + ", and the state takes " + ByteText(plan_.state_bytes) +
               ", whatever the pool",
           "raise capacity, add a path, or use more nodes");
    else if (all / 2 < plan_.state_bytes)
      Find(Level::kWarning, "space", "",
           "the paths have room for " + ByteText(all) + ": checkpoints are refused, which need room for the state of " +
               ByteText(plan_.state_bytes) + " twice while it is saved",
           "raise capacity to " + ByteText(2 * plan_.state_bytes) + " in all");
  }

  // Of whole blocks; 0 if a path's is not known.
  uint64_t AllRoom() const {
    uint64_t all = 0;
    for (const PlanPath& path : request_.paths) {
      if (path.speeds.capacity_bytes == 0) return 0;
      all += path.speeds.capacity_bytes / plan_.buffer_bytes * plan_.buffer_bytes;
    }
    return all;
  }

  void LookAtMemory() {
    const std::string arenas = "the ranks' arenas take " + ByteText(plan_.arena_bytes);
    if (request_.arenas_bytes > 0 && plan_.arena_bytes > request_.arenas_bytes) {
      Find(Level::kError, "arenas", "", arenas + ", and [memory] arenas is " + ByteText(request_.arenas_bytes),
           "set it to " + std::to_string(plan_.arena_bytes) + " or more");
    }
    const uint64_t memory = request_.node_memory_bytes;
    if (memory == 0) return;
    const uint64_t left = memory - std::min(memory, plan_.pool_bytes);
    if (plan_.arena_bytes > memory) {
      Find(Level::kError, "memory", "", arenas + ", and the node has " + ByteText(memory), "use more nodes");
    } else if (plan_.arena_bytes > left) {
      Find(Level::kError, "memory", "", arenas + ", and beside the pool the node has " + ByteText(left),
           "give the pool no more than " + ByteText(memory - plan_.arena_bytes) + " (--memory), or use more nodes");
    } else if (request_.arenas_bytes == 0 && plan_.arena_bytes > left / 2) {
      Find(Level::kWarning, "arenas", "",
           arenas + ", and the daemon lets them have half of what it finds beside the pool: " + ByteText(left / 2),
           "set [memory] arenas to " + std::to_string(plan_.arena_bytes) + " or more");
    }
  }

  void LookAtPool() {
    const std::string pool = "a pool of " + ByteText(plan_.pool_bytes) + " has room for " +
                             std::to_string(plan_.buffers) + " blocks of " + ByteText(plan_.buffer_bytes);
    if (plan_.buffers < kFewestBuffers)
      Find(Level::kError, "pool", "", pool + "; at least " + std::to_string(kFewestBuffers) + " are needed",
           "set --memory to " + ByteText(kFewestBuffers * plan_.buffer_bytes) + " or more, or lower [memory] block");
    else if (plan_.buffers < kGoodBuffers && plan_.buffers < plan_.blocks)
      Find(Level::kWarning, "pool", "", pool + ", few to keep the paths busy with",
           "raise --memory, or lower [memory] block");
    else if (static_cast<double>(plan_.pool_bytes) > kGenerousPool * static_cast<double>(plan_.state_bytes))
      Find(Level::kWarning, "pool", "",
           "the whole state takes " + ByteText(plan_.state_bytes) + ": a part of the pool of " +
               ByteText(plan_.pool_bytes) + " would never be used",
           "lower --memory to " + ByteText(plan_.state_bytes) + " and a little more");
  }

  void LookAtAdam() {
    if (plan_.transfer_s <= 0 || plan_.adam_s <= plan_.transfer_s) return;
    const double needed =
        std::ceil(static_cast<double>(plan_.parameters) / (kParametersPerWorkerPerS * plan_.transfer_s));
    Find(Level::kWarning, "adam", "",
         std::to_string(plan_.workers) + " Adam workers take longer (" + NumberText(plan_.adam_s, 1) +
             " s) than what is read and written (" + NumberText(plan_.transfer_s, 1) + " s)",
         "set [adam] workers to " + NumberText(needed, 0) + ", if the node has the cores");
  }

  const PlanRequest& request_;
  Plan plan_;
};

}  // namespace

Plan MakePlan(const PlanRequest& request) { return Planner(request).Make(); }

}  // namespace mlpo
