// A daemon whose log goes where nothing is taken serves on, says afterwards what the log lacks, and ends.
#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <string>
#include <thread>

#include "daemon/base/unique_fd.h"
#include "tests/support/catch.h"
#include "tests/support/daemon_process.h"
#include "tests/support/daemon_status.h"
#include "tests/support/reference_trainer.h"

using namespace mlpo::test;
using mlpo::Client;
using mlpo::UniqueFd;

namespace {

// A pipe that has no room for a single byte: who writes to it waits for a reader.
struct FullPipe {
  UniqueFd read, write;
  FullPipe() {
    int fds[2];
    REQUIRE(::pipe2(fds, O_CLOEXEC | O_NONBLOCK) == 0);
    read = UniqueFd(fds[0]);
    write = UniqueFd(fds[1]);
    for (const std::string& filling : {std::string(4096, '\n'), std::string("\n")}) {
      while (::write(write.get(), filling.data(), filling.size()) > 0) continue;
      REQUIRE(errno == EAGAIN);
    }
    REQUIRE(::fcntl(write.get(), F_SETFL, 0) == 0);
  }
  // All that is written from now on, until nobody can write any more, or nothing comes for half a minute.
  std::string ReadAll() const {
    std::string text;
    char chunk[65536];
    pollfd ready{read.get(), POLLIN, 0};
    while (::poll(&ready, 1, 30'000) == 1) {
      const ssize_t got = ::read(read.get(), chunk, sizeof chunk);
      if (got <= 0) break;
      text.append(chunk, static_cast<size_t>(got));
    }
    return text;
  }
};

bool IsReady(const DaemonProcess& daemon) {
  try {
    return DaemonStatus(daemon.socket()).at("state") == "ready";
  } catch (const mlpo::Error&) {  // no socket yet
    return false;
  }
}

}  // namespace

TEST_CASE("Log.NobodyReadsItAndTheDaemonServes") {
  FullPipe pipe;
  DaemonProcess daemon({.wait_ready = false, .log = pipe.write.get()});
  pipe.write.reset();
  REQUIRE(Eventually([&] { return IsReady(daemon); }, 60));
  Client client = Connect(daemon.socket());
  ReferenceTrainer trainer(client, {});
  trainer.Step();
  CHECK(DaemonStatus(daemon.socket()).at("log_lines_dropped") == 0);  // what has been said so far has room

  for (int i = 0; i < 4500; ++i) {  // each of an administrator's commands is a line
    char* answer = nullptr;
    REQUIRE(mlpo_control(daemon.socket().c_str(), "paths_enable", R"({"path": "none"})", 10'000'000'000, &answer) != 0);
    mlpo_free(answer);
  }
  trainer.Step();
  CHECK(trainer.Difference() == "");
  CHECK(DaemonStatus(daemon.socket()).at("log_lines_dropped") > 0);

  std::string text;
  std::thread reader([&] { text = pipe.ReadAll(); });
  daemon.Signal(SIGTERM);
  int code = -1;
  CHECK_NOTHROW(code = daemon.WaitForEnd());
  if (code < 0) daemon.Signal(SIGKILL);  // the reader ends with it
  reader.join();
  CHECK(code == 0);
  CHECK(text.find("event=log_lines_dropped lines=") != std::string::npos);
  CHECK(text.find("event=stopped exit_code=0") != std::string::npos);
}
