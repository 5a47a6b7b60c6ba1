// Paths of a real daemon that are taken out and put back while a trainer trains: its bits are the reference's, and what
// is on the paths is looked at by the file system.
#include <sys/mount.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>

#include "tests/support/catch.h"
#include "tests/support/daemon_process.h"
#include "tests/support/daemon_status.h"
#include "tests/support/reference_trainer.h"

using namespace mlpo::test;
using mlpo::Client;

namespace {

DaemonProcess::Options SmallPool(const char* engine = "auto") {
  return {.paths = 3, .memory = "294912", .engine = engine};  // six blocks
}

// The result, or {"error": text}.
nlohmann::json Command(const DaemonProcess& daemon, const std::string& command, const std::string& path) {
  char* text = nullptr;
  const std::string params = nlohmann::json{{"path", path}}.dump();
  if (mlpo_control(daemon.socket().c_str(), ("paths_" + command).c_str(), params.c_str(), 30'000'000'000, &text) != 0)
    return {{"error", mlpo_last_error()}};
  nlohmann::json answer = nlohmann::json::parse(text);
  mlpo_free(text);
  return answer;
}

nlohmann::json PathOf(const DaemonProcess& daemon, int i) { return DaemonStatus(daemon.socket()).at("paths").at(i); }

size_t FilesOn(const DaemonProcess& daemon, int i) {
  const std::vector<std::string> files = daemon.ScratchFiles();
  return static_cast<size_t>(std::count_if(files.begin(), files.end(), [&](const std::string& file) {
    return file.starts_with(daemon.path(i) + "/") && file.ends_with("/state");
  }));
}

bool Done(const DaemonProcess& daemon, int i) {
  const nlohmann::json evacuation = PathOf(daemon, i).at("evacuation");
  return evacuation.is_object() && evacuation.at("done") == true;
}

}  // namespace

TEST_CASE("Paths.EvacuatedAndTakenBackWhileTraining") {
  for (const char* engine : {"auto", "threads"}) {
    CAPTURE(engine);
    DaemonProcess daemon(SmallPool(engine));
    Client client = Connect(daemon.socket());
    ReferenceTrainer trainer(client, {"large", 200'003});
    ReferenceTrainer idle(client, {"idle", 100'003, MLPO_BFLOAT16, MLPO_BFLOAT16, 2});
    idle.Step();
    for (int i = 0; i < 2; ++i) trainer.Step();
    REQUIRE(PathOf(daemon, 1).at("scratch_bytes") > 0);
    const nlohmann::json answer = Command(daemon, "evacuate", "path1");
    CAPTURE(answer.dump());
    REQUIRE(answer.at("total_bytes") > 0);
    REQUIRE(Eventually([&] {
      trainer.Step();
      return Done(daemon, 1);
    }));
    CHECK(trainer.Difference() == "");
    CHECK(idle.Difference() == "");
    CHECK(Eventually([&] { return FilesOn(daemon, 1) == 0; }));
    CHECK(PathOf(daemon, 1).at("state") == "disabled");
    // One that comes now has no file there.
    Client late = Connect(daemon.socket(), "late");
    ReferenceTrainer other(late, {"other", 50'003, MLPO_BFLOAT16, MLPO_BFLOAT16, 3});
    for (int i = 0; i < 2; ++i) other.Step();
    CHECK(FilesOn(daemon, 1) == 0);
    CHECK(Command(daemon, "enable", daemon.path(1)).at("state") == "probing");
    REQUIRE(Eventually([&] {
      trainer.Step();
      other.Step();
      return PathOf(daemon, 1).at("scratch_bytes") > 0;
    }));
    CHECK(FilesOn(daemon, 1) == 2);
    for (int i = 0; i < 2; ++i) trainer.Step();
    CHECK(trainer.Difference() == "");
    CHECK(other.Difference() == "");
    CHECK(idle.Difference() == "");
    client.Close();
    late.Close();
    CHECK(daemon.ScratchGone());
    daemon.Signal(SIGTERM);
    CHECK(daemon.WaitForEnd() == 0);
  }
}

TEST_CASE("Paths.DisabledOnesAreReadAndNotWritten") {
  DaemonProcess daemon(SmallPool());
  Client client = Connect(daemon.socket());
  ReferenceTrainer trainer(client, {"large", 200'003});
  trainer.Step();
  REQUIRE(PathOf(daemon, 0).at("scratch_bytes") > 0);
  CHECK(Command(daemon, "disable", "path0").at("state") == "disabled");
  const nlohmann::json before = PathOf(daemon, 0);
  CHECK(DaemonStatus(daemon.socket()).at("state") == "degraded");
  CHECK(trainer.Difference() == "");
  for (int i = 0; i < 2; ++i) trainer.Step();
  CHECK(trainer.Difference() == "");
  CHECK(PathOf(daemon, 0).at("written_bytes") <= before.at("written_bytes").get<uint64_t>() + 6 * 49'152);
  CHECK(PathOf(daemon, 0).at("scratch_bytes") == 0);
}

TEST_CASE("Paths.CommandsThatCannotBeCarriedOutSayWhy") {
  DaemonProcess::Options options = SmallPool();
  options.path_settings = {"capacity = \"16MiB\"\n", "capacity = \"2MiB\"\n"};
  DaemonProcess daemon(options);
  Client client = Connect(daemon.socket());
  const auto error = [&](const std::string& command, const std::string& path) {
    return Command(daemon, command, path).value("error", "");
  };
  CHECK(error("disable", "nowhere").find("path0, path1, path2") != std::string::npos);
  ReferenceTrainer trainer(client, {"large", 500'003});  // 6 MB
  trainer.Step();
  const std::string full = error("evacuate", "path0");
  CAPTURE(full);
  CHECK(full.find("rank 0 of job 'test'") != std::string::npos);
  CHECK(full.find("'path1'") != std::string::npos);
  CHECK(PathOf(daemon, 0).at("state") == "healthy");
  CHECK(Command(daemon, "evacuate", "path1").contains("total_bytes"));
  CHECK(Command(daemon, "disable", "path2").at("state") == "disabled");
  CHECK(error("disable", "path0").find("needed") != std::string::npos);
  for (int i = 0; i < 3; ++i) trainer.Step();
  CHECK(trainer.Difference() == "");
}

// Before maintenance: the file system of an evacuated path can be unmounted, and another one mounted there.
TEST_CASE("Paths.AnEvacuatedOneCanBeUnmounted") {
  if (::geteuid() != 0) {
    WARN("skipped: mounting needs root");
    return;
  }
  DaemonProcess daemon(SmallPool());
  daemon.Signal(SIGTERM);
  REQUIRE(daemon.WaitForEnd() == 0);
  const std::string point = daemon.path(2);
  if (::mount("tmpfs", point.c_str(), "tmpfs", 0, "size=64m") != 0) {
    WARN("skipped: mounting a tmpfs does not work here");
    return;
  }
  daemon.Start();
  Client client = Connect(daemon.socket());
  ReferenceTrainer trainer(client, {"large", 200'003});
  for (int i = 0; i < 2; ++i) trainer.Step();
  CHECK((::umount2(point.c_str(), 0) == -1 && errno == EBUSY));
  REQUIRE(Command(daemon, "evacuate", "path2").contains("total_bytes"));
  REQUIRE(Eventually([&] { return Done(daemon, 2); }));
  CHECK(Eventually([&] { return ::umount2(point.c_str(), 0) == 0; }));
  REQUIRE(::mount("tmpfs", point.c_str(), "tmpfs", 0, "size=32m") == 0);
  CHECK(Command(daemon, "enable", "path2").at("state") == "probing");
  CHECK(Eventually([&] {
    trainer.Step();
    return PathOf(daemon, 2).at("scratch_bytes") > 0;
  }));
  CHECK(trainer.Difference() == "");
  client.Close();
  daemon.Signal(SIGTERM);
  CHECK(daemon.WaitForEnd() == 0);
  CHECK(::umount2(point.c_str(), MNT_DETACH) == 0);
}
