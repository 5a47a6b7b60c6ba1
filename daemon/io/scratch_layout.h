// Names of the scratch folders: <directory>/mlpo/<daemon uid>/<node>/<client uid>-<job>/<rank>-<generation>/state;
// of a job's objects: objects-<number>/state.
//
// A name that comes from outside becomes part of a file name only if IsName (base/name.h) holds. No state; any thread.
#pragma once

#include <string>

#include "daemon/io/path.h"

namespace mlpo {

inline constexpr char kTopFolder[] = "mlpo";
inline constexpr char kStateFile[] = "state";
inline constexpr char kLockFile[] = "lock";
inline constexpr char kProbeFile[] = "probe";     // where the file system makes no nameless files
inline constexpr char kNowFile[] = ".mlpo-now-";  // and a number: made and removed at once
inline constexpr char kObjectsFolder[] = "objects";

inline std::string JobFolder(const FileOwner& owner) { return std::to_string(owner.client_uid) + "-" + owner.job; }
inline std::string RankFolder(const FileOwner& owner) {
  const std::string rank = owner.rank == kObjectsRank ? kObjectsFolder : std::to_string(owner.rank);
  return rank + "-" + std::to_string(owner.generation);
}

}  // namespace mlpo
