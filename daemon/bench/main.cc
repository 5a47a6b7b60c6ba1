#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "daemon/base/log.h"
#include "daemon/bench/bench.h"
#include "daemon/config/units.h"

namespace mlpo::bench {
namespace {

constexpr int kUsage = 64;

template <class T>
T Parsed(const Result<T>& result) {
  if (!result.ok()) throw CLI::ValidationError(result.status().message());
  return result.value();
}

// DIR=READ/WRITE/DUPLEX
PathLimit ParseLimit(const std::string& text) {
  const size_t equals = text.rfind('=');
  if (equals == std::string::npos) throw CLI::ValidationError("--limit takes DIR=READ/WRITE/DUPLEX, not " + text);
  PathLimit limit;
  limit.directory = std::filesystem::absolute(text.substr(0, equals));
  std::vector<std::string> parts;
  std::istringstream values(text.substr(equals + 1));
  for (std::string part; std::getline(values, part, '/');) parts.push_back(part);
  if (parts.size() != 3) throw CLI::ValidationError("--limit takes DIR=READ/WRITE/DUPLEX, not " + text);
  limit.read_bytes_per_s = Parsed(ParseSpeed(parts[0]));
  limit.write_bytes_per_s = Parsed(ParseSpeed(parts[1]));
  limit.duplex = Parsed(ParseSpeed(parts[2]));
  return limit;
}

// SECTION.KEY=VALUE
std::pair<std::string, std::string> ParseSetting(const std::string& text) {
  const size_t equals = text.find('='), dot = text.find('.');
  if (equals == std::string::npos || dot >= equals) {
    throw CLI::ValidationError("--set takes SECTION.KEY=VALUE, not " + text);
  }
  return {text.substr(0, equals), text.substr(equals + 1)};
}

uint32_t ParseNumber(const std::string& text, const std::string& whose, uint64_t least, uint64_t most) {
  const uint64_t number = Parsed(ParseCount(text));
  if (number < least || number > most) {
    throw CLI::ValidationError(whose + " takes a number from " + std::to_string(least) + " to " + std::to_string(most) +
                               ", not " + text);
  }
  return static_cast<uint32_t>(number);
}

// STEP=COMMAND
std::pair<uint32_t, std::string> ParseAtStep(const std::string& text, uint32_t steps) {
  const size_t equals = text.find('=');
  if (equals == std::string::npos) throw CLI::ValidationError("--at-step takes STEP=COMMAND, not " + text);
  return {ParseNumber(text.substr(0, equals), "--at-step", 1, steps), text.substr(equals + 1)};
}

// RANK@STEP. Steps must be left to time the others in, and there must be others.
StoppedRank ParseStop(const std::string& text, const TrainOptions& options) {
  const size_t at = text.find('@');
  if (at == std::string::npos) throw CLI::ValidationError("--stop-rank takes RANK@STEP, not " + text);
  if (options.ranks < 2) throw CLI::ValidationError("--stop-rank needs two ranks and more");
  StoppedRank stop;
  stop.rank = ParseNumber(text.substr(0, at), "--stop-rank's rank", 0, options.ranks - 1);
  stop.step = ParseNumber(text.substr(at + 1), "--stop-rank's step", 1, options.steps - 1);
  return stop;
}

int Run(int argc, char** argv) {
  CLI::App app("Measures mlpo-daemon from a client's side.", "mlpo-bench");
  app.require_subcommand(1);

  TrainOptions train;
  std::string parameters = "268M", pool, block;
  std::vector<std::string> limits;
  CLI::App* train_command = app.add_subcommand("train", "Optimizer steps of ranks without a model");
  train_command->add_option("--params", parameters, "Parameters of all ranks together: 268M, 1B, plain numbers");
  train_command->add_option("--ranks", train.ranks, "Rank processes")->check(CLI::Range(1, 256));
  train_command->add_option("--rank-weights", train.rank_weights, "Their sizes to one another: 1,3")->delimiter(',');
  train_command->add_option("--steps", train.steps, "Steps; the first is not timed")->check(CLI::Range(2, 1000000));
  train_command->add_option("--pool", pool, "Pool of the daemon that is started");
  train_command->add_option("--block", block, "Its block, in elements");
  train_command->add_option("--path", train.paths, "A path of the daemon that is started; may be repeated");
  train_command->add_option(
      "--limit", limits,
      "DIR=READ/WRITE/DUPLEX, bytes a second as numbers or 345e6: what a path can do; may be repeated");
  train_command->add_option("--grad", train.grad, "Type of gradient and parameters handed out")
      ->check(CLI::IsMember({"bfloat16", "float16", "float32"}));
  std::vector<std::string> settings, at_step;
  std::string stop;
  train_command->add_option(
      "--set", settings,
      "SECTION.KEY=VALUE: a setting of the daemon that is started; path.KEY of all its paths, path.NAME.KEY of "
      "the one whose directory ends in NAME; may be repeated");
  train_command->add_option("--skew", train.skew, "Steps by which the last rank is behind the first; none waits then")
      ->check(CLI::Range(0.0, 100.0));
  train_command->add_option("--stop-rank", stop, "RANK@STEP: stop it there, and time the others after that step");
  train_command->add_option("--at-step", at_step, "STEP=COMMAND: run before the updates of a step; may be repeated");
  train_command->add_option("--socket", train.socket, "Use this daemon instead of one of our own");
  train_command->add_flag("--fio", train.fio,
                          "Take what fio reaches just before and after, on average, for the paths' limits");
  train_command->add_flag("--json", train.json, "One JSON object on stdout");

  RingOptions ring;
  CLI::App* ring_command = app.add_subcommand("ring", "Round trips and batches through a daemon's ring");
  ring_command->add_option("--socket", ring.socket, "Use this daemon instead of one of our own");
  ring_command->add_option("--operations", ring.operations, "NOPs of each kind")->check(CLI::Range(1000, 1000000000));
  ring_command->add_flag("--json", ring.json, "One JSON object on stdout");

  AdamOptions adam;
  std::string adam_parameters;
  CLI::App* adam_command = app.add_subcommand("adam", "The update kernel beside a plain loop over the same memory");
  adam_command->add_option("--params", adam_parameters, "Parameters in memory; 32Mi by default");
  adam_command->add_option("--workers", adam.workers, "Worker threads; 0: as the daemon chooses");
  adam_command->add_option("--target", adam.target, "Instruction set: auto, scalar, sse4, avx2, avx512, neon");
  adam_command->add_option("--seconds", adam.seconds, "For each pair of types")->check(CLI::Range(0.01, 3600.0));
  adam_command->add_flag("--json", adam.json, "One JSON object on stdout");

  IoOptions io;
  std::string io_block, io_piece, io_size;
  CLI::App* io_command = app.add_subcommand("io", "Each path's engine beside fio");
  io_command->add_option("--path", io.paths, "Directory to measure in; may be repeated")->required();
  io_command->add_option("--block", io_block, "Bytes of a transfer; 12MiB by default");
  io_command->add_option("--piece", io_piece, "Bytes of one read or write, 1-8 MiB; 2MiB by default");
  io_command->add_option("--depth", io.depth, "Transfers in flight in a direction")->check(CLI::Range(1, 64));
  io_command->add_option("--size", io_size, "Bytes of the file; 1GiB by default, and once more for fio");
  io_command->add_option("--rounds", io.rounds, "Measurements of each kind")->check(CLI::Range(1, 1000));
  io_command->add_option("--seconds", io.seconds, "For each of them")->check(CLI::Range(0.01, 3600.0));
  io_command->add_flag("--json", io.json, "One JSON object on stdout");

  AdamTurnsOptions turns;
  CLI::App* turns_command = app.add_subcommand("adam-turns", "");
  turns_command->group("");  // for tests/bench/adam_peer
  const CLI::IsMember types({"bfloat16", "float16", "float32"});
  turns_command->add_option("--memory", turns.memory)->required();
  turns_command->add_option("--params", turns.parameters)->required()->check(CLI::Range(1ul, 1ul << 40));
  turns_command->add_option("--grad", turns.grad)->required()->check(types);
  turns_command->add_option("--dtype", turns.dtype)->required()->check(types);
  turns_command->add_option("--workers", turns.workers);

  std::string job;
  uint32_t rank = 0;
  uint64_t rank_parameters = 0;
  CLI::App* rank_command = app.add_subcommand("train-rank", "");
  rank_command->group("");  // for train's own use
  rank_command->add_option("--socket", train.socket);
  rank_command->add_option("--job", job);
  rank_command->add_option("--rank", rank);
  rank_command->add_option("--ranks", train.ranks);
  rank_command->add_option("--params", rank_parameters);
  rank_command->add_option("--steps", train.steps);
  rank_command->add_option("--grad", train.grad);
  bool free = false;
  rank_command->add_flag("--free", free);

  try {
    app.parse(argc, argv);
    train.parameters = Parsed(ParseParameters(parameters));
    if (!adam_parameters.empty()) adam.parameters = Parsed(ParseCount(adam_parameters));
    if (!io_block.empty()) io.block_bytes = Parsed(ParseSize(io_block));
    if (!io_piece.empty()) io.piece_bytes = static_cast<uint32_t>(Parsed(ParseSize(io_piece)));
    if (!io_size.empty()) io.file_bytes = Parsed(ParseSize(io_size));
    if (io.block_bytes == 0 || io.piece_bytes == 0) throw CLI::ValidationError("--block and --piece cannot be 0");
    if (!pool.empty()) train.pool_bytes = Parsed(ParseSize(pool));
    if (!block.empty()) train.block_elements = Parsed(ParseCount(block));
    for (const std::string& limit : limits) train.limits.push_back(ParseLimit(limit));
    for (std::string& path : train.paths) path = std::filesystem::absolute(path);
    for (const std::string& setting : settings) train.settings.push_back(ParseSetting(setting));
    for (const std::string& one : at_step) train.at_step.push_back(ParseAtStep(one, train.steps));
    if (!stop.empty()) train.stop = ParseStop(stop, train);
    if (train.skew > 0 && (train.ranks < 2 || train.stop || !train.at_step.empty())) {
      throw CLI::ValidationError("--skew needs two ranks and more, and goes with neither --stop-rank nor --at-step");
    }
    if (!train.settings.empty() && !train.socket.empty()) {
      throw CLI::ValidationError("--set is for a daemon that is started, not for one at --socket");
    }
    if (!train.rank_weights.empty() && train.rank_weights.size() != train.ranks) {
      throw CLI::ValidationError("--rank-weights has " + std::to_string(train.rank_weights.size()) +
                                 " weights for --ranks " + std::to_string(train.ranks));
    }
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kUsage;
  }
  if (train.fio && !train.limits.empty()) {
    std::cerr << "mlpo-bench: --fio measures what --limit declares: give one of them" << std::endl;
    return kUsage;
  }
  train.arguments.assign(argv + 1, argv + argc);
  ring.arguments = train.arguments;
  if (*train_command) return Train(train);
  if (*adam_command) return Adam(adam);
  if (*turns_command) return AdamTurns(turns);
  if (*io_command) return Io(io);
  if (*ring_command) return Ring(ring);
  return TrainRank(train.socket, job, rank, train.ranks, rank_parameters, train.steps, train.grad, free);
}

}  // namespace

nlohmann::json DaemonStatus(const std::string& socket) {
  char* text = nullptr;
  Need(mlpo_control(socket.empty() ? nullptr : socket.c_str(), "status", nullptr, int64_t{30'000'000'000}, &text),
       "asking the daemon for its status");
  const nlohmann::json status = nlohmann::json::parse(text, nullptr, false);
  mlpo_free(text);
  if (status.is_discarded()) throw BenchError("the daemon's status is not JSON");
  return status;
}

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

void Print(const nlohmann::json& result, bool json) {
  if (json) {
    std::cout << result.dump() << std::endl;
    return;
  }
  for (const auto& [name, value] : result.items()) std::cout << name << " " << value.dump() << "\n";
  std::cout << std::flush;
}

}  // namespace mlpo::bench

int main(int argc, char** argv) {
  mlpo::StartLogging("warning");
  try {
    return mlpo::bench::Run(argc, argv);
  } catch (const mlpo::bench::BenchError& error) {
    std::cerr << "mlpo-bench: " << error.what() << std::endl;
    return 1;
  }
}
