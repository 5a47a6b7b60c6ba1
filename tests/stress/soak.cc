// soak: one daemon that works for long while everything around it comes and goes: jobs, ranks that die or stop, hostile
// clients, objects, paths that fail and return. tests/stress/soak runs it; see Usage() below.
//
// It goes in segments. In a segment scenes are drawn from the seed and overlap; each job that ends compares every byte
// with the scalar reference (training_client), each object is compared with what was written. One job saves and
// restores checkpoints for ever, however often it is killed, from paths of which by the seed none, some or all are
// persistent; and a path is disabled, evacuated and enabled. At a segment's end everything ends, and the daemon must be
// as it was after the first one: no session, no file, no arena, the same descriptors and threads; and its resident
// memory must not grow with time. Faults are those that must harm nobody (Harm::kNone), and reads that fail: while
// there are such, a job may end with an error that names the path, and not otherwise.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/daemon_process.h"
#include "tests/support/daemon_status.h"
#include "tests/support/fault_fs.h"
#include "tests/support/long_run.h"
#include "tests/support/rank_process.h"
#include "tests/support/raw_session.h"
#include "tests/support/reference_trainer.h"

using namespace mlpo::test;
using nlohmann::json;

namespace {

using Clock = std::chrono::steady_clock;

constexpr unsigned kStuckSeconds = 300;     // a segment that is not over so long after its time
constexpr int kRankSeconds = 120;           // for a job to end after its segment
constexpr uint64_t kArenaBytes = 16 << 20;  // of each rank
constexpr size_t kMostJobs = 4;
constexpr size_t kWarmUp = 3;  // segments before memory is judged
constexpr double kMostBytesPerMinute = 65'536;
constexpr double kMostBytesInAll = 16 << 20;
constexpr const char* kFaults[] = {"write error 5 times=20",
                                   "write error 122 times=20",
                                   "write short 8192",
                                   "read short 8192",
                                   "write delay 20",
                                   "read delay 20",
                                   "write hang",
                                   "read hang"};
constexpr const char* kReadFault = "read error 5 times=3";
constexpr int kSavedSeconds = 30;  // for what a dead rank was saving
constexpr int kWellSeconds = 90;   // for a path to be used again: longer than the longest pause between two probes

struct Wrong : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The processes of one job; each compares with the reference at its end, but for those that go on until they are
// killed.
struct Job {
  std::vector<std::unique_ptr<RankProcess>> ranks;
  bool endless = false;
  bool saves = false;     // and restores; one rank
  bool may_fail = false;  // reads failed in its life
};

bool FailedForThePath(const std::string& text) {
  const size_t at = text.find("error " + std::to_string(MLPO_ERR_IO) + " ");
  return at != std::string::npos && text.find("'faulty'", at) != std::string::npos;
}

// For the alarm's handler.
pid_t daemon_pid = -1;

void OnStuck(int) {
  static constexpr char kText[] = "soak: nothing has ended for five minutes after it should have\n";
  (void)!::write(STDERR_FILENO, kText, sizeof kText - 1);
  if (daemon_pid > 0) ::kill(daemon_pid, SIGABRT);
  ::_exit(1);
}

DaemonProcess::Options Options(const FaultFs& fs, uint64_t persistent) {
  DaemonProcess::Options options;
  options.paths = 2;
  options.memory = "512KiB";
  options.path_settings = DaemonProcess::PersistentPaths(persistent);
  options.config = "[scheduler]\nno_path_timeout = 30\n";
  if (fs.ok()) options.config += "[[path]]\nname = \"faulty\"\ndirectory = \"" + fs.point() + "\"\n";
  return options;
}

class Soak {
 public:
  explicit Soak(uint64_t seed) : random_(seed), persistent_(Below(3)), daemon_(Options(fs_, persistent_)) {
    daemon_pid = daemon_.pid();
    if (!fs_.ok()) std::printf("without failing paths: %s\n", fs_.reason().c_str());
    std::filesystem::create_directory(Checkpoints());
  }

  ~Soak() {
    try {
      LetFaultGo(/*now=*/true);  // a daemon whose request hangs does not even die of SIGKILL
    } catch (const std::exception& error) {
      std::fprintf(stderr, "soak: %s\n", error.what());
    }
  }
  Soak(const Soak&) = delete;
  Soak& operator=(const Soak&) = delete;

  std::string log() const { return daemon_.log(); }
  // One segment; what happened in it. Throws what is wrong.
  json Segment(std::chrono::seconds duration) {
    ::alarm(static_cast<unsigned>(duration.count()) + kStuckSeconds);
    counts_ = {};
    const auto ends = Clock::now() + duration;
    while (Clock::now() < ends) {
      Scene();
      Reap(/*all=*/false);
      LetFaultGo(/*now=*/false);
      std::this_thread::sleep_for(std::chrono::milliseconds(Below(100)));
      if (!daemon_.running()) throw Wrong("the daemon has ended");
    }
    LetFaultGo(/*now=*/true);
    if (left_) UsePathAgain();
    Reap(/*all=*/true);
    json line = Quiet();
    line.update({{"seed_word", random_()},  // tells two runs with one seed apart where they parted
                 {"jobs", counts_.jobs},
                 {"kills", counts_.kills},
                 {"pauses", counts_.pauses},
                 {"faults", counts_.faults},
                 {"hostile", counts_.hostile},
                 {"objects", counts_.objects},
                 {"read_faults", counts_.read_faults},
                 {"failed_jobs", counts_.failed_jobs},
                 {"path_commands", counts_.path_commands},
                 {"restored", counts_.restored},
                 {"persistent", persistent_},
                 {"last_saved", saved_}});
    return line;
  }

 private:
  struct Counts {
    uint64_t jobs = 0, kills = 0, pauses = 0, faults = 0, hostile = 0, objects = 0;
    uint64_t read_faults = 0, failed_jobs = 0, path_commands = 0, restored = 0;
  };
  uint64_t Below(uint64_t n) { return random_() % n; }

  void Scene() {
    switch (Below(10)) {
      case 0:
      case 1:
        if (jobs_.size() < kMostJobs) StartJob();
        break;
      case 2:
        KillRank();
        break;
      case 3:
        PauseRank();
        break;
      case 4:
        if (fs_.ok() && fault_ends_ == Clock::time_point()) Fail();
        break;
      case 5:
        Hostile();
        break;
      case 6:
        if (!hangs_) Objects();  // it waits, and what hangs is let go by this thread
        break;
      case 7:
        StartSaving();
        break;
      case 8:
        if (!hangs_) LeaveOrUsePath();
        break;
      default:
        Ask();
        break;
    }
  }

  void Fail() {
    const size_t which = Below(std::size(kFaults) + 1);
    const bool reads = which == std::size(kFaults);
    const std::string fault = reads ? kReadFault : kFaults[which];
    // Of the blocks only: a session's file is made on every path, or the session is refused.
    fs_.Rule(fault + " name=/state from=4096");
    hangs_ = fault.find("hang") != std::string::npos;
    reads_fail_ = reads;
    fault_ends_ = Clock::now() + std::chrono::milliseconds(100 + Below(3'000));
    ++counts_.faults;
    counts_.read_faults += reads;
    if (!reads) return;
    for (Job& job : jobs_) job.may_fail = true;
  }

  std::string Checkpoints() const { return daemon_.folder() + "/checkpoints"; }

  // One at a time: after a kill it goes on from what was saved.
  void StartSaving() {
    if (std::any_of(jobs_.begin(), jobs_.end(), [](const Job& job) { return job.saves; })) return;
    Job job;
    job.endless = job.saves = true;
    job.may_fail = reads_fail_;
    job.ranks.push_back(std::make_unique<RankProcess>(
        daemon_.socket(),
        RankProcess::Options{
            .job = "saving", .seed = 7, .arena_bytes = kArenaBytes, .directory = Checkpoints(), .run = ++names_}));
    job.ranks.back()->Go();
    jobs_.push_back(std::move(job));
    ++counts_.jobs;
  }

  // All that a rank that saves has said; it is dead.
  void CheckSaving(const std::string& text) {
    if (text.find("is another one") != std::string::npos) throw Wrong("WRONG BYTES: " + text);
    if (text.find("broken ") != std::string::npos) throw Wrong(text);
    const int64_t restored = LastOf(text, "restored");
    if (restored >= 0 && restored < saved_)
      throw Wrong("restored step " + std::to_string(restored) + " after " + std::to_string(saved_));
    if (saved_ > 0 && text.find("\nnew\n") != std::string::npos) throw Wrong("what was saved is gone");
    counts_.restored += restored >= 0;
    saved_ = std::max(saved_, LastOf(text, "saved"));
  }

  // False: it cannot be carried out now (mlpo_last_error()).
  bool CommandPath(const std::string& command) {
    char* text = nullptr;
    const int code = mlpo_control(daemon_.socket().c_str(), ("paths_" + command).c_str(), R"({"path":"path1"})",
                                  30'000'000'000, &text);
    if (code == 0) mlpo_free(text);
    return code == 0;
  }
  void LeaveOrUsePath() {
    if (left_) return UsePathAgain();
    left_ = CommandPath(Below(2) == 0 ? "disable" : "evacuate");
    counts_.path_commands += left_;
  }
  void UsePathAgain() {
    if (!CommandPath("enable")) throw Wrong(std::string("a path cannot be enabled: ") + mlpo_last_error());
    left_ = false;
    ++counts_.path_commands;
  }

  void StartJob() {
    Job job;
    job.may_fail = reads_fail_;
    job.endless = Below(3) == 0;
    const int ranks = 1 + static_cast<int>(Below(4));
    const int steps = job.endless ? 0 : 3 + static_cast<int>(Below(38));
    const std::string name = "job" + std::to_string(++names_);
    for (int rank = 0; rank < ranks; ++rank) {
      job.ranks.push_back(std::make_unique<RankProcess>(daemon_.socket(),
                                                        RankProcess::Options{.job = name,
                                                                             .rank = rank,
                                                                             .world_size = ranks,
                                                                             .steps = steps,
                                                                             .seed = static_cast<int>(Below(1'000'000)),
                                                                             .arena_bytes = kArenaBytes}));
      job.ranks.back()->Go();
    }
    jobs_.push_back(std::move(job));
    ++counts_.jobs;
  }

  void KillRank() {
    for (Job& job : jobs_) {
      if (!job.endless || Below(2) == 0) continue;
      std::unique_ptr<RankProcess>& rank = job.ranks[Below(job.ranks.size())];
      if (!Lives(job, *rank)) continue;
      rank->Kill();
      ++counts_.kills;
      if (job.saves) CheckSaving(rank->LastWords());
      job.ranks.erase(std::find(job.ranks.begin(), job.ranks.end(), rank));
      break;
    }
    std::erase_if(jobs_, [](const Job& job) { return job.ranks.empty(); });
  }

  // For a moment; every rank.
  void PauseRank() {
    if (jobs_.empty()) return;
    const Job& job = jobs_[Below(jobs_.size())];
    for (const auto& rank : job.ranks) rank->Signal(SIGSTOP);
    std::this_thread::sleep_for(std::chrono::milliseconds(Below(300)));
    for (const auto& rank : job.ranks) rank->Signal(SIGCONT);
    ++counts_.pauses;
  }

  void LetFaultGo(bool now) {
    if (fault_ends_ == Clock::time_point() || (!now && Clock::now() < fault_ends_)) return;
    fs_.Clear();
    fault_ends_ = Clock::time_point();
    hangs_ = reads_fail_ = false;
  }

  // One that breaks the protocol, or goes in the middle of something.
  void Hostile() {
    ++counts_.hostile;
    try {
      RawSession session(daemon_.socket());
      if (Below(4) == 0) return;
      mlpo_hello hello = MakeHello("hostile" + std::to_string(Below(3)));
      hello.arena_bytes = 1 << 20;
      session.Handshake(hello);
      if (Below(2) == 0) session.SendRegistration("k", 5'000, MLPO_FLOAT32, 1);
      if (Below(2) == 0) session.ShowTail(static_cast<uint32_t>(random_()));
      if (Below(2) == 0) session.SendBare(static_cast<uint16_t>(Below(20)), 1);
    } catch (const std::exception&) {
      // The daemon has ended it in the middle: right.
    }
  }

  void Objects() {
    ++counts_.objects;
    mlpo::Client client = Connect(daemon_.socket(), "objects", 0, 1, kArenaBytes);
    std::vector<uint64_t> words(1 + Below(100'000)), back;
    for (uint64_t& word : words) word = random_();
    back.resize(words.size());
    const uint64_t bytes = words.size() * sizeof(uint64_t);
    const auto patience = std::chrono::seconds(60);
    try {
      client.FlushObject("object", words.data(), bytes, patience);
      if (client.FetchObject("object", 0, bytes, back.data(), patience) != bytes || back != words)
        throw Wrong("WRONG BYTES: an object of " + std::to_string(bytes) + " bytes is another one");
    } catch (const mlpo::Error& error) {
      const bool named = error.code() == MLPO_ERR_IO && std::strstr(error.what(), "'faulty'") != nullptr;
      if (!reads_fail_ || !named) throw;
    }
    client.Close();
  }

  void Ask() {
    for (const char* method : {"status", "sessions", "paths", "metrics"}) {
      char* text = nullptr;
      mlpo::Check(mlpo_control(daemon_.socket().c_str(), method, nullptr, 10'000'000'000, &text));
      mlpo_free(text);
    }
  }

  // Of an endless one; false if it has ended as it may. Takes what it has said, too: it would wait for room to say
  // more.
  bool Lives(const Job& job, RankProcess& rank) {
    (void)rank.WaitFor("error ", 1);
    if (rank.Runs()) return true;
    const std::string& text = rank.LastWords();
    if (!job.may_fail || !FailedForThePath(text)) throw Wrong("an endless rank has ended:\n" + text);
    return false;
  }

  // Ends of jobs; with `all` of every job.
  void Reap(bool all) {
    for (Job& job : jobs_) {
      for (std::unique_ptr<RankProcess>& rank : job.ranks) {
        if (job.endless) {
          const bool lives = Lives(job, *rank);
          counts_.failed_jobs += !lives;
          if (lives && !all) continue;
          rank->Kill();
          if (job.saves) CheckSaving(rank->LastWords());
        } else {
          if (!all && rank->Runs()) continue;
          const int code = rank->WaitForEnd(kRankSeconds * 1000);
          const bool equal = code == 0 && rank->output().find("equal") != std::string::npos;
          const bool failed = !equal && job.may_fail && FailedForThePath(rank->output());
          if (!equal && !failed) throw Wrong("a rank ended with " + std::to_string(code) + ":\n" + rank->output());
          counts_.failed_jobs += failed;
        }
        rank.reset();
      }
      std::erase(job.ranks, nullptr);
    }
    std::erase_if(jobs_, [](const Job& job) { return job.ranks.empty(); });
  }

  // But for the kernel's own, for io_uring, which come and go.
  size_t Threads() const {
    size_t count = 0;
    std::error_code error;  // they may go while we look
    const std::filesystem::path tasks = "/proc/" + std::to_string(daemon_.pid()) + "/task";
    for (const auto& entry : std::filesystem::directory_iterator(tasks, error)) {
      std::string name;
      std::ifstream(entry.path() / "comm") >> name;
      count += name.rfind("iou-", 0) != 0;
    }
    return count;
  }

  // What is left when everybody has gone.
  json Quiet() {
    json status;
    const bool alone = Eventually([&] {
      status = DaemonStatus(daemon_.socket());
      return status.at("sessions").empty() && status.at("arenas_bytes") == 0;
    });
    if (!alone) throw Wrong("sessions or arenas are left: " + status.dump());
    // What was being saved goes on without its rank.
    if (!daemon_.ScratchGone(kSavedSeconds)) throw Wrong("files are left, such as " + daemon_.ScratchFiles().front());
    if (!Eventually([&] { return FilesOfFaultyPath().empty(); }))
      throw Wrong("files are left, such as " + FilesOfFaultyPath());
    if (status.at("lost_wakeups") != 0) throw Wrong("lost wake-ups");
    AwaitWellPaths();
    const size_t descriptors = static_cast<size_t>(daemon_.SettledDescriptors()), threads = SettledThreads();
    const double minutes = std::chrono::duration<double>(Clock::now() - began_).count() / 60;
    resident_.emplace_back(minutes, static_cast<double>(daemon_.ResidentBytes()));
    if (resident_.size() == 1) {
      descriptors_ = descriptors;
      threads_ = threads;
    }
    if (descriptors != descriptors_)
      throw Wrong(std::to_string(descriptors) + " descriptors, " + std::to_string(descriptors_) + " at first");
    if (threads > threads_)
      throw Wrong(std::to_string(threads) + " threads, " + std::to_string(threads_) + " at first");
    CheckMemory();
    return {{"resident_bytes", resident_.back().second}, {"descriptors", descriptors}, {"threads", threads}};
  }

  // Those whose threads' ends nobody waits for have gone (base/loose_threads.h): as many for a while.
  size_t SettledThreads() const {
    size_t count = Threads();
    int same = 0;
    (void)Eventually([&] {
      const size_t now = Threads();
      same = now == count ? same + 1 : 0;
      count = now;
      return same >= 40;
    });
    return count;
  }

  // A job's file, or a save's, on the path that fails, as the folder below it has it; "" if there is none.
  std::string FilesOfFaultyPath() const {
    if (!fs_.ok()) return "";
    std::error_code error;  // files go while we look
    for (std::filesystem::recursive_directory_iterator it(fs_.source(), error), end; it != end && !error;
         it.increment(error)) {
      if (it.depth() > 3 && it->is_regular_file(error)) return it->path().string();  // as DaemonProcess::ScratchFiles
    }
    return error ? error.message() : "";
  }

  // They are probed until they are; and nothing is there any more.
  void AwaitWellPaths() {
    json paths;
    const bool well = Eventually(
        [&] {
          paths = DaemonStatus(daemon_.socket()).at("paths");
          return std::all_of(paths.begin(), paths.end(), [](const json& path) {
            return path.at("state") == "healthy" && path.at("scratch_bytes") == 0;
          });
        },
        kWellSeconds);
    if (!well) throw Wrong("a path does not come back, or extents are left: " + paths.dump());
  }

  // The slope of a straight line through what was measured: single values go up and down.
  void CheckMemory() const {
    if (resident_.size() < kWarmUp + 5) return;
    const auto first = resident_.begin() + kWarmUp;
    const auto n = static_cast<double>(resident_.end() - first);
    double t = 0, y = 0, tt = 0, ty = 0;
    for (auto at = first; at != resident_.end(); ++at) {
      t += at->first;
      y += at->second;
      tt += at->first * at->first;
      ty += at->first * at->second;
    }
    const double slope = (n * ty - t * y) / (n * tt - t * t);
    const double grown = resident_.back().second - first->second;
    if (slope > kMostBytesPerMinute && grown > kMostBytesInAll / 4)
      throw Wrong("resident memory grows by " + std::to_string(slope) + " bytes a minute");
    if (grown > kMostBytesInAll) throw Wrong("resident memory has grown by " + std::to_string(grown) + " bytes");
  }

  std::mt19937_64 random_;
  FaultFs fs_;
  const uint64_t persistent_;  // as DaemonProcess::PersistentPaths
  DaemonProcess daemon_;
  std::vector<Job> jobs_;
  uint64_t names_ = 0;
  Clock::time_point fault_ends_;
  bool hangs_ = false, reads_fail_ = false;
  bool left_ = false;  // path1 is disabled or evacuated
  int64_t saved_ = 0;  // that the saving rank has been told is complete
  Counts counts_;
  const Clock::time_point began_ = Clock::now();
  std::vector<std::pair<double, double>> resident_;  // minutes, bytes
  size_t descriptors_ = 0, threads_ = 0;
};

// Segments until the time is over, each with its line in the report.
json Segments(Report* report, uint64_t seed, uint64_t drawn_from, uint64_t segment_s, uint64_t most, double left_s) {
  Soak soak(drawn_from);
  for (uint64_t number = 1; number <= most && left_s > 0; ++number) {
    const auto from = Clock::now();
    json line = {{"seed", seed}, {"drawn_from", drawn_from}, {"segment", number}, {"outcome", "ok"}};
    try {
      const int64_t seconds = std::min(static_cast<int64_t>(segment_s), static_cast<int64_t>(left_s));
      line.update(soak.Segment(std::chrono::seconds(std::max<int64_t>(1, seconds))));
    } catch (const std::exception& error) {
      line["outcome"] = "failed";
      line["why"] = error.what();
      line["log"] = EndOf(soak.log());
    }
    const double seconds = std::chrono::duration<double>(Clock::now() - from).count();
    line["seconds"] = seconds;
    left_s -= seconds;
    const bool ok = line.at("outcome") == "ok";
    report->Add(std::move(line));
    if (!ok) return {{"outcome", "failed"}, {"reported", true}};
  }
  return {{"outcome", "ok"}};
}

int Usage(int code) {
  std::fprintf(code == 0 ? stdout : stderr,
               "Usage: soak [--minutes N] [--segment SECONDS] [--segments N] [--seed N] [--report FILE] [--fresh]\n"
               "  --minutes   in all (default 60); those that the report has for the same sources count\n"
               "  --segment   after so long everything ends, and is compared with the first time (default 60)\n"
               "  --segments  ends after so many, whatever the minutes say\n"
               "  --seed      what happens is drawn from it (default 1)\n"
               "  --report    JSON lines are appended there, one a segment\n"
               "  --fresh     as if nothing was in it\n"
               "Exit code: 0 all right, 1 not, 64 wrong usage.\n");
  return code;
}

}  // namespace

int main(int argc, char** argv) {
  double minutes = 60;
  uint64_t segment = 60, most_segments = ~uint64_t{0}, seed = 1;
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
    if (flag == "--minutes") {
      minutes = static_cast<double>(NumberFlag(argv[0], flag, value));
    } else if (flag == "--segment") {
      segment = NumberFlag(argv[0], flag, value);
    } else if (flag == "--segments") {
      most_segments = NumberFlag(argv[0], flag, value);
    } else if (flag == "--seed") {
      seed = NumberFlag(argv[0], flag, value);
    } else if (flag == "--report") {
      report_file = value;
    } else {
      return Usage(64);
    }
  }
  if (segment == 0 || segment > 3600) return Usage(64);
  ::signal(SIGPIPE, SIG_IGN);
  ::signal(SIGALRM, OnStuck);
  try {
    Report report(report_file, "soak", fresh);
    const double known_s = report.Sum({{"outcome", "ok"}}, "seconds"), left_s = minutes * 60 - known_s;
    if (left_s <= 0) {
      std::printf("the report has %.0f minutes of these sources\n", known_s / 60);
      return 0;
    }
    // The alarm of a segment comes before this deadline.
    const int deadline = static_cast<int>(std::min(2 * left_s, static_cast<double>(most_segments) * 1800)) + 3600;
    json answer = InChild(deadline, [&] {
      // What goes on does not do the same again.
      return Segments(&report, seed, seed + static_cast<uint64_t>(known_s), segment, most_segments, left_s);
    });
    if (answer.value("outcome", "") == "ok") return 0;
    if (!answer.contains("reported")) {
      answer["seed"] = seed;
      report.Add(std::move(answer));
    }
    return 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "soak: %s\n", error.what());
    return 1;
  }
}
