#include "daemon/io/buffer_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <fstream>
#include <sstream>
#include <thread>

#include "daemon/base/log.h"
#include "daemon/io/byte_text.h"
#include "daemon/io/memory_lock.h"
#include "proto/abi.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace mlpo {
namespace {

constexpr uint64_t kHugePageBytes = 2u << 20;
constexpr uint64_t kMaxPieceBytes = 1u << 30;
// Left for the rest of the daemon (stacks, rings, page tables of a small pool), so that the pool alone does not bring
// the process to its limit.
constexpr uint64_t kHeadroomBytes = 64u << 20;

uint64_t RoundUp(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

Status CheckMemory(uint64_t need) {
  std::string what;
  Result<uint64_t> available = AvailableMemoryBytes(&what);
  if (!available.ok()) return available.status();
  const uint64_t usable = *available - std::min(*available, kHeadroomBytes);
  if (need <= usable) return Status();
  return Status(-ENOMEM,
                "a pool of " + ByteText(need) + " does not fit: " + what + " has " + ByteText(*available) +
                    " left, of which " + ByteText(kHeadroomBytes) +
                    " are kept for the rest of the daemon; lower [memory] pool or --memory, or raise the limit");
}

// Anonymous memory whose start is a multiple of a huge page, so that all of it can be huge.
std::byte* MapAligned(uint64_t bytes) {
  const uint64_t wide = bytes + kHugePageBytes;
  void* map = ::mmap(nullptr, wide, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED) return nullptr;
  auto* start = static_cast<std::byte*>(map);
  const uint64_t head =
      RoundUp(reinterpret_cast<uintptr_t>(start), kHugePageBytes) - reinterpret_cast<uintptr_t>(start);
  if (head > 0) ::munmap(start, head);
  ::munmap(start + head + bytes, wide - head - bytes);
  return start + head;
}

// Makes the memory exist. 0 or errno; never SIGBUS where the kernel has MADV_POPULATE_WRITE (Linux 5.14).
int PopulatePiece(const iovec& piece) {
  while (::madvise(piece.iov_base, piece.iov_len, MADV_POPULATE_WRITE) != 0) {
    if (errno == EINTR || errno == EAGAIN) continue;
    if (errno != EINVAL) return errno;
    for (size_t at = 0; at < piece.iov_len; at += MLPO_ALIGN)
      static_cast<volatile std::byte*>(piece.iov_base)[at] = std::byte{0};
    return 0;
  }
  return 0;
}

int Populate(const std::vector<iovec>& pieces) {
  std::atomic<size_t> next{0};  // relaxed: hands out indices only
  std::atomic<int> error{0};    // relaxed: read after the threads have been joined
  const auto work = [&] {
    for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < pieces.size();) {
      const int failed = PopulatePiece(pieces[i]);
      if (failed != 0) error.store(failed, std::memory_order_relaxed);
    }
  };
  const size_t helpers = std::min<size_t>({pieces.size(), std::max(1u, std::thread::hardware_concurrency()), 16}) - 1;
  std::vector<std::thread> threads;
  for (size_t i = 0; i < helpers; ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
  return error.load(std::memory_order_relaxed);
}

// True if most of the mapping that begins at `base` is in transparent huge pages now. (/proc/self/smaps)
bool MostlyHuge(const std::byte* base, uint64_t bytes) {
  std::ifstream smaps("/proc/self/smaps");
  bool inside = false;
  uint64_t huge_kib = 0;
  for (std::string line; std::getline(smaps, line);) {
    uintptr_t from = 0, to = 0;
    char dash = 0;
    std::istringstream head(line);
    if (line.find('-') < line.find(' ') && head >> std::hex >> from >> dash >> to && dash == '-') {
      const auto start = reinterpret_cast<uintptr_t>(base);
      inside = from < start + bytes && to > start;
    } else if (inside && line.starts_with("AnonHugePages:")) {
      huge_kib += std::stoull(line.substr(14));
    }
  }
  return huge_kib * 1024 > bytes / 2;
}

bool Lock(std::byte* base, uint64_t bytes) {
  if (::mlock(base, bytes) == 0) return true;
  const int error = errno;
  const std::optional<uint64_t> limit = MemoryLockLimit();
  spdlog::warn(
      "event=pool_not_locked errno={} need_bytes={} limit_bytes={} advice=\"the pool may be swapped out; raise "
      "RLIMIT_MEMLOCK to at least {} bytes (LimitMEMLOCK= in the unit, ulimit -l in KiB)\"",
      error, bytes, limit ? std::to_string(*limit) : "unlimited", bytes);
  return false;
}

}  // namespace

Result<std::unique_ptr<BufferPool>> BufferPool::Create(const Options& options) {
  const uint64_t buffer = options.buffer_bytes;
  if (buffer == 0 || buffer % MLPO_ALIGN != 0 || buffer > kMaxPieceBytes)
    return Status::Invalid("a pool buffer of " + ByteText(buffer) + ": it must be a multiple of " +
                           std::to_string(MLPO_ALIGN) + " bytes, at most " + ByteText(kMaxPieceBytes));
  const uint64_t count = options.pool_bytes / buffer;
  if (count < 3)
    return Status::Invalid("a pool of " + ByteText(options.pool_bytes) + " has room for " + std::to_string(count) +
                           " buffers of " + ByteText(buffer) +
                           "; at least 3 are needed: set [memory] pool or --memory to " + ByteText(3 * buffer) +
                           " or more, or lower [memory] block_elements");
  if (count >= kNone) return Status::Invalid("a pool of " + std::to_string(count) + " buffers is too many");

  std::unique_ptr<BufferPool> pool(new BufferPool());
  pool->buffer_bytes_ = buffer;
  pool->count_ = static_cast<uint32_t>(count);
  pool->buffers_per_piece_ = static_cast<uint32_t>(kMaxPieceBytes / buffer);
  pool->mapped_bytes_ = RoundUp(count * buffer, kHugePageBytes);

  bool hugetlb = false;
  if (options.huge_pages) {  // these pages were set aside before: neither host nor memory cgroup has to find them
    void* map = ::mmap(nullptr, pool->mapped_bytes_, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | (21 << MAP_HUGE_SHIFT), -1, 0);
    hugetlb = map != MAP_FAILED;
    if (hugetlb) pool->base_ = static_cast<std::byte*>(map);
  }
  if (!hugetlb) {
    const Status fits = CheckMemory(pool->pool_bytes());
    if (!fits.ok()) return fits;
    pool->base_ = MapAligned(pool->mapped_bytes_);
    if (pool->base_ == nullptr) return Status::Errno(errno, "mapping a pool of " + ByteText(pool->mapped_bytes_));
    const int advice = options.huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE;
    if (::madvise(pool->base_, pool->mapped_bytes_, advice) != 0 && errno != EINVAL)  // EINVAL: built without them
      spdlog::warn("event=pool_huge_pages errno={} text=\"the kernel refused the advice on huge pages\"", errno);
  }
  // Users' state: not into a core file.
  if (::madvise(pool->base_, pool->mapped_bytes_, MADV_DONTDUMP) != 0)
    return Status::Errno(errno, "keeping the pool out of core files (MADV_DONTDUMP)");

  const uint64_t piece_bytes = pool->buffers_per_piece_ * buffer;
  for (uint64_t at = 0; at < pool->pool_bytes(); at += piece_bytes)
    pool->pieces_.push_back({pool->base_ + at, std::min(piece_bytes, pool->pool_bytes() - at)});
  const int error = Populate(pool->pieces_);
  if (error != 0)
    return Status::Errno(error, "filling a pool of " + ByteText(pool->mapped_bytes_) + " with memory" +
                                    (hugetlb ? " from hugetlb pages (is a hugetlb cgroup limit set?)" : ""));
  pool->huge_pages_ = hugetlb || (options.huge_pages && MostlyHuge(pool->base_, pool->mapped_bytes_));
  if (options.lock) pool->locked_ = hugetlb || Lock(pool->base_, pool->mapped_bytes_);
  spdlog::info("event=pool bytes={} buffers={} buffer_bytes={} locked={} huge_pages={}", pool->pool_bytes(), count,
               buffer, pool->locked_,
               hugetlb             ? "hugetlb"
               : pool->huge_pages_ ? "transparent"
                                   : "no");
  return pool;
}

BufferPool::~BufferPool() {
  if (base_ != nullptr) ::munmap(base_, mapped_bytes_);
}

}  // namespace mlpo
