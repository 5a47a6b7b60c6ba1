/* mlpo: the C API of the client library of mlpo-daemon.
 *
 * A trainer's process (a rank) connects to the daemon of its node, registers subgroups of parameters, and from then on
 * submits gradients and updates through a ring in shared memory. docs: README.md, proto/FORMAT.md.
 *
 * Results. Functions return 0 or a negative code: a negated errno, or one of MLPO_ERR_* below. mlpo_strerror() names a
 * code, mlpo_errno() maps it to an errno, mlpo_last_error() has the text of the calling thread's last failed call:
 * what, where, and what to do.
 *
 * Threads. Every function may be called from any thread at any time, except that an object must not be used during or
 * after the call that frees it. No function prints. After fork() every call of the child on the parent's objects fails
 * with MLPO_ERR_FORKED and leaves the parent's session alone; freeing them there frees the child's memory only. Slots
 * are not mapped in the child.
 *
 * Time. `timeout_ns` is relative; MLPO_FOREVER waits as long as the daemon lives. Waits notice the daemon's death
 * within 2 s. A passed deadline is -ETIMEDOUT, and the request goes on.
 *
 * Structs that begin with struct_size: the caller stores sizeof of the struct there and zeroes the rest; fields beyond
 * it take their defaults, so older callers go on working. Each has a *_INIT macro. */
#ifndef MLPO_CLIENT_H_
#define MLPO_CLIENT_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#if defined(__GNUC__) /* a function and the struct it fills share their name */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wshadow"
#endif
#endif

#if defined(__GNUC__)
#define MLPO_API __attribute__((visibility("default")))
#else
#define MLPO_API
#endif

#define MLPO_CLIENT_VERSION_MAJOR 0
#define MLPO_CLIENT_VERSION_MINOR 1

/* ---- Codes (the same values as in proto/status.h) ---- */
#define MLPO_ERR_EPOCH (-4097)       /* the epoch is not stored + 1 */
#define MLPO_ERR_COVERAGE (-4098)    /* gradient pieces overlap, leave a gap, or skip part of a tensor */
#define MLPO_ERR_NOT_FINITE (-4099)  /* update on a gradient that is not finite */
#define MLPO_ERR_TORN (-4100)        /* partly updated: repeat the identical update, or write the state */
#define MLPO_ERR_SLOT_BUSY (-4101)   /* an update of the subgroup is queued or running */
#define MLPO_ERR_PROTOCOL (-4102)    /* the protocol was broken; the session has ended */
#define MLPO_ERR_VERSION (-4103)     /* client and daemon have no common version */
#define MLPO_ERR_QUOTA (-4104)       /* a quota or limit of the daemon */
#define MLPO_ERR_IO (-4105)          /* storage failed */
#define MLPO_ERR_FORKED (-4106)      /* used after fork() */
#define MLPO_ERR_CLOSED (-4107)      /* used after mlpo_client_close() */
#define MLPO_ERR_DAEMON_DIED (-4108) /* the daemon went away without a word */

#define MLPO_FOREVER INT64_MAX

MLPO_API const char* mlpo_strerror(int code); /* static text, never NULL */
MLPO_API int mlpo_errno(int code);            /* a positive errno; 0 for 0 */
MLPO_API const char* mlpo_last_error(void);   /* of this thread; valid until its next failed call; never NULL */
/* Makes `text` this thread's last error and returns `code`: for libraries on top of this one. */
MLPO_API int mlpo_fail(int code, const char* text);
MLPO_API const char* mlpo_client_version(void); /* "0.1.0" */

/* ---- Client ---- */
typedef struct mlpo_client mlpo_client;

struct mlpo_connect_options {
  size_t struct_size;
  const char* socket;    /* NULL: $MLPO_SOCKET, /run/mlpo/$UID/mlpo.sock, /run/mlpo/mlpo.sock,
                            $XDG_RUNTIME_DIR/mlpo/mlpo.sock, the first that exists */
  const char* job;       /* NULL: $MLPO_JOB, $TORCHELASTIC_RUN_ID unless "none", $SLURM_JOB_ID.$SLURM_STEP_ID,
                            else -EINVAL; [A-Za-z0-9_][A-Za-z0-9._-]{0,127} */
  int32_t rank;          /* -1: $RANK, else 0 */
  int32_t world_size;    /* -1: $WORLD_SIZE, else 1 */
  uint64_t arena_bytes;  /* 0: grows with registrations, else a fixed limit */
  uint32_t ring_entries; /* 0: 1024; a power of two */
  uint32_t reserved;
  int64_t connect_timeout_ns; /* 0: 30 s; for the handshake; also how long to wait for the same rank's previous session
                                 to end */
};
#define MLPO_CONNECT_OPTIONS_INIT \
  { sizeof(struct mlpo_connect_options), NULL, NULL, -1, -1, 0, 0, 0, 0 }

/* Connects and makes a session. Errors: -ENOENT/-ECONNREFUSED no daemon, -EADDRINUSE this rank has a live session,
 * -EACCES, MLPO_ERR_VERSION, MLPO_ERR_QUOTA, -ETIMEDOUT. */
MLPO_API int mlpo_connect(const struct mlpo_connect_options* options, mlpo_client** client);
/* Ends the session in an orderly way and makes every later call fail with MLPO_ERR_CLOSED; requests that wait get it
 * too. Views of slots stay mapped (reading stale memory, never a crash) until mlpo_client_free. Idempotent. */
MLPO_API int mlpo_client_close(mlpo_client* client);
/* Closes if need be, unmaps and frees. All of its subgroups and requests must have been freed. NULL is allowed. */
MLPO_API void mlpo_client_free(mlpo_client* client);

struct mlpo_client_info {
  size_t struct_size;
  uint64_t session;        /* number in the daemon's life */
  uint64_t generation;     /* of this (job, rank) */
  uint32_t block_elements; /* the daemon's block */
  uint32_t rank;
  uint32_t world_size;
  uint32_t ring_entries;
  uint64_t arena_bytes;  /* mapped so far */
  uint64_t lost_wakeups; /* work found by a time-out rather than a wake-up: 0 unless there is a bug */
  const char* socket;    /* valid as long as the client */
  const char* job;       /* likewise */
  uint32_t daemon_uid;   /* whose daemon it is */
  uint32_t reserved;
};
MLPO_API int mlpo_client_info(mlpo_client* client, struct mlpo_client_info* info);
/* 0 while the session lives, else why it ended (the text by mlpo_last_error). */
MLPO_API int mlpo_client_alive(mlpo_client* client);
/* Takes completions in, and waits until a submission of this client, whichever, has ended since *seen was stored here
 * (0 for the first call). For threads that look after many requests at once. Errors: -ETIMEDOUT, why the session ended.
 */
MLPO_API int mlpo_client_await(mlpo_client* client, uint64_t* seen, int64_t timeout_ns);
/* The index-th piece of the arena as it is mapped here; pieces are added by registrations and stay mapped until
 * mlpo_client_free. -ENOENT: there are not so many. */
MLPO_API int mlpo_client_arena(mlpo_client* client, uint32_t index, void** base, uint64_t* bytes);

/* ---- Subgroups ---- */
typedef struct mlpo_subgroup mlpo_subgroup;

#define MLPO_DTYPE_FLOAT32 1
#define MLPO_DTYPE_FLOAT16 2
#define MLPO_DTYPE_BFLOAT16 3

struct mlpo_tensor_spec {
  size_t struct_size;
  const char* name;             /* at most 256 bytes */
  uint64_t numel;               /* elements this rank holds */
  uint32_t ndim;                /* 0 to 8; with 0 the tensor is one flat array of numel */
  uint32_t flat;                /* 1: holds elements [flat_first, flat_first + numel) of the row-major global tensor */
  const uint64_t* shape;        /* ndim entries; may be NULL with flat */
  const uint64_t* global_shape; /* ndim entries; NULL: as shape */
  const uint64_t* offsets;      /* ndim entries; NULL: zeros */
  uint64_t flat_first;
};

struct mlpo_subgroup_options {
  size_t struct_size;
  const char* key;                        /* unique within the session; at most 256 bytes, any bytes */
  uint64_t numel;                         /* of all tensors together; 0 is allowed */
  int32_t dtype;                          /* of the parameters handed out: MLPO_DTYPE_* */
  int32_t grad_dtype;                     /* 0: as dtype */
  const struct mlpo_tensor_spec* tensors; /* NULL: one tensor named like the key */
  uint32_t tensor_count;
  uint32_t keep;        /* 1: no slot of its own, see mlpo_slot_lend */
  const float* initial; /* numel master values; NULL: zeros */
};
#define MLPO_SUBGROUP_OPTIONS_INIT \
  { sizeof(struct mlpo_subgroup_options), NULL, 0, MLPO_DTYPE_FLOAT32, 0, NULL, 0, 0, NULL }

/* Registers a subgroup; blocks until the daemon has made its slot and, with `initial`, has the values.
 * Errors: -EEXIST the key is taken, -EINVAL, MLPO_ERR_QUOTA (arena or storage; the text has the figures), -ETIMEDOUT.
 */
MLPO_API int mlpo_subgroup_register(mlpo_client* client, const struct mlpo_subgroup_options* options,
                                    int64_t timeout_ns, mlpo_subgroup** subgroup);
/* Frees the handle; the daemon keeps the subgroup until the session ends. NULL is allowed. */
MLPO_API void mlpo_subgroup_free(mlpo_subgroup* subgroup);

/* ---- Slots that are lent ----
 * For a job whose gradients do not fit its arena. Subgroups with `keep` have no slot of their own: they take turns in
 * what is left of an arena of a fixed size (mlpo_connect_options.arena_bytes) when the first of them is registered, so
 * register those with a slot of their own before. The daemon copies their gradients away as they are submitted.
 *
 * A step: mlpo_slot_lend, write info.grad, submit all of the gradient; once the window is complete (result.
 * window_complete) the slot goes back by itself, and info.grad and info.param are NULL. mlpo_submit_update takes a
 * slot for the parameters, waiting for one if need be; mlpo_slot_give_back when they have been read. A window that is
 * discarded gives its slot back, too. A slot whose update failed stays lent until the update is repeated or the window
 * discarded. */

/* Lends the subgroup a slot, waiting until there is room; at once if it has one, or one of its own. -ETIMEDOUT: the
 * text has who holds how much. */
MLPO_API int mlpo_slot_lend(mlpo_subgroup* subgroup, int64_t timeout_ns);
/* Its pointers are no longer the subgroup's. Nothing happens if it has none, or one of its own. MLPO_ERR_SLOT_BUSY: the
 * daemon needs it, or a window is open. */
MLPO_API int mlpo_slot_give_back(mlpo_subgroup* subgroup);

struct mlpo_subgroup_info {
  size_t struct_size;
  uint64_t numel;
  int32_t dtype;
  int32_t grad_dtype;
  uint32_t tensor_count;
  uint32_t epoch;             /* of the last completed update */
  void* grad;                 /* numel elements of grad_dtype; written by the client while the slot is open */
  void* param;                /* numel elements of dtype; valid after an update until the next write of the gradient */
  uint64_t* epoch_word;       /* in the slot's header: the epoch, stored after the parameters; volatile */
  uint64_t updates_ended;     /* updates that have ended, whatever with */
  int32_t update_outstanding; /* 1: one was submitted and has not been seen to end */
  int32_t holds_param;        /* 1: param is valid now, by an update or a restore */
  uint32_t keep;              /* 1: it has no slot of its own: grad, param and epoch_word are NULL while none is lent */
  uint32_t reserved;
};
MLPO_API int mlpo_subgroup_info(mlpo_subgroup* subgroup, struct mlpo_subgroup_info* info);
/* Says that the caller begins to write a gradient into the slot, which loses the parameters where the two share bytes:
 * from now on holds_param is 0. The submissions of gradients do it by themselves; this is for who writes the slot long
 * before, while others may ask for its parameters. MLPO_ERR_SLOT_BUSY: an update of the subgroup has not ended.
 * -EINVAL: it has no slot now. */
MLPO_API int mlpo_grad_begin(mlpo_subgroup* subgroup);
/* From now on updates_ended is stored in *word too (release), by whichever thread sees an update end or the session
 * end; NULL ends that. The word must live until then. For who waits for an update by memory, as a GPU's stream does:
 * some thread has to take completions in meanwhile (mlpo_client_await). -EEXIST: there is one already. */
MLPO_API int mlpo_subgroup_watch(mlpo_subgroup* subgroup, uint64_t* word);

/* ---- Requests ----
 * A request is one or more submissions and ends exactly once. It may be freed before it ended: the work goes on. */
typedef struct mlpo_request mlpo_request;

struct mlpo_result {
  size_t struct_size;
  int status;                   /* 0 or a negative code */
  int os_errno;                 /* of a storage failure, else 0 */
  double sum_of_squares;        /* GRAD: of the raw gradient, of the whole window once window_complete */
  int all_finite;               /* GRAD */
  int window_complete;          /* GRAD: every element is covered and all GRADs of the window have ended */
  uint64_t value;               /* UPDATE: the epoch */
  uint32_t tensor, block, path; /* of a failure; UINT32_MAX if none */
  uint64_t first, count;        /* of a failure: elements of the subgroup */
  char text[256];               /* of a failure */
};

/* Waits. 0: ended with success; the request's own negative code: ended with that; -ETIMEDOUT: goes on. `result` may be
 * NULL. The calling thread's mlpo_last_error() is set to the failure's text. */
MLPO_API int mlpo_request_wait(mlpo_request* request, int64_t timeout_ns, struct mlpo_result* result);
/* Waits until one of `count` requests of one client has ended, with whatever, and stores in *index which: the first in
 * the array that has. 0; -ETIMEDOUT: none has; -EINVAL: no requests, a NULL among them, or of several clients. What it
 * ended with is for mlpo_request_wait to say. No request may be freed during the call. */
MLPO_API int mlpo_wait_any(mlpo_request* const* requests, size_t count, int64_t timeout_ns, size_t* index);
/* 1 if it has ended, 0 if not, negative on misuse. Never blocks. */
MLPO_API int mlpo_request_done(mlpo_request* request);
MLPO_API void mlpo_request_free(mlpo_request* request); /* NULL is allowed */

/* Submissions below block only on a full ring, until timeout_ns, and return MLPO_ERR_SLOT_BUSY for a slot that the
 * daemon has (an update submitted and not ended). */

#define MLPO_GRAD_VALUE 1 /* bytes in the slot */
#define MLPO_GRAD_ZERO 2  /* the gradient is 0; bytes are not read */
#define MLPO_GRAD_SKIP 3  /* whole tensors: state and step untouched */
struct mlpo_grad_piece {
  uint64_t first; /* elements of the subgroup */
  uint64_t count;
  uint32_t kind; /* MLPO_GRAD_* */
  uint32_t reserved;
};
/* Tells the daemon that pieces of the gradient are in the slot; NULL: all of it, VALUE. */
MLPO_API int mlpo_submit_grad(mlpo_subgroup* subgroup, const struct mlpo_grad_piece* pieces, size_t count,
                              int64_t timeout_ns, mlpo_request** request);

/* The same in two halves, for a gradient that somebody else completes: a request is made now, and submitted by the one
 * call of mlpo_request_post, which never waits and is fit for a CUDA host callback. If the ring is full the submission
 * goes to a list of this process that whoever submits or takes completions in empties, before anything newer. Until
 * it is posted, updates and discards of the subgroup are -EBUSY. mlpo_request_free before the post is allowed: the post
 * is due all the same, and the memory lives that long. */
MLPO_API int mlpo_prepare_grad(mlpo_subgroup* subgroup, const struct mlpo_grad_piece* pieces, size_t count,
                               mlpo_request** request);
/* Errors (the request has ended with them): why the session ended, MLPO_ERR_FORKED. -EINVAL: it was posted before. */
MLPO_API int mlpo_request_post(mlpo_request* request);
/* Instead of a post: nothing is submitted, and the request ends with `code` (negative) and `text`. */
MLPO_API int mlpo_request_abandon(mlpo_request* request, int code, const char* text);

#define MLPO_OPTIMIZER_ADAMW 1
#define MLPO_OPTIMIZER_ADAM 2
struct mlpo_update_options {
  size_t struct_size;
  double lr, beta1, beta2, eps, weight_decay;
  double grad_scale; /* multiplies the gradient */
  int32_t mode;      /* MLPO_OPTIMIZER_* */
  int32_t no_bias_correction;
  int32_t apply_nonfinite; /* 1: update although the gradient is not finite */
  uint32_t priority;       /* lower goes first; 0: order of submission */
};
#define MLPO_UPDATE_OPTIONS_INIT \
  { sizeof(struct mlpo_update_options), 1e-3, 0.9, 0.999, 1e-8, 0.01, 1.0, MLPO_OPTIMIZER_ADAMW, 0, 0, 0 }
/* Applies one optimizer step to the subgroup. -EINVAL for hyper-parameters that are not finite or out of range. */
MLPO_API int mlpo_submit_update(mlpo_subgroup* subgroup, const struct mlpo_update_options* options, int64_t timeout_ns,
                                mlpo_request** request);

/* Ends the open window of one subgroup, or of all of the session: gradients forgotten, nothing else changes.
 * overflow = 1 counts one skipped step of the session. Blocks until done. */
MLPO_API int mlpo_subgroup_discard(mlpo_subgroup* subgroup, int overflow, int64_t timeout_ns);
MLPO_API int mlpo_client_discard(mlpo_client* client, int overflow, int64_t timeout_ns);

/* A round trip through the ring. */
MLPO_API int mlpo_submit_nop(mlpo_client* client, int64_t timeout_ns, mlpo_request** request);

/* Reads or writes state of elements [first, first + count): arrays of count floats; NULL leaves a part out. They stream
 * through a staging area and block until done. A write makes a torn subgroup whole once every element was written
 * since. */
MLPO_API int mlpo_read_state(mlpo_subgroup* subgroup, uint64_t first, uint64_t count, float* master, float* exp_avg,
                             float* exp_avg_sq, int64_t timeout_ns);
MLPO_API int mlpo_write_state(mlpo_subgroup* subgroup, uint64_t first, uint64_t count, const float* master,
                              const float* exp_avg, const float* exp_avg_sq, int64_t timeout_ns);
/* Step counts of tensors [first, first + count). */
MLPO_API int mlpo_read_steps(mlpo_subgroup* subgroup, uint32_t first, uint32_t count, int64_t* steps,
                             int64_t timeout_ns);
MLPO_API int mlpo_write_steps(mlpo_subgroup* subgroup, uint32_t first, uint32_t count, const int64_t* steps,
                              int64_t timeout_ns);

/* ---- Named objects ----
 * Bytes that all ranks of the job share by a name (1 to 256 bytes, any but 0), kept by the daemon in its pool and on
 * its paths until the job's last session ends. A flush makes a new version: readers see the one before or all of the
 * new one, never a mix, and of flushes that run at once the last to end wins. A fetch reads one version to its end,
 * whatever is flushed or deleted meanwhile. The calls stream through the staging area, one at a time a client, and
 * block until done; after a passed deadline a flush may still have happened, whole or not at all. Errors: -ENOENT no
 * such name, -ENOSPC the paths have no room (the text names them; a version that is there stays), -EINVAL,
 * MLPO_ERR_QUOTA too many objects, MLPO_ERR_IO, -ETIMEDOUT, -EOPNOTSUPP with a daemon that has none. */
MLPO_API int mlpo_object_flush(mlpo_client* client, const char* name, const void* data, uint64_t bytes,
                               int64_t timeout_ns);
/* Bytes [first, first + count) of the object, which it must have, into `out`; its size in *bytes (may be NULL). */
MLPO_API int mlpo_object_fetch(mlpo_client* client, const char* name, uint64_t first, uint64_t count, void* out,
                               uint64_t* bytes, int64_t timeout_ns);
MLPO_API int mlpo_object_size(mlpo_client* client, const char* name, uint64_t* bytes, int64_t timeout_ns);
MLPO_API int mlpo_object_delete(mlpo_client* client, const char* name, int64_t timeout_ns);

/* ---- Control socket ----
 * Sends one JSON-RPC 2.0 request (`method`, `params`: JSON text or NULL) to the daemon's control socket
 * ("<socket>.ctl"; socket as in mlpo_connect_options) and returns the result as JSON text, to be freed with mlpo_free.
 * -EPROTO with the daemon's message on a JSON-RPC error. Needs no session.
 *
 * Of interest to trainers on several nodes that share a path with share = "measured": "share_figures" {"job": J} gives
 * {"daemon": D, "paths": {name: [seen_bytes_per_s, busy_s, others_bytes_per_s, step_bytes]}}. Gathered over one rank a
 * node (D is another one for each daemon), with busy_s since the last time, they go to every node's daemon as "share"
 * {"job": J, "path": name, "nodes": [[...], ...], "me": index of this node's}. */
MLPO_API int mlpo_control(const char* socket, const char* method, const char* params, int64_t timeout_ns, char** json);
MLPO_API void mlpo_free(void* memory);

/* ---- Checkpoints ----
 * All ranks of a job save under one tag; each rank's part is complete by itself, the checkpoint when all are. begin
 * makes the files; take ends when the state is as it will be saved, and training may go on (it may already while take
 * waits: what is submitted after it is not in the checkpoint); saved ends when this rank's part is durable. One
 * checkpoint of a client at a time.
 *
 * Restoring fills subgroups by the names and global shapes of their tensors, whatever number of ranks saved them, and
 * leaves the rounded parameters in the slots: begin, mlpo_submit_restore of each subgroup, end. */
struct mlpo_checkpoint_options {
  size_t struct_size;
  const char* directory; /* absolute; it is there */
  const char* tag;       /* [A-Za-z0-9_][A-Za-z0-9._-]{0,127} */
  uint64_t step;
  const uint8_t* attempt; /* 16 bytes, the same for all ranks of one save, new for each; NULL: the daemon chooses, if
                             all ranks are connected to it */
  uint32_t overwrite;     /* 1: a complete checkpoint under the tag goes when this one is complete; else -EEXIST */
  uint32_t reserved;
  const int* files; /* NULL: the daemon makes the files, and must run as this user. Else two descriptors, of empty files
                       of this user that are open for reading and writing: the part's data and its manifest. They stay
                       the caller's, who gives them their names (daemon/checkpoint/README.md) when saved has ended, and
                       makes that durable, with a lock on the data meanwhile (proto/FORMAT.md, Checkpoints); directory
                       and overwrite mean nothing then. Not memory: -EINVAL. */
};
#define MLPO_CHECKPOINT_OPTIONS_INIT \
  { sizeof(struct mlpo_checkpoint_options), NULL, NULL, 0, NULL, 0, 0, NULL }

struct mlpo_checkpoint_info {
  size_t struct_size;
  uint64_t bytes; /* that are copied at most */
  uint32_t handle;
  uint32_t reserved;
  uint8_t attempt[16];
};
/* Errors: -EEXIST, -EBUSY this client's last one has not ended, -ENOSPC with the figures, -EPERM the daemon is another
 * user's and no files were given, -EINVAL, -ETIMEDOUT. */
MLPO_API int mlpo_checkpoint_begin(mlpo_client* client, const struct mlpo_checkpoint_options* options,
                                   int64_t timeout_ns, struct mlpo_checkpoint_info* info);
/* Result: value is the bytes that are being copied. MLPO_ERR_SLOT_BUSY: a window is open; MLPO_ERR_TORN. -ESTALE:
 * subgroups were registered since begin; abandon it, and begin anew. MLPO_ERR_IO: a path does not answer, or cannot be
 * written; this checkpoint has failed, and training goes on. */
MLPO_API int mlpo_checkpoint_take(mlpo_client* client, uint32_t handle, int64_t timeout_ns, mlpo_request** request);
/* Result: value is 1 if the parts of all ranks are there. */
MLPO_API int mlpo_checkpoint_saved(mlpo_client* client, uint32_t handle, int64_t timeout_ns, mlpo_request** request);
/* Gives it up: nothing of it stays. -EALREADY: it is too late, all has been copied and is being made durable; saved
 * says how that ends. */
MLPO_API int mlpo_checkpoint_abandon(mlpo_client* client, uint32_t handle, int64_t timeout_ns);

/* 1 if somebody has asked for a checkpoint (mlpo-ctl checkpoint request) since this client began its last one, else 0.
 * Ranks may hear of it at different steps: let one of them decide for all. Never waits. */
MLPO_API int mlpo_checkpoint_requested(mlpo_client* client);

struct mlpo_restore_info {
  size_t struct_size;
  uint64_t step;
  uint32_t world_size; /* of those who saved */
  uint32_t handle;
  uint8_t attempt[16];
  char tag[136];
};
/* For the subgroups that are registered now. tag: NULL is the newest that is complete. attempt: 16 bytes, with a tag
 * only; NULL: the one of the tag that counts. Another checkpoint may become complete between the calls of two ranks:
 * let one of them begin without, and the others with the tag and the attempt of its info. -ENOENT: there is none, or
 * not that attempt; -EINVAL: a tensor is not in it as it is here, or attempt without tag. */
MLPO_API int mlpo_restore_begin(mlpo_client* client, const char* directory, const char* tag, const uint8_t* attempt,
                                int64_t timeout_ns, struct mlpo_restore_info* info);
/* The same from files that the caller has opened, for a daemon of another user: the manifests of all parts of one
 * checkpoint in the order of ranks, then the data files that they name, in their order; at most 4096 in all. They stay
 * the caller's. */
MLPO_API int mlpo_restore_begin_files(mlpo_client* client, const int* files, uint32_t count, int64_t timeout_ns,
                                      struct mlpo_restore_info* info);
/* MLPO_ERR_SLOT_BUSY, and nothing is touched: a subgroup, with a handle's first one any of the client, has a gradient
 * without its update, or an update that has not ended. One that fails with anything else leaves the subgroup without
 * state: restore it again, or write all of it. */
MLPO_API int mlpo_submit_restore(mlpo_subgroup* subgroup, uint32_t handle, int64_t timeout_ns, mlpo_request** request);
/* After the last of them has ended. A session has four handles at most that have not been ended: beginning one more is
 * -EBUSY. */
MLPO_API int mlpo_restore_end(mlpo_client* client, uint32_t handle, int64_t timeout_ns);

#ifdef __cplusplus
#if defined(__GNUC__)
#pragma GCC diagnostic pop
#endif
}
#endif

#endif /* MLPO_CLIENT_H_ */
