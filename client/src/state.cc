// Reading and writing state: chunks stream through the two halves of the staging area.
#include <errno.h>
#include <string.h>

#include "client/src/error.h"
#include "client/src/session.h"
#include "client/src/staging.h"
#include "client/src/subgroup.h"
#include "client/src/submit.h"
#include "proto/command.h"

namespace mlpo::client {
namespace {

// The caller's arrays: up to three of FP32, or one of int64 steps.
struct StateArrays {
  std::byte* parts[3] = {};  // only read from when writing state
  uint32_t count = 0;
  uint32_t mask = 0;
  uint64_t item_bytes = 4;

  void Add(uint32_t part, const void* array) {
    if (array == nullptr) return;
    parts[count++] = const_cast<std::byte*>(static_cast<const std::byte*>(array));
    mask |= part;
  }
};

struct Chunk {
  uint64_t done = 0;   // items of the range that come before it
  uint64_t items = 0;  // 0: none
};

// One call of read_state, write_state, read_steps or write_steps. The staging turn is held.
class Stream {
 public:
  Stream(mlpo_subgroup* subgroup, const StateArrays& arrays, uint64_t first, uint64_t count, bool write,
         Deadline deadline)
      : subgroup_(subgroup),
        staging_(subgroup->client->staging),
        arrays_(arrays),
        first_(first),
        count_(count),
        write_(write),
        deadline_(deadline) {}

  int Run() {
    const uint64_t most = staging_.half_bytes() / (arrays_.count * arrays_.item_bytes);
    int code = 0;
    int turn = 0;
    for (uint64_t done = 0; done < count_ && code == 0; ++turn) {
      code = Finish(turn);  // what used this half before
      if (code != 0) break;
      const Chunk chunk = {done, count_ - done < most ? count_ - done : most};
      code = Begin(turn, chunk);
      done += chunk.items;
    }
    // Both halves, whatever happened: the daemon is to be out of them, and the first failure is told.
    Failure first;
    if (code != 0) first.SetFromLast(code);
    for (int i = 0; i < 2; ++i, ++turn) {
      const int ended = Finish(turn);
      if (first.code == 0 && ended != 0) first.SetFromLast(ended);
    }
    return first.code == 0 ? 0 : first.Report();
  }

 private:
  // Waits for the half's chunk of this call and copies what it brought.
  int Finish(int turn) {
    Staging::Half& half = staging_.half(turn);
    Chunk& chunk = chunks_[turn & 1];
    if (half.pending == nullptr) return 0;
    const int code = Staging::Settle(&half, deadline_);
    if (code == 0 && !write_) Copy(half, chunk, /*into_staging=*/false);
    chunk.items = 0;
    return code;
  }

  int Begin(int turn, const Chunk& chunk) {
    Staging::Half& half = staging_.half(turn);
    if (write_) Copy(half, chunk, /*into_staging=*/true);
    mlpo_submission submission = {};
    submission.op = write_ ? MLPO_OP_WRITE_STATE : MLPO_OP_READ_STATE;
    submission.subgroup = subgroup_->handle;
    submission.arg = arrays_.mask;
    submission.first = first_ + chunk.done;
    submission.count = chunk.items;
    submission.staging_offset = half.offset;
    chunks_[turn & 1] = chunk;
    return Submit(subgroup_->client, subgroup_, submission, deadline_, &half.pending);
  }

  void Copy(const Staging::Half& half, const Chunk& chunk, bool into_staging) const {
    const uint64_t bytes = chunk.items * arrays_.item_bytes;
    for (uint32_t i = 0; i < arrays_.count; ++i) {
      std::byte* staged = half.data + i * bytes;
      std::byte* array = arrays_.parts[i] + chunk.done * arrays_.item_bytes;
      memcpy(into_staging ? staged : array, into_staging ? array : staged, bytes);
    }
  }

  mlpo_subgroup* const subgroup_;
  Staging& staging_;
  const StateArrays& arrays_;
  const uint64_t first_;
  const uint64_t count_;
  const bool write_;
  const Deadline deadline_;
  Chunk chunks_[2];
};

int StreamState(mlpo_subgroup* subgroup, const StateArrays& arrays, uint64_t first, uint64_t count, bool write,
                int64_t timeout_ns) {
  const Deadline deadline = Deadline::In(timeout_ns);
  Staging& staging = subgroup->client->staging;
  TurnHolder turn(staging.turn(), deadline);
  if (!turn.held()) return Fail(-ETIMEDOUT, "another thread's reading or writing of state still runs");
  if (int code = staging.Open(subgroup->client, deadline); code != 0) return code;
  for (int i = 0; i < 2; ++i) {
    // A chunk whose caller gave up: how it ended is nobody's any more, but that it has is.
    Staging::Half& half = staging.half(i);
    const int code = Staging::Settle(&half, deadline);
    if (half.pending != nullptr) return code;
  }
  return Stream(subgroup, arrays, first, count, write, deadline).Run();
}

int CheckRange(uint64_t first, uint64_t count, uint64_t limit, const char* what) {
  if (first <= limit && count <= limit - first) return 0;
  return Fail(-EINVAL, "[%llu, +%llu) of a subgroup of %llu %s", static_cast<unsigned long long>(first),
              static_cast<unsigned long long>(count), static_cast<unsigned long long>(limit), what);
}

int MoveState(mlpo_subgroup* subgroup, uint64_t first, uint64_t count, const StateArrays& arrays, bool write,
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
  StateArrays arrays;
  arrays.Add(MLPO_PART_STEP, steps);
  arrays.item_bytes = sizeof *steps;
  return StreamState(subgroup, arrays, first, count, write, timeout_ns);
}

StateArrays Collect(const float* master, const float* exp_avg, const float* exp_avg_sq) {
  StateArrays arrays;
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
