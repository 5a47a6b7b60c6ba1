// ring_wakeup [OPERATIONS] [--break]: no wake-up is lost, in either direction.
//
// The client's end is the real one (client/src/ring_end), the daemon's end sleeps and wakes as proto/FORMAT.md says.
// Spinning is off on both sides, and so are the time-outs behind the sleeps: a lost wake-up stops everything, and the
// watchdog sees that nothing moves. Bursts of random length with random pauses on both sides shift the two ends
// against each other. Runs as two threads, as four client threads, and as two processes that share memfds.
//
// OPERATIONS: 10^6 (a few seconds; 10^8 with MLPO_LONG=1), of each kind. --break: the daemon's end forgets to look at
// the tail again after its announcement; then the program must report a stall. Exit 0: nothing lost; 1: a stall or a
// wrong answer.
#include <signal.h>
#include <sys/epoll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "client/src/session.h"
#include "mlpo/client.h"
#include "proto/ring.h"
#include "proto/spsc_ring.hpp"
#include "tests/support/fake_daemon.h"

namespace {

constexpr uint32_t kEntries = 64;
constexpr int64_t kOneHourNs = int64_t{3600} * 1'000'000'000;
constexpr int kStallSeconds = 10;

// What both ends tell; in shared memory, so that it works across processes.
struct Progress {
  std::atomic<uint64_t> answered{0};       // submissions, by the daemon's end
  std::atomic<uint64_t> daemon_sleeps{0};  // epoll_wait calls
  std::atomic<uint64_t> futex_wakes{0};
  std::atomic<uint64_t> ended{0};  // requests, by the client
  std::atomic<bool> stop{false};
};

void Spin(uint32_t rounds) {
  for (uint32_t i = 0; i < rounds; ++i) asm volatile("");
}

// The daemon's end: answers every submission, some at a time, until told to stop.
void Serve(const FakeRing& ring, Progress* progress, bool forget_recheck) {
  mlpo::SpscConsumer<mlpo_submission> submissions(
      reinterpret_cast<mlpo_submission*>(ring.client + MLPO_RING_HEADER_BYTES), ring.entries,
      &ring.client_lines()->submission_tail, &ring.daemon_lines()->submission_head);
  mlpo::SpscProducer<mlpo_completion> completions(
      reinterpret_cast<mlpo_completion*>(ring.daemon + MLPO_RING_HEADER_BYTES), ring.entries,
      &ring.daemon_lines()->completion_tail, &ring.client_lines()->completion_head);
  const int poll = epoll_create1(EPOLL_CLOEXEC);
  epoll_event event = {};
  event.events = EPOLLIN | EPOLLET;
  if (poll < 0 || epoll_ctl(poll, EPOLL_CTL_ADD, ring.doorbell, &event) != 0) std::abort();
  std::minstd_rand random(7);
  // Pauses between each store and the load that must follow it: where a wake-up could fall through.
  const auto pause = [&random] {
    if (random() % 8 == 0) Spin(random() % 4000);
  };
  uint32_t* wanted = &ring.daemon_lines()->doorbell_wanted;
  while (!progress->stop.load()) {
    const int64_t available = submissions.Available();
    if (available < 0) std::abort();
    if (available == 0) {
      pause();
      mlpo::SharedWords::Store(wanted, 1, std::memory_order_seq_cst);
      pause();
      if (forget_recheck || submissions.AvailableBeforeSleep() == 0) {
        progress->daemon_sleeps.fetch_add(1, std::memory_order_relaxed);
        if (epoll_wait(poll, &event, 1, -1) < 0 && errno != EINTR) std::abort();
      }
      mlpo::SharedWords::Store(wanted, 0, std::memory_order_seq_cst);
      continue;
    }
    const int64_t now = 1 + static_cast<int64_t>(random() % static_cast<uint32_t>(available));
    for (int64_t i = 0; i < now; ++i) {
      const mlpo_submission submission = submissions.Pop();
      mlpo_completion completion = {};
      completion.user_data = submission.user_data;
      completion.value = submission.user_data;
      if (completions.Free() <= 0) std::abort();
      completions.Push(completion);
    }
    submissions.Release();
    pause();
    completions.Publish();
    pause();
    if (completions.ConsumerSleeps(&ring.client_lines()->completion_sleepers)) {
      progress->futex_wakes.fetch_add(1, std::memory_order_relaxed);
      syscall(SYS_futex, &ring.daemon_lines()->completion_tail, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    }
    progress->answered.fetch_add(static_cast<uint64_t>(now), std::memory_order_relaxed);
  }
  close(poll);
}

mlpo_client* MakeClient(const FakeRing& ring) {
  auto* client = new (calloc(1, sizeof(mlpo_client))) mlpo_client();
  if (client->mark.Open() != 0) std::abort();
  mlpo::client::RingAreas areas;
  areas.client_lines = ring.client_lines();
  areas.daemon_lines = ring.daemon_lines();
  areas.submissions = reinterpret_cast<mlpo_submission*>(ring.client + MLPO_RING_HEADER_BYTES);
  areas.hypers = reinterpret_cast<mlpo_hyper*>(ring.client + ring.hyper_offset);
  areas.completions = reinterpret_cast<mlpo_completion*>(ring.daemon + MLPO_RING_HEADER_BYTES);
  areas.errors = reinterpret_cast<mlpo_error_record*>(ring.daemon + ring.errors_offset);
  areas.entries = ring.entries;
  areas.doorbell = ring.doorbell;
  mlpo::client::WaitTuning tuning;
  tuning.spin_ns = 0;
  tuning.slice_ns = kOneHourNs;
  if (client->ring.Open(areas, tuning, nullptr, nullptr) != 0) std::abort();
  return client;
}

// Submits `operations` in bursts and waits for each of them. Returns how many went wrong.
uint64_t Drive(mlpo_client* client, Progress* progress, uint64_t operations, uint32_t seed) {
  std::minstd_rand random(seed);
  uint64_t wrong = 0;
  mlpo_request* requests[16];
  for (uint64_t done = 0; done < operations;) {
    const uint64_t burst = std::min<uint64_t>(1 + random() % (random() % 4 == 0 ? 16 : 2), operations - done);
    for (uint64_t i = 0; i < burst; ++i) {
      requests[i] = nullptr;
      wrong += mlpo_submit_nop(client, MLPO_FOREVER, &requests[i]) != 0;
    }
    if (random() % 4 == 0) Spin(random() % 3000);
    for (uint64_t i = 0; i < burst; ++i) {
      wrong += mlpo_request_wait(requests[i], MLPO_FOREVER, nullptr) != 0;
      mlpo_request_free(requests[i]);
    }
    done += burst;
    progress->ended.fetch_add(burst, std::memory_order_relaxed);
  }
  return wrong;
}

// Ends the process when nothing has moved for a while: every thread sleeps for ever then.
class Watchdog {
 public:
  Watchdog(const char* name, const FakeRing& ring, Progress* progress, pid_t child)
      : thread_([this, name, &ring, progress, child] {
          uint64_t last = 0;
          auto since = std::chrono::steady_clock::now();
          while (!over_.load()) {
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
            const uint64_t now = progress->answered.load() + progress->ended.load();
            if (now != last) {
              last = now;
              since = std::chrono::steady_clock::now();
            } else if (std::chrono::steady_clock::now() - since > std::chrono::seconds(kStallSeconds)) {
              std::printf(
                  "%s: STALLED after %llu answers, %llu requests ended: tails %u/%u, heads %u/%u, doorbell_wanted %u, "
                  "sleepers %u\n",
                  name, static_cast<unsigned long long>(progress->answered.load()),
                  static_cast<unsigned long long>(progress->ended.load()),
                  mlpo::SharedWords::Load(&ring.client_lines()->submission_tail, std::memory_order_seq_cst),
                  mlpo::SharedWords::Load(&ring.daemon_lines()->completion_tail, std::memory_order_seq_cst),
                  mlpo::SharedWords::Load(&ring.daemon_lines()->submission_head, std::memory_order_seq_cst),
                  mlpo::SharedWords::Load(&ring.client_lines()->completion_head, std::memory_order_seq_cst),
                  mlpo::SharedWords::Load(&ring.daemon_lines()->doorbell_wanted, std::memory_order_seq_cst),
                  mlpo::SharedWords::Load(&ring.client_lines()->completion_sleepers, std::memory_order_seq_cst));
              std::fflush(stdout);
              if (child > 0) kill(child, SIGKILL);
              _exit(1);
            }
          }
        }) {}
  ~Watchdog() {
    over_.store(true);
    thread_.join();
  }

 private:
  std::atomic<bool> over_{false};
  std::thread thread_;
};

// One form of the test; true if every operation came back.
bool Run(const char* name, uint64_t operations, int clients, bool two_processes, bool forget_recheck) {
  void* shared = mmap(nullptr, sizeof(Progress), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) std::abort();
  auto* progress = new (shared) Progress();
  FakeRing ring;
  ring.Create(kEntries, /*sealed=*/true);
  pid_t child = -1;
  std::thread server;
  if (two_processes) {
    child = fork();
    if (child == 0) {
      Serve(ring, progress, forget_recheck);
      _exit(0);
    }
    if (child < 0) std::abort();
  } else {
    server = std::thread([&] { Serve(ring, progress, forget_recheck); });
  }
  mlpo_client* client = MakeClient(ring);
  const auto start = std::chrono::steady_clock::now();
  std::atomic<uint64_t> wrong{0};
  {
    Watchdog watchdog(name, ring, progress, child);
    std::vector<std::thread> threads;
    for (int t = 0; t < clients; ++t) {
      threads.emplace_back([&, t] {
        wrong.fetch_add(
            Drive(client, progress, operations / static_cast<uint64_t>(clients), static_cast<uint32_t>(t) + 1));
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  progress->stop.store(true);
  const uint64_t one = 1;
  if (write(ring.doorbell, &one, sizeof one) != sizeof one) std::abort();
  if (two_processes) {
    int status = 0;
    if (waitpid(child, &status, 0) != child || status != 0) wrong.fetch_add(1);
  } else {
    server.join();
  }
  const uint64_t sleeps = progress->daemon_sleeps.load(), wakes = progress->futex_wakes.load();
  std::printf("%s: %llu operations in %.1f s, wrong %llu, daemon slept %llu times, client was woken %llu times\n", name,
              static_cast<unsigned long long>(progress->ended.load()), seconds,
              static_cast<unsigned long long>(wrong.load()), static_cast<unsigned long long>(sleeps),
              static_cast<unsigned long long>(wakes));
  std::fflush(stdout);
  // Without sleeping nothing would have been shown.
  const bool slept = sleeps > operations / 1000 && wakes > operations / 1000;
  if (!slept) std::printf("%s: hardly anybody slept\n", name);
  client->ring.ReleaseMemory();
  client->~mlpo_client();
  free(client);
  ring.Destroy();
  munmap(shared, sizeof(Progress));
  return wrong.load() == 0 && slept;
}

}  // namespace

int main(int argc, char** argv) {
  const char* long_form = std::getenv("MLPO_LONG");
  uint64_t operations = long_form != nullptr && std::strcmp(long_form, "1") == 0 ? 100'000'000 : 1'000'000;
  bool forget_recheck = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--break") == 0) {
      forget_recheck = true;
    } else {
      operations = std::strtoull(argv[i], nullptr, 10);
    }
  }
  if (operations < 1000) {
    std::fprintf(stderr, "ring_wakeup [OPERATIONS of at least 1000] [--break]\n");
    return 64;
  }
  // The one with two processes first: it forks while there is one thread.
  const bool fine = Run("two processes", operations, 1, /*two_processes=*/true, forget_recheck) &&
                    Run("two threads", operations, 1, /*two_processes=*/false, forget_recheck) &&
                    Run("four client threads", operations, 4, /*two_processes=*/false, forget_recheck);
  return fine ? 0 : 1;
}
