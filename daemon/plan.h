// Plan: what a model's optimizer state takes of a node, and how long its updates take at best: memory, room on each
// path, bytes and seconds of a step. By the scheduler's path model; no measurement, no system call. Pure.
//
// The state is blocks * buffer bytes; the pool keeps as many blocks as it has buffers, and each other block is read and
// written once a step. What is moved is split among the paths as the scheduler splits it, and
//
//     ideal = max(longest of moved_i / e_i, parameters / (workers * speed of a worker))       seconds
//
// with e of path_model.h. So it is what mlpo-bench train calls ideal_s: no step is shorter, and measured ones are a few
// percent longer (tests/bench/README.md). Forward and backward passes are not in it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "daemon/doctor/judge.h"
#include "daemon/scheduler/path_model.h"
#include "proto/tensor.h"

namespace mlpo {

struct PlanPath {
  std::string name;
  PathParameters speeds;     // this node's part of them; capacity_bytes and write_budget_bytes_per_s count, too
  uint64_t rated_bytes = 0;  // that may be written to the drive in its life; 0: not said
};

struct PlanRequest {
  uint64_t parameters = 0;  // of all ranks together, above 0
  uint32_t ranks = 1;       // of all nodes together, with equal parts of the state
  uint32_t nodes = 1;       // divides `ranks`
  mlpo_dtype dtype = MLPO_BFLOAT16;
  mlpo_dtype grad_dtype = MLPO_BFLOAT16;
  uint64_t pool_bytes = 0;         // 0: as the daemon chooses, a quarter of node_memory_bytes
  uint64_t node_memory_bytes = 0;  // available for pool and arenas; 0: not said
  uint64_t arenas_bytes = 0;       // that arenas may take; 0: as the daemon chooses, half of what the pool leaves
  uint64_t block_elements = 1u << 20;
  uint32_t workers = 0;         // of Adam; 0: as the daemon chooses where it has the cores
  std::vector<PlanPath> paths;  // at least one, with both speeds above 0
};

// Of a node. Bytes and seconds without another word are those of a step.
struct Plan {
  struct Path {
    double worth_bytes_per_s = 0;  // e: read and written at once
    double share = 0;              // of what is moved
    double bytes = 0;              // read, and as many written
    double time_s = 0;
    const char* limit = "";      // what it waits for: reading, writing, both
    double state_bytes = 0;      // of the whole state, if nothing was kept in memory
    double reserve_bytes = 0;    // that the daemon reserves, if there is so much
    double steps_to_rating = 0;  // 0: nothing is written, or the rating was not said
    double days_to_rating = 0;   // if step follows step
  };

  uint64_t parameters = 0;
  uint64_t blocks = 0;
  uint64_t buffer_bytes = 0;  // of a block
  uint64_t state_bytes = 0;   // of all blocks
  uint64_t pool_bytes = 0;
  uint64_t buffers = 0;
  uint64_t arena_bytes = 0;  // of all ranks of the node
  double cached_share = 0;   // of the state
  double bytes = 0;          // read, and as many written
  double transfer_s = 0;
  uint32_t workers = 0;
  double adam_s = 0;
  double ideal_s = 0;
  std::vector<Path> paths;
  std::vector<Finding> findings;  // what cannot be or is not good, with what to do about it; none if all is well
};

Plan MakePlan(const PlanRequest& request);

}  // namespace mlpo
