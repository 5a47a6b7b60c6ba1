// The log: lines come to stderr in order, from a thread of their own; a stderr that takes nothing stalls nobody, and
// what is dropped is counted; the end of a process takes along what waits.
#include <fcntl.h>
#include <poll.h>
#include <spdlog/spdlog.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "daemon/base/check.h"
#include "daemon/base/log.h"
#include "daemon/base/unique_fd.h"
#include "tests/support/catch.h"

namespace {

using mlpo::UniqueFd;
using Clock = std::chrono::steady_clock;

constexpr int kSignals[] = {SIGHUP, SIGINT, SIGQUIT, SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV, SIGSYS, SIGTERM};

struct Pipe {
  UniqueFd read, write;
  Pipe() {
    int fds[2];
    REQUIRE(::pipe2(fds, O_CLOEXEC) == 0);
    read = UniqueFd(fds[0]);
    write = UniqueFd(fds[1]);
  }
};

// A child whose stderr is a pipe of one page, and which has its log there. It exits with 0 unless `body` ends it.
class Logging {
 public:
  // `body` gets a descriptor on which it may tell us something. `before`: before the log is there.
  explicit Logging(
      const std::function<void(int)>& body, const std::function<void()>& before = [] {}) {
    REQUIRE(::fcntl(stderr_.write.get(), F_SETPIPE_SZ, 4096) > 0);
    std::fflush(nullptr);  // or the child would write it once more
    std::cout.flush();
    pid_ = ::fork();
    REQUIRE(pid_ >= 0);
    if (pid_ == 0) {
      ::alarm(60);
      for (const int signal : kSignals) ::signal(signal, SIG_DFL);  // Catch2 has taken some
      ::dup2(stderr_.write.get(), STDERR_FILENO);
      ::close(stderr_.write.release());
      before();
      mlpo::StartLogging("info");
      body(told_.write.get());
      std::exit(0);
    }
    stderr_.write.reset();
    told_.write.reset();
  }
  ~Logging() {
    if (pid_ > 0) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
  }
  Logging(const Logging&) = delete;
  Logging& operator=(const Logging&) = delete;

  // What the body has told; the test fails if it does not within 30 s.
  uint64_t Told() const {
    pollfd ready{told_.read.get(), POLLIN, 0};
    REQUIRE(::poll(&ready, 1, 30'000) == 1);
    uint64_t told = 0;
    REQUIRE(::read(told_.read.get(), &told, sizeof told) == static_cast<ssize_t>(sizeof told));
    return told;
  }
  // Its stderr until its end.
  std::vector<std::string> Lines() const {
    std::string text;
    char chunk[4096];
    pollfd ready{stderr_.read.get(), POLLIN, 0};
    for (;;) {
      REQUIRE(::poll(&ready, 1, 30'000) == 1);
      const ssize_t got = ::read(stderr_.read.get(), chunk, sizeof chunk);
      if (got <= 0) break;
      text.append(chunk, static_cast<size_t>(got));
    }
    std::vector<std::string> lines;
    std::istringstream stream(text);
    for (std::string line; std::getline(stream, line);) lines.push_back(line);
    return lines;
  }
  // Its exit code, or 128 + signal.
  int End() {
    const auto deadline = Clock::now() + std::chrono::seconds(30);
    int status = 0;
    while (::waitpid(pid_, &status, WNOHANG) == 0) {
      REQUIRE(Clock::now() < deadline);
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    pid_ = -1;
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  }

 private:
  Pipe stderr_, told_;
  pid_t pid_ = -1;
};

void Tell(int fd, uint64_t what) {
  if (::write(fd, &what, sizeof what) != sizeof what) std::abort();
}

// The number behind `name` in a line.
std::optional<uint64_t> Number(const std::string& line, const std::string& name) {
  const size_t at = line.find(name);
  if (at == std::string::npos) return std::nullopt;
  return std::stoull(line.substr(at + name.size()));
}

void Say(int lines) {
  for (int i = 0; i < lines; ++i) spdlog::info("event=line n={}", i);
}

}  // namespace

TEST_CASE("Log.APipeThatNobodyReadsStallsNobodyAndWhatIsDroppedIsCounted") {
  constexpr int kLines = 10'000;
  Logging child([](int told) {
    Say(kLines);
    Tell(told, mlpo::LogLinesDropped());
  });
  const uint64_t told = child.Told();  // nobody has read a byte yet
  CHECK(told > 0);
  uint64_t written = 0, dropped = 0, next = 0;
  std::string last;
  for (const std::string& line : child.Lines()) {
    dropped += Number(line, "event=log_lines_dropped lines=").value_or(0);
    const std::optional<uint64_t> number = Number(line, "event=line n=");
    if (!number) continue;
    ++written;
    CHECK(*number >= next);
    next = *number + 1;
  }
  CHECK(child.End() == 0);
  CHECK(next == kLines);  // the newest lines are kept
  CHECK(dropped == told);
  CHECK(written + dropped == kLines);
}

TEST_CASE("Log.AProcessEndsThoughNobodyReadsItsLastLines") {
  Logging child([](int) { Say(1000); });
  CHECK(child.End() == 0);
}

TEST_CASE("Log.TheLastLinesOfAProcessAreWrittenHoweverItEnds") {
  struct Ending {
    const char* name;
    int code;
    std::function<void()> end;
  };
  const Ending endings[] = {
      {"exit", 3, [] { std::exit(3); }},
      {"_exit after FinishLogging", 4,
       [] {
         mlpo::FinishLogging();
         ::_exit(4);
       }},
      {"a failed check", 128 + SIGABRT, [] { MLPO_CHECK(::getpid() == 0); }},
      {"a signal that was sent", 128 + SIGTERM, [] { ::kill(::getpid(), SIGTERM); }},
      {"a fault", 128 + SIGSEGV,
       [] {
         void* const nothing = ::mmap(nullptr, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
         if (nothing != MAP_FAILED) *static_cast<volatile char*>(nothing) = 1;
       }},
  };
  for (const Ending& ending : endings) {
    CAPTURE(ending.name);
    Logging child([&](int told) {
      Say(500);
      Tell(told, 1);
      ending.end();
      for (;;) ::pause();  // until the signal has come
    });
    CHECK(child.Told() == 1);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // it ends before its lines are read
    uint64_t next = 0;
    bool is_said = false;
    for (const std::string& line : child.Lines()) {
      is_said |= line.find("event=check_failed") != std::string::npos &&
                 line.find("what=\"::getpid() == 0\"") != std::string::npos;
      if (const std::optional<uint64_t> number = Number(line, "event=line n=")) next += *number == next;
    }
    CHECK(next == 500);
    CHECK(is_said == (ending.code == 128 + SIGABRT));
    CHECK(child.End() == ending.code);
  }
}

TEST_CASE("Log.AForkedChildWritesItsLinesItself") {
  Logging child([](int) {
    spdlog::info("event=parent");
    const pid_t forked = ::fork();
    if (forked == 0) {
      spdlog::info("event=child");
      ::_exit(0);
    }
    ::waitpid(forked, nullptr, 0);
    spdlog::info("event=parent_again");
  });
  int children = 0, parents = 0;
  for (const std::string& line : child.Lines()) {
    children += line.find("event=child") != std::string::npos;
    parents += line.find("event=parent") != std::string::npos;
  }
  CHECK(children == 1);
  CHECK(parents == 2);
  CHECK(child.End() == 0);
}

TEST_CASE("Log.TheThreadHasAName") {
  Logging child([](int) {
    spdlog::info("event=first");
    mlpo::FinishLogging();
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
      std::string name;
      std::ifstream(task.path() / "comm") >> name;
      spdlog::info("event=thread name={}", name);
    }
  });
  int named = 0;
  for (const std::string& line : child.Lines()) named += line.find("event=thread name=mlpo-log") != std::string::npos;
  CHECK(named == 1);
}

TEST_CASE("Log.TheJournalIsToldPriorities") {
  const auto be_the_journals = [] {
    struct stat st;
    if (::fstat(STDERR_FILENO, &st) != 0) std::abort();
    ::setenv("JOURNAL_STREAM", (std::to_string(st.st_dev) + ":" + std::to_string(st.st_ino)).c_str(), 1);
  };
  const auto say = [](int) {
    spdlog::debug("event=debug");
    spdlog::info("event=info");
    spdlog::warn("event=warn");
    spdlog::error("event=error");
    spdlog::critical("event=critical");
  };
  Logging child(say, be_the_journals);
  CHECK(child.Lines() ==
        std::vector<std::string>{"<6>event=info", "<4>event=warn", "<3>event=error", "<2>event=critical"});
}
