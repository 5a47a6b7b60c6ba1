#include "daemon/io/pool_memory.h"

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "daemon/io/buffer_pool.h"
#include "proto/abi.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace mlpo {
namespace {

constexpr int kWordBits = 8 * sizeof(unsigned long);

int SetPolicy(std::byte* at, uint64_t bytes, int mode, const std::vector<int>& nodes) {
  std::vector<unsigned long> mask;
  for (const int node : nodes) {
    mask.resize(std::max<size_t>(mask.size(), node / kWordBits + 1));
    mask[node / kWordBits] |= 1ul << (node % kWordBits);
  }
  const unsigned long bits = mask.size() * kWordBits + 1;  // the kernel leaves the last one out
  return ::syscall(SYS_mbind, at, bytes, mode, mask.data(), bits, 0) == 0 ? 0 : errno;
}

int Remap(std::byte* at, uint64_t bytes, int flags) {
  const int all = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | flags;
  return ::mmap(at, bytes, PROT_READ | PROT_WRITE, all, -1, 0) == MAP_FAILED ? errno : 0;
}

}  // namespace

int PoolMemory::MapHugetlb(std::byte* at, uint64_t bytes, int shift) {
  static const bool populates = ::madvise(nullptr, 0, MADV_POPULATE_WRITE) == 0;
  if (!populates) return EOPNOTSUPP;
  return Remap(at, bytes, MAP_HUGETLB | (shift << MAP_HUGE_SHIFT));
}

int PoolMemory::MapSmall(std::byte* at, uint64_t bytes) { return Remap(at, bytes, MAP_NORESERVE); }

int PoolMemory::Prefer(std::byte* at, uint64_t bytes, int node) { return SetPolicy(at, bytes, MPOL_PREFERRED, {node}); }

int PoolMemory::Interleave(std::byte* at, uint64_t bytes, const std::vector<int>& nodes) {
  return SetPolicy(at, bytes, MPOL_INTERLEAVE, nodes);
}

int PoolMemory::Populate(std::byte* at, uint64_t bytes) {
  while (::madvise(at, bytes, MADV_POPULATE_WRITE) != 0) {
    if (errno == EINTR || errno == EAGAIN) continue;
    if (errno != EINVAL) return errno;
    for (uint64_t offset = 0; offset < bytes; offset += MLPO_ALIGN)
      static_cast<volatile std::byte*>(at)[offset] = std::byte{0};
    return 0;
  }
  return 0;
}

int PoolMemory::Lock(std::byte* at, uint64_t bytes) { return ::mlock(at, bytes) == 0 ? 0 : errno; }

std::optional<int> PoolMemory::NodeOf(std::byte* page) {
  void* pages[] = {page};
  int node = -1;
  if (::syscall(SYS_move_pages, 0, 1ul, pages, nullptr, &node, 0) != 0 || node < 0) return std::nullopt;
  return node;
}

Result<uint64_t> PoolMemory::Available(std::string* what) { return AvailableMemoryBytes(what); }

}  // namespace mlpo
