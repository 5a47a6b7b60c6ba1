#include "daemon/session/peer.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>

#include "proto/abi.h"
#include "proto/status.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

namespace mlpo {

Result<UniqueFd> PeerPidfd(int socket) {
  int fd = -1;
  socklen_t bytes = sizeof fd;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, &fd, &bytes) == 0) return UniqueFd(fd);
  if (errno != ESRCH) return UniqueFd();
  return Status::Errno(errno, "asking for the client's pidfd");
}

Status CheckMayConnect(const Peer& peer, const std::string& group) {
  if (peer.uid == 0 || peer.uid == ::geteuid()) return Status();
  if (!group.empty()) {
    Result<gid_t> gid = GroupByName(group);
    if (gid.ok() && peer.InGroup(*gid)) return Status();
  }
  return Status(-EACCES, "user " + std::to_string(peer.uid) + " may not use the daemon of user " +
                             std::to_string(::geteuid()) +
                             (group.empty() ? ": set [daemon] group, or start a daemon of your own"
                                            : ": join group '" + group + "', or start a daemon of your own"));
}

Status CheckPidfd(int fd, const Peer& peer) {
  std::ifstream info("/proc/self/fdinfo/" + std::to_string(fd));
  std::string line;
  while (std::getline(info, line)) {
    if (line.rfind("Pid:", 0) != 0) continue;
    const long pid = std::strtol(line.c_str() + 4, nullptr, 10);
    if (pid <= 0 || pid == peer.pid) return Status();
    return Status(MLPO_E_PROTOCOL, "the pidfd of HELLO is of process " + std::to_string(pid) + ", not of the client");
  }
  return Status(MLPO_E_PROTOCOL, "the descriptor of HELLO is not a pidfd");
}

bool HasEnded(int pidfd) {
  pollfd entry = {pidfd, POLLIN, 0};
  return ::poll(&entry, 1, 0) > 0;
}

bool HasHungUp(int socket) {
  pollfd entry = {socket, POLLRDHUP, 0};
  return ::poll(&entry, 1, 0) > 0 && (entry.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

}  // namespace mlpo
