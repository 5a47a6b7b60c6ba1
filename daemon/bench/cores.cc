#include "daemon/bench/cores.h"

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>

#include "daemon/bench/bench.h"

namespace mlpo::bench {
namespace {

std::string Read(const std::filesystem::path& file) {
  std::ifstream stream(file);
  return {std::istreambuf_iterator<char>(stream), {}};
}

std::string Siblings(int core) {
  return Read("/sys/devices/system/cpu/cpu" + std::to_string(core) + "/topology/thread_siblings_list");
}

std::string Last() { return std::generic_category().message(errno); }

}  // namespace

std::pair<int, int> TwoCores() {
  cpu_set_t mine;
  if (::sched_getaffinity(0, sizeof mine, &mine) != 0) throw BenchError("sched_getaffinity: " + Last());
  int first = -1, sibling = -1;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &mine)) continue;
    if (first < 0) {
      first = core;
    } else if (const std::string threads = Siblings(core); threads.empty() || threads != Siblings(first)) {
      return {first, core};
    } else if (sibling < 0) {
      sibling = core;
    }
  }
  if (sibling < 0) throw BenchError("two cores are needed, and the affinity mask has one");
  return {first, sibling};
}

Pinned::Pinned(pid_t thread, int core) : thread_(thread) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  if (::sched_getaffinity(thread, sizeof before_, &before_) != 0 || ::sched_setaffinity(thread, sizeof set, &set) != 0)
    throw BenchError("binding thread " + std::to_string(thread) + " to core " + std::to_string(core) + ": " + Last());
}

Pinned::~Pinned() {
  if (::sched_setaffinity(thread_, sizeof before_, &before_) != 0 && errno != ESRCH)
    std::fprintf(stderr, "mlpo-bench: thread %d stays bound to one core: %s\n", thread_, Last().c_str());
}

pid_t ThreadNamed(pid_t process, const std::string& name) {
  const std::string tasks = "/proc/" + std::to_string(process) + "/task";
  std::error_code error;
  for (const auto& task : std::filesystem::directory_iterator(tasks, error)) {
    if (Read(task.path() / "comm") == name + "\n") return std::stoi(task.path().filename());
  }
  throw BenchError("process " + std::to_string(process) + " has no thread " + name +
                   (error ? ": " + error.message() : "") + " (the daemon has to be in this pid namespace)");
}

}  // namespace mlpo::bench
