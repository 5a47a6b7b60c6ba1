// mlpo-bench: measures a daemon from a client's side. Each subcommand prints one JSON object on stdout (with --json) or
// lines of "name value". Single-threaded programs; errors are thrown as BenchError and end the program with exit
// code 1.
#pragma once

#include <mlpo/client.h>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <stdexcept>
#include <string>
#include <vector>

namespace mlpo::bench {

struct BenchError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

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
  std::string socket;  // "": a daemon of our own
  bool json = false;
  std::vector<std::string> arguments;  // as given, for the run inside a daemon of our own
};

// Returns the exit code.
int Train(const TrainOptions& options);
// One rank of a Train: prints a JSON line for its parent. `job` is the same for all ranks.
int TrainRank(const std::string& socket, const std::string& job, uint32_t rank, uint32_t ranks, uint64_t parameters,
              uint32_t steps, const std::string& grad);
// Round trips and batches of NOPs.
int Ring(const std::string& socket, uint64_t operations, bool json);

void Print(const nlohmann::json& result, bool json);

}  // namespace mlpo::bench
