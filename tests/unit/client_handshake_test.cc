// Connecting: options, environment, refusals, and a daemon that says what it must not.
#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "mlpo/client.h"
#include "mlpo/client.hpp"
#include "tests/support/catch.h"
#include "tests/support/client_fixture.h"
#include "tests/support/fake_daemon.h"

namespace {

using Script = FakeDaemon::Script;

bool LastErrorHas(const std::string& text) { return std::strstr(mlpo_last_error(), text.c_str()) != nullptr; }

int OpenDescriptors() {
  int count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

// Tries to connect, which must fail.
int Refused(const FakeDaemon& daemon) {
  mlpo_connect_options options = ConnectTo(daemon.socket());
  options.connect_timeout_ns = 2'000'000'000;
  mlpo_client* client = reinterpret_cast<mlpo_client*>(1);
  const int code = mlpo_connect(&options, &client);
  CHECK(client == nullptr);
  return code;
}

class Environment {
 public:
  Environment(const char* name, const char* value) : name_(name) {
    if (const char* old = std::getenv(name)) old_ = old;
    value != nullptr ? setenv(name, value, 1) : unsetenv(name);
  }
  ~Environment() { old_ ? setenv(name_, old_->c_str(), 1) : unsetenv(name_); }

 private:
  const char* name_;
  std::optional<std::string> old_;
};

}  // namespace

TEST_CASE("Handshake.ClientSendsItselfAndTakesWhatItGets") {
  auto script = std::make_shared<Script>();
  mlpo_hello seen = {};
  script->hello = [&](int, const mlpo_hello& hello) {
    seen = hello;
    return false;
  };
  FakeDaemon daemon(script);
  mlpo_connect_options options = ConnectTo(daemon.socket());
  options.job = "job_1.x-y";
  options.rank = 2;
  options.world_size = 5;
  options.ring_entries = 32;
  options.arena_bytes = 12345;
  mlpo_client* client = nullptr;
  REQUIRE(mlpo_connect(&options, &client) == 0);
  CHECK(daemon.pidfds() == 1);
  CHECK(std::string(seen.job, seen.job_bytes) == "job_1.x-y");
  CHECK(seen.rank == 2);
  CHECK(seen.world_size == 5);
  CHECK(seen.ring_entries == 32);
  CHECK(seen.arena_bytes == 12345);
  CHECK(seen.abi_major == MLPO_ABI_MAJOR);
  struct mlpo_client_info info = {};
  info.struct_size = sizeof info;
  REQUIRE(mlpo_client_info(client, &info) == 0);
  CHECK(info.session == 7);
  CHECK(info.generation == 3);
  CHECK(info.block_elements == 1024);
  CHECK(info.ring_entries == 32);
  CHECK(info.rank == 2);
  CHECK(info.world_size == 5);
  CHECK(std::string(info.job) == "job_1.x-y");
  CHECK(std::string(info.socket) == daemon.socket());
  CHECK(mlpo_client_alive(client) == 0);
  mlpo_client_free(client);
}

TEST_CASE("Handshake.EnvironmentFillsWhatOptionsLeaveOpen") {
  auto script = std::make_shared<Script>();
  mlpo_hello seen = {};
  script->hello = [&](int, const mlpo_hello& hello) {
    seen = hello;
    return false;
  };
  FakeDaemon daemon(script);
  Environment socket("MLPO_SOCKET", daemon.socket().c_str());
  Environment rank("RANK", "3"), world("WORLD_SIZE", "4");
  const auto job_seen = [&] {
    mlpo_client* client = nullptr;
    REQUIRE(mlpo_connect(nullptr, &client) == 0);
    mlpo_client_free(client);
    CHECK(seen.rank == 3);
    CHECK(seen.world_size == 4);
    return std::string(seen.job, seen.job_bytes);
  };
  Environment slurm_job("SLURM_JOB_ID", "77"), slurm_step("SLURM_STEP_ID", "2");
  Environment mlpo_job("MLPO_JOB", "mine"), elastic("TORCHELASTIC_RUN_ID", "elastic");
  CHECK(job_seen() == "mine");
  unsetenv("MLPO_JOB");
  CHECK(job_seen() == "elastic");
  setenv("TORCHELASTIC_RUN_ID", "none", 1);
  CHECK(job_seen() == "77.2");
  unsetenv("SLURM_STEP_ID");
  mlpo_client* client = nullptr;
  CHECK(mlpo_connect(nullptr, &client) == -EINVAL);
  CHECK(LastErrorHas("MLPO_JOB"));
  setenv("MLPO_JOB", "mine", 1);
  setenv("RANK", "three", 1);
  CHECK(mlpo_connect(nullptr, &client) == -EINVAL);
  CHECK(LastErrorHas("RANK is \"three\""));
}

TEST_CASE("Handshake.SaysWhereTheArenaIsWanted") {
  auto script = std::make_shared<Script>();
  mlpo_hello seen = {};
  script->hello = [&](int, const mlpo_hello& hello) {
    seen = hello;
    return false;
  };
  FakeDaemon daemon(script);
  const mlpo_connect_options options = ConnectTo(daemon.socket());
  const auto node_seen = [&] {
    mlpo_client* client = nullptr;
    REQUIRE(mlpo_connect(&options, &client) == 0);
    mlpo_client_free(client);
    return seen.numa_node;
  };
  Environment variable("MLPO_NUMA_NODE", nullptr);
  // The thread's own: one whose folder in /sys has a CPU that it may run on.
  const int own = node_seen();
  const std::string folder = "/sys/devices/system/node/node" + std::to_string(own);
  CHECK(std::filesystem::exists(folder));
  setenv("MLPO_NUMA_NODE", "3", 1);
  CHECK(node_seen() == 3);
  mlpo_client* client = nullptr;
  for (const char* wrong : {"x", "-1", "1.5", "99999999999"}) {
    setenv("MLPO_NUMA_NODE", wrong, 1);
    CHECK(mlpo_connect(&options, &client) == -EINVAL);
    CHECK(LastErrorHas("MLPO_NUMA_NODE is"));
  }
}

TEST_CASE("Handshake.BadOptionsAreRefusedBeforeConnecting") {
  FakeDaemon daemon;
  const auto refused = [&](auto change) {
    mlpo_connect_options options = ConnectTo(daemon.socket());
    change(options);
    mlpo_client* client = nullptr;
    const int code = mlpo_connect(&options, &client);
    mlpo_client_free(client);
    return code;
  };
  for (const char* job : {"", "a/b", "a\nb", ".a", "-a", "..", "a b"}) {
    INFO(job);
    CHECK(refused([&](auto& o) { o.job = job; }) == -EINVAL);
  }
  const std::string longest(128, 'x'), longer(129, 'x');
  CHECK(refused([&](auto& o) { o.job = longer.c_str(); }) == -EINVAL);
  CHECK(refused([&](auto& o) { o.ring_entries = 24; }) == -EINVAL);
  CHECK(refused([&](auto& o) { o.ring_entries = 4; }) == -EINVAL);
  CHECK(refused([&](auto& o) { o.ring_entries = 131072; }) == -EINVAL);
  CHECK(refused([&](auto& o) { o.rank = 1; }) == -EINVAL);
  CHECK(refused([&](auto& o) { o.rank = -2; }) == -EINVAL);
  CHECK(refused([&](auto& o) { o.world_size = 0; }) == -EINVAL);
  CHECK(refused([&](auto& o) { o.connect_timeout_ns = -1; }) == -EINVAL);
  CHECK(refused([&](auto& o) { o.struct_size = 0; }) == -EINVAL);
  const std::string far(200, 'p');
  CHECK(refused([&](auto& o) { o.socket = far.c_str(); }) == -ENAMETOOLONG);
  CHECK(daemon.sessions() == 0);
  CHECK(refused([&](auto& o) { o.job = longest.c_str(); }) == 0);
}

TEST_CASE("Handshake.NoDaemonIsSaidAtOnce") {
  ScratchDir directory;
  const std::string nowhere = directory / "none.sock";
  mlpo_connect_options options = ConnectTo(nowhere);
  mlpo_client* client = nullptr;
  CHECK(mlpo_connect(&options, &client) == -ENOENT);
  CHECK(LastErrorHas(nowhere));
  std::string left_over;
  {
    FakeDaemon daemon;
    left_over = directory / "dead.sock";
    // The socket's file outlives its daemon.
    REQUIRE(link(daemon.socket().c_str(), left_over.c_str()) == 0);
  }
  options = ConnectTo(left_over);
  CHECK(mlpo_connect(&options, &client) == -ECONNREFUSED);
}

TEST_CASE("Handshake.RefusalBringsCodeAndText") {
  const int before = OpenDescriptors();
  {
    for (const int32_t status : {MLPO_ERR_VERSION, MLPO_ERR_QUOTA, -EACCES}) {
      auto script = std::make_shared<Script>();
      script->hello = [status](int socket, const mlpo_hello& hello) {
        SendError(socket, hello.frame.seq, status, "because of " + std::to_string(status));
        return true;
      };
      FakeDaemon daemon(script);
      CHECK(Refused(daemon) == status);
      CHECK(std::string(mlpo_last_error()) == "because of " + std::to_string(status));
    }
  }
  CHECK(OpenDescriptors() == before);
}

TEST_CASE("Handshake.RankWithALiveSessionIsRefusedAtOnce") {
  auto script = std::make_shared<Script>();
  int refusals = 0;
  script->hello = [&](int socket, const mlpo_hello& hello) {
    ++refusals;
    SendError(socket, hello.frame.seq, -EADDRINUSE, "rank 0 has a live session");
    return true;
  };
  FakeDaemon daemon(script);
  mlpo_connect_options options = ConnectTo(daemon.socket());
  mlpo_client* client = nullptr;
  const auto start = std::chrono::steady_clock::now();
  CHECK(mlpo_connect(&options, &client) == -EADDRINUSE);
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(2));  // of the 30 s it may take
  CHECK(client == nullptr);
  CHECK(refusals == 1);
  CHECK(LastErrorHas("live session"));
}

TEST_CASE("Handshake.SilentDaemonEndsAtTheDeadline") {
  auto script = std::make_shared<Script>();
  script->hello = [](int socket, const mlpo_hello&) {
    char byte;
    recv(socket, &byte, 1, 0);  // until the client hangs up
    return true;
  };
  FakeDaemon daemon(script);
  mlpo_connect_options options = ConnectTo(daemon.socket());
  options.connect_timeout_ns = 300'000'000;
  mlpo_client* client = nullptr;
  const auto start = std::chrono::steady_clock::now();
  CHECK(mlpo_connect(&options, &client) == -ETIMEDOUT);
  CHECK(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() < 2);
}

TEST_CASE("Handshake.BrokenFramesAreRefused") {
  const auto refuse_with = [](std::function<void(int, uint32_t)> answer) {
    auto script = std::make_shared<Script>();
    script->hello = [answer](int socket, const mlpo_hello& hello) {
      answer(socket, hello.frame.seq);
      return true;
    };
    FakeDaemon daemon(script);
    return Refused(daemon);
  };
  const auto error_frame = [](uint32_t seq) {
    mlpo_error error = {};
    error.frame = {MLPO_MAGIC, MLPO_FRAME_ERROR, 0, sizeof error, seq};
    error.status = -EACCES;
    return error;
  };
  // The frame itself is fine: only so do the spoilt ones show anything.
  CHECK(refuse_with([&](int socket, uint32_t seq) {
          const mlpo_error error = error_frame(seq);
          SendRaw(socket, &error, sizeof error);
        }) == -EACCES);
  CHECK(refuse_with([&](int socket, uint32_t seq) {
          const mlpo_error error = error_frame(seq);
          SendRaw(socket, &error, sizeof error - 8);
        }) == MLPO_ERR_PROTOCOL);
  CHECK(refuse_with([&](int socket, uint32_t seq) {
          const mlpo_error error = error_frame(seq);
          SendRaw(socket, &error, 7);
        }) == MLPO_ERR_PROTOCOL);
  CHECK(refuse_with([&](int socket, uint32_t seq) {
          mlpo_error error = error_frame(seq);
          error.frame.magic ^= 1;
          SendRaw(socket, &error, sizeof error);
        }) == MLPO_ERR_PROTOCOL);
  CHECK(refuse_with([&](int socket, uint32_t seq) {
          mlpo_error error = error_frame(seq);
          error.frame.reserved = 1;
          SendRaw(socket, &error, sizeof error);
        }) == MLPO_ERR_PROTOCOL);
  CHECK(refuse_with([&](int socket, uint32_t seq) {
          mlpo_error error = error_frame(seq);
          error.frame.type = MLPO_FRAME_STAGED;
          SendRaw(socket, &error, sizeof error);
        }) == MLPO_ERR_PROTOCOL);
  CHECK(refuse_with([&](int socket, uint32_t) {
          const std::vector<char> long_frame(5000, 'x');
          SendRaw(socket, long_frame.data(), long_frame.size());
        }) == MLPO_ERR_PROTOCOL);
  CHECK(refuse_with([&](int, uint32_t) {}) == MLPO_ERR_DAEMON_DIED);
}

TEST_CASE("Handshake.EveryFieldOfWelcomeIsChecked") {
  const int before = OpenDescriptors();
  {
    struct Case {
      const char* name;
      int code;
      std::function<void(mlpo_welcome*)> spoil;
    };
    const Case cases[] = {
        {"major", MLPO_ERR_VERSION, [](mlpo_welcome* w) { w->abi_major = 2; }},
        {"minor", MLPO_ERR_VERSION, [](mlpo_welcome* w) { w->abi_minor = 9; }},
        {"no update", MLPO_ERR_VERSION, [](mlpo_welcome* w) { w->features = 0; }},
        {"unknown feature", MLPO_ERR_VERSION, [](mlpo_welcome* w) { w->features |= 1ull << 40; }},
        {"entries 0", MLPO_ERR_PROTOCOL, [](mlpo_welcome* w) { w->entries = 0; }},
        {"entries 63", MLPO_ERR_PROTOCOL, [](mlpo_welcome* w) { w->entries = 63; }},
        {"entries many", MLPO_ERR_PROTOCOL, [](mlpo_welcome* w) { w->entries = 1u << 17; }},
        {"entries more than fit", MLPO_ERR_PROTOCOL, [](mlpo_welcome* w) { w->entries *= 2; }},
        {"block", MLPO_ERR_PROTOCOL, [](mlpo_welcome* w) { w->block_elements = 0; }},
        {"client area", MLPO_ERR_PROTOCOL, [](mlpo_welcome* w) { w->client_area_bytes += 1; }},
        {"daemon area", MLPO_ERR_PROTOCOL, [](mlpo_welcome* w) { w->daemon_area_bytes += 4096; }},
        {"client area huge", MLPO_ERR_PROTOCOL, [](mlpo_welcome* w) { w->client_area_bytes = UINT64_MAX; }},
        {"submissions on the lines", MLPO_ERR_PROTOCOL, [](mlpo_welcome* w) { w->submissions_offset = 0; }},
        {"submissions unaligned", MLPO_ERR_PROTOCOL, [](mlpo_welcome* w) { w->submissions_offset += 4; }},
        {"submissions outside", MLPO_ERR_PROTOCOL, [](mlpo_welcome* w) { w->submissions_offset = uint64_t{0} - 4096; }},
        {"hyper outside", MLPO_ERR_PROTOCOL, [](mlpo_welcome* w) { w->hyper_offset += 64; }},
        {"hyper on submissions", MLPO_ERR_PROTOCOL, [](mlpo_welcome* w) { w->hyper_offset -= 64; }},
        {"completions outside", MLPO_ERR_PROTOCOL, [](mlpo_welcome* w) { w->completions_offset = 1ull << 40; }},
        {"errors outside", MLPO_ERR_PROTOCOL, [](mlpo_welcome* w) { w->errors_offset += 64; }},
        {"errors on completions", MLPO_ERR_PROTOCOL, [](mlpo_welcome* w) { w->errors_offset -= 64; }},
        {"length", MLPO_ERR_PROTOCOL, [](mlpo_welcome* w) { w->frame.bytes -= 8; }},
        {"reserved", MLPO_ERR_PROTOCOL, [](mlpo_welcome* w) { w->frame.reserved = 1; }},
    };
    for (const Case& c : cases) {
      INFO(c.name);
      auto script = std::make_shared<Script>();
      script->welcome = c.spoil;
      FakeDaemon daemon(script);
      CHECK(Refused(daemon) == c.code);
    }
  }
  CHECK(OpenDescriptors() == before);
}

TEST_CASE("Handshake.WrongDescriptorsAreRefused") {
  const int before = OpenDescriptors();
  {
    const auto with_fds = [](std::function<std::vector<int>(const FakeRing&)> fds, bool sealed = true) {
      auto script = std::make_shared<Script>();
      script->welcome_fds = std::move(fds);
      script->sealed = sealed;
      FakeDaemon daemon(script);
      return Refused(daemon);
    };
    CHECK(with_fds([](const FakeRing& r) { return std::vector<int>{r.client_fd, r.daemon_fd}; }) == MLPO_ERR_PROTOCOL);
    CHECK(with_fds([](const FakeRing& r) {
            return std::vector<int>{r.client_fd, r.daemon_fd, r.doorbell, r.doorbell};
          }) == MLPO_ERR_PROTOCOL);
    CHECK(with_fds([](const FakeRing& r) {
            return std::vector<int>{r.doorbell, r.daemon_fd, r.client_fd};
          }) == MLPO_ERR_PROTOCOL);
    // An area that could shrink under the mapping would be a SIGBUS later.
    CHECK(with_fds(
              [](const FakeRing& r) {
                return std::vector<int>{r.client_fd, r.daemon_fd, r.doorbell};
              },
              false) == MLPO_ERR_PROTOCOL);
    CHECK(LastErrorHas("not sealed"));
  }
  CHECK(OpenDescriptors() == before);
}

TEST_CASE("Handshake.NothingIsLeftAfterASession") {
  const int before = OpenDescriptors();
  {
    FakeDaemon daemon;
    for (int i = 0; i < 20; ++i) {
      Connected client(daemon);
      mlpo_subgroup_free(client.Register("a", 10));
    }
  }
  CHECK(OpenDescriptors() == before);
}

TEST_CASE("Handshake.CppWrapperThrowsWithTheCode") {
  FakeDaemon daemon;
  mlpo::Client client = mlpo::Client::Connect(ConnectTo(daemon.socket()));
  mlpo_subgroup_options options = MLPO_SUBGROUP_OPTIONS_INIT;
  options.key = "a";
  options.numel = 4;
  mlpo::Subgroup subgroup = client.Register(options);
  mlpo_update_options update = MLPO_UPDATE_OPTIONS_INIT;
  CHECK(subgroup.SubmitGrad().Wait().window_complete == 1);
  CHECK(subgroup.SubmitUpdate(update).Wait().value == 1);
  CHECK(subgroup.ReadSteps() == std::vector<int64_t>{1});
  update.lr = -1;
  int code = 0;
  try {
    subgroup.SubmitUpdate(update);
  } catch (const mlpo::Error& error) {
    code = error.code();
    CHECK(std::string(error.what()).find("lr is -1") != std::string::npos);
  }
  CHECK(code == -EINVAL);
  client.Close();
  CHECK(client.alive() == MLPO_ERR_CLOSED);
  CHECK_THROWS_AS(client.SubmitNop(), mlpo::Error);
}
