// SessionHosting: what sessions get from the rest of the daemon (SessionHost): a place in the data loop, room on the
// paths, memory for arenas, checkpoints and restores.
//
// Owns nothing: it passes on. Threads: SessionHost's calls come in main, return at once and are answered in main. Rings
// and subgroups are the data thread's; arenas' memory is made and freed in housekeeping; checkpoints have threads of
// their own.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "daemon/base/status.h"
#include "daemon/calibration_runs.h"
#include "daemon/checkpoint_runs.h"
#include "daemon/config/config.h"
#include "daemon/data_loop.h"
#include "daemon/io/buffer_pool.h"
#include "daemon/node_shares.h"
#include "daemon/session/session_host.h"
#include "daemon/session/session_server.h"
#include "daemon/storages.h"
#include "daemon/threads.h"

namespace mlpo {

class SessionHosting : public SessionHost {
 public:
  // Borrowed, as long as anything that was posted may be carried out.
  struct Parts {
    const Config* config = nullptr;
    Threads* threads = nullptr;
    DataLoop* loop = nullptr;
    CheckpointRuns* checkpoints = nullptr;
    const SessionServer* sessions = nullptr;
    Storages* storages = nullptr;
    CalibrationRuns* calibrations = nullptr;  // a session that comes ends one
    NodeShares* shares = nullptr;
    const BufferPool* pool = nullptr;
  };

  // Once, before the session server starts: which wants this first.
  void Connect(Parts parts) { parts_ = std::move(parts); }

  void SessionReady(const SessionIdentity& identity, std::shared_ptr<Areas> areas) override;
  uint32_t BlockCount(const SubgroupSpec& spec) const override;
  void PrepareStorage(const SessionIdentity& identity, const SubgroupSpec& spec,
                      std::function<void(Status)> done) override;
  void ReturnStorage(SessionId session, const SubgroupSpec& spec) override;
  void AllocateArena(uint64_t bytes, int numa_node, std::shared_ptr<std::atomic<bool>> cancelled,
                     std::function<void(Result<std::shared_ptr<Memfd>>)> done) override;
  void AddSubgroup(SessionId session, SubgroupSpec spec, std::function<void()> done) override;
  void SetStaging(SessionId session, std::byte* data, uint64_t bytes, std::function<void()> done) override;
  void BeginCheckpoint(const SessionIdentity& identity, const CheckpointRequest& request,
                       std::function<void(Result<CheckpointBegun>)> done) override;
  void BeginRestore(const SessionIdentity& identity, const RestoreRequest& request,
                    std::function<void(Result<RestoreBegun>)> done) override;
  void SessionEnded(const SessionIdentity& identity) override;
  void Dispose(std::shared_ptr<void> memory) override;

 private:
  Parts parts_;
};

}  // namespace mlpo
