// What the long commands rely on: nothing of a child's work stays, however it or its parent ends; a report that was cut
// goes on.
#include "tests/support/long_run.h"

#include <signal.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/support/catch.h"
#include "tests/support/daemon_status.h"
#include "tests/unit/io_scratch.h"

namespace mlpo::test {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// Not a zombie either, which is somebody else's to wait for.
bool Runs(pid_t pid) {
  std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  if (!std::getline(stat, text)) return false;
  const size_t name = text.rfind(')');
  return name != std::string::npos && text.substr(name + 2, 1) != "Z";
}

bool IsMounted(const std::string& point) {
  std::ifstream mounts("/proc/self/mounts");
  for (std::string line; std::getline(mounts, line);) {
    if (line.find(" " + point + " ") != std::string::npos) return true;
  }
  return false;
}

// What work may leave: a process, and in its folder a file and, as root, a mount.
struct Litter {
  std::string folder;
  pid_t process = -1;

  bool gone() const { return !fs::exists(folder) && !IsMounted(folder + "/mount") && !Runs(process); }
};

// In the child: leaves it, and writes down what.
void Leave(const std::string& note) {
  const std::string folder = std::getenv("TMPDIR");
  const pid_t process = ::fork();
  if (process == 0) {
    ::execlp("sleep", "sleep", "1000", nullptr);
    ::_exit(1);
  }
  std::ofstream(folder + "/file") << "text";
  fs::create_directory(folder + "/mount");
  if (::geteuid() == 0) (void)::mount("tmpfs", (folder + "/mount").c_str(), "tmpfs", 0, "size=1m");
  std::ofstream(note + ".new") << folder << " " << process << "\n";
  fs::rename(note + ".new", note);
}

Litter Left(const std::string& note) {
  Litter litter;
  std::ifstream(note) >> litter.folder >> litter.process;
  REQUIRE(litter.process > 0);
  return litter;
}

[[noreturn]] void Hang() {
  for (;;) ::pause();
}

TEST_CASE("InChild.NothingStaysHoweverItEnds") {
  const struct {
    const char* name;
    std::function<json()> end;
    const char* why;  // "": it ends well
  } cases[] = {
      {"returns",
       [] {
         return json{{"outcome", "ok"}};
       },
       ""},
      {"throws", []() -> json { throw std::runtime_error("thrown"); }, "thrown"},
      {"dies",
       []() -> json {
         ::raise(SIGKILL);
         return {};
       },
       "wait status"},
      {"hangs", []() -> json { Hang(); }, "within 3 s"},
  };
  for (const auto& way : cases) {
    CAPTURE(way.name);
    ScratchFolder scratch;
    const std::string note = scratch.path() + "/note";
    const json answer = InChild(3, [&] {
      Leave(note);
      return way.end();
    });
    CAPTURE(answer.dump());
    CHECK(answer.at("outcome") == (*way.why == 0 ? "ok" : "failed"));
    if (*way.why != 0) CHECK(answer.at("why").get<std::string>().find(way.why) != std::string::npos);
    CHECK(!answer.contains("cleaning_up"));
    const Litter litter = Left(note);
    CHECK(Eventually([&] { return litter.gone(); }));
  }
}

TEST_CASE("InChild.NothingStaysWhenItsParentIsKilled") {
  ScratchFolder scratch;
  const std::string note = scratch.path() + "/note";
  const pid_t parent = ::fork();
  REQUIRE(parent >= 0);
  if (parent == 0) {
    (void)InChild(600, [&]() -> json {
      Leave(note);
      Hang();
    });
    ::_exit(0);
  }
  const bool left = Eventually([&] { return fs::exists(note); });
  ::kill(parent, SIGKILL);
  REQUIRE(::waitpid(parent, nullptr, 0) == parent);
  REQUIRE(left);
  const Litter litter = Left(note);
  CHECK(Eventually([&] { return litter.gone(); }));
}

TEST_CASE("Report.GoesOnBehindALineThatWasCut") {
  ScratchFolder scratch;
  const std::string file = scratch.path() + "/report.jsonl";
  std::ofstream(file) << "{\"command\":\"test\"}\n{\"comm";
  Report(file, "test", /*fresh=*/false).Add({{"number", 1}});
  std::ifstream lines(file);
  std::vector<json> read;
  for (std::string line; std::getline(lines, line);) read.push_back(json::parse(line, nullptr, false));
  REQUIRE(read.size() == 3);
  CHECK(read[0].at("command") == "test");
  CHECK(read[1].is_discarded());
  for (const char* member : {"command", "commit", "tree", "dirty", "time", "number"}) CHECK(read[2].contains(member));
}

TEST_CASE("LongForms.EachCaseHasItsLineAndOneThatEndedWellIsNotRunAgain") {
  ScratchFolder scratch;
  const std::string program = scratch.path() + "/fake", file = scratch.path() + "/report.jsonl";
  std::ofstream(program) << "#!/bin/sh\n"
                            "if [ \"$1\" = --list-tests ]; then\n"
                            "  printf 'All available test cases:\\n  well\\n  not well\\n      [tag]\\n'\n"
                            "  exit 2\n"
                            "fi\n"
                            "echo \"long form $MLPO_LONG of $1\"\n"
                            "[ \"$1\" = well ]\n";
  fs::permissions(program, fs::perms::owner_all);
  const std::string command = std::string("'") + MLPO_LONG_FORMS + "' --folder '" + scratch.path() + "' --report '" +
                              file + "' fake >/dev/null";
  std::vector<json> lines;
  for (const size_t more : {size_t{2}, size_t{FindSources("tests/integration tests/unit").dirty ? 2u : 1u}}) {
    const int status = std::system(command.c_str());
    REQUIRE(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 1);
    const size_t before = lines.size();
    lines.clear();
    std::ifstream report(file);
    for (std::string line; std::getline(report, line);) lines.push_back(json::parse(line));
    CHECK(lines.size() == before + more);
  }
  REQUIRE(lines.size() >= 3);
  CHECK(lines[0].at("case") == "well");
  CHECK(lines[0].at("outcome") == "ok");
  CHECK(lines[0].at("said") == "long form 1 of well\n");
  for (const json& line : {lines[1], lines.back()}) {
    CHECK(line.at("case") == "not well");
    CHECK(line.at("outcome") == "failed");
  }
  for (const char* member : {"program", "seed", "seconds", "commit", "tree"}) CHECK(lines[0].contains(member));
}

}  // namespace
}  // namespace mlpo::test
