// Finds and removes what dead daemons and sessions of one <uid>/<node> left on a path.
//
// Removed is only
// - <client uid>-<job>/<rank>-<generation>/state whose valid header says the same node, uids, job, rank and generation
//   as its place, or that is empty: its daemon was killed before it had its header;
// - record.json.new, probe and .mlpo-now-* beside these folders: what was being made when a daemon was killed;
// - folders of this layout that are empty then.
// Everything else stays, and is reported: nothing that has another's header, belongs to another user, is a link, or is
// in use. Whoever calls holds the lock of <uid>/<node>, or is the daemon that does. May block as the file system does.
#pragma once

#include <functional>
#include <string>

#include "daemon/base/status.h"
#include "daemon/io/path.h"
#include "daemon/types/gc_report.h"

namespace mlpo {

struct CleanupOptions {
  bool dry_run = false;  // says what it would do
  // Sessions whose files are in use; nullptr: none is.
  std::function<bool(const FileOwner& owner)> is_live;
  // For what is recorded in this <uid>/<node> and lies elsewhere: parts of checkpoints that were never finished. Adds
  // to the report; nullptr: there is no such record.
  std::function<Status(int node_fd, bool dry_run, GcReport* report)> journal;
};

// `shown`: <directory>/mlpo/<uid>/<node>.
Result<GcReport> CleanScratch(int node_fd, const std::string& node, const std::string& shown,
                              const CleanupOptions& options);

// The same for a node whose daemon is gone, on a file system that several share: takes that node's lock meanwhile.
//
// Where locks hold on one host only (NFS, Lustre without -o flock) a free lock proves nothing. So the node counts as
// dead only if its lock is free, and was taken on this host or has not been touched for kDeadAfter, as it is by a
// daemon once a minute (Path::Beat), by the file system's clock. Else EBUSY with who has it. A node that never was is
// an empty report.
inline constexpr int64_t kDeadAfterS = 15 * 60;
Result<GcReport> CleanNode(const std::string& directory, const std::string& node, const CleanupOptions& options);

}  // namespace mlpo
