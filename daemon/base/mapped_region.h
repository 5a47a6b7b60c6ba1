// MappedRegion: a memfd mapped through Boost.Interprocess, and how sealed memfds are made.
#pragma once

#include <boost/interprocess/mapped_region.hpp>
#include <cstddef>
#include <cstdint>
#include <string>

#include "daemon/base/status.h"
#include "daemon/base/unique_fd.h"

namespace mlpo {

enum class Access { kReadOnly, kReadWrite };

class MappedRegion {
 public:
  MappedRegion() = default;
  // Maps the first `bytes` of `fd`, which is only borrowed and may be closed afterwards.
  static Result<MappedRegion> Map(int fd, size_t bytes, Access access);

  std::byte* data() const { return static_cast<std::byte*>(region_.get_address()); }
  size_t size() const { return region_.get_size(); }

 private:
  boost::interprocess::mapped_region region_;
};

// A memfd of `bytes`, sealed against shrinking and growing. Its memory is not allocated yet.
Result<UniqueFd> CreateSealedMemfd(const std::string& name, size_t bytes);
// Allocates [offset, offset + bytes) of a memfd now, so that no later touch can fail.
Status AllocateMemfd(int fd, size_t offset, size_t bytes);
// No further writable mapping, write() or hole punching; existing mappings still write. Then nobody can seal more.
Status SealFutureWrites(int fd);

}  // namespace mlpo
