// SessionHost: what session/ asks of the rest of the daemon. session_hosting.h answers.
//
// All calls come from the main thread and return at once; every `done` is called later, in the main thread, exactly
// once, also after the session has ended.
#pragma once

#include <atomic>
#include <functional>
#include <memory>

#include "daemon/base/status.h"
#include "daemon/session/areas.h"
#include "daemon/session/arena.h"
#include "daemon/types/checkpoint.h"
#include "daemon/types/session_identity.h"
#include "daemon/types/subgroup_spec.h"

namespace mlpo {

class SessionHost {
 public:
  virtual ~SessionHost() = default;
  // The client has mapped its ring: submissions may be read.
  virtual void SessionReady(const SessionIdentity& identity, std::shared_ptr<Areas> areas) = 0;
  // That the subgroup is cut into.
  virtual uint32_t BlockCount(const SubgroupSpec& spec) const = 0;
  // Makes the session's files if need be and reserves room for the subgroup on the paths.
  virtual void PrepareStorage(const SessionIdentity& identity, const SubgroupSpec& spec,
                              std::function<void(Status)> done) = 0;
  // That room is not needed after all: the client of a session that lives was refused.
  virtual void ReturnStorage(SessionId session, const SubgroupSpec& spec) = 0;
  // Memory for the session's arena; slow for large ones. Stops early when *cancelled.
  virtual void AllocateArena(uint64_t bytes, int numa_node, std::shared_ptr<std::atomic<bool>> cancelled,
                             std::function<void(Result<std::shared_ptr<Memfd>>)> done) = 0;
  // From now on the subgroup may be used; `done` before the client is told.
  virtual void AddSubgroup(SessionId session, SubgroupSpec spec, std::function<void()> done) = 0;
  virtual void SetStaging(SessionId session, std::byte* data, uint64_t bytes, std::function<void()> done) = 0;
  // Makes the files of the rank's part, and room on the paths; then SNAPSHOT with the handle may come.
  virtual void BeginCheckpoint(const SessionIdentity& identity, const CheckpointRequest& request,
                               std::function<void(Result<CheckpointBegun>)> done) = 0;
  // Finds a checkpoint for the session's subgroups; then RESTORE with the handle may come.
  virtual void BeginRestore(const SessionIdentity& identity, const RestoreRequest& request,
                            std::function<void(Result<RestoreBegun>)> done) = 0;
  // A session that was ready has ended. Answered by SessionServer::SessionGone when nothing of it is in use.
  virtual void SessionEnded(const SessionIdentity& identity) = 0;
  // Frees memory that may be large, in the housekeeping thread.
  virtual void Dispose(std::shared_ptr<void> memory) = 0;
};

}  // namespace mlpo
