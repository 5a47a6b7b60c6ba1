// NumaNode: a node of the machine as far as this process may use it. Found by adam/cores (hwloc), used by io's pool.
#pragma once

#include <vector>

namespace mlpo {

struct NumaNode {
  int id = -1;            // the kernel's number
  std::vector<int> cpus;  // of this node, that we may run on; empty: none (a node of memory only)
  bool memory = true;     // it has some, and we may take it
};

}  // namespace mlpo
