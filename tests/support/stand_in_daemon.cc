// A stand-in for mlpo-daemon: binds the control socket of --socket and behaves as $STAND_IN says.
//   ready        serves until SIGTERM
//   degraded     the same, with that state
//   refuse       says why on stderr and exits with 78
//   never        serves, but stays in the state starting
//   crash        dies of SIGKILL as soon as $STAND_IN_LOG.go exists
//   slow         ignores the first SIGTERM
// It appends lines to $STAND_IN_LOG: its arguments, its pid, "sigterm", "drained".
#include <signal.h>
#include <unistd.h>

#include <utility>
//
#include <boost/asio/io_context.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/steady_timer.hpp>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <string>

#include "daemon/control/control_server.h"

namespace {

std::string Variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

void Log(const std::string& line) { std::ofstream(Variable("STAND_IN_LOG"), std::ios::app) << line << "\n"; }

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = Variable("STAND_IN");
  std::string arguments, socket;
  for (int i = 1; i < argc; ++i) {
    arguments += std::string(i == 1 ? "" : " ") + argv[i];
    if (std::string(argv[i]) == "--socket" && i + 1 < argc) socket = argv[i + 1];
  }
  Log("arguments " + arguments);
  Log("pid " + std::to_string(::getpid()));
  if (mode == "refuse") {
    std::fputs("stand-in: no path: give --path DIR\n", stderr);
    return 78;
  }

  boost::asio::io_context io;
  mlpo::Snapshot snapshot;
  snapshot.state = mode == "never" ? "starting" : mode == "degraded" ? "degraded" : "ready";
  mlpo::ControlOptions options;
  options.path = socket + ".ctl";
  auto server = mlpo::ControlServer::Open(
      io, options, {[&](std::function<void(mlpo::Snapshot)> answer) { answer(snapshot); }, [] {}});
  if (!server.ok()) {
    std::fprintf(stderr, "stand-in: %s\n", server.status().message().c_str());
    return 70;
  }

  int terms = 0;
  boost::asio::signal_set signals(io, SIGTERM, SIGINT);
  std::function<void(const boost::system::error_code&, int)> on_signal = [&](const auto&, int signal) {
    Log(signal == SIGTERM ? "sigterm" : "sigint");
    if (++terms >= (mode == "slow" ? 2 : 1)) {
      Log("drained");
      io.stop();
      return;
    }
    signals.async_wait(on_signal);
  };
  signals.async_wait(on_signal);

  boost::asio::steady_timer timer(io);
  std::function<void(const boost::system::error_code&)> tick = [&](const auto&) {
    if (mode == "crash" && std::ifstream(Variable("STAND_IN_LOG") + ".go")) ::kill(::getpid(), SIGKILL);
    timer.expires_after(std::chrono::milliseconds(5));
    timer.async_wait(tick);
  };
  tick({});
  io.run();
  return 0;
}
