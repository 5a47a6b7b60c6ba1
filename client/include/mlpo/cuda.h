/* mlpo/cuda.h: gradients from a GPU into slots, parameters from slots to a GPU, in stream order. Library: libmlpo_cuda,
 * built where the CUDA toolkit is; it shares the program's CUDA runtime. Everything client.h says of results, threads,
 * time and structs holds here too. No function synchronizes a device, and none leaves an error behind that the
 * program's own cudaGetLastError() would find.
 *
 * What is in memory that CUDA has not pinned (see mlpo_cuda_info) is copied all the same, but the calling thread then
 * waits for its stream.
 *
 * A stream that waits for an update waits on a word of this process (cuStreamWaitValue64), not on the epoch word in the
 * slot's header, which only a success moves. The word counts the subgroup's updates that have ended, and is moved by
 * whoever learns of the end: a success, a failure, the daemon's death, mlpo_client_close. A thread of this library
 * takes completions in as long as a stream waits. So a stream that waits for an update is always released, whatever the
 * program's threads do. Behind the wait a kernel reads the epoch in the slot's header, and copies only if the update
 * succeeded: after one that failed the device's parameters are what they were. */
#ifndef MLPO_CUDA_H_
#define MLPO_CUDA_H_

#include "mlpo/client.h"

#ifdef __cplusplus
extern "C" {
#if defined(__GNUC__) /* a function and the struct it fills share their name */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wshadow"
#endif
#endif

typedef struct CUstream_st* mlpo_cuda_stream; /* a cudaStream_t of the device of mlpo_cuda_attach */

/* ---- A client's CUDA side ---- */
typedef struct mlpo_cuda mlpo_cuda;

struct mlpo_cuda_options {
  size_t struct_size;
  int32_t device;       /* -1: the calling thread's */
  int32_t no_pin;       /* 1: leaves the arena unpinned */
  int32_t no_wait;      /* 1: lets no stream wait: the calling thread waits for updates */
  int32_t reserved;     /* 0 */
  uint64_t piece_bytes; /* pinned at a time, a multiple of the page; 0: 1 GiB */
};
#define MLPO_CUDA_OPTIONS_INIT \
  { sizeof(struct mlpo_cuda_options), -1, 0, 0, 0, 0 }

/* Pins the client's arena (cudaHostRegister: portable, mapped) and starts the thread that releases streams. When
 * pinning fails everything works unpinned, and mlpo_cuda_info says why. Errors: -ENODEV no GPU, -ENOMEM, -EINVAL. */
MLPO_API int mlpo_cuda_attach(mlpo_client* client, const struct mlpo_cuda_options* options, mlpo_cuda** cuda);
/* Unpins the arena and frees. Before mlpo_client_free, and after all slots were closed: else -EBUSY. NULL is allowed.
 */
MLPO_API int mlpo_cuda_detach(mlpo_cuda* cuda);
/* Pins what registrations have added to the arena, and what failed before. mlpo_cuda_slot_open does the first of the
 * two by itself. Error: as info.pin_code. */
MLPO_API int mlpo_cuda_pin(mlpo_cuda* cuda);

struct mlpo_cuda_info {
  size_t struct_size;
  uint64_t arena_bytes;  /* mapped */
  uint64_t pinned_bytes; /* of them */
  int32_t device;
  int32_t stream_waits; /* 1: streams wait for updates; 0: the calling thread does */
  int32_t pin_code;     /* 0, or why the rest of the arena is not pinned */
  int32_t cuda_error;   /* the cudaError_t of that */
  char pin_text[512];   /* what failed, and what to do */
};
MLPO_API int mlpo_cuda_info(mlpo_cuda* cuda, struct mlpo_cuda_info* info);

/* ---- Slots ---- */
typedef struct mlpo_cuda_slot mlpo_cuda_slot;

/* One slot a subgroup: -EEXIST. -EINVAL: the subgroup is of another client. */
MLPO_API int mlpo_cuda_slot_open(mlpo_cuda* cuda, mlpo_subgroup* subgroup, mlpo_cuda_slot** slot);
/* Waits until no copy of the slot is in flight and no stream waits for it, then frees. Before mlpo_subgroup_free.
 * -ETIMEDOUT: the slot stays open. Streams that wait for an update go on when it ends; mlpo_client_close ends all of
 * them. NULL is allowed. */
MLPO_API int mlpo_cuda_slot_close(mlpo_cuda_slot* slot, int64_t timeout_ns);

#define MLPO_CUDA_IN_SLOT 1 /* of a VALUE: mlpo_cuda_write_grad has put it into the slot, so that nothing is copied */
struct mlpo_cuda_piece {
  uint64_t first; /* elements of the subgroup */
  uint64_t count;
  const void* device; /* VALUE: count elements of the slot's grad_dtype on the device; NULL with MLPO_CUDA_IN_SLOT */
  uint32_t kind;      /* MLPO_GRAD_* */
  uint32_t flags;     /* MLPO_CUDA_* */
};
/* Copies gradients into the slot on `stream`, behind what reads the slot's parameters, and has them submitted when the
 * stream gets there: returns at once with the request, as mlpo_prepare_grad does. The device's memory may change once
 * the stream is past the copies. Errors: as mlpo_prepare_grad; -EINVAL also for a stream that is being captured; -EIO
 * and others for CUDA's. If CUDA fails later the request ends with -EIO. */
MLPO_API int mlpo_cuda_copy_grad(mlpo_cuda_slot* slot, const struct mlpo_cuda_piece* pieces, size_t count,
                                 mlpo_cuda_stream stream, mlpo_request** request);
/* For a gradient that comes in parts, or is added up over several passes: copies elements [first, first + count) of it
 * into the slot on `stream`, behind what reads the slot's parameters and what was written before, and submits nothing.
 * mlpo_cuda_copy_grad then does, by pieces with MLPO_CUDA_IN_SLOT; its stream is put behind these copies, whichever
 * theirs were. Returns at once. Where gradient and parameters share their bytes the parameters are gone from the call
 * on. Errors: MLPO_ERR_SLOT_BUSY an update is outstanding; as mlpo_cuda_copy_grad. */
MLPO_API int mlpo_cuda_write_grad(mlpo_cuda_slot* slot, uint64_t first, uint64_t count, const void* device,
                                  mlpo_cuda_stream stream);
/* Copies what mlpo_cuda_write_grad has put there to `device` on `stream`, behind these copies. */
MLPO_API int mlpo_cuda_read_grad(mlpo_cuda_slot* slot, uint64_t first, uint64_t count, void* device,
                                 mlpo_cuda_stream stream);
/* Copies elements [first, first + count) of the parameters to `device` (the slot's dtype) on `stream`: after the update
 * that is outstanding now, if one is. If that fails nothing is copied; its request says why. Where streams cannot wait
 * (info.stream_waits, unpinned memory) the calling thread waits for the update instead, until timeout_ns, and a failed
 * one is -ECANCELED. -ENODATA: the slot holds no parameters: no update is outstanding, and neither an update nor a
 * restore has ended well since the last gradient. */
MLPO_API int mlpo_cuda_copy_param(mlpo_cuda_slot* slot, uint64_t first, uint64_t count, void* device,
                                  mlpo_cuda_stream stream, int64_t timeout_ns);
/* Only the wait: `stream` goes on when the update that is outstanding now has ended, whatever with. */
MLPO_API int mlpo_cuda_wait(mlpo_cuda_slot* slot, mlpo_cuda_stream stream, int64_t timeout_ns);

/* ---- Kernels: on the device that is current, for tensors on it ---- */
struct mlpo_cuda_tensor {
  const void* data;
  uint64_t numel;
  int32_t dtype; /* MLPO_DTYPE_* */
  int32_t reserved;
};
/* Writes tensors one after another to `out`, as out_dtype: out = round(f32(x) * f32(scale)), to nearest even, NaN stays
 * NaN. With one tensor it casts; with scale = 1/s it unscales, in place if out is the tensor's own data and type. */
MLPO_API int mlpo_cuda_pack(const struct mlpo_cuda_tensor* tensors, size_t count, void* out, int32_t out_dtype,
                            double scale, mlpo_cuda_stream stream);
/* Sum of squares in FP64 and whether all is finite, stored on the device: to the bit what the daemon finds in a
 * gradient of these tensors (proto/FORMAT.md, section 5). Takes memory from the stream's pool (cudaMallocAsync). */
MLPO_API int mlpo_cuda_norm(const struct mlpo_cuda_tensor* tensors, size_t count, double* sum_of_squares,
                            int32_t* all_finite, mlpo_cuda_stream stream);

#ifdef __cplusplus
#if defined(__GNUC__)
#pragma GCC diagnostic pop
#endif
}
#endif

#endif /* MLPO_CUDA_H_ */
