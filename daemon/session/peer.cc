#include "daemon/session/peer.h"

#include <grp.h>
#include <limits.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <fstream>

#include "proto/abi.h"
#include "proto/status.h"

#ifndef SO_PEERGROUPS
#define SO_PEERGROUPS 59
#endif

namespace mlpo {

Result<Peer> PeerOf(int socket) {
  ucred credentials;
  socklen_t bytes = sizeof credentials;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &bytes) != 0) {
    return Status::Errno(errno, "SO_PEERCRED of a client");
  }
  Peer peer;
  peer.pid = credentials.pid;
  peer.uid = credentials.uid;
  peer.groups.push_back(credentials.gid);
  std::vector<gid_t> groups(NGROUPS_MAX);
  bytes = static_cast<socklen_t>(groups.size() * sizeof(gid_t));
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERGROUPS, groups.data(), &bytes) == 0) {
    peer.groups.insert(peer.groups.end(), groups.begin(), groups.begin() + bytes / sizeof(gid_t));
  }
  return peer;
}

Status CheckMayConnect(const Peer& peer, const std::string& group) {
  if (peer.uid == 0 || peer.uid == ::geteuid()) return Status();
  if (!group.empty()) {
    const ::group* entry = ::getgrnam(group.c_str());
    if (entry != nullptr && std::find(peer.groups.begin(), peer.groups.end(), entry->gr_gid) != peer.groups.end()) {
      return Status();
    }
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

bool IsName(const std::string& name) {
  if (name.empty() || name.size() > MLPO_MAX_JOB) return false;
  const auto word = [](unsigned char c) { return c < 128 && (std::isalnum(c) || c == '_'); };
  return word(static_cast<unsigned char>(name[0])) && std::all_of(name.begin(), name.end(), [&](char c) {
           return word(static_cast<unsigned char>(c)) || c == '.' || c == '-';
         });
}

}  // namespace mlpo
