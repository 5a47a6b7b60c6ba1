#include "daemon/bench/ping_pong.h"

#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <functional>

#include "daemon/base/unique_fd.h"
#include "daemon/bench/bench.h"
#include "daemon/bench/cores.h"

namespace mlpo::bench {
namespace {

constexpr int kDeadlineS = 60;

// Runs `body` in a process that is bound to a core and ends with us.
class Child {
 public:
  Child(int core, const std::function<void()>& body) {
    const pid_t parent = ::getpid();
    pid_ = ::fork();
    if (pid_ < 0) throw BenchError("fork failed");
    if (pid_ > 0) return;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(1);
    try {
      const Pinned pinned(0, core);
      body();
    } catch (const BenchError& error) {
      std::fprintf(stderr, "mlpo-bench: %s\n", error.what());
      ::_exit(1);
    }
    ::_exit(0);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }

 private:
  pid_t pid_ = -1;
};

struct SharedWords {
  alignas(128) std::atomic<uint64_t> there{0};
  alignas(128) std::atomic<uint64_t> back{0};
};

class SharedMemory {
 public:
  SharedMemory() {
    void* memory = ::mmap(nullptr, sizeof(SharedWords), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw BenchError("mmap failed");
    words_ = new (memory) SharedWords();
  }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  ~SharedMemory() { ::munmap(words_, sizeof *words_); }
  SharedWords* operator->() const { return words_; }

 private:
  SharedWords* words_;
};

// Without a pause instruction, as the fastest way to look is what others are compared with.
void Await(const std::atomic<uint64_t>& word, uint64_t value) {
  constexpr uint64_t kLooks = uint64_t{1} << 24;
  int64_t deadline_ns = 0;  // the clock comes after the first looks
  do {
    for (uint64_t i = 0; i < kLooks; ++i) {
      if (word.load(std::memory_order_acquire) == value) return;
    }
    if (deadline_ns == 0) deadline_ns = NowNs() + kDeadlineS * int64_t{1'000'000'000};
  } while (NowNs() < deadline_ns);
  throw BenchError("the other side of the ping-pong does not answer");
}

// Interrupts what this process sleeps in, again and again from kDeadlineS on.
class Alarm {
 public:
  Alarm() {
    struct sigaction action = {};
    action.sa_handler = [](int) {};  // and no SA_RESTART
    const itimerval timer = {{1, 0}, {kDeadlineS, 0}};
    if (::sigaction(SIGALRM, &action, &before_) != 0 || ::setitimer(ITIMER_REAL, &timer, nullptr) != 0)
      throw BenchError("setitimer failed");
  }
  Alarm(const Alarm&) = delete;
  Alarm& operator=(const Alarm&) = delete;
  ~Alarm() {
    const itimerval off = {};
    ::setitimer(ITIMER_REAL, &off, nullptr);
    ::sigaction(SIGALRM, &before_, nullptr);
  }

 private:
  struct sigaction before_ = {};
};

void Ring(const UniqueFd& fd) {
  const uint64_t one = 1;
  if (::write(fd.get(), &one, sizeof one) != sizeof one) throw BenchError("writing an eventfd failed");
}

void Await(const UniqueFd& fd) {
  uint64_t value;
  if (::read(fd.get(), &value, sizeof value) != sizeof value)
    throw BenchError("the other side of the eventfds does not answer");
}

}  // namespace

int64_t NowNs() { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }

void SleepNs(int64_t ns) {
  const timespec pause = {ns / 1'000'000'000, ns % 1'000'000'000};
  ::nanosleep(&pause, nullptr);
}

std::vector<int64_t> BarePingPong(int peer_core, uint64_t count) {
  const SharedMemory words;
  const Child child(peer_core, [&] {
    for (uint64_t i = 1; i <= count; ++i) {
      while (words->there.load(std::memory_order_acquire) != i) {
      }
      words->back.store(i, std::memory_order_release);
    }
  });
  std::vector<int64_t> times(count);
  for (uint64_t i = 1; i <= count; ++i) {
    const int64_t start_ns = NowNs();
    words->there.store(i, std::memory_order_release);
    Await(words->back, i);
    times[i - 1] = NowNs() - start_ns;
  }
  return times;
}

std::vector<int64_t> EventfdPingPong(int peer_core, uint64_t count, int64_t pause_ns) {
  const UniqueFd there(::eventfd(0, EFD_CLOEXEC)), back(::eventfd(0, EFD_CLOEXEC));
  if (!there || !back) throw BenchError("eventfd failed");
  const Child child(peer_core, [&] {
    for (uint64_t i = 0; i < count; ++i) {
      Await(there);
      Ring(back);
    }
  });
  const Alarm alarm;
  std::vector<int64_t> times(count);
  for (int64_t& time : times) {
    SleepNs(pause_ns);
    const int64_t start_ns = NowNs();
    Ring(there);
    Await(back);
    time = NowNs() - start_ns;
  }
  return times;
}

}  // namespace mlpo::bench
