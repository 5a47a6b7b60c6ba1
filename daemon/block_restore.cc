#include "daemon/block_restore.h"

#include <cstring>
#include <utility>

#include "daemon/adam/kernel.h"
#include "daemon/scheduler/failure.h"
#include "proto/status.h"

namespace mlpo {

BlockRestore::BlockRestore(const Op& op, Block& block, std::byte* buffer, std::shared_ptr<PartReader> reader)
    : block_(block),
      reader_(std::move(reader)),
      first_(block.first),
      count_(block.count),
      part_bytes_(Scheduler::PartBytes(block.count)),
      state_(buffer + Scheduler::GradientBytes(op.subgroup()->spec, block.count)),
      dtype_(op.subgroup()->spec.dtype),
      param_(op.subgroup()->spec.param == nullptr
                 ? nullptr
                 : op.subgroup()->spec.param + block.first * ElementBytes(op.subgroup()->spec.dtype)) {}

bool BlockRestore::Run() {
  const auto own = std::make_unique_for_overwrite<std::byte[]>(3 * count_ * 4);
  PartReader::Target target;
  for (int i = 0; i < 3; ++i) target.arrays[i] = own.get() + static_cast<uint64_t>(i) * count_ * 4;
  const Status status = reader_->Fill(first_, count_, target, &stored_);
  reader_.reset();
  const std::lock_guard lock(mutex_);
  if (abandoned_) return false;
  done_ = true;
  if (!status.ok()) {
    failure_ = Fail(MLPO_E_IO, "restoring: " + status.message());
    failure_.os_errno = status.os_errno();
    return true;
  }
  for (int i = 0; i < 3; ++i) {
    std::byte* const array = state_ + static_cast<uint64_t>(i) * part_bytes_;
    std::memcpy(array, target.arrays[i], count_ * 4);
    std::memset(array + count_ * 4, 0, part_bytes_ - count_ * 4);  // up to its padded size
  }
  if (param_ != nullptr) RoundTo(dtype_, reinterpret_cast<const float*>(state_), param_, count_);
  return true;
}

bool BlockRestore::done() {
  const std::lock_guard lock(mutex_);
  return done_;
}

bool BlockRestore::Abandon() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || done_) return false;
  abandoned_ = true;
  return true;
}

void BlockRestore::Finish(Scheduler& scheduler, int64_t now_ns) {
  const uint8_t parts = stored_ == kStoredAll ? kPartState : stored_ == kStoredMaster ? kPartMaster : 0;
  scheduler.BlockRestored(block_, parts, std::move(failure_), now_ns);
}

}  // namespace mlpo
