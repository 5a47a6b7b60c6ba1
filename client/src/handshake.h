// The handshake: HELLO, WELCOME with the ring's areas, READY.
#pragma once

#include "client/src/clock.h"
#include "client/src/session.h"

namespace mlpo::client {

struct HandshakeWishes {
  uint32_t ring_entries = 0;
  uint64_t arena_bytes = 0;
};

// Connects client->socket_path and makes the session of client->job, rank, world_size. On failure *client holds nothing
// but what it held before, and the handshake may be tried again. *busy: the daemon refused because the rank's previous
// session has not ended.
int Handshake(mlpo_client* client, const HandshakeWishes& wishes, Deadline deadline, bool* busy);

}  // namespace mlpo::client
