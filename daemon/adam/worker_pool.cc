#include "daemon/adam/worker_pool.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "daemon/adam/cores.h"
#include "daemon/adam/cpu_quota.h"
#include "daemon/base/clock.h"
#include "daemon/base/log.h"

namespace mlpo {
namespace {

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

// The workers near some nodes' memory, and the jobs on it.
struct Group {
  std::mutex mutex;
  std::condition_variable work;
  // Guarded by mutex. The jobs that have a piece nobody took, linked by next_job_.
  Job* first = nullptr;
  Job* last = nullptr;
  bool stopping = false;
  uint64_t submitted = 0;
  uint64_t calls = 0;  // for help: another group may have more than it has hands for
  // Pieces nobody took. Written under mutex; read without by who looks for work elsewhere, and looks again under it.
  std::atomic<uint32_t> waiting{0};
  uint32_t workers = 0;
  std::vector<int> nodes;

  bool TooMuch() const { return waiting.load(std::memory_order_relaxed) > workers; }
};

}  // namespace

struct WorkerPool::Impl {
  DoneJobs* done = nullptr;
  std::deque<Group> groups;      // with a worker each at least; fixed before the threads start
  std::vector<Group*> group_of;  // by node
  std::vector<std::thread> threads;

  struct Piece {
    Job* job;
    uint32_t index;
    uint64_t submission;  // 0: it is another group's, whose next piece may come much later
  };
  using Taken = std::optional<Piece>;

  Group& GroupFor(const Job& job) {
    if (job.node >= 0 && static_cast<size_t>(job.node) < group_of.size() && group_of[job.node] != nullptr)
      return *group_of[job.node];
    const auto turns = [](const Group& group) {
      return static_cast<double>(group.waiting.load(std::memory_order_relaxed)) / group.workers;
    };
    return *std::min_element(groups.begin(), groups.end(),
                             [&](const Group& a, const Group& b) { return turns(a) < turns(b); });
  }

  void Append(Group& group, Job* job) {
    const std::lock_guard lock(group.mutex);
    MLPO_CHECK(!group.stopping);
    job->next_job_ = nullptr;
    job->next_piece_ = 0;
    job->number_ = ++group.submitted;
    (group.first == nullptr ? group.first : group.last->next_job_) = job;
    group.last = job;
    group.waiting.fetch_add(job->pieces, std::memory_order_relaxed);
  }

  // Under the group's mutex.
  Taken TakeFirst(Group& group) {
    Job* job = group.first;
    if (job == nullptr) return std::nullopt;
    const uint32_t piece = job->next_piece_++;
    if (job->next_piece_ == job->pieces) group.first = job->next_job_;
    group.waiting.fetch_sub(1, std::memory_order_relaxed);
    return Piece{job, piece, job->number_};
  }

  Taken Steal(const Group& mine) {
    for (Group& group : groups) {
      if (&group == &mine || !group.TooMuch()) continue;
      const std::lock_guard lock(group.mutex);
      if (!group.TooMuch()) continue;
      Taken taken = TakeFirst(group);
      if (taken) taken->submission = 0;
      return taken;
    }
    return std::nullopt;
  }

  // The next piece of the group's first job, else one of another's; nothing when the pool ends. No wake-up is lost:
  // whoever appends a job, or says that help is wanted, holds the mutex, and both are looked for under it before every
  // wait.
  Taken Take(Group& mine) {
    while (true) {
      uint64_t heard = 0;  // calls for help
      {
        const std::lock_guard lock(mine.mutex);
        heard = mine.calls;
        if (Taken taken = TakeFirst(mine)) return taken;
      }
      if (Taken taken = Steal(mine)) return taken;
      std::unique_lock lock(mine.mutex);
      mine.work.wait(lock, [&] { return mine.stopping || mine.calls != heard || mine.first != nullptr; });
      if (mine.first == nullptr && mine.calls == heard) return std::nullopt;
    }
  }

  void Run(Group& mine, uint32_t index) {
    SetThreadName("mlpo-adam-" + std::to_string(index));
    UseIeeeArithmetic();
    uint64_t submission = 0;
    WorkSpan* span = nullptr;  // of that submission
    while (const Taken taken = Take(mine)) {
      Job* job = taken->job;
      const uint32_t pieces = job->pieces;  // read first: counting our piece gives the job away
      if (job->spans.empty()) {
        job->RunPiece(taken->index);
      } else {
        if (taken->submission == 0 || taken->submission != submission) {
          span = &job->spans[taken->index];
          span->worker = index;
          span->begin_ns = NowNs();
        }
        submission = taken->submission;
        job->RunPiece(taken->index);
        span->end_ns = NowNs();
      }
      if (job->ended_pieces_.fetch_add(1, std::memory_order_acq_rel) + 1 == pieces) done->Put(job);
    }
  }

  void AskForHelp(const Group& busy) {
    for (Group& group : groups) {
      if (&group == &busy) continue;
      {
        const std::lock_guard lock(group.mutex);
        ++group.calls;
      }
      group.work.notify_all();
    }
  }

  void Stop() {
    for (Group& group : groups) {
      {
        const std::lock_guard lock(group.mutex);
        group.stopping = true;
      }
      group.work.notify_all();
    }
    for (std::thread& thread : threads) thread.join();
    threads.clear();
  }

  // Groups that get no worker leave their nodes to the others, in turn.
  void Arrange(std::vector<Cores::Group>* of_machine, std::vector<uint32_t>* workers) {
    std::vector<int> without;
    for (size_t i = of_machine->size(); i-- > 0;) {
      if ((*workers)[i] > 0) continue;
      without.insert(without.end(), (*of_machine)[i].nodes.begin(), (*of_machine)[i].nodes.end());
      of_machine->erase(of_machine->begin() + static_cast<std::ptrdiff_t>(i));
      workers->erase(workers->begin() + static_cast<std::ptrdiff_t>(i));
    }
    for (size_t i = 0; i < without.size(); ++i) (*of_machine)[i % of_machine->size()].nodes.push_back(without[i]);
    for (size_t i = 0; i < of_machine->size(); ++i) {
      Group& group = groups.emplace_back();
      group.workers = (*workers)[i];
      group.nodes = (*of_machine)[i].nodes;
    }
    for (Group& group : groups) {
      for (const int node : group.nodes) {
        group_of.resize(std::max<size_t>(group_of.size(), static_cast<size_t>(node) + 1));
        group_of[node] = &group;
      }
    }
  }
};

Result<std::unique_ptr<WorkerPool>> WorkerPool::Start(const Options& options, DoneJobs* done) {
  if (options.workers > kMaxWorkers) {
    return Status::Invalid("adam.workers is " + std::to_string(options.workers) + "; at most " +
                           std::to_string(kMaxWorkers));
  }
  std::optional<Cores> own;
  if (options.cores == nullptr) {
    Result<Cores> loaded = Cores::Load();
    if (!loaded.ok()) return loaded.status().Within("Adam workers");
    own = std::move(*loaded);
  }
  const Cores& cores = own ? *own : *options.cores;
  std::vector<Cores::Group> of_machine = cores.Groups();
  std::vector<uint32_t> cores_of_groups;
  for (const Cores::Group& group : of_machine) cores_of_groups.push_back(group.cores);
  std::vector<uint32_t> workers =
      SplitWorkers(cores_of_groups, {options.workers, options.parameters_per_s, ReadCpuQuota()});

  auto impl = std::make_unique<Impl>();
  impl->done = done;
  impl->Arrange(&of_machine, &workers);
  const BlockSignals while_starting;  // the workers inherit the mask
  int bind_error = 0;
  uint32_t index = 0;
  for (size_t g = 0; g < workers.size(); ++g) {
    std::vector<Cores::CpuSet> sets;
    if (options.pin) sets = cores.Spread(of_machine[g], workers[g]);
    if (options.pin && sets.empty()) bind_error = ENOTSUP;
    for (uint32_t i = 0; i < workers[g]; ++i, ++index) {
      try {
        impl->threads.emplace_back([pool = impl.get(), g, index] { pool->Run(pool->groups[g], index); });
      } catch (const std::system_error& error) {
        impl->Stop();
        return Status::Errno(error.code().value(),
                             "cannot start Adam worker " + std::to_string(index) + " (limits: ulimit -u, TasksMax)");
      }
      if (sets.empty()) continue;
      if (const int error = cores.Bind(impl->threads.back().native_handle(), sets[i])) bind_error = error;
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
  Group& group = impl_->GroupFor(*job);
  impl_->Append(group, job);
  if (pieces == 1) {
    group.work.notify_one();
  } else {
    group.work.notify_all();
  }
  if (group.TooMuch()) impl_->AskForHelp(group);
}

uint32_t WorkerPool::workers() const { return static_cast<uint32_t>(impl_->threads.size()); }

uint32_t WorkerPool::workers_on(int node) const {
  const std::vector<Group*>& group_of = impl_->group_of;
  const bool known = node >= 0 && static_cast<size_t>(node) < group_of.size() && group_of[node] != nullptr;
  return known ? group_of[node]->workers : 0;
}

}  // namespace mlpo
