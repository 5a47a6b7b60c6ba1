// Scheduler: movement between memory and paths.
#include <algorithm>
#include <cerrno>
#include <map>
#include <system_error>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/base/clock.h"
#include "daemon/scheduler/failure.h"
#include "daemon/scheduler/object.h"
#include "daemon/scheduler/scheduler.h"
#include "daemon/scheduler/session.h"
#include "proto/abi.h"

namespace mlpo {
namespace {

constexpr int64_t kNotWaitedForNs = 10'000'000'000;  // that I/O of an ended session hangs, by who comes after it

}  // namespace

void Scheduler::Pump() {
  do {
    PumpTakes();
    PumpGradients();
    PumpRestores();
    WantNext();
    PumpFlushes();
    PumpQuotas();
    PumpLeaving();
    PumpCopies(true);
    while (FetchOne()) {
      WantNext();
      PumpFlushes();
    }
    while (FetchAheadOne()) {
    }
  } while (YieldTurns());
  wake_ns_ = std::min({wake_ns_, NextProbe(), NextLook()});
  PumpCopies(false);
}

bool Scheduler::MayQueue(PathIndex index, Direction direction) const {
  const PathState& path = paths_[index];
  const uint32_t limit = path.health.doubtful() ? 1 : model_.path_blocks();
  const uint32_t same = direction == Direction::kRead ? path.reads : path.writes;
  const uint32_t most = IsHanging(index) ? 1 : model_.QueueBlocks(index, direction);
  return same < most && path.reads + path.writes + path.lone < limit;
}

// Whether it may for this session, too, where the path is used in turns.
bool Scheduler::MayStart(PathIndex index, Direction direction, const Session& session) const {
  return MayQueue(index, direction) && paths_[index].turn.Allows(session.id, direction);
}

// Whether a turn has ended because nothing more can be started in it: others may try.
bool Scheduler::YieldTurns() {
  bool yielded = false;
  for (PathState& path : paths_) yielded |= path.turn.Yield();
  return yielded;
}

// A transfer of a block that has left its lists; the number of its turn.
uint64_t Scheduler::TakeTurn(const Block& block, PathIndex path, Direction direction) {
  const Session& session = *block.owner->session;
  return paths_[path].turn.Started(session.id, direction, session.pending[path].size() + session.dirty.size() + 1);
}

// Starts the transfer of a block's parts, or of some bytes of them, between its buffer and an extent.
void Scheduler::Move(Block& block, Direction direction, Extent extent, uint8_t parts, ByteSpan span, uint64_t turn) {
  InFlight in_flight;
  in_flight.block = &block;
  in_flight.extent = extent;
  in_flight.parts = parts;
  in_flight.turn = turn;
  Transfer& transfer = in_flight.transfer;
  transfer.id = next_transfer_++;
  transfer.direction = direction;
  transfer.path = extent.path;
  transfer.file = extent.file;
  transfer.buffer = block.buffer;
  transfer.buffer_offset = span.first;
  transfer.offset = options_.extents_offset_bytes + extent.offset + span.first;
  transfer.bytes = span.bytes;
  transfers_[transfer.id] = in_flight;
  model_.Started(transfer.path, direction, now_ns_);
  steps_.TransferBegins(block.owner->session->steps, transfer);
  trace_.TransferBegins(transfer, now_ns_);
  actions_->StartTransfer(transfer);
}

// ---- Flushing ----

// Buffers that are being written and so expected to be free soon.
uint32_t Scheduler::Coming() const {
  uint32_t coming = flushing_;
  for (PathIndex i = 0; i < paths_.size(); ++i) coming -= IsHanging(i) ? paths_[i].writes : 0;
  return coming;
}

// Whether any path's queue has room for a write. Most often none has, and then nobody need ask for which.
bool Scheduler::CanWrite() const {
  for (PathIndex i = 0; i < paths_.size(); ++i) {
    if (MayQueue(i, Direction::kWrite)) return true;
  }
  return false;
}

void Scheduler::PumpFlushes() {
  wake_ns_ = kNever;
  const uint64_t wait = pending_ + std::exchange(leaving_waits_, false) + CopyWaits();
  const uint64_t asked = std::min<uint64_t>(low_water_, wait + coming_ + std::exchange(read_ahead_, 0));
  uint64_t most = asked;  // most often there is enough, and nobody need be looked for
  for (PathIndex i = 0; i < paths_.size(); ++i) {
    if (paths_[i].pending_bytes == 0) most += model_.QueueBlocks(i, Direction::kRead);
  }
  for (uint64_t there = 0; (there = free_.size() + clean_.size() + Coming()) < most;) {
    Block* const victim = CanWrite() ? Victim() : nullptr;
    if (victim == nullptr || (there >= asked && there >= asked + WantedAhead(victim))) break;
    if (wait == 0 && IsGrowing(*victim)) break;
    const int64_t wait_ns = AboutToBeUsed(*victim);
    if (wait_ns > now_ns_) {
      wake_ns_ = wait_ns;
      break;
    }
    if (!FlushOne(*victim)) break;
  }
}

// Whether anything is written there, and so many bytes more may be.
bool Scheduler::TakesWrites(PathIndex index, uint64_t bytes) const {
  if (IsHanging(index) || paths_[index].health.rewrite_end() == 0) return false;
  const uint64_t capacity = model_.path(index).capacity_bytes;
  return capacity == 0 || paths_[index].extent_bytes + bytes <= capacity;
}

// For a new extent of the session.
bool Scheduler::HasRoom(PathIndex index, uint64_t bytes, const Session& session) const {
  if (!TakesWrites(index, bytes) || session.files[index] == kNone) return false;
  const PathHealth& health = paths_[index].health;
  if (health.MayWrite()) return true;
  const ExtentMap& extents = session.extents[index];
  const uint64_t offset = extents.Next(bytes);
  const uint64_t end = options_.extents_offset_bytes + offset + bytes;
  return end <= (extents.IsWritten(offset, bytes) ? health.rewrite_end() : health.write_end());
}

// Whether the block's extent may be written again, where it is.
bool Scheduler::MayRewrite(const Block& block) const {
  const Extent& extent = block.extent;
  const uint64_t end = options_.extents_offset_bytes + extent.offset + extent.bytes;
  return TakesWrites(extent.path, 0) && end <= paths_[extent.path].health.rewrite_end();
}

// A block of a session that has a path's turn: others' may have to wait for its end.
bool Scheduler::FlushInTurn() {
  for (PathIndex i = 0; i < paths_.size(); ++i) {
    if (paths_[i].turn.holder() == 0 || !MayQueue(i, Direction::kWrite)) continue;
    Session* const holder = Find(paths_[i].turn.holder());
    if (holder != nullptr && !holder->dirty.empty() && StartFlush(holder->dirty.back())) return true;
  }
  return false;
}

// The victim; where subgroups have paths of their own and its path is busy, a block whose path is not.
bool Scheduler::FlushOne(Block& victim) {
  if (StartFlush(victim) || FlushInTurn()) return true;
  if (model_.policy() != Policy::kProportional) return false;
  for (auto& [id, session] : sessions_) {
    BlockList& dirty = session->dirty;
    const auto fits = [this](Block& block) { return StartFlush(block); };  // which ends the search: it left the list
    if (std::any_of(dirty.rbegin(), dirty.rend(), fits)) return true;
  }
  return false;
}

PathIndex Scheduler::ChooseFlushPath(const Block& block, uint64_t bytes) {
  const Session& session = *block.owner->session;
  if (const Subgroup* subgroup = block.owner->subgroup(); subgroup != nullptr && subgroup->home != kNone) {
    if (HasRoom(subgroup->home, bytes, session)) {
      return MayStart(subgroup->home, Direction::kWrite, session) ? subgroup->home : kNone;
    }
  }
  const auto in_use = [&](size_t i) { return static_cast<double>(session.placed_bytes[i]); };
  double total = static_cast<double>(bytes);
  for (size_t i = 0; i < paths_.size(); ++i) {
    total += in_use(i);
    room_bytes_[i] = 0;
    if (!HasRoom(static_cast<PathIndex>(i), bytes, session)) continue;
    const uint64_t capacity = model_.path(static_cast<PathIndex>(i)).capacity_bytes;
    // What other sessions leave of it.
    room_bytes_[i] = capacity == 0 ? std::numeric_limits<double>::infinity()
                                   : static_cast<double>(capacity - paths_[i].extent_bytes) + in_use(i);
  }
  const std::vector<double>& targets = model_.Targets(total, room_bytes_);
  PathIndex best = kNone;
  double furthest = -std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < paths_.size(); ++i) {
    if (room_bytes_[i] <= 0 || targets[i] - in_use(i) <= furthest) continue;
    furthest = targets[i] - in_use(i);
    best = static_cast<PathIndex>(i);
  }
  if (best == kNone || MayStart(best, Direction::kWrite, session)) return best;
  // Its queue is full. One that has nothing to write may take up to a queue's worth more than its share, of all the
  // sessions of a job together.
  const uint32_t sessions = session.job == nullptr ? 1 : std::max(1u, session.job->waiting_sessions);
  const double block_bytes = static_cast<double>(BufferBytes(options_.block_elements)) / sessions;
  for (PathIndex i = 0; i < paths_.size(); ++i) {
    const double spare = model_.QueueBlocks(i, Direction::kWrite) * block_bytes;
    if (room_bytes_[i] > 0 && paths_[i].writes == 0 && MayStart(i, Direction::kWrite, session) &&
        in_use(i) - targets[i] < spare) {
      return i;
    }
  }
  return kNone;
}

bool Scheduler::StartFlush(Block& block) {
  if (FlushGradient(block)) return true;
  const uint64_t bytes = ExtentBytes(block);
  const PathIndex target = ChooseFlushPath(block, bytes);
  if (target == kNone) return false;
  paths_[target].extent_bytes += bytes;
  Session& session = *block.owner->session;
  session.placed_bytes[target] += bytes;
  StartWrite(block, Extent{target, session.extents[target].Take(bytes), bytes, session.files[target]}, block.nonzero);
  return true;
}

void Scheduler::StartWrite(Block& block, Extent extent, uint8_t parts) {
  MLPO_CHECK((parts & ~block.filled) == 0);
  LeaveLists(block);
  LeaveLone(block);
  block.state = BlockState::kFlushing;
  ++paths_[extent.path].writes;
  ++flushing_;
  CountFlushing(block, 1);
  Hold(block);
  const uint8_t missing = options_.integrity ? parts & ~block.summed : 0;
  const uint8_t unchecked = parts & block.unchecked;
  if ((missing | unchecked) == 0) {
    const uint64_t turn = TakeTurn(block, extent.path, Direction::kWrite);
    return Move(block, Direction::kWrite, extent, parts, SpanOf(block, parts), turn);
  }
  NeedChecksums(block);
  forming_[&block] = {extent, parts, unchecked, missing};
  steps_.ChecksumsBegin();
  actions_->StartChecksums(block, unchecked, missing);
}

// A block that StartWrite gave a place in the path's queue is not there any more, written or not.
void Scheduler::LeaveQueue(Block& block, PathIndex path) {
  --paths_[path].writes;
  --flushing_;
  CountFlushing(block, -1);
  LetGo(block);
}

void Scheduler::WriteDone(const InFlight& in_flight, const TransferResult& result) {
  Block& block = *in_flight.block;
  PathState& path = paths_[in_flight.extent.path];
  path.written_bytes += result.bytes;
  path.write_rate.Add(result.bytes, now_ns_);
  LeaveQueue(block, in_flight.extent.path);
  const bool in_place = in_flight.extent.path == block.extent.path && in_flight.extent.file == block.extent.file &&
                        in_flight.extent.offset == block.extent.offset;
  // Of a file that the session has left meanwhile it is not asked any more what has been written.
  const bool current = in_flight.extent.file == block.owner->session->files[in_flight.extent.path];
  ExtentMap& extents = block.owner->session->extents[in_flight.extent.path];
  const bool rewrite = current && extents.IsWritten(in_flight.extent.offset, in_flight.extent.bytes);
  if (result.error != 0) {
    // The block is still in memory; the extent is written in full before it is read again.
    if (!in_place) GiveExtent(*block.owner->session, in_flight.extent);
    ++path.write_errors;
    path.health.WriteFailed(result.error, in_flight.transfer.offset + in_flight.transfer.bytes, rewrite, now_ns_);
  } else {
    if (current) extents.Wrote(in_flight.extent.offset, in_flight.extent.bytes);
    StopLeaving(block);
    if (!in_place) {
      ReleaseExtent(block);
      block.extent = in_flight.extent;
    }
    block.grad_saved = (block.nonzero & in_flight.parts & kPartGradient) != 0;
    if (block.nonzero == 0) ReleaseExtent(block);  // a gradient that has been discarded meanwhile
  }
  AfterWrite(block, result.error != 0);
}

// On with what somebody waits for, or into the lists. `failed`: it is where it was before.
void Scheduler::AfterWrite(Block& block, bool failed) {
  block.state = Unsaved(block) ? BlockState::kDirty : BlockState::kClean;
  if (block.owner->ending) {
    DropBuffer(block);
    return MaybeGone(*block.owner);
  }
  const bool lone = block.filled == kPartGradient && block.nonzero & kPartState;
  if (block.want != nullptr && Missing(block) != 0) {
    ++block.want->active;
    return StartRead(block, block.buffer);
  }
  if (block.want != nullptr) {
    ++block.want->active;
    return StartWork(block);
  }
  // Only with its state can it go to another path.
  if (lone && failed) return StartRead(block, block.buffer);
  SettleInMemory(block);
  if (block.leaves) LookAgain(block);
  TakeGoesOn(block);
}

// ---- Fetching ----

// Whose blocks on the path are to be read next: the one that has its turn, else the one that FairShare says; nullptr if
// none waits, or may.
Session* Scheduler::Reader(PathIndex path) {
  Session* const next = fair_share_.Next(path);
  const Turn& turn = paths_[path].turn;
  if (next == nullptr || turn.Allows(next->id, Direction::kRead)) return next;
  Session* const holder = Find(turn.holder());
  const bool can = holder != nullptr && !holder->pending[path].empty() && turn.Allows(holder->id, Direction::kRead);
  return can ? holder : nullptr;
}

// Among paths that may take a read, the one whose waiting reads take longest, with its share of the writes that make
// room for them. kNone if none waits. For each path that has still more to read, and whose queue is full just now, a
// buffer is kept back: else those that are ahead take them all, and the slowest is read alone at the end.
PathIndex Scheduler::ChooseReadPath() {
  double extents = 0;
  for (const PathState& path : paths_) extents += static_cast<double>(path.extent_bytes);
  const uint64_t to_come = free_.size() + clean_.size() + Coming();
  const double written =
      pending_ > to_come ? static_cast<double>((pending_ - to_come) * BufferBytes(options_.block_elements)) : 0;
  const auto seconds = [&](PathIndex i) {
    const auto reads = static_cast<double>(paths_[i].pending_bytes);
    const double stays = static_cast<double>(paths_[i].extent_bytes) - reads;
    const double most = TakesWrites(i, BufferBytes(options_.block_elements)) ? written : 0;
    return model_.ReadSeconds(i, reads, std::clamp(model_.share(i) * extents - stays, 0.0, most));
  };
  PathIndex best = kNone;
  double longest = 0;
  for (PathIndex i = 0; i < paths_.size(); ++i) {
    if (paths_[i].pending_bytes == 0 || !MayQueue(i, Direction::kRead)) continue;
    if (paths_[i].turn.on() && Reader(i) == nullptr) continue;
    const double takes = seconds(i);
    if (best != kNone && takes <= longest) continue;
    best = i;
    longest = takes;
  }
  if (best == kNone || Coming() == 0) return best;
  size_t kept_back = 0;
  for (PathIndex i = 0; i < paths_.size(); ++i) {
    kept_back += paths_[i].pending_bytes > 0 && !paths_[i].health.doubtful() && !IsHanging(i) && seconds(i) > longest;
  }
  return free_.size() + clean_.size() > kept_back ? best : kNone;
}

bool Scheduler::FetchOne() {
  if (pending_ == 0 || !HasBuffer()) return false;
  size_t queue = paths_.size();
  Session* session = fair_share_.Next(queue);  // blocks that are not read wait for nothing but a buffer
  const PathIndex path = ChooseReadPath();
  if (path != kNone) {
    // Neither kind starves the other: who writes a large object always has a block that is not read.
    Session* reader = Reader(path);
    if (session == nullptr || FairShare::Before(*reader, *session)) {
      session = reader;
      queue = path;
    }
  }
  if (session == nullptr) return false;
  BufferIndex buffer;
  if (!TakeBuffer(queue < paths_.size() ? NodeOf(path) : session->numa_node, &buffer)) return false;
  Block& block = *session->pending[queue].begin();
  fair_share_.Grant(*session, PendingBytes(block));
  RemovePending(block);
  ++block.want->active;
  if (Missing(block) != 0) {
    StartRead(block, buffer);
  } else {
    block.buffer = buffer;
    CountHeld(block, 1);
    block.filled = 0;
    block.state = BlockState::kClean;
    StartWork(block);
  }
  return true;
}

void Scheduler::StartRead(Block& block, BufferIndex buffer) {
  LeaveLists(block);
  LeaveLone(block);
  if (block.buffer == kNone) CountHeld(block, 1);
  block.buffer = buffer;
  block.state = BlockState::kFetching;
  ++paths_[block.extent.path].reads;
  Hold(block);
  const uint8_t parts = block.nonzero & ~block.filled;
  const uint64_t turn = TakeTurn(block, block.extent.path, Direction::kRead);
  Move(block, Direction::kRead, block.extent, parts, SpanOf(block, parts), turn);
}

void Scheduler::ReadDone(const InFlight& in_flight, const TransferResult& result) {
  Block& block = *in_flight.block;
  PathState& path = paths_[in_flight.extent.path];
  path.read_bytes += result.bytes;
  path.read_rate.Add(result.bytes, now_ns_);
  --path.reads;
  LetGo(block);
  block.state = BlockState::kClean;
  Op* op = block.want;
  if (block.owner->ending) {
    DropBuffer(block);
    return MaybeGone(*block.owner);
  }
  int error = result.error;
  if (error != 0) ++path.read_errors;
  if (error != 0 && (in_flight.parts & block.nonzero) == 0) {  // only a gradient that has been discarded meanwhile
    ReadsFail(in_flight.extent.path, error);
    error = 0;
  }
  if (block.wrong != nullptr) return PieceRead(block, error);
  if (error != 0) return CannotBeRead(block, error);
  if (block.nonzero == 0) {  // a gradient that has been discarded meanwhile
    SetAhead(block, false);
    ReleaseExtent(block);
  }
  block.filled |= block.nonzero;
  if (options_.integrity) block.unchecked |= in_flight.parts & block.nonzero;
  if (op != nullptr && op->failure.status == 0) return StartWork(block);
  block.want = nullptr;
  SettleInMemory(block);
  if (block.leaves) Leave(block);
  TakeGoesOn(block);
  if (op != nullptr) BlockDone(*op);
}

// A block's extent, or some of it. Nothing of the block has been changed.
void Scheduler::CannotBeRead(Block& block, int error) {
  const PathIndex from = block.extent.path;
  Op* const op = block.want;
  // It was being read ahead of use, or moved, and is filled anew from a checkpoint.
  if (op != nullptr && op->kind() == MLPO_OP_RESTORE && op->failure.status == 0) {
    StartWork(block);
    return ReadsFail(from, error);
  }
  block.want = nullptr;
  CannotLeave(block);
  ForgetRead(block);
  ReadsFail(from, error);
  if (op == nullptr) return;
  Failure failure =
      Fail(MLPO_E_IO, "reading block " + std::to_string(block.index) + " of " + block.owner->Name() + " from path '" +
                          options_.path_names[from] + "': " + std::generic_category().message(error));
  failure.os_errno = error;
  failure.block = block.index;
  failure.path = from;
  failure.first = block.first;
  failure.count = block.count;
  FailOp(*op, std::move(failure));
  BlockDone(*op);
}

// What the buffer has of the extent is worth nothing: what is nowhere else stays.
void Scheduler::ForgetRead(Block& block) {
  if (block.nonzero & kPartGradient && !block.grad_saved) {
    block.filled &= kPartGradient;
    block.unchecked = 0;
    block.read_twice = false;
    block.wrong.reset();
    BeLone(block);
    paths_[block.extent.path].rescue_again_ns = now_ns_ + kNsPerS;
    SettleInMemory(block);
    LookForTake(block);
  } else {
    DropBuffer(block);
    LeaveLists(block);  // not ahead of use again: who needs it tries
  }
}

// A read of the path has failed, or what it brought was wrong, twice.
void Scheduler::ReadsFail(PathIndex path, int error) {
  const bool before = paths_[path].health.unreadable();
  paths_[path].health.ReadFailed(error, now_ns_);
  if (!before) KeepInMemory(path);
}

void Scheduler::TransferDone(const TransferResult& result, int64_t now_ns) {
  Enter(now_ns);
  auto it = transfers_.find(result.id);
  MLPO_CHECK(it != transfers_.end());
  const InFlight in_flight = it->second;
  transfers_.erase(it);
  const Transfer& transfer = in_flight.transfer;
  paths_[transfer.path].turn.Ended(in_flight.turn, transfer.direction);
  if (HangsForLong(transfer.path, transfer.direction)) paths_[transfer.path].health.Returned(now_ns);
  if (model_.Ended(transfer.path, transfer.direction, result.bytes, result.error == 0, now_ns)) SetLowWater();
  if (in_flight.pin != nullptr) {
    if (trace_.on()) {
      const Pin& pin = *in_flight.pin;
      trace_.TransferEnds(transfer, pin.save->session_id, pin.subgroup, pin.index, result, now_ns_);
    }
    CopyRead(in_flight, result);
    return Pump();
  }
  steps_.TransferEnds(in_flight.block->owner->session->steps, transfer, result.bytes);
  if (trace_.on()) TraceTransfer(in_flight, result);
  if (in_flight.transfer.direction == Direction::kRead) {
    ReadDone(in_flight, result);
  } else {
    WriteDone(in_flight, result);
    LeavingGoesOn();
  }
  Pump();
}

// ---- Ahead of use ----

// When a block will be wanted, as far as can be foreseen: as long after its last use as its session's steps take.
// Never, if that is long past, if its session has not made two steps, or if the order takes no account of it.
int64_t Scheduler::NextUse(const Block& block) const { return NextUse(*block.owner->session, block.used_ns); }

int64_t Scheduler::NextUse(const Session& session, int64_t used_ns) const {
  if (options_.order != Order::kAdaptive) return kNever;
  const int64_t period_ns = session.period_ns;
  const int64_t next_ns = used_ns + period_ns;
  return period_ns == 0 || now_ns_ > next_ns + period_ns ? kNever : next_ns;
}

// Until when it is likely that the next submission to come is the update of this block: a step has just begun for which
// it is here. Longer while workers are busy: what they have is wanted later, and may be given away instead.
int64_t Scheduler::AboutToBeUsed(const Block& block) const {
  constexpr int64_t kSubmittingNs = 100 * kNsPerMs;
  constexpr int64_t kNextNs = 2 * kNsPerMs;  // a trainer's time between two submissions
  const Session& session = *block.owner->session;
  if (session.period_ns == 0) return 0;  // a store's, too, whose job may be gone
  const TrainingJob& job = *session.job;
  if (block.used_ns >= job.step_ns) return 0;
  const int64_t end_ns = job.step_ns + kSubmittingNs;
  return working_ > 0 ? end_ns : std::min(end_ns, job.submitted_ns + kNextNs);
}

// The dirty block whose buffer is best given away: that of the farthest next use. In steps that follow one order, that
// is the last one used; so what a step did first stays for the beginning of the next.
Block* Scheduler::Victim() const {
  Block* victim = nullptr;
  std::pair<int64_t, int64_t> farthest;
  for (Session* const session : all_sessions_) {
    if (session->dirty.empty()) continue;
    Block& last = session->dirty.back();
    // The next piece of an object comes at once.
    const std::pair<int64_t, int64_t> use(IsGrowing(last) ? 0 : NextUse(*session, last.used_ns), last.used_ns);
    if (victim != nullptr && use <= farthest) continue;
    victim = &last;
    farthest = use;
  }
  return victim;
}

// The block on that path that will be wanted first; nullptr if none is known.
Block* Scheduler::NextAhead(PathIndex path) const {
  Block* next = nullptr;
  int64_t first_ns = kNever;
  for (Session* const session : all_sessions_) {
    BlockList& away = session->away[path];
    while (!away.empty() && away.front().epoch + 1 < session->epoch) away.pop_front();  // was not in the last step
    if (session->ending || away.empty()) continue;
    const int64_t use_ns = NextUse(*session, away.front().used_ns);
    if (use_ns >= first_ns) continue;
    next = &away.front();
    first_ns = use_ns;
  }
  return next;
}

// How many more blocks of a path may be fetched before they are wanted. Those of the step under way cost nothing; for
// the next step one, however deep the queue: each costs a buffer that could have kept another.
uint32_t Scheduler::RoomAhead(PathIndex index, const Block& block) const {
  const PathState& path = paths_[index];
  uint32_t limit = 1;
  if (block.epoch < block.owner->session->epoch) {
    limit = std::max(limit, free_.added() / 4 / static_cast<uint32_t>(paths_.size()));
  }
  return path.ahead < limit ? limit - path.ahead : 0;
}

// Buffers that are to be made free for such blocks, by giving away ones that are wanted later. A block that its step
// has still to update is not: one that has been updated by then will do better.
uint64_t Scheduler::WantedAhead(const Block* victim) const {
  uint64_t wanted = 0;
  if (victim->epoch < victim->owner->session->epoch) return 0;
  for (PathIndex i = 0; i < paths_.size(); ++i) {
    if (paths_[i].pending_bytes > 0 || IsHanging(i) || paths_[i].health.doubtful()) continue;
    const Block* block = NextAhead(i);
    if (block == nullptr || NextUse(*block) >= NextUse(*victim) || !MayKeep(*block->owner->session, 1)) continue;
    wanted += std::min(RoomAhead(i, *block), model_.QueueBlocks(i, Direction::kRead));
  }
  return wanted;
}

bool Scheduler::FetchAheadOne() {
  if (free_.empty() && clean_.empty()) return false;
  for (PathIndex i = 0; i < paths_.size(); ++i) {
    if (paths_[i].pending_bytes > 0 || paths_[i].health.doubtful() || !MayQueue(i, Direction::kRead)) continue;
    Block* block = NextAhead(i);
    if (block == nullptr || RoomAhead(i, *block) == 0 || !MayKeep(*block->owner->session, 1)) continue;
    if (!paths_[i].turn.Allows(block->owner->session->id, Direction::kRead)) continue;
    BufferIndex buffer;
    MLPO_CHECK(TakeBuffer(NodeOf(i), &buffer));
    LeaveLists(*block);
    SetAhead(*block, true);
    StartRead(*block, buffer);
    return true;
  }
  return false;
}

// ---- No path left ----

Failure Scheduler::HasHung(PathIndex path, int64_t hung_ns, const Block& block) const {
  Failure failure = Fail(MLPO_E_IO, "path '" + options_.path_names[path] + "' has not answered for " +
                                        std::to_string(hung_ns / kNsPerS) + " s, and block " +
                                        std::to_string(block.index) + " of " + block.owner->Name() + " waits for it");
  failure.os_errno = ETIMEDOUT;
  failure.block = block.index;
  failure.path = path;
  failure.first = block.first;
  failure.count = block.count;
  return failure;
}

// Of sessions that have ended. Their buffers and files stay theirs until what hangs comes back.
void Scheduler::TellOfHanging() {
  for (Session* const session : all_sessions_) {
    if (!session->ending || session->hangs || IsStore(session->id)) continue;
    uint64_t hanging = 0;
    for (const auto& [id, in_flight] : transfers_) {
      if (in_flight.block == nullptr || in_flight.block->owner->session != session) continue;
      const Transfer& transfer = in_flight.transfer;
      hanging += model_.HungNs(transfer.path, transfer.direction, now_ns_) >= kNotWaitedForNs;
    }
    if (hanging < session->in_flight) continue;
    session->hangs = true;
    actions_->SessionHangs(session->id);
  }
}

// What waits for a path that has hung for too long. Blocks that the path has stay with it until it lets go of them.
// Reads that move while writes hang are waited for, as long as there is room for one in flight.
void Scheduler::FailHung() {
  for (PathIndex path = 0; path < paths_.size(); ++path) {
    const bool reads = IsLost(path, Direction::kRead);
    if (!reads && !IsLost(path, Direction::kWrite)) continue;
    const bool none_begins = paths_[path].reads == 0 && !MayQueue(path, Direction::kRead);
    const int64_t hung_ns = HungNs(path);
    std::map<Op*, const Block*> waiting;
    for (const auto& [id, in_flight] : transfers_) {
      const Transfer& transfer = in_flight.transfer;
      const Block* const block = in_flight.block;  // nullptr: a copy, which only its checkpoint waits for
      if (transfer.path != path || block == nullptr || !IsLost(path, transfer.direction)) continue;
      if (block->want != nullptr) waiting.emplace(block->want, block);
      if (block->flush_for != nullptr) waiting.emplace(block->flush_for, block);
    }
    for (const Session* session : all_sessions_) {
      if (!reads && !none_begins) break;
      for (const Block& block : session->pending[path]) waiting.emplace(block.want, &block);
    }
    for (const auto& [op, block] : waiting) {
      BlockOwner& owner = *op->owner;
      FailOp(*op, HasHung(path, hung_ns, *block));
      for (uint32_t i = op->first_block; i < op->end_block; ++i) {
        Block& has = owner.blocks[i];
        if (has.want != op || has.state != BlockState::kFetching || has.extent.path != path) continue;
        if (has.wrong != nullptr) continue;  // pieces of it have been changed: op ends with it, whenever that is
        has.want = nullptr;                  // read all the same; whoever wants it next has it
        --op->active;
      }
      if (op->active == 0) Advance(owner);
    }
  }
}

// Each path's state, and what would help.
std::string Scheduler::WhyNotWritten() const {
  std::string reasons;
  const bool limited =
      std::any_of(paths_.begin(), paths_.end(), [](const PathState& path) { return path.health.error() == EFBIG; });
  for (size_t i = 0; i < paths_.size(); ++i) {
    reasons += (i > 0 ? ", '" : "'") + options_.path_names[i] + "' is " + StateName(static_cast<PathIndex>(i));
    const int error = paths_[i].health.error();
    if (error != 0) reasons += " (" + std::generic_category().message(error) + ")";
  }
  return limited ? reasons + "; raise LimitFSIZE= (RLIMIT_FSIZE)" : reasons;
}

void Scheduler::FailStuck() {
  const bool full = std::all_of(paths_.begin(), paths_.end(), [](const PathState& path) { return path.health.full(); });
  std::vector<BlockOwner*> waiting;
  const auto look = [&](BlockOwner& owner) {
    if (!owner.queue.empty() && owner.queue.front()->left > 0) waiting.push_back(&owner);
  };
  for (const auto& [id, session] : sessions_) {
    if (session->ending) continue;
    for (const auto& [handle, subgroup] : session->subgroups) look(*subgroup);
    if (!IsStore(id)) continue;
    for (const auto& [pointer, object] : static_cast<ObjectStore&>(*session).objects) look(*object);
  }
  for (BlockOwner* owner : waiting) {
    Failure failure = Fail(full && owner->object() != nullptr ? -ENOSPC : MLPO_E_IO,
                           "no path can take a block, so no buffer becomes free: " + WhyNotWritten());
    failure.os_errno = paths_.front().health.error();
    Op& op = *owner->queue.front();
    FailOp(op, std::move(failure));
    if (op.active == 0) Advance(*owner);
  }
}

}  // namespace mlpo
