// What a client must be to have a session.
#pragma once

#include <string>

#include "daemon/base/status.h"
#include "daemon/base/unique_fd.h"
#include "daemon/base/unix_socket.h"

namespace mlpo {

// Success if root, our own uid or a member of `group` (empty: nobody else); else EACCES with what to do.
Status CheckMayConnect(const Peer& peer, const std::string& group);
// A pidfd of the process that connected, from the kernel; no descriptor where it has none to give (before Linux 6.5).
// The error is that the process has gone.
Result<UniqueFd> PeerPidfd(int socket);
// Whether the descriptor is a pidfd of the peer. One of a process that we cannot see (another pid namespace) passes.
Status CheckPidfd(int fd, const Peer& peer);
// Whether the process of a pidfd has ended.
bool HasEnded(int pidfd);
// Whether the other end of a socket is closed, whatever still waits to be read.
bool HasHungUp(int socket);

}  // namespace mlpo
