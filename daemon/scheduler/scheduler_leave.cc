// Scheduler: paths that are disabled, evacuated and enabled by command.
//
// A block leaves a path when it is written to another one. Most do so by themselves: an update gives a block a new
// place. For the others a round goes through all blocks, again and again until nothing is there: what is in memory is
// written, what is not is read first. A block that cannot be read stays, and is tried again in a later round.
#include <algorithm>
#include <tuple>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/base/clock.h"
#include "daemon/scheduler/object.h"
#include "daemon/scheduler/scheduler.h"
#include "daemon/scheduler/session.h"
#include "daemon/scheduler/state_save.h"

namespace mlpo {
namespace {

constexpr uint32_t kLooks = 256;  // blocks that one call looks at: with millions, others wait for it
constexpr int64_t kAmongOthersNs =
    100 * kNsPerMs;                    // from one block that is read to the next, while others want buffers
constexpr int64_t kPauseNs = kNsPerS;  // after a round that found nothing to be moved just then
constexpr int64_t kUnreadablePauseNs = 60 * kNsPerS;  // after one that found only what cannot be read

}  // namespace

std::string Scheduler::WhyNeeded(PathIndex index) const {
  std::string others;
  for (PathIndex i = 0; i < paths_.size(); ++i) {
    if (i == index) continue;
    if (paths_[i].health.MayWrite() && !IsHanging(i)) return "";
    others += (others.empty() ? "'" : ", '") + options_.path_names[i] + "' is " + StateName(i);
  }
  return others.empty() ? "it is the only path" : "no other path takes what is written: " + others;
}

void Scheduler::DisablePath(PathIndex path, int64_t now_ns) {
  Enter(now_ns);
  paths_[path].health.Disable(now_ns);
  Pump();
}

void Scheduler::EvacuatePath(PathIndex index, int64_t now_ns) {
  Enter(now_ns);
  PathState& path = paths_[index];
  path.health.Disable(now_ns);
  if (!path.leaving.on) {
    path.leaving.on = true;
    path.leaving.total_bytes = path.extent_bytes;
    KeepInMemory(index);
  }
  Pump();
}

void Scheduler::EnablePath(PathIndex index, int64_t now_ns) {
  Enter(now_ns);
  EndLeaving(&paths_[index].leaving);
  paths_[index].health.Enable(now_ns);
  StartProbes();
  Pump();
}

void Scheduler::EndEvacuations() {
  for (PathState& path : paths_) EndLeaving(&path.leaving);
}

// Blocks that it holds are written somewhere, some time.
void Scheduler::EndLeaving(Leaving* leaving) {
  Leaving ended;
  ended.held = leaving->held;
  ended.staying = leaving->staying;
  *leaving = ended;
}

void Scheduler::PumpLeaving() {
  for (PathIndex i = 0; i < paths_.size(); ++i) {
    Leaving& leaving = paths_[i].leaving;
    if (!leaving.on || leaving.told) continue;
    uint32_t looks = 0;
    while (looks < kLooks && now_ns_ >= leaving.again_ns && paths_[i].extent_bytes > 0) {
      const uint32_t before = looks;
      LeaveOne(i, &looks);
      if (looks == before) break;  // it has to wait for a buffer, or for a path
    }
    leaving.looks_on = looks >= kLooks;
    MaybeEvacuated(i);
  }
}

// When PumpLeaving goes on looking where it stopped so as not to hold up others.
int64_t Scheduler::NextLook() const {
  const auto looks_on = [](const PathState& path) {
    return path.leaving.on && !path.leaving.told && path.leaving.looks_on;
  };
  return std::any_of(paths_.begin(), paths_.end(), looks_on) ? now_ns_ : kNever;
}

// Looks at the next block of the round. *looks stays if that cannot be moved now: the round goes on there.
void Scheduler::LeaveOne(PathIndex index, uint32_t* looks) {
  Leaving& leaving = paths_[index].leaving;
  if (!std::exchange(leaving.begun, true)) {
    leaving.retries = now_ns_ >= leaving.retry_ns;
    if (leaving.retries) leaving.retry_ns = now_ns_ + kUnreadablePauseNs;
  }
  BlockOwner* const owner = NextOwner(&leaving);
  if (owner == nullptr) {
    ++*looks;
    return EndRound(&leaving);
  }
  if (leaving.block >= owner->blocks.size()) {
    ++*looks;
    ++leaving.owner;
    leaving.block = 0;
    return;
  }
  Block& block = owner->blocks[leaving.block];
  if (block.extent.path == index && !MoveOff(index, block)) return;
  ++leaving.block;
  ++*looks;
}

// The one that the round is at; sessions and what they have may have come and gone since the last look. nullptr: it has
// seen all.
BlockOwner* Scheduler::NextOwner(Leaving* at) {
  for (auto session = sessions_.lower_bound(at->session); session != sessions_.end(); ++session) {
    if (session->first != at->session) {
      at->session = session->first;
      at->owner = 0;
      at->block = 0;
    }
    BlockOwner* owner = nullptr;
    uint64_t number = 0;
    if (IsStore(session->first)) {
      const auto& objects = static_cast<ObjectStore&>(*session->second).objects;
      const auto object = objects.lower_bound(reinterpret_cast<const Object*>(at->owner));
      if (object != objects.end()) {
        owner = object->second.get();
        number = reinterpret_cast<uint64_t>(object->first);
      }
    } else {
      const auto& subgroups = session->second->subgroups;
      const auto subgroup = subgroups.lower_bound(static_cast<SubgroupId>(std::min<uint64_t>(at->owner, kNone)));
      if (subgroup != subgroups.end()) {
        owner = subgroup->second.get();
        number = subgroup->first;
      }
    }
    if (owner == nullptr) continue;
    if (number != at->owner) at->block = 0;
    at->owner = number;
    return owner;
  }
  return nullptr;
}

void Scheduler::EndRound(Leaving* at) {
  const int64_t pause_ns = at->held > 0 ? kAmongOthersNs : at->staying > 0 ? kUnreadablePauseNs : kPauseNs;
  if (!at->moved) at->again_ns = now_ns_ + pause_ns;
  at->session = 0;
  at->owner = 0;
  at->block = 0;
  at->moved = at->begun = false;
}

// False if it cannot be begun now. What somebody wants or has in motion is looked at in the next round.
bool Scheduler::MoveOff(PathIndex index, Block& block) {
  PathState& path = paths_[index];
  if (block.want != nullptr || block.owner->ending || block.lone_grad || IsGrowing(block)) return true;
  if (block.state == BlockState::kClean && block.nonzero & ~block.filled) DropBuffer(block);  // a gradient alone
  switch (block.state) {
    case BlockState::kFetching:
    case BlockState::kWorking:
    case BlockState::kFlushing:
      return true;
    case BlockState::kClean:
    case BlockState::kDirty:
      return StartFlush(block);
    case BlockState::kAway:
      if (block.stays && !path.leaving.retries) return true;
      break;
  }
  const bool others_wait = pending_ > 0 || working_ > 0;
  const uint32_t most = others_wait ? 1 : model_.QueueBlocks(index, Direction::kRead);
  if (path.leaving.held >= most || (others_wait && now_ns_ < path.leaving.read_ns + kAmongOthersNs)) return false;
  if (!MayStart(index, Direction::kRead, *block.owner->session)) return false;
  if (!HasBuffer()) {
    leaving_waits_ = true;  // something is flushed for it
    return false;
  }
  path.leaving.read_ns = now_ns_;
  path.leaving.staying -= std::exchange(block.stays, false);
  BufferIndex buffer;
  MLPO_CHECK(TakeBuffer(NodeOf(index), &buffer));
  LeaveLists(block);
  block.leaves = true;
  ++path.leaving.held;
  StartRead(block, buffer);
  return true;
}

// It has been read. If no other path takes it now, it waits among the dirty ones, and the round at it.
void Scheduler::Leave(Block& block) {
  if (block.state != BlockState::kDirty) return StopLeaving(block);  // it need not leave any more
  if (!StartFlush(block)) LookAgain(block);
}

// The round goes on at this block, if it has passed it: it could hold as many buffers as may be held, and with them
// what lies behind.
void Scheduler::LookAgain(const Block& block) {
  Leaving& at = paths_[block.extent.path].leaving;
  BlockOwner& owner = *block.owner;
  const uint64_t number =
      owner.object() != nullptr ? reinterpret_cast<uint64_t>(owner.object()) : owner.subgroup()->spec.id;
  if (std::tie(owner.session->id, number, block.index) >= std::tie(at.session, at.owner, at.block)) return;
  at.session = owner.session->id;
  at.owner = number;
  at.block = block.index;
}

// It is somebody's to move, or elsewhere.
void Scheduler::StopLeaving(Block& block) {
  if (!block.leaves) return;
  block.leaves = false;
  --paths_[block.extent.path].leaving.held;
}

// Its extent cannot be read, or is wrong: counted once, until it is given back.
void Scheduler::CannotLeave(Block& block) {
  Leaving& leaving = paths_[block.extent.path].leaving;
  if (!leaving.on || block.stays) return;
  block.stays = true;
  if (leaving.staying++ == 0) leaving.retry_ns = now_ns_ + kUnreadablePauseNs;
}

void Scheduler::MaybeEvacuated(PathIndex index) {
  PathState& path = paths_[index];
  if (path.extent_bytes > 0 || path.reads + path.writes > 0) return;
  path.leaving.told = true;
  for (auto& [id, session] : sessions_) {
    if (!session->files.empty()) session->files[index] = kNone;
  }
  // Nor does any go on there in another file: that goes, too.
  for (auto& [number, save] : saves_) save->next_files[index] = kNone;
  actions_->Evacuated(index);
}

}  // namespace mlpo
