// Session: the scheduler's view of one connected rank.
//
// Owner: the data thread.
#pragma once

#include <boost/intrusive/set.hpp>
#include <map>
#include <memory>
#include <vector>

#include "daemon/scheduler/block.h"
#include "daemon/scheduler/placement.h"

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

struct Session {
  SessionId id = 0;
  std::vector<FileId> files;  // per path
  std::map<SubgroupId, std::unique_ptr<Subgroup>> subgroups;
  std::vector<ExtentList> extents;  // per path
  std::vector<PendingSet> pending;  // per path to read from; the last one: blocks that are not read
  double granted_bytes = 0;         // buffers given so far; the session that has had least is next
  uint64_t parameters = 0;
  uint64_t in_flight = 0;   // transfers, and work that workers have
  uint64_t unanswered = 0;  // requests
  uint64_t skipped_steps = 0;
  bool ending = false;
};

}  // namespace mlpo
