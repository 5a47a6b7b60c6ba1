// Arena: a session's shared memory for slots and the staging area: memfds that are made as registrations need them.
//
// Place() says where the next piece of it goes; where that needs a further memfd, Memfd::Create makes it (slow: the
// housekeeping thread), the client maps it, Seal() follows, and only then is a slot in it used. Slots are never freed
// before the session is. Owner: the main thread, but for Memfd::Create. Units: bytes.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "daemon/base/mapped_region.h"
#include "daemon/base/status.h"
#include "daemon/base/unique_fd.h"

namespace mlpo {

// One memfd of an arena, allocated and mapped.
class Memfd {
 public:
  // Memory comes from `numa_node` (-1: anywhere), or elsewhere if that has none left, and is allocated in steps;
  // `cancelled` is looked at in between (ECANCELED).
  static Result<std::shared_ptr<Memfd>> Create(uint64_t bytes, int numa_node, const std::atomic<bool>& cancelled);

  int fd() const { return fd_.get(); }
  std::byte* data() const { return region_.data(); }
  uint64_t bytes() const { return region_.size(); }
  // Once the client has mapped it. The descriptor is closed.
  Status Seal();

 private:
  UniqueFd fd_;
  MappedRegion region_;
};

class Arena {
 public:
  static constexpr uint64_t kMinMemfdBytes = uint64_t{64} << 20;

  // `limit_bytes`: of the whole arena.
  explicit Arena(uint64_t limit_bytes) : limit_bytes_(limit_bytes) {}

  struct Place {
    uint32_t memfd = 0;
    uint64_t offset = 0;           // a multiple of MLPO_ALIGN
    uint64_t new_memfd_bytes = 0;  // 0: it is there; else Add() one of this size first
  };
  // Where `bytes` can go; nothing changes. MLPO_E_QUOTA with need and limit if nowhere.
  Result<Place> Find(uint64_t bytes) const;
  // The most that Find finds a place for.
  uint64_t MostBytes() const;
  void Add(std::shared_ptr<Memfd> memfd);
  // Takes a place that Find gave, whose memfd is there. The memory reads as zeros.
  std::byte* Take(const Place& place, uint64_t bytes);
  Memfd* memfd(uint32_t index) const { return memfds_[index].get(); }
  uint64_t bytes() const { return bytes_; }
  uint32_t count() const { return static_cast<uint32_t>(memfds_.size()); }
  uint64_t limit_bytes() const { return limit_bytes_; }

 private:
  const uint64_t limit_bytes_;
  std::vector<std::shared_ptr<Memfd>> memfds_;
  uint64_t used_bytes_ = 0;  // of the last memfd
  uint64_t bytes_ = 0;       // of all
};

}  // namespace mlpo
