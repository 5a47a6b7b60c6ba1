// SplitPath: how much of a path that several nodes share each of them is to take, so that a step, which ends with its
// slowest node, is as short as can be.
//
// Node i has S_i bytes to read and write in a step, paths of its own that are worth L_i, and b_i of the shared path,
// which is worth B: its step takes S_i / (L_i + b_i). The longest is shortest where all that have any of the path take
// the same time T, so b_i = max(0, S_i / T - L_i) with sum(b) = B.
//
// B is what the nodes saw of the path, each for as long as it used it: sum(seen_i * busy_i) / max(busy). Steps begin
// together, so a node that was done earlier left the path to the others for the rest, and what these saw has that in
// it. (Bytes by time would be too little where the path was not what a step waited for, and that would lower what is
// placed there, and so the next figures.)
//
// Pure.
#pragma once

#include <vector>

#include "daemon/types/node_figures.h"

namespace mlpo {

struct PathSplit {
  double total_bytes_per_s = 0;     // B
  std::vector<double> bytes_per_s;  // per node, above 0: who is to have nothing keeps enough to see what it does.
                                    // Empty: the figures do not say
};

// `nodes`: with what they were busy since the last time. Figures are finite and not negative.
PathSplit SplitPath(const std::vector<NodeFigures>& nodes);

}  // namespace mlpo
