// PoolMemory: what the pool asks of the kernel's memory. Tests derive from it, for machines and failures that are not
// here. No state; any thread. Units: bytes; an int is 0 or an errno.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "daemon/base/status.h"

namespace mlpo {

class PoolMemory {
 public:
  virtual ~PoolMemory() = default;

  // Replaces what is mapped at `at` by hugetlb pages of 2^shift bytes. They are set aside for us then: neither the host
  // nor a memory cgroup has to find them later. EOPNOTSUPP before Linux 5.14, where Populate would end in SIGBUS if a
  // hugetlb cgroup has no room for them.
  virtual int MapHugetlb(std::byte* at, uint64_t bytes, int shift);
  // Replaces it by memory that is taken when it is touched.
  virtual int MapSmall(std::byte* at, uint64_t bytes);
  // Memory touched from now on comes from `node`, or elsewhere if that has none left: a strict binding would have the
  // kernel kill us instead.
  virtual int Prefer(std::byte* at, uint64_t bytes, int node);
  virtual int Interleave(std::byte* at, uint64_t bytes, const std::vector<int>& nodes);
  // Makes it exist. Never SIGBUS where the kernel has MADV_POPULATE_WRITE (Linux 5.14).
  virtual int Populate(std::byte* at, uint64_t bytes);
  virtual int Lock(std::byte* at, uint64_t bytes);
  // The node that a page is on; nothing where the kernel does not say (containers often refuse the question).
  virtual std::optional<int> NodeOf(std::byte* page);
  // What this process may still take; see AvailableMemoryBytes.
  virtual Result<uint64_t> Available(std::string* what);
};

}  // namespace mlpo
