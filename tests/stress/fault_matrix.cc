// fault_matrix: every fault of storage, in every phase of a step, with both ways of doing I/O, under a daemon that
// trains: the right outcome, no wrong byte, nothing that hangs. tests/stress/faults runs it; see Usage() below.
//
// A cell is one fault, phase and engine. It has a process group of its own, which is killed at its deadline: whatever
// it does, the next one begins on a clean machine. Two paths: `faulty`, on the storage that fails, and `path0`, which
// does not. The state is five times the pool, so that each step reads and writes on both. All values are compared with
// the scalar reference in memory (ReferenceTrainer); that a fault was met is asked of the storage. What is right:
//   kNone       every step ends, with all bits right, while the fault is there and after it has gone
//   others      the first update that needs what is lost fails, with an error that names the path; after a repair the
//   same
//               update ends it, all bits right. Where there is no repair the session ends, and a new job trains without
//               the path
// and always: the daemon runs, answers `status` and ends in order.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/daemon_process.h"
#include "tests/support/daemon_status.h"
#include "tests/support/long_run.h"
#include "tests/support/reference_trainer.h"
#include "tests/support/storage_fault.h"

using namespace mlpo::test;
using nlohmann::json;

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kCellSeconds = 240;  // several times what the slowest takes
constexpr auto kAnswer = std::chrono::seconds(60);
constexpr auto kHang = std::chrono::seconds(3);     // how long what hangs is left so
constexpr int kWarmUp = 3, kArmed = 3, kAfter = 2;  // steps
constexpr int kVoids = 5;                           // seeds that are tried where a fault was not met

constexpr std::array kPhases = {"fetch", "update", "flush", "checkpoint", "restore"};
constexpr std::array kEngines = {"io_uring", "threads"};

struct Cell {
  const FaultKind* kind;
  std::string phase;
  std::string engine;
};

struct Wrong : std::runtime_error {
  using std::runtime_error::runtime_error;
};

DaemonProcess::Options TwoPaths(const std::string& faulty, const std::string& engine) {
  const std::string speeds = "read_limit = \"200MB/s\"\nwrite_limit = \"200MB/s\"\n";  // equal shares
  DaemonProcess::Options options;
  options.paths = 1;
  options.memory = std::to_string(8 * 49'152);
  options.engine = engine;
  options.config = "[scheduler]\nno_path_timeout = 5\n[[path]]\nname = \"faulty\"\ndirectory = \"" + faulty +
                   "\"\nengine = \"" + engine + "\"\n" + speeds;
  options.path_settings = {speeds};
  return options;
}

class Run {
 public:
  Run(const Cell& cell, uint64_t seed, StorageFault* fault)
      : cell_(cell),
        fault_(fault),
        random_(seed),
        daemon_(TwoPaths(fault->directory(), cell.engine)),
        client_(Connect(daemon_.socket(), "first")) {
    trainer_.emplace(client_.value(),
                     TrainerOptions{"large", 160'013 + random_() % 4096, MLPO_BFLOAT16, MLPO_BFLOAT16, seed});
  }

  // "" or why it is void; throws Wrong and what the client throws.
  std::string Go() {
    std::vector<double> seconds;
    for (int i = 0; i < kWarmUp; ++i) {
      const auto from = Clock::now();
      trainer_->Step();
      seconds.push_back(std::chrono::duration<double>(Clock::now() - from).count());
    }
    std::sort(seconds.begin(), seconds.end());
    step_seconds_ = seconds[seconds.size() / 2];
    Compare();
    std::optional<std::string> failure;
    for (int i = 0; i < kArmed && !failure; ++i) failure = Step(/*arms=*/i == 0);
    const bool struck = struck_ || fault_->Struck();
    if (fault_->Hangs()) fault_->Repair();  // a step may not have had to wait for it; reading the state would
    if (failure) {
      GoOnAfter(*failure);
    } else if (struck) {
      NothingWasLost();
    }
    End();
    return struck || failure ? "" : "the fault was not met";
  }
  int steps() const { return steps_; }

 private:
  // One step; nothing, or the error with which its update failed. The fault comes up in the phase that is asked for.
  std::optional<std::string> Step(bool arms) {
    if (arms && cell_.phase == "fetch") {
      AwaitRest();
      fault_->Arm();
    }
    trainer_->WriteGradient();
    trainer_->subgroup().SubmitGrad().Wait();
    const uint64_t written = FaultyPath().at("written_bytes");
    mlpo::Request update = trainer_->SubmitUpdate();
    if (arms && cell_.phase == "update") {
      std::this_thread::sleep_for(
          std::chrono::duration<double>(std::uniform_real_distribution<double>(0, step_seconds_)(random_)));
      fault_->Arm();
    } else if (arms && cell_.phase == "flush") {
      const auto give_up = Clock::now() + std::chrono::seconds(1);
      while (FaultyPath().at("written_bytes") == written && Clock::now() < give_up) std::this_thread::yield();
      fault_->Arm();
    }
    try {
      Await(update);
    } catch (const mlpo::Error& error) {
      if (error.code() != MLPO_ERR_IO) throw;
      return error.what();
    }
    trainer_->StepReference();
    ++steps_;
    return std::nullopt;
  }

  // What hangs is let go after a while, in which the daemon must answer others.
  void Await(mlpo::Request& request) {
    if (fault_->Hangs()) {
      if (request.WaitFor(kHang)) return;
      const auto asked = Clock::now();
      (void)DaemonStatus(daemon_.socket());
      if (Clock::now() - asked > std::chrono::seconds(10))
        throw Wrong("status took longer than 10 s while a path hung");
      struck_ = struck_ || fault_->Struck();
      fault_->Repair();
    }
    if (!request.WaitFor(kAnswer)) throw Wrong("an update has not ended within 60 s");
  }

  void NothingWasLost() {
    if (cell_.kind->harm == Harm::kMustLose || cell_.kind->harm == Harm::kMustNotice)
      throw Wrong("three steps succeeded though blocks that they need were lost");
    if (cell_.kind->harm == Harm::kMayLose) {  // the rest may be lost, and reading the state then says so
      try {
        return Compare();
      } catch (const mlpo::Error& error) {
        return CheckError(error.what(), error.code());
      }
    }
    Compare();
    const bool repaired = fault_->Repair();
    for (int i = 0; i < kAfter; ++i) trainer_->Step();
    Compare();
    if (!repaired) return;
    // It comes back by itself, when it is written to.
    const bool back = Eventually(
        [&] {
          trainer_->Step();
          return FaultyPath().at("state") == "healthy";
        },
        60);
    if (!back) throw Wrong("the path is " + FaultyPath().at("state").get<std::string>() + " a minute after its repair");
    Compare();
  }

  void GoOnAfter(const std::string& error) {
    if (cell_.kind->harm == Harm::kNone) throw Wrong("an update failed: " + error);
    CheckError(error, MLPO_ERR_IO);
    if (cell_.kind->harm == Harm::kMustNotice && error.find("checksum") == std::string::npos)
      throw Wrong("the error does not say that a checksum is wrong: " + error);
    if (fault_->Repair()) {
      if (!Eventually([&] { return SameUpdateEnds(); }, 60))
        throw Wrong("the same update fails a minute after the repair: " + last_error_);
      trainer_->StepReference();
      for (int i = 0; i < kAfter; ++i) trainer_->Step();
      return Compare();
    }
    client_->Close();
    trainer_.reset();
    mlpo::Client client = Connect(daemon_.socket(), "second");
    ReferenceTrainer trainer(client, {"large", 100'003, MLPO_BFLOAT16, MLPO_BFLOAT16, 77});
    for (int i = 0; i < 3; ++i) trainer.Step();
    if (const std::string difference = trainer.Difference(); !difference.empty())
      throw Wrong("the job after it: " + difference);
  }

  bool SameUpdateEnds() {
    try {
      mlpo::Request update = trainer_->SubmitUpdate();
      Await(update);
      return true;
    } catch (const mlpo::Error& error) {
      if (error.code() != MLPO_ERR_IO) throw;
      last_error_ = error.what();
      return false;
    }
  }

  static void CheckError(const std::string& text, int code) {
    if (code != MLPO_ERR_IO) throw Wrong("error " + std::to_string(code) + ": " + text);
    if (text.find("'faulty'") == std::string::npos) throw Wrong("the error does not name the path: " + text);
  }

  void Compare() {
    const std::string difference = trainer_->Difference();
    if (!difference.empty()) throw Wrong("WRONG BYTES: " + difference);
  }

  json FaultyPath() const {
    const json status = DaemonStatus(daemon_.socket());
    for (const json& path : status.at("paths")) {
      if (path.at("name") == "faulty") return path;
    }
    throw Wrong("status does not have the path");
  }

  // Until no transfer is under way and none comes.
  void AwaitRest() {
    json before;
    int same = 0;
    const bool rests = Eventually([&] {
      const json status = DaemonStatus(daemon_.socket());
      json now = json::array();
      bool quiet = true;
      for (const json& path : status.at("paths")) {
        quiet = quiet && path.at("in_flight") == 0;
        now.push_back({path.at("read_bytes"), path.at("written_bytes")});
      }
      same = quiet && now == before ? same + 1 : 0;
      before = std::move(now);
      return same >= 5;
    });
    if (!rests) throw Wrong("the paths do not come to rest between two steps");
  }

  void End() {
    if (!daemon_.running()) throw Wrong("the daemon has ended:\n" + daemon_.log());
    const json status = DaemonStatus(daemon_.socket());
    if (status.at("protocol_errors") != 0) throw Wrong("protocol errors");
    if (status.at("lost_wakeups") != 0) throw Wrong("lost wake-ups");
    trainer_.reset();
    client_.reset();
    daemon_.Signal(SIGTERM);
    const int code = daemon_.WaitForEnd(60);
    if (code != 0) throw Wrong("the daemon ended with " + std::to_string(code) + ":\n" + daemon_.log());
  }

  const Cell& cell_;
  StorageFault* const fault_;
  std::mt19937_64 random_;
  DaemonProcess daemon_;
  std::optional<mlpo::Client> client_;
  std::optional<ReferenceTrainer> trainer_;
  double step_seconds_ = 0;
  bool struck_ = false;  // before it was repaired
  int steps_ = 0;
  std::string last_error_;
};

json TryCell(const Cell& cell, uint64_t seed) {
  const std::unique_ptr<StorageFault> fault = cell.kind->make(seed);
  if (!fault->reason().empty()) return {{"outcome", "skipped"}, {"why", fault->reason()}};
  std::unique_ptr<Run> run;
  json answer;
  try {
    run = std::make_unique<Run>(cell, seed, fault.get());
    const std::string not_met = run->Go();
    answer = {{"outcome", not_met.empty() ? "ok" : "void"}, {"steps", run->steps()}};
    if (!not_met.empty()) answer["why"] = not_met;
  } catch (const std::exception& error) {
    answer = {{"outcome", "failed"}, {"why", error.what()}};
  }
  try {
    fault->Repair();  // a daemon whose request hangs does not even die of SIGKILL
  } catch (const std::exception& error) {
    answer["cleaning_up"] = error.what();
  }
  return answer;
}

// Why there is no such cell; "" if there is.
std::string NotOffered(const Cell& cell) {
  if (cell.kind->make == nullptr) return std::string(cell.kind->never);
  if (cell.phase == "checkpoint" || cell.phase == "restore") return "this version has no checkpoints";
  return "";
}

json RunCell(const Cell& cell, uint64_t seed) {
  if (const std::string why = NotOffered(cell); !why.empty()) return {{"outcome", "skipped"}, {"why", why}};
  json answer;
  for (int attempt = 0; attempt < kVoids; ++attempt) {
    std::string folder = "/tmp/mlpo-faults-XXXXXX";
    if (::mkdtemp(folder.data()) == nullptr) return {{"outcome", "failed"}, {"why", "no folder in /tmp"}};
    ::setenv("TMPDIR", folder.c_str(), 1);
    answer = InChild(kCellSeconds, [&] { return TryCell(cell, seed + 1000 * static_cast<uint64_t>(attempt)); });
    ::unsetenv("TMPDIR");
    CleanUpBelow(folder);
    std::error_code ignored;  // a folder that stays is only in the way of nobody
    std::filesystem::remove_all(folder, ignored);
    answer["attempts"] = attempt + 1;
    if (answer.at("outcome") != "void") break;
  }
  return answer;
}

int Usage(int code) {
  std::fprintf(
      code == 0 ? stdout : stderr,
      "Usage: fault_matrix [--short] [--rounds N] [--seed N] [--only FAULT[,PHASE[,ENGINE]]] [--without FAULT]...\n"
      "                    [--report FILE] [--fresh]\n"
      "  --short    of the faults that are made quickly, one phase and engine each\n"
      "  --rounds   each cell so often, with other seeds (default 1)\n"
      "  --report   JSON lines are appended there; a cell that it has for the same sources and seed is not run again\n"
      "  --fresh    run it again, too\n"
      "Exit code: 0 all right, 1 not, 64 wrong usage, 77 nothing could be run.\n");
  return code;
}

}  // namespace

int main(int argc, char** argv) {
  bool quick = false, fresh = false;
  uint64_t rounds = 1, seed = 1;
  std::string report_file;
  std::vector<std::string> only, without;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const char* value = i + 1 < argc ? argv[i + 1] : nullptr;
    if (flag == "--short") {
      quick = true;
    } else if (flag == "--fresh") {
      fresh = true;
    } else if (flag == "--help") {
      return Usage(0);
    } else if (value == nullptr) {
      return Usage(64);
    } else {
      ++i;
      if (flag == "--rounds") {
        rounds = NumberFlag(argv[0], flag, value);
      } else if (flag == "--seed") {
        seed = NumberFlag(argv[0], flag, value);
      } else if (flag == "--report") {
        report_file = value;
      } else if (flag == "--without" && FindFault(value) != nullptr) {
        without.emplace_back(value);
      } else if (flag == "--only") {
        std::string rest = value;
        for (size_t comma; (comma = rest.find(',')) != std::string::npos; rest.erase(0, comma + 1))
          only.push_back(rest.substr(0, comma));
        only.push_back(rest);
        if (only.size() > 3 || FindFault(only[0]) == nullptr) return Usage(64);
      } else {
        return Usage(64);
      }
    }
  }
  ::signal(SIGPIPE, SIG_IGN);

  std::vector<Cell> cells;
  size_t number = seed;
  for (const FaultKind& kind : FaultKinds()) {
    if (std::find(without.begin(), without.end(), kind.name) != without.end()) continue;
    ++number;
    for (size_t p = 0; p < kPhases.size(); ++p) {
      for (size_t e = 0; e < kEngines.size(); ++e) {
        if (quick && (!kind.quick || p != number % 3 || e != number / 3 % 2)) continue;
        if (!only.empty() && only[0] != kind.name) continue;
        if (only.size() > 1 && only[1] != kPhases[p]) continue;
        if (only.size() > 2 && only[2] != kEngines[e]) continue;
        cells.push_back({&kind, kPhases[p], kEngines[e]});
      }
    }
  }
  if (cells.empty()) return Usage(64);
  uint64_t ok = 0, failed = 0, skipped = 0, known = 0;
  try {
    Report report(report_file, "faults", fresh);
    for (uint64_t round = 0; round < rounds; ++round) {
      for (const Cell& cell : cells) {
        json line = {{"fault", std::string(cell.kind->name)},
                     {"phase", cell.phase},
                     {"engine", cell.engine},
                     {"seed", seed + round}};
        if (report.Has(line, [](const json& l) { return l.value("outcome", "") == "ok"; })) {
          ++known;
          continue;
        }
        const auto from = Clock::now();
        line.update(RunCell(cell, seed + round));
        line["seconds"] = std::chrono::duration<double>(Clock::now() - from).count();
        const std::string outcome = line.at("outcome");
        ++(outcome == "ok" ? ok : outcome == "skipped" ? skipped : failed);  // void after all attempts is a failure
        report.Add(std::move(line));
      }
    }
    report.Add(
        {{"totals", true}, {"seed", seed}, {"ok", ok}, {"known", known}, {"failed", failed}, {"skipped", skipped}});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "fault_matrix: %s\n", error.what());
    return 1;
  }
  std::printf("%llu right (%llu of them known before), %llu wrong, %llu skipped\n",
              static_cast<unsigned long long>(ok + known), static_cast<unsigned long long>(known),
              static_cast<unsigned long long>(failed), static_cast<unsigned long long>(skipped));
  if (failed > 0) return 1;
  return ok + known > 0 ? 0 : 77;
}
