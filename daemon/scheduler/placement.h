// Placement: where a session's extents are on a path. Which path is the path model's (path_model.h) and the
// scheduler's.
//
// Owner: the data thread. No system calls.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>

namespace mlpo {

// A session's extents on one path, in one file. Freed ones are used again before the file grows, the lowest that is
// large enough first: where the end of a file cannot be written (a limit, a full file system), its beginning still can.
class ExtentMap {
 public:
  // The offset of `bytes` > 0 of it.
  uint64_t Take(uint64_t bytes);
  // Where that would be.
  uint64_t Next(uint64_t bytes) const;
  void Give(uint64_t offset, uint64_t bytes);
  // Up to where something has been written. What lies below it has its place on storage, and may be written again where
  // there is no room for more.
  void Wrote(uint64_t offset, uint64_t bytes) { written_end_ = std::max(written_end_, offset + bytes); }
  bool IsWritten(uint64_t offset, uint64_t bytes) const { return offset + bytes <= written_end_; }
  // The file is another one, of which nothing is in use.
  void Forget();
  uint64_t bytes_in_use() const { return bytes_in_use_; }

 private:
  std::map<uint64_t, uint64_t> free_;  // offset to bytes, below end_; neighbours are one
  uint64_t end_ = 0;                   // beyond the last extent in use
  uint64_t written_end_ = 0;
  uint64_t bytes_in_use_ = 0;
};

}  // namespace mlpo
