// "mlpo-bench train": starts rank processes on a daemon (one of its own unless a socket is given), and puts their times
// beside what machine and paths allow: ideal_s is the longer of (M - pool) blocks * block bytes / sum(e), with
// e = 1/max(1/r, 1/w, d(1/r+1/w)) from the limits given, and Adam alone, in memory; limit_share = ideal_s / period_s.
// Without limits for every path both are null.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <sstream>

#include "daemon/bench/bench.h"
#include "daemon/bench/device_bytes.h"
#include "daemon/bench/fio.h"
#include "daemon/bench/own_daemon.h"
#include "daemon/bench/ping_pong.h"
#include "daemon/types/element_bytes.h"

namespace mlpo::bench {
namespace {

constexpr double kMostShare = 1.03;    // of the limit; more cannot be, so what was measured is not what was meant
constexpr double kMostAstray = 0.01;   // between the daemon's bytes and the devices'
constexpr uint64_t kBlocksAstray = 4;  // in flight between two looks at the counters

// A rank process; we write lines to it and read lines from it.
class RankProcess {
 public:
  explicit RankProcess(std::vector<std::string> arguments) {
    int in[2], out[2];
    if (::pipe2(in, O_CLOEXEC) != 0 || ::pipe2(out, O_CLOEXEC) != 0) throw BenchError("pipe failed");
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    pid_ = ::fork();
    if (pid_ < 0) throw BenchError("fork failed");
    if (pid_ == 0) {
      ::dup2(in[0], 0);
      ::dup2(out[1], 1);
      ::execv(argv[0], argv.data());
      ::_exit(127);
    }
    ::close(in[0]);
    ::close(out[1]);
    to_ = ::fdopen(in[1], "w");
    from_ = ::fdopen(out[0], "r");
  }
  RankProcess(const RankProcess&) = delete;
  RankProcess& operator=(const RankProcess&) = delete;
  ~RankProcess() {
    Continue();
    std::fclose(to_);  // a rank that waits for us ends
    std::fclose(from_);
    ::waitpid(pid_, nullptr, 0);
  }

  std::string ReadLine() {
    std::string line;
    for (int c = std::fgetc(from_); c != '\n'; c = std::fgetc(from_)) {
      if (c == EOF) throw BenchError("a rank ended early; its message is above");
      line += static_cast<char>(c);
    }
    return line;
  }
  void Expect(const std::string& word) {
    if (const std::string line = ReadLine(); line != word) throw BenchError("a rank said " + line + ", not " + word);
  }
  void Go(double after_s = 0) {
    if (std::fprintf(to_, "go %.6f\n", after_s) < 0 || std::fflush(to_) != 0) throw BenchError("a rank is gone");
  }
  void Stop() { ::kill(pid_, SIGSTOP); }
  void Continue() { ::kill(pid_, SIGCONT); }

 private:
  pid_t pid_ = -1;
  std::FILE* to_ = nullptr;
  std::FILE* from_ = nullptr;
};

// As a file has it: what is no number, truth value, list or table is a string.
std::string TomlValue(const std::string& text) {
  char* end = nullptr;
  std::strtod(text.c_str(), &end);
  const bool bare = text == "true" || text == "false" || text.starts_with('[') || text.starts_with('{') ||
                    text.starts_with('"') || (!text.empty() && *end == '\0');
  return bare ? text : nlohmann::json(text).dump();
}

int TrainInOwnDaemon(const TrainOptions& options) {
  if (options.paths.empty()) throw BenchError("train needs --path DIR (or --socket of a daemon that runs)");
  std::map<std::string, std::string> sections;
  if (options.block_elements > 0) sections["memory"] = "block = " + std::to_string(options.block_elements) + "\n";
  std::map<std::string, std::string> of_path;  // by the last part of its directory; "": of all
  for (const auto& [name, value] : options.settings) {
    const size_t dot = name.find('.'), last = name.rfind('.');
    const std::string section = name.substr(0, dot);
    std::string& lines = section != "path" ? sections[section]
                         : dot == last     ? of_path[""]
                                           : of_path[name.substr(dot + 1, last - dot - 1)];
    lines += name.substr(last + 1) + " = " + TomlValue(value) + "\n";
  }
  std::ostringstream config;
  for (const auto& [section, lines] : sections) config << "[" << section << "]\n" << lines;
  for (const std::string& path : options.paths) {
    config << "[[path]]\ndirectory = " << nlohmann::json(path).dump() << "\n"
           << of_path[""] << of_path[std::filesystem::path(path).filename()];
    for (const PathLimit& limit : options.limits) {
      if (limit.directory != path) continue;
      config << "read_limit = " << limit.read_bytes_per_s << "\nwrite_limit = " << limit.write_bytes_per_s
             << "\nduplex = " << limit.duplex << "\n";
    }
  }
  return RunInOwnDaemon({config.str(), options.pool_bytes}, options.arguments);
}

std::vector<uint64_t> Split(const TrainOptions& options) {
  std::vector<double> weights = options.rank_weights;
  if (weights.empty()) weights.assign(options.ranks, 1);
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<uint64_t> parts;
  uint64_t left = options.parameters;
  for (size_t i = 0; i < weights.size(); ++i) {
    const auto part = static_cast<uint64_t>(static_cast<double>(options.parameters) * weights[i] / sum);
    parts.push_back(i + 1 == weights.size() ? left : std::min(left, part));
    left -= parts.back();
  }
  return parts;
}

// What fio transfers on all paths of the daemon together, half of it reads, with the daemon's own depth and sizes, on
// files of its own. Devices with a quota let bursts through after a pause: the first seconds do not count.
class FioMix {
 public:
  explicit FioMix(const nlohmann::json& status) {
    if (!FioIsThere()) throw BenchError("--fio needs fio, which is not installed (apt-get install fio)");
    run_.file_bytes = uint64_t{1} << 30;
    run_.block_bytes = 2u << 20;
    run_.depth = 2 * 4 * 6;  // both directions, queue_blocks, pieces of a block
    for (const nlohmann::json& path : status["paths"]) {
      folders_.push_back(std::make_unique<ScratchFolder>(path["directory"].get<std::string>()));
      run_.files.push_back(folders_.back()->path() + "/fio");
      run_.direct = run_.direct && path["direct_io"].get<bool>();
    }
    run_.mix = "write";
    RunFio(run_);
    run_.mix = "readwrite";
    run_.seconds = 4;
    run_.warm_up_seconds = 3;
  }

  void Measure() { runs_.push_back(RunFio(run_)); }

  // Limits that say what the runs show on average: half duplex, with what both directions reach together.
  std::vector<PathLimit> Limits(const nlohmann::json& status) const {
    std::vector<PathLimit> limits;
    for (size_t i = 0; i < run_.files.size(); ++i) {
      double both = 0;
      for (const std::vector<FioSpeed>& run : runs_) both += run[i].read_bytes_per_s + run[i].write_bytes_per_s;
      both /= static_cast<double>(runs_.size());
      limits.push_back({status["paths"][i]["directory"], both, both, 1});
    }
    return limits;
  }

 private:
  std::vector<std::unique_ptr<ScratchFolder>> folders_;
  FioRun run_;
  std::vector<std::vector<FioSpeed>> runs_;
};

// What moving (M - pool) blocks takes at best; nothing unless every path has a limit.
std::optional<double> TransferSeconds(const std::vector<PathLimit>& limits, const nlohmann::json& status,
                                      uint64_t parameters) {
  double worth = 0;
  for (const nlohmann::json& path : status["paths"]) {
    const auto limit = std::find_if(limits.begin(), limits.end(), [&](const PathLimit& l) {
      return l.directory == path["directory"].get<std::string>();
    });
    if (limit == limits.end()) return std::nullopt;
    const double r = 1 / limit->read_bytes_per_s, w = 1 / limit->write_bytes_per_s;
    worth += 1 / std::max({r, w, limit->duplex * (r + w)});
  }
  const auto buffers = status["pool"]["buffers"].get<uint64_t>();
  const auto block_bytes = status["pool"]["buffer_bytes"].get<uint64_t>();
  const uint64_t blocks = (12 * parameters + block_bytes - 1) / block_bytes;
  return static_cast<double>(blocks > buffers ? (blocks - buffers) * block_bytes : 0) / worth;
}

// What has been moved so far, by the daemon's word and by the devices'.
struct Moved {
  nlohmann::json status;
  std::optional<DeviceBytes> devices;
};
Moved LookAt(const std::string& socket) {
  Moved moved;
  moved.status = DaemonStatus(socket);
  std::vector<std::string> directories;
  for (const nlohmann::json& path : moved.status["paths"]) directories.push_back(path["directory"]);
  moved.devices = BytesOfDevices(directories);
  return moved;
}

void RunCommand(const std::string& command) {
  const int status = std::system(command.c_str());
  if (status == 0) return;
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  throw BenchError("--at-step: '" + command + "' ended with " + std::to_string(code));
}

using RankProcesses = std::vector<std::unique_ptr<RankProcess>>;

// Leads the ranks through all steps but for what a stopped one still has to do. What had been moved when step 1 ended.
Moved LeadThroughSteps(const TrainOptions& options, const std::string& socket, const RankProcesses& ranks) {
  Moved after_first;
  std::vector<RankProcess*> going;
  for (const auto& rank : ranks) going.push_back(rank.get());
  const auto all = [&going](const auto& what) { std::for_each(going.begin(), going.end(), what); };
  const double begin_s = static_cast<double>(NowNs()) * 1e-9;
  all([](RankProcess* rank) { rank->Go(); });
  for (uint32_t step = 1; step <= options.steps; ++step) {
    if (step == 1 || options.skew == 0) {
      // A trainer reduces the norm of the gradients over its ranks here, so none goes on before all are there.
      all([](RankProcess* rank) { rank->Expect("gradients"); });
      for (const auto& [at, command] : options.at_step) {
        if (at == step) RunCommand(command);
      }
      if (options.stop && options.stop->step == step) {
        ranks[options.stop->rank]->Stop();
        going.erase(going.begin() + options.stop->rank);
      }
      all([](RankProcess* rank) { rank->Go(); });
    }
    all([](RankProcess* rank) { rank->Expect("updated"); });
    if (step > 1) continue;
    after_first = LookAt(socket);
    if (options.skew == 0) continue;
    const double lag_s = options.skew * (static_cast<double>(NowNs()) * 1e-9 - begin_s);
    for (size_t i = 0; i < going.size(); ++i) {
      going[i]->Go(lag_s * static_cast<double>(i) / static_cast<double>(going.size() - 1));
    }
  }
  return after_first;
}

void EndStopped(const TrainOptions& options, RankProcess* rank) {
  rank->Continue();
  for (uint32_t step = options.stop->step; step <= options.steps; ++step) {
    if (step > options.stop->step) rank->Expect("gradients");
    rank->Go();
    rank->Expect("updated");
  }
}

// A line of /proc/PID/status in bytes; null where it cannot be read.
nlohmann::json MemoryOf(const nlohmann::json& status, const std::string& name) {
  std::ifstream file("/proc/" + status["pid"].dump() + "/status");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(name + ":")) return std::stoull(line.substr(name.size() + 1)) * 1024;
  }
  return nullptr;
}

// What the seconds of a step went to, by the daemon's records of the job's sessions: means over ranks and all steps but
// the first. null where it keeps none.
nlohmann::json Breakdown(const nlohmann::json& status, const std::string& job) {
  nlohmann::json sums = nlohmann::json::object();
  double steps = 0;
  for (const nlohmann::json& session : status["sessions"]) {
    if (session["job"] != job || !session.contains("steps")) continue;
    for (const nlohmann::json& step : session["steps"]) {
      if (step["number"].get<uint64_t>() < 2) continue;
      ++steps;
      for (const char* part : {"adam_s", "copy_s", "fetch_wait_s", "flush_wait_s", "grad_s", "idle_s"}) {
        sums[part] = sums.value(part, 0.0) + step[part].get<double>();
      }
    }
  }
  for (nlohmann::json& sum : sums) sum = sum.get<double>() / steps;
  return sums.empty() ? nlohmann::json() : sums;
}

// Each rank's step ends, on one clock.
using StepEnds = std::vector<std::vector<double>>;
// When the last of them had ended the step; without the stopped one.
double EndOf(const StepEnds& ends, uint32_t step, const std::optional<StoppedRank>& stop) {
  double end_s = 0;
  for (size_t rank = 0; rank < ends.size(); ++rank) {
    if (!stop || rank != stop->rank) end_s = std::max(end_s, ends[rank][step - 1]);
  }
  return end_s;
}

// What the paths moved between two looks, a step; reasons why the run shows nothing go to `reasons`.
void PutBytes(const Moved& from, const Moved& to, uint32_t steps, uint64_t parameters, nlohmann::json* result,
              std::vector<std::string>* reasons) {
  uint64_t read = 0, written = 0;
  (*result)["paths"] = nlohmann::json::array();
  for (size_t i = 0; i < to.status["paths"].size(); ++i) {
    const nlohmann::json& now = to.status["paths"][i];
    const auto since = [&, i](const char* key) {
      return now[key].get<uint64_t>() - from.status["paths"][i][key].get<uint64_t>();
    };
    read += since("read_bytes");
    written += since("written_bytes");
    (*result)["paths"].push_back({{"name", now["name"]},
                                  {"read_bytes", since("read_bytes") / steps},
                                  {"written_bytes", since("written_bytes") / steps},
                                  {"direct_io", now["direct_io"]},
                                  {"engine", now["engine"]}});
    if (!now["direct_io"].get<bool>()) reasons->push_back(now["name"].get<std::string>() + " is not direct I/O");
  }
  (*result)["cached_share"] =
      std::max(0.0, 1 - static_cast<double>(read) / steps / (12 * static_cast<double>(parameters)));
  (*result)["device_read_bytes"] = (*result)["device_written_bytes"] = nullptr;
  if (!from.devices || !to.devices) return;
  const uint64_t in_flight = kBlocksAstray * to.status["pool"]["buffer_bytes"].get<uint64_t>();
  const auto compare = [&](const char* key, uint64_t daemon, uint64_t devices) {
    (*result)[key] = devices / steps;
    const double astray = std::abs(static_cast<double>(devices) - static_cast<double>(daemon));
    if (astray <= std::max(kMostAstray * static_cast<double>(daemon), static_cast<double>(in_flight))) return;
    reasons->push_back(std::string(key) + " is " + std::to_string(devices / steps) + ", the daemon's " +
                       std::to_string(daemon / steps));
  };
  compare("device_read_bytes", read, to.devices->read - from.devices->read);
  compare("device_written_bytes", written, to.devices->written - from.devices->written);
}

}  // namespace

int Train(const TrainOptions& options) {
  if (options.socket.empty() && !InOwnDaemon()) return TrainInOwnDaemon(options);
  const std::string socket = !options.socket.empty() ? options.socket : std::getenv("MLPO_SOCKET");
  const std::string job = "bench-" + std::to_string(::getpid());
  std::optional<double> adam_speed;
  if (options.fio || !options.limits.empty()) {
    adam_speed = AdamParametersPerSecond(TypeNamed(options.grad), DaemonStatus(socket)["adam_workers"]);
  }
  const std::vector<uint64_t> parts = Split(options);
  RankProcesses ranks;
  for (uint32_t rank = 0; rank < options.ranks; ++rank) {
    std::vector<std::string> command = {OwnProgram(), "train-rank",
                                        "--socket",   socket,
                                        "--job",      job,
                                        "--rank",     std::to_string(rank),
                                        "--ranks",    std::to_string(options.ranks),
                                        "--params",   std::to_string(parts[rank]),
                                        "--steps",    std::to_string(options.steps),
                                        "--grad",     options.grad};
    if (options.skew > 0) command.emplace_back("--free");
    ranks.push_back(std::make_unique<RankProcess>(std::move(command)));
  }
  for (const auto& rank : ranks) rank->Expect("registered");
  const CatchInterrupts catching;
  std::optional<FioMix> fio;
  if (options.fio) fio.emplace(DaemonStatus(socket)).Measure();
  const Moved first = LeadThroughSteps(options, socket, ranks);
  const Moved last = LookAt(socket);
  if (options.stop) EndStopped(options, ranks[options.stop->rank].get());
  double begin_s = 0;
  StepEnds ends;
  nlohmann::json result, step_s, rank_step_s;
  for (const auto& rank : ranks) {
    const nlohmann::json line = nlohmann::json::parse(rank->ReadLine());
    const double began_s = line["begin_s"];
    begin_s = begin_s == 0 ? began_s : std::min(begin_s, began_s);
    ends.push_back(line["step_ends_s"]);
    nlohmann::json steps_s;
    for (size_t i = 0; i < options.steps; ++i)
      steps_s.push_back(ends.back()[i] - (i == 0 ? began_s : ends.back()[i - 1]));
    rank_step_s.push_back(steps_s);
  }
  std::vector<PathLimit> limits = options.limits;
  if (fio) {
    fio->Measure();
    limits = fio->Limits(last.status);
  }
  std::string check;
  for (size_t i = 0; i < ranks.size(); ++i) {
    ranks[i]->Go();
    const std::string differs = nlohmann::json::parse(ranks[i]->ReadLine())["check"];
    if (!differs.empty() && check.empty()) check = "rank " + std::to_string(i) + ": " + differs;
  }

  // With a stopped rank: the others' steps after the one in which it was stopped.
  const uint32_t from_step = options.stop ? options.stop->step : 1;
  const uint64_t parameters = options.parameters - (options.stop ? parts[options.stop->rank] : 0);
  const double last_end_s = EndOf(ends, options.steps, options.stop);
  const double period_s = (last_end_s - EndOf(ends, from_step, options.stop)) / (options.steps - from_step);
  for (uint32_t step = 1; step <= options.steps; ++step) {
    const double from_s = step == 1 ? begin_s : EndOf(ends, step - 1, options.stop);
    step_s.push_back(EndOf(ends, step, options.stop) - from_s);
  }
  std::vector<std::string> reasons;
  result["parameters"] = options.parameters;
  result["ranks"] = options.ranks;
  result["steps"] = options.steps;
  result["step_s"] = step_s;
  result["rank_step_s"] = rank_step_s;
  result["period_s"] = period_s;
  result["transfer_s"] = result["adam_s"] = result["ideal_s"] = result["limit_share"] = nullptr;
  if (const std::optional<double> transfer_s = TransferSeconds(limits, last.status, parameters); transfer_s) {
    const double adam_s = static_cast<double>(parameters) / *adam_speed;
    const double ideal_s = std::max(*transfer_s, adam_s);
    result["transfer_s"] = *transfer_s;
    result["adam_s"] = adam_s;
    result["ideal_s"] = ideal_s;
    result["limit_share"] = ideal_s / period_s;
    if (ideal_s > kMostShare * period_s) reasons.emplace_back("limit_share is above 1.03");
  }
  if (fio) {
    for (const PathLimit& limit : limits) result["fio_bytes_per_s"].push_back(limit.read_bytes_per_s);
  }
  result["run_s"] = last_end_s - begin_s;
  result["parameters_per_s"] = static_cast<double>(parameters) / period_s;
  PutBytes(first, last, options.steps - 1, options.parameters, &result, &reasons);
  result["breakdown"] = Breakdown(last.status, job);
  uint64_t arena_bytes = 0;
  for (const nlohmann::json& session : last.status["sessions"]) arena_bytes += session["arena_bytes"].get<uint64_t>();
  result["memory"] = {{"pool_bytes", last.status["pool"]["bytes"]},
                      {"arena_bytes", arena_bytes},
                      {"locked_bytes", MemoryOf(last.status, "VmLck")},
                      {"peak_resident_bytes", MemoryOf(last.status, "VmHWM")}};
  result["void"] = nullptr;
  for (const std::string& reason : reasons) {
    result["void"] = result["void"].is_null() ? reason : result["void"].get<std::string>() + "; " + reason;
  }
  result["check"] = check.empty() ? "ok" : check;
  Print(result, options.json);
  return check.empty() ? 0 : 1;
}

}  // namespace mlpo::bench
