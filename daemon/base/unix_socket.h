// Unix sockets: a listening AF_UNIX socket that is bound safely, and who is at the other end of a connection.
//
// BindUnixSocket owns the name from before it exists until the BoundSocket ends, and gives it its mode from the start:
//   - the folder must exist, belong to us or root, and be writable by nobody else (or be sticky, as /tmp is);
//   - "<path>.lock" is held with flock: a second daemon on the same path gets -EADDRINUSE;
//   - a socket that is there already is replaced only if it is ours and nobody listens on it;
//   - anything of another owner, or that is no socket, is left alone: -EPERM or -EEXIST.
// Any thread; errors name the path and what to do.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "daemon/base/status.h"
#include "daemon/base/unique_fd.h"

namespace mlpo {

// Unlinks the socket (if it is still the one that was bound) and then its lock file when it goes out of scope.
class BoundSocket {
 public:
  BoundSocket() = default;
  BoundSocket(UniqueFd fd, UniqueFd lock, std::string path, dev_t device, ino_t inode);
  BoundSocket(BoundSocket&& other) noexcept = default;
  BoundSocket& operator=(BoundSocket&& other) noexcept;
  ~BoundSocket();

  int fd() const { return fd_.get(); }  // borrowed; listening, non-blocking, close-on-exec
  const std::string& path() const { return path_; }

 private:
  void Close();

  UniqueFd fd_;
  UniqueFd lock_;
  std::string path_;
  dev_t device_ = 0;
  ino_t inode_ = 0;
};

// Whether the folder of `path` is one in which we may bind a socket (see above).
Status CheckSocketFolder(const std::string& path);

// `type`: SOCK_STREAM or SOCK_SEQPACKET. `mode`: of the socket file; with `group` the file is given to that group,
// before the mode lets the group in.
Result<BoundSocket> BindUnixSocket(const std::string& path, int type, mode_t mode,
                                   std::optional<gid_t> group = std::nullopt);

// The process that connected, as the kernel recorded it at connect().
struct Peer {
  pid_t pid = 0;  // for display only: 0 from another pid namespace
  uid_t uid = 0;
  std::vector<gid_t> groups;  // primary and supplementary

  bool InGroup(gid_t group) const;
};
Result<Peer> PeerOf(int connected_fd);

// The number of a group by name or by decimal number.
Result<gid_t> GroupByName(const std::string& name);

}  // namespace mlpo
