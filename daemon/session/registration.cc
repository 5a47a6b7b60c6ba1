#include "daemon/session/registration.h"

#include <algorithm>

#include "daemon/base/plain_text.h"
#include "daemon/types/element_bytes.h"
#include "proto/status.h"

namespace mlpo {
namespace {

bool KnownType(uint32_t dtype) { return dtype >= MLPO_FLOAT32 && dtype <= MLPO_BFLOAT16; }

std::string Shown(const std::string& bytes) { return "'" + PlainText(bytes) + "'"; }

// Without dimensions it is one array of its own length, or a range of a scalar.
TensorShard ShardOf(const mlpo_tensor_record& record) {
  TensorShard shard;
  shard.count = record.numel;
  shard.flat = record.flags & MLPO_TENSOR_FLAT;
  shard.global_shape.assign(record.global_shape, record.global_shape + record.ndim);
  if (shard.flat) {
    shard.flat_first = record.flat_first;
    if (record.ndim == 0) shard.global_shape = {1};
    return shard;
  }
  shard.shape.assign(record.shape, record.shape + record.ndim);
  shard.offsets.assign(record.offsets, record.offsets + record.ndim);
  if (record.ndim == 0) {
    shard.global_shape = shard.shape = {record.numel};
    shard.offsets = {0};
  }
  return shard;
}

}  // namespace

Status Registration::Begin(const Frame& frame, const std::set<std::string>& taken_keys) {
  const auto* begin = frame.As<mlpo_register_begin>();
  if (begin == nullptr || begin->key_bytes > MLPO_MAX_KEY) {
    return Status(MLPO_E_PROTOCOL, "REGISTER_BEGIN has a wrong length");
  }
  spec_ = SubgroupSpec();
  names_.clear();
  spec_.key.assign(begin->key, begin->key_bytes);
  const std::string who = "subgroup " + Shown(spec_.key);
  if (spec_.key.empty()) return Status::Invalid("a subgroup's key is empty");
  if (taken_keys.contains(spec_.key)) return Status(-EEXIST, who + " is registered already in this session");
  if (!KnownType(begin->dtype) || !KnownType(begin->grad_dtype)) {
    return Status::Invalid(who + ": dtype " + std::to_string(begin->dtype) + " and grad_dtype " +
                           std::to_string(begin->grad_dtype) +
                           " must each be 1 (float32), 2 (float16) or 3 (bfloat16)");
  }
  if (begin->numel > kMaxSubgroupElements || begin->tensors == 0 || begin->tensors > kMaxSubgroupTensors) {
    return Status(MLPO_E_QUOTA, who + " has " + std::to_string(begin->numel) + " elements in " +
                                    std::to_string(begin->tensors) + " tensors; at most " +
                                    std::to_string(kMaxSubgroupElements) + " in 1 to " +
                                    std::to_string(kMaxSubgroupTensors) + " are offered: use several subgroups");
  }
  spec_.dtype = static_cast<mlpo_dtype>(begin->dtype);
  spec_.grad_dtype = static_cast<mlpo_dtype>(begin->grad_dtype);
  numel_declared_ = begin->numel;
  tensors_expected_ = begin->tensors;
  keep_ = false;
  begun_ = true;
  return Status();
}

Status Registration::AddTensors(const Frame& frame) {
  const auto bytes = frame.bytes();
  if (bytes.size() < sizeof(mlpo_register_tensors)) {
    return Status(MLPO_E_PROTOCOL, "REGISTER_TENSORS has a wrong length");
  }
  const auto* header = reinterpret_cast<const mlpo_register_tensors*>(bytes.data());
  if (header->reserved != 0 || header->count > MLPO_TENSORS_PER_FRAME ||
      bytes.size() != sizeof *header + header->count * sizeof(mlpo_tensor_record)) {
    return Status(MLPO_E_PROTOCOL, "REGISTER_TENSORS has a wrong length");
  }
  const auto* records = reinterpret_cast<const mlpo_tensor_record*>(bytes.data() + sizeof *header);
  for (uint32_t i = 0; i < header->count; ++i) {
    Status status = AddTensor(records[i]);
    if (!status.ok()) return status;
  }
  return Status();
}

Status Registration::AddTensor(const mlpo_tensor_record& record) {
  if (record.name_bytes > MLPO_MAX_TENSOR_NAME || record.ndim > MLPO_MAX_DIMS || record.reserved != 0 ||
      record.flags & ~MLPO_TENSOR_FLAT) {
    return Status(MLPO_E_PROTOCOL, "a tensor record of REGISTER_TENSORS is broken");
  }
  Tensor tensor;
  tensor.name.assign(record.name, record.name_bytes);
  const std::string who = "tensor " + Shown(tensor.name) + " of subgroup " + Shown(spec_.key);
  if (spec_.tensors.size() == tensors_expected_) {
    return Status::Invalid(who + " is one more than the " + std::to_string(tensors_expected_) + " declared");
  }
  if (!names_.insert(tensor.name).second) return Status::Invalid(who + " is named twice");
  if (record.numel > kMaxSubgroupElements) return Status(MLPO_E_QUOTA, who + " is too large");
  uint64_t product = 1;
  const bool flat = record.flags & MLPO_TENSOR_FLAT;
  uint64_t global = 1;
  for (uint32_t d = 0; d < record.ndim; ++d) {
    const bool fits =
        record.offsets[d] <= record.global_shape[d] && record.shape[d] <= record.global_shape[d] - record.offsets[d];
    if (!flat && !fits) {
      return Status::Invalid(who + ": dimension " + std::to_string(d) + " reaches past its global shape");
    }
    if (__builtin_mul_overflow(product, record.shape[d], &product) ||
        __builtin_mul_overflow(global, record.global_shape[d], &global)) {
      return Status::Invalid(who + ": its shape overflows 64 bits");
    }
  }
  if (flat && (record.flat_first > global || record.numel > global - record.flat_first)) {
    return Status::Invalid(who + ": its flat range reaches past its global shape");
  }
  if (!flat && record.ndim > 0 && product != record.numel) {
    return Status::Invalid(who + " has " + std::to_string(record.numel) + " elements, but its shape has " +
                           std::to_string(product));
  }
  tensor.first = spec_.numel;
  tensor.count = record.numel;
  tensor.shard = ShardOf(record);
  spec_.numel += record.numel;
  if (spec_.numel > numel_declared_) {
    return Status::Invalid(who + " brings the subgroup past the " + std::to_string(numel_declared_) + " declared");
  }
  spec_.tensors.push_back(std::move(tensor));
  return Status();
}

Status Registration::Keep() {
  if (keep_) return Status(MLPO_E_PROTOCOL, "REGISTER_KEEP came twice");
  keep_ = true;
  spec_.kept_as = spec_.grad_dtype;
  return Status();
}

Status Registration::End() {
  if (spec_.tensors.size() != tensors_expected_ || spec_.numel != numel_declared_) {
    return Status::Invalid("subgroup " + Shown(spec_.key) + " declared " + std::to_string(numel_declared_) +
                           " elements in " + std::to_string(tensors_expected_) + " tensors, but " +
                           std::to_string(spec_.numel) + " in " + std::to_string(spec_.tensors.size()) + " came");
  }
  return Status();
}

void Registration::Abandon() {
  begun_ = false;
  names_.clear();
  spec_ = SubgroupSpec();
}

SubgroupSpec Registration::TakeSpec() {
  begun_ = false;
  names_.clear();
  return std::move(spec_);
}

SlotLayout LayOutSlot(const SubgroupSpec& spec) {
  SlotLayout layout;
  const uint64_t grad_bytes = spec.numel * ElementBytes(spec.grad_dtype);
  const uint64_t param_bytes = spec.numel * ElementBytes(spec.dtype);
  layout.grad_offset = MLPO_SLOT_HEADER_BYTES;
  layout.param_offset = layout.grad_offset;
  layout.bytes = layout.grad_offset + param_bytes;
  if (grad_bytes != param_bytes) {
    layout.param_offset = (layout.grad_offset + grad_bytes + MLPO_SLOT_HEADER_BYTES - 1) / MLPO_SLOT_HEADER_BYTES *
                          MLPO_SLOT_HEADER_BYTES;
    layout.bytes = layout.param_offset + param_bytes;
  }
  return layout;
}

uint64_t LentSlotBytes(const SubgroupSpec& spec) {
  return MLPO_SLOT_HEADER_BYTES + spec.numel * std::max(ElementBytes(spec.grad_dtype), ElementBytes(spec.dtype));
}

}  // namespace mlpo
