// Which checkpoints are in a directory, and which of them are complete: by the heads of the manifests alone.
//
// A checkpoint is complete exactly when one attempt has a part of each rank, and all of them agree on job, tag, step
// and world size. What is not is never counted. Blocks; a thread of a save or restore, or a tool. The rules by which
// several keep house in one directory: proto/FORMAT.md, Checkpoints.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "daemon/base/status.h"
#include "daemon/checkpoint/manifest.h"

namespace mlpo {

struct FoundAttempt {
  AttemptId id;
  std::map<uint32_t, PartHead> parts;  // by rank; at least one
  std::string wrong;                   // why it can never be complete: its parts contradict each other

  const PartHead& head() const { return parts.begin()->second; }  // of its lowest rank
  bool complete() const { return wrong.empty() && parts.size() == head().world_size; }
};

struct FoundTag {
  std::string tag;
  std::vector<FoundAttempt> attempts;        // that have a manifest, the one that began first in front
  std::map<AttemptId, uint32_t> unfinished;  // data files of parts without a manifest
  uint32_t asides = 0;                       // files that clients have made and not given a name
  // What is there and is not ours, is another user's who is not believed, or cannot be read; with the reason.
  std::vector<std::string> strange;
};

// Heads of whatever parts, each with the rank of its folder.
std::vector<FoundAttempt> GroupParts(const std::vector<PartHead>& heads);

// Whether `a` began after `b`, another attempt of the tag; the same for everyone who asks. The step does not count: who
// has gone back to an earlier one saves over a later one.
bool IsLater(const FoundAttempt& a, const FoundAttempt& b);
// The complete attempt that counts: the one that began last. nullptr if there is none.
const FoundAttempt* CompleteAttempt(const FoundTag& found);
// The one with this id; nullptr if it has no manifest there.
const FoundAttempt* FindAttempt(const FoundTag& found, const AttemptId& id);

// Of one tag's folder. ENOENT if it is not there, EPERM if it is that of somebody who is not believed.
Result<FoundTag> ScanTag(int directory_fd, const std::string& tag, const std::string& shown);
// Of all of a directory's folders whose names are tags and that have a part in them, or the beginning of one.
Result<std::vector<FoundTag>> ScanDirectory(int directory_fd, const std::string& shown);
// The one to go on with: of those of this job, if there are any, the one of the highest step, of equal ones that began
// last. nullptr if none is complete.
const FoundTag* NewestTag(const std::vector<FoundTag>& found, const std::string& job);

// The manifest of one part, whole. `part_fd` is its folder.
Result<Manifest> ReadManifest(int part_fd, const AttemptId& attempt, const std::string& shown);

// Whether the header of a working file that was handed over is that of `origin`: io's affair.
using WorkingHeaderCheck = std::function<Status(int fd, const WorkingOrigin& origin)>;
// Whether one file of a part, open for reading, is as long as the manifest says, and has the header it should.
Status CheckFile(int fd, const PartHead& head, const PartFile& file, const WorkingHeaderCheck& working,
                 const std::string& shown);
// Whether each file of the part is there, regular, as long as the manifest says, and has the header it should.
Status CheckFiles(int part_fd, const Manifest& manifest, const WorkingHeaderCheck& working, const std::string& shown);
// What the heads of a complete attempt do not say: whether its manifests are whole, and their files there. Reads all of
// them. `shown`: of the directory.
Status CheckAttempt(int directory_fd, const FoundAttempt& attempt, const WorkingHeaderCheck& working,
                    const std::string& shown);

// Whose working file one was that was handed over, by its header: io's affair. EINVAL if it has none.
using WorkingHeaderReader = std::function<Result<WorkingOrigin>(int fd)>;

}  // namespace mlpo
