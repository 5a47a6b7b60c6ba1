#include "daemon/adam/worker_pool.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "daemon/adam/cores.h"
#include "daemon/adam/cpu_quota.h"
#include "daemon/base/log.h"

namespace mlpo {
namespace {

constexpr uint32_t kMaxDefaultWorkers = 16;
constexpr uint32_t kMaxWorkers = 1024;

// Threads inherit these modes from the thread that starts them, where a library may have set them.
void UseIeeeArithmetic() {
#if defined(__x86_64__)
  constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZero = 0x40, kRoundingMode = 0x6000;
  _mm_setcsr(_mm_getcsr() & ~(kFlushToZero | kDenormalsAreZero | kRoundingMode));
#elif defined(__aarch64__)
  uint64_t fpcr;
  constexpr uint64_t kFlushToZero = 1ull << 24, kRoundingMode = 3ull << 22;
  asm volatile("mrs %0, fpcr" : "=r"(fpcr));
  fpcr &= ~(kFlushToZero | kRoundingMode);
  asm volatile("msr fpcr, %0" : : "r"(fpcr));
#endif
}

// Signals go to the threads that expect them; those that a thread causes itself stay its own.
class BlockSignals {
 public:
  BlockSignals() {
    sigset_t all;
    sigfillset(&all);
    for (const int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT}) sigdelset(&all, own);
    MLPO_CHECK(pthread_sigmask(SIG_SETMASK, &all, &before_) == 0);
  }
  ~BlockSignals() { MLPO_CHECK(pthread_sigmask(SIG_SETMASK, &before_, nullptr) == 0); }
  BlockSignals(const BlockSignals&) = delete;
  BlockSignals& operator=(const BlockSignals&) = delete;

 private:
  sigset_t before_;
};

uint32_t DefaultWorkers(const Cores& cores) {
  uint32_t workers = std::min(cores.count(), kMaxDefaultWorkers);
  const std::optional<double> quota = ReadCpuQuota();
  if (quota && *quota < workers) workers = static_cast<uint32_t>(*quota);
  return std::max(workers, 1u);
}

}  // namespace

struct WorkerPool::Impl {
  DoneJobs* done = nullptr;
  std::mutex mutex;
  std::condition_variable work;
  // Guarded by mutex. The jobs that have a piece nobody took, linked by next_job_.
  Job* first = nullptr;
  Job* last = nullptr;
  bool stopping = false;
  std::vector<std::thread> threads;

  void Append(Job* job) {
    const std::lock_guard lock(mutex);
    MLPO_CHECK(!stopping);
    job->next_job_ = nullptr;
    job->next_piece_ = 0;
    (first == nullptr ? first : last->next_job_) = job;
    last = job;
  }

  // The next piece of the first job; nothing when the pool ends. No wake-up is lost: whoever appends a job holds the
  // mutex, and jobs are looked for under the same mutex before every wait.
  std::optional<std::pair<Job*, uint32_t>> Take() {
    std::unique_lock lock(mutex);
    work.wait(lock, [this] { return stopping || first != nullptr; });
    if (first == nullptr) return std::nullopt;
    Job* job = first;
    const uint32_t piece = job->next_piece_++;
    if (job->next_piece_ == job->pieces) first = job->next_job_;
    return std::pair(job, piece);
  }

  void Run(uint32_t index) {
    SetThreadName("mlpo-adam-" + std::to_string(index));
    UseIeeeArithmetic();
    while (const auto taken = Take()) {
      Job* job = taken->first;
      const uint32_t pieces = job->pieces;  // read first: counting our piece gives the job away
      job->RunPiece(taken->second);
      if (job->ended_pieces_.fetch_add(1, std::memory_order_acq_rel) + 1 == pieces) done->Put(job);
    }
  }

  void Stop() {
    {
      const std::lock_guard lock(mutex);
      stopping = true;
    }
    work.notify_all();
    for (std::thread& thread : threads) thread.join();
    threads.clear();
  }
};

Result<std::unique_ptr<WorkerPool>> WorkerPool::Start(const Options& options, DoneJobs* done) {
  if (options.workers > kMaxWorkers) {
    return Status::Invalid("adam.workers is " + std::to_string(options.workers) + "; at most " +
                           std::to_string(kMaxWorkers));
  }
  Result<Cores> cores = Cores::Load();
  if (!cores.ok()) return cores.status().Within("Adam workers");
  const uint32_t workers = options.workers != 0 ? options.workers : DefaultWorkers(*cores);
  std::vector<Cores::CpuSet> sets;
  if (options.pin) sets = cores->Spread(workers);
  if (options.pin && sets.empty()) spdlog::warn("adam_workers_not_bound reason=\"hwloc cannot spread them\"");

  auto impl = std::make_unique<Impl>();
  impl->done = done;
  const BlockSignals while_starting;  // the workers inherit the mask
  int bind_error = 0;
  for (uint32_t i = 0; i < workers; ++i) {
    try {
      impl->threads.emplace_back([pool = impl.get(), i] { pool->Run(i); });
    } catch (const std::system_error& error) {
      impl->Stop();
      return Status::Errno(error.code().value(), "cannot start Adam worker " + std::to_string(i) + " of " +
                                                     std::to_string(workers) + " (limits: ulimit -u, TasksMax)");
    }
    if (!sets.empty()) {
      if (const int error = cores->Bind(impl->threads.back().native_handle(), sets[i])) bind_error = error;
    }
  }
  if (bind_error != 0) {
    spdlog::warn("adam_workers_not_bound errno={} reason=\"{}\"", bind_error,
                 std::generic_category().message(bind_error));
  }
  return std::unique_ptr<WorkerPool>(new WorkerPool(std::move(impl)));
}

WorkerPool::WorkerPool(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

WorkerPool::~WorkerPool() { impl_->Stop(); }

void WorkerPool::Submit(Job* job) {
  MLPO_CHECK(job->pieces >= 1);
  job->ended_pieces_.store(0, std::memory_order_relaxed);  // the mutex hands it to the workers
  const uint32_t pieces = job->pieces;                     // it may end before we wake anybody
  impl_->Append(job);
  if (pieces == 1) {
    impl_->work.notify_one();
  } else {
    impl_->work.notify_all();
  }
}

uint32_t WorkerPool::workers() const { return static_cast<uint32_t>(impl_->threads.size()); }

}  // namespace mlpo
