#include "daemon/plan_tool.h"

#include <sysexits.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "daemon/doctor/judge.h"
#include "daemon/plan.h"
#include "daemon/plan_request.h"

namespace mlpo {
namespace {

using nlohmann::ordered_json;

constexpr int kSchemaVersion = 1;

// Numbers that are not known are null; bytes are whole.
template <class Number>
ordered_json Known(Number number) {
  return number > 0 ? ordered_json(number) : ordered_json(nullptr);
}
ordered_json Whole(double bytes) { return static_cast<uint64_t>(bytes); }

ordered_json PathJson(const PlanPath& asked, const Plan::Path& path) {
  const PathParameters& speeds = asked.speeds;
  return {{"name", asked.name},
          {"read_bytes_per_s", speeds.read_bytes_per_s},
          {"write_bytes_per_s", speeds.write_bytes_per_s},
          {"duplex", speeds.duplex},
          {"write_budget_bytes_per_s", Known(speeds.write_budget_bytes_per_s)},
          {"worth_bytes_per_s", path.worth_bytes_per_s},
          {"share", path.share},
          {"step_read_bytes", Whole(path.bytes)},
          {"step_written_bytes", Whole(path.bytes)},
          {"time_s", path.time_s},
          {"limit", path.limit},
          {"capacity_bytes", Known(speeds.capacity_bytes)},
          {"state_bytes", Whole(path.state_bytes)},
          {"reserve_bytes", Whole(path.reserve_bytes)},
          {"steps_to_rating", Known(path.steps_to_rating)},
          {"days_to_rating", Known(path.days_to_rating)}};
}

ordered_json PlanJson(const PlanRequest& request, const Plan& plan) {
  ordered_json report = ordered_json::parse(ReportJson(plan.findings, /*running=*/false));
  ordered_json paths = ordered_json::array();
  for (size_t i = 0; i < plan.paths.size(); ++i) paths.push_back(PathJson(request.paths[i], plan.paths[i]));
  return {{"schema_version", kSchemaVersion},
          {"state", report["state"]},
          {"parameters", request.parameters},
          {"ranks", request.ranks},
          {"nodes", request.nodes},
          {"node_parameters", plan.parameters},
          {"memory",
           {{"pool_bytes", plan.pool_bytes},
            {"buffers", plan.buffers},
            {"arena_bytes", plan.arena_bytes},
            {"pinned_bytes", plan.arena_bytes},
            {"locked_bytes", plan.pool_bytes},
            {"bytes", plan.pool_bytes + plan.arena_bytes},
            {"node_bytes", Known(request.node_memory_bytes)}}},
          {"storage",
           {{"block_elements", request.block_elements},
            {"block_bytes", plan.buffer_bytes},
            {"blocks", plan.blocks},
            {"state_bytes", plan.state_bytes},
            {"checkpoint_bytes", 2 * plan.state_bytes}}},
          {"step",
           {{"cached_share", plan.cached_share},
            {"read_bytes", Whole(plan.bytes)},
            {"written_bytes", Whole(plan.bytes)},
            {"transfer_s", plan.transfer_s},
            {"adam_workers", plan.workers},
            {"adam_s", plan.adam_s},
            {"ideal_s", plan.ideal_s},
            {"parameters_per_s", static_cast<double>(plan.parameters) / plan.ideal_s}}},
          {"paths", std::move(paths)},
          {"findings", std::move(report["findings"])}};
}

}  // namespace

int PlanTool(const std::vector<std::string>& arguments) {
  std::string help;
  Result<PlanRequest> request = ParsePlanRequest(arguments, &help);
  if (!request.ok()) {
    std::fprintf(stderr, "mlpo-daemon: plan: %s\n", request.status().message().c_str());
    return EX_USAGE;
  }
  if (!help.empty()) {
    std::fputs(help.c_str(), stdout);
    return EX_OK;
  }
  const Plan plan = MakePlan(*request);
  std::puts(PlanJson(*request, plan).dump().c_str());
  return std::fflush(stdout) == 0 ? ReportCode(plan.findings) : 1;
}

}  // namespace mlpo
