// FaultFs: a folder that is shown by faultfs (faultfs.c) and fails as a test says. Needs /dev/fuse and root or
// fusermount3.
//
// Rule() and Of() wait for the program, but never for a request that hangs. At the end of its life what hangs fails
// with ENOTCONN.
#pragma once

#include <cstdint>
#include <string>

#include "tests/unit/io_scratch.h"

namespace mlpo::test {

class FaultFs {
 public:
  FaultFs();
  ~FaultFs();
  FaultFs(const FaultFs&) = delete;
  FaultFs& operator=(const FaultFs&) = delete;

  bool ok() const { return reason_.empty(); }
  // Why this machine has none.
  const std::string& reason() const { return reason_; }
  const std::string& point() const { return point_; }
  // The folder below it, which never fails.
  const std::string& source() const { return source_; }
  // One line, see faultfs.c. Throws std::runtime_error if it is refused.
  void Rule(const std::string& line) const;
  void Clear() const { Rule("clear"); }
  struct Counts {
    uint64_t requests = 0, acted = 0, hanging = 0;
  };
  // Of "read", "write", "fsync", "flush", "create", "fallocate" or "rename".
  Counts Of(const std::string& op) const;

 private:
  std::string Start();

  ScratchFolder folder_;
  const std::string source_ = folder_.path() + "/source";
  const std::string point_ = folder_.path() + "/mount";
  int pid_ = -1;
  std::string reason_;
};

}  // namespace mlpo::test
