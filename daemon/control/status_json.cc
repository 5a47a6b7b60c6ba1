#include "daemon/control/status_json.h"

#include <nlohmann/json.hpp>
#include <system_error>

#include "daemon/base/clock.h"
#include "daemon/control/metrics.h"
#include "proto/abi.h"

namespace mlpo {
namespace {

using nlohmann::ordered_json;

std::string Dump(const ordered_json& value) {
  return value.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
}

// Into `to`, as "adam_s" and so on.
void AddSums(const StepSums& sums, ordered_json* to) {
  for (size_t i = 0; i < kStepParts; ++i) (*to)[std::string(kStepPartNames[i]) + "_s"] = Seconds(sums.parts_ns[i]);
  (*to)["grads"] = sums.grads;
  (*to)["updates"] = sums.updates;
  (*to)["blocks"] = sums.blocks;
  (*to)["cached_blocks"] = sums.cached_blocks;
  (*to)["prefetched_blocks"] = sums.prefetched_blocks;
  (*to)["read_blocks"] = sums.read_blocks;
}

ordered_json Step(const StepRecord& step, const Snapshot& snapshot) {
  ordered_json all = {{"number", step.number},
                      {"epoch", step.epoch},
                      {"skipped", step.skipped},
                      {"ago_s", Seconds(snapshot.taken_ns - step.ended_ns)},
                      {"time_s", Seconds(step.ended_ns - step.began_ns)},
                      {"period_s", Seconds(step.period_ns)}};
  AddSums(step, &all);
  all["paths"] = ordered_json::array();
  for (size_t i = 0; i < step.paths.size() && i < snapshot.paths.size(); ++i) {
    const PathUse& use = step.paths[i];
    all["paths"].push_back({{"name", snapshot.paths[i].name},
                            {"read_bytes", use.read_bytes},
                            {"written_bytes", use.written_bytes},
                            {"read_busy_s", Seconds(use.read_busy_ns)},
                            {"write_busy_s", Seconds(use.write_busy_ns)},
                            {"busy_s", Seconds(use.busy_ns)}});
  }
  return all;
}

ordered_json Steps(const Snapshot& snapshot) {
  const StepTotals& steps = snapshot.steps;
  ordered_json all = {{"ended", steps.ended}, {"skipped", steps.skipped}, {"time_s", Seconds(steps.time_ns)}};
  AddSums(steps, &all);
  return all;
}

ordered_json Sessions(const Snapshot& snapshot, Viewer viewer) {
  ordered_json all = ordered_json::array();
  for (const SessionSnapshot& s : snapshot.sessions) {
    if (viewer && s.uid != *viewer) continue;
    all.push_back({{"id", s.id},
                   {"job", s.job},
                   {"rank", s.rank},
                   {"world_size", s.world_size},
                   {"pid", s.pid},
                   {"uid", s.uid},
                   {"generation", s.generation},
                   {"epoch", s.epoch},
                   {"subgroups", s.subgroups},
                   {"parameters", s.parameters},
                   {"skipped_steps", s.skipped_steps},
                   {"arena_bytes", s.arena_bytes},
                   {"requests_in_flight", s.requests_in_flight},
                   {"submissions", s.submissions},
                   {"step", s.step ? Step(*s.step, snapshot) : ordered_json()},
                   {"last_step", s.steps.empty() ? ordered_json() : Step(s.steps.back(), snapshot)},
                   {"steps", ordered_json::array()}});
    for (const StepRecord& step : s.steps) all.back()["steps"].push_back(Step(step, snapshot));
  }
  return all;
}

ordered_json Quotas(const Snapshot& snapshot, Viewer viewer) {
  ordered_json all = ordered_json::array();
  for (const QuotaSnapshot& q : snapshot.quotas) {
    if (viewer && q.uid != *viewer) continue;
    ordered_json entry = {{"uid", q.uid}, {"job", q.job.empty() ? ordered_json() : ordered_json(q.job)}};
    for (const QuotaSnapshot::Amount& amount : q.amounts)
      entry[amount.name] = {{"used", amount.used}, {"limit", amount.limit}};
    all.push_back(std::move(entry));
  }
  return all;
}

ordered_json Checkpoints(const Snapshot& snapshot, Viewer viewer) {
  ordered_json running = ordered_json::array();
  for (const CheckpointSnapshot& c : snapshot.checkpoints) {
    if (viewer && c.uid != *viewer) continue;
    running.push_back({{"job", c.job},
                       {"uid", c.uid},
                       {"rank", c.rank},
                       {"directory", c.directory},
                       {"tag", c.tag},
                       {"step", c.step},
                       {"phase", c.phase},
                       {"bytes", c.bytes},
                       {"copied_bytes", c.copied_bytes},
                       {"bytes_per_s", c.bytes_per_s},
                       {"left_s", c.left_s},
                       {"bound_s", c.bound_s}});
  }
  const CheckpointTotals& totals = snapshot.checkpoint_totals;
  return {{"begun", totals.begun},
          {"saved", totals.saved},
          {"failed", totals.failed},
          {"copied_bytes", totals.copied_bytes},
          {"running", std::move(running)}};
}

ordered_json Totals(const Snapshot& snapshot) {
  return {{"sessions", snapshot.total_sessions}, {"parameters", snapshot.total_parameters}};
}

double StateSeconds(const Snapshot& snapshot, const PathSnapshot& p) {
  return p.state_since_ns == 0 ? snapshot.uptime_s : Seconds(snapshot.taken_ns - p.state_since_ns);
}

ordered_json Evacuation(const PathSnapshot& p) {
  if (!p.evacuating) return nullptr;
  return {{"total_bytes", p.evacuation_bytes},
          {"left_bytes", p.scratch_bytes + p.checkpoint_bytes},
          {"unreadable_blocks", p.unreadable_blocks},
          {"done", p.evacuated}};
}

ordered_json Known(double bytes_per_s) { return bytes_per_s > 0 ? ordered_json(bytes_per_s) : ordered_json(); }

ordered_json NodeShare(const PathSnapshot& p) {
  return {{"share", p.node_share},
          {"part", p.node_part},
          {"nodes", p.nodes},
          {"seen_bytes_per_s", p.seen_bytes_per_s},
          {"granted_bytes_per_s", Known(p.granted_bytes_per_s)}};
}

ordered_json Paths(const Snapshot& snapshot) {
  ordered_json all = ordered_json::array();
  for (const PathSnapshot& p : snapshot.paths) {
    all.push_back({{"name", p.name},
                   {"directory", p.directory},
                   {"state", p.state},
                   {"engine", p.engine},
                   {"direct_io", p.direct_io},
                   {"registered_buffers", p.registered_buffers},
                   {"read_bytes", p.read_bytes},
                   {"written_bytes", p.written_bytes},
                   {"read_bytes_per_s", p.read_bytes_per_s},
                   {"write_bytes_per_s", p.write_bytes_per_s},
                   {"scratch_bytes", p.scratch_bytes},
                   {"checkpoint_bytes", p.checkpoint_bytes},
                   {"read_errors", p.read_errors},
                   {"write_errors", p.write_errors},
                   {"checksum_mismatches", p.checksum_mismatches},
                   {"checksum_errors", p.checksum_errors},
                   {"in_flight", p.in_flight},
                   {"error", p.error == 0 ? "" : std::generic_category().message(p.error)},
                   {"state_s", StateSeconds(snapshot, p)},
                   {"probes", p.probes},
                   {"failed_probes", p.failed_probes},
                   {"evacuation", Evacuation(p)},
                   {"read_busy_s", Seconds(p.read_busy_ns)},
                   {"write_busy_s", Seconds(p.write_busy_ns)},
                   {"busy_s", Seconds(p.busy_ns)},
                   {"read_limit", p.read_limit},
                   {"write_limit", p.write_limit},
                   {"lifetime_written_bytes", p.lifetime_written_bytes},
                   {"node_share", NodeShare(p)},
                   {"model",
                    {{"read_bytes_per_s", p.read_limit},
                     {"write_bytes_per_s", p.write_limit},
                     {"duplex", p.duplex},
                     {"worth_bytes_per_s", p.worth_bytes_per_s},
                     {"share", p.share},
                     {"from", p.speeds_from},
                     {"read_queue_blocks", p.read_queue_blocks},
                     {"write_queue_blocks", p.write_queue_blocks}}}});
  }
  return all;
}

ordered_json Pool(const PoolSnapshot& pool) {
  ordered_json nodes = ordered_json::array();
  for (const PoolNode& node : pool.nodes) nodes.push_back({{"node", node.id}, {"buffers", node.buffers}});
  return {{"bytes", pool.bytes},
          {"buffer_bytes", pool.buffer_bytes},
          {"buffers", pool.buffers},
          {"cached_blocks", pool.cached_blocks},
          {"dirty_blocks", pool.dirty_blocks},
          {"free_blocks", pool.free_blocks},
          {"locked", pool.locked},
          {"huge_pages", pool.huge_pages},
          {"huge_bytes", pool.huge_bytes},
          {"growing", pool.growing},
          {"nodes", std::move(nodes)}};
}

}  // namespace

std::string StatusJson(const Snapshot& s, Viewer viewer) {
  return Dump({{"state", s.state},
               {"version", s.version},
               {"node", s.node},
               {"socket", s.socket},
               {"pid", s.pid},
               {"uptime_s", s.uptime_s},
               {"adam_target", s.adam_target},
               {"adam_workers", s.adam_workers},
               {"workers_busy_s", Seconds(s.workers_busy_ns)},
               {"steps", Steps(s)},
               {"protocol_errors", s.protocol_errors},
               {"lost_wakeups", s.lost_wakeups},
               {"log_lines_dropped", s.log_lines_dropped},
               {"arenas_bytes", s.arenas_bytes},
               {"arenas_limit_bytes", s.arenas_limit_bytes},
               {"totals", Totals(s)},
               {"sessions", Sessions(s, viewer)},
               {"quotas", Quotas(s, viewer)},
               {"checkpoints", Checkpoints(s, viewer)},
               {"paths", Paths(s)},
               {"pool", Pool(s.pool)}});
}

std::string SessionsJson(const Snapshot& s, Viewer viewer) {
  return Dump({{"state", s.state}, {"totals", Totals(s)}, {"sessions", Sessions(s, viewer)}});
}

std::string PathsJson(const Snapshot& s) { return Dump({{"state", s.state}, {"paths", Paths(s)}}); }

std::string MetricsJson(const Snapshot& s, Viewer viewer) {
  return Dump({{"content_type", "text/plain; version=0.0.4; charset=utf-8"}, {"text", MetricsText(s, viewer)}});
}

std::string GcJson(const GcReport& report) {
  const auto items = [](const std::vector<GcItem>& all) {
    ordered_json array = ordered_json::array();
    for (const GcItem& item : all) array.push_back({{"file", item.file}, {"bytes", item.bytes}, {"why", item.why}});
    return array;
  };
  return Dump({{"dry_run", report.dry_run},
               {"bytes", report.removed_bytes()},
               {"removed", items(report.removed)},
               {"kept", items(report.kept)},
               {"failed", items(report.failed)}});
}

std::string BenchJson(const std::vector<BenchSnapshot>& paths) {
  ordered_json all = ordered_json::array();
  for (const BenchSnapshot& p : paths) {
    all.push_back({{"name", p.name},
                   {"read_bytes_per_s", p.read_bytes_per_s},
                   {"write_bytes_per_s", p.write_bytes_per_s},
                   {"duplex", p.duplex},
                   {"mixed_bytes_per_s", p.mixed_bytes_per_s},
                   {"together_bytes_per_s", p.together_bytes_per_s},
                   {"read_depth_bytes", p.read_depth_bytes},
                   {"write_depth_bytes", p.write_depth_bytes},
                   {"from", p.speeds_from},
                   {"not_saved", p.not_saved}});
  }
  return Dump({{"paths", all}});
}

std::string FiguresJson(const std::string& daemon, const std::vector<std::pair<std::string, NodeFigures>>& paths) {
  ordered_json all = ordered_json::object();
  for (const auto& [name, p] : paths) all[name] = {p.seen_bytes_per_s, p.busy_s, p.others_bytes_per_s, p.step_bytes};
  return Dump({{"daemon", daemon}, {"paths", std::move(all)}});
}

std::string ShareJson(uint64_t nodes, double granted_bytes_per_s, double total_bytes_per_s) {
  return Dump({{"nodes", nodes},
               {"granted_bytes_per_s", Known(granted_bytes_per_s)},
               {"total_bytes_per_s", Known(total_bytes_per_s)}});
}

std::string VersionJson(const Snapshot& s) {
  return Dump({{"version", s.version}, {"abi_major", MLPO_ABI_MAJOR}, {"abi_minor", MLPO_ABI_MINOR}});
}

}  // namespace mlpo
