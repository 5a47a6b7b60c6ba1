// mlpo-ctl as a program: against a control server with a made-up snapshot, and `run` with a stand-in daemon.
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "tests/support/control_scene.h"
#include "tests/support/program.h"

using nlohmann::json;
namespace fs = std::filesystem;

namespace {

bool Has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

struct Outcome {
  int code;
  std::string out, err;
};
Outcome Ctl(const std::vector<std::string>& arguments, std::map<std::string, std::string> environment = {}) {
  std::vector<std::string> command = {MLPO_CTL};
  command.insert(command.end(), arguments.begin(), arguments.end());
  Program program(command, environment);
  const int code = program.Wait();
  return {code, program.out(), program.err()};
}

// A folder with copies of mlpo-ctl and the stand-in as mlpo-daemon beside it, and what the stand-in has logged.
class RunScene {
 public:
  RunScene() {
    fs::create_directory(dir / "bin");
    fs::create_directory(dir / "runtime");
    fs::copy_file(MLPO_CTL, dir / "bin/mlpo-ctl");
    fs::copy_file(MLPO_STAND_IN, dir / "bin/mlpo-daemon");
    environment = {{"STAND_IN_LOG", dir / "log"},
                   {"STAND_IN", "ready"},
                   {"XDG_RUNTIME_DIR", dir / "runtime"},
                   {"MLPO_SOCKET", ""},
                   {"MLPO_JOB", ""}};
  }
  std::vector<std::string> Command(const std::vector<std::string>& flags, const std::string& script) const {
    std::vector<std::string> command = {dir / "bin/mlpo-ctl", "run"};
    command.insert(command.end(), flags.begin(), flags.end());
    command.insert(command.end(), {"--", "/bin/sh", "-c", script});
    return command;
  }
  Outcome Run(const std::vector<std::string>& flags, const std::string& script) const {
    Program program(Command(flags, script), environment);
    const int code = program.Wait();
    return {code, program.out(), program.err()};
  }
  std::string Log() const {
    std::ostringstream text;
    text << std::ifstream(dir / "log").rdbuf();
    return text.str();
  }
  bool Clean() const { return fs::is_empty(dir / "runtime"); }
  template <class Condition>
  static bool Await(Condition condition) {
    for (int i = 0; i < 4000; ++i) {
      if (condition()) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return false;
  }

  ScratchDir dir;
  std::map<std::string, std::string> environment;
};

}  // namespace

TEST_CASE("Ctl.StatusAsJsonIsOneObjectWithTheDaemonsNames") {
  ControlScene scene;
  scene.Start();
  const Outcome outcome = Ctl({"status", "--json", "--socket", scene.socket});
  CHECK(outcome.code == 0);
  CHECK(outcome.err == "");
  CHECK(std::count(outcome.out.begin(), outcome.out.end(), '\n') == 1);
  const json status = json::parse(outcome.out);
  CHECK(status["state"] == "ready");
  CHECK(status["sessions"][0]["job"] == "mine");
  CHECK(status["sessions"][0]["skipped_steps"] == 4);
  CHECK(status["paths"][0]["directory"] == "/mnt/nvme");
  CHECK(status["paths"][0]["read_bytes"] == 1ull << 41);
  CHECK(status["pool"]["bytes"] == 64ull << 30);
}

TEST_CASE("Ctl.TablesHaveUnitsAndAlignedColumns") {
  ControlScene scene;
  scene.Start();
  const Outcome status = Ctl({"status"}, {{"MLPO_SOCKET", scene.socket}});
  INFO(status.out);
  CHECK(status.code == 0);
  for (const char* part : {"node-17", "ready", "64.0 GiB", "2.0 TiB", "345.0 MB/s", "268.0 M", "10 cached (4 dirty)",
                           "io_uring", "1/2", "12.5 s", "breaking the protocol: 2"})
    CHECK(Has(status.out, part));
  CHECK_FALSE(Has(status.out, "lost wake-ups"));
  const Outcome paths = Ctl({"paths", "--socket", scene.socket});
  const size_t line = paths.out.find('\n');
  CHECK(paths.out.find("DIRECTORY") == paths.out.find("/mnt/nvme") - line - 1);
  CHECK(Has(Ctl({"sessions", "--socket", scene.socket}).out, "sessions: 2 of 2"));
  CHECK(json::parse(Ctl({"--json", "--socket", scene.socket, "sessions"}).out)["sessions"].size() == 2);
  CHECK(json::parse(Ctl({"paths", "--json", "--socket", scene.socket}).out)["paths"].size() == 1);
}

TEST_CASE("Ctl.DegradedIs2") {
  ControlScene scene;
  scene.Start();
  for (const char* command : {"status", "paths"}) {
    scene.OnServerThread([&] { scene.snapshot.state = "ready"; });
    for (const char* state : {"suspect", "quarantined", "probing", "full", "read_only", "disabled"}) {
      scene.OnServerThread([&] { scene.snapshot.paths[0].state = state; });
      CHECK(Ctl({command, "--socket", scene.socket}).code == 2);
    }
    scene.OnServerThread([&] { scene.snapshot.paths[0].state = "healthy"; });
    CHECK(Ctl({command, "--socket", scene.socket, "--json"}).code == 0);
    scene.OnServerThread([&] { scene.snapshot.state = "degraded"; });
    CHECK(Ctl({command, "--socket", scene.socket, "--json"}).code == 2);
  }
}

TEST_CASE("Ctl.CommandsForAPath") {
  ControlScene scene;
  scene.Start();
  const std::vector<std::string> at = {"--socket", scene.socket};
  const auto ctl = [&](std::vector<std::string> arguments) {
    arguments.insert(arguments.end(), at.begin(), at.end());
    return Ctl(arguments);
  };
  const auto last = [&] {
    std::string command;
    scene.OnServerThread([&] { command = scene.commands.empty() ? "" : scene.commands.back(); });
    return command;
  };
  Outcome outcome = ctl({"paths", "disable", "nvme"});
  CHECK(outcome.code == 0);
  CHECK(last() == "disable nvme");
  CHECK(Has(outcome.out, "nothing more is written there"));
  outcome = ctl({"paths", "enable", "nvme", "--json"});
  CHECK(outcome.code == 0);
  CHECK(last() == "enable nvme");
  CHECK(json::parse(outcome.out)["state"] == "disabled");  // what the scene answers
  outcome = ctl({"paths", "evacuate", "nvme"});
  INFO(outcome.out << outcome.err);
  CHECK(outcome.code == 0);
  CHECK(last() == "evacuate nvme");
  CHECK(Has(outcome.out, "99"));
  CHECK(Has(outcome.out, "unmounted"));
  outcome = ctl({"paths", "evacuate", "nvme", "--json"});
  CHECK(outcome.code == 0);
  CHECK(json::parse(outcome.out)["evacuation"]["done"] == true);
  outcome = ctl({"paths", "evacuate", "elsewhere"});
  CHECK(outcome.code == 1);
  CHECK(Has(outcome.err, "no path 'elsewhere'"));
  CHECK(ctl({"paths", "evacuate"}).code == 64);
  CHECK(ctl({"paths", "remove", "nvme"}).code == 64);
  CHECK(ctl({"paths"}).code == 0);
}

TEST_CASE("Ctl.PathsSayWhatIsWrong") {
  ControlScene scene;
  scene.snapshot.taken_ns = 100'000'000'000;
  scene.Start();
  CHECK_FALSE(Has(Ctl({"paths", "--socket", scene.socket}).out, " since "));
  scene.OnServerThread([&] {
    scene.snapshot.paths[0].state = "full";
    scene.snapshot.paths[0].error = ENOSPC;
    scene.snapshot.paths[0].state_since_ns = 88'000'000'000;
  });
  for (const char* command : {"status", "paths"})
    CHECK(Has(Ctl({command, "--socket", scene.socket}).out, "nvme is full since 12.0 s: No space left on device\n"));
  scene.OnServerThread([&] {
    scene.snapshot.paths[0].state = "disabled";
    scene.snapshot.paths[0].error = 0;
    scene.snapshot.paths[0].evacuating = true;
    scene.snapshot.paths[0].evacuation_bytes = 4096;
    scene.snapshot.paths[0].scratch_bytes = 768;
    scene.snapshot.paths[0].checkpoint_bytes = 256;  // have to be copied before
  });
  CHECK(Has(Ctl({"paths", "--socket", scene.socket}).out, "disabled since 12.0 s: 1.0 KiB of 4.0 KiB are still to be"));
  scene.OnServerThread([&] { scene.snapshot.paths[0].evacuated = true; });
  CHECK(Has(Ctl({"paths", "--socket", scene.socket}).out, "disabled since 12.0 s: evacuated"));
}

TEST_CASE("Ctl.PathsSayWhatOtherNodesLeaveOfThem") {
  ControlScene scene;
  scene.Start();
  CHECK_FALSE(Has(Ctl({"status", "--socket", scene.socket}).out, "shared with other nodes"));
  scene.OnServerThread([&] {
    mlpo::PathSnapshot& path = scene.snapshot.paths.at(0);
    path.node_share = "measured";
    path.node_part = 0.25;
    path.nodes = 4;
    path.seen_bytes_per_s = 900e6;
    path.granted_bytes_per_s = 700e6;
  });
  for (const char* command : {"status", "paths"}) {
    const Outcome outcome = Ctl({command, "--socket", scene.socket});
    INFO(outcome.out);
    CHECK(Has(outcome.out, "shared with other nodes:"));
    for (const char* part : {"measured", "25.0 %", "900.0 MB/s", "700.0 MB/s"}) CHECK(Has(outcome.out, part));
  }
}

TEST_CASE("Ctl.GcShowsWhatTheDaemonRemoved") {
  ControlScene scene;
  scene.Start();
  CHECK(Ctl({"gc", "--socket", scene.socket}).code == 0);
  scene.OnServerThread([&] {
    scene.gc_report = R"({"dry_run":true,"bytes":2048,"removed":[{"file":"/p/a\u001b[2J","bytes":2048,"why":"gone"}],
                         "kept":[{"file":"/p/b","bytes":0,"why":"not ours"}],"failed":[]})";
    scene.gc_report.erase(std::remove(scene.gc_report.begin(), scene.gc_report.end(), '\n'), scene.gc_report.end());
  });
  Outcome outcome = Ctl({"gc", "--dry-run", "--node=n7", "--socket", scene.socket});
  INFO(outcome.out << outcome.err);
  CHECK(outcome.code == 2);
  CHECK(Has(outcome.out, "would remove /p/a"));
  CHECK(Has(outcome.out, "kept /p/b (not ours)"));
  CHECK(Has(outcome.out, "2.0 KiB"));
  CHECK_FALSE(Has(outcome.out, "\x1b"));
  scene.OnServerThread([&] { CHECK(scene.commands.back() == "dry gc n7"); });
  scene.OnServerThread([&] {
    scene.gc_report =
        R"({"dry_run":false,"bytes":0,"removed":[],"kept":[],"failed":[{"file":"/p","bytes":0,"why":"EIO"}]})";
  });
  outcome = Ctl({"gc", "--json", "--socket", scene.socket});
  CHECK(outcome.code == 1);
  CHECK(json::parse(outcome.out)["failed"].size() == 1);
  scene.OnServerThread([&] { scene.gc_report = "{}"; });
  CHECK(Ctl({"gc", "--socket", scene.socket}).code == 1);
  CHECK(Ctl({"gc", "--node"}).code == 64);
  CHECK(Ctl({"gc", "--node", "", "--socket", scene.socket}).code == 64);
  CHECK(Ctl({"gc", "--timeout", "x"}).code == 64);
  CHECK(Has(Ctl({"gc", "--help"}).out, "--dry-run"));
}

TEST_CASE("Ctl.AnEvacuationThatDoesNotEnd") {
  ControlScene scene;
  scene.holds_blocks = true;
  scene.Start();
  const std::vector<std::string> evacuate = {"paths", "evacuate", "nvme", "--socket", scene.socket, "--wait"};
  const auto with = [&](const std::string& wait) {
    std::vector<std::string> arguments = evacuate;
    arguments.push_back(wait);
    return Ctl(arguments);
  };
  Outcome outcome = with("0");
  CHECK(outcome.code == 0);
  CHECK(Has(outcome.out, "goes on when mlpo-ctl ends"));
  outcome = with("0.7");
  CHECK(outcome.code == 2);
  CHECK(Has(outcome.err, "goes on"));
  scene.OnServerThread([&] {
    mlpo::PathSnapshot disk;
    disk.name = "disk";
    disk.state = "read_only";
    disk.error = EROFS;
    scene.snapshot.paths.push_back(disk);
  });
  outcome = with("0.7");
  CHECK(outcome.code == 2);
  CHECK(Has(outcome.err, "no other path takes what is written: 'disk' is read_only (Read-only file system)"));
  // Somebody enables the path meanwhile.
  std::thread other([&] {
    for (size_t commands = 0; commands < 4; std::this_thread::sleep_for(std::chrono::milliseconds(5)))
      scene.OnServerThread([&] { commands = scene.commands.size(); });
    scene.OnServerThread([&] { scene.snapshot.paths[0].evacuating = false; });
  });
  outcome = with("60");
  other.join();
  CHECK(outcome.code == 1);
  CHECK(Has(outcome.err, "ended"));
  scene.OnServerThread([&] { scene.snapshot.paths[0].unreadable_blocks = 3; });
  outcome = with("60");
  CHECK(outcome.code == 2);
  CHECK(Has(outcome.err, "3 blocks cannot be read"));
}

TEST_CASE("Ctl.DrainReachesTheDaemon") {
  ControlScene scene;
  scene.Start();
  const Outcome outcome = Ctl({"drain", "--json", "--socket", scene.socket});
  CHECK(outcome.code == 0);
  CHECK(json::parse(outcome.out)["state"] == "draining");
  CHECK(scene.drains == 1);
}

TEST_CASE("Ctl.CheckpointsAreAskedFor") {
  ControlScene scene;
  scene.Start();
  const Outcome all = Ctl({"checkpoint", "request", "--socket", scene.socket});
  CHECK(all.code == 0);
  CHECK(Has(all.out, "2 sessions"));
  const Outcome one = Ctl({"checkpoint", "request", "--job", "mine", "--json", "--socket", scene.socket});
  CHECK(json::parse(one.out)["sessions"] == 1);
  const Outcome none = Ctl({"checkpoint", "request", "--job", "nobody", "--socket", scene.socket});
  CHECK(none.code == 1);
  CHECK(Has(none.err, "no session"));
}

// As whoever asks, without a daemon: by mlpo-daemon's own tool, which is looked for beside mlpo-ctl.
TEST_CASE("Ctl.CheckpointsOfADirectoryAreListed") {
  ScratchDir dir;
  const Outcome list = Ctl({"checkpoint", "list", dir / "", "--json"});
  INFO(list.err);
  CHECK(list.code == 0);
  CHECK(json::parse(list.out)["checkpoints"].empty());
  const Outcome verify = Ctl({"checkpoint", "verify", dir / ""});
  CHECK(verify.code == 1);
  CHECK(Has(verify.err, "mlpo-daemon: "));
  CHECK(Ctl({"checkpoint", "remove", dir / "", "../x"}).code == 1);
}

// By mlpo-daemon's own tool, too. The figures are plan_test's.
TEST_CASE("Ctl.PlanIsShownAsATableOrAsJson") {
  const std::vector<std::string> plan = {"plan",   "--params", "70B",      "--ranks", "4", "--path", "nvme=6.9/5.3GB/s",
                                         "--path", "pfs=3.6",  "--memory", "400GiB"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), plan.begin(), plan.end());
    return Ctl(more);
  };
  const Outcome shown = with({});
  INFO(shown.out << shown.err);
  CHECK(shown.code == 0);
  CHECK(shown.err == "");
  for (const char* part :
       {"70.0 B parameters, 4 ranks", "pool 400.0 GiB", "arenas 130.4 GiB", "782.3 GiB of state", "6.9 GB/s",
        "5.3 GB/s", "3.0 GB/s", "1.8 GB/s", "51.1%", "1 min 25 s", "58.3 s on 4 workers"})
    CHECK(Has(shown.out, part));
  const Outcome as_json = with({"--json"});
  CHECK(as_json.code == 0);
  CHECK(std::count(as_json.out.begin(), as_json.out.end(), '\n') == 1);
  const json report = json::parse(as_json.out);
  CHECK(report["schema_version"] == 1);
  CHECK(report["state"] == "fine");
  CHECK(report["memory"]["pool_bytes"] == 400ull << 30);
  CHECK(report["memory"]["node_bytes"].is_null());
  CHECK(report["storage"]["state_bytes"] == 66760ull * 12582912);
  CHECK(report["step"]["read_bytes"] == 32627ull * 12582912);
  CHECK(report["step"]["written_bytes"] == report["step"]["read_bytes"]);
  REQUIRE(report["paths"].size() == 2);
  CHECK(report["paths"][1]["name"] == "pfs");
  CHECK(report["paths"][1]["worth_bytes_per_s"].get<double>() == Approx(1.8e9));
  CHECK(report["findings"].empty());
  // Those of a path are said with its name, and the exit code is the worst one's.
  const Outcome warned = with({"--path", "old=50MB/s"});
  CHECK(warned.code == 2);
  CHECK(Has(warned.out, "old: is worth"));
  CHECK(Has(warned.out, "-> leave it out"));
  const Outcome full = with({"--node-memory", "450GiB", "--json"});
  CHECK(full.code == 1);
  CHECK(json::parse(full.out)["state"] == "failed");
  CHECK(json::parse(full.out)["findings"][0]["check"] == "memory");
  const Outcome wrong = with({"--path", "tape=fast"});
  CHECK(wrong.code == 64);
  CHECK(wrong.out == "");
  CHECK(Has(wrong.err, "--path tape=fast"));
  CHECK(Has(Ctl({"plan", "--help"}).out, "--params"));
}

TEST_CASE("Ctl.NoDaemonIs69AndSaysWhatToDo") {
  ScratchDir dir;
  for (const char* command : {"status", "paths", "sessions", "drain"}) {
    const Outcome outcome = Ctl({command, "--json", "--socket", dir / "mlpo.sock"});
    CHECK(outcome.code == 69);
    CHECK(outcome.out == "");
    CHECK(Has(outcome.err, dir / "mlpo.sock"));
    CHECK(Has(outcome.err, "mlpo-ctl run"));
  }
}

TEST_CASE("Ctl.ADaemonThatDoesNotAnswerIs69AtTheDeadline") {
  ControlScene scene;
  scene.hold_answers = true;
  scene.Start();
  const Outcome outcome = Ctl({"status", "--timeout", "0.2", "--socket", scene.socket});
  CHECK(outcome.code == 69);
  CHECK(Has(outcome.err, "does not answer"));
}

TEST_CASE("Ctl.WrongUsageIs64") {
  for (const std::vector<std::string>& arguments :
       std::vector<std::vector<std::string>>{{},
                                             {"frobnicate"},
                                             {"status", "--no-such-flag"},
                                             {"status", "paths", "x"},
                                             {"--timeout", "-1", "status"},
                                             {"run"},
                                             {"run", "--"},
                                             {"run", "--path", "/x"},
                                             {"run", "--socket", "/x", "--", "true"},
                                             {"run", "--socket=/x", "--", "true"},
                                             {"run", "--ready-timeout", "x", "--", "true"},
                                             {"run", "--ready-timeout", "--", "true"},
                                             {"checkpoint"},
                                             {"checkpoint", "frob", "/x"},
                                             {"checkpoint", "list"},
                                             {"checkpoint", "list", "/x", "tag"},
                                             {"checkpoint", "list", "/x", "--job", "j"},
                                             {"checkpoint", "remove", "/x"},
                                             {"checkpoint", "request", "/x"},
                                             {"plan"},
                                             {"plan", "--json"},
                                             {"--json", "plan"},
                                             {"--json", "run", "--", "true"}}) {
    const Outcome outcome = Ctl(arguments);
    INFO((arguments.empty() ? "" : arguments[0]) << ": " << outcome.err);
    CHECK(outcome.code == 64);
    CHECK(outcome.out == "");
    CHECK(outcome.err != "");
  }
  CHECK(Ctl({"--help"}).code == 0);
  CHECK(Ctl({"--version"}).out.substr(0, 9) == "mlpo-ctl ");
  CHECK(Has(Ctl({"run", "--help"}).out, "DAEMON FLAGS"));
}

TEST_CASE("C30_Ctl.WhatADaemonSaysCannotReachTheTerminal") {
  ControlScene scene;
  scene.snapshot.node =
      "a\x1b[31mb\nc\xc2\x9b"
      "d";
  scene.Start();
  const Outcome outcome = Ctl({"status", "--socket", scene.socket});
  CHECK(Has(outcome.out, "a?[31mb?c??d"));
  CHECK_FALSE(Has(outcome.out, "\x1b"));
}

TEST_CASE("Ctl.AFullDiskIsNoSuccess") {
  ControlScene scene;
  scene.Start();
  Program program({"/bin/sh", "-c", std::string(MLPO_CTL) + " status --json --socket " + scene.socket + " >/dev/full"});
  CHECK(program.Wait() == 1);
  CHECK(Has(program.err(), "No space left"));
}

TEST_CASE("CtlRun.PassesOnTheExitCodeWithSocketAndJobAndDrains") {
  RunScene scene;
  const Outcome outcome = scene.Run({"--path", "/mnt/a", "--memory", "1GiB"},
                                    "echo socket=$MLPO_SOCKET job=$MLPO_JOB; ls -ld $(dirname $MLPO_SOCKET); exit 7");
  INFO(outcome.out << outcome.err << scene.Log());
  CHECK(outcome.code == 7);
  CHECK(Has(outcome.out, "socket=" + (scene.dir / "runtime/mlpo-run-")));
  CHECK(Has(outcome.out, "job=run-"));
  CHECK(Has(outcome.out, "drwx------"));
  CHECK(Has(scene.Log(), "arguments --path /mnt/a --memory 1GiB --socket " + (scene.dir / "runtime/mlpo-run-")));
  CHECK(Has(scene.Log(), "sigterm\ndrained\n"));
  CHECK(scene.Clean());
}

TEST_CASE("CtlRun.KeepsTheJobThatIsSet") {
  RunScene scene;
  scene.environment["MLPO_JOB"] = "my-job";
  CHECK(Has(scene.Run({}, "echo job=$MLPO_JOB").out, "job=my-job\n"));
}

TEST_CASE("CtlRun.ASignalThatEndsTheCommandIs128AndMore") {
  RunScene scene;
  CHECK(scene.Run({}, "kill -9 $$").code == 137);
  CHECK(Has(scene.Log(), "drained"));
  CHECK(scene.Clean());
}

TEST_CASE("CtlRun.ADegradedDaemonIsGoodEnough") {
  RunScene scene;
  scene.environment["STAND_IN"] = "degraded";
  CHECK(scene.Run({}, "exit 0").code == 0);
}

TEST_CASE("CtlRun.ADaemonThatDoesNotStartShowsWhy") {
  RunScene scene;
  scene.environment["STAND_IN"] = "refuse";
  const Outcome outcome = scene.Run({}, "touch " + (scene.dir / "ran"));
  CHECK(outcome.code == 78);
  CHECK(Has(outcome.err, "no path: give --path DIR"));
  CHECK(Has(outcome.err, "exit code 78"));
  CHECK_FALSE(fs::exists(scene.dir / "ran"));
  CHECK(scene.Clean());
}

TEST_CASE("CtlRun.ADaemonThatIsNotReadyInTimeIsStopped") {
  RunScene scene;
  scene.environment["STAND_IN"] = "never";
  const Outcome outcome = scene.Run({"--ready-timeout", "1"}, "touch " + (scene.dir / "ran"));
  CHECK(outcome.code == 69);
  CHECK(Has(outcome.err, "not ready after 1 s"));
  CHECK_FALSE(fs::exists(scene.dir / "ran"));
  CHECK(Has(scene.Log(), "drained"));
  CHECK(scene.Clean());
}

TEST_CASE("CtlRun.NoDaemonBinaryIsSaid") {
  RunScene scene;
  fs::remove(scene.dir / "bin/mlpo-daemon");
  scene.environment["PATH"] = scene.dir / "nothing";
  const Outcome outcome = scene.Run({}, "exit 0");
  CHECK(outcome.code == 1);
  CHECK(Has(outcome.err, "mlpo-daemon"));
  CHECK(Has(outcome.err, "PATH"));
  CHECK(scene.Clean());
}

TEST_CASE("CtlRun.ACommandThatCannotBeStartedIs127Or126") {
  RunScene scene;
  Program missing({scene.dir / "bin/mlpo-ctl", "run", "--", "/no/such/program"}, scene.environment);
  CHECK(missing.Wait() == 127);
  CHECK(Has(missing.err(), "/no/such/program"));
  Program folder({scene.dir / "bin/mlpo-ctl", "run", "--", "/tmp"}, scene.environment);
  CHECK(folder.Wait() == 126);
  CHECK(scene.Clean());
}

TEST_CASE("CtlRun.ADaemonThatDiesDuringTheRunIsSaidAndTheCommandCounts") {
  RunScene scene;
  scene.environment["STAND_IN"] = "crash";
  REQUIRE(::mkfifo((scene.dir / "fifo").c_str(), 0600) == 0);
  Program program(scene.Command({}, "touch $STAND_IN_LOG.go; read x < " + (scene.dir / "fifo") + "; exit 5"),
                  scene.environment);
  REQUIRE(RunScene::Await([&] { return fs::exists(scene.dir / "log.go"); }));
  const std::string log = scene.Log();
  const pid_t daemon = std::stoi(log.substr(log.find("pid ") + 4));
  REQUIRE(RunScene::Await([&] { return ::kill(daemon, 0) != 0; }));  // reaped: mlpo-ctl has noticed
  std::ofstream(scene.dir / "fifo") << "go\n";
  CHECK(program.Wait() == 5);
  CHECK(Has(program.err(), "mlpo-daemon ended during the run (signal 9"));
  CHECK(scene.Clean());
}

TEST_CASE("CtlRun.ForwardsSignalsAndStillDrains") {
  for (const int signal : {SIGTERM, SIGINT, SIGHUP}) {
    RunScene scene;
    Program program(scene.Command({}, "trap 'exit 42' TERM INT HUP; touch " + (scene.dir / "up") +
                                          "; while :; do sleep 0.02; done"),
                    scene.environment);
    REQUIRE(RunScene::Await([&] { return fs::exists(scene.dir / "up"); }));
    program.Signal(signal);
    CHECK(program.Wait() == 42);
    CHECK(Has(scene.Log(), "drained"));
    CHECK(scene.Clean());
  }
}

TEST_CASE("CtlRun.ASignalBeforeTheDaemonIsReadyStopsAll") {
  RunScene scene;
  scene.environment["STAND_IN"] = "never";
  Program program(scene.Command({}, "touch " + (scene.dir / "ran")), scene.environment);
  // Its "pid" line comes before it catches signals: wait until it serves.
  REQUIRE(RunScene::Await([&] {
    if (scene.Clean()) return false;
    return fs::exists(fs::directory_iterator(scene.dir / "runtime")->path() / "mlpo.sock.ctl");
  }));
  program.Signal(SIGINT);
  CHECK(program.Wait() == 130);
  CHECK_FALSE(fs::exists(scene.dir / "ran"));
  CHECK(scene.Clean());
}

TEST_CASE("CtlRun.ADrainThatTakesTooLongIsStoppedFast") {
  RunScene scene;
  scene.environment["STAND_IN"] = "slow";
  const Outcome outcome = scene.Run({"--stop-timeout", "1"}, "exit 3");
  CHECK(outcome.code == 3);
  CHECK(Has(outcome.err, "stopping it fast"));
  CHECK(Has(scene.Log(), "sigterm\nsigterm\ndrained"));
}

TEST_CASE("CtlRun.KilledItLeavesNoDaemonBehind") {
  RunScene scene;
  REQUIRE(::mkfifo((scene.dir / "fifo").c_str(), 0600) == 0);
  Program program(scene.Command({}, "touch " + (scene.dir / "up") + "; read x < " + (scene.dir / "fifo")),
                  scene.environment);
  REQUIRE(RunScene::Await([&] { return fs::exists(scene.dir / "up"); }));
  program.Signal(SIGKILL);
  CHECK(RunScene::Await([&] { return Has(scene.Log(), "drained"); }));
  std::ofstream(scene.dir / "fifo") << "go\n";  // the command ends too
}

TEST_CASE("CtlRun.JsonIsOneObjectOnStdout") {
  RunScene scene;
  const Outcome outcome = scene.Run({"--json"}, "echo from the command; exit 4");
  CHECK(outcome.code == 4);
  const json report = json::parse(outcome.out, nullptr, false);
  INFO(outcome.out);
  REQUIRE(report.is_object());
  CHECK(report["exit_code"] == 4);
  CHECK(report["daemon_started"] == true);
  CHECK(report["daemon_exit_code"] == 0);
  CHECK(Has(outcome.err, "from the command"));
}
