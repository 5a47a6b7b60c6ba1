// The handshake: HELLO, WELCOME with the ring's areas, READY.
#pragma once

#include "client/src/clock.h"
#include "client/src/session.h"

namespace mlpo::client {

struct HandshakeWishes {
  uint32_t ring_entries = 0;
  uint64_t arena_bytes = 0;
  int32_t numa_node = -1;  // where the arena is wanted
};

// Connects client->socket_path and makes the session of client->job, rank, world_size. On failure *client holds nothing
// but what it held before. While I/O of the rank's previous session is under way the daemon lets the client wait.
int Handshake(mlpo_client* client, const HandshakeWishes& wishes, Deadline deadline);

}  // namespace mlpo::client
