// mlpo_client: a session with the daemon, and what belongs to it.
//
// Locks, in the order in which they are taken: staging turn, socket turn, ring lock. Lifetime: counted references, one
// of the caller's handle, one of each subgroup and request; the areas stay mapped until mlpo_client_free.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

#include "client/src/fd.h"
#include "client/src/fork_mark.h"
#include "client/src/lent_area.h"
#include "client/src/mapping.h"
#include "client/src/ring_end.h"
#include "client/src/session_socket.h"
#include "client/src/staging.h"
#include "mlpo/client.h"
#include "proto/abi.h"

struct mlpo_client {
  // Constant after mlpo_connect.
  pid_t creator = 0;
  mlpo::client::ForkMark mark;
  char socket_path[108] = {};
  char job[MLPO_MAX_JOB + 1] = {};
  uint32_t rank = 0;
  uint32_t world_size = 0;
  uint32_t block_elements = 0;
  uint64_t session = 0;
  uint64_t generation = 0;
  uint64_t features = 0;     // in force
  uint64_t arena_bytes = 0;  // its fixed limit; 0: it grows
  uint32_t daemon_uid = 0;

  mlpo::client::Mapping client_area;
  mlpo::client::Mapping daemon_area;
  mlpo::client::Fd doorbell;
  mlpo::client::RingEnd ring;
  mlpo::client::SessionSocket socket;
  mlpo::client::Staging staging;
  mlpo::client::LentArea lent;

  std::atomic<uint32_t> requests_met{0};  // RingEnd::checkpoint_requests when the last checkpoint began

  // acq_rel on the way down, so that whoever frees sees what the others did.
  std::atomic<uint32_t> references{1};

  bool InChild() const { return mark.InChild(); }
  // 0, or MLPO_E_FORKED. To be asked before any lock is taken: in a forked child locks may be held by nobody.
  int CheckProcess() const;
  void Ref() { references.fetch_add(1, std::memory_order_relaxed); }
  void Unref();
};
