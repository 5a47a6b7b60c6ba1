// StateSave: one session's state on its way into a checkpoint; Pin: one block of it. Data only; scheduler.h has the
// rules.
//
// A pin holds the extent that the block had when the state was taken. While the block has not been updated since, both
// use it; from then on it is the pin's alone, and goes when the block has been copied, or the save has ended.
//
// Owner: the data thread.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "daemon/base/counters.h"
#include "daemon/scheduler/block.h"
#include "daemon/scheduler/copy_pace.h"
#include "daemon/types/ids.h"
#include "daemon/types/request.h"

namespace mlpo {

struct StateSave;

struct Pin {
  StateSave* save = nullptr;
  Block* block = nullptr;  // nullptr: it has been updated, or its session has ended
  SubgroupId subgroup = 0;
  uint32_t place = 0;        // of the subgroup among the save's, in the order of handles; once all are pinned
  uint32_t index = 0;        // of the block
  uint64_t count = 0;        // elements
  uint8_t parts = 0;         // of the state; the others are all zero
  Extent extent;             // path kNone: nothing is stored, or it has been given back
  uint64_t first_byte = 0;   // of the extent, where the parts are
  uint64_t bytes = 0;        // of them
  bool hashed = false;       // `hash` is known: with integrity
  uint64_t hash = 0;         // of what was written: "xxh3-64k" of checkpoint/block_hash.h
  bool again = false;        // what was read was not that, and is read once more
  bool in_flight = false;    // its copy is
  uint64_t part_offset = 0;  // in the part's data file, if it is copied
};

// What has become of a pin before copying begins.
struct PinPlace {
  bool there = false;        // in the part already, with its extent's file or as a clone
  uint64_t part_offset = 0;  // else: where its copy goes
};

struct StateSave {
  enum class Phase : uint8_t {
    kBegun,    // TAKE has not come
    kTaking,   // dirty blocks are being flushed, and extents pinned
    kLeaving,  // pinned; writes into files that will be handed over have still to end
    kTaken,    // what is on persistent paths is being cloned or handed over
    kCopying,  // the others are being copied
    kCopied,   // all of them are, or it has failed and nothing of it is in flight; it waits for SaveEnded
  };

  StateSave(uint64_t i, Session* s, SessionId n, uint32_t u, uint32_t h, std::shared_ptr<CopyPace> p, int64_t now_ns)
      : id(i), session(s), session_id(n), uid(u), handle(h), moved_ns(now_ns), pace(std::move(p)) {}

  const uint64_t id;  // never reused in a daemon's life
  Session* session;   // nullptr: it has ended
  const SessionId session_id;
  const uint32_t uid;     // whose it is
  const uint32_t handle;  // that the client names it by
  Phase phase = Phase::kBegun;
  int64_t moved_ns;                // when something was last done for it, by a path, its target or its thread
  size_t subgroups = 0;            // that the session had when it began
  uint32_t subgroups_left = 0;     // kTaking: that have not been pinned
  std::vector<FileId> next_files;  // per path; kNone: the session goes on in the one it has
  std::vector<FileId> old_files;   // likewise: those that it has left, once it is pinned
  std::deque<Pin> pins;            // in order of subgroups and blocks within each; they stay where they are
  std::map<SubgroupId, std::vector<int64_t>> steps;  // of each subgroup's tensors, when it was pinned
  std::vector<std::deque<Pin*>> waiting;             // per path: to be copied
  uint32_t in_flight = 0;                            // copies
  int64_t starved_ns = 0;                            // since when nothing gives them a buffer; 0: not so
  uint64_t turn = 0;                                 // when it last began one: the highest is the last
  uint64_t bytes = 0;                                // pinned; once copying has begun, to be copied
  uint64_t copied_bytes = 0;
  Failure failure;               // the first
  std::optional<Request> take;   // not answered yet
  std::optional<Request> saved;  // likewise
  const std::shared_ptr<CopyPace> pace;
  RateMeter rate;  // of copied bytes
};

}  // namespace mlpo
