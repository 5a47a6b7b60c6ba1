// The session server over its real socket, without a daemon behind it: what it writes to the log.
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <utility>
//
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>

#include <boost/asio/io_context.hpp>
#include <cstdlib>
#include <memory>
#include <sstream>
#include <string>

#include "daemon/session/log_share.h"
#include "daemon/session/session_server.h"
#include "tests/support/catch.h"

namespace mlpo::test {
namespace {

// No session gets so far that it would be asked.
class NoHost : public SessionHost {
 public:
  void SessionReady(const SessionIdentity&, std::shared_ptr<Areas>) override { std::abort(); }
  uint32_t BlockCount(const SubgroupSpec&) const override { std::abort(); }
  void PrepareStorage(const SessionIdentity&, const SubgroupSpec&, std::function<void(Status)>) override {
    std::abort();
  }
  void ReturnStorage(SessionId, const SubgroupSpec&) override { std::abort(); }
  void AllocateArena(uint64_t, int, std::shared_ptr<std::atomic<bool>>,
                     std::function<void(Result<std::shared_ptr<Memfd>>)>) override {
    std::abort();
  }
  void AddSubgroup(SessionId, SubgroupSpec, std::function<void()>) override { std::abort(); }
  void SetStaging(SessionId, std::byte*, uint64_t, std::function<void()>) override { std::abort(); }
  void BeginCheckpoint(const SessionIdentity&, const CheckpointRequest&,
                       std::function<void(Result<CheckpointBegun>)>) override {
    std::abort();
  }
  void BeginRestore(const SessionIdentity&, const RestoreRequest&, std::function<void(Result<RestoreBegun>)>) override {
    std::abort();
  }
  void SessionEnded(const SessionIdentity&) override { std::abort(); }
  void Dispose(std::shared_ptr<void>) override {}
};

class Scene {
 public:
  Scene() {
    UniqueFd listener(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    address_.sun_family = AF_UNIX;
    socklen_t bytes = sizeof address_.sun_family;  // the kernel finds a name in the abstract space
    REQUIRE(::bind(listener.get(), reinterpret_cast<const sockaddr*>(&address_), bytes) == 0);
    address_bytes_ = sizeof address_;
    REQUIRE(::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address_), &address_bytes_) == 0);
    REQUIRE(::listen(listener.get(), 128) == 0);
    SessionServer::Options options;
    options.block_elements = 4096;
    options.arenas_limit_bytes = 1 << 20;
    options.max_sessions = 64;
    server_ = std::make_unique<SessionServer>(io_, std::move(listener), options, &host_);
    server_->Start();
    spdlog::set_default_logger(
        std::make_shared<spdlog::logger>("test", std::make_shared<spdlog::sinks::ostream_sink_st>(log_)));
  }
  ~Scene() {
    server_->StopAccepting();
    server_->EndAll(Status(-ESHUTDOWN, "the test ends"));
    Run();
    spdlog::set_default_logger(std::make_shared<spdlog::logger>("none"));
  }
  Scene(const Scene&) = delete;
  Scene& operator=(const Scene&) = delete;

  // The server hears of it in Run.
  UniqueFd Connect() const {
    UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    REQUIRE(::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address_), address_bytes_) == 0);
    return fd;
  }
  // Until nothing is ready any more.
  void Run() {
    do io_.restart();
    while (io_.poll() > 0);
  }
  size_t Lines(const std::string& event) const {
    const std::string log = log_.str(), wanted = "event=" + event + " ";
    size_t lines = 0;
    for (size_t at = log.find(wanted); at != std::string::npos; at = log.find(wanted, at + 1)) ++lines;
    return lines;
  }

 private:
  std::ostringstream log_;
  boost::asio::io_context io_;
  NoHost host_;
  sockaddr_un address_ = {};
  socklen_t address_bytes_ = 0;
  std::unique_ptr<SessionServer> server_;
};

}  // namespace

TEST_CASE("SessionServer.WhoComesAndGoesDoesNotFillTheLog") {
  Scene scene;
  for (int i = 0; i < 2000; ++i) {
    (void)scene.Connect();
    scene.Run();
  }
  CHECK(scene.Lines("session_end") >= LogShare::kMostLines);
  CHECK(scene.Lines("session_end") < 1000);
}

TEST_CASE("LogShare.EachUserHasItsOwnAndGetsItBack") {
  constexpr int64_t kS = 1'000'000'000;
  LogShare share;
  uint64_t suppressed = 0, written = 0;
  for (int i = 0; i < 1000; ++i) written += share.Allow(1, 5 * kS, &suppressed) ? 1 : 0;
  CHECK(written == LogShare::kMostLines);
  CHECK(suppressed == 0);
  CHECK(share.Allow(2, 5 * kS, &suppressed));
  CHECK(suppressed == 0);
  CHECK(!share.Allow(1, 5 * kS + kS / 8, &suppressed));
  CHECK(share.Allow(1, 6 * kS, &suppressed));
  CHECK(suppressed == 1001 - LogShare::kMostLines);
  written = 0;
  for (int64_t at = 7 * kS; at < 107 * kS; at += kS / 100) written += share.Allow(1, at, &suppressed) ? 1 : 0;
  CHECK(written >= 100 * LogShare::kLinesPerS - 5);
  CHECK(written <= 100 * LogShare::kLinesPerS + 8);
  // However long it has been quiet.
  written = 0;
  for (int i = 0; i < 1000; ++i) written += share.Allow(1, 100'000 * kS, &suppressed) ? 1 : 0;
  CHECK(written == LogShare::kMostLines);
}

}  // namespace mlpo::test
