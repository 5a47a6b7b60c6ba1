// RankProcess: a training_client that a test starts, holds at its gate, lets go, stops and kills.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

extern char** environ;

namespace mlpo::test {

class RankProcess {
 public:
  struct Options {
    std::string job = "test";
    int rank = 0;
    int world_size = 1;
    int steps = 0;  // 0: for ever
    int seed = 1;
    uint64_t arena_bytes = 0;    // 0: as it needs, at least 64 MiB
    std::string directory = {};  // restores from there and saves there, for ever
    uint64_t run = 0;            // with `directory`: another number each time
  };
  // Started, but it does not connect before Go().
  RankProcess(const std::string& socket, const Options& o) {
    int in[2], out[2];
    if (::pipe2(in, O_CLOEXEC) != 0 || ::pipe2(out, O_CLOEXEC) != 0) throw std::runtime_error("pipe2 failed");
    std::vector<std::string> command = {MLPO_TRAINING_CLIENT,
                                        socket,
                                        o.job,
                                        std::to_string(o.rank),
                                        std::to_string(o.world_size),
                                        std::to_string(o.steps),
                                        std::to_string(o.seed),
                                        std::to_string(o.arena_bytes)};
    if (!o.directory.empty()) command.insert(command.end(), {o.directory, std::to_string(o.run)});
    std::vector<char*> argv;
    for (std::string& argument : command) argv.push_back(argument.data());
    argv.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, in[0], 0);
    posix_spawn_file_actions_adddup2(&actions, out[1], 1);
    const int rc = ::posix_spawn(&pid_, argv[0], &actions, nullptr, argv.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    ::close(in[0]);
    ::close(out[1]);
    gate_ = in[1];
    out_ = out[0];
    if (rc != 0) throw std::runtime_error("cannot start " + command[0]);
  }
  RankProcess(const RankProcess&) = delete;
  RankProcess& operator=(const RankProcess&) = delete;
  ~RankProcess() {
    Kill();
    if (gate_ >= 0) ::close(gate_);
    ::close(out_);
  }

  void Go() {
    ::close(gate_);
    gate_ = -1;
  }
  pid_t pid() const { return pid_; }
  void Signal(int signal) { ::kill(pid_, signal); }
  // Whether it has not ended.
  bool Runs() {
    siginfo_t info = {};
    return !waited_ && ::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
           info.si_pid == 0;
  }
  // kill -9; it is dead and gone afterwards.
  void Kill() {
    if (waited_) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    waited_ = true;
  }
  // What it has said to its end; after Kill().
  const std::string& LastWords() {
    while (Read(10'000)) {
    }
    return output_;
  }
  // Reads its output until `text` is in it; false if it ended or `milliseconds` passed before that.
  bool WaitFor(const std::string& text, int milliseconds = 60'000) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(milliseconds);
    while (output_.find(text) == std::string::npos) {
      const auto left =
          std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
      if (!Read(static_cast<int>(left.count()))) return false;
    }
    return true;
  }
  // Its exit code, or 128 + signal; -1 at the deadline.
  int WaitForEnd(int milliseconds = 60'000) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(milliseconds);
    for (;;) {
      const auto left =
          std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
      if (left.count() <= 0) return -1;
      if (!Read(static_cast<int>(left.count())) && std::chrono::steady_clock::now() < deadline) break;
    }
    int status = 0;
    ::waitpid(pid_, &status, 0);
    waited_ = true;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  const std::string& output() const { return output_; }

 private:
  // False at the end of its output, and when `milliseconds` have passed.
  bool Read(int milliseconds) {
    pollfd ready = {out_, POLLIN, 0};
    if (milliseconds <= 0 || ::poll(&ready, 1, milliseconds) <= 0) return false;
    char chunk[4096];
    const ssize_t got = ::read(out_, chunk, sizeof chunk);
    if (got <= 0) return false;
    output_.append(chunk, static_cast<size_t>(got));
    return true;
  }

  pid_t pid_ = -1;
  int gate_ = -1;
  int out_ = -1;
  bool waited_ = false;
  std::string output_;
};

// The number behind the last line "WORD N" but for the first line; -1: there is none.
inline int64_t LastOf(const std::string& text, const std::string& word) {
  const size_t at = text.rfind("\n" + word + " ");
  return at == std::string::npos ? -1 : std::atoll(text.c_str() + at + word.size() + 2);
}

}  // namespace mlpo::test
