// fault_matrix: every fault of storage, in every phase of a step, of a save and of a restore, with both ways of doing
// I/O, under a daemon that trains: the right outcome, no wrong byte, nothing that hangs. tests/stress/faults runs it;
// see Usage() below.
//
// A cell is one fault, phase and engine. It has a process group and a folder of its own, of which nothing stays,
// whatever it does: the next one begins on a clean machine. Two paths: `faulty`, on the storage that fails, and
// `path0`, which does not. The state is five times the pool, so that each step reads and writes on both. All values are
// compared with the scalar reference in memory (ReferenceTrainer); that a fault was met is asked of the storage.
// Phases:
//   fetch, update, flush       it comes up before a step, at any moment of one, with its first write
//   checkpoint, restore        at any moment while the state is saved to, or filled from, storage that is well; what is
//                              on path0 is copied, or cloned or handed over, by the seed
//   checkpoint_to              the part of a checkpoint is written to the storage that fails; all paths are well
//   restore_from               likewise read from there
// What is right is said by the fault's Harm (storage_fault.h). Where it does none, every step, save and restore ends,
// with all bits right. Else the first update that needs what is lost fails, with an error that names the path; after a
// repair the same update ends it, all bits right; where there is no repair the session ends, and a new job trains
// without the path. While it lasts `status` says what the path is, and after a repair the path is used again without
// being told. What hangs is let go when the daemon has noticed, or (for good) when what waits has failed. A save may
// fail, and leaves training alone; what it reported as complete is restored to the bit, as far as the storage that it
// is on can be read, and what it did not is not restored at all. Always: the daemon runs, answers `status` and ends in
// order.

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/checkpoints.h"
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
constexpr auto kHang = std::chrono::seconds(3);     // so long nothing comes: it waits for what hangs
constexpr int kNoticed = 10;                        // seconds for the daemon to say so; it takes five from the start
constexpr int kWell = 90;                           // seconds for a path to be used again: probes are a minute apart
constexpr int kWarmUp = 3, kArmed = 3, kAfter = 2;  // steps
constexpr int kVoids = 5;                           // seeds that are tried where a fault was not met

constexpr std::array kPhases = {"fetch", "update", "flush", "checkpoint", "checkpoint_to", "restore", "restore_from"};
constexpr std::array kEngines = {"io_uring", "threads"};

struct Cell {
  const FaultKind* kind;
  std::string phase;
  std::string engine;
};

struct Wrong : std::runtime_error {
  using std::runtime_error::runtime_error;
};

constexpr const char* kSpeeds = "read_limit = \"200MB/s\"\nwrite_limit = \"200MB/s\"\n";  // equal shares

// `faulty`: directory of one of them; "": both are well. `persistent`: what is on the well one.
DaemonProcess::Options TwoPaths(const std::string& faulty, const std::string& engine, bool persistent) {
  DaemonProcess::Options options;
  options.paths = faulty.empty() ? 2 : 1;
  options.memory = std::to_string(8 * 49'152);
  options.engine = engine;
  // A save is given up when its TAKE has waited for no_path_timeout: longer than what hangs is left to.
  options.config = "[scheduler]\nno_path_timeout = 8\nhang_timeout = 10\n";
  if (!faulty.empty()) {
    options.config +=
        "[[path]]\nname = \"faulty\"\ndirectory = \"" + faulty + "\"\nengine = \"" + engine + "\"\n" + kSpeeds;
  }
  options.path_settings = {kSpeeds};
  if (persistent) options.path_settings[0] += "persistent = true\n";
  return options;
}

class Run {
 public:
  // `attempt`: the later, the sooner the fault comes, so that it is met.
  Run(const Cell& cell, uint64_t seed, int attempt, StorageFault* fault)
      : cell_(cell),
        fault_(fault),
        soon_(1.0 / (1 << 2 * attempt)),
        path_fails_(cell.phase != "checkpoint_to" && cell.phase != "restore_from"),
        random_(seed),
        subgroup_{"large", 160'013 + random_() % 4096, MLPO_BFLOAT16, MLPO_BFLOAT16, seed},
        daemon_(TwoPaths(path_fails_ ? fault->directory() : "", cell.engine, path_fails_ && random_() % 2 == 0)),
        checkpoints_((path_fails_ ? daemon_.folder() : fault->directory()) + "/checkpoints") {
    std::filesystem::create_directory(checkpoints_);
    Connect();
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
    bool met = false;
    if (cell_.phase == "checkpoint" || cell_.phase == "checkpoint_to") {
      met = SaveAndTrain();
    } else if (cell_.phase == "restore" || cell_.phase == "restore_from") {
      met = RestoreAndTrain();
    } else {
      met = Train(/*arms=*/true);
    }
    End();
    return met ? "" : "the fault was not met";
  }
  int steps() const { return steps_; }
  std::string log() const { return daemon_.log(); }

 private:
  void Connect() {
    trainer_.reset();
    client_.reset();
    client_.emplace(mlpo::test::Connect(daemon_.socket(), "first"));
    trainer_.emplace(*client_, subgroup_);
  }

  void WaitForAnyMoment() {
    std::this_thread::sleep_for(
        std::chrono::duration<double>(soon_ * std::uniform_real_distribution<double>(0, step_seconds_)(random_)));
  }

  // Steps under the fault, what comes of it, and steps after it. Whether it was met.
  bool Train(bool arms) {
    std::optional<std::string> failure;
    for (int i = 0; i < kArmed && !failure; ++i) failure = Step(arms && i == 0);
    const bool struck = struck_ || fault_->Struck();
    // A step may not have had to wait for it; reading the state would.
    if (fault_->Hangs() && !cell_.kind->for_good) Repair();
    if (failure) {
      GoOnAfter(*failure);
    } else if (struck) {
      NothingWasLost();
    }
    return struck || failure;
  }

  // Before a save or restore begins; half of the time, but where what begins would hang, too: on the storage that
  // hangs.
  bool ArmsAtOnce() {
    if ((fault_->Hangs() && !path_fails_) || random_() % 2 != 0) return false;
    if (fault_->Hangs()) AwaitRest();  // or what is under way hangs for as long as the beginning takes
    fault_->Arm();
    return true;
  }

  // ---- Saving ----

  bool SaveAndTrain() {
    const ReferenceTrainer::Expected taken = trainer_->expected();
    const bool at_once = ArmsAtOnce();
    std::optional<Save> save;
    std::vector<mlpo::Request> requests;
    std::optional<mlpo::Error> refused = Try([&] {
      save.emplace(*client_, checkpoints_, "one", static_cast<uint64_t>(taken.step));
      requests.push_back(save->Take());
      requests.push_back(save->Saved());
    });
    if (!at_once) {
      WaitForAnyMoment();
      fault_->Arm();
    }
    std::optional<std::string> failure = Step(/*arms=*/false);  // beside it
    bool complete = false;
    for (mlpo::Request& request : requests) {
      if (!refused) refused = Try([&] { complete = Await(request).value == 1; });
    }
    if (refused && save) (void)Try([&] { save->Abandon(); });
    CheckSave(refused, complete, at_once);
    bool struck = struck_ || fault_->Struck();
    if (!path_fails_ || failure) {
      const bool repaired = Repair();
      if (failure && !path_fails_) throw Wrong("an update failed, whose paths are well: " + *failure);
      if (failure) {
        CheckLost(*failure);
        struck = true;
      } else {
        CompareAndStep();
      }
      sound_ = repaired || path_fails_;
    } else {
      struck = Train(/*arms=*/false) || struck;
    }
    RestoreSaved(taken, complete);
    return struck || refused.has_value();
  }

  void CheckSave(const std::optional<mlpo::Error>& refused, bool complete, bool at_once) {
    const FaultKind& kind = *cell_.kind;
    const Harm harm = path_fails_ ? kind.harm : kind.saving;
    if (!refused) {
      if (!complete) throw Wrong("a save of one rank ended well and is not complete");
      if (harm == Harm::kMustLose && at_once && !path_fails_) throw Wrong("saved, on storage that takes nothing");
      return;
    }
    const std::string text = refused->what();
    if (harm == Harm::kNone) throw Wrong("the save failed: " + text);
    const bool names = text.find("'faulty'") != std::string::npos || text.find("checkpoint") != std::string::npos;
    if (!names) throw Wrong("the save's error does not say what failed: " + text);
    save_noticed_ = path_fails_ && text.find("is not what was written there") != std::string::npos;
  }

  // A new session of the same job has what was saved, or is told that there is nothing.
  void RestoreSaved(const ReferenceTrainer::Expected& taken, bool complete) {
    Connect();
    const std::optional<mlpo::Error> refused = Try([&] { Restore(); });
    if (refused) {
      if (!complete || !sound_) return EndWithoutState();
      // What was written wrong is not taken for what was saved.
      if (!path_fails_ && cell_.kind->saving == Harm::kMustNotice && IsOfHash(*refused)) return EndWithoutState();
      throw Wrong(std::string("what was saved cannot be restored: ") + refused->what());
    }
    // Where the storage is gone for good it may have failed when everything was there.
    if (!complete && sound_) throw Wrong("a save that failed was restored");
    trainer_->GoOnFrom(taken);
    const bool gone = path_fails_ && cell_.kind->harm != Harm::kNone && !repaired_;
    try {
      CompareAndStep();
    } catch (const mlpo::Error& error) {
      if (!gone) throw;
      CheckError(error.what(), error.code());  // a path that takes what is written, and has it not
    }
  }

  // ---- Restoring ----

  bool RestoreAndTrain() {
    const ReferenceTrainer::Expected taken = trainer_->expected();
    Save save(*client_, checkpoints_, "one", static_cast<uint64_t>(taken.step));
    mlpo::Request take = save.Take(), saved = save.Saved();
    (void)Await(take);
    if (Await(saved).value != 1) throw Wrong("a save of one rank is not complete");
    for (int i = 0; i < kAfter; ++i) trainer_->Step();  // what the restore undoes
    Connect();
    const bool at_once = ArmsAtOnce();
    const std::optional<mlpo::Error> refused = Try([&] {
      Restore([&] {
        if (at_once) return;
        WaitForAnyMoment();
        fault_->Arm();
      });
    });
    if (!refused) {
      trainer_->GoOnFrom(taken);
      if (path_fails_) return Train(/*arms=*/false);
      const bool struck = struck_ || fault_->Struck();
      Repair();
      CompareAndStep();
      if (struck && at_once && cell_.kind->harm == Harm::kMustLose && cell_.kind->op == "read")
        throw Wrong("restored from storage that cannot be read");
      return struck;
    }
    const std::string text = refused->what();
    if (path_fails_ || cell_.kind->harm == Harm::kNone) throw Wrong("the restore failed: " + text);
    if (text.find("checkpoint") == std::string::npos)  // its directory has the word in its name
      throw Wrong("the restore's error does not name the checkpoint: " + text);
    if (!Repair()) {
      EndWithoutState();
      return true;
    }
    Restore();
    trainer_->GoOnFrom(taken);
    CompareAndStep();
    return true;
  }

  // `meanwhile` is called when it has begun.
  void Restore(const std::function<void()>& meanwhile = [] {}) {
    Restoring restoring(*client_, checkpoints_, "one");
    mlpo::Request request = restoring.Submit(trainer_->subgroup());
    meanwhile();
    (void)Await(request);
    restoring.End();
  }

  static std::optional<mlpo::Error> Try(const std::function<void()>& act) {
    try {
      act();
      return std::nullopt;
    } catch (const mlpo::Error& error) {
      return error;
    }
  }
  static bool IsOfHash(const mlpo::Error& error) { return std::strstr(error.what(), "damaged") != nullptr; }

  // ---- Training ----

  // One step; nothing, or the error with which its update failed. The fault comes up in the phase that is asked for.
  std::optional<std::string> Step(bool arms) {
    if (arms && cell_.phase == "fetch") {
      AwaitRest();
      fault_->Arm();
    }
    trainer_->WriteGradient();
    trainer_->subgroup().SubmitGrad().Wait();
    const bool flush = arms && cell_.phase == "flush";
    const uint64_t written = flush ? FaultyPath().at("written_bytes").get<uint64_t>() : 0;
    mlpo::Request update = trainer_->SubmitUpdate();
    if (arms && cell_.phase == "update") {
      WaitForAnyMoment();
      fault_->Arm();
    } else if (flush) {
      const auto give_up = Clock::now() + std::chrono::seconds(1);
      while (FaultyPath().at("written_bytes") == written && Clock::now() < give_up) std::this_thread::yield();
      fault_->Arm();
    }
    try {
      (void)Await(update);
    } catch (const mlpo::Error& error) {
      if (error.code() != MLPO_ERR_IO) throw;
      return error.what();
    }
    trainer_->StepReference();
    ++steps_;
    return std::nullopt;
  }

  // What hangs is let go after a while, in which the daemon must answer others, and say which path it is.
  mlpo_result Await(mlpo::Request& request) {
    if (fault_->Hangs() && !cell_.kind->for_good) {
      if (const std::optional<mlpo_result> result = request.WaitFor(kHang)) return *result;
      const auto asked = Clock::now();
      (void)DaemonStatus(daemon_.socket());
      if (Clock::now() - asked > std::chrono::seconds(10))
        throw Wrong("status took longer than 10 s while a path hung");
      struck_ = struck_ || fault_->Struck();
      const bool transfers = path_fails_ && cell_.kind->op != "all" && fault_->HoldsTransfers();
      const bool noticed = !transfers || Eventually([&] { return FaultyPath().at("state") == "suspect"; }, kNoticed);
      if (!noticed) throw Wrong("the path hangs, and is " + FaultyPath().at("state").get<std::string>());
      Repair();
    }
    const std::optional<mlpo_result> result = request.WaitFor(kAnswer);
    if (!result) throw Wrong("a request has not ended within 60 s");
    return *result;
  }

  void NothingWasLost() {
    const FaultKind& kind = *cell_.kind;
    // What takes no writes from the restore on has nothing that could be lost. Where a save has read what is wrong,
    // nothing more is written there, and training may have had all of that in memory still: its bits say so.
    const bool may = kind.harm == Harm::kMayLose || save_noticed_ ||
                     (kind.harm == Harm::kMustLose && kind.op == "all" && cell_.phase == "restore");
    if (may) {  // the rest may be lost, and reading the state then says so
      try {
        return Compare();
      } catch (const mlpo::Error& error) {
        return CheckError(error.what(), error.code());
      }
    }
    if (kind.harm != Harm::kNone) throw Wrong("three steps succeeded though blocks that they need were lost");
    Compare();
    CheckState();
    const bool repaired = Repair();
    for (int i = 0; i < kAfter; ++i) trainer_->Step();
    Compare();
    if (repaired) ComesBack();
  }

  // While it lasts.
  void CheckState() const {
    if (cell_.kind->states.empty() || !path_fails_) return;
    const std::string state = FaultyPath().at("state");
    std::istringstream right{std::string(cell_.kind->states)};
    for (std::string word; right >> word;) {
      if (word == state) return;
    }
    throw Wrong("the path is " + state + ", and should be: " + std::string(cell_.kind->states));
  }

  // By itself, and is written to again.
  void ComesBack() {
    uint64_t written = FaultyPath().at("written_bytes");
    const bool back = Eventually(
        [&] {
          trainer_->Step();
          const json path = FaultyPath();
          if (path.at("state") == "healthy" && path.at("written_bytes") > written) return true;
          written = path.at("written_bytes");
          return false;
        },
        kWell);
    if (!back)
      throw Wrong("the path is " + FaultyPath().at("state").get<std::string>() + ", or not used, " +
                  std::to_string(kWell) + " s after its repair");
    Compare();
  }

  void CheckLost(const std::string& error) const {
    if (cell_.kind->harm == Harm::kNone) throw Wrong("an update failed: " + error);
    CheckError(error, MLPO_ERR_IO);
    if (cell_.kind->harm == Harm::kMustNotice && error.find("checksum") == std::string::npos)
      throw Wrong("the error does not say that a checksum is wrong: " + error);
  }

  void GoOnAfter(const std::string& error) {
    CheckLost(error);
    CheckState();
    if (cell_.kind->for_good && random_() % 2 == 0) {  // the rank comes again while its I/O still hangs
      EndWithoutState();
      (void)Repair();
      return;
    }
    if (Repair()) {
      if (!Eventually([&] { return SameUpdateEnds(); }, 60))
        throw Wrong("the same update fails a minute after the repair: " + last_error_);
      trainer_->StepReference();
      for (int i = 0; i < kAfter; ++i) trainer_->Step();
      Compare();
      return ComesBack();
    }
    EndWithoutState();
  }

  // What the session had is lost, or it had nothing; its job comes again and trains.
  void EndWithoutState() {
    client_->Close();
    trainer_.reset();
    mlpo::Client client = mlpo::test::Connect(daemon_.socket(), "first");
    ReferenceTrainer trainer(client, {"large", 100'003, MLPO_BFLOAT16, MLPO_BFLOAT16, 77});
    for (int i = 0; i < 3; ++i) trainer.Step();
    if (const std::string difference = trainer.Difference(); !difference.empty())
      throw Wrong("the job after it: " + difference);
  }

  bool SameUpdateEnds() {
    try {
      mlpo::Request update = trainer_->SubmitUpdate();
      (void)Await(update);
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

  bool Repair() { return repaired_ = fault_->Repair(); }

  void Compare() {
    const std::string difference = trainer_->Difference();
    if (!difference.empty()) throw Wrong("WRONG BYTES: " + difference);
  }
  void CompareAndStep() {
    Compare();
    for (int i = 0; i < kAfter; ++i) trainer_->Step();
    Compare();
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
  const double soon_;
  const bool path_fails_;  // else it is where checkpoints are
  std::mt19937_64 random_;
  const TrainerOptions subgroup_;
  DaemonProcess daemon_;
  const std::string checkpoints_;
  std::optional<mlpo::Client> client_;
  std::optional<ReferenceTrainer> trainer_;
  double step_seconds_ = 0;
  bool struck_ = false;        // before it was repaired
  bool save_noticed_ = false;  // by a checksum, of what a path has
  bool sound_ = true;          // what was saved can be read
  bool repaired_ = false;
  int steps_ = 0;
  std::string last_error_;
};

json TryCell(const Cell& cell, uint64_t seed, int attempt) {
  const std::unique_ptr<StorageFault> fault = cell.kind->make(seed);
  if (!fault->reason().empty()) return {{"outcome", "skipped"}, {"why", fault->reason()}};
  std::unique_ptr<Run> run;
  json answer;
  try {
    run = std::make_unique<Run>(cell, seed, attempt, fault.get());
    const std::string not_met = run->Go();
    answer = {{"outcome", not_met.empty() ? "ok" : "void"}, {"steps", run->steps()}};
    if (!not_met.empty()) answer["why"] = not_met;
  } catch (const std::exception& error) {
    answer = {{"outcome", "failed"}, {"why", error.what()}};
    if (run) answer["log"] = EndOf(run->log());
  }
  try {
    fault->Repair();  // a daemon whose request hangs does not even die of SIGKILL
  } catch (const std::exception& error) {
    answer["cleaning_up"] = error.what();
  }
  return answer;
}

// Why there is no such cell; "" if there is.
std::string WhyNot(const FaultKind& kind, std::string_view phase) {
  if (kind.make == nullptr) return std::string(kind.never);
  if (kind.op == "fsync" && phase != "checkpoint_to") return "nothing is synced there";
  if (kind.op == "read" && phase == "checkpoint_to") return "nothing is read there";
  if (kind.op == "write" && phase == "restore_from") return "nothing is written there";
  return "";
}

// So many of them, with as many kinds of faults as there are.
std::vector<Cell> Draw(std::vector<Cell> cells, uint64_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::shuffle(cells.begin(), cells.end(), random);
  std::map<const FaultKind*, int> drawn;
  std::vector<std::pair<int, Cell>> order;  // the how manieth of its kind
  for (const Cell& cell : cells) order.emplace_back(drawn[cell.kind]++, cell);
  std::stable_sort(order.begin(), order.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<Cell> few;
  for (size_t i = 0; i < std::min<size_t>(count, order.size()); ++i) few.push_back(order[i].second);
  return few;
}

json RunCell(const Cell& cell, uint64_t seed) {
  if (const std::string why = WhyNot(*cell.kind, cell.phase); !why.empty())
    return {{"outcome", "skipped"}, {"why", why}};
  json answer;
  for (int attempt = 0; attempt < kVoids; ++attempt) {
    const uint64_t other = seed + 1000 * static_cast<uint64_t>(attempt);
    answer = InChild(kCellSeconds, [&] { return TryCell(cell, other, attempt); });
    answer["attempts"] = attempt + 1;
    if (answer.at("outcome") != "void") break;
  }
  return answer;
}

int Usage(int code) {
  std::fprintf(
      code == 0 ? stdout : stderr,
      "Usage: fault_matrix [--sample N] [--rounds N] [--seed N] [--only FAULT[,PHASE[,ENGINE]]] [--without FAULT]...\n"
      "                    [--report FILE] [--fresh]\n"
      "  --sample   N cells only, of the faults that are over in seconds, drawn by the seed; no fault twice before "
      "all\n"
      "             have been\n"
      "  --only     cells of one fault, of one phase (fetch, update, flush, checkpoint, checkpoint_to, restore,\n"
      "             restore_from) and of one engine (io_uring, threads) of it; tests/README.md lists the faults\n"
      "  --without  all faults but this one\n"
      "  --seed     of the first round; the next has the next number (default 1)\n"
      "  --rounds   each cell so often, with other seeds (default 1)\n"
      "  --report   JSON lines are appended there; a cell that it has for the same sources and seed is not run again\n"
      "  --fresh    run it again, too\n"
      "Exit code: 0 all right, 1 not, 64 wrong usage, 77 nothing could be run.\n");
  return code;
}

}  // namespace

int main(int argc, char** argv) {
  bool fresh = false;
  uint64_t sample = 0, rounds = 1, seed = 1;  // sample 0: all cells
  std::string report_file;
  std::vector<std::string> only, without;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const char* value = i + 1 < argc ? argv[i + 1] : nullptr;
    if (flag == "--fresh") {
      fresh = true;
    } else if (flag == "--help") {
      return Usage(0);
    } else if (value == nullptr) {
      return Usage(64);
    } else {
      ++i;
      if (flag == "--sample") {
        sample = NumberFlag(argv[0], flag, value);
        if (sample == 0) return Usage(64);
      } else if (flag == "--rounds") {
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
  for (const FaultKind& kind : FaultKinds()) {
    if (std::find(without.begin(), without.end(), kind.name) != without.end()) continue;
    if (sample > 0 && !kind.quick) continue;
    for (const char* phase : kPhases) {
      for (const char* engine : kEngines) {
        if (!only.empty() && only[0] != kind.name) continue;
        if (only.size() > 1 && only[1] != phase) continue;
        if (only.size() > 2 && only[2] != engine) continue;
        if (sample > 0 && !WhyNot(kind, phase).empty()) continue;
        cells.push_back({&kind, phase, engine});
      }
    }
  }
  if (sample > 0) cells = Draw(std::move(cells), sample, seed);
  if (cells.empty()) return Usage(64);
  uint64_t ok = 0, failed = 0, skipped = 0, known = 0;
  try {
    Report report(report_file, "faults", fresh);
    const auto began = Clock::now();
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
    report.Add({{"totals", true},
                {"seed", seed},
                {"ok", ok},
                {"known", known},
                {"failed", failed},
                {"skipped", skipped},
                {"seconds", std::chrono::duration<double>(Clock::now() - began).count()}});
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
