// Session: the scheduler's view of one connected rank; also of a job's objects (ObjectStore in object.h).
//
// Owner: the data thread.
#pragma once

#include <boost/intrusive/set.hpp>
#include <compare>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "daemon/scheduler/block.h"
#include "daemon/scheduler/fair_share.h"
#include "daemon/scheduler/placement.h"
#include "daemon/scheduler/step_record.h"

namespace mlpo {

// Pending blocks go by priority, then in order of submission, then of their place in the subgroup.
struct PendingOrder {
  bool operator()(const Block& a, const Block& b) const {
    if (a.want->priority() != b.want->priority()) return a.want->priority() < b.want->priority();
    if (a.want->sequence != b.want->sequence) return a.want->sequence < b.want->sequence;
    return a.index < b.index;
  }
};
using PendingSet = boost::intrusive::set<
    Block, boost::intrusive::member_hook<Block, boost::intrusive::set_member_hook<>, &Block::pending_hook>,
    boost::intrusive::compare<PendingOrder>>;

// An object that a session has open.
struct ObjectHandle {
  Object* object = nullptr;
  bool writes = false;
};

// A block that an UPDATE has not asked for yet, where the order is not the scheduler's own; the least first.
struct InLine {
  uint32_t priority = 0;
  int64_t sequence = 0;  // of the UPDATE, negative in steps that go backwards; the block's index likewise
  int64_t index = 0;
  Op* op = nullptr;
  auto operator<=>(const InLine&) const = default;
};

struct TrainingJob;
struct ObjectStore;
struct StateSave;

// How the last checkpoint that a session began has ended.
struct LastSave {
  uint32_t handle = 0;
  Failure failure;
  bool complete = false;  // all ranks' parts were there
};

// Buffers that have blocks of a session, a job or a user, and those of them that are being written.
struct PoolUse {
  uint64_t held = 0;
  uint64_t flushing = 0;
};

struct Session {
  explicit Session(size_t paths) : steps(paths) {}
  virtual ~Session() = default;
  SessionId id = 0;
  TrainingJob* job = nullptr;  // nullptr: it is ending
  uint32_t rank = 0;
  uint64_t features = 0;
  int numa_node = -1;         // where its arena is wanted; -1: not known
  std::vector<FileId> files;  // per path
  std::map<SubgroupId, std::unique_ptr<Subgroup>> subgroups;
  std::map<uint32_t, ObjectHandle> handles;
  std::map<uint64_t, Subgroup*> slots;  // of the lent area, by offset, that are in use
  std::vector<ExtentMap> extents;       // per path, in its file
  std::vector<uint64_t> placed_bytes;   // per path: of the extents that its blocks have, or are being written to
  // Files that it has left to a checkpoint: bytes of them that its blocks, or pins, still have.
  std::map<std::pair<PathIndex, FileId>, uint64_t> old_files;
  std::set<InLine> line;            // Options::order is not kAdaptive: blocks of UPDATEs that nobody wants yet
  std::vector<PendingSet> pending;  // per path to read from; the last one: blocks that are not read
  BlockList dirty;                  // kDirty and not wanted, the last used at the back
  std::vector<BlockList> away;      // per path: kAway, not wanted, with an update behind them; order of use, nearly
  std::vector<uint64_t> home_parameters;  // per path, of subgroups that are kept whole there
  Share share;                            // of what its job is given
  uint64_t parameters = 0;
  uint64_t in_flight = 0;   // transfers of its blocks, and work that workers do on them or for it
  uint64_t unanswered = 0;  // requests
  uint64_t skipped_steps = 0;
  uint32_t epoch = 0;     // the highest that an UPDATE has begun: its step
  int64_t step_ns = 0;    // when the first one did
  int64_t period_ns = 0;  // from the step before to this one; 0: not known
  SessionSteps steps;
  PoolUse use;
  StateSave* save = nullptr;    // the checkpoint that it has begun; there is one at a time
  std::deque<Block*> to_flush;  // blocks with `flush_for`, until their flush has begun
  std::optional<LastSave> last_save;
  std::map<uint32_t, bool> restores;  // handles; whether a subgroup has been filled by it, or is to be
  std::deque<Op*> restoring;          // RESTOREs that have begun, in their order
  bool ending = false;
  bool hangs = false;         // SchedulerActions::SessionHangs
  uint64_t restore_turn = 0;  // when a block of a RESTORE was last wanted: the highest is the last
};

// What the jobs of one user share.
struct PoolUser {
  PoolUse use;
  uint32_t jobs = 0;
};

// What the sessions of one job share.
struct TrainingJob {
  uint32_t uid = 0;
  std::string name;
  uint32_t sessions = 0;
  int64_t step_ns = 0;       // when one of them began its last step
  int64_t submitted_ns = 0;  // when the last UPDATE of one began
  Share share;
  std::vector<LeastUsed<Session>> sessions_waiting;  // by queue, as Session::pending
  uint32_t waiting_sessions = 0;
  double session_now = 0;        // `used` of the session that was served last, before
  ObjectStore* store = nullptr;  // the one in use; nullptr without objects
  PoolUse use;
  PoolUser* user = nullptr;
};

}  // namespace mlpo
