#include "daemon/bench/own_daemon.h"

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <thread>

#include "daemon/bench/bench.h"

namespace mlpo::bench {
namespace {

constexpr char kInside[] = "MLPO_BENCH_INSIDE";

constexpr auto kLook = std::chrono::milliseconds(20);

volatile std::sig_atomic_t interrupted = 0;

}  // namespace

std::string OwnProgram() { return std::filesystem::read_symlink("/proc/self/exe"); }

bool InOwnDaemon() { return std::getenv(kInside) != nullptr; }

int RunInOwnDaemon(const OwnDaemon& daemon, const std::vector<std::string>& arguments) {
  const CatchInterrupts catching;
  const ScratchFolder folder;
  const std::string config = folder.path() + "/mlpo.toml";
  {
    std::ofstream file(config);
    file << daemon.config << std::flush;
    if (!file) throw BenchError("cannot write " + config);
  }
  const std::string own = OwnProgram();
  std::vector<std::string> command = {std::filesystem::path(own).parent_path() / "mlpo-ctl", "run", "--config", config};
  if (daemon.pool_bytes > 0) command.insert(command.end(), {"--memory", std::to_string(daemon.pool_bytes)});
  command.insert(command.end(), {"--", own});
  command.insert(command.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& argument : command) argv.push_back(argument.data());
  argv.push_back(nullptr);
  ::setenv(kInside, "1", 1);
  ::setenv("MLPO_DAEMON__LOG_LEVEL", "warning", 0);
  const pid_t pid = ::fork();
  if (pid < 0) throw BenchError("fork failed");
  if (pid == 0) {
    ::execv(argv[0], argv.data());
    std::perror(argv[0]);
    ::_exit(127);
  }
  // Looked at in turn, as a signal could come just before a wait.
  int status = 0;
  for (bool told = false; ::waitpid(pid, &status, WNOHANG) == 0; std::this_thread::sleep_for(kLook)) {
    if (interrupted && !told) told = ::kill(pid, SIGTERM) == 0;  // we alone may have been told; it ends the daemon
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

CatchInterrupts::CatchInterrupts() {
  struct sigaction action = {};
  action.sa_handler = [](int) { interrupted = 1; };  // no SA_RESTART: what waits returns
  ::sigaction(SIGINT, &action, &interrupt_);
  ::sigaction(SIGTERM, &action, &terminate_);
}

CatchInterrupts::~CatchInterrupts() {
  ::sigaction(SIGINT, &interrupt_, nullptr);
  ::sigaction(SIGTERM, &terminate_, nullptr);
}

void CheckInterrupted() {
  if (interrupted) throw BenchError("interrupted");
}

ScratchFolder::ScratchFolder(std::string parent) {
  if (parent.empty()) {
    const char* temporary = std::getenv("TMPDIR");
    parent = temporary != nullptr && *temporary != '\0' ? temporary : "/tmp";
  }
  std::string pattern = parent + "/mlpo-bench-XXXXXX";
  if (::mkdtemp(pattern.data()) == nullptr) {
    throw BenchError("cannot make a folder in " + parent + ": " + std::generic_category().message(errno));
  }
  path_ = pattern;
}

ScratchFolder::~ScratchFolder() {
  std::error_code error;
  std::filesystem::remove_all(path_, error);
  if (error) std::fprintf(stderr, "mlpo-bench: cannot remove %s: %s\n", path_.c_str(), error.message().c_str());
}

}  // namespace mlpo::bench
