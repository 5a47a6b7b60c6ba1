// Program: runs a program with its output caught, its environment set, and a deadline.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "tests/support/catch.h"

class Program {
 public:
  // Variables with the value "" are removed.
  explicit Program(std::vector<std::string> command, const std::map<std::string, std::string>& environment = {}) {
    int out[2], err[2];
    REQUIRE(::pipe2(out, O_CLOEXEC) == 0);
    REQUIRE(::pipe2(err, O_CLOEXEC) == 0);
    std::vector<char*> argv;
    for (std::string& argument : command) argv.push_back(argument.data());
    argv.push_back(nullptr);
    pid_ = ::fork();
    REQUIRE(pid_ >= 0);
    if (pid_ == 0) {
      ::dup2(out[1], STDOUT_FILENO);
      ::dup2(err[1], STDERR_FILENO);
      for (const auto& [name, value] : environment) {
        if (value.empty())
          ::unsetenv(name.c_str());
        else
          ::setenv(name.c_str(), value.c_str(), 1);
      }
      ::execv(argv[0], argv.data());
      ::_exit(127);
    }
    ::close(out[1]);
    ::close(err[1]);
    fds_[0] = out[0];
    fds_[1] = err[0];
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;
  ~Program() {
    if (!waited_) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
    for (const int fd : fds_) ::close(fd);
  }

  pid_t pid() const { return pid_; }
  void Signal(int signal) const { ::kill(pid_, signal); }

  // Its exit code, or 128 + signal; the test fails at the deadline. Output is what came until its end.
  int Wait(int timeout_s = 60) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(timeout_s);
    for (;;) {
      Read(10);
      int status = 0;
      if (::waitpid(pid_, &status, WNOHANG) == pid_) {
        waited_ = true;
        Read(0);
        return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
      }
      INFO("still running; stdout: " << text[0] << " stderr: " << text[1]);
      REQUIRE(std::chrono::steady_clock::now() < deadline);
    }
  }
  const std::string& out() const { return text[0]; }
  const std::string& err() const { return text[1]; }

 private:
  void Read(int timeout_ms) {
    for (;;) {
      pollfd ready[2] = {{open_[0] ? fds_[0] : -1, POLLIN, 0}, {open_[1] ? fds_[1] : -1, POLLIN, 0}};
      if (::poll(ready, 2, timeout_ms) <= 0) return;
      for (int i = 0; i < 2; ++i) {
        if (ready[i].revents == 0) continue;
        char chunk[4096];
        const ssize_t got = ::read(fds_[i], chunk, sizeof chunk);
        if (got > 0)
          text[i].append(chunk, static_cast<size_t>(got));
        else
          open_[i] = false;
      }
      if (!open_[0] && !open_[1]) return;
      timeout_ms = 0;
    }
  }

  pid_t pid_ = -1;
  int fds_[2] = {-1, -1};
  bool open_[2] = {true, true};
  bool waited_ = false;
  std::string text[2];
};
