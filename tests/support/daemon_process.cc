#include "tests/support/daemon_process.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <thread>

extern char** environ;

namespace mlpo::test {
namespace {

using Clock = std::chrono::steady_clock;
namespace fs = std::filesystem;

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

}  // namespace

std::vector<std::string> DaemonProcess::PersistentPaths(uint64_t which) {
  const std::string persistent = "persistent = true\n";
  if (which % 3 == 0) return {};
  return {which % 3 == 1 ? persistent : "", persistent};
}

DaemonProcess::DaemonProcess(Options options) : options_(std::move(options)) {
  const char* parent = std::getenv("TMPDIR");
  std::string pattern = std::string(parent != nullptr && *parent != 0 ? parent : "/tmp") + "/mlpo-test-XXXXXX";
  if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
  folder_ = pattern;
  for (int i = 0; i < options_.paths; ++i) fs::create_directory(path(i));
  std::ofstream config(folder_ + "/mlpo.toml");
  config << options_.config << "[memory]\nblock = " << options_.block << "\n";
  for (int i = 0; i < options_.paths; ++i) {
    config << "[[path]]\ndirectory = \"" << path(i) << "\"\nengine = \"" << options_.engine << "\"\n";
    if (options_.path_settings.empty()) continue;
    config << options_.path_settings[std::min<size_t>(static_cast<size_t>(i), options_.path_settings.size() - 1)];
  }
  config.close();
  Start();
}

std::string DaemonProcess::Program() {
  const char* given = std::getenv("MLPO_DAEMON");
  return given != nullptr ? given : MLPO_TEST_DAEMON;
}

void DaemonProcess::Start() {
  std::vector<std::string> arguments = {Program(), "--config", folder_ + "/mlpo.toml", "--socket",
                                        socket(),  "--memory", options_.memory};
  arguments.insert(arguments.end(), options_.arguments.begin(), options_.arguments.end());
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  std::vector<char*> env;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    if (std::string(*entry).rfind("MLPO_", 0) != 0) env.push_back(*entry);
  }
  for (std::string& entry : options_.environment) env.push_back(entry.data());
  env.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);  // or it would hold our caller's pipe open
  if (options_.log >= 0)
    posix_spawn_file_actions_adddup2(&actions, options_.log, 2);
  else
    posix_spawn_file_actions_addopen(&actions, 2, (folder_ + "/log").c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
  const int rc = ::posix_spawn(&pid_, argv[0], &actions, nullptr, argv.data(), env.data());
  posix_spawn_file_actions_destroy(&actions);
  if (rc != 0) throw std::runtime_error("cannot start " + arguments[0]);
  ++starts_;
  if (!options_.wait_ready) return;
  const auto deadline = Clock::now() + std::chrono::seconds(60);
  for (;;) {
    const std::string text = log();
    int ready = 0;
    for (size_t at = text.find("event=ready"); at != std::string::npos; at = text.find("event=ready", at + 1)) ++ready;
    if (ready >= starts_) return;
    if (!running() || Clock::now() > deadline) throw std::runtime_error("the daemon did not start:\n" + text);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

DaemonProcess::~DaemonProcess() {
  if (running()) {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  std::error_code ignored;
  fs::remove_all(folder_, ignored);
}

std::string DaemonProcess::log() const { return ReadFile(folder_ + "/log"); }

void DaemonProcess::Signal(int signal) {
  if (pid_ > 0) ::kill(pid_, signal);
}

bool DaemonProcess::running() {
  if (pid_ <= 0) return false;
  siginfo_t info = {};
  return ::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == 0;
}

int DaemonProcess::WaitForEnd(int seconds) {
  const auto deadline = Clock::now() + std::chrono::seconds(seconds);
  while (running()) {
    if (Clock::now() > deadline) throw std::runtime_error("the daemon did not end:\n" + log());
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  int status = 0;
  ::waitpid(pid_, &status, 0);
  pid_ = -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

int DaemonProcess::OpenDescriptors() const {
  int count = 0;
  for (const auto& entry : fs::directory_iterator("/proc/" + std::to_string(pid_) + "/fd")) {
    (void)entry;
    ++count;
  }
  return count;
}

int DaemonProcess::SettledDescriptors() const {
  const auto deadline = Clock::now() + std::chrono::seconds(20);
  int count = OpenDescriptors();
  for (int same = 0; same < 40; ++same) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    const int now = OpenDescriptors();
    if (now != count) same = 0;
    count = now;
    if (Clock::now() > deadline) throw std::runtime_error("the daemon opens and closes descriptors all the time");
  }
  return count;
}

uint64_t DaemonProcess::ResidentBytes() const {
  std::istringstream statm(ReadFile("/proc/" + std::to_string(pid_) + "/statm"));
  uint64_t total = 0, resident = 0;
  statm >> total >> resident;
  return resident * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
}

double DaemonProcess::CpuSeconds() const {
  const std::string stat = ReadFile("/proc/" + std::to_string(pid_) + "/stat");
  std::istringstream fields(stat.substr(stat.rfind(')') + 1));  // the name before it may hold anything
  std::string skipped;
  for (int i = 0; i < 11; ++i) fields >> skipped;
  uint64_t user = 0, system = 0;
  fields >> user >> system;
  return static_cast<double>(user + system) / static_cast<double>(::sysconf(_SC_CLK_TCK));
}

std::vector<std::string> DaemonProcess::ScratchFiles() const {
  std::vector<std::string> files;
  for (int i = 0; i < options_.paths; ++i) {
    std::error_code error;  // files go while we look
    for (fs::recursive_directory_iterator it(path(i), error), end; it != end && !error; it.increment(error)) {
      const int depth = it.depth();
      // <path>/mlpo/<uid>/<node>/<uid>-<job>/<rank>-<generation>/...: what is above the job is the daemon's.
      if (it->is_regular_file(error) && depth > 3) files.push_back(it->path());
    }
  }
  return files;
}

bool DaemonProcess::ScratchGone(int seconds) const {
  const auto deadline = Clock::now() + std::chrono::seconds(seconds);
  while (!ScratchFiles().empty()) {
    if (Clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

}  // namespace mlpo::test
