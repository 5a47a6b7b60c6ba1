// "mlpo-bench train": starts rank processes on a daemon (one of its own unless a socket is given), and puts their times
// beside what the paths allow: ideal_s = (M - pool) blocks * block bytes / sum(e), with e = 1/max(1/r, 1/w, d(1/r+1/w))
// from the limits given; limit_share = ideal_s / period_s. Without limits for every path both are null.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <sstream>

#include "daemon/bench/bench.h"
#include "daemon/bench/fio.h"
#include "daemon/bench/own_daemon.h"

namespace mlpo::bench {
namespace {

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
  void Go() {
    if (std::fputs("go\n", to_) < 0 || std::fflush(to_) != 0) throw BenchError("a rank is gone");
  }

 private:
  pid_t pid_ = -1;
  std::FILE* to_ = nullptr;
  std::FILE* from_ = nullptr;
};

int TrainInOwnDaemon(const TrainOptions& options) {
  if (options.paths.empty()) throw BenchError("train needs --path DIR (or --socket of a daemon that runs)");
  std::ostringstream config;
  if (options.block_elements > 0) config << "[memory]\nblock = " << options.block_elements << "\n";
  for (const std::string& path : options.paths) {
    config << "[[path]]\ndirectory = " << nlohmann::json(path).dump() << "\n";
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

// null unless every path has a limit.
nlohmann::json IdealSeconds(const std::vector<PathLimit>& limits, const nlohmann::json& status, uint64_t blocks) {
  double worth = 0;
  for (const nlohmann::json& path : status["paths"]) {
    const auto limit = std::find_if(limits.begin(), limits.end(), [&](const PathLimit& l) {
      return l.directory == path["directory"].get<std::string>();
    });
    if (limit == limits.end()) return nullptr;
    const double r = 1 / limit->read_bytes_per_s, w = 1 / limit->write_bytes_per_s;
    worth += 1 / std::max({r, w, limit->duplex * (r + w)});
  }
  const auto buffers = status["pool"]["buffers"].get<uint64_t>();
  const auto block_bytes = status["pool"]["buffer_bytes"].get<double>();
  return static_cast<double>(blocks > buffers ? blocks - buffers : 0) * block_bytes / worth;
}

}  // namespace

int Train(const TrainOptions& options) {
  if (options.socket.empty() && !InOwnDaemon()) return TrainInOwnDaemon(options);
  const std::string socket = !options.socket.empty() ? options.socket : std::getenv("MLPO_SOCKET");
  const std::string job = "bench-" + std::to_string(::getpid());
  const std::vector<uint64_t> parts = Split(options);
  std::vector<std::unique_ptr<RankProcess>> ranks;
  for (uint32_t rank = 0; rank < options.ranks; ++rank) {
    ranks.push_back(std::make_unique<RankProcess>(std::vector<std::string>{
        OwnProgram(), "train-rank", "--socket", socket, "--job", job, "--rank", std::to_string(rank), "--ranks",
        std::to_string(options.ranks), "--params", std::to_string(parts[rank]), "--steps",
        std::to_string(options.steps), "--grad", options.grad}));
  }
  for (const auto& rank : ranks) rank->ReadLine();
  const CatchInterrupts catching;
  std::optional<FioMix> fio;
  if (options.fio) fio.emplace(DaemonStatus(socket)).Measure();
  const nlohmann::json before = DaemonStatus(socket);
  for (const auto& rank : ranks) rank->Go();
  double begin_s = 0, first_end_s = 0, last_end_s = 0;
  for (const auto& rank : ranks) {
    const nlohmann::json line = nlohmann::json::parse(rank->ReadLine());
    const double began_s = line["begin_s"];
    begin_s = begin_s == 0 ? began_s : std::min(begin_s, began_s);
    first_end_s = std::max(first_end_s, line["step_ends_s"].front().get<double>());
    last_end_s = std::max(last_end_s, line["step_ends_s"].back().get<double>());
  }
  const nlohmann::json after = DaemonStatus(socket);
  std::vector<PathLimit> limits = options.limits;
  if (fio) {
    fio->Measure();
    limits = fio->Limits(after);
  }
  std::string check;
  for (size_t i = 0; i < ranks.size(); ++i) {
    ranks[i]->Go();
    const std::string differs = nlohmann::json::parse(ranks[i]->ReadLine())["check"];
    if (!differs.empty() && check.empty()) check = "rank " + std::to_string(i) + ": " + differs;
  }

  const double period_s = (last_end_s - first_end_s) / (options.steps - 1);
  const double block_elements = after["pool"]["buffer_bytes"].get<double>() / 12;
  const auto blocks = static_cast<uint64_t>(static_cast<double>(options.parameters) / block_elements + 0.999999);
  nlohmann::json result;
  result["parameters"] = options.parameters;
  result["ranks"] = options.ranks;
  result["steps"] = options.steps;
  result["period_s"] = period_s;
  result["ideal_s"] = IdealSeconds(limits, after, blocks);
  result["limit_share"] =
      result["ideal_s"].is_null() ? nlohmann::json() : nlohmann::json(result["ideal_s"].get<double>() / period_s);
  if (fio) {
    for (const PathLimit& limit : limits) result["fio_bytes_per_s"].push_back(limit.read_bytes_per_s);
  }
  result["run_s"] = last_end_s - begin_s;
  result["parameters_per_s"] = static_cast<double>(options.parameters) / period_s;
  uint64_t read_bytes = 0;
  result["paths"] = nlohmann::json::array();
  for (size_t i = 0; i < after["paths"].size(); ++i) {
    const nlohmann::json& now = after["paths"][i];
    const nlohmann::json& then = before["paths"][i];
    const uint64_t read = now["read_bytes"].get<uint64_t>() - then["read_bytes"].get<uint64_t>();
    const uint64_t written = now["written_bytes"].get<uint64_t>() - then["written_bytes"].get<uint64_t>();
    read_bytes += read;
    result["paths"].push_back({{"name", now["name"]},
                               {"read_bytes", read / options.steps},
                               {"written_bytes", written / options.steps},
                               {"direct_io", now["direct_io"]},
                               {"engine", now["engine"]}});
  }
  // The first step reads no moments, so that its share is a little too high.
  result["cached_share"] = std::max(
      0.0, 1 - static_cast<double>(read_bytes) / options.steps / (12 * static_cast<double>(options.parameters)));
  result["check"] = check.empty() ? "ok" : check;
  Print(result, options.json);
  return check.empty() ? 0 : 1;
}

}  // namespace mlpo::bench
