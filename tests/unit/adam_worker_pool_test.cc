// The worker pool: every piece once, in order, without lost wake-ups, on the right CPUs and in the right arithmetic.
#include "daemon/adam/worker_pool.h"

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <condition_variable>
#include <fstream>
#include <future>
#include <mutex>
#include <set>
#include <thread>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "daemon/adam/cores.h"
#include "tests/unit/adam_arrays.h"

namespace mlpo::testing {
namespace {

constexpr int kDeadlineMs = 60'000;

std::unique_ptr<WorkerPool> StartPool(uint32_t workers, DoneJobs* done, bool pin = true) {
  WorkerPool::Options options;
  options.workers = workers;
  options.pin = pin;
  Result<std::unique_ptr<WorkerPool>> pool = WorkerPool::Start(options, done);
  REQUIRE(pool.ok());
  return std::move(pool.value());
}

std::vector<Job*> WaitFor(DoneJobs* done, size_t count) {
  std::vector<Job*> ended;
  while (ended.size() < count) {
    pollfd event = {done->event_fd(), POLLIN, 0};
    if (poll(&event, 1, kDeadlineMs) != 1) FAIL("only " << ended.size() << " of " << count << " jobs ended in time");
    done->TakeAll(&ended);
  }
  return ended;
}

class CountingJob : public Job {
 public:
  explicit CountingJob(uint32_t count) : runs_(count) { pieces = count; }
  void RunPiece(uint32_t piece) override { runs_.at(piece).fetch_add(1); }
  bool EachOnce(int times = 1) const {
    return std::all_of(runs_.begin(), runs_.end(), [times](const auto& runs) { return runs == times; });
  }

 private:
  std::vector<std::atomic<int>> runs_;
};

template <class Function>
class FunctionJob : public Job {
 public:
  FunctionJob(uint32_t count, Function function) : function_(std::move(function)) { pieces = count; }
  void RunPiece(uint32_t piece) override { function_(piece); }

 private:
  Function function_;
};

TEST_CASE("WorkerPool.EveryPieceRunsOnceAndEveryJobEndsOnce", "[adam]") {
  for (const uint32_t workers : {1, 2, 7}) {
    DoneJobs done;
    const auto pool = StartPool(workers, &done);
    CHECK(pool->workers() == workers);
    std::vector<std::unique_ptr<CountingJob>> jobs;
    for (uint32_t i = 0; i < 300; ++i) jobs.push_back(std::make_unique<CountingJob>(1 + i % 40));
    for (const auto& job : jobs) pool->Submit(job.get());
    const std::vector<Job*> ended = WaitFor(&done, jobs.size());
    CHECK(ended.size() == jobs.size());
    CHECK(std::set<Job*>(ended.begin(), ended.end()).size() == jobs.size());
    for (const auto& job : jobs) CHECK(job->EachOnce());
  }
}

TEST_CASE("WorkerPool.AJobThatEndedCanBeSubmittedAgain", "[adam]") {
  // One short job at a time puts the workers to sleep again and again: a lost wake-up would end in the deadline.
  DoneJobs done;
  const auto pool = StartPool(3, &done);
  CountingJob job(3);
  constexpr int kRounds = 20'000;
  for (int round = 0; round < kRounds; ++round) {
    pool->Submit(&job);
    if (WaitFor(&done, 1).at(0) != &job) FAIL("another job ended");
  }
  CHECK(job.EachOnce(kRounds));
}

TEST_CASE("WorkerPool.JobsStartInOrderOfSubmission", "[adam]") {
  DoneJobs done;
  const auto pool = StartPool(1, &done);
  std::vector<int> order;  // one worker: no race
  std::vector<std::unique_ptr<Job>> jobs;
  for (int i = 0; i < 20; ++i) {
    auto body = [&order, i](uint32_t) { order.push_back(i); };
    jobs.push_back(std::make_unique<FunctionJob<decltype(body)>>(3, body));
  }
  for (const auto& job : jobs) pool->Submit(job.get());
  const std::vector<Job*> ended = WaitFor(&done, jobs.size());
  REQUIRE(order.size() == 60);
  CHECK(std::is_sorted(order.begin(), order.end()));
  for (size_t i = 0; i < jobs.size(); ++i) CHECK(ended[i] == jobs[i].get());
}

// Lets `count` pieces run only when all of them have started.
class Meeting {
 public:
  explicit Meeting(int count) : missing_(count) {}
  bool Arrive() {  // false: not all came in time
    std::unique_lock lock(mutex_);
    if (--missing_ == 0) all_here_.notify_all();
    return all_here_.wait_for(lock, std::chrono::milliseconds(kDeadlineMs), [this] { return missing_ <= 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_here_;
  int missing_;
};

TEST_CASE("WorkerPool.AllWorkersHelpAndGoOnWithTheNextJobWithoutABarrier", "[adam]") {
  DoneJobs done;
  const auto pool = StartPool(4, &done);
  Meeting one_job(4), two_jobs(4);
  std::atomic<int> alone{0};
  const auto meet = [&alone](Meeting* meeting) { return [&alone, meeting](uint32_t) { alone += !meeting->Arrive(); }; };
  FunctionJob help(4, meet(&one_job));
  pool->Submit(&help);
  WaitFor(&done, 1);
  // The first job's single piece waits for three pieces of the second.
  FunctionJob first(1, meet(&two_jobs));
  FunctionJob second(3, meet(&two_jobs));
  pool->Submit(&first);
  pool->Submit(&second);
  WaitFor(&done, 2);
  CHECK(alone == 0);
}

TEST_CASE("WorkerPool.TheEndRunsWhatWasSubmitted", "[adam]") {
  DoneJobs done;
  CountingJob job(1000);
  {
    const auto pool = StartPool(2, &done);
    pool->Submit(&job);
  }
  CHECK(job.EachOnce());
  CHECK(WaitFor(&done, 1).size() == 1);
}

TEST_CASE("C05_AnyNumberOfThreadsGivesTheSameBits", "[adam]") {
  constexpr size_t kCount = 1'000'003;
  const AdamScalars scalars = MakeScalars(TypicalHyper(), 4);
  Problem start(kCount, MLPO_BFLOAT16, MLPO_BFLOAT16, true);
  start.Fill(8, Values::kTypical);
  Problem expected(kCount, MLPO_BFLOAT16, MLPO_BFLOAT16, true);
  expected.CopyFrom(start);
  reference::Adam(scalars, expected.Whole());
  for (const uint32_t workers : {1, 2, 7}) {
    for (const size_t piece : {65'536, 9'999}) {
      Problem actual(kCount, MLPO_BFLOAT16, MLPO_BFLOAT16, true);
      actual.CopyFrom(start);
      FunctionJob job(static_cast<uint32_t>((kCount + piece - 1) / piece), [&](uint32_t index) {
        const size_t first = index * piece;
        AdamUpdate(scalars, actual.Range(first, std::min(piece, kCount - first)));
      });
      DoneJobs done;
      const auto pool = StartPool(workers, &done);
      pool->Submit(&job);
      WaitFor(&done, 1);
      INFO(workers << " workers, pieces of " << piece);
      CHECK(actual.SameBits(expected));
      CHECK(actual.CanariesIntact());
    }
  }
}

#if defined(__x86_64__)
TEST_CASE("WorkerPool.DenormalsSurviveWhateverModeTheStarterHas", "[adam]") {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040);  // FTZ and DAZ, as a library built with -ffast-math sets them; threads inherit it
  DoneJobs done;
  const auto pool = StartPool(2, &done);
  _mm_setcsr(before);
  std::atomic<int> flushed{0};
  volatile float denormal = 0x1p-140f;
  FunctionJob job(50, [&](uint32_t) { flushed += denormal * 0.5f != 0x1p-141f; });
  pool->Submit(&job);
  WaitFor(&done, 1);
  CHECK(flushed == 0);
}
#endif

TEST_CASE("WorkerPool.WorkersAreNamedBoundAndBlockSignals", "[adam]") {
  cpu_set_t allowed;
  REQUIRE(sched_getaffinity(0, sizeof allowed, &allowed) == 0);
  DoneJobs done;
  const auto pool = StartPool(2, &done);
  struct Seen {
    std::string name;
    cpu_set_t cpus;
    bool blocks_term = false;
  };
  std::vector<Seen> seen(2);
  Meeting both(2);
  std::atomic<int> alone{0};
  FunctionJob job(2, [&](uint32_t piece) {
    alone += !both.Arrive();  // so that each worker has one of the pieces
    char name[16] = "";
    pthread_getname_np(pthread_self(), name, sizeof name);
    sigset_t blocked;
    pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
    seen[piece].name = name;
    seen[piece].blocks_term = sigismember(&blocked, SIGTERM) == 1;
    sched_getaffinity(0, sizeof seen[piece].cpus, &seen[piece].cpus);
  });
  pool->Submit(&job);
  WaitFor(&done, 1);
  REQUIRE(alone == 0);
  CHECK(std::set<std::string>{seen[0].name, seen[1].name} == std::set<std::string>{"mlpo-adam-0", "mlpo-adam-1"});
  for (const Seen& worker : seen) {
    cpu_set_t inside;
    CPU_AND(&inside, &worker.cpus, &allowed);
    CHECK(CPU_EQUAL(&inside, &worker.cpus));  // never outside the mask
    CHECK(CPU_COUNT(&worker.cpus) >= 1);
    CHECK(worker.blocks_term);
  }
  if (CPU_COUNT(&allowed) < 2) {
    WARN("skipped the rest: one CPU only, so both workers share it");
    return;
  }
  cpu_set_t shared;
  CPU_AND(&shared, &seen[0].cpus, &seen[1].cpus);
  std::ifstream siblings("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list");
  std::string list;
  siblings >> list;
  if (CPU_COUNT(&allowed) == 2 && list.find_first_of(",-") != std::string::npos) {
    WARN("skipped the rest: two hardware threads of one core");
    return;
  }
  CHECK(CPU_COUNT(&shared) == 0);  // a core each
}

TEST_CASE("WorkerPool.BindingStaysInsideTheAffinityMask", "[adam]") {
  cpu_set_t allowed, one;
  REQUIRE(sched_getaffinity(0, sizeof allowed, &allowed) == 0);
  int last = -1;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &allowed)) last = cpu;
  }
  CPU_ZERO(&one);
  CPU_SET(last, &one);
  DoneJobs done;
  std::unique_ptr<WorkerPool> pool, standard;
  REQUIRE(sched_setaffinity(0, sizeof one, &one) == 0);
  pool = StartPool(3, &done);
  standard = StartPool(0, &done);
  REQUIRE(sched_setaffinity(0, sizeof allowed, &allowed) == 0);
  CHECK(standard->workers() == 1);
  std::atomic<int> outside{0};
  FunctionJob job(30, [&](uint32_t) {
    cpu_set_t mine;
    sched_getaffinity(0, sizeof mine, &mine);
    outside += !CPU_EQUAL(&mine, &one);
  });
  pool->Submit(&job);
  WaitFor(&done, 1);
  CHECK(outside == 0);
}

TEST_CASE("WorkerPool.TheDefaultIsWithinTheCpusGranted", "[adam]") {
  cpu_set_t allowed;
  REQUIRE(sched_getaffinity(0, sizeof allowed, &allowed) == 0);
  DoneJobs done;
  const auto pool = StartPool(0, &done);
  CHECK(pool->workers() >= 1);
  CHECK(pool->workers() <= static_cast<uint32_t>(std::min(CPU_COUNT(&allowed), 16)));
}

TEST_CASE("WorkerPool.IdleWorkersUseNoCpu", "[adam]") {
  DoneJobs done;
  const auto pool = StartPool(4, &done);
  CountingJob job(100);
  pool->Submit(&job);
  WaitFor(&done, 1);
  const auto cpu_ns = [] {
    timespec time;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return time.tv_sec * 1'000'000'000ll + time.tv_nsec;
  };
  const int64_t before = cpu_ns();
  CHECK(poll(nullptr, 0, 300) == 0);
  CHECK(cpu_ns() - before < 30'000'000);  // a single spinning worker would use 300 ms
}

// Eight cores on two nodes, workers 0-3 near node 0 and 4-7 near node 1; nobody is really bound.
std::unique_ptr<WorkerPool> StartOnTwoNodes(DoneJobs* done, uint32_t workers = 8) {
  const Result<Cores> cores = Cores::Synthetic("node:2 core:4 pu:1", "");
  REQUIRE(cores.ok());
  WorkerPool::Options options;
  options.workers = workers;
  options.cores = &cores.value();
  Result<std::unique_ptr<WorkerPool>> pool = WorkerPool::Start(options, done);
  REQUIRE(pool.ok());
  return std::move(pool.value());
}

int NodeOfThisWorker() {
  char name[16];
  pthread_getname_np(pthread_self(), name, sizeof name);
  return std::stoi(std::string(name).substr(std::string("mlpo-adam-").size())) < 4 ? 0 : 1;
}

TEST_CASE("WorkerPool.AJobRunsOnItsMemorysNode", "[adam]") {
  DoneJobs done;
  const auto pool = StartOnTwoNodes(&done);
  CHECK(pool->workers() == 8);
  CHECK(pool->workers_on(0) == 4);
  CHECK(pool->workers_on(1) == 4);
  CHECK(pool->workers_on(7) == 0);
  std::atomic<int> elsewhere{0};
  for (int round = 0; round < 2000; ++round) {
    const int node = round % 2;
    // Not more pieces than the node has workers: nobody else is to help.
    FunctionJob job(1 + round % 4, [&](uint32_t) { elsewhere += NodeOfThisWorker() != node; });
    job.node = node;
    pool->Submit(&job);
    WaitFor(&done, 1);
  }
  CHECK(elsewhere == 0);
}

TEST_CASE("WorkerPool.AnIdleNodeHelpsWhereMoreWaitsThanThereAreHands", "[adam]") {
  DoneJobs done;
  const auto pool = StartOnTwoNodes(&done);
  // All eight workers have to take a piece of it at once.
  Meeting meeting(8);
  std::atomic<int> alone{0}, here{0};
  FunctionJob job(12, [&](uint32_t) {
    here += NodeOfThisWorker() == 0;
    alone += !meeting.Arrive();
  });
  job.node = 0;
  pool->Submit(&job);
  WaitFor(&done, 1);
  CHECK(alone == 0);
  CHECK(here >= 4);
}

TEST_CASE("WorkerPool.TheOwnNodesJobsComeBeforeAnothers", "[adam]") {
  DoneJobs done;
  const auto pool = StartOnTwoNodes(&done);
  // Node 1 is busy with its own; node 0 has far too much, and gets no help until node 1 is through.
  std::atomic<bool> go{false};
  std::atomic<int> helped{0}, own_left{64};
  const auto wait = [&] {
    while (!go) std::this_thread::yield();
  };
  FunctionJob own(64, [&](uint32_t) {
    wait();
    --own_left;
  });
  own.node = 1;
  FunctionJob other(400, [&](uint32_t) {
    wait();
    if (NodeOfThisWorker() == 1 && own_left > 7) ++helped;  // 7: pieces that the others have
  });
  other.node = 0;
  pool->Submit(&own);
  pool->Submit(&other);
  go = true;
  WaitFor(&done, 2);
  CHECK(helped <= 4);  // one each, of workers that had looked at home just before there was something
}

TEST_CASE("WorkerPool.SpansOfAWorkerDoNotOverlap", "[adam]") {
  DoneJobs done;
  const auto pool = StartOnTwoNodes(&done, 2);
  // Node 1's worker helps with node 0's job, does one of its own, and helps again.
  std::promise<void> helped_again;
  std::shared_future<void> end = helped_again.get_future().share();
  std::atomic<int> late{0};
  int helped = 0;
  FunctionJob own(1, [](uint32_t) {});
  own.node = 1;
  own.spans.resize(own.pieces);
  FunctionJob other(8, [&](uint32_t) {
    char name[16];
    pthread_getname_np(pthread_self(), name, sizeof name);
    if (std::string(name) == "mlpo-adam-0") {
      late += end.wait_for(std::chrono::milliseconds(kDeadlineMs)) != std::future_status::ready;
      return;
    }
    if (++helped == 1) pool->Submit(&own);
    if (helped == 2) helped_again.set_value();
  });
  other.node = 0;
  other.spans.resize(other.pieces);
  pool->Submit(&other);
  WaitFor(&done, 2);
  REQUIRE(late == 0);
  std::vector<WorkSpan> spans[2];
  for (const Job* job : {static_cast<const Job*>(&own), static_cast<const Job*>(&other)}) {
    for (const WorkSpan& span : job->spans) {
      if (span.begin_ns != 0) spans[span.worker].push_back(span);
    }
  }
  CHECK(spans[0].size() >= 1);
  CHECK(spans[1].size() == static_cast<size_t>(helped) + 1);
  for (std::vector<WorkSpan>& track : spans) {
    std::sort(track.begin(), track.end(), [](const WorkSpan& a, const WorkSpan& b) { return a.begin_ns < b.begin_ns; });
    for (size_t i = 0; i < track.size(); ++i) {
      CHECK(track[i].end_ns >= track[i].begin_ns);
      if (i > 0) CHECK(track[i].begin_ns >= track[i - 1].end_ns);
    }
  }
}

TEST_CASE("WorkerPool.OwnPiecesThatFollowEachOtherAreOneSpan", "[adam]") {
  DoneJobs done;
  const auto pool = StartPool(1, &done);
  CountingJob jobs[] = {CountingJob(5), CountingJob(5)};
  for (int round = 0; round < 2; ++round) {
    for (CountingJob& job : jobs) job.spans.assign(job.pieces, {});
    for (CountingJob& job : jobs) pool->Submit(&job);
    WaitFor(&done, 2);
    for (const CountingJob& job : jobs) {
      CHECK(job.spans[0].end_ns >= job.spans[0].begin_ns);
      for (size_t i = 0; i < job.spans.size(); ++i) CHECK((job.spans[i].begin_ns != 0) == (i == 0));
    }
    CHECK(jobs[1].spans[0].begin_ns >= jobs[0].spans[0].end_ns);
  }
}

TEST_CASE("WorkerPool.NodesWithoutWorkersAreServedByTheOthers", "[adam]") {
  DoneJobs done;
  const auto pool = StartOnTwoNodes(&done, 1);  // one worker: on one of the nodes
  CHECK(pool->workers_on(0) == 1);
  CHECK(pool->workers_on(1) == 1);
  for (const int node : {0, 1, 5, -1}) {
    CountingJob job(7);
    job.node = node;
    pool->Submit(&job);
    WaitFor(&done, 1);
    CHECK(job.EachOnce());
  }
}

TEST_CASE("WorkerPool.EveryPieceRunsOnceOnSeveralNodes", "[adam]") {
  for (const uint32_t workers : {2, 3, 8}) {
    DoneJobs done;
    std::vector<std::unique_ptr<CountingJob>> jobs;
    for (uint32_t i = 0; i < 600; ++i) {
      jobs.push_back(std::make_unique<CountingJob>(1 + i % 40));
      jobs.back()->node = static_cast<int>(i * i % 7 % 3) - 1;  // -1, 0, 1
    }
    {
      const auto pool = StartOnTwoNodes(&done, workers);
      for (const auto& job : jobs) pool->Submit(job.get());
    }  // the end runs them all, those of every node
    CHECK(WaitFor(&done, jobs.size()).size() == jobs.size());
    for (const auto& job : jobs) CHECK(job->EachOnce());
  }
}

TEST_CASE("WorkerPool.AnAbsurdNumberOfWorkersIsRefused", "[adam]") {
  DoneJobs done;
  WorkerPool::Options options;
  options.workers = 100'000;
  const Result<std::unique_ptr<WorkerPool>> pool = WorkerPool::Start(options, &done);
  REQUIRE(!pool.ok());
  CHECK(pool.status().code() == -EINVAL);
  CHECK(pool.status().message().find("100000") != std::string::npos);
}

}  // namespace
}  // namespace mlpo::testing
