// Registration: one subgroup between REGISTER_BEGIN and REGISTER_END: collects its tensors and checks them.
//
// Owner: the main thread, in a Connection.
#pragma once

#include <cstdint>
#include <set>
#include <string>

#include "daemon/base/status.h"
#include "daemon/session/frame.h"
#include "daemon/types/subgroup_spec.h"

namespace mlpo {

// Bounds that keep every product of sizes inside 64 bits and every table inside memory: a tensor without elements costs
// a client nothing, and us up to half a KiB.
inline constexpr uint64_t kMaxSubgroupElements = uint64_t{1} << 40;
inline constexpr uint32_t kMaxSubgroupTensors = 1u << 16;
inline constexpr uint64_t kMaxSessionTensors = 1u << 18;

class Registration {
 public:
  // Each refuses what it gets with a text that names the subgroup or tensor.
  Status Begin(const Frame& frame, const std::set<std::string>& taken_keys);
  Status AddTensors(const Frame& frame);
  // Its subgroup has no slot of its own.
  Status Keep();
  Status End();

  // It was refused.
  void Abandon();

  bool begun() const { return begun_; }
  bool keep() const { return keep_; }
  // After End(); its slot is not set yet.
  SubgroupSpec TakeSpec();

 private:
  Status AddTensor(const mlpo_tensor_record& record);

  bool begun_ = false;
  bool keep_ = false;
  uint32_t tensors_expected_ = 0;
  std::set<std::string> names_;
  SubgroupSpec spec_;
  uint64_t numel_declared_ = 0;
};

// Bytes of a slot: header, gradient and parameters (one region if their types have the same size).
struct SlotLayout {
  uint64_t grad_offset = 0;  // from the slot's start
  uint64_t param_offset = 0;
  uint64_t bytes = 0;
};
SlotLayout LayOutSlot(const SubgroupSpec& spec);
// Of a slot of the lent area: a header, and behind it first the gradient, later the parameters.
uint64_t LentSlotBytes(const SubgroupSpec& spec);

}  // namespace mlpo
