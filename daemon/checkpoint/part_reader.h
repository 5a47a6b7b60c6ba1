// PartReader: fills blocks from the parts of a checkpoint, as a plan says, and compares what it reads with its hashes.
//
// A stored block is read whole and compared the first time that anything of it is needed; after that only what is
// needed is read, most often from the page cache. So however tensors are cut, no value is taken from a block that has
// changed. Thread-safe: several threads fill blocks at a time; each call blocks on storage and needs a piece's memory.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "daemon/base/status.h"
#include "daemon/base/unique_fd.h"
#include "daemon/checkpoint/restore_plan.h"

namespace mlpo {

// Reads a stored block and compares it with its hash, once more if it has another: EIO and the like, or EBADMSG if it
// has another then, too. `shown` names the file. A block that stores nothing is right.
Status CheckStoredBlock(int fd, const PartBlock& block, const std::string& shown);

// Opens a data file for reading: place of the part in the plan, place of the file in the part's manifest.
using PartFileOpener = std::function<Result<UniqueFd>(uint32_t part, uint32_t file)>;
// Files below <directory>/<tag>, which this process may read itself.
PartFileOpener FolderOpener(const std::string& directory, RestorePlan::Parts parts);

class PartReader {
 public:
  // Where a block's elements go: three arrays of as many FP32 values.
  struct Target {
    std::byte* arrays[3] = {};
  };

  PartReader(std::shared_ptr<const RestorePlan> plan, PartFileOpener open);

  // Elements [first, first + count) of the plan's subgroup. *stored: which arrays may have something else than zeros,
  // as in PartBlock. The error names file, subgroup and block.
  Status Fill(uint64_t first, uint64_t count, const Target& target, uint8_t* stored);

  const RestorePlan& plan() const { return *plan_; }
  uint64_t read_bytes() const { return read_bytes_.load(std::memory_order_relaxed); }

 private:
  using Key = std::pair<uint32_t, uint32_t>;  // part, file
  struct OpenFile {
    std::shared_ptr<const UniqueFd> fd;
    std::list<Key>::iterator used;
  };

  Result<std::shared_ptr<const UniqueFd>> FileOf(uint32_t part, uint32_t file);
  Status FillRun(const SourceRun& run, uint64_t first, const Target& target, uint8_t* stored);
  std::string Shown(const SourceRun& run) const;

  const std::shared_ptr<const RestorePlan> plan_;
  const PartFileOpener open_;
  std::atomic<uint64_t> read_bytes_{0};
  // Blocks that have been compared. Relaxed: who does not see it compares once more.
  std::vector<std::vector<std::unique_ptr<std::atomic<bool>[]>>> checked_;  // by part and subgroup
  std::mutex mutex_;
  std::map<Key, OpenFile> files_;  // guarded by mutex_
  std::list<Key> by_use_;          // guarded by mutex_; the one used last at the back
};

}  // namespace mlpo
