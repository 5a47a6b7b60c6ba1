#include "daemon/control/status_json.h"

#include <nlohmann/json.hpp>

#include "daemon/control/metrics.h"
#include "proto/abi.h"

namespace mlpo {
namespace {

using nlohmann::ordered_json;

std::string Dump(const ordered_json& value) {
  return value.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
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
                   {"submissions", s.submissions}});
  }
  return all;
}

ordered_json Totals(const Snapshot& snapshot) {
  return {{"sessions", snapshot.total_sessions}, {"parameters", snapshot.total_parameters}};
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
                   {"in_flight", p.in_flight}});
  }
  return all;
}

ordered_json Pool(const PoolSnapshot& pool) {
  return {{"bytes", pool.bytes},
          {"buffer_bytes", pool.buffer_bytes},
          {"buffers", pool.buffers},
          {"cached_blocks", pool.cached_blocks},
          {"dirty_blocks", pool.dirty_blocks},
          {"free_blocks", pool.free_blocks},
          {"locked", pool.locked},
          {"huge_pages", pool.huge_pages}};
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
               {"protocol_errors", s.protocol_errors},
               {"lost_wakeups", s.lost_wakeups},
               {"arenas_bytes", s.arenas_bytes},
               {"arenas_limit_bytes", s.arenas_limit_bytes},
               {"totals", Totals(s)},
               {"sessions", Sessions(s, viewer)},
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

std::string VersionJson(const Snapshot& s) {
  return Dump({{"version", s.version}, {"abi_major", MLPO_ABI_MAJOR}, {"abi_minor", MLPO_ABI_MINOR}});
}

}  // namespace mlpo
