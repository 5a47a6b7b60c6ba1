// The first page of a part's data file: whose it is. Written before the file has a name, checked before the file is
// used or removed.
//
// Layout (little endian, kPartHeaderBytes in all): see PartHeaderPage in part_header.cc. No state; any thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "daemon/base/status.h"
#include "daemon/checkpoint/manifest.h"

namespace mlpo {

// Aligned for O_DIRECT.
struct alignas(4096) PartHeader {
  std::array<std::byte, kPartHeaderBytes> bytes{};
};

struct PartIdentity {
  AttemptId attempt;
  uint32_t rank = 0;
  uint32_t world_size = 1;
  uint64_t step = 0;
  uint32_t index = 0;  // of the data file
  uint32_t uid = 0;    // who wrote it
  int64_t started_unix_ns = 0;
  std::string job;
  std::string tag;
  bool operator==(const PartIdentity&) const = default;
};

PartHeader MakePartHeader(const PartIdentity& identity);
// EINVAL with what is wrong if it is not a header of ours: magic, format, checksum, names.
Result<PartIdentity> ParsePartHeader(const PartHeader& page);
// Reads the header of an open file. May block.
Result<PartIdentity> ReadPartHeader(int fd, const std::string& shown);
// Whether a file never got one: it is empty, or as many zeros, as a power cut leaves what was being written. May block.
Result<bool> LacksPartHeader(int fd, const std::string& shown);

}  // namespace mlpo
