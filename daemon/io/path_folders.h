// The folders of a path, opened without following links, with owner and mode checked; and the lock of <uid>/<node>.
//
// Every function returns a descriptor that the caller owns. `shown` is the full name for messages. Errors carry the
// errno and say what to do. Main thread at start; CreateFile's folders in the housekeeping thread.
#pragma once

#include <string>

#include "daemon/base/status.h"
#include "daemon/base/unique_fd.h"

namespace mlpo {

// "<what> <shown>: <strerror>; <what to do about this errno>".
Status PathError(int error, const std::string& what, const std::string& shown);

// The directory that the user named: must exist, be a directory, readable and writable. A link to one is followed.
Result<UniqueFd> OpenPathDirectory(const std::string& directory);

// <directory>/mlpo, made with mode 1777 in one step. An existing one must be sticky, or writable by its owner alone.
Result<UniqueFd> OpenTopFolder(int directory_fd, const std::string& shown);

// A folder of ours with mode 0700, made if it is not there. A link, a file or a foreign owner in its place is an error.
Result<UniqueFd> OpenOwnFolder(int parent_fd, const std::string& name, const std::string& shown);

// Who a lock file says holds it.
struct NodeHolder {
  std::string text;  // "pid=.. uid=.. node=.. host=.. started=.."
  std::string host;
};
NodeHolder ReadHolder(int lock_fd);

// An exclusive flock, now or not at all: false with errno, EWOULDBLOCK if somebody else has it.
bool TryLock(int fd);

// Takes the lock of <uid>/<node> and writes the owner record. EBUSY names the holder. Held until the descriptor closes.
Result<UniqueFd> LockNodeFolder(int node_fd, const std::string& node, const std::string& shown);

}  // namespace mlpo
