// long_forms: test programs in their long forms (MLPO_LONG=1), one test case after the other, with a report: what ended
// well for the same sources is not run again. tests/stress/long runs it; see Usage() below.
//
// Each case has a process group and a folder of its own, of which nothing stays. What it prints is in its line.
#include <sys/wait.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/support/long_run.h"

using namespace mlpo::test;
using nlohmann::json;

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kCaseSeconds = 90 * 60;  // the longest take an hour
// Besides what every long command is of: where the sources of these programs are.
constexpr const char* kAlsoTested = "tests/integration tests/unit";
constexpr const char* kPrograms[] = {"churn_clients",      "dying_clients",     "kill_clients",
                                     "hostile_handshake",  "hostile_process",   "hostile_ring",
                                     "multi_rank",         "random_operations", "ring_wakeup",
                                     "shared_memory_test", "faulty_path_test",  "block_integrity_test"};

struct Said {
  int status = 0;  // as wait(2) has it
  std::string text;
};

// What a shell command prints, both ways.
Said Run(const std::string& command) {
  FILE* pipe = ::popen((command + " 2>&1").c_str(), "r");
  if (pipe == nullptr) throw std::runtime_error("it cannot be started: " + command);
  Said said;
  char chunk[4096];
  size_t got;
  while ((got = std::fread(chunk, 1, sizeof chunk, pipe)) > 0) said.text.append(chunk, got);
  said.status = ::pclose(pipe);
  return said;
}

std::string Quoted(const std::string& word) {
  if (word.find('\'') != std::string::npos) throw std::runtime_error("a quote in " + word);
  return "'" + word + "'";
}

// As Catch2 lists them, of version 2 or 3: two spaces in front of each name. The exit code may be their number. A
// program that lists none (ring_wakeup) is one itself, without a name.
std::vector<std::string> Cases(const std::string& program) {
  if (!std::filesystem::exists(program)) throw std::runtime_error(program + " is not there: is it built?");
  std::vector<std::string> cases;
  std::istringstream lines(Run(Quoted(program) + " --list-tests").text);
  for (std::string line; std::getline(lines, line);) {
    if (line.size() > 2 && line.compare(0, 2, "  ") == 0 && line[2] != ' ') cases.push_back(line.substr(2));
  }
  if (cases.empty()) cases.emplace_back();
  return cases;
}

json RunCase(const std::string& program, const std::string& name) {
  const Said said = Run("MLPO_LONG=1 " + Quoted(program) + (name.empty() ? "" : " " + Quoted(name)));
  const bool well = WIFEXITED(said.status) && WEXITSTATUS(said.status) == 0;
  json line = {{"outcome", well ? "ok" : "failed"}, {"said", EndOf(said.text)}};
  if (!well) line["why"] = "it ended with wait status " + std::to_string(said.status);
  return line;
}

int Usage(int code) {
  std::fprintf(code == 0 ? stdout : stderr,
               "Usage: long_forms [--report FILE] [--fresh] [--folder DIR] [PROGRAM...]\n"
               "  PROGRAM    of the test programs; default: what stress has with long forms, and flipped bits on disk\n"
               "  --report   JSON lines are appended there, one for each test case; what ended well is not run again\n"
               "  --folder   of the programs; default that of this one\n"
               "MLPO_SEED, from which some have their seed, is in the lines.\n"
               "Exit code: 0 all right, 1 not, 64 wrong usage.\n");
  return code;
}

}  // namespace

int main(int argc, char** argv) {
  std::string report_file, folder = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  bool fresh = false;
  std::vector<std::string> programs;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--help") return Usage(0);
    if (flag == "--fresh") {
      fresh = true;
    } else if ((flag == "--report" || flag == "--folder") && i + 1 < argc) {
      (flag == "--report" ? report_file : folder) = argv[++i];
    } else if (flag.rfind('-', 0) == 0) {
      return Usage(64);
    } else {
      programs.push_back(flag);
    }
  }
  if (programs.empty()) programs.assign(std::begin(kPrograms), std::end(kPrograms));
  const char* seed = std::getenv("MLPO_SEED");
  bool right = true;
  try {
    Report report(report_file, "long_forms", fresh, kAlsoTested);
    for (const std::string& program : programs) {
      const std::string path = folder + "/" + program;
      for (const std::string& name : Cases(path)) {
        json line = {{"program", program}, {"case", name}, {"seed", seed == nullptr ? "its own" : seed}};
        if (report.Has(line, [](const json& found) { return found.value("outcome", "") == "ok"; })) {
          std::printf("the report has %s %s of these sources\n", program.c_str(), name.c_str());
          continue;
        }
        const auto from = Clock::now();
        line.update(InChild(kCaseSeconds, [&] { return RunCase(path, name); }));
        line["seconds"] = std::chrono::duration<double>(Clock::now() - from).count();
        right = right && line.at("outcome") == "ok";
        report.Add(std::move(line));
      }
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "long_forms: %s\n", error.what());
    return 1;
  }
  return right ? 0 : 1;
}
