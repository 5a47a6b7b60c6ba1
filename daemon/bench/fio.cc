#include "daemon/bench/fio.h"

#include <poll.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <sstream>

#include "daemon/bench/bench.h"
#include "daemon/bench/own_daemon.h"
#include "daemon/bench/ping_pong.h"

namespace mlpo::bench {
namespace {

constexpr int64_t kPatienceNs = int64_t{120} * 1'000'000'000;  // beyond the time that the run is to take

// Starts a program, takes in what it prints on both outputs, and sees to it that it ends.
class Child {
 public:
  explicit Child(std::vector<std::string> command) {
    int out[2];
    if (::pipe(out) != 0) throw BenchError("pipe failed");
    std::vector<char*> argv;
    for (std::string& word : command) argv.push_back(word.data());
    argv.push_back(nullptr);
    pid_ = ::fork();
    if (pid_ < 0) throw BenchError("fork failed");
    if (pid_ == 0) {
      ::dup2(out[1], 1);
      ::dup2(out[1], 2);
      ::close(out[0]);
      ::close(out[1]);
      // Its buffers in huge pages, as the daemon's are (glibc 2.35 and newer): with small ones a request has so many
      // segments that the kernel cuts it up, and some devices do half as much.
      ::setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1", 1);
      ::execvp(argv[0], argv.data());
      ::_exit(127);
    }
    ::close(out[1]);
    from_ = out[0];
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child() {
    ::close(from_);
    if (pid_ > 0) {
      ::kill(pid_, SIGTERM);
      ::waitpid(pid_, nullptr, 0);
    }
  }

  // All of its output, once it has ended.
  std::string Output(int64_t deadline_ns) {
    std::string text;
    for (;;) {
      const int64_t left_ms = (deadline_ns - NowNs()) / 1'000'000;
      pollfd wait = {from_, POLLIN, 0};
      if (left_ms <= 0 || ::poll(&wait, 1, static_cast<int>(left_ms)) == 0) throw BenchError("fio does not end");
      CheckInterrupted();
      char part[65536];
      const ssize_t bytes = ::read(from_, part, sizeof part);
      if (bytes < 0 && errno == EINTR) continue;
      if (bytes <= 0) return text;
      text.append(part, static_cast<size_t>(bytes));
    }
  }
  int ExitCode() {
    int status = 0;
    while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
    }
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }

 private:
  pid_t pid_ = -1;
  int from_ = -1;
};

// Registering buffers makes fio faster, where the limit on locked memory has room for them.
bool MayRegister(uint64_t bytes) {
  rlimit limit = {};
  return ::geteuid() == 0 || (::getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur >= bytes);
}

}  // namespace

bool FioIsThere() {
  const char* path = std::getenv("PATH");
  std::istringstream folders(path == nullptr ? "" : path);
  for (std::string folder; std::getline(folders, folder, ':');) {
    if (::access((folder + "/fio").c_str(), X_OK) == 0) return true;
  }
  return false;
}

std::vector<FioSpeed> RunFio(const FioRun& run) {
  std::vector<std::string> command = {"fio",
                                      "--output-format=json",
                                      "--ioengine=io_uring",
                                      "--thread",
                                      "--direct=" + std::to_string(run.direct ? 1 : 0),
                                      "--bs=" + std::to_string(run.block_bytes),
                                      "--iodepth=" + std::to_string(run.depth),
                                      "--size=" + std::to_string(run.file_bytes),
                                      "--rw=" + run.mix};
  if (MayRegister(2 * run.depth * run.block_bytes * run.files.size())) command.push_back("--fixedbufs=1");
  if (run.mix == "readwrite") command.push_back("--rwmixread=50");
  if (run.seconds > 0) {
    command.push_back("--time_based");
    command.push_back("--runtime=" + std::to_string(static_cast<int64_t>(run.seconds * 1000)) + "ms");
    command.push_back("--ramp_time=" + std::to_string(static_cast<int64_t>(run.warm_up_seconds * 1000)) + "ms");
  }
  for (size_t i = 0; i < run.files.size(); ++i) {
    std::string file;  // fio takes ':' as the end of a name
    for (const char c : run.files[i]) file += c == ':' ? std::string("\\:") : std::string(1, c);
    command.push_back("--name=path" + std::to_string(i));
    command.push_back("--filename=" + file);
  }
  Child fio(std::move(command));
  const std::string output =
      fio.Output(NowNs() + static_cast<int64_t>((run.warm_up_seconds + run.seconds) * 1e9) + kPatienceNs);
  const int code = fio.ExitCode();
  const size_t begin = output.find('{');  // warnings come first
  const nlohmann::json result =
      begin == std::string::npos ? nlohmann::json() : nlohmann::json::parse(output.substr(begin), nullptr, false);
  if (code != 0 || !result.is_object() || result["jobs"].size() != run.files.size())
    throw BenchError("fio ended with " + std::to_string(code) + ": " + output.substr(0, 500));
  std::vector<FioSpeed> speeds;
  for (const nlohmann::json& job : result["jobs"]) {
    speeds.push_back({job["read"]["bw_bytes"].get<double>(), job["write"]["bw_bytes"].get<double>()});
  }
  return speeds;
}

}  // namespace mlpo::bench
