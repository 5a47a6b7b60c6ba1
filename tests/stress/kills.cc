// kills: kill -9 of ranks, of the daemon, or of both, at random moments of steps, saves and restores; and the last
// complete checkpoint is restored to the bit, always. tests/stress/kills runs it; see Usage() below.
//
// By the seed none, one or both of the paths are persistent, so that what is on them is copied, cloned or handed over.
// Two ranks of a job train and save for ever (training_client with a directory): each compares what it restored with
// what the reference said when it was saved. After a kill all ranks are started again, as a batch system would. What
// has been reported as complete must be there: the step that is restored is never an earlier one. In the end, with
// another daemon started, nothing is left: no working file, no journal, no unfinished part; and a round of ranks leaves
// no descriptor and no memory.
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/daemon_process.h"
#include "tests/support/daemon_status.h"
#include "tests/support/long_run.h"
#include "tests/support/rank_process.h"

using namespace mlpo::test;
using nlohmann::json;
namespace fs = std::filesystem;

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRanks = 2;
constexpr uint64_t kArenaBytes = 16 << 20;
constexpr int kReadyMs = 60'000;          // for a rank to restore
constexpr int kNoticesMs = 2'000;         // that the daemon has died
constexpr uint64_t kMomentsOfALine = 10;  // of the report
constexpr int kLineSeconds = 600;         // several times what so many take
constexpr int kCleanSeconds = 30;         // for a daemon to remove what dead ones left; it does so beside its work

// What a round of ranks may leave of the daemon's memory. A sanitizer keeps freed memory aside.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr uint64_t kMostGrown = uint64_t{512} << 20;
#else
constexpr uint64_t kMostGrown = uint64_t{16} << 20;
#endif

struct Wrong : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Kills {
 public:
  explicit Kills(uint64_t seed)
      : random_(seed),
        persistent_(Below(3)),
        daemon_({.paths = 2, .memory = "512KiB", .path_settings = DaemonProcess::PersistentPaths(persistent_)}),
        directory_(daemon_.folder() + "/checkpoints") {
    fs::create_directory(directory_);
  }

  void Moment() {
    const bool early = Below(4) == 0;  // in the middle of the restore, or of connecting
    early ? StartRanks() : StartAndRestore();
    std::this_thread::sleep_for(std::chrono::microseconds(Below(early ? 60'000 : 400'000)));
    const uint64_t who = Below(3);
    if (who > 0) {
      daemon_.Signal(SIGKILL);
      (void)daemon_.WaitForEnd();
      ++daemons_;
    }
    if (who != 1) {
      // One dies; the others end as they are told, a moment later.
      ranks_[Below(kRanks)]->Kill();
      std::this_thread::sleep_for(std::chrono::microseconds(Below(20'000)));
      ++clients_;
    } else if (!early) {
      for (auto& rank : ranks_) {
        if (!rank->WaitFor("error ", kNoticesMs)) continue;  // it may wait for another rank's file, not for the daemon
        if (LastOf(rank->output(), "error") != MLPO_ERR_DAEMON_DIED)
          throw Wrong("a rank was told something else than that the daemon has died:\n" + rank->output());
      }
    }
    EndRanks(/*daemon_died=*/who > 0);
    if (who > 0) daemon_.Start();
  }
  std::string log() const { return daemon_.log(); }

  // In the end: what all of it came to.
  json Finish() {
    StartAndRestore();
    AwaitSaved();
    EndRanks(/*daemon_died=*/false);
    const Footprint before = OneMore();  // which restores that, or a later one
    const Footprint after = OneMore();
    if (after.descriptors != before.descriptors)
      throw Wrong(std::to_string(after.descriptors) + " descriptors after " + std::to_string(before.descriptors));
    if (after.resident_bytes > before.resident_bytes + kMostGrown)
      throw Wrong(std::to_string(after.resident_bytes) + " bytes resident after " +
                  std::to_string(before.resident_bytes));
    daemon_.Signal(SIGKILL);
    (void)daemon_.WaitForEnd();
    daemon_.Start();  // which cleans up
    if (!daemon_.ScratchGone(kCleanSeconds)) throw Wrong("a file is left: " + daemon_.ScratchFiles().front());
    std::string loose;
    if (!Eventually([&] { return (loose = LooseFile()).empty(); }, kCleanSeconds))
      throw Wrong("what nobody needs is left: " + loose);
    return {{"daemons", daemons_},
            {"clients", clients_},
            {"restored", restored_},
            {"last_saved", saved_},
            {"persistent", persistent_}};
  }

 private:
  struct Footprint {
    int descriptors = 0;
    uint64_t resident_bytes = 0;
  };

  // All ranks come, restore and are killed: what the daemon has then.
  Footprint OneMore() {
    StartAndRestore();
    EndRanks(/*daemon_died=*/false);
    const bool alone = Eventually([&] {
      const json status = DaemonStatus(daemon_.socket());
      return status.at("sessions").empty() && status.at("arenas_bytes") == 0;
    });
    if (!alone) throw Wrong("sessions or arenas are left");
    // What the dead were saving has ended, too.
    if (!daemon_.ScratchGone(kCleanSeconds)) throw Wrong("a file is left: " + daemon_.ScratchFiles().front());
    return {daemon_.SettledDescriptors(), daemon_.ResidentBytes()};
  }

  uint64_t Below(uint64_t n) { return random_() % n; }

  void StartRanks() {
    ++run_;
    for (const auto& entry : fs::directory_iterator(directory_ + "-expected", ignored_)) {
      if (entry.path().filename().string().rfind("done-", 0) == 0) fs::remove(entry, ignored_);  // of other runs
    }
    for (int rank = 0; rank < kRanks; ++rank) {
      ranks_.push_back(std::make_unique<RankProcess>(daemon_.socket(), RankProcess::Options{.job = "saved",
                                                                                            .rank = rank,
                                                                                            .world_size = kRanks,
                                                                                            .seed = rank,
                                                                                            .arena_bytes = kArenaBytes,
                                                                                            .directory = directory_,
                                                                                            .run = run_}));
    }
    for (auto& rank : ranks_) rank->Go();
  }

  // Until all ranks have the same checkpoint: a save of those that died may still complete another one.
  void StartAndRestore() {
    for (int attempt = 0; attempt < 10; ++attempt) {
      StartRanks();
      size_t ready = 0;
      for (auto& rank : ranks_) ready += AwaitReady(*rank);
      if (ready == ranks_.size()) return;
      EndRanks(/*daemon_died=*/false);
    }
    throw Wrong("the ranks never find the same checkpoint");
  }

  // All is still as it should be: the ranks save another one. The last to have its part on storage is told so.
  void AwaitSaved() {
    const auto deadline = Clock::now() + std::chrono::milliseconds(kReadyMs);
    while (Clock::now() < deadline) {
      for (auto& rank : ranks_) {
        if (rank->WaitFor("saved ", 20)) return;
        if (!rank->Runs()) throw Wrong("a rank has ended:\n" + rank->LastWords());
      }
    }
    throw Wrong("nothing is saved any more");
  }

  // False: it has parted from rank 0.
  bool AwaitReady(RankProcess& rank) {
    const auto deadline = Clock::now() + std::chrono::milliseconds(kReadyMs);
    while (Clock::now() < deadline) {
      if (rank.WaitFor("restored ", 5) || rank.output().find("new\n") != std::string::npos) break;
      if (!rank.Runs()) break;
    }
    const std::string text = rank.Runs() ? rank.output() : rank.LastWords();
    if (text.find("parted\n") != std::string::npos) return false;
    CheckRestored(text);
    if (!rank.Runs()) throw Wrong("a rank has ended:\n" + text);
    if (LastOf(text, "restored") < 0 && text.find("new\n") == std::string::npos)
      throw Wrong("a rank has not restored within a minute:\n" + text);
    return true;
  }

  void CheckRestored(const std::string& text) {
    if (text.find("is another one") != std::string::npos) throw Wrong("WRONG BYTES: " + text);
    if (text.find("broken ") != std::string::npos) throw Wrong(text);
    if (text.find("new\n") != std::string::npos && saved_ > 0)
      throw Wrong("the checkpoint of step " + std::to_string(saved_) + " is gone");
    const int64_t step = LastOf(text, "restored");
    if (step < 0) return;
    if (step < saved_) throw Wrong("restored step " + std::to_string(step) + " after " + std::to_string(saved_));
  }

  void EndRanks(bool daemon_died) {
    int64_t saved = saved_;
    for (auto& rank : ranks_) {
      rank->Kill();
      const std::string& text = rank->LastWords();
      CheckRestored(text);
      // Nothing that others do, or did before they died, is an error to it.
      if (!daemon_died && text.find("error ") != std::string::npos)
        throw Wrong("a rank was refused something:\n" + text);
      restored_ += LastOf(text, "restored") >= 0;
      saved = std::max(saved, LastOf(text, "saved"));
    }
    saved_ = saved;
    ranks_.clear();
  }

  // In parts: what has no manifest, and is none; "" if there is nothing. Files go while we look.
  std::string LooseFile() const {
    std::error_code error;
    for (fs::recursive_directory_iterator it(directory_, error), end; it != end && !error; it.increment(error)) {
      if (it->is_directory(error)) continue;
      const std::string name = it->path().filename();
      if (name.rfind("manifest-", 0) == 0 && !name.ends_with(".new")) continue;
      // data-ATTEMPT-INDEX
      const std::string attempt = name.substr(std::min<size_t>(5, name.size()), 32);
      if (name.rfind("data-", 0) != 0 || !fs::exists(it->path().parent_path() / ("manifest-" + attempt), error))
        return it->path().string();
    }
    return error ? error.message() : "";
  }

  std::mt19937_64 random_;
  const uint64_t persistent_;  // as PersistentPaths
  DaemonProcess daemon_;
  const std::string directory_;
  std::vector<std::unique_ptr<RankProcess>> ranks_;
  std::error_code ignored_;  // of what need not be there
  uint64_t run_ = 0, daemons_ = 0, clients_ = 0, restored_ = 0;
  int64_t saved_ = 0;  // that a rank has been told is complete
};

json Some(uint64_t moments, uint64_t seed) {
  Kills kills(seed);
  try {
    for (uint64_t moment = 0; moment < moments; ++moment) kills.Moment();
    json line = kills.Finish();
    line["outcome"] = "ok";
    return line;
  } catch (const std::exception& error) {
    return {{"outcome", "failed"}, {"why", error.what()}, {"log", EndOf(kills.log())}};
  }
}

int Usage(int code) {
  std::fprintf(code == 0 ? stdout : stderr,
               "Usage: kills [--moments N] [--seed N] [--report FILE] [--fresh]\n"
               "  --moments  kills in all (default 500); those that the report has for the same sources count\n"
               "  --seed     of the first kill; others follow from it (default 1)\n"
               "  --report   JSON lines are appended there, one for every ten kills of one daemon's folder\n"
               "  --fresh    as if nothing was in it\n"
               "Exit code: 0 all right, 1 not, 64 wrong usage.\n");
  return code;
}

}  // namespace

int main(int argc, char** argv) {
  uint64_t moments = 500, seed = 1;
  bool fresh = false;
  std::string report_file;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const char* value = i + 1 < argc ? argv[i + 1] : nullptr;
    if (flag == "--help") return Usage(0);
    if (flag == "--fresh") {
      fresh = true;
      continue;
    }
    if (value == nullptr) return Usage(64);
    ++i;
    if (flag == "--moments") {
      moments = NumberFlag(argv[0], flag, value);
    } else if (flag == "--seed") {
      seed = NumberFlag(argv[0], flag, value);
    } else if (flag == "--report") {
      report_file = value;
    } else {
      return Usage(64);
    }
  }
  ::signal(SIGPIPE, SIG_IGN);
  try {
    Report report(report_file, "kills", fresh);
    auto done = static_cast<uint64_t>(report.Sum({{"outcome", "ok"}}, "moments"));
    if (done >= moments)
      std::printf("the report has %llu kills of these sources\n", static_cast<unsigned long long>(done));
    while (done < moments) {
      const uint64_t count = std::min(kMomentsOfALine, moments - done);
      json line = {{"seed", seed + done}, {"moments", count}};  // what goes on does not do the same again
      const auto from = Clock::now();
      line.update(InChild(kLineSeconds, [&] { return Some(count, seed + done); }));
      line["seconds"] = std::chrono::duration<double>(Clock::now() - from).count();
      const std::string outcome = line.at("outcome");
      report.Add(std::move(line));
      if (outcome != "ok") return 1;
      done += count;
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "kills: %s\n", error.what());
    return 1;
  }
  return 0;
}
