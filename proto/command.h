/* Operations, submissions, completions, hyper-parameters and error records: what passes through the ring.
 * FORMAT.md has the prose. */
#ifndef MLPO_PROTO_COMMAND_H_
#define MLPO_PROTO_COMMAND_H_

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

enum mlpo_op {
  MLPO_OP_NOP = 0,
  MLPO_OP_GRAD = 1,        /* arg = piece kind; first, count in elements of the subgroup */
  MLPO_OP_UPDATE = 2,      /* arg = priority (lower goes first); hyper-parameters: record with the submission's index */
  MLPO_OP_DISCARD = 3,     /* subgroup or MLPO_ALL_SUBGROUPS; arg = reason */
  MLPO_OP_READ_STATE = 4,  /* arg = part mask; first, count; into the staging area at staging_offset */
  MLPO_OP_WRITE_STATE = 5, /* arg = part mask; first, count; from the staging area at staging_offset */
  MLPO_OP_FETCH = 6,       /* arg = step; reads a named object of the job */
  MLPO_OP_FLUSH = 7,       /* arg = step; writes a new version of one */
  MLPO_OP_DELETE = 8,      /* of the name that is `first` bytes at staging_offset */
  MLPO_OP_SNAPSHOT = 9,    /* arg = step, first = handle from CHECKPOINTING */
  MLPO_OP_FENCE = 10,      /* fdatasync of everything of this session that is on storage */
  MLPO_OP_CANCEL = 11,
  MLPO_OP_STAT = 12,    /* value = the subgroup's epoch, detail = its slot state (MLPO_SLOT_*) */
  MLPO_OP_RESTORE = 13, /* fills a subgroup; first = handle from RESTORING */
};

/* GRAD: what a piece is. */
enum mlpo_piece {
  MLPO_PIECE_VALUE = 1, /* bytes in the slot */
  MLPO_PIECE_ZERO = 2,  /* the gradient is 0, the bytes are not read */
  MLPO_PIECE_SKIP = 3,  /* whole tensors: state and step untouched, slot bytes undefined afterwards */
};

/* READ_STATE, WRITE_STATE: parts, as FP32 arrays of `count` elements, one after another in this order. STEP stands
 * alone: first and count then count tensors, the array is of int64. */
#define MLPO_PART_MASTER 1u
#define MLPO_PART_EXP_AVG 2u
#define MLPO_PART_EXP_AVG_SQ 4u
#define MLPO_PART_STEP 8u
#define MLPO_PART_STATE 7u

/* FETCH, FLUSH: steps. `subgroup` is the handle, a number that the client chooses at OPEN. */
enum mlpo_object_step {
  MLPO_OBJECT_OPEN = 1,   /* name: `first` bytes at staging_offset; FLUSH: count = bytes of the object */
  MLPO_OBJECT_PIECE = 2,  /* bytes [first, first + count) of the object, to or from staging_offset */
  MLPO_OBJECT_COMMIT = 3, /* FLUSH: makes the version the one that the name has, and ends the handle */
  MLPO_OBJECT_CLOSE = 4,  /* ends the handle; what was not committed goes */
  MLPO_OBJECT_SIZE = 5,   /* FETCH: name as with OPEN; value = bytes. Has no handle */
};

/* SNAPSHOT: steps; `first` is the checkpoint's handle. */
enum mlpo_snapshot_step {
  MLPO_SNAPSHOT_TAKE = 1,    /* ends when the state is as it will be saved; value = bytes that are copied */
  MLPO_SNAPSHOT_SAVED = 2,   /* ends when the rank's part is durable; value = 1: all ranks' parts are there */
  MLPO_SNAPSHOT_ABANDON = 3, /* gives it up */
};

/* DISCARD: reasons. */
#define MLPO_DISCARD_USER 0u
#define MLPO_DISCARD_OVERFLOW 1u /* counts one skipped step of the session */

#define MLPO_ALL_SUBGROUPS 0xffffffffu

/* Submission flags. */
#define MLPO_UPDATE_APPLY_NONFINITE 1u /* UPDATE: apply a gradient that is not finite, as torch would */
#define MLPO_GRAD_KEEP 1u              /* GRAD: the bytes are in the slot at staging_offset of the lent area */
#define MLPO_UPDATE_OUTPUT 2u          /* UPDATE: the parameters go to the slot at staging_offset of the lent area */

/* Slot states, as STAT reports them. */
enum mlpo_slot_state {
  MLPO_SLOT_OPEN = 0,
  MLPO_SLOT_GRAD = 1,
  MLPO_SLOT_BUSY = 2,
  MLPO_SLOT_PARAM = 3,
  MLPO_SLOT_TORN = 4,
};

struct mlpo_submission {
  uint16_t op;             /* enum mlpo_op */
  uint16_t flags;          /* of the operation; others are 0 */
  uint32_t subgroup;       /* handle from REGISTERED, or of an open object; 0 where the operation has none */
  uint64_t user_data;      /* returned in the completion */
  uint32_t epoch;          /* GRAD, UPDATE: the epoch this leads to, stored + 1; else 0 */
  uint32_t arg;            /* of the operation */
  uint64_t first;          /* elements, or bytes of an object */
  uint64_t count;          /* likewise */
  uint64_t staging_offset; /* bytes into the staging area; GRAD, UPDATE: into the lent area */
  uint64_t reserved[2];
};

static_assert(sizeof(struct mlpo_submission) == 64, "layout");
static_assert(offsetof(struct mlpo_submission, op) == 0, "layout");
static_assert(offsetof(struct mlpo_submission, flags) == 2, "layout");
static_assert(offsetof(struct mlpo_submission, subgroup) == 4, "layout");
static_assert(offsetof(struct mlpo_submission, user_data) == 8, "layout");
static_assert(offsetof(struct mlpo_submission, epoch) == 16, "layout");
static_assert(offsetof(struct mlpo_submission, arg) == 20, "layout");
static_assert(offsetof(struct mlpo_submission, first) == 24, "layout");
static_assert(offsetof(struct mlpo_submission, count) == 32, "layout");
static_assert(offsetof(struct mlpo_submission, staging_offset) == 40, "layout");
static_assert(offsetof(struct mlpo_submission, reserved) == 48, "layout");

/* Completion flags. */
#define MLPO_COMPLETION_ERROR_RECORD 1u    /* `detail` is the index of an error record */
#define MLPO_COMPLETION_ALL_FINITE 2u      /* GRAD */
#define MLPO_COMPLETION_WINDOW_COMPLETE 4u /* GRAD: every element is covered and every GRAD of the window has ended */

struct mlpo_completion {
  uint64_t user_data;
  int32_t status;  /* enum mlpo_status, or a negated errno */
  uint32_t flags;  /* MLPO_COMPLETION_* */
  uint64_t value;  /* GRAD: bits of the FP64 sum of squares; UPDATE, STAT: the epoch; FETCH: the object's bytes */
  uint32_t detail; /* error record's index, or of the operation */
  uint32_t reserved;
};

static_assert(sizeof(struct mlpo_completion) == 32, "layout");
static_assert(offsetof(struct mlpo_completion, user_data) == 0, "layout");
static_assert(offsetof(struct mlpo_completion, status) == 8, "layout");
static_assert(offsetof(struct mlpo_completion, flags) == 12, "layout");
static_assert(offsetof(struct mlpo_completion, value) == 16, "layout");
static_assert(offsetof(struct mlpo_completion, detail) == 24, "layout");
static_assert(offsetof(struct mlpo_completion, reserved) == 28, "layout");

/* Optimizer modes. One that is not here is refused, not approximated. */
enum mlpo_mode {
  MLPO_ADAMW = 1, /* decoupled weight decay */
  MLPO_ADAM = 2,  /* L2: weight decay is added to the gradient */
};
#define MLPO_HYPER_NO_BIAS_CORRECTION 1u

struct mlpo_hyper {
  double lr;           /* finite, >= 0 */
  double beta1;        /* [0, 1) */
  double beta2;        /* [0, 1) */
  double eps;          /* finite, >= 0 */
  double weight_decay; /* finite, >= 0 */
  double grad_scale;   /* finite; multiplies the gradient */
  uint32_t mode;       /* enum mlpo_mode */
  uint32_t flags;      /* MLPO_HYPER_* */
  uint64_t reserved;
};

static_assert(sizeof(struct mlpo_hyper) == 64, "layout");
static_assert(offsetof(struct mlpo_hyper, lr) == 0, "layout");
static_assert(offsetof(struct mlpo_hyper, beta1) == 8, "layout");
static_assert(offsetof(struct mlpo_hyper, beta2) == 16, "layout");
static_assert(offsetof(struct mlpo_hyper, eps) == 24, "layout");
static_assert(offsetof(struct mlpo_hyper, weight_decay) == 32, "layout");
static_assert(offsetof(struct mlpo_hyper, grad_scale) == 40, "layout");
static_assert(offsetof(struct mlpo_hyper, mode) == 48, "layout");
static_assert(offsetof(struct mlpo_hyper, flags) == 52, "layout");
static_assert(offsetof(struct mlpo_hyper, reserved) == 56, "layout");

/* What a failed completion tells. Record i belongs to the completion at ring index i and is reused with it. */
struct mlpo_error_record {
  int32_t status;
  int32_t os_errno;  /* 0 if none */
  uint32_t subgroup; /* handle, 0 if none */
  uint32_t tensor;   /* index in the subgroup, 0xffffffff if none */
  uint32_t block;    /* index in the subgroup, 0xffffffff if none */
  uint32_t path;     /* index of the path, 0xffffffff if none */
  uint64_t first;    /* elements of the subgroup */
  uint64_t count;
  char text[216]; /* UTF-8, zero-terminated */
};

static_assert(sizeof(struct mlpo_error_record) == 256, "layout");
static_assert(offsetof(struct mlpo_error_record, status) == 0, "layout");
static_assert(offsetof(struct mlpo_error_record, os_errno) == 4, "layout");
static_assert(offsetof(struct mlpo_error_record, subgroup) == 8, "layout");
static_assert(offsetof(struct mlpo_error_record, tensor) == 12, "layout");
static_assert(offsetof(struct mlpo_error_record, block) == 16, "layout");
static_assert(offsetof(struct mlpo_error_record, path) == 20, "layout");
static_assert(offsetof(struct mlpo_error_record, first) == 24, "layout");
static_assert(offsetof(struct mlpo_error_record, count) == 32, "layout");
static_assert(offsetof(struct mlpo_error_record, text) == 40, "layout");

#endif /* MLPO_PROTO_COMMAND_H_ */
