// NodeFigures: what a node tells the others of a path that they share, and of what it has besides.
#pragma once

namespace mlpo {

struct NodeFigures {
  double seen_bytes_per_s = 0;    // what it gets of the path while that is busy, read and written at once; 0: not known
  double busy_s = 0;              // the path was: in all, or between two exchanges
  double others_bytes_per_s = 0;  // what its other paths are worth
  double step_bytes = 0;          // that a step of it reads, and writes
};

}  // namespace mlpo
