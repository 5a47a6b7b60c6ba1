// Snapshot to JSON text, cut to what the viewer may see. The names are read by others: only add. Pure.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "daemon/types/gc_report.h"
#include "daemon/types/node_figures.h"
#include "daemon/types/snapshot.h"

namespace mlpo {

// nullopt: everything. Else the sessions of this uid only; totals, paths and pool are for everybody.
using Viewer = std::optional<uint32_t>;

std::string StatusJson(const Snapshot& snapshot, Viewer viewer);
std::string SessionsJson(const Snapshot& snapshot, Viewer viewer);  // {"state", "sessions", "totals"}
std::string PathsJson(const Snapshot& snapshot);                    // {"state", "paths"}
std::string BenchJson(const std::vector<BenchSnapshot>& paths);
std::string GcJson(const GcReport& report);  // {"dry_run", "bytes", "removed", "kept", "failed"}
// {"daemon", "paths": name to [seen_bytes_per_s, busy_s, others_bytes_per_s, step_bytes]}
std::string FiguresJson(const std::string& daemon, const std::vector<std::pair<std::string, NodeFigures>>& paths);
// {"nodes", "granted_bytes_per_s", "total_bytes_per_s"}: null where the figures do not say
std::string ShareJson(uint64_t nodes, double granted_bytes_per_s, double total_bytes_per_s);
std::string VersionJson(const Snapshot& snapshot);                 // {"version", "abi_major", "abi_minor"}
std::string MetricsJson(const Snapshot& snapshot, Viewer viewer);  // {"content_type", "text"}

}  // namespace mlpo
