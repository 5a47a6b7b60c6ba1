#include "client/src/session.h"

#include <errno.h>
#include <stdlib.h>

#include "client/src/error.h"
#include "client/src/subgroup.h"
#include "client/src/versioned_struct.h"

int mlpo_client::CheckProcess() const {
  if (!InChild()) return 0;
  return mlpo::client::Fail(MLPO_ERR_FORKED, "the client belongs to process %d; process %d must connect itself",
                            static_cast<int>(creator), static_cast<int>(getpid()));
}

void mlpo_client::Unref() {
  if (references.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  ring.ReleaseMemory();
  socket.ReleaseMemory();
  const bool in_child = InChild();
  mark.Close();
  // In a child the descriptors are the child's own business (it may have closed and reused them), and a lock that
  // another thread held at the fork cannot be destroyed.
  if (!in_child) this->~mlpo_client();
  free(this);
}

void mlpo_subgroup::FreeIfUnused() {
  if (!freed || flights != 0 || unposted != 0) return;
  if (slot != nullptr) {
    if (!MayGiveSlotBack()) return;  // the daemon goes on needing it: LentArea::Close frees the subgroup
    client->lent.GiveBack(this);
  }
  free(this);
}

void mlpo_subgroup::SettleSlot() {
  if (slot == nullptr || !window_over || !MayGiveSlotBack()) return;
  client->lent.GiveBack(this);
}

using mlpo::client::Fail;
using mlpo::client::MutexLock;

extern "C" {

int mlpo_client_close(mlpo_client* client) {
  if (client == nullptr) return Fail(-EINVAL, "client is NULL");
  if (int code = client->CheckProcess(); code != 0) return code;
  mlpo::client::Failure closed;
  closed.Set(MLPO_ERR_CLOSED, "%s", mlpo_strerror(MLPO_ERR_CLOSED));
  {
    MutexLock lock(client->ring.lock());
    if (client->ring.end_code() == MLPO_ERR_CLOSED) return 0;
    client->ring.Close(closed);
    client->ring.AwaitNoSleeper();
  }
  client->socket.Bye();
  return 0;
}

void mlpo_client_free(mlpo_client* client) {
  if (client == nullptr) return;
  if (!client->InChild()) {
    mlpo_client_close(client);
    client->staging.Close();
    {
      MutexLock lock(client->ring.lock());
      client->lent.Close();
    }
    client->socket.Close();
    client->client_area.Unmap();
    client->daemon_area.Unmap();
    client->doorbell.Reset();
  }
  client->Unref();
}

int mlpo_client_info(mlpo_client* client, struct mlpo_client_info* info) {
  if (client == nullptr) return Fail(-EINVAL, "client is NULL");
  if (int code = client->CheckProcess(); code != 0) return code;
  struct mlpo_client_info full = {};
  full.struct_size = sizeof full;
  full.session = client->session;
  full.generation = client->generation;
  full.block_elements = client->block_elements;
  full.rank = client->rank;
  full.world_size = client->world_size;
  full.ring_entries = client->ring.entries();
  full.arena_bytes = client->socket.arena_bytes();
  full.lost_wakeups = client->ring.lost_wakeups();
  full.socket = client->socket_path;
  full.job = client->job;
  full.daemon_uid = client->daemon_uid;
  return mlpo::client::GiveStruct(full, info, "mlpo_client_info");
}

int mlpo_client_await(mlpo_client* client, uint64_t* seen, int64_t timeout_ns) {
  if (client == nullptr || seen == nullptr) return Fail(-EINVAL, "client or seen is NULL");
  if (int code = client->CheckProcess(); code != 0) return code;
  MutexLock lock(client->ring.lock());
  const int code = client->ring.WaitForEnds(*seen, mlpo::client::Deadline::In(timeout_ns));
  *seen = client->ring.ended();
  return code;
}

int mlpo_client_arena(mlpo_client* client, uint32_t index, void** base, uint64_t* bytes) {
  if (client == nullptr || base == nullptr || bytes == nullptr) return Fail(-EINVAL, "client, base or bytes is NULL");
  if (int code = client->CheckProcess(); code != 0) return code;
  if (client->socket.ArenaPiece(index, base, bytes)) return 0;
  return Fail(-ENOENT, "the arena has no piece %u", index);
}

int mlpo_client_alive(mlpo_client* client) {
  if (client == nullptr) return Fail(-EINVAL, "client is NULL");
  if (int code = client->CheckProcess(); code != 0) return code;
  MutexLock lock(client->ring.lock());
  client->ring.Reap();
  client->ring.ProbeSession();
  return client->ring.CheckOpen();
}

}  // extern "C"
