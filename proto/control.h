/* Frames on the session socket (AF_UNIX, SOCK_SEQPACKET): handshake and registration. FORMAT.md has the prose.
 *
 * Every frame begins with struct mlpo_frame. One request is outstanding at a time; its answer carries the same seq.
 * A daemon that refuses a frame answers ERROR; during the handshake and after a broken protocol it then closes. */
#ifndef MLPO_PROTO_CONTROL_H_
#define MLPO_PROTO_CONTROL_H_

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/abi.h"
#include "proto/tensor.h"

enum mlpo_frame_type {
  MLPO_FRAME_HELLO = 1,            /* client; 1 descriptor: a pidfd of the client */
  MLPO_FRAME_WELCOME = 2,          /* daemon; 3 descriptors: client area, daemon area, doorbell */
  MLPO_FRAME_READY = 3,            /* client: areas are mapped */
  MLPO_FRAME_REGISTER_BEGIN = 4,   /* client */
  MLPO_FRAME_REGISTER_TENSORS = 5, /* client, as many as needed, no answer of their own */
  MLPO_FRAME_REGISTER_END = 6,     /* client; answered by [ARENA, MAPPED,] REGISTERED or by ERROR */
  MLPO_FRAME_ARENA = 7,            /* daemon; 1 descriptor: a further piece of the arena */
  MLPO_FRAME_MAPPED = 8,           /* client: answer to ARENA */
  MLPO_FRAME_REGISTERED = 9,       /* daemon */
  MLPO_FRAME_STAGING = 10,         /* client: wants the staging area; answered by [ARENA, MAPPED,] STAGED or by ERROR */
  MLPO_FRAME_STAGED = 11,          /* daemon */
  MLPO_FRAME_BYE = 12,             /* client: an orderly end */
  MLPO_FRAME_ERROR = 13,           /* daemon */
  MLPO_FRAME_REGISTER_KEEP = 14,   /* client, between BEGIN and END: the subgroup has no slot of its own */
  MLPO_FRAME_LEND = 15,            /* client: wants the lent area; answered by [ARENA, MAPPED,] LENT or by ERROR */
  MLPO_FRAME_LENT = 16,            /* daemon */
  MLPO_FRAME_CHECKPOINT = 17,      /* client; descriptors as the flags say; answered by CHECKPOINTING or by ERROR */
  MLPO_FRAME_CHECKPOINTING = 18,   /* daemon */
  MLPO_FRAME_RESTORE = 19,         /* client; answered, after its RESTORE_FILES, by RESTORING or by ERROR */
  MLPO_FRAME_RESTORE_FILES = 20,   /* client; 1 to 8 descriptors */
  MLPO_FRAME_RESTORING = 21,       /* daemon */
};

struct mlpo_frame {
  uint32_t magic; /* MLPO_MAGIC */
  uint16_t type;  /* enum mlpo_frame_type */
  uint16_t reserved;
  uint32_t bytes; /* of the whole frame */
  uint32_t seq;   /* of a request; repeated in its answer */
};

static_assert(sizeof(struct mlpo_frame) == 16, "layout");
static_assert(offsetof(struct mlpo_frame, magic) == 0, "layout");
static_assert(offsetof(struct mlpo_frame, type) == 4, "layout");
static_assert(offsetof(struct mlpo_frame, reserved) == 6, "layout");
static_assert(offsetof(struct mlpo_frame, bytes) == 8, "layout");
static_assert(offsetof(struct mlpo_frame, seq) == 12, "layout");

struct mlpo_hello {
  struct mlpo_frame frame;
  uint32_t abi_major;
  uint32_t abi_minor;
  uint64_t features_offered;
  uint64_t features_required;
  uint32_t rank;
  uint32_t world_size;
  int32_t numa_node; /* -1: not known */
  uint32_t ring_entries;
  uint64_t arena_bytes; /* 0: the arena grows with registrations, else a fixed limit */
  uint32_t job_bytes;
  uint32_t reserved;
  char job[MLPO_MAX_JOB];
};

static_assert(sizeof(struct mlpo_hello) == 200, "layout");
static_assert(offsetof(struct mlpo_hello, abi_major) == 16, "layout");
static_assert(offsetof(struct mlpo_hello, abi_minor) == 20, "layout");
static_assert(offsetof(struct mlpo_hello, features_offered) == 24, "layout");
static_assert(offsetof(struct mlpo_hello, features_required) == 32, "layout");
static_assert(offsetof(struct mlpo_hello, rank) == 40, "layout");
static_assert(offsetof(struct mlpo_hello, world_size) == 44, "layout");
static_assert(offsetof(struct mlpo_hello, numa_node) == 48, "layout");
static_assert(offsetof(struct mlpo_hello, ring_entries) == 52, "layout");
static_assert(offsetof(struct mlpo_hello, arena_bytes) == 56, "layout");
static_assert(offsetof(struct mlpo_hello, job_bytes) == 64, "layout");
static_assert(offsetof(struct mlpo_hello, reserved) == 68, "layout");
static_assert(offsetof(struct mlpo_hello, job) == 72, "layout");

struct mlpo_welcome {
  struct mlpo_frame frame;
  uint32_t abi_major;
  uint32_t abi_minor;
  uint64_t features;
  uint64_t session; /* number of the session in this daemon's life */
  uint64_t generation;
  uint8_t boot_id[MLPO_BOOT_ID_BYTES]; /* changes with every start of the daemon */
  uint32_t entries;                    /* of all four rings and tables */
  uint32_t block_elements;
  uint64_t client_area_bytes;
  uint64_t daemon_area_bytes;
  uint64_t submissions_offset; /* in the client area */
  uint64_t hyper_offset;       /* in the client area */
  uint64_t completions_offset; /* in the daemon area */
  uint64_t errors_offset;      /* in the daemon area */
  uint64_t arena_limit_bytes;
};

static_assert(sizeof(struct mlpo_welcome) == 128, "layout");
static_assert(offsetof(struct mlpo_welcome, abi_major) == 16, "layout");
static_assert(offsetof(struct mlpo_welcome, abi_minor) == 20, "layout");
static_assert(offsetof(struct mlpo_welcome, features) == 24, "layout");
static_assert(offsetof(struct mlpo_welcome, session) == 32, "layout");
static_assert(offsetof(struct mlpo_welcome, generation) == 40, "layout");
static_assert(offsetof(struct mlpo_welcome, boot_id) == 48, "layout");
static_assert(offsetof(struct mlpo_welcome, entries) == 64, "layout");
static_assert(offsetof(struct mlpo_welcome, block_elements) == 68, "layout");
static_assert(offsetof(struct mlpo_welcome, client_area_bytes) == 72, "layout");
static_assert(offsetof(struct mlpo_welcome, daemon_area_bytes) == 80, "layout");
static_assert(offsetof(struct mlpo_welcome, submissions_offset) == 88, "layout");
static_assert(offsetof(struct mlpo_welcome, hyper_offset) == 96, "layout");
static_assert(offsetof(struct mlpo_welcome, completions_offset) == 104, "layout");
static_assert(offsetof(struct mlpo_welcome, errors_offset) == 112, "layout");
static_assert(offsetof(struct mlpo_welcome, arena_limit_bytes) == 120, "layout");

/* READY, BYE, REGISTER_END and REGISTER_KEEP are a bare struct mlpo_frame. */

struct mlpo_register_begin {
  struct mlpo_frame frame;
  uint32_t dtype;      /* of the parameters handed out; enum mlpo_dtype */
  uint32_t grad_dtype; /* of the gradient */
  uint64_t numel;      /* of all tensors together */
  uint32_t tensors;
  uint32_t key_bytes;
  char key[MLPO_MAX_KEY];
};

static_assert(sizeof(struct mlpo_register_begin) == 296, "layout");
static_assert(offsetof(struct mlpo_register_begin, dtype) == 16, "layout");
static_assert(offsetof(struct mlpo_register_begin, grad_dtype) == 20, "layout");
static_assert(offsetof(struct mlpo_register_begin, numel) == 24, "layout");
static_assert(offsetof(struct mlpo_register_begin, tensors) == 32, "layout");
static_assert(offsetof(struct mlpo_register_begin, key_bytes) == 36, "layout");
static_assert(offsetof(struct mlpo_register_begin, key) == 40, "layout");

struct mlpo_register_tensors { /* followed by `count` struct mlpo_tensor_record */
  struct mlpo_frame frame;
  uint32_t count;
  uint32_t reserved;
};
#define MLPO_TENSORS_PER_FRAME 128

static_assert(sizeof(struct mlpo_register_tensors) == 24, "layout");
static_assert(offsetof(struct mlpo_register_tensors, count) == 16, "layout");
static_assert(offsetof(struct mlpo_register_tensors, reserved) == 20, "layout");
static_assert(sizeof(struct mlpo_register_tensors) + MLPO_TENSORS_PER_FRAME * sizeof(struct mlpo_tensor_record) <=
                  MLPO_MAX_FRAME,
              "fits a frame");

struct mlpo_arena {
  struct mlpo_frame frame;
  uint32_t index; /* of this memfd in the session's arena */
  uint32_t reserved;
  uint64_t bytes;
};

static_assert(sizeof(struct mlpo_arena) == 32, "layout");
static_assert(offsetof(struct mlpo_arena, index) == 16, "layout");
static_assert(offsetof(struct mlpo_arena, reserved) == 20, "layout");
static_assert(offsetof(struct mlpo_arena, bytes) == 24, "layout");

struct mlpo_mapped {
  struct mlpo_frame frame;
  uint32_t index;
  uint32_t reserved;
};

static_assert(sizeof(struct mlpo_mapped) == 24, "layout");
static_assert(offsetof(struct mlpo_mapped, index) == 16, "layout");
static_assert(offsetof(struct mlpo_mapped, reserved) == 20, "layout");

/* The slot: struct mlpo_slot_header at header_offset; the gradient at grad_offset and the parameters at param_offset,
 * the same place if the two types have the same size. */
struct mlpo_registered {
  struct mlpo_frame frame;
  uint32_t subgroup; /* handle for submissions, never 0 */
  uint32_t arena;    /* index of the memfd */
  uint64_t header_offset;
  uint64_t grad_offset;
  uint64_t param_offset;
  uint32_t blocks;
  uint32_t reserved;
};

static_assert(sizeof(struct mlpo_registered) == 56, "layout");
static_assert(offsetof(struct mlpo_registered, subgroup) == 16, "layout");
static_assert(offsetof(struct mlpo_registered, arena) == 20, "layout");
static_assert(offsetof(struct mlpo_registered, header_offset) == 24, "layout");
static_assert(offsetof(struct mlpo_registered, grad_offset) == 32, "layout");
static_assert(offsetof(struct mlpo_registered, param_offset) == 40, "layout");
static_assert(offsetof(struct mlpo_registered, blocks) == 48, "layout");
static_assert(offsetof(struct mlpo_registered, reserved) == 52, "layout");

/* Also LEND. */
struct mlpo_staging {
  struct mlpo_frame frame;
  uint64_t bytes; /* wanted; a session has one staging area, made once. LEND: 0 is all that a fixed arena has left */
};

static_assert(sizeof(struct mlpo_staging) == 24, "layout");
static_assert(offsetof(struct mlpo_staging, bytes) == 16, "layout");

/* Also LENT. */
struct mlpo_staged {
  struct mlpo_frame frame;
  uint32_t arena;
  uint32_t reserved;
  uint64_t offset; /* in the arena's memfd */
  uint64_t bytes;
};

static_assert(sizeof(struct mlpo_staged) == 40, "layout");
static_assert(offsetof(struct mlpo_staged, arena) == 16, "layout");
static_assert(offsetof(struct mlpo_staged, reserved) == 20, "layout");
static_assert(offsetof(struct mlpo_staged, offset) == 24, "layout");
static_assert(offsetof(struct mlpo_staged, bytes) == 32, "layout");

/* A part of a checkpoint is to be saved. */
struct mlpo_checkpoint {
  struct mlpo_frame frame;
  uint64_t step;
  uint8_t attempt[MLPO_ATTEMPT_BYTES]; /* the same for all ranks of one save; all zero: the daemon chooses */
  uint32_t flags;                      /* MLPO_CHECKPOINT_* */
  uint32_t tag_bytes;
  uint32_t directory_bytes;
  uint32_t reserved;
  char tag[MLPO_MAX_TAG];
  char directory[MLPO_MAX_DIRECTORY]; /* absolute */
};
#define MLPO_CHECKPOINT_OVERWRITE 1u /* a complete checkpoint under the tag goes when this one is complete */
#define MLPO_CHECKPOINT_FILES 2u     /* with 2 descriptors, for reading and writing: the data file and the manifest */

static_assert(sizeof(struct mlpo_checkpoint) == 4280, "layout");
static_assert(offsetof(struct mlpo_checkpoint, step) == 16, "layout");
static_assert(offsetof(struct mlpo_checkpoint, attempt) == 24, "layout");
static_assert(offsetof(struct mlpo_checkpoint, flags) == 40, "layout");
static_assert(offsetof(struct mlpo_checkpoint, tag_bytes) == 44, "layout");
static_assert(offsetof(struct mlpo_checkpoint, directory_bytes) == 48, "layout");
static_assert(offsetof(struct mlpo_checkpoint, reserved) == 52, "layout");
static_assert(offsetof(struct mlpo_checkpoint, tag) == 56, "layout");
static_assert(offsetof(struct mlpo_checkpoint, directory) == 184, "layout");

struct mlpo_checkpointing {
  struct mlpo_frame frame;
  uint8_t attempt[MLPO_ATTEMPT_BYTES];
  uint64_t bytes;  /* that the state has at most, less what is on paths that need no copy */
  uint32_t handle; /* for SNAPSHOT, never 0 */
  uint32_t reserved;
};

static_assert(sizeof(struct mlpo_checkpointing) == 48, "layout");
static_assert(offsetof(struct mlpo_checkpointing, attempt) == 16, "layout");
static_assert(offsetof(struct mlpo_checkpointing, bytes) == 32, "layout");
static_assert(offsetof(struct mlpo_checkpointing, handle) == 40, "layout");
static_assert(offsetof(struct mlpo_checkpointing, reserved) == 44, "layout");

/* The session's subgroups are to be filled from a checkpoint. */
struct mlpo_restore {
  struct mlpo_frame frame;
  uint32_t
      files; /* descriptors that come in RESTORE_FILES: manifests of all parts, then their data files; 0: by name */
  uint32_t tag_bytes; /* 0: the newest that is complete */
  uint32_t directory_bytes;
  uint32_t reserved;
  uint8_t attempt[MLPO_ATTEMPT_BYTES]; /* with a tag: this one of its attempts; all zero: the one that counts */
  char tag[MLPO_MAX_TAG];
  char directory[MLPO_MAX_DIRECTORY]; /* absolute */
};

static_assert(sizeof(struct mlpo_restore) == 4272, "layout");
static_assert(offsetof(struct mlpo_restore, files) == 16, "layout");
static_assert(offsetof(struct mlpo_restore, tag_bytes) == 20, "layout");
static_assert(offsetof(struct mlpo_restore, directory_bytes) == 24, "layout");
static_assert(offsetof(struct mlpo_restore, reserved) == 28, "layout");
static_assert(offsetof(struct mlpo_restore, attempt) == 32, "layout");
static_assert(offsetof(struct mlpo_restore, tag) == 48, "layout");
static_assert(offsetof(struct mlpo_restore, directory) == 176, "layout");

struct mlpo_restore_files {
  struct mlpo_frame frame;
  uint32_t first; /* of the descriptors, counted over all of these frames */
  uint32_t count;
};

static_assert(sizeof(struct mlpo_restore_files) == 24, "layout");
static_assert(offsetof(struct mlpo_restore_files, first) == 16, "layout");
static_assert(offsetof(struct mlpo_restore_files, count) == 20, "layout");

struct mlpo_restoring {
  struct mlpo_frame frame;
  uint8_t attempt[MLPO_ATTEMPT_BYTES];
  uint64_t step;
  uint32_t world_size; /* of those who saved */
  uint32_t handle;     /* for RESTORE, never 0 */
  uint32_t tag_bytes;
  uint32_t reserved;
  char tag[MLPO_MAX_TAG];
};

static_assert(sizeof(struct mlpo_restoring) == 184, "layout");
static_assert(offsetof(struct mlpo_restoring, attempt) == 16, "layout");
static_assert(offsetof(struct mlpo_restoring, step) == 32, "layout");
static_assert(offsetof(struct mlpo_restoring, world_size) == 40, "layout");
static_assert(offsetof(struct mlpo_restoring, handle) == 44, "layout");
static_assert(offsetof(struct mlpo_restoring, tag_bytes) == 48, "layout");
static_assert(offsetof(struct mlpo_restoring, reserved) == 52, "layout");
static_assert(offsetof(struct mlpo_restoring, tag) == 56, "layout");

struct mlpo_error {
  struct mlpo_frame frame;
  int32_t status;
  int32_t os_errno;
  char text[488]; /* UTF-8, zero-terminated: what, where, what to do */
};

static_assert(sizeof(struct mlpo_error) == 512, "layout");
static_assert(offsetof(struct mlpo_error, status) == 16, "layout");
static_assert(offsetof(struct mlpo_error, os_errno) == 20, "layout");
static_assert(offsetof(struct mlpo_error, text) == 24, "layout");

#endif /* MLPO_PROTO_CONTROL_H_ */
