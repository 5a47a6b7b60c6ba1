#include "daemon/scheduler/node_split.h"

#include <algorithm>
#include <cstddef>

namespace mlpo {
namespace {

constexpr double kLeast = 0.02;  // of an equal part

}  // namespace

PathSplit SplitPath(const std::vector<NodeFigures>& nodes) {
  double longest_s = 0;
  for (const NodeFigures& node : nodes) longest_s = std::max(longest_s, node.busy_s);
  if (longest_s <= 0) return {};
  PathSplit split;
  double bytes = 0, others = 0;
  std::vector<bool> takes;
  for (const NodeFigures& node : nodes) {
    if (node.busy_s > 0 && node.seen_bytes_per_s <= 0) return {};  // it has not learned yet what the path does
    split.total_bytes_per_s += node.seen_bytes_per_s * (node.busy_s / longest_s);
    takes.push_back(node.step_bytes > 0);
    if (!takes.back()) continue;
    bytes += node.step_bytes;
    others += node.others_bytes_per_s;
  }
  if (bytes <= 0) return {};
  // Who would need less than nothing is left out. That makes the step longer, so nobody comes back in; and not all can
  // be left out, since those that are in share B.
  double step_s = 0;
  for (bool again = true; again;) {
    again = false;
    step_s = bytes / (others + split.total_bytes_per_s);
    for (size_t i = 0; i < nodes.size(); ++i) {
      if (!takes[i] || nodes[i].step_bytes >= nodes[i].others_bytes_per_s * step_s) continue;
      takes[i] = false;
      bytes -= nodes[i].step_bytes;
      others -= nodes[i].others_bytes_per_s;
      again = true;
    }
  }
  const double least = kLeast * split.total_bytes_per_s / static_cast<double>(nodes.size());
  for (size_t i = 0; i < nodes.size(); ++i) {
    const double wanted = takes[i] ? nodes[i].step_bytes / step_s - nodes[i].others_bytes_per_s : 0;
    split.bytes_per_s.push_back(std::max(wanted, least));
  }
  return split;
}

}  // namespace mlpo
