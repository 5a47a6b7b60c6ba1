// Clients that die where it hurts most: at each instruction of a submission, in the middle of a queue slot; and for
// want of memory. Those beside them notice nothing.
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <exception>
#include <stdexcept>
#include <string>

#include "tests/support/catch.h"
#include "tests/support/daemon_process.h"
#include "tests/support/daemon_status.h"
#include "tests/support/rank_process.h"
#include "tests/support/reference_trainer.h"
#include "tests/support/witness.h"

using namespace mlpo::test;
using mlpo::Client;

namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kArenaBytes = 16 << 20;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kStride = 499;  // their instructions are many, and most not ours
#else
constexpr int kStride = 31;
#endif

// A process of its own that connects, stops, and then submits and reaps some requests, an instruction at a time.
class TracedClient {
 public:
  explicit TracedClient(const DaemonProcess& daemon) : pid_(::fork()) {
    REQUIRE(pid_ >= 0);
    if (pid_ == 0) {
      try {
        Client client = Connect(daemon.socket(), "traced", 0, 1, kArenaBytes);
        if (::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) ::_exit(kNoTracing);
        ::raise(SIGSTOP);
        for (int i = 0; i < 2; ++i) client.SubmitNop().Wait();
        ::raise(SIGSTOP);
        for (;;) ::pause();
      } catch (...) {
        ::_exit(1);
      }
    }
    REQUIRE(::waitpid(pid_, &status_, WUNTRACED) == pid_);
  }
  ~TracedClient() {
    if (WIFEXITED(status_)) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  TracedClient(const TracedClient&) = delete;
  TracedClient& operator=(const TracedClient&) = delete;

  bool CannotBeTraced() const { return WIFEXITED(status_) && WEXITSTATUS(status_) == kNoTracing; }
  // Where it is after so many instructions it dies. False if it had come to the end before.
  bool DiesAfter(int instructions) {
    REQUIRE(WIFSTOPPED(status_));
    for (int i = 0; i < instructions; ++i) {
      if (::ptrace(PTRACE_SINGLESTEP, pid_, nullptr, nullptr) != 0) return false;
      if (::waitpid(pid_, &status_, 0) != pid_ || !WIFSTOPPED(status_)) return false;
      if (WSTOPSIG(status_) == SIGSTOP) return false;
    }
    return true;
  }

 private:
  static constexpr int kNoTracing = 3;
  const pid_t pid_;
  int status_ = 0;
};

// Writes to a new file until there is no room; whether that came within `most` bytes.
bool FillUp(const std::string& name, uint64_t most) {
  const int fd = ::open(name.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  static const char chunk[4096] = {};
  bool full = false;
  for (uint64_t done = 0; fd >= 0 && done < most && !full; done += sizeof chunk)
    full = ::write(fd, chunk, sizeof chunk) < 0 && errno == ENOSPC;
  if (fd >= 0) ::close(fd);
  return full;
}

void Expect(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}

constexpr int kSkipped = 77;
#if defined(__SANITIZE_ADDRESS__)
constexpr int kBusEnd = 1;  // by its handler
#elif defined(__SANITIZE_THREAD__)
constexpr int kBusEnd = 66;
#else
constexpr int kBusEnd = 128 + SIGBUS;
#endif

// In a process of its own, with a /dev/shm of its own that is full. The exit code.
int TrainWithoutDevShm() {
  if (::unshare(CLONE_NEWNS) != 0) return kSkipped;
  if (::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) return kSkipped;
  if (::mount("tmpfs", "/dev/shm", "tmpfs", 0, "size=1m") != 0) return kSkipped;
  Expect(FillUp("/dev/shm/full", 4 << 20), "/dev/shm does not fill up");
  DaemonProcess daemon({.environment = {"MLPO_MEMORY__ARENAS=64MiB"}});
  Client client = Connect(daemon.socket(), "good", 0, 1, kArenaBytes);
  ReferenceTrainer trainer(client, {"w", 100'003});
  for (int i = 0; i < 3; ++i) trainer.Step();

  Client greedy = Connect(daemon.socket(), "greedy");
  mlpo_subgroup_options options = MLPO_SUBGROUP_OPTIONS_INIT;
  options.key = "large";
  options.numel = 30'000'000;  // 120 MB of arena
  options.dtype = options.grad_dtype = MLPO_FLOAT32;
  try {
    (void)greedy.Register(options);
    Expect(false, "120 MB of 64 MiB were granted");
  } catch (const mlpo::Error& error) {
    const std::string text = error.what();
    Expect(error.code() == MLPO_ERR_QUOTA && text.find("67108864") != std::string::npos, "no figure: " + text);
  }

  RankProcess dies(daemon.socket(), {.job = "dies", .arena_bytes = kArenaBytes});
  dies.Go();
  Expect(dies.WaitFor("step 2"), "the rank does not train: " + dies.output());
  dies.Signal(SIGBUS);
  Expect(dies.WaitForEnd() == kBusEnd, "it outlived SIGBUS");
  Expect(daemon.running(), "the daemon has ended:\n" + daemon.log());
  trainer.Step();
  Expect(trainer.Difference().empty(), trainer.Difference());
  return 0;
}

}  // namespace

// Each instruction with MLPO_LONG=1, else one in some.
TEST_CASE("C25_KilledAtEachInstructionOfPushAndPop") {
  DaemonProcess daemon;
  Witness witness(daemon);
  const int descriptors = daemon.SettledDescriptors();
  const int stride = LongForm() ? 1 : kStride;
  const auto give_up = Clock::now() + std::chrono::seconds(LongForm() ? 3600 : 20);
  int deaths = 0;
  bool all = false;
  for (int instructions = 1; !all && Clock::now() < give_up; instructions += stride, ++deaths) {
    TracedClient client(daemon);
    if (client.CannotBeTraced()) {
      WARN("skipped: ptrace is not allowed here");
      return;
    }
    all = !client.DiesAfter(instructions);
    if (deaths % 20 == 0) witness.Step();
  }
  std::printf("%d deaths%s\n", deaths, all ? ", up to the last instruction" : "");
  CHECK(deaths > 20);
  REQUIRE(witness.Alone());
  CHECK(daemon.SettledDescriptors() == descriptors);
  CHECK(witness.ProtocolErrors() == 0);
  CHECK(witness.Complaint() == "");
}

// No memory of ours is in /dev/shm; what there is has the daemon's own limit, and an error that has the figures.
TEST_CASE("C23_AFullDevShmChangesNothingAndALimitIsSaid") {
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    int code = 1;
    try {
      code = TrainWithoutDevShm();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
    } catch (...) {
    }
    ::_exit(code);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  REQUIRE(WIFEXITED(status));
  if (WEXITSTATUS(status) == kSkipped) {
    WARN("skipped: mounting in a namespace of its own needs root");
    return;
  }
  CHECK(WEXITSTATUS(status) == 0);
}
