#include "daemon/plan_request.h"

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <algorithm>
#include <charconv>
#include <cstdint>
#include <set>

#include "daemon/base/name.h"
#include "daemon/base/plain_text.h"
#include "daemon/config/config.h"
#include "daemon/config/settings.h"
#include "daemon/config/units.h"
#include "daemon/types/element_bytes.h"

namespace mlpo {
namespace {

constexpr uint64_t kMostParameters = 1'000'000'000'000'000;
constexpr uint64_t kMostBytes = uint64_t{1} << 60;
constexpr uint32_t kMostRanks = 1'000'000;
constexpr uint32_t kMostWorkers = 65536;
// As read_limit and write_limit.
constexpr double kSlowest = 1, kFastest = 1e15;
// Of speeds without a unit: more is bytes per second, or MB/s, with the unit forgotten.
constexpr double kMostGigabytes = 1000;
constexpr double kLeastPart = 1e-6;
constexpr double kSecondsPerDay = 86400;

constexpr const char* kPathRule =
    "it is NAME=READ[/WRITE][,KEY=VALUE]..., such as nvme=6.9/5.3GB/s,capacity=7TB or pfs=3.6 (GB/s)";

Status Refuse(std::string_view text, const std::string& why) {
  return Status::Invalid("--path " + PlainText(text) + ": " + why);
}

std::vector<std::string> Split(std::string_view text, char at) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == at)
      parts.emplace_back();
    else
      parts.back() += c;
  }
  return parts;
}

std::string UnitOf(const std::string& number) {
  const size_t end = number.find_first_not_of("0123456789.");
  return end == std::string::npos ? "" : number.substr(end);
}

Result<double> ParseOneSpeed(const std::string& number, const std::string& unit) {
  const bool given = !UnitOf(number).empty();
  Result<double> speed = ParseSpeed(number + (given ? "" : unit.empty() ? "GB" : unit) + "/s");
  if (speed.ok() && !given && unit.empty() && *speed > kMostGigabytes * 1e9)
    return Status::Invalid("\"" + number + "\" without a unit would be GB/s: say " + number + "MB/s, or what it is");
  if (!speed.ok() || *speed < kSlowest || *speed > kFastest)
    return Status::Invalid("\"" + PlainText(number) +
                           "\" is no speed: use a number of GB/s, or one with a unit such as 900MB/s or 6.4GiB/s");
  return *speed;
}

// READ[/WRITE], each with or without a unit.
Status ParseSpeeds(std::string_view text, PathParameters* speeds) {
  std::vector<std::string> numbers;
  for (const std::string& part : Split(text, '/')) {
    const bool per_second = part == "s" && !numbers.empty() && !UnitOf(numbers.back()).empty();
    if (!per_second) numbers.push_back(part);
  }
  if (numbers.size() > 2 || numbers[0].empty()) return Status::Invalid("speeds are READ[/WRITE], such as 6.9/5.3GB/s");
  const std::string unit = UnitOf(numbers.back());
  if (unit.empty() && !UnitOf(numbers.front()).empty())
    return Status::Invalid("the unit belongs behind the last speed, such as 6.9/5.3GB/s");
  Result<double> read = ParseOneSpeed(numbers.front(), unit);
  if (!read.ok()) return read.status();
  Result<double> write = ParseOneSpeed(numbers.back(), unit);
  if (!write.ok()) return write.status();
  speeds->read_bytes_per_s = *read;
  speeds->write_bytes_per_s = *write;
  return Status();
}

// Of a path that several nodes use.
Result<double> ParsePart(const std::string& text) {
  double value = 0;
  const char* end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || at != end || !(value >= kLeastPart && value <= 1))
    return Status::Invalid("is \"" + PlainText(text) + "\"; allowed: equal, or a number above 0 and at most 1");
  return value;
}

Result<uint64_t> AboveZero(Result<uint64_t> value) {
  if (value.ok() && (*value == 0 || *value > kMostBytes))
    return Status::Invalid("must be above 0 and at most " + FormatSize(kMostBytes));
  return value;
}

// As the configuration takes them.
template <class S>
Status SetAsConfigured(const std::vector<Setting<S>>& settings, const std::string& key, const std::string& value,
                       S* to) {
  const auto found = std::find_if(settings.begin(), settings.end(), [&](const auto& each) { return each.key == key; });
  MLPO_CHECK(found != settings.end());
  return found->set(RawValue::Text(value), to);
}

Status ParseKey(const std::string& key, const std::string& value, uint32_t nodes, PlanPath* path) {
  PathParameters& speeds = path->speeds;
  if (key == "share") {
    Result<double> share = value == "equal" ? Result<double>(1.0 / nodes) : ParsePart(value);
    if (!share.ok()) return share.status();
    speeds.read_bytes_per_s *= *share;
    speeds.write_bytes_per_s *= *share;
    return Status();
  }
  if (key == "rated") {
    Result<uint64_t> bytes = AboveZero(ParseSize(value));
    if (bytes.ok()) path->rated_bytes = *bytes;
    return bytes.status();
  }
  if (key != "duplex" && key != "capacity" && key != "write_budget")
    return Status::Invalid("is unknown; known are duplex, capacity, write_budget, share, rated");
  PathConfig config;
  const std::string number = key != "duplex" ? value : value == "full" ? "0.5" : value == "half" ? "1" : value;
  if (const Status status = SetAsConfigured(PathSettings(), key, number, &config); !status.ok()) return status;
  if (config.duplex > 0) speeds.duplex = config.duplex;
  if (config.capacity_bytes > 0) speeds.capacity_bytes = config.capacity_bytes;
  if (config.write_budget_bytes > 0)
    speeds.write_budget_bytes_per_s = static_cast<double>(config.write_budget_bytes) / kSecondsPerDay;
  return Status();
}

struct Texts {
  std::string parameters, memory, node_memory, arenas, block, dtype = "bfloat16", grad;
  std::vector<std::string> paths;
};

void AddOptions(CLI::App* app, Texts* texts, PlanRequest* request) {
  app->add_option("--params", texts->parameters, "parameters of the model: 70B, 268M, plain numbers")->required();
  app->add_option("--path", texts->paths,
                  "NAME=READ[/WRITE][,KEY=VALUE]...: what a path can do, as nvme=6.9/5.3GB/s or pfs=3.6 (GB/s); keys: "
                  "duplex=half|full|0.5..2 (half), capacity=SIZE, write_budget=SIZE/day, share=equal|PART of several "
                  "nodes, rated=SIZE that may be written in the drive's life; may be repeated")
      ->required()
      ->allow_extra_args(false);
  app->add_option("--memory", texts->memory, "the daemon's pool, such as 400GiB (a quarter of --node-memory)");
  app->add_option("--node-memory", texts->node_memory, "what a node has for pool and arenas, beside the trainers");
  app->add_option("--arenas", texts->arenas, "what arenas may take (half of what the pool leaves of --node-memory)");
  app->add_option("--ranks", request->ranks, "of the job, all nodes together (1)")->check(CLI::Range(1u, kMostRanks));
  app->add_option("--nodes", request->nodes, "that the ranks are on, equally many on each (1)")
      ->check(CLI::Range(1u, kMostRanks));
  const CLI::IsMember types({"bfloat16", "float16", "float32"});
  app->add_option("--dtype", texts->dtype, "of the parameters that trainers get back (bfloat16)")->check(types);
  app->add_option("--grad", texts->grad, "of the gradients that they hand over (as --dtype)")->check(types);
  app->add_option("--block", texts->block, "parameters a block (1Mi)");
  app->add_option("--workers", request->workers, "Adam workers (as many as the daemon would start for these paths)")
      ->check(CLI::Range(1u, kMostWorkers));
}

Status TakePaths(const std::vector<std::string>& texts, PlanRequest* request) {
  std::set<std::string> names;
  for (const std::string& text : texts) {
    Result<PlanPath> path = ParsePlanPath(text, request->nodes);
    if (!path.ok()) return path.status();
    if (!names.insert(path->name).second) return Refuse(text, "there is another path of that name");
    request->paths.push_back(*path);
  }
  return Status();
}

Status TakeSize(const char* flag, const std::string& text, uint64_t* bytes) {
  if (text.empty()) return Status();
  Result<uint64_t> size = AboveZero(ParseSize(text));
  if (size.ok()) *bytes = *size;
  return size.status().Within(flag);
}

Status TakeSizes(const Texts& texts, PlanRequest* request) {
  Result<uint64_t> parameters = ParseParameters(texts.parameters);
  if (!parameters.ok()) return parameters.status().Within("--params");
  if (*parameters < request->ranks || *parameters > kMostParameters)
    return Status::Invalid("--params " + texts.parameters + ": must be at least one a rank, and at most " +
                           std::to_string(kMostParameters));
  request->parameters = *parameters;
  if (texts.memory.empty() && texts.node_memory.empty())
    return Status::Invalid(
        "--memory is missing: how large the daemon's pool is to be; or --node-memory, to plan with "
        "a quarter of it");
  if (const Status status = TakeSize("--memory", texts.memory, &request->pool_bytes); !status.ok()) return status;
  if (const Status status = TakeSize("--node-memory", texts.node_memory, &request->node_memory_bytes); !status.ok())
    return status;
  if (const Status status = TakeSize("--arenas", texts.arenas, &request->arenas_bytes); !status.ok()) return status;
  if (texts.block.empty()) return Status();
  Config config;
  const Status status = SetAsConfigured(Settings(), "memory.block", texts.block, &config);
  request->block_elements = config.memory.block_elements;
  return status.Within("--block");
}

}  // namespace

Result<PlanPath> ParsePlanPath(std::string_view text, uint32_t nodes) {
  const size_t equals = text.find('=');
  if (equals == std::string_view::npos) return Refuse(text, kPathRule);
  PlanPath path;
  path.name = text.substr(0, equals);
  if (!IsName(path.name)) return Refuse(text, std::string("its name is ") + kNameRule);
  const std::vector<std::string> parts = Split(text.substr(equals + 1), ',');
  if (const Status status = ParseSpeeds(parts[0], &path.speeds); !status.ok()) return Refuse(text, status.message());
  std::set<std::string> keys;
  for (size_t i = 1; i < parts.size(); ++i) {
    const size_t is = parts[i].find('=');
    if (is == std::string::npos) return Refuse(text, "\"" + PlainText(parts[i]) + "\" is no KEY=VALUE");
    const std::string key = parts[i].substr(0, is);
    if (!keys.insert(key).second) return Refuse(text, PlainText(key) + " is there twice");
    const Status status = ParseKey(key, parts[i].substr(is + 1), nodes, &path);
    if (!status.ok()) return Refuse(text, PlainText(key) + " " + status.message());
  }
  return path;
}

Result<PlanRequest> ParsePlanRequest(const std::vector<std::string>& arguments, std::string* output) try {
  CLI::App app(
      "What a model's optimizer state takes of a node, and how long its updates take at best: memory, room on the "
      "paths, bytes and seconds of a step, as the daemon would share them out. Asks no daemon and measures nothing.",
      "mlpo-ctl plan");
  app.footer(
      "A step reads and writes all state that the pool does not hold. Sizes are of one node; forward and backward\n"
      "passes, and what trainers need themselves, come on top.\n"
      "Exit codes: 0 fine, 1 it does not fit, 2 it works badly, 64 wrong usage.");
  Texts texts;
  PlanRequest request;
  AddOptions(&app, &texts, &request);
  bool json = false;  // for mlpo-ctl, which shows a table without it
  app.add_flag("--json", json, "print one JSON object");
  try {
    app.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));
  } catch (const CLI::CallForHelp&) {
    *output = app.help();
    return request;
  } catch (const CLI::ParseError& error) {
    return Status::Invalid(std::string(error.what()) + " (mlpo-ctl plan --help shows how)");
  }
  if (request.ranks % request.nodes != 0)
    return Status::Invalid("--ranks " + std::to_string(request.ranks) + " are not equally many on each of --nodes " +
                           std::to_string(request.nodes));
  request.dtype = TypeNamed(texts.dtype);
  request.grad_dtype = TypeNamed(texts.grad.empty() ? texts.dtype : texts.grad);
  if (const Status status = TakeSizes(texts, &request); !status.ok()) return status;
  if (const Status status = TakePaths(texts.paths, &request); !status.ok()) return status;
  return request;
} catch (const std::exception& error) {
  return Status::Invalid(std::string("command line: ") + error.what());
}

}  // namespace mlpo
