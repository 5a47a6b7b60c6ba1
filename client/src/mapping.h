// Mapping: shared memory that the daemon sent, mapped into this process.
//
// Never inherited by a forked child (MADV_DONTFORK): the child can neither write the parent's slots nor keep their
// memory alive. So a child must not unmap it either: the addresses may be something else there.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mlpo::client {

class Mapping {
 public:
  Mapping() = default;
  // Maps the first `bytes` of a memfd after checking that it has them and is sealed against shrinking, so that touching
  // it cannot fail later. `what` names it in errors. `fd` is only borrowed.
  int Map(int fd, uint64_t bytes, bool writable, const char* what);
  void Unmap();

  std::byte* data() const { return base_; }
  uint64_t bytes() const { return bytes_; }
  // Whether [offset, offset + length) lies inside.
  bool Holds(uint64_t offset, uint64_t length) const { return offset <= bytes_ && length <= bytes_ - offset; }

 private:
  std::byte* base_ = nullptr;
  uint64_t bytes_ = 0;
};

}  // namespace mlpo::client
