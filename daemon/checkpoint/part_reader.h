// PartReader: fills blocks of one subgroup from the parts of a checkpoint, as a plan says, and compares what it reads
// with its hashes.
//
// What has been compared is what is used: values are taken from the memory that was hashed, and never read again
// without being compared again. A stored block that is needed in pieces is read whole the first time; then the hashes
// of its pieces of 65536 elements are known, and after that only the pieces that are needed are read and compared.
// Thread-safe: several threads fill blocks at a time; each call blocks on storage and needs a piece's memory.
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
#include <tuple>
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

// What all readers of one restore have together: open files, and hashes of pieces. Thread-safe.
class OpenParts {
 public:
  using BlockKey = std::tuple<uint32_t, uint32_t, uint32_t>;  // places of part, subgroup and block in the plan's parts
  using Pieces = std::shared_ptr<const std::vector<uint64_t>>;

  explicit OpenParts(PartFileOpener open) : open_(std::move(open)) {}
  OpenParts(const OpenParts&) = delete;
  OpenParts& operator=(const OpenParts&) = delete;

  Result<std::shared_ptr<const UniqueFd>> FileOf(uint32_t part, uint32_t file);
  // Of a block that has been compared, in the order of block_hash.h; nullptr: of one that has not.
  Pieces PiecesOf(const BlockKey& block);
  void Keep(const BlockKey& block, Pieces pieces);

  // So that tests see that nothing is read twice, or that is not wanted.
  void CountRead(uint64_t bytes) { read_bytes_.fetch_add(bytes, std::memory_order_relaxed); }
  uint64_t read_bytes() const { return read_bytes_.load(std::memory_order_relaxed); }

 private:
  using Key = std::pair<uint32_t, uint32_t>;  // part, file
  struct OpenFile {
    std::shared_ptr<const UniqueFd> fd;
    std::list<Key>::iterator used;
  };

  const PartFileOpener open_;
  std::atomic<uint64_t> read_bytes_{0};
  std::mutex mutex_;
  std::map<Key, OpenFile> files_;      // guarded by mutex_
  std::list<Key> by_use_;              // likewise; the one used last at the back
  std::map<BlockKey, Pieces> pieces_;  // likewise
};

class PartReader {
 public:
  // Where a block's elements go: three arrays of as many FP32 values.
  struct Target {
    std::byte* arrays[3] = {};
  };

  PartReader(std::shared_ptr<const RestorePlan> plan, std::shared_ptr<OpenParts> open)
      : plan_(std::move(plan)), open_(std::move(open)) {}

  // Elements [first, first + count) of the plan's subgroup. *stored: which arrays may have something else than zeros,
  // as in PartBlock. The error names file, subgroup and block; what is in the target then is worth nothing.
  Status Fill(uint64_t first, uint64_t count, const Target& target, uint8_t* stored);

  const RestorePlan& plan() const { return *plan_; }

 private:
  // `runs`: of one stored block.
  Status FillFrom(std::vector<SourceRun>& runs, uint64_t first, const Target& target, uint8_t* stored);
  Status FillHashed(const std::shared_ptr<const UniqueFd>& file, const std::vector<SourceRun>& runs, uint64_t first,
                    const Target& target);
  std::string Shown(const SourceRun& run) const;

  const std::shared_ptr<const RestorePlan> plan_;
  const std::shared_ptr<OpenParts> open_;
};

}  // namespace mlpo
