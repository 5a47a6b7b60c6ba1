#include <CLI/CLI.hpp>
#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>

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
  limit.directory = text.substr(0, equals);
  std::vector<std::string> parts;
  std::istringstream values(text.substr(equals + 1));
  for (std::string part; std::getline(values, part, '/');) parts.push_back(part);
  if (parts.size() != 3) throw CLI::ValidationError("--limit takes DIR=READ/WRITE/DUPLEX, not " + text);
  limit.read_bytes_per_s = Parsed(ParseSpeed(parts[0]));
  limit.write_bytes_per_s = Parsed(ParseSpeed(parts[1]));
  limit.duplex = Parsed(ParseSpeed(parts[2]));
  return limit;
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
  train_command->add_option("--socket", train.socket, "Use this daemon instead of one of our own");
  train_command->add_flag("--json", train.json, "One JSON object on stdout");

  std::string ring_socket;
  uint64_t operations = 200'000;
  bool ring_json = false;
  CLI::App* ring_command = app.add_subcommand("ring", "Round trips through the ring of a running daemon");
  ring_command->add_option("--socket", ring_socket, "The daemon; as clients find it without this");
  ring_command->add_option("--operations", operations, "NOPs of each kind")->check(CLI::Range(1000, 1000000000));
  ring_command->add_flag("--json", ring_json, "One JSON object on stdout");

  std::string job;
  uint32_t rank = 0;
  uint64_t rank_parameters = 0;
  CLI::App* rank_command = app.add_subcommand("train-rank", "");
  rank_command->group("");  // for train's own use
  rank_command->add_option("--socket", ring_socket);
  rank_command->add_option("--job", job);
  rank_command->add_option("--rank", rank);
  rank_command->add_option("--ranks", train.ranks);
  rank_command->add_option("--params", rank_parameters);
  rank_command->add_option("--steps", train.steps);
  rank_command->add_option("--grad", train.grad);

  try {
    app.parse(argc, argv);
    if (parameters.ends_with('B')) parameters.back() = 'G';  // billions of parameters, as people write them
    train.parameters = Parsed(ParseCount(parameters));
    if (!pool.empty()) train.pool_bytes = Parsed(ParseSize(pool));
    if (!block.empty()) train.block_elements = Parsed(ParseCount(block));
    for (const std::string& limit : limits) train.limits.push_back(ParseLimit(limit));
    if (!train.rank_weights.empty() && train.rank_weights.size() != train.ranks) {
      throw CLI::ValidationError("--rank-weights has " + std::to_string(train.rank_weights.size()) +
                                 " weights for --ranks " + std::to_string(train.ranks));
    }
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kUsage;
  }
  train.arguments.assign(argv + 1, argv + argc);
  if (*train_command) return Train(train);
  if (*ring_command) return Ring(ring_socket, operations, ring_json);
  return TrainRank(ring_socket, job, rank, train.ranks, rank_parameters, train.steps, train.grad);
}

}  // namespace

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
  try {
    return mlpo::bench::Run(argc, argv);
  } catch (const mlpo::bench::BenchError& error) {
    std::cerr << "mlpo-bench: " << error.what() << std::endl;
    return 1;
  }
}
