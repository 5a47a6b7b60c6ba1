// Reading and writing state, through the staging area.
#include <errno.h>

#include "client/src/error.h"
#include "client/src/session.h"
#include "client/src/staging.h"
#include "client/src/stream.h"
#include "client/src/subgroup.h"
#include "proto/command.h"

namespace mlpo::client {
namespace {

int StreamState(mlpo_subgroup* subgroup, const StreamArrays& arrays, uint64_t first, uint64_t count, bool write,
                int64_t timeout_ns) {
  const Deadline deadline = Deadline::In(timeout_ns);
  Staging& staging = subgroup->client->staging;
  TurnHolder turn(staging.turn(), deadline);
  if (!turn.held()) return Fail(-ETIMEDOUT, "another thread's reading or writing of state or objects still runs");
  if (int code = staging.Open(subgroup->client, deadline); code != 0) return code;
  mlpo_submission each = {};
  each.op = write ? MLPO_OP_WRITE_STATE : MLPO_OP_READ_STATE;
  each.subgroup = subgroup->handle;
  each.arg = arrays.mask;
  each.first = first;
  return Stream(subgroup->client, subgroup, arrays, each, count, write, deadline).Run();
}

int CheckRange(uint64_t first, uint64_t count, uint64_t limit, const char* what) {
  if (first <= limit && count <= limit - first) return 0;
  return Fail(-EINVAL, "[%llu, +%llu) of a subgroup of %llu %s", static_cast<unsigned long long>(first),
              static_cast<unsigned long long>(count), static_cast<unsigned long long>(limit), what);
}

int MoveState(mlpo_subgroup* subgroup, uint64_t first, uint64_t count, const StreamArrays& arrays, bool write,
              int64_t timeout_ns) {
  if (int code = CheckRange(first, count, subgroup->numel, "elements"); code != 0) return code;
  if (count == 0) return 0;  // an empty array may well be NULL
  if (arrays.mask == 0) return Fail(-EINVAL, "no part of the state is asked for");
  return StreamState(subgroup, arrays, first, count, write, timeout_ns);
}

int MoveSteps(mlpo_subgroup* subgroup, uint32_t first, uint32_t count, const int64_t* steps, bool write,
              int64_t timeout_ns) {
  if (subgroup == nullptr || steps == nullptr) return Fail(-EINVAL, "subgroup or steps is NULL");
  if (int code = subgroup->client->CheckProcess(); code != 0) return code;
  if (int code = CheckRange(first, count, subgroup->tensor_count, "tensors"); code != 0) return code;
  for (uint32_t i = 0; write && i < count; ++i) {
    if (steps[i] < 0) return Fail(-EINVAL, "steps[%u] is %lld", i, static_cast<long long>(steps[i]));
  }
  if (count == 0) return 0;
  StreamArrays arrays;
  arrays.Add(MLPO_PART_STEP, steps);
  arrays.item_bytes = sizeof *steps;
  return StreamState(subgroup, arrays, first, count, write, timeout_ns);
}

StreamArrays Collect(const float* master, const float* exp_avg, const float* exp_avg_sq) {
  StreamArrays arrays;
  arrays.Add(MLPO_PART_MASTER, master);
  arrays.Add(MLPO_PART_EXP_AVG, exp_avg);
  arrays.Add(MLPO_PART_EXP_AVG_SQ, exp_avg_sq);
  return arrays;
}

}  // namespace
}  // namespace mlpo::client

using mlpo::client::Fail;

extern "C" {

int mlpo_read_state(mlpo_subgroup* subgroup, uint64_t first, uint64_t count, float* master, float* exp_avg,
                    float* exp_avg_sq, int64_t timeout_ns) {
  if (subgroup == nullptr) return Fail(-EINVAL, "subgroup is NULL");
  if (int code = subgroup->client->CheckProcess(); code != 0) return code;
  return mlpo::client::MoveState(subgroup, first, count, mlpo::client::Collect(master, exp_avg, exp_avg_sq),
                                 /*write=*/false, timeout_ns);
}

int mlpo_write_state(mlpo_subgroup* subgroup, uint64_t first, uint64_t count, const float* master, const float* exp_avg,
                     const float* exp_avg_sq, int64_t timeout_ns) {
  if (subgroup == nullptr) return Fail(-EINVAL, "subgroup is NULL");
  if (int code = subgroup->client->CheckProcess(); code != 0) return code;
  return mlpo::client::MoveState(subgroup, first, count, mlpo::client::Collect(master, exp_avg, exp_avg_sq),
                                 /*write=*/true, timeout_ns);
}

int mlpo_read_steps(mlpo_subgroup* subgroup, uint32_t first, uint32_t count, int64_t* steps, int64_t timeout_ns) {
  return mlpo::client::MoveSteps(subgroup, first, count, steps, /*write=*/false, timeout_ns);
}

int mlpo_write_steps(mlpo_subgroup* subgroup, uint32_t first, uint32_t count, const int64_t* steps,
                     int64_t timeout_ns) {
  return mlpo::client::MoveSteps(subgroup, first, count, steps, /*write=*/true, timeout_ns);
}

}  // extern "C"
