// mlpo-ctl gc with real daemons: what a killed one left goes, beside a living one too; what lives stays.
#include <array>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>

#include "tests/support/catch.h"
#include "tests/support/checkpoints.h"
#include "tests/support/daemon_process.h"
#include "tests/support/daemon_status.h"
#include "tests/support/fault_fs.h"
#include "tests/support/program.h"
#include "tests/support/reference_trainer.h"

using namespace mlpo::test;
using mlpo::Client;
namespace fs = std::filesystem;

namespace {

struct Outcome {
  int code = 0;
  std::string out, err;
  nlohmann::json report;
};

Outcome Gc(const std::vector<std::string>& arguments) {
  const fs::path folder = fs::path(DaemonProcess::Program()).parent_path();
  std::vector<std::string> command = {folder / "mlpo-ctl", "gc", "--json"};
  command.insert(command.end(), arguments.begin(), arguments.end());
  Program program(command, {{"MLPO_SOCKET", ""}});
  Outcome outcome;
  outcome.code = program.Wait();
  outcome.out = program.out();
  outcome.err = program.err();
  outcome.report = nlohmann::json::parse(outcome.out, nullptr, false);
  return outcome;
}

std::string ConfigOf(const DaemonProcess& daemon) { return daemon.folder() + "/mlpo.toml"; }

// A session's files that nobody has any more, and, with a directory, those of a save; the daemon is dead.
void LeaveScratch(DaemonProcess& daemon, const std::string& job, const std::string& directory = "") {
  Client client = Connect(daemon.socket(), job);
  ReferenceTrainer trainer(client, {});
  trainer.Step();
  if (!directory.empty()) {
    REQUIRE(fs::create_directories(directory));
    Save(client, directory, "tag", 1);
    REQUIRE_FALSE(fs::is_empty(directory));
  }
  daemon.Signal(SIGKILL);
  REQUIRE(daemon.WaitForEnd() == 128 + SIGKILL);
}

}  // namespace

TEST_CASE("Gc.WhatAKilledDaemonLeftGoesWithoutStartingOne") {
  DaemonProcess daemon;
  LeaveScratch(daemon, "dead");
  const std::vector<std::string> left = daemon.ScratchFiles();
  REQUIRE(left.size() == 2);
  const Outcome dry = Gc({"--dry-run", "--config", ConfigOf(daemon)});
  CAPTURE(dry.out, dry.err);
  CHECK(dry.code == 0);
  CHECK(dry.report.at("dry_run") == true);
  CHECK(dry.report.at("removed").size() == 2);
  CHECK(daemon.ScratchFiles() == left);
  const Outcome real = Gc({"--config", ConfigOf(daemon)});
  CHECK(real.code == 0);
  CHECK(real.report.at("removed") == dry.report.at("removed"));
  CHECK(real.report.at("bytes") > 0);
  CHECK(daemon.ScratchFiles().empty());
  CHECK(Gc({"--config", ConfigOf(daemon)}).report.at("removed").empty());
  daemon.Start();
  CHECK(daemon.log().find("scratch_removed") == std::string::npos);  // nothing was left to it
}

TEST_CASE("Gc.BesideADaemonThatTrains") {
  DaemonProcess daemon({.memory = "294912"});
  LeaveScratch(daemon, "dead");
  // As if they could not be removed when it started.
  std::map<std::string, std::string> aside;
  for (const std::string& file : daemon.ScratchFiles()) {
    const std::string kept = daemon.folder() + "/aside" + std::to_string(aside.size());
    fs::copy_file(file, kept);
    aside[file] = kept;
  }
  daemon.Start();
  REQUIRE(daemon.ScratchFiles().empty());
  for (const auto& [file, kept] : aside) {
    fs::create_directories(fs::path(file).parent_path());
    fs::copy_file(kept, file);
  }
  Client client = Connect(daemon.socket(), "living");
  ReferenceTrainer trainer(client, {"large", 100'003});
  for (int i = 0; i < 2; ++i) trainer.Step();
  REQUIRE(daemon.ScratchFiles().size() == 4);

  const Outcome refused = Gc({"--config", ConfigOf(daemon)});  // not the daemon: it does not know what lives
  CHECK(refused.code == 1);
  CHECK(refused.report.at("failed").size() == 2);
  CHECK(refused.out.find("in use by a daemon") != std::string::npos);
  CHECK(daemon.ScratchFiles().size() == 4);

  const Outcome dry = Gc({"--dry-run", "--socket", daemon.socket()});
  CAPTURE(dry.out, dry.err);
  CHECK(dry.report.at("removed").size() == 2);
  CHECK(daemon.ScratchFiles().size() == 4);
  const Outcome real = Gc({"--socket", daemon.socket()});
  CHECK(real.code == 0);
  CHECK(real.report.at("removed").size() == 2);
  CHECK(daemon.ScratchFiles().size() == 2);
  for (const auto& [file, kept] : aside) CHECK_FALSE(fs::exists(file));
  for (int i = 0; i < 2; ++i) trainer.Step();
  CHECK(trainer.Difference() == "");
  client.Close();
  CHECK(daemon.ScratchGone());
}

TEST_CASE("C14_Gc.OfANodeWhoseDaemonIsGone") {
  for (const bool by_a_daemon : {false, true}) {
    CAPTURE(by_a_daemon);
    DaemonProcess daemon({.config = "[daemon]\nnode = \"gone\"\n"});
    const std::string directory = daemon.folder() + "/saved";
    LeaveScratch(daemon, "dead", directory);
    const std::vector<std::string> left = daemon.ScratchFiles();
    REQUIRE(left.size() == 3);  // and the record of the save
    // Another node's daemon on the same paths, which runs, or could.
    DaemonProcess::Options options = {.paths = 0};
    for (int i = 0; i < 2; ++i) options.config += "[[path]]\ndirectory = \"" + daemon.path(i) + "\"\n";
    std::optional<DaemonProcess> other;
    if (by_a_daemon) other.emplace(options);
    const std::string empty = daemon.folder() + "/empty.toml";
    std::ofstream(empty).close();
    const std::vector<std::string> flags =
        by_a_daemon ? std::vector<std::string>{"--socket", other->socket()}
                    : std::vector<std::string>{"--config", empty, "--path", daemon.path(0), "--path", daemon.path(1)};
    const auto with = [&](std::vector<std::string> arguments) {
      arguments.insert(arguments.end(), flags.begin(), flags.end());
      return Gc(arguments);
    };
    CHECK(with({}).report.at("removed").empty());
    CHECK(with({"--node", "never"}).report.at("removed").empty());
    CHECK(daemon.ScratchFiles() == left);
    CHECK(with({"--node", "../gone"}).code == (by_a_daemon ? 1 : 64));
    const Outcome dry = with({"--dry-run", "--node", "gone"});
    CHECK(dry.report.at("removed").size() == 3);
    CHECK(daemon.ScratchFiles() == left);
    CHECK_FALSE(fs::is_empty(directory));
    const Outcome real = with({"--node", "gone"});
    CAPTURE(real.out, real.err);
    CHECK(real.code == 0);
    CHECK(real.report.at("removed") == dry.report.at("removed"));
    CHECK(daemon.ScratchFiles().empty());
    CHECK(fs::is_empty(directory));
    daemon.Start();
    CHECK(with({"--node", "gone"}).code == 1);  // it lives again
  }
}

// While it is being copied: what lives stays, what a kill has cut goes.
TEST_CASE("Gc.OfASaveThatIsUnderWayAndOfOneThatWasCut") {
  for (const bool by_a_daemon : {false, true}) {
    CAPTURE(by_a_daemon);
    FaultFs slow;
    if (!slow.ok()) {
      WARN("skipped: " << slow.reason());
      return;
    }
    DaemonProcess daemon;
    const std::string directory = slow.point() + "/saved";
    REQUIRE(fs::create_directory(directory));
    const std::vector<std::string> through_it = {"--socket", daemon.socket()};
    {
      Client client = Connect(daemon.socket());
      ReferenceTrainer trainer(client, {"large", 50'021});
      trainer.Step();
      const auto begin = [&](const std::string& tag) {
        slow.Rule("write hang name=-0 from=4096");
        Save save(client, directory, tag, 1);
        save.Take().Wait();
        REQUIRE(Eventually([&] { return slow.Of("write").hanging > 0; }));
        return save;
      };
      Save living = begin("living");
      const Outcome beside = Gc(through_it);
      CAPTURE(beside.out, beside.err);
      CHECK(beside.code == 0);
      CHECK(beside.report.at("removed").empty());
      slow.Clear();
      CHECK(living.Saved().Wait().value == 1);
      (void)begin("cut");
      daemon.Signal(SIGKILL);
      slow.Clear();  // a write that is under way ends before its process
      REQUIRE(daemon.WaitForEnd() == 128 + SIGKILL);
    }
    REQUIRE(fs::exists(directory + "/cut/part-0"));
    // A start finds another directory in its place, and leaves it to gc.
    fs::rename(directory, directory + "-aside");
    REQUIRE(fs::create_directory(directory));
    daemon.Start();
    REQUIRE(Eventually([&] { return daemon.log().find("checkpoint_rest_kept") != std::string::npos; }));
    CHECK(Gc(through_it).report.at("kept").size() == 1);
    REQUIRE(fs::remove(directory));
    fs::rename(directory + "-aside", directory);
    if (!by_a_daemon) {
      daemon.Signal(SIGKILL);
      REQUIRE(daemon.WaitForEnd() == 128 + SIGKILL);
    }
    const auto with = [&](std::vector<std::string> arguments) {
      const std::vector<std::string> where =
          by_a_daemon ? through_it : std::vector<std::string>{"--config", ConfigOf(daemon)};
      arguments.insert(arguments.end(), where.begin(), where.end());
      return Gc(arguments);
    };
    const Outcome dry = with({"--dry-run"});
    CHECK(dry.report.at("removed").size() == 1);
    CHECK(fs::exists(directory + "/cut/part-0"));
    const Outcome real = with({});
    CAPTURE(real.out, real.err);
    CHECK(real.code == 0);
    CHECK(real.report.at("removed") == dry.report.at("removed"));
    CHECK_FALSE(fs::exists(directory + "/cut"));
    CHECK(daemon.ScratchFiles().empty());  // its record, too
    CHECK(fs::exists(directory + "/living/part-0"));
  }
}

// Two jobs by mistake, as a script with a fixed attempt= makes them.
TEST_CASE("Gc.ASecondSaveWithTheSameAttemptIsRefusedAndTheFirstStays") {
  DaemonProcess daemon;
  const std::string directory = daemon.folder() + "/saved";
  REQUIRE(fs::create_directory(directory));
  const std::array<uint8_t, 16> attempt = {1};
  Client first = Connect(daemon.socket(), "first"), second = Connect(daemon.socket(), "second");
  ReferenceTrainer trainer(first, {}), other(second, {});
  trainer.Step();
  other.Step();
  Save save(first, directory, "tag", 1, false, attempt.data());
  int code = 0;
  try {
    Save(second, directory, "tag", 1, false, attempt.data());
  } catch (const mlpo::Error& error) {
    code = error.code();
  }
  CHECK(code == -EEXIST);
  const Outcome outcome = Gc({"--socket", daemon.socket()});
  CAPTURE(outcome.out, outcome.err);
  CHECK(outcome.code == 0);
  CHECK(outcome.report.at("removed").empty());
  save.Take().Wait();
  CHECK(save.Saved().Wait().value == 1);
  Save again(second, directory, "another", 1, false, attempt.data());  // it has ended
  again.Take().Wait();
  CHECK(again.Saved().Wait().value == 1);
}
