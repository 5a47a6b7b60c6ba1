#include "daemon/scheduler/scheduler.h"

#include <algorithm>

#include "daemon/base/check.h"
#include "daemon/scheduler/session.h"
#include "daemon/types/element_bytes.h"
#include "proto/abi.h"

namespace mlpo {

namespace {

uint64_t Padded(uint64_t bytes) { return (bytes + MLPO_ALIGN - 1) / MLPO_ALIGN * MLPO_ALIGN; }

}  // namespace

uint64_t Scheduler::PartBytes(uint64_t elements) { return Padded(elements * 4); }

uint64_t Scheduler::GradientBytes(const SubgroupSpec& spec, uint64_t elements) {
  return !spec.kept_as ? 0 : Padded(elements * ElementBytes(*spec.kept_as));
}

uint64_t Scheduler::BlockElements(const SubgroupSpec& spec, uint64_t block_elements) {
  if (!spec.kept_as) return block_elements;
  const uint64_t step = MLPO_ALIGN / 4;
  uint64_t elements = block_elements / step * step;
  while (elements > 0 && GradientBytes(spec, elements) + BufferBytes(elements) > BufferBytes(block_elements)) {
    elements -= step;
  }
  return elements;
}

uint32_t Scheduler::BlockCount(const SubgroupSpec& spec, uint64_t block_elements) {
  const uint64_t most = BlockElements(spec, block_elements);
  return static_cast<uint32_t>((spec.numel + most - 1) / most);
}

Scheduler::Scheduler(Options options, SchedulerActions* actions)
    : options_(std::move(options)),
      actions_(actions),
      model_({.policy = options_.policy,
              .learn = options_.learn,
              .seed = options_.seed,
              .block_bytes = BufferBytes(options_.block_elements),
              .buffers = options_.buffers,
              .queue_blocks = options_.queue_blocks,
              .paths = options_.paths}),
      room_bytes_(options_.paths.size()),
      paths_(options_.paths.size()),
      fair_share_(options_.paths.size() + 1),
      steps_(options_.paths.size(), &trace_) {
  MLPO_CHECK(options_.buffers > 0 && !options_.paths.empty());
  for (size_t i = 0; i < options_.turns.size(); ++i) paths_[i].turn = Turn(options_.turns[i]);
  free_.Add(0, options_.buffers, options_.buffers_node);
  SetLowWater();
}

void Scheduler::SetLowWater() {
  const uint32_t both_ways = model_.QueueBlocks(Direction::kRead) + model_.QueueBlocks(Direction::kWrite);
  low_water_ = std::clamp(both_ways, 1u, std::max(1u, free_.added() / 2));
}

void Scheduler::AddBuffers(BufferIndex first, uint32_t count, int node, int64_t now_ns) {
  Enter(now_ns);
  free_.Add(first, count, node);
  model_.SetBuffers(free_.added());
  SetLowWater();
  Pump();
}

std::vector<BufferIndex> Scheduler::LendBuffers(uint32_t count) {
  std::vector<BufferIndex> lent;
  BufferIndex buffer;
  while (lent.size() < count && TakeBuffer(-1, &buffer)) lent.push_back(buffer);
  return lent;
}

void Scheduler::TakeBack(const std::vector<BufferIndex>& buffers, int64_t now_ns) {
  now_ns_ = now_ns;
  for (const BufferIndex buffer : buffers) free_.Give(buffer);
  Pump();
}

void Scheduler::SetPath(PathIndex path, const PathParameters& parameters) {
  model_.SetPath(path, parameters);
  SetLowWater();
}

void Scheduler::AssumePath(PathIndex path, const PathParameters& parameters) {
  model_.Assume(path, parameters);
  SetLowWater();
}

Scheduler::~Scheduler() {
  clean_.clear();
  clean_ahead_.clear();
  for (PathState& path : paths_) path.lone_grads.clear();
  for (auto& [id, session] : sessions_) {
    session->dirty.clear();
    for (BlockList& list : session->away) list.clear();
    for (PendingSet& set : session->pending) set.clear();
  }
}

void Scheduler::Enter(int64_t now_ns) {
  steps_.Settle(now_ns, BufferIsFree());
  now_ns_ = now_ns;
}

Session* Scheduler::Find(SessionId session) const {
  auto it = sessions_.find(session);
  return it == sessions_.end() ? nullptr : it->second.get();
}

const Subgroup* Scheduler::FindSubgroup(SessionId session, SubgroupId subgroup) const {
  const Session* found = Find(session);
  if (found == nullptr) return nullptr;
  auto it = found->subgroups.find(subgroup);
  return it == found->subgroups.end() ? nullptr : it->second.get();
}

std::vector<SubgroupSpec> Scheduler::Specs(SessionId session) const {
  std::vector<SubgroupSpec> specs;
  const Session* found = Find(session);
  if (found == nullptr) return specs;
  for (const auto& [id, subgroup] : found->subgroups) specs.push_back(subgroup->spec);
  return specs;
}

void Scheduler::AddSession(const SessionIdentity& identity) {
  MLPO_CHECK(Find(identity.id) == nullptr);
  auto session = std::make_unique<Session>(paths_.size());
  session->rank = identity.rank;
  session->features = identity.features;
  session->numa_node = identity.numa_node;
  session->job = &jobs_[{identity.uid, identity.job}];
  if (session->job->sessions == 0) {
    session->job->user = &users_[identity.uid];
    ++session->job->user->jobs;
  }
  session->job->uid = identity.uid;
  session->job->name = identity.job;
  ++session->job->sessions;
  Keep(identity.id, std::move(session));
}

void Scheduler::Keep(SessionId id, std::unique_ptr<Session> session) {
  session->id = id;
  session->steps.id = id;
  session->extents.resize(paths_.size());
  session->placed_bytes.resize(paths_.size());
  session->pending = std::vector<PendingSet>(paths_.size() + 1);
  session->away = std::vector<BlockList>(paths_.size());
  all_sessions_.push_back(session.get());
  sessions_[id] = std::move(session);
}

void Scheduler::SetFiles(SessionId id, std::vector<FileId> files) {
  Session* session = Find(id);
  MLPO_CHECK(session != nullptr && files.size() == paths_.size());
  session->files = std::move(files);
  LeaveOutEvacuated(*session);
}

// Files were told of that go with what is evacuated: SetFile tells of others when the path is used again.
void Scheduler::LeaveOutEvacuated(Session& session) const {
  for (size_t i = 0; i < session.files.size(); ++i) {
    if (paths_[i].leaving.told) session.files[i] = kNone;
  }
}

void Scheduler::SetFile(SessionId id, PathIndex path, FileId file) {
  Session* session = Find(id);
  // Where it has one it may have gone on in another since it was asked for: it has left that one to a checkpoint.
  if (session == nullptr || session->files.empty() || session->files[path] != kNone) return;
  session->extents[path].Forget();
  session->files[path] = file;
}

void Scheduler::AddSubgroup(SessionId id, SubgroupSpec spec) {
  Session* session = Find(id);
  MLPO_CHECK(session != nullptr && session->files.size() == paths_.size());
  auto subgroup = std::make_unique<Subgroup>(session, std::move(spec));
  const uint64_t numel = subgroup->spec.numel;
  const uint32_t blocks = BlockCount(subgroup->spec, options_.block_elements);
  subgroup->blocks.resize(blocks);
  uint64_t first = 0;
  for (uint32_t i = 0; i < blocks; ++i) {
    Block& block = subgroup->blocks[i];
    block.owner = subgroup.get();
    block.index = i;
    block.first = first;
    block.count = numel / blocks + (i < numel % blocks);
    first += block.count;
  }
  if (subgroup->spec.kept_as) subgroup->covered.resize(blocks);
  subgroup->torn_written = Coverage(numel);
  session->parameters += numel;
  if (options_.policy == Policy::kProportional) subgroup->home = ChooseHome(*session, numel);
  session->subgroups[subgroup->spec.id] = std::move(subgroup);
}

// Of whole subgroups: the path furthest below its share of the session's parameters.
PathIndex Scheduler::ChooseHome(Session& session, uint64_t numel) const {
  session.home_parameters.resize(paths_.size());
  PathIndex best = 0;
  const auto below = [&](PathIndex i) {
    return model_.share(i) * static_cast<double>(session.parameters) - static_cast<double>(session.home_parameters[i]);
  };
  for (PathIndex i = 1; i < paths_.size(); ++i) {
    if (below(i) > below(best)) best = i;
  }
  session.home_parameters[best] += numel;
  return best;
}

void Scheduler::EndSession(SessionId id, int64_t now_ns) {
  Enter(now_ns);
  Session* session = Find(id);
  if (session == nullptr || session->ending) return;
  session->ending = true;
  session->line.clear();
  ops_ -= session->unanswered;
  EndUseOfSave(*session);
  for (auto& [handle, subgroup] : session->subgroups) EndOwner(*subgroup);
  EndUseOfObjects(*session);
  look_at_restores_ = true;  // others may go on
  MaybeGone(*session);
  Pump();
}

void Scheduler::EndOwner(BlockOwner& owner) {
  owner.ending = true;
  for (Block& block : owner.blocks) {
    if (block.pending_hook.is_linked()) RemovePending(block);
    LeaveLists(block);
    if (block.state == BlockState::kClean || block.state == BlockState::kDirty) DropBuffer(block);
  }
}

void Scheduler::MaybeGone(BlockOwner& owner) {
  Session& session = *owner.session;
  if (owner.object() != nullptr && owner.in_flight == 0) {
    auto& store = static_cast<ObjectStore&>(session);
    for (Block& block : owner.blocks) ReleaseExtent(block);
    store.objects.erase(owner.object());
    if (store.objects.empty()) {  // the job's next object gets a new store
      store.ending = true;
      if (store.job != nullptr) {
        fair_share_.Forget(store);
        store.job->store = nullptr;
        LeaveJob(store);
      }
    }
  }
  MaybeGone(session);
}

void Scheduler::MaybeGone(Session& session) {
  if (!session.ending || session.in_flight > 0) return;
  for (auto& [handle, subgroup] : session.subgroups) {
    for (Block& block : subgroup->blocks) ReleaseExtent(block);
  }
  const SessionId id = session.id;
  ForgetSession(session);
  steps_.Forget(session.steps);
  const bool known = !IsStore(id) || static_cast<ObjectStore&>(session).has_files;
  std::erase(all_sessions_, &session);
  sessions_.erase(id);
  if (known) actions_->SessionGone(id);
}

void Scheduler::Tick(int64_t now_ns) {
  Enter(now_ns);
  StartProbes();
  look_at_restores_ = true;  // some may hang by now
  Pump();
  FailHung();
  FailHungSaves();
  TellOfHanging();
  if (options_.hang_timeout_ns != 0) GiveUpStalled(options_.hang_timeout_ns, now_ns);
  if (CanMove()) {
    stuck_since_ns_ = 0;
  } else if (stuck_since_ns_ == 0) {
    stuck_since_ns_ = now_ns;
  } else if (now_ns - stuck_since_ns_ >= options_.no_path_timeout_ns) {
    FailStuck();
    stuck_since_ns_ = 0;
  }
  wake_ns_ = std::min(wake_ns_, NextProbe());  // which may be sooner now
}

void Scheduler::StartProbes() {
  for (PathIndex i = 0; i < paths_.size(); ++i) {
    PathHealth& health = paths_[i].health;
    if (now_ns_ < health.probe_ns(stuck_since_ns_ != 0)) continue;
    const uint64_t end = health.probe_end();
    health.ProbeBegins();
    actions_->StartProbe(i, end);
  }
}

// When one is due that somebody waits for; the others can wait for the next Tick.
int64_t Scheduler::NextProbe() const {
  int64_t next_ns = kNever;
  if (pending_ == 0 && taking_ == 0) return next_ns;
  for (const PathState& path : paths_) next_ns = std::min(next_ns, path.health.probe_ns(stuck_since_ns_ != 0));
  return next_ns;
}

void Scheduler::ProbeDone(PathIndex path, int error, int64_t now_ns) {
  Enter(now_ns);
  paths_[path].health.ProbeEnds(error, now_ns);
  Pump();
}

bool Scheduler::ailing() const {
  return std::any_of(paths_.begin(), paths_.end(), [](const PathState& path) {
    return path.health.ailing() || (path.leaving.on && !path.leaving.told);
  });
}

// Whether paths have something that gives a buffer when it ends. Slow I/O counts, until its path has hung for too long,
// and for a while the probe of a path that has not failed; that of one that has does not.
bool Scheduler::PathsMove() const {
  for (PathIndex i = 0; i < paths_.size(); ++i) {
    const PathState& path = paths_[i];
    const PathHealth& health = path.health;
    const bool proves = health.unproven() && !health.disabled();
    if (proves && now_ns_ - health.since_ns() < options_.no_path_timeout_ns) return true;
    if (path.reads > path.copies && !IsLost(i, Direction::kRead)) return true;
    if (path.writes > 0 && !IsLost(i, Direction::kWrite)) return true;
  }
  return false;
}

// Whether a buffer is to be had or may become so.
bool Scheduler::CanMove() const {
  const bool moves = PathsMove();
  // A TAKE needs no buffer but a path that is written to.
  if (taking_ > 0 && working_ == 0 && !moves) return false;
  if (pending_ == 0 || working_ > 0 || !free_.empty() || !clean_.empty() || !clean_ahead_.empty()) return true;
  return CopiesUnderWay() > 0 || moves;
}

void Scheduler::Fill(PoolSnapshot* pool) const {
  pool->buffers = free_.added();
  pool->free_blocks = free_.size();
  pool->cached_blocks = free_.added() - free_.size();
  pool->dirty_blocks = flushing_;
  for (const auto& [id, session] : sessions_) pool->dirty_blocks += session->dirty.size();
  for (const PathState& path : paths_) pool->dirty_blocks += path.lone_grads.size();
}

void Scheduler::Fill(std::vector<PoolUseSnapshot>* jobs) const {
  for (const auto& [key, job] : jobs_) jobs->push_back({key.first, key.second, job.use.held});
}

void Scheduler::Fill(StepTotals* steps, int64_t* workers_busy_ns, int64_t now_ns) const {
  *steps = steps_.totals();
  *workers_busy_ns = steps_.WorkersBusyNs(now_ns);
}

const char* Scheduler::StateName(PathIndex index) const {
  using State = PathHealth::State;
  const State state = paths_[index].health.state();
  if (state != State::kHealthy || !IsHanging(index)) return Name(state);
  const bool for_long = HangsForLong(index, Direction::kRead) || HangsForLong(index, Direction::kWrite);
  return Name(for_long ? State::kQuarantined : State::kSuspect);
}

void Scheduler::Fill(PathIndex index, PathSnapshot* snapshot, int64_t now_ns) const {
  const PathState& path = paths_[index];
  snapshot->state = StateName(index);
  snapshot->scratch_bytes = path.extent_bytes - path.pinned_bytes;
  snapshot->checkpoint_bytes = path.pinned_bytes;
  snapshot->read_errors = path.read_errors;
  snapshot->write_errors = path.write_errors;
  snapshot->checksum_mismatches = path.checksum_mismatches;
  snapshot->checksum_errors = path.checksum_errors;
  snapshot->read_bytes = path.read_bytes;
  snapshot->written_bytes = path.written_bytes;
  snapshot->read_bytes_per_s = path.read_rate.PerSecond(now_ns);
  snapshot->write_bytes_per_s = path.write_rate.PerSecond(now_ns);
  snapshot->in_flight = path.reads + path.writes;
  snapshot->evacuating = path.leaving.on;
  snapshot->evacuated = path.leaving.told;
  snapshot->evacuation_bytes = path.leaving.total_bytes;
  snapshot->unreadable_blocks = path.leaving.on ? path.leaving.staying : 0;
  snapshot->error = path.health.error();
  snapshot->state_since_ns = path.health.since_ns();
  snapshot->probes = path.health.probes();
  snapshot->failed_probes = path.health.failed_probes();
  steps_.Fill(index, snapshot, now_ns);
  const PathParameters& known = model_.path(index);
  snapshot->read_limit = known.read_bytes_per_s;
  snapshot->write_limit = known.write_bytes_per_s;
  snapshot->duplex = known.duplex;
  snapshot->worth_bytes_per_s = model_.worth(index);
  snapshot->seen_bytes_per_s = model_.seen_worth(index);
  snapshot->granted_bytes_per_s = known.granted_bytes_per_s;
  snapshot->share = model_.share(index);
  snapshot->speeds_from = Name(known.origin);
  snapshot->read_queue_blocks = model_.QueueBlocks(index, Direction::kRead);
  snapshot->write_queue_blocks = model_.QueueBlocks(index, Direction::kWrite);
}

void Scheduler::Fill(SessionId id, SessionSnapshot* snapshot, int64_t now_ns) const {
  const Session* session = Find(id);
  if (session == nullptr) return;
  snapshot->parameters = session->parameters;
  snapshot->subgroups = session->subgroups.size();
  snapshot->skipped_steps = session->skipped_steps;
  snapshot->requests_in_flight = session->unanswered;
  steps_.Fill(session->steps, snapshot, now_ns, BufferIsFree());
  bool first = true;
  for (const auto& [handle, subgroup] : session->subgroups) {
    snapshot->epoch = first ? subgroup->epoch : std::min<uint64_t>(snapshot->epoch, subgroup->epoch);
    first = false;
  }
}

}  // namespace mlpo
