#include "daemon/io/buffer_pool.h"

#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <sstream>
#include <system_error>
#include <utility>

#include "daemon/base/log.h"
#include "daemon/base/thread.h"
#include "daemon/io/byte_text.h"
#include "daemon/io/memory_lock.h"
#include "proto/abi.h"

namespace mlpo {
namespace {

constexpr uint64_t kHugePageBytes = 2u << 20;
constexpr uint64_t kGiantPageBytes = 1u << 30;
constexpr uint64_t kMaxPieceBytes = 1u << 30;  // what io_uring registers as one
constexpr int kHugePageShift = 21, kGiantPageShift = 30;
// Left for the rest of the daemon (stacks, rings, page tables of a small pool), so that the pool alone does not bring
// the process to its limit. Less is asked of each step, as the page tables of the steps before have come out of it.
constexpr uint64_t kHeadroomBytes = 64u << 20;
constexpr uint64_t kStepHeadroomBytes = 16u << 20;
constexpr uint64_t kStepBytes = 64u << 20;  // populated at a time
constexpr size_t kMaxThreads = 16;          // a node; while the daemon serves:
constexpr size_t kMaxThreadsServing = 8;
constexpr uint64_t kSamples = 8;  // pages of a piece that are looked up

uint64_t RoundUp(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

Status CheckMemory(PoolMemory* memory, uint64_t need) {
  std::string what;
  Result<uint64_t> available = memory->Available(&what);
  if (!available.ok()) return available.status();
  const uint64_t usable = *available - std::min(*available, kHeadroomBytes);
  if (need <= usable) return Status();
  return Status(-ENOMEM,
                "a pool of " + ByteText(need) + " does not fit: " + what + " has " + ByteText(*available) +
                    " left, of which " + ByteText(kHeadroomBytes) +
                    " are kept for the rest of the daemon; lower [memory] pool or --memory, or raise the limit");
}

// How much of [base, base + bytes) is in transparent huge pages now. (/proc/self/smaps)
uint64_t TransparentHugeBytes(const std::byte* base, uint64_t bytes) {
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
  return huge_kib * 1024;
}

// The calling thread's; touched first from there, memory is near even where mbind is refused.
void RunOn(const NumaNode& node) {
  if (node.cpus.empty()) return;
  const int last = *std::max_element(node.cpus.begin(), node.cpus.end());
  cpu_set_t* set = CPU_ALLOC(last + 1);
  MLPO_CHECK(set != nullptr);
  const size_t bytes = CPU_ALLOC_SIZE(last + 1);
  CPU_ZERO_S(bytes, set);
  for (const int cpu : node.cpus) CPU_SET_S(cpu, bytes, set);
  const int error = ::pthread_setaffinity_np(::pthread_self(), bytes, set);
  if (error != 0) spdlog::debug("event=pool_thread_not_bound node={} errno={}", node.id, error);  // slower, not wrong
  CPU_FREE(set);
}

}  // namespace

// Pieces that are being made by threads, and what comes of it. A group is a node.
struct BufferPool::Run {
  struct Group {
    std::vector<uint32_t> pieces;
    std::atomic<size_t> next{0};  // relaxed: hands out indices only
  };
  std::deque<Group> groups;
  size_t max_threads = kMaxThreads;  // a group
  size_t cpus_per_thread = 1;
  std::function<void(uint32_t)> ready;
  std::function<void(Status)> ended;
  std::mutex mutex;
  Status failure;      // the first; guarded by mutex
  size_t working = 0;  // threads; guarded by mutex
  std::vector<std::thread> threads;

  void Join() {
    for (std::thread& thread : threads) thread.join();
    threads.clear();
  }
};

Result<std::unique_ptr<BufferPool>> BufferPool::Create(const Options& options) {
  std::unique_ptr<BufferPool> pool(new BufferPool());
  Status status = pool->Plan(options);
  if (status.ok()) status = pool->Map();
  if (!status.ok()) return status;
  std::vector<uint32_t> first;
  const uint32_t now = options.grow ? std::min<uint32_t>(pool->piece_count(), std::max<size_t>(options.nodes.size(), 1))
                                    : pool->piece_count();
  for (uint32_t piece = 0; piece < now; ++piece) first.push_back(piece);
  status = pool->MakePieces(std::move(first));
  if (!status.ok()) return status;
  pool->CountHugePages();
  if (options.huge_pages == HugePages::kRequire && !pool->huge_pages())
    return Status(-ENOMEM, "[memory] huge_pages = \"require\", and of the pool's first " +
                               ByteText(pool->ready_bytes()) + " only " + ByteText(pool->huge_bytes()) +
                               " are in huge pages: set them aside (sysctl vm.nr_hugepages=" +
                               std::to_string(pool->pool_bytes() / kHugePageBytes + 1) +
                               "), or echo madvise > /sys/kernel/mm/transparent_hugepage/enabled");
  pool->growing_ = now < pool->piece_count();
  pool->LogMade("pool");
  return pool;
}

Status BufferPool::Plan(const Options& options) {
  options_ = options;
  if (options.memory != nullptr) memory_ = options.memory;
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
  buffer_bytes_ = buffer;
  count_ = static_cast<uint32_t>(count);
  const uint64_t groups = options.interleave ? 1 : std::max<size_t>(options.nodes.size(), 1);
  buffers_per_piece_ = static_cast<uint32_t>(
      std::min(std::max(options.piece_bytes / buffer, uint64_t{1}), (count + groups - 1) / groups));
  const uint64_t piece_bytes = buffers_per_piece_ * buffer;
  // A full piece lies as a giant page would, so that it can be one.
  const bool full = piece_bytes + buffer > kGiantPageBytes;
  stride_bytes_ = RoundUp(piece_bytes, full ? kGiantPageBytes : kHugePageBytes);
  pieces_.resize((count + buffers_per_piece_ - 1) / buffers_per_piece_);
  return Status();
}

Status BufferPool::Map() {
  const uint64_t unit = stride_bytes_ == kGiantPageBytes ? kGiantPageBytes : kHugePageBytes;
  map_bytes_ = pieces_.size() * stride_bytes_ + unit;
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* map = ::mmap(nullptr, map_bytes_, PROT_NONE, flags, -1, 0);  // a place; its pieces follow
  if (map == MAP_FAILED) {
    const Status failed = Status::Errno(errno, "mapping a pool of " + ByteText(pool_bytes()));
    const Status fits = CheckMemory(memory_, pool_bytes());
    return fits.ok() ? failed : fits;
  }
  map_ = static_cast<std::byte*>(map);
  base_ = map_ + (RoundUp(reinterpret_cast<uintptr_t>(map_), unit) - reinterpret_cast<uintptr_t>(map_));
  for (uint32_t i = 0; i < pieces_.size(); ++i) {
    Piece& piece = pieces_[i].piece;
    piece.first = i * buffers_per_piece_;
    piece.count = std::min(buffers_per_piece_, count_ - piece.first);
    piece.memory = {base_ + i * stride_bytes_, piece.count * buffer_bytes_};
    pieces_[i].mapped_bytes = RoundUp(piece.memory.iov_len, kHugePageBytes);
    const Status mapped = MapPiece(pieces_[i]);
    if (!mapped.ok()) return mapped;
  }
  const Status fits = CheckMemory(memory_, coming_bytes());
  if (!fits.ok()) return fits;
  for (const PieceState& state : pieces_) {
    const Status advised = Advise(state);
    if (!advised.ok()) return advised;
  }
  return Status();
}

Status BufferPool::Advise(const PieceState& state) {
  void* at = state.piece.memory.iov_base;
  const int advice = options_.huge_pages == HugePages::kNever ? MADV_NOHUGEPAGE : MADV_HUGEPAGE;
  if (!state.hugetlb && ::madvise(at, state.mapped_bytes, advice) != 0 && errno != EINVAL)  // built without them
    spdlog::warn("event=pool_huge_pages errno={} text=\"the kernel refused the advice on huge pages\"", errno);
  // Users' state: not into a core file.
  if (::madvise(at, state.mapped_bytes, MADV_DONTDUMP) == 0) return Status();
  return Status::Errno(errno, "keeping the pool out of core files (MADV_DONTDUMP)");
}

// In pages that were set aside, as long as there are any; else in memory that is taken when it is touched.
Status BufferPool::MapPiece(PieceState& state) {
  auto* at = static_cast<std::byte*>(state.piece.memory.iov_base);
  const bool full = state.piece.count == buffers_per_piece_ && stride_bytes_ == kGiantPageBytes;
  if (options_.huge_pages != HugePages::kNever) {
    if (full && memory_->MapHugetlb(at, kGiantPageBytes, kGiantPageShift) == 0) {
      state.mapped_bytes = kGiantPageBytes;
      state.hugetlb = true;
      return Status();
    }
    state.hugetlb = memory_->MapHugetlb(at, state.mapped_bytes, kHugePageShift) == 0;
    if (state.hugetlb) return Status();
  }
  const int error = memory_->MapSmall(at, state.mapped_bytes);
  return error == 0 ? Status() : Status::Errno(error, "mapping " + ByteText(state.mapped_bytes) + " of the pool");
}

uint64_t BufferPool::coming_bytes() const {
  uint64_t bytes = 0;
  for (const PieceState& state : pieces_) {
    if (!state.ready && !state.hugetlb) bytes += state.piece.memory.iov_len;
  }
  return bytes;
}

BufferPool::~BufferPool() {
  StopGrowing();
  if (map_ != nullptr) ::munmap(map_, map_bytes_);
}

// ---- Making pieces ----

uint32_t BufferPool::GroupOf(uint32_t piece) const {
  return options_.interleave || options_.nodes.empty() ? 0 : piece % options_.nodes.size();
}

Status BufferPool::MakePieces(std::vector<uint32_t> pieces) {
  Run run;
  StartRun(run, std::move(pieces));
  run.Join();
  return run.failure;
}

void BufferPool::Grow(std::function<void(uint32_t piece)> ready, std::function<void(Status)> ended) {
  MLPO_CHECK(growth_ == nullptr);
  std::vector<uint32_t> rest;
  for (uint32_t piece = 0; piece < piece_count(); ++piece) {
    if (!IsReady(piece)) rest.push_back(piece);
  }
  if (rest.empty()) return ended(Status());
  growth_ = std::make_unique<Run>();
  growth_->ready = std::move(ready);
  growth_->ended = std::move(ended);
  growth_->max_threads = kMaxThreadsServing;
  growth_->cpus_per_thread = 4;
  StartRun(*growth_, std::move(rest));
  if (!growth_->threads.empty()) return;
  growing_ = false;
  growth_->ended(growth_->failure);
}

void BufferPool::StopGrowing() {
  if (growth_ == nullptr) return;
  stop_ = true;
  growth_->Join();
}

void BufferPool::StartRun(Run& run, std::vector<uint32_t> pieces) {
  run.groups.resize(options_.interleave ? 1 : std::max<size_t>(options_.nodes.size(), 1));
  for (const uint32_t piece : pieces) run.groups[GroupOf(piece)].pieces.push_back(piece);
  const std::unique_lock lock(run.mutex);  // no thread ends before all have been started
  for (uint32_t group = 0; group < run.groups.size(); ++group) {
    const bool known = !options_.interleave && !options_.nodes.empty() && !options_.nodes[group].cpus.empty();
    const size_t cpus = known ? options_.nodes[group].cpus.size() : std::thread::hardware_concurrency();
    const size_t wanted = std::clamp<size_t>(cpus / run.cpus_per_thread, 1, run.max_threads);
    for (size_t i = 0; i < std::min(wanted, run.groups[group].pieces.size()); ++i) {
      try {
        run.threads.emplace_back([this, &run, group] { Work(run, group); });
        ++run.working;
      } catch (const std::system_error& error) {
        if (i > 0) break;  // fewer do as well
        if (run.failure.ok())
          run.failure = Status::Errno(error.code().value(), "starting a thread that fills the pool with memory");
      }
    }
  }
}

void BufferPool::Work(Run& run, uint32_t group) {
  SetThreadName("mlpo-pool-" + std::to_string(group));
  if (options_.nodes.size() > 1 && !options_.interleave) RunOn(options_.nodes[group]);
  Run::Group& mine = run.groups[group];
  Status status;
  while (status.ok() && !stop_) {
    const size_t next = mine.next.fetch_add(1, std::memory_order_relaxed);
    if (next >= mine.pieces.size()) break;
    status = MakePiece(pieces_[mine.pieces[next]]);
    if (status.ok() && run.ready) run.ready(mine.pieces[next]);
  }
  if (!status.ok()) stop_ = true;
  std::unique_lock lock(run.mutex);
  if (run.failure.ok() && status.code() != -ECANCELED) run.failure = status;
  if (--run.working > 0 || !run.ended) return;
  lock.unlock();  // the last one: nobody else looks
  CountHugePages();
  growing_ = false;
  LogMade("pool_grown");
  run.ended(run.failure);
}

Status BufferPool::MakePiece(PieceState& state) {
  auto* at = static_cast<std::byte*>(state.piece.memory.iov_base);
  const std::vector<NumaNode>& nodes = options_.nodes;
  const int wanted = nodes.empty() || options_.interleave ? -1 : nodes[GroupOf(piece_of(state.piece.first))].id;
  const auto policy = [&] {
    if (nodes.size() < 2) return 0;
    if (!options_.interleave) return memory_->Prefer(at, state.mapped_bytes, wanted);
    std::vector<int> all;
    for (const NumaNode& node : nodes) all.push_back(node.id);
    return memory_->Interleave(at, state.mapped_bytes, all);
  };
  if (const int error = policy(); error != 0 && !policy_refused_.exchange(true))
    spdlog::warn(
        "event=pool_numa_refused errno={} text=\"{}\" advice=\"allow mbind (containers: CAP_SYS_NICE)\"", error,
        options_.interleave ? "the pool is where the kernel puts it" : "the pool is near the threads that fill it");
  Status refused;
  int error = Fill(state, &refused);
  if (error != 0 && refused.ok() && state.hugetlb && memory_->MapSmall(at, state.mapped_bytes) == 0) {
    // They were promised to us, but a hugetlb cgroup, or the node, may be without.
    if (!hugetlb_refused_.exchange(true))
      spdlog::warn("event=pool_hugetlb_refused errno={} advice=\"is a hugetlb cgroup limit set?\"", error);
    state.hugetlb = false;
    policy();
    refused = Advise(state);
    error = refused.ok() ? Fill(state, &refused) : EINVAL;
  }
  if (error != 0) {
    if (::madvise(at, state.mapped_bytes, MADV_DONTNEED) != 0)  // what has been filled goes back
      spdlog::warn("event=pool_piece_not_given_back errno={} bytes={}", errno, state.mapped_bytes);
    return refused.ok() ? Status::Errno(error, "filling " + ByteText(state.mapped_bytes) + " of the pool with memory")
                        : refused;
  }
  if (options_.lock) LockPiece(state);
  state.piece.node = nodes.size() < 2 || options_.interleave ? wanted : WhereIs(state);
  if (state.hugetlb) hugetlb_bytes_ += state.piece.memory.iov_len;
  if (huge_pages()) huge_bytes_ += state.piece.memory.iov_len;  // as those before it, until all are looked up
  ready_bytes_ += state.piece.memory.iov_len;
  state.ready.store(true, std::memory_order_release);
  return Status();
}

// 0 or an errno; ECANCELED if the growth is to end. *refused says more, where it is not the kernel's word.
int BufferPool::Fill(PieceState& state, Status* refused) {
  auto* at = static_cast<std::byte*>(state.piece.memory.iov_base);
  for (uint64_t done = 0; done < state.mapped_bytes; done += kStepBytes) {
    const uint64_t bytes = std::min(kStepBytes, state.mapped_bytes - done);
    if (stop_) {
      *refused = Status(-ECANCELED, "the pool does not grow any more");
      return ECANCELED;
    }
    if (!state.hugetlb) *refused = Admit(bytes);
    if (!refused->ok()) return ENOMEM;
    const int error = memory_->Populate(at + done, bytes);
    if (!state.hugetlb) Leave(bytes);
    if (error != 0) return error;
  }
  return 0;
}

// Waits until what others are filling is in the kernel's figures, if it could make the difference: a memory cgroup
// at its limit does not refuse, it kills.
Status BufferPool::Admit(uint64_t bytes) {
  std::unique_lock lock(admission_);
  while (true) {
    std::string what;
    Result<uint64_t> available = memory_->Available(&what);
    if (!available.ok()) return available.status();
    if (filling_bytes_ + bytes + kStepHeadroomBytes <= *available) break;
    if (filling_bytes_ == 0)
      return Status(-ENOMEM, "the pool has " + ByteText(ready_bytes()) + " of " + ByteText(pool_bytes()) + ", and " +
                                 what + " has only " + ByteText(*available) + " left now: lower [memory] pool or " +
                                 "--memory, or give the host's or the cgroup's other processes less");
    left_.wait(lock);
  }
  filling_bytes_ += bytes;
  return Status();
}

void BufferPool::Leave(uint64_t bytes) {
  {
    const std::lock_guard lock(admission_);
    filling_bytes_ -= bytes;
  }
  left_.notify_all();
}

// Where most of its pages are; what was wished for if the kernel does not say.
int BufferPool::WhereIs(const PieceState& state) const {
  auto* at = static_cast<std::byte*>(state.piece.memory.iov_base);
  const int wished = options_.nodes[GroupOf(piece_of(state.piece.first))].id;
  std::vector<int> found;
  for (uint64_t i = 0; i < kSamples; ++i) {
    const uint64_t page = state.piece.memory.iov_len / kSamples * i / MLPO_ALIGN * MLPO_ALIGN;
    if (const std::optional<int> node = memory_->NodeOf(at + page)) found.push_back(*node);
  }
  if (found.empty()) return wished;
  std::sort(found.begin(), found.end());
  const int most = found[found.size() / 2];  // of more than half of them, if of any
  if (most != wished)
    spdlog::warn("event=pool_on_another_node wished={} got={} bytes={} text=\"node {} has no memory left\"", wished,
                 most, state.piece.memory.iov_len, wished);
  return most;
}

void BufferPool::LockPiece(const PieceState& state) {
  if (lock_refused_ || state.hugetlb) return;  // hugetlb pages are not swapped out
  const iovec& memory = state.piece.memory;
  const int error = memory_->Lock(static_cast<std::byte*>(memory.iov_base), memory.iov_len);
  if (error == 0 || lock_refused_.exchange(true)) return;
  const std::optional<uint64_t> limit = MemoryLockLimit();
  spdlog::warn(
      "event=pool_not_locked errno={} need_bytes={} limit_bytes={} advice=\"the pool may be swapped out; raise "
      "RLIMIT_MEMLOCK to at least {} bytes (LimitMEMLOCK= in the unit, ulimit -l in KiB)\"",
      error, pool_bytes(), limit ? std::to_string(*limit) : "unlimited", pool_bytes());
}

void BufferPool::CountHugePages() {
  uint64_t bytes = hugetlb_bytes_;
  if (options_.huge_pages != HugePages::kNever) bytes += TransparentHugeBytes(base_, pieces_.size() * stride_bytes_);
  huge_bytes_ = std::min(bytes, ready_bytes());
}

void BufferPool::LogMade(const char* event) const {
  spdlog::info(
      "event={} bytes={} ready_bytes={} buffers={} buffer_bytes={} nodes={} locked={} huge_bytes={} hugetlb_bytes={}",
      event, pool_bytes(), ready_bytes(), count_, buffer_bytes_, std::max<size_t>(options_.nodes.size(), 1), locked(),
      huge_bytes(), hugetlb_bytes_.load());
}

}  // namespace mlpo
