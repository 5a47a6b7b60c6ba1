#include "client/ctl/plan.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>

#include "client/ctl/answer.h"
#include "client/ctl/child.h"
#include "client/ctl/exit_code.h"
#include "client/ctl/findings.h"
#include "client/ctl/output_of.h"
#include "client/ctl/table.h"

namespace mlpo::ctl {
namespace {

using nlohmann::json;

constexpr auto kPatience = std::chrono::seconds(60);

std::string Fixed(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}
std::string Percent(double part) { return Fixed(100 * part, 1) + "%"; }
json Object(const json& report, const char* name) { return Member(report, name, json::value_t::object); }

void PrintPaths(const json& report) {
  Table table({"PATH", ">READING", ">WRITING", ">DUPLEX", ">AT ONCE", ">SHARE", ">A STEP", ">TAKES", "LIMIT", ">STATE",
               ">RESERVED"});
  for (const json& path : Member(report, "paths", json::value_t::array)) {
    if (!path.is_object()) continue;
    table.Add({Text(path, "name"), BytesPerS(Number(path, "read_bytes_per_s")),
               BytesPerS(Number(path, "write_bytes_per_s")), Fixed(Number(path, "duplex"), 2),
               BytesPerS(Number(path, "worth_bytes_per_s")), Percent(Number(path, "share")),
               Bytes(Number(path, "step_read_bytes")), Seconds(Number(path, "time_s")), Text(path, "limit"),
               Bytes(Number(path, "state_bytes")), Bytes(Number(path, "reserve_bytes"))});
  }
  std::printf("%s", table.Text().c_str());
  for (const json& path : Member(report, "paths", json::value_t::array)) {
    if (!path.is_object() || Number(path, "steps_to_rating") <= 0) continue;
    std::printf("%s: written as often as it is rated for after %.0f steps, %.0f days without a pause\n",
                Text(path, "name").c_str(), Number(path, "steps_to_rating"), Number(path, "days_to_rating"));
  }
}

void Print(const json& report) {
  const json memory = Object(report, "memory"), storage = Object(report, "storage"), step = Object(report, "step");
  const uint64_t nodes = Whole(report, "nodes"), ranks = Whole(report, "ranks");
  std::printf("model: %s parameters, %llu %s", Count(Whole(report, "parameters")).c_str(),
              static_cast<unsigned long long>(ranks), ranks == 1 ? "rank" : "ranks");
  if (nodes > 1)
    std::printf(" on %llu nodes; of each, with %s parameters:", static_cast<unsigned long long>(nodes),
                Count(Whole(report, "node_parameters")).c_str());
  std::printf("\nmemory: %s: pool %s (locked) and arenas %s (pinned where the trainers have GPUs)\n",
              Bytes(Number(memory, "bytes")).c_str(), Bytes(Number(memory, "pool_bytes")).c_str(),
              Bytes(Number(memory, "arena_bytes")).c_str());
  std::printf("storage: %s of state; %s while a checkpoint is saved\n\n", Bytes(Number(storage, "state_bytes")).c_str(),
              Bytes(Number(storage, "checkpoint_bytes")).c_str());
  PrintPaths(report);
  std::printf(
      "\nstep: %s at best: %s of the state stay in the pool; %s are read, and as many written, in %s; Adam "
      "takes %s on %llu workers\n",
      Seconds(Number(step, "ideal_s")).c_str(), Percent(Number(step, "cached_share")).c_str(),
      Bytes(Number(step, "read_bytes")).c_str(), Seconds(Number(step, "transfer_s")).c_str(),
      Seconds(Number(step, "adam_s")).c_str(), static_cast<unsigned long long>(Whole(step, "adam_workers")));
  PrintFindings(report);
}

}  // namespace

int PlanNode(const std::vector<std::string>& arguments) {
  const auto has = [&](const char* flag) {
    return std::find(arguments.begin(), arguments.end(), flag) != arguments.end();
  };
  std::vector<std::string> command = {DaemonBinary(), "plan"};
  command.insert(command.end(), arguments.begin(), arguments.end());
  if (has("--json") || has("--help") || has("-h")) return BecomeProgram(command);
  int code = kFailed;
  const std::optional<std::string> output = OutputOf(command, std::chrono::steady_clock::now() + kPatience, &code);
  if (!output) return code;
  if (output->empty()) return code == kFine ? kFailed : code;  // wrong flags: it has said why
  const json report = json::parse(*output, nullptr, /*allow_exceptions=*/false);
  const std::optional<int> found = CodeOfFindings(report);
  if (!found) {
    std::fprintf(stderr, "mlpo-ctl: %s plan gives no plan: are both of one version?\n", Safe(command[0]).c_str());
    return kFailed;
  }
  Print(report);
  return *found;
}

}  // namespace mlpo::ctl
