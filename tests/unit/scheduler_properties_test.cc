// Random sessions, jobs, objects, pools and paths, with failures, hangs, jitter and ends at any moment. Whatever
// happens: every request of a session that stays is answered once and in time, no block is lost, old or mixed, no
// buffer is used twice or before its transfer ends, counters are what the devices saw, and in the end all is free. What
// a buffer or extent holds is checked by the tier at each use. Half of the scenarios have checksums, and reads that
// bring wrong bytes, in some of them also when they are made again; half of these have blocks of several pieces.
//
// MLPO_LONG=1 runs over 200 times as many. A failure names its seed; MLPO_SEED=n runs that one alone.
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <map>
#include <random>
#include <set>

#include "tests/support/simulated_training.h"
//
#include "tests/support/catch.h"

using namespace mlpo;
using namespace mlpo::test;

namespace {

constexpr uint64_t kBlock = 1024;
constexpr int64_t kSecond = 1'000'000'000;

class Scenario {
 public:
  static inline uint64_t healed = 0;  // subgroups that were damaged in the end

  // `saves`: states are taken, handed over, cloned, copied and restored meanwhile.
  explicit Scenario(uint64_t seed, bool saves = false)
      : random_(seed), flips_(seed), saving_(seed), saves_(saves), size_(seed % 4 == 0 ? 130 : 1) {
    const size_t paths = 1 + Below(6);
    std::vector<FakeTier::PathSpeed> speeds;
    for (size_t i = 0; i < paths; ++i) {
      speeds.push_back({Speed(), Speed(), 0.5 + 0.25 * static_cast<double>(Below(7)),
                        static_cast<int64_t>(Below(2) * Below(20'000'000))});
    }
    constexpr uint32_t kPools[] = {1, 2, 3, 4, 5, 8, 12, 20, 40};
    Scheduler::Options options = SimulatedOptions(kPools[Below(9)], speeds);
    options.block_elements = size_ * kBlock;
    for (PathParameters& path : options.paths) {
      if (Below(3) == 0) path = {};  // not declared
    }
    if (Below(2) == 0) {
      for (size_t i = 0; i < paths; ++i) options.turns.push_back({Below32(5), Below(2) == 0, Below(3) == 0});
    }
    options.small_objects_bytes = Below(2) * 40'000 * size_;
    options.integrity = seed % 2 == 0;
    if (Below(4) == 0) options.job_buffers = 1 + Below(8);
    if (Below(4) == 0) options.user_buffers = 1 + Below(8);
    const int64_t block_ns = 1 + static_cast<int64_t>(Below(100'000));
    const int64_t stats_ns = static_cast<int64_t>(Below(2) * Below(50'000));
    tier_ = std::make_unique<FakeTier>(options, speeds, FakeTier::Work{block_ns, stats_ns, 1 + Below32(4)});
    speeds_ = speeds;
    tier_->on_transfer_end = [this](const Transfer&) { ++ended_; };
    AddFaults();
  }

  void Run() {
    for (int i = 0; i < 250; ++i) {
      if (alive_.empty() || (alive_.size() < 6 && Below(10) == 0)) AddSession();
      Operation();
      if (saves_ && !alive_.empty() && saving_() % 6 == 0) Checkpoint();
      if (Below(30) == 0) Disturb();
      for (uint64_t steps = Below(30); steps > 0 && tier_->Step(); --steps) CheckPool();
    }
    Calm();
    tier_->Wait(100 * kSecond);  // paths that were left alone are tried again
    for (int i = 0; i < 20 && !tier_->scheduler().idle(); ++i) tier_->Wait(100 * kSecond);
    CHECK(tier_->violation() == "");
    CHECK(tier_->scheduler().idle());
    CheckAnswers();
    ReadEverything();
    CheckCounters();
    for (const SessionId session : std::set<SessionId>(alive_)) End(session);
    tier_->RunUntilQuiet();
    for (SessionId session = 1; session < next_session_; ++session) CHECK(tier_->gone(session));
    CHECK(tier_->scratch_bytes() == 0);
    PoolSnapshot pool;
    tier_->scheduler().Fill(&pool);
    CHECK(pool.free_blocks == pool.buffers);
    CHECK(tier_->violation() == "");
  }

 private:
  uint64_t Below(uint64_t n) { return random_() % n; }
  uint32_t Below32(uint32_t n) { return static_cast<uint32_t>(Below(n)); }
  double Speed() { return static_cast<double>(size_) * std::pow(10.0, 5 + static_cast<double>(Below(4))); }

  void AddFaults() {
    const uint64_t rate = Below(2) == 0 ? 0 : 20 + Below(100);
    for (PathIndex path = 0; path < speeds_.size(); ++path) {
      if (tier_->options().integrity)
        tier_->SetFlip(path, [this, rate](const Transfer&, bool again) { return IsFlipped(again, rate); });
      if (Below(4) == 0) tier_->SetJitter(path, {0.1, 20'000'000, 50'000'000, Below(1000)});
      tier_->SetFault(path, [this, path, rate](const Transfer& transfer) {
        if (calm_) return 0;
        if (transfer.direction == Direction::kWrite && refuses_.contains(path)) return refuses_[path];
        if (rate == 0 || Below(rate) != 0) return 0;
        failed_ = true;
        return EIO;
      });
    }
  }

  // Some reads bring wrong bytes; where reads fail, some of these do when they are made again, too.
  bool IsFlipped(bool again, uint64_t rate) {
    if (calm_ || flips_() % (again ? 3 : 20) != 0) return false;
    if (!again) return true;
    if (rate == 0) return false;
    failed_ = true;
    return true;
  }

  // A path hangs or slows down, or refuses writes; or is well again.
  void Disturb() {
    const PathIndex path = Below32(static_cast<uint32_t>(speeds_.size()));
    constexpr int kErrors[] = {EIO, ENOSPC, EROFS};
    switch (Below(6)) {
      case 0:
        return tier_->ChangeSpeed(path, tier_->now_ns(), {0, 0, 1});
      case 1:
        return tier_->ChangeSpeed(path, tier_->now_ns(), {Speed(), Speed(), 0.5});
      case 2:
        failed_ = true;
        refuses_[path] = kErrors[Below(3)];
        return;
      case 3:
        refuses_.erase(path);
        return tier_->ChangeSpeed(path, tier_->now_ns(), speeds_[path]);
      case 4:
        if (!tier_->scheduler().WhyNeeded(path).empty()) return;
        failed_ = true;  // what is left may be too little later
        return Below(2) == 0 ? tier_->scheduler().EvacuatePath(path, tier_->now_ns())
                             : tier_->scheduler().DisablePath(path, tier_->now_ns());
      case 5:
        return tier_->EnablePath(path);
    }
  }

  void Calm() {
    calm_ = true;
    for (PathIndex path = 0; path < speeds_.size(); ++path) {
      const double fast = 1e8 * static_cast<double>(size_);
      tier_->ChangeSpeed(path, tier_->now_ns(), {fast, fast, 0.5});
      tier_->EnablePath(path);
    }
  }

  void AddSession() {
    const SessionId session = next_session_++;
    tier_->AddSession(session, Below(2) == 0 ? "one" : "two");
    for (SubgroupId id = 1; id <= 2; ++id) {
      tier_->AddSubgroup(session, id, {size_ * Below(10 * kBlock), Below(5), 1 + size_ * Below(3 * kBlock)});
    }
    alive_.insert(session);
  }
  void End(SessionId session) {
    alive_.erase(session);
    tier_->EndSession(session);
  }

  void Operation() {
    const SessionId session = *std::next(alive_.begin(), static_cast<int64_t>(Below(alive_.size())));
    const SubgroupId id = 1 + Below32(2);
    const Subgroup* subgroup = tier_->scheduler().FindSubgroup(session, id);
    const uint64_t numel = subgroup->spec.numel;
    const uint64_t first = Below(numel);
    const uint64_t count = Below(numel - first) + 1;
    const uint32_t epoch = subgroup->epoch + 1;
    const uint32_t handle = 1 + Below32(3);
    const std::string name(1, static_cast<char>('a' + Below(3)));
    const uint64_t bytes = Below(4) == 0 ? Below(100) : size_ * Below(80'000);
    switch (Below(16)) {
      case 0:
      case 1:
        return Keep(session, tier_->Grad(session, id, epoch));
      case 2:
      case 3:
      case 4:
        return Keep(session, tier_->Update(session, id, epoch, Below32(3)));
      case 5:
        return Keep(session, tier_->Submit(session, MLPO_OP_READ_STATE, id, 0, 1 + Below32(7), first, count));
      case 6:
        return Keep(session, tier_->Submit(session, MLPO_OP_WRITE_STATE, id, 0, 1 + Below32(7), first, count));
      case 7:
        return Keep(session, tier_->WriteState(session, id, MLPO_PART_STATE));
      case 8:
        return Keep(session, tier_->Submit(session, MLPO_OP_GRAD, id, epoch, 1 + Below32(2), first, count));
      case 9:
        return Keep(session, tier_->Submit(session, MLPO_OP_DISCARD, id, 0, 0, 0, 0));
      case 10:
        return Keep(session, tier_->Flush(session, handle, name, bytes, 1 + size_ * Below(30'000)));
      case 11:
        return Keep(session, tier_->Open(session, MLPO_OP_FETCH, handle, name));
      case 12:
        return Keep(session, tier_->Piece(session, MLPO_OP_FETCH, handle, Below(bytes + 1), Below(bytes + 1)));
      case 13:
        return Keep(session, tier_->Close(session, Below(2) == 0 ? MLPO_OP_FETCH : MLPO_OP_FLUSH, handle));
      case 14:
        return Keep(session, tier_->Delete(session, name));
      case 15:
        if (Below(3) == 0) End(session);
    }
  }
  void Keep(SessionId session, uint64_t request) { requests_[request] = session; }

  // Begins one, gives one up, or fills a subgroup anew. What becomes of it is its own affair, but for being answered.
  void Checkpoint() {
    const SessionId session = *std::next(alive_.begin(), static_cast<int64_t>(saving_() % alive_.size()));
    const uint32_t handle = ++handles_;
    if (saving_() % 3 == 0) {
      if (!tier_->scheduler().BeginRestore(session, handle)) return;
      for (SubgroupId id = 1; id <= 2; ++id) {
        if (saving_() % 2 == 0) checkpoints_[tier_->Restore(session, id, handle)] = session;
      }
      checkpoints_[tier_->Restore(session, 0, handle)] = session;
      return;
    }
    std::vector<bool> hands_over, clones;
    for (size_t i = 0; i < speeds_.size(); ++i) {
      hands_over.push_back(saving_() % 3 == 0);
      clones.push_back(saving_() % 3 == 0);
    }
    const uint64_t block_bytes = Scheduler::BufferBytes(size_ * kBlock);
    if (tier_->BeginSave(session, handle, {0.05, 200e6, 2 * block_bytes}, hands_over, clones) == 0) return;
    const uint64_t take = tier_->Take(session, handle);
    const bool refused = tier_->answered(take) && tier_->status(take) != 0;
    checkpoints_[take] = session;
    checkpoints_[tier_->Saved(session, handle)] = session;
    if (!refused && saving_() % 8 != 0) return;
    checkpoints_[tier_->Submit(session, MLPO_OP_SNAPSHOT, 0, 0, MLPO_SNAPSHOT_ABANDON, handle, 0)] = session;
  }

  // Nothing is counted twice or lost, at any moment.
  void CheckPool() {
    PoolSnapshot pool;
    tier_->scheduler().Fill(&pool);
    if (pool.free_blocks + pool.cached_blocks != pool.buffers || pool.dirty_blocks > pool.cached_blocks) {
      FAIL("pool of " << pool.buffers << ": free " << pool.free_blocks << ", cached " << pool.cached_blocks
                      << ", dirty " << pool.dirty_blocks);
    }
  }

  void CheckAnswers() {
    size_t unanswered = 0, failed = 0;
    for (const auto& [request, session] : requests_) {
      unanswered += alive_.contains(session) && !tier_->answered(request);
      failed += tier_->answered(request) && tier_->status(request) == MLPO_E_IO;
    }
    for (const auto& [request, session] : checkpoints_)
      unanswered += alive_.contains(session) && !tier_->answered(request);
    CHECK(unanswered == 0);
    CHECK(tier_->HandedOverIsUnchanged());
    if (!failed_) CHECK(failed == 0);
  }

  // The tier compares what each buffer holds with what was last written. Of a subgroup that is damaged nothing is given
  // out until it has been written.
  void ReadEverything() {
    for (const SessionId session : alive_) {
      for (SubgroupId id = 1; id <= 2; ++id) {
        const Subgroup* subgroup = tier_->scheduler().FindSubgroup(session, id);
        if (subgroup->damaged > 0 || subgroup->unmade) {
          const uint64_t written = tier_->WriteState(session, id, MLPO_PART_STATE);
          tier_->RunUntilAnswered(written);
          CHECK(tier_->status(written) == 0);
          CHECK(subgroup->damaged == 0);
          CHECK(!subgroup->unmade);
          ++healed;
        }
        const uint64_t request =
            tier_->Submit(session, MLPO_OP_READ_STATE, id, 0, MLPO_PART_STATE, 0, tier_->Numel(session, id));
        tier_->RunUntilAnswered(request);
        CHECK(tier_->status(request) == 0);
      }
    }
    tier_->RunUntilQuiet();
    CHECK(tier_->violation() == "");
  }

  void CheckCounters() {
    uint64_t transfers = 0;
    for (PathIndex i = 0; i < speeds_.size(); ++i) {
      PathSnapshot path;
      tier_->scheduler().Fill(i, &path, tier_->now_ns());
      const FakeTier::PathCounts& counts = tier_->counts(i);
      CHECK(path.read_bytes == counts.done_read_bytes);
      CHECK(path.written_bytes == counts.done_written_bytes);
      CHECK(path.in_flight == 0);
      transfers += counts.reads + counts.writes;
    }
    CHECK(transfers == ended_);
  }

  std::mt19937_64 random_;
  std::mt19937_64 flips_;   // of its own: the scenarios are the same with and without
  std::mt19937_64 saving_;  // likewise
  const bool saves_;
  const uint64_t size_;  // of everything that has one; with 130, blocks have three pieces
  std::vector<FakeTier::PathSpeed> speeds_;
  std::unique_ptr<FakeTier> tier_;
  std::map<PathIndex, int> refuses_;  // writes, with this error
  bool calm_ = false;
  bool failed_ = false;  // some transfer has, or could
  uint64_t ended_ = 0;   // transfers
  std::set<SessionId> alive_;
  SessionId next_session_ = 1;
  std::map<uint64_t, SessionId> requests_;
  std::map<uint64_t, SessionId> checkpoints_;  // requests for these
  uint32_t handles_ = 0;
};

bool Long() {
  const char* wanted = std::getenv("MLPO_LONG");
  return wanted != nullptr && std::string(wanted) == "1";
}

}  // namespace

TEST_CASE("SchedulerProperties.RandomScenarios") {
  if (const char* seed = std::getenv("MLPO_SEED")) return Scenario(std::strtoull(seed, nullptr, 10)).Run();
  const uint64_t scenarios = Long() ? 100'000 : 400;
  for (uint64_t seed = 1; seed <= scenarios; ++seed) {
    INFO("MLPO_SEED=" << seed);
    Scenario(seed).Run();
  }
  CHECK(Scenario::healed > 0);
}

TEST_CASE("SchedulerProperties.RandomScenariosWithCheckpoints") {
  if (const char* seed = std::getenv("MLPO_SEED")) return Scenario(std::strtoull(seed, nullptr, 10), true).Run();
  const uint64_t scenarios = Long() ? 50'000 : 200;
  for (uint64_t seed = 1; seed <= scenarios; ++seed) {
    INFO("MLPO_SEED=" << seed);
    Scenario(seed, true).Run();
  }
}

TEST_CASE("SchedulerProperties.TrainingsEndWithAnyPoolPathsAndRanks") {
  const uint64_t scenarios = Long() ? 10'000 : 50;
  for (uint64_t seed = 1; seed <= scenarios; ++seed) {
    std::mt19937_64 random(seed);
    const auto below = [&](uint64_t n) { return static_cast<uint32_t>(random() % n); };
    SimulatedTraining training;
    for (uint32_t path = 0, paths = 1 + below(8); path < paths; ++path) {
      training.speeds.push_back({5e4 + below(1'000'000), 5e4 + below(1'000'000), 0.5 + 0.5 * below(4)});
    }
    constexpr uint32_t kPools[] = {1, 2, 3, 5, 9, 16, 33, 64};
    training.options = SimulatedOptions(kPools[below(8)], training.speeds);
    if (below(2) == 0) training.options.turns.assign(training.speeds.size(), {below(6), below(2) == 0, below(3) == 0});
    training.work = {1 + below(3'000'000), below(2) * 100'000, 1 + below(4)};
    training.barrier = below(2) == 0;
    training.steps = 3;
    for (uint32_t rank = 0, ranks = 1 + below(8); rank < ranks; ++rank) {
      SimulatedRank plan;
      plan.blocks = 1 + below(40);
      plan.subgroups = 1 + below(static_cast<uint32_t>(plan.blocks));
      plan.job = below(3) == 0 ? "other" : "job";
      plan.start_ns = below(2) * below(2'000'000'000);
      plan.backward_ns = below(2) * below(200'000'000);
      if (rank > 0 && below(5) == 0) plan.stop_step = 1 + below(3);
      if (rank > 0 && below(5) == 0) plan.end_step = 1 + below(3);
      if (below(5) == 0) plan.pause_step = 1 + below(3);
      plan.pause_ns = below(2'000'000'000);
      training.ranks.push_back(plan);
    }
    training.end_after_ns = below(300'000'000);
    training.prepare = [&](FakeTier& tier) {
      for (PathIndex path = 0; path < training.speeds.size(); ++path) {
        if (below(4) == 0) tier.SetJitter(path, {0.1, 500'000'000, 2'000'000'000, seed});
        if (below(4) != 0) continue;
        FakeTier::PathSpeed halved = training.speeds[path];
        halved.read_bytes_per_s /= 2;
        halved.write_bytes_per_s /= 2;
        tier.ChangeSpeed(path, tier.now_ns() + below(2'000'000'000), halved);
      }
    };
    INFO("seed " << seed << ", pool " << training.options.buffers << ", paths " << training.speeds.size() << ", ranks "
                 << training.ranks.size());
    CHECK(SimulateTraining(training).problem == "");
  }
}
