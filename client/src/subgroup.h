// mlpo_subgroup: a registered subgroup and its slot.
//
// What registration gave never changes. The rest is guarded by the ring's lock. Memory: lives until the caller has
// freed the handle and none of its submissions is in flight.
#pragma once

#include <cstddef>
#include <cstdint>

#include "mlpo/client.h"

struct mlpo_subgroup {
  mlpo_client* client = nullptr;  // holds a reference
  uint32_t handle = 0;
  uint32_t tensor_count = 0;
  uint64_t numel = 0;
  int32_t dtype = 0;
  int32_t grad_dtype = 0;
  std::byte* header = nullptr;
  std::byte* grad = nullptr;
  std::byte* param = nullptr;

  uint32_t epoch = 0;               // of the last UPDATE that was seen to succeed
  bool update_outstanding = false;  // submitted and not seen to end: the daemon has the slot
  bool freed = false;               // by the caller
  uint32_t flights = 0;             // submissions that have not ended

  void UpdateEnded(int32_t status) {
    update_outstanding = false;
    if (status == 0) ++epoch;
  }
  void FreeIfUnused();
};
