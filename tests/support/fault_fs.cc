#include "tests/support/fault_fs.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <thread>

extern char** environ;

namespace mlpo::test {

FaultFs::FaultFs() : reason_(Start()) {}

// "", or why it does not work.
std::string FaultFs::Start() {
#ifndef MLPO_FAULTFS
  return "faultfs was not built: libfuse3-dev is missing";
#else
  if (::access("/dev/fuse", R_OK | W_OK) != 0) return "there is no /dev/fuse that we may use";
  std::filesystem::create_directory(source_);
  std::filesystem::create_directory(point_);
  std::string program = MLPO_FAULTFS, source = source_, point = point_;
  char* argv[] = {program.data(), source.data(), point.data(), nullptr};
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);  // or it would hold our caller's pipe open
  const int rc = ::posix_spawn(&pid_, argv[0], &actions, nullptr, argv, environ);
  posix_spawn_file_actions_destroy(&actions);
  if (rc != 0) {
    pid_ = -1;
    return "faultfs cannot be started: " + std::string(std::strerror(rc));
  }
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  struct stat st;
  while (::stat((point_ + "/.faultfs").c_str(), &st) != 0) {
    if (::waitpid(pid_, nullptr, WNOHANG) == pid_) {
      pid_ = -1;
      return "faultfs has ended: mounting needs root or fusermount3 (its message is on standard error)";
    }
    if (std::chrono::steady_clock::now() > deadline) return "faultfs did not mount within 10 s";
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return "";
#endif
}

FaultFs::~FaultFs() {
  if (pid_ < 0) return;
  ::kill(pid_, SIGKILL);  // whatever waits for it fails now
  ::waitpid(pid_, nullptr, 0);
  if (::umount2(point_.c_str(), MNT_DETACH) != 0) RunQuietly("fusermount3 -u -z " + point_);
}

void FaultFs::Rule(const std::string& line) const {
  const int fd = ::open((point_ + "/.faultfs").c_str(), O_WRONLY | O_CLOEXEC);
  const ssize_t put = fd < 0 ? -1 : ::write(fd, line.data(), line.size());
  const int error = errno;
  if (fd >= 0) ::close(fd);
  if (put != static_cast<ssize_t>(line.size()))
    throw std::runtime_error("faultfs refuses \"" + line + "\": " + std::strerror(error));
}

FaultFs::Counts FaultFs::Of(const std::string& op) const {
  const int fd = ::open((point_ + "/.faultfs").c_str(), O_RDONLY | O_CLOEXEC);
  char text[1024];
  const ssize_t got = fd < 0 ? -1 : ::read(fd, text, sizeof text);
  if (fd >= 0) ::close(fd);
  if (got < 0) throw std::runtime_error("faultfs does not answer");
  std::istringstream lines(std::string(text, static_cast<size_t>(got)));
  std::string name;
  Counts counts;
  while (lines >> name >> counts.requests >> counts.acted >> counts.hanging) {
    if (name == op) return counts;
  }
  throw std::runtime_error("faultfs knows no operation " + op);
}

}  // namespace mlpo::test
