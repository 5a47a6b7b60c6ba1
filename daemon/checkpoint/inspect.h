// What a directory of checkpoints has, for `mlpo-ctl checkpoint`: list, verify, remove. As the user who asks, without a
// daemon. Blocks.
#pragma once

#include <optional>
#include <string>

#include "daemon/base/status.h"
#include "daemon/checkpoint/part_set.h"

namespace mlpo {

// JSON: {"directory", "checkpoints": [{"tag", "step", "job", "world_size", "parts", "attempt", "started_unix_ns",
// "state", "bytes", "problems"}]}. state: complete, incomplete, damaged (complete, and a file is missing or cut).
Result<std::string> ListCheckpoints(const std::string& directory, const WorkingHeaderCheck& working);

// Reads all of one checkpoint: every header, size and hash, and whether the parts make up whole tensors. nullopt: the
// newest complete one. JSON: {"directory", "tag", "step", "attempt", "ok", "bytes", "problems"}; ENOENT if there is
// none.
Result<std::string> VerifyCheckpoint(const std::string& directory, const std::optional<std::string>& tag,
                                     const WorkingHeaderCheck& working, bool* right);

// Removes everything of ours under a tag, complete or not; never what is being saved, what is somebody else's, nor what
// is no part. JSON: {"directory", "tag", "removed", "kept"}.
Result<std::string> RemoveCheckpoint(const std::string& directory, const std::string& tag,
                                     const WorkingHeaderReader& working, bool* all);

}  // namespace mlpo
