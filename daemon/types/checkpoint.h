// What a client asks for with CHECKPOINT and RESTORE, and what it is told.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "daemon/base/close_elsewhere.h"
#include "daemon/types/ids.h"

namespace mlpo {

// Descriptors that a client of another user has passed, made by ShareForeign: whoever lets go of the last reference
// does not wait until they are closed. Everything else that is done with them may hang: the client may serve them.
using PassedFiles = ForeignFiles;

using AttemptBytes = std::array<uint8_t, 16>;

struct CheckpointRequest {
  std::string directory;
  std::string tag;
  uint64_t step = 0;
  AttemptBytes attempt{};  // all zero: the daemon chooses
  bool overwrite = false;
  uint32_t ranks_here = 0;       // of the job, connected to this daemon
  SessionId newest_session = 0;  // the last that anybody has
  PassedFiles files;             // the part's data file and manifest; nullptr: they are made in the directory
};

struct CheckpointBegun {
  AttemptBytes attempt{};
  uint64_t bytes = 0;  // that are copied at most
  uint32_t handle = 0;
};

struct RestoreRequest {
  std::string directory;
  std::string tag;         // "": the newest that is complete
  AttemptBytes attempt{};  // of the tag; all zero: the one that counts
  // All parts' manifests, then their data files; nullptr: they are looked for in the directory.
  PassedFiles files;
};

struct RestoreBegun {
  AttemptBytes attempt{};
  std::string tag;
  uint64_t step = 0;
  uint32_t world_size = 1;  // of those who saved
  uint32_t handle = 0;
};

}  // namespace mlpo
