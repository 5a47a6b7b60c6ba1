// SubgroupSpec: a registered subgroup: its tensors, types and slot.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "daemon/types/ids.h"
#include "daemon/types/tensor_shard.h"
#include "proto/tensor.h"

namespace mlpo {

struct Tensor {
  std::string name;
  uint64_t first = 0;  // elements of the subgroup
  uint64_t count = 0;
  int64_t step = 0;        // updates so far
  TensorShard shard = {};  // which elements of the whole tensor these are
};

struct SubgroupSpec {
  SubgroupId id = 0;
  std::string key;
  mlpo_dtype dtype = MLPO_FLOAT32;
  mlpo_dtype grad_dtype = MLPO_FLOAT32;
  std::vector<Tensor> tensors;  // one after another
  uint64_t numel = 0;
  // Its gradients are copied to the blocks' buffers by GRAD, as this type, and UPDATE reads them there. nullopt: they
  // stay in the slot until UPDATE.
  std::optional<mlpo_dtype> kept_as;
  // The slot, in the session's arena, mapped as long as the session is known to the data thread.
  std::byte* header = nullptr;
  std::byte* grad = nullptr;
  std::byte* param = nullptr;
  // It has no slot of its own: GRAD and UPDATE name one of `slot_bytes` in the session's lent area of `lent_bytes`.
  // nullptr: it has.
  std::byte* lent = nullptr;
  uint64_t lent_bytes = 0;
  uint64_t slot_bytes = 0;
};

}  // namespace mlpo
