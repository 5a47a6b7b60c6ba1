#include <utility>  // before Asio of Boost 1.74 in C++20

#include "daemon/node_shares.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <random>

#include "daemon/base/clock.h"
#include "daemon/config/units.h"
#include "daemon/control/status_json.h"
#include "daemon/scheduler/node_split.h"

namespace mlpo {
namespace {

std::string RandomName() {
  std::random_device random;
  char text[17];
  std::snprintf(text, sizeof text, "%08x%08x", random(), random());
  return text;
}

std::string TextOf(const PathConfig& path) {
  if (path.share_rule == ShareRule::kFixed) return FormatNumber(path.share);
  return path.share_rule == ShareRule::kEqual ? "equal" : "measured";
}

}  // namespace

NodeShares::NodeShares(Parts parts)
    : parts_(std::move(parts)), daemon_(RandomName()), granted_(parts_.config->paths.size()) {
  for (const PathConfig& path : parts_.config->paths) any_measured_ |= path.share_rule == ShareRule::kMeasured;
}

bool NodeShares::SeveralUsers() const {
  return !jobs_.empty() && jobs_.begin()->first.first != jobs_.rbegin()->first.first;
}

void NodeShares::SessionReady(const SessionIdentity& identity) {
  Job& job = jobs_[{identity.uid, identity.job}];
  job.nodes.resize(granted_.size());
  job.granted.resize(granted_.size());
  ++job.ranks;
  job.world_size = identity.world_size;
  SetParts();
  SetGrants();
}

void NodeShares::SessionEnded(const SessionIdentity& identity) {
  const auto found = jobs_.find({identity.uid, identity.job});
  if (found == jobs_.end() || --found->second.ranks > 0) return;
  jobs_.erase(found);
  SetGrants();
}

// Of jobs that differ the largest part: what is too much is unlearned in some steps, what is too little takes longer,
// and no user can make a path look slow to others. It stays when sessions end: what is next has the same, or says so.
void NodeShares::SetParts() {
  double part = 0;
  for (const auto& [name, job] : jobs_) part = std::max(part, static_cast<double>(job.ranks) / job.world_size);
  part = std::min(part, 1.0);
  bool changed = false;
  for (size_t i = 0; i < granted_.size(); ++i) {
    if (parts_.config->paths[i].share_rule == ShareRule::kFixed || parts_.records->part(i) == part) continue;
    parts_.records->SetPart(i, part);
    changed = true;
    parts_.loop->Post([this, path = static_cast<PathIndex>(i), parameters = parts_.records->parameters()[i]] {
      parts_.loop->AssumePath(path, parameters);
    });
  }
  if (!changed) return;
  spdlog::info("event=node_part part={:.4f}", part);
  parts_.threads->PostHousekeeping(
      [this, parameters = parts_.records->parameters()] { parts_.storages->SetShares(parameters); });
}

void NodeShares::SetGrants() {
  for (size_t i = 0; i < granted_.size(); ++i) {
    double granted = 0;
    for (const auto& [name, job] : jobs_) {
      if (job.granted[i] <= 0 || SeveralUsers()) continue;
      granted = granted > 0 ? std::min(granted, job.granted[i]) : job.granted[i];
    }
    if (granted == granted_[i]) continue;
    granted_[i] = granted;
    parts_.loop->Post([this, path = static_cast<PathIndex>(i), granted] { parts_.loop->GrantPath(path, granted); });
  }
}

void NodeShares::Figures(uint32_t uid, const std::string& job, std::function<void(Result<std::string>)> answer) {
  if (!jobs_.contains({uid, job})) return answer(Status(-ENOENT, "no session of job '" + job + "' is connected"));
  if (!any_measured_) return answer(FiguresJson(daemon_, {}));
  parts_.take_snapshot([this, answer = std::move(answer)](const Snapshot& snapshot) {
    // Three FP32 arrays; what the pool has of them is neither read nor written in a step.
    const double state_bytes = 3 * sizeof(float) * static_cast<double>(snapshot.total_parameters);
    const auto kept_bytes = static_cast<double>(snapshot.pool.buffers * snapshot.pool.buffer_bytes);
    double all_bytes_per_s = 0;
    for (const PathSnapshot& path : snapshot.paths) all_bytes_per_s += path.worth_bytes_per_s;
    std::vector<std::pair<std::string, NodeFigures>> figures;
    for (size_t i = 0; i < snapshot.paths.size(); ++i) {
      if (parts_.config->paths[i].share_rule != ShareRule::kMeasured) continue;
      const PathSnapshot& path = snapshot.paths[i];
      NodeFigures mine;
      mine.seen_bytes_per_s = path.seen_bytes_per_s;
      mine.busy_s = Seconds(path.busy_ns);
      mine.others_bytes_per_s = std::max(0.0, all_bytes_per_s - path.worth_bytes_per_s);
      mine.step_bytes = std::max(0.0, state_bytes - kept_bytes);
      figures.emplace_back(path.name, mine);
    }
    answer(FiguresJson(daemon_, figures));
  });
}

void NodeShares::Tell(const ShareRequest& request, const std::function<void(Result<std::string>)>& answer) {
  const auto job = jobs_.find({request.uid, request.job});
  if (job == jobs_.end()) return answer(Status(-ENOENT, "no session of job '" + request.job + "' is connected"));
  const std::vector<PathConfig>& paths = parts_.config->paths;
  const auto named =
      std::find_if(paths.begin(), paths.end(), [&](const PathConfig& each) { return each.name == request.path; });
  if (named == paths.end() || named->share_rule != ShareRule::kMeasured)
    return answer(Status::Invalid("there is no path '" + request.path + "' with share = \"measured\""));
  if (SeveralUsers())
    return answer(Status(-EBUSY, "several users have sessions here: what a node takes of path '" + request.path +
                                     "' follows from what it sees of it alone"));
  const PathSplit split = SplitPath(request.nodes);
  const double granted = split.bytes_per_s.empty() ? 0 : split.bytes_per_s[request.me];
  const auto path = static_cast<size_t>(named - paths.begin());
  job->second.nodes[path] = static_cast<uint32_t>(request.nodes.size());
  // Figures that say nothing leave what was granted before.
  if (granted > 0) job->second.granted[path] = granted;
  SetGrants();
  spdlog::debug("event=node_share path={} nodes={} granted_bytes_per_s={:.0f} of={:.0f}", request.path,
                request.nodes.size(), granted, split.total_bytes_per_s);
  answer(ShareJson(request.nodes.size(), granted, split.total_bytes_per_s));
}

void NodeShares::Fill(Snapshot* snapshot) const {
  for (size_t i = 0; i < snapshot->paths.size(); ++i) {
    const PathConfig& config = parts_.config->paths[i];
    PathSnapshot& path = snapshot->paths[i];
    path.node_share = TextOf(config);
    path.node_part = parts_.records->part(i);
    for (const auto& [name, job] : jobs_) path.nodes = std::max(path.nodes, job.nodes[i]);
  }
}

}  // namespace mlpo
