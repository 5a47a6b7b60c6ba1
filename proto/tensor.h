/* Element types, and how tensors are described at registration. FORMAT.md has the prose. */
#ifndef MLPO_PROTO_TENSOR_H_
#define MLPO_PROTO_TENSOR_H_

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

enum mlpo_dtype {
  MLPO_FLOAT32 = 1,
  MLPO_FLOAT16 = 2,  /* IEEE binary16 */
  MLPO_BFLOAT16 = 3, /* the upper half of a binary32 */
};

#define MLPO_MAX_KEY 256         /* bytes of a subgroup's key, without terminator */
#define MLPO_MAX_TENSOR_NAME 256 /* bytes of a tensor's name, without terminator */
#define MLPO_MAX_DIMS 8

/* One tensor in a REGISTER_TENSORS frame. The rank holds the box [offsets, offsets + shape) of a tensor of
 * global_shape; shape, global_shape and offsets have ndim entries, the rest are 0. A flat shard (flat_count > 0) holds
 * elements [flat_first, flat_first + flat_count) of the row-major tensor `global_shape` instead, and shape is ignored.
 */
struct mlpo_tensor_record {
  uint64_t numel;      /* elements this rank holds; product of shape, or flat_count */
  uint64_t flat_first; /* with MLPO_TENSOR_FLAT */
  uint32_t ndim;
  uint32_t flags; /* MLPO_TENSOR_* */
  uint64_t shape[MLPO_MAX_DIMS];
  uint64_t global_shape[MLPO_MAX_DIMS];
  uint64_t offsets[MLPO_MAX_DIMS];
  uint32_t name_bytes;
  uint32_t reserved;
  char name[MLPO_MAX_TENSOR_NAME];
};

#define MLPO_TENSOR_FLAT 1u

static_assert(sizeof(struct mlpo_tensor_record) == 480, "layout");
static_assert(offsetof(struct mlpo_tensor_record, flat_first) == 8, "layout");
static_assert(offsetof(struct mlpo_tensor_record, ndim) == 16, "layout");
static_assert(offsetof(struct mlpo_tensor_record, flags) == 20, "layout");
static_assert(offsetof(struct mlpo_tensor_record, shape) == 24, "layout");
static_assert(offsetof(struct mlpo_tensor_record, global_shape) == 88, "layout");
static_assert(offsetof(struct mlpo_tensor_record, offsets) == 152, "layout");
static_assert(offsetof(struct mlpo_tensor_record, name_bytes) == 216, "layout");
static_assert(offsetof(struct mlpo_tensor_record, reserved) == 220, "layout");
static_assert(offsetof(struct mlpo_tensor_record, name) == 224, "layout");

#endif /* MLPO_PROTO_TENSOR_H_ */
