// How soon a thread runs, as the kernel says in /proc: its slice, which is what one that wakes is weighed by.
#include "daemon/base/thread.h"

#include <sys/resource.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <optional>
#include <string>
#include <thread>

#include "tests/support/catch.h"

namespace mlpo::testing {
namespace {

// Linux 6.12 and newer has slices of threads' own.
bool HasSlices() {
  utsname system = {};
  int major = 0, minor = 0;
  REQUIRE(::uname(&system) == 0);
  REQUIRE(std::sscanf(system.release, "%d.%d", &major, &minor) == 2);
  return major > 6 || (major == 6 && minor >= 12);
}

// ns; nothing where the kernel does not show it.
std::optional<uint64_t> Slice(pid_t thread) {
  std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/sched");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("se.slice")) return std::stoull(line.substr(line.find(':') + 1));
  }
  return std::nullopt;
}

TEST_CASE("Thread.WithShortTurnsHasAShorterSliceAndTheSameNiceValue") {
  std::optional<uint64_t> before, after;
  int nicer = -1, nice = 0;
  std::thread([&] {  // asserts nothing: what it throws would end the program
    nicer = ::setpriority(PRIO_PROCESS, 0, 3);
    before = Slice(::gettid());
    TakeShortTurns();
    after = Slice(::gettid());
    nice = ::getpriority(PRIO_PROCESS, 0);
  })
      .join();
  REQUIRE(nicer == 0);
  CHECK(nice == 3);
  if (!HasSlices() || !before) {
    WARN("skipped the rest: this kernel has no slices of threads' own, or does not show them");
    return;
  }
  CHECK(*before > 100'000);
  CHECK(*after == 100'000);
}

}  // namespace
}  // namespace mlpo::testing
