#include "tests/support/simulated_training.h"

#include <algorithm>
#include <map>
#include <numeric>

namespace mlpo::test {
namespace {

class Driver {
 public:
  Driver(const SimulatedTraining& training, FakeTier& tier) : training_(training), tier_(tier) {}

  SimulatedResult Run() {
    Register();
    tier_.on_complete = [this](const Completion& completion) { Completed(completion); };
    if (training_.prepare) training_.prepare(tier_);
    start_ns_ = tier_.now_ns();
    if (training_.warm_up == 0) Snap(&before_);
    for (Rank& rank : ranks_) {
      tier_.At(start_ns_ + rank.plan->start_ns, [this, &rank] { BeginStep(rank); });
    }
    while (left_ > 0 && result_.problem.empty() && tier_.violation().empty() && tier_.Step()) {
    }
    Snap(&after_);
    tier_.on_complete = nullptr;  // what is still under way has no listener
    return Result();
  }

 private:
  enum class Phase { kBackward, kGradients, kBarrier, kUpdates, kLeft };
  struct Rank {
    const SimulatedRank* plan = nullptr;
    SessionId session = 0;
    uint32_t step = 0;
    Phase phase = Phase::kBackward;
    uint32_t waits_for = 0;  // answers
  };
  struct Counts {
    std::vector<FakeTier::PathCounts> paths;
    uint64_t updates = 0;
    int64_t at_ns = 0;
  };

  void Register() {
    const uint64_t elements = tier_.options().block_elements;
    ranks_.resize(training_.ranks.size());
    result_.step_ends_s.resize(ranks_.size());
    for (size_t i = 0; i < ranks_.size(); ++i) {
      Rank& rank = ranks_[i];
      rank.plan = &training_.ranks[i];
      rank.session = i + 1;
      left_ += Stays(rank);
      tier_.AddSession(rank.session, rank.plan->job);
      for (uint32_t s = 0; s < rank.plan->subgroups; ++s) {
        const uint64_t blocks =
            rank.plan->blocks / rank.plan->subgroups + (s < rank.plan->blocks % rank.plan->subgroups);
        tier_.AddSubgroup(rank.session, s + 1, {blocks * elements});
        const uint64_t request = tier_.WriteState(rank.session, s + 1, MLPO_PART_STATE);
        tier_.RunUntilAnswered(request);
        if (tier_.status(request) != 0) result_.problem = tier_.completion(request).failure.text;
      }
    }
    tier_.RunUntilQuiet();
    warming_ = left_;
  }

  void Snap(Counts* counts) {
    counts->paths.clear();
    for (PathIndex i = 0; i < training_.speeds.size(); ++i) counts->paths.push_back(tier_.counts(i));
    counts->updates = tier_.updates();
    counts->at_ns = tier_.now_ns();
  }

  void BeginStep(Rank& rank) {
    ++rank.step;
    int64_t wait_ns = rank.plan->backward_ns;
    if (rank.step == rank.plan->pause_step) wait_ns += rank.plan->pause_ns;
    rank.phase = Phase::kBackward;
    tier_.At(tier_.now_ns() + wait_ns, [this, &rank] {
      if (rank.phase == Phase::kBackward) Submit(rank, Phase::kGradients);
    });
  }

  void Submit(Rank& rank, Phase phase) {
    rank.phase = phase;
    rank.waits_for = rank.plan->subgroups;
    for (uint32_t s = 1; s <= rank.plan->subgroups; ++s) {
      const uint64_t request = phase == Phase::kGradients ? tier_.Grad(rank.session, s, rank.step)
                                                          : tier_.Update(rank.session, s, rank.step);
      owners_[request] = &rank;
    }
    if (phase == Phase::kGradients && rank.step == rank.plan->stop_step) Leave(rank);
    if (phase == Phase::kUpdates && rank.step == rank.plan->end_step) {
      tier_.At(tier_.now_ns() + training_.end_after_ns, [this, &rank] {
        tier_.EndSession(rank.session);
        Leave(rank);
      });
    }
  }

  void Leave(Rank& rank) {
    rank.phase = Phase::kLeft;
    UpdateIfAllWait(rank.plan->job);
  }

  // With a barrier: as soon as the last of a job's ranks has its gradients.
  void UpdateIfAllWait(const std::string& job) {
    std::vector<Rank*> waiting;
    for (Rank& rank : ranks_) {
      if (rank.plan->job != job || rank.phase == Phase::kLeft) continue;
      if (rank.phase != Phase::kBarrier) return;
      waiting.push_back(&rank);
    }
    for (Rank* rank : waiting) Submit(*rank, Phase::kUpdates);
  }

  void Completed(const Completion& completion) {
    auto owner = owners_.find(completion.user_data);
    if (owner == owners_.end()) return;
    Rank& rank = *owner->second;
    owners_.erase(owner);
    if (completion.failure.status != 0 && result_.problem.empty()) {
      result_.problem = "rank " + std::to_string(rank.session - 1) + ", step " + std::to_string(rank.step) + ": " +
                        completion.failure.text;
    }
    if (rank.phase == Phase::kLeft || --rank.waits_for > 0) return;
    if (rank.phase == Phase::kUpdates) return EndStep(rank);
    if (!training_.barrier) return Submit(rank, Phase::kUpdates);
    rank.phase = Phase::kBarrier;
    UpdateIfAllWait(rank.plan->job);
  }

  void EndStep(Rank& rank) {
    const size_t index = rank.session - 1;
    result_.step_ends_s[index].push_back(static_cast<double>(tier_.now_ns() - start_ns_) / 1e9);
    if (training_.on_step) training_.on_step(tier_, index, rank.step);
    if (Stays(rank) && rank.step == training_.warm_up && --warming_ == 0) Snap(&before_);
    if (rank.step < training_.steps) return BeginStep(rank);
    rank.phase = Phase::kLeft;
    left_ -= Stays(rank);
  }

  // Whether it is to make all steps.
  static bool Stays(const Rank& rank) { return rank.plan->stop_step == kNoStep && rank.plan->end_step == kNoStep; }

  double IdealSeconds() const {
    double worth = 0, blocks = 0;
    for (const FakeTier::PathSpeed& speed : training_.speeds) {
      worth += PathWorth({speed.read_bytes_per_s, speed.write_bytes_per_s, speed.duplex, 0});
    }
    for (const Rank& rank : ranks_) blocks += Stays(rank) ? static_cast<double>(rank.plan->blocks) : 0;
    const double moved = std::max(0.0, blocks - tier_.options().buffers);
    const double adam_s = blocks * static_cast<double>(training_.work.block_ns) / training_.work.workers / 1e9;
    return std::max(moved * static_cast<double>(Scheduler::BufferBytes(tier_.options().block_elements)) / worth,
                    adam_s);
  }

  SimulatedResult Result() {
    if (result_.problem.empty()) result_.problem = tier_.violation();
    if (result_.problem.empty() && left_ > 0) result_.problem = "nothing happens any more, and ranks wait";
    result_.finished = result_.problem.empty();
    result_.ideal_s = IdealSeconds();
    const double steps = training_.steps - training_.warm_up;
    result_.period_s = static_cast<double>(after_.at_ns - before_.at_ns) / 1e9 / steps;
    result_.limit_share = result_.ideal_s / result_.period_s;
    result_.makespan_s = static_cast<double>(after_.at_ns - start_ns_) / 1e9;
    uint64_t reads = 0;
    for (size_t i = 0; i < after_.paths.size() && !before_.paths.empty(); ++i) {
      const FakeTier::PathCounts &a = after_.paths[i], &b = before_.paths[i];
      reads += a.reads - b.reads;
      result_.paths.push_back({static_cast<double>(a.read_bytes - b.read_bytes) / steps,
                               static_cast<double>(a.written_bytes - b.written_bytes) / steps});
    }
    result_.hits = (static_cast<double>(after_.updates - before_.updates) - static_cast<double>(reads)) / steps;
    return std::move(result_);
  }

  const SimulatedTraining& training_;
  FakeTier& tier_;
  std::vector<Rank> ranks_;
  std::map<uint64_t, Rank*> owners_;  // of requests
  size_t left_ = 0;                   // ranks that have steps to make
  size_t warming_ = 0;                // of these, those that have not ended the warm-up
  int64_t start_ns_ = 0;
  Counts before_, after_;
  SimulatedResult result_;
};

}  // namespace

Scheduler::Options SimulatedOptions(uint32_t buffers, const std::vector<FakeTier::PathSpeed>& speeds) {
  Scheduler::Options options;
  options.buffers = buffers;
  options.block_elements = 1024;
  options.extents_offset_bytes = 4096;
  options.no_path_timeout_ns = 5'000'000'000;
  for (const FakeTier::PathSpeed& speed : speeds) {
    options.paths.push_back({speed.read_bytes_per_s, speed.write_bytes_per_s, speed.duplex, 0});
  }
  return options;
}

SimulatedResult SimulateTraining(const SimulatedTraining& training, FakeTier& tier) {
  return Driver(training, tier).Run();
}

SimulatedResult SimulateTraining(const SimulatedTraining& training) {
  FakeTier tier(training.options, training.speeds, training.work);
  return SimulateTraining(training, tier);
}

}  // namespace mlpo::test
