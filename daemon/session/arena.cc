#include "daemon/session/arena.h"

#include <numa.h>

#include <algorithm>
#include <string>

#include "daemon/base/check.h"
#include "proto/abi.h"
#include "proto/status.h"

namespace mlpo {
namespace {

constexpr uint64_t kAllocationStepBytes = uint64_t{256} << 20;

uint64_t RoundUp(uint64_t bytes, uint64_t to) { return (bytes + to - 1) / to * to; }

}  // namespace

Result<std::shared_ptr<Memfd>> Memfd::Create(uint64_t bytes, int numa_node, const std::atomic<bool>& cancelled) {
  auto memfd = std::make_shared<Memfd>();
  Result<UniqueFd> fd = CreateSealedMemfd("mlpo-arena", bytes);
  if (!fd.ok()) return fd.status();
  Result<MappedRegion> region = MappedRegion::Map(fd->get(), bytes, Access::kReadWrite);
  if (!region.ok()) return region.status();
  if (numa_node >= 0 && numa_available() == 0 && numa_max_node() > 0 && numa_node <= numa_max_node()) {
    numa_set_bind_policy(0);  // this thread's: preferred, as a strict one has us killed where the node is full
    numa_tonode_memory(region->data(), bytes, numa_node);
  }
  for (uint64_t offset = 0; offset < bytes; offset += kAllocationStepBytes) {
    if (cancelled.load(std::memory_order_relaxed)) return Status(-ECANCELED, "the session has ended");
    Status status = AllocateMemfd(fd->get(), offset, std::min(kAllocationStepBytes, bytes - offset));
    if (!status.ok()) return status;
  }
  memfd->fd_ = std::move(*fd);
  memfd->region_ = std::move(*region);
  return memfd;
}

Status Memfd::Seal() {
  Status status = SealFutureWrites(fd_.get());
  fd_.reset();
  return status;
}

Result<Arena::Place> Arena::Find(uint64_t bytes) const {
  bytes = RoundUp(bytes, MLPO_ALIGN);
  Place place;
  if (!memfds_.empty() && bytes <= memfds_.back()->bytes() - used_bytes_) {
    place.memfd = static_cast<uint32_t>(memfds_.size() - 1);
    place.offset = used_bytes_;
    return place;
  }
  const uint64_t left = limit_bytes_ > bytes_ ? limit_bytes_ - bytes_ : 0;
  if (bytes > left) {
    return Status(MLPO_E_QUOTA, "the arena needs " + std::to_string(bytes) + " bytes more, and " +
                                    std::to_string(left) + " of its limit of " + std::to_string(limit_bytes_) +
                                    " are left: raise the client's arena or [memory] arenas");
  }
  place.memfd = static_cast<uint32_t>(memfds_.size());
  place.new_memfd_bytes = std::min(std::max(bytes, kMinMemfdBytes), left / MLPO_ALIGN * MLPO_ALIGN);
  return place;
}

uint64_t Arena::MostBytes() const {
  const uint64_t here = memfds_.empty() ? 0 : memfds_.back()->bytes() - used_bytes_;
  const uint64_t further = limit_bytes_ > bytes_ ? limit_bytes_ - bytes_ : 0;
  return std::max(here, further) / MLPO_ALIGN * MLPO_ALIGN;
}

void Arena::Add(std::shared_ptr<Memfd> memfd) {
  bytes_ += memfd->bytes();
  used_bytes_ = 0;
  memfds_.push_back(std::move(memfd));
}

std::byte* Arena::Take(const Place& place, uint64_t bytes) {
  MLPO_CHECK(place.memfd + 1 == memfds_.size() && place.offset == used_bytes_);
  used_bytes_ += RoundUp(bytes, MLPO_ALIGN);
  return memfds_.back()->data() + place.offset;
}

}  // namespace mlpo
