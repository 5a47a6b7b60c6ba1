// BlockRestore: fills one block of a RESTORE from the parts of a checkpoint, and its parameters in the slot.
//
// Made and finished by the data thread; Run in a reader's thread, since it waits for storage. What is read goes into
// memory of its own first: files that hang can be given up then, and buffer and slot be used for something else. The
// scheduler's rules keep both until Finish, or Abandon.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include "daemon/checkpoint/part_reader.h"
#include "daemon/scheduler/block.h"
#include "daemon/scheduler/scheduler.h"

namespace mlpo {

class BlockRestore {
 public:
  BlockRestore(const Op& op, Block& block, std::byte* buffer, std::shared_ptr<PartReader> reader);
  // False: it was given up meanwhile; Finish is not to be called.
  bool Run();
  void Finish(Scheduler& scheduler, int64_t now_ns);
  // Never waits. False: it has ended, or is about to, and Finish will be called. True: it uses neither buffer nor slot
  // any more, and the block is the caller's to end.
  bool Abandon();
  bool done();
  Block& block() const { return block_; }

 private:
  Block& block_;                        // for Finish; Run does not look at it
  std::shared_ptr<PartReader> reader_;  // until the end of Run: closing its files may block
  const uint64_t first_;                // element of the subgroup
  const uint64_t count_;
  const uint64_t part_bytes_;
  std::byte* const state_;  // three arrays of part_bytes_ each
  const mlpo_dtype dtype_;
  std::byte* const param_;  // of element first_; nullptr: the subgroup has no slot of its own
  uint8_t stored_ = kStoredNothing;
  Failure failure_;
  std::mutex mutex_;
  bool abandoned_ = false;  // guarded by mutex_
  bool done_ = false;       // likewise
};

}  // namespace mlpo
