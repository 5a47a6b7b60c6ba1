// mlpo-bench: measures a daemon from a client's side. Each subcommand prints one JSON object on stdout (with --json) or
// lines of "name value". Single-threaded programs; errors are thrown as BenchError and end the program with exit
// code 1.
#pragma once

#include <mlpo/client.h>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "daemon/base/status.h"
#include "proto/tensor.h"

namespace mlpo::bench {

struct BenchError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The value, or a throw of what failed.
template <class T>
T Taken(Result<T> result) {
  if (!result.ok()) throw BenchError(result.status().message());
  return std::move(*result);
}

// Throws with what failed and the library's own words if `code` is not 0.
inline void Need(int code, const std::string& what) {
  if (code != 0) throw BenchError(what + ": " + mlpo_strerror(code) + ": " + mlpo_last_error());
}

struct PathLimit {
  std::string directory;
  double read_bytes_per_s = 0;
  double write_bytes_per_s = 0;
  double duplex = 1;
};

// A rank that is stopped (SIGSTOP) in a step, between its gradients and its updates, until the others are through.
struct StoppedRank {
  uint32_t rank = 0;
  uint32_t step = 0;  // from 1
};

struct TrainOptions {
  uint64_t parameters = 268'000'000;
  uint32_t ranks = 1;
  std::vector<double> rank_weights;  // empty: equal
  uint32_t steps = 5;
  uint64_t pool_bytes = 0;  // 0: the daemon's own default
  uint64_t block_elements = 0;
  std::vector<std::string> paths;
  std::vector<PathLimit> limits;
  std::string grad = "bfloat16";
  // Daemon of our own: section.key (path.key, path.name.key) and value, as in the file.
  std::vector<std::pair<std::string, std::string>> settings;
  double skew = 0;  // steps by which the last rank is behind the first; then no rank waits for another
  std::optional<StoppedRank> stop;
  std::vector<std::pair<uint32_t, std::string>> at_step;  // step, command for the shell
  bool fio = false;                                       // limits by fio in the same run
  std::string socket;                                     // "": a daemon of our own
  bool json = false;
  std::vector<std::string> arguments;  // as given, for the run inside a daemon of our own
};

struct RingOptions {
  std::string socket;             // "": a daemon of our own
  uint64_t operations = 200'000;  // of each kind, all rounds together
  bool json = false;
  std::vector<std::string> arguments;
};

struct AdamOptions {
  uint64_t parameters = 32u << 20;
  uint32_t workers = 0;  // 0: as the daemon chooses
  std::string target = "auto";
  double seconds = 1;  // for each pair of types
  bool json = false;
};

struct AdamTurnsOptions {
  std::string memory;  // file
  uint64_t parameters = 0;
  std::string grad, dtype;
  uint32_t workers = 0;  // 0: as the daemon chooses
};

struct IoOptions {
  std::vector<std::string> paths;
  uint64_t block_bytes = 12u << 20;
  uint32_t piece_bytes = 2u << 20;
  uint32_t depth = 4;  // blocks in flight in a direction
  uint64_t file_bytes = uint64_t{1} << 30;
  uint32_t rounds = 4;
  double seconds = 2;  // of each measurement
  bool json = false;
};

// These return the exit code.
int Train(const TrainOptions& options);
// One rank of a Train, which leads it by lines. `job` is the same for all ranks; `free`: waits for nobody after step 1.
int TrainRank(const std::string& socket, const std::string& job, uint32_t rank, uint32_t ranks, uint64_t parameters,
              uint32_t steps, const std::string& grad, bool free);
// Round trips and batches of NOPs.
int Ring(const RingOptions& options);
// The update kernel beside a plain loop over the same memory.
int Adam(const AdamOptions& options);
// What the kernel alone does on so many workers, in memory, gradient and parameter of this type.
double AdamParametersPerSecond(mlpo_dtype dtype, uint32_t workers);
// Updates of memory shared with a program that leads it by lines (adam_turns.cc).
int AdamTurns(const AdamTurnsOptions& options);
// Each path's engine beside fio.
int Io(const IoOptions& options);

// What the daemon at `socket` ("": as clients find it) answers to "status".
nlohmann::json DaemonStatus(const std::string& socket);
void Print(const nlohmann::json& result, bool json);
double Median(std::vector<double> values);  // at least one

}  // namespace mlpo::bench
