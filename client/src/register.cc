// Subgroups: registration, and what is known about them.
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <new>

#include "client/src/session.h"
#include "client/src/subgroup.h"
#include "client/src/versioned_struct.h"
#include "proto/control.h"
#include "proto/ring.h"
#include "proto/status.h"

namespace mlpo::client {
namespace {

bool KnownType(int32_t dtype) { return dtype >= MLPO_DTYPE_FLOAT32 && dtype <= MLPO_DTYPE_BFLOAT16; }

uint64_t ElementBytes(int32_t dtype) { return dtype == MLPO_DTYPE_FLOAT32 ? 4 : 2; }

bool Product(const uint64_t* factors, uint32_t count, uint64_t* product) {
  uint64_t result = 1;
  for (uint32_t i = 0; i < count; ++i) {
    if (__builtin_mul_overflow(result, factors[i], &result)) return false;
  }
  *product = result;
  return true;
}

int FillBox(const mlpo_tensor_spec& spec, mlpo_tensor_record* record) {
  if (spec.shape == nullptr) return Fail(-EINVAL, "tensor %s: shape is NULL", spec.name);
  uint64_t elements;
  if (!Product(spec.shape, spec.ndim, &elements) || elements != spec.numel) {
    return Fail(-EINVAL, "tensor %s: its shape does not have the %llu elements of numel", spec.name,
                static_cast<unsigned long long>(spec.numel));
  }
  for (uint32_t d = 0; d < spec.ndim; ++d) {
    const uint64_t offset = spec.offsets != nullptr ? spec.offsets[d] : 0;
    const uint64_t global = spec.global_shape != nullptr ? spec.global_shape[d] : spec.shape[d];
    if (offset > global || spec.shape[d] > global - offset) {
      return Fail(-EINVAL, "tensor %s: dimension %u holds [%llu, +%llu) of %llu", spec.name, d,
                  static_cast<unsigned long long>(offset), static_cast<unsigned long long>(spec.shape[d]),
                  static_cast<unsigned long long>(global));
    }
    record->shape[d] = spec.shape[d];
    record->global_shape[d] = global;
    record->offsets[d] = offset;
  }
  return 0;
}

int FillFlat(const mlpo_tensor_spec& spec, mlpo_tensor_record* record) {
  const uint64_t* global = spec.global_shape != nullptr ? spec.global_shape : spec.shape;
  if (global == nullptr) return Fail(-EINVAL, "tensor %s: flat without a global shape", spec.name);
  uint64_t elements;
  if (!Product(global, spec.ndim, &elements) || spec.flat_first > elements || spec.numel > elements - spec.flat_first) {
    return Fail(-EINVAL, "tensor %s: [%llu, +%llu) does not lie within its global shape", spec.name,
                static_cast<unsigned long long>(spec.flat_first), static_cast<unsigned long long>(spec.numel));
  }
  memcpy(record->global_shape, global, spec.ndim * sizeof *global);
  record->flags = MLPO_TENSOR_FLAT;
  record->flat_first = spec.flat_first;
  return 0;
}

int FillTensor(const mlpo_tensor_spec& spec, mlpo_tensor_record* record) {
  if (spec.name == nullptr || *spec.name == '\0') return Fail(-EINVAL, "a tensor has no name");
  const size_t name_bytes = strlen(spec.name);
  if (name_bytes > MLPO_MAX_TENSOR_NAME)
    return Fail(-EINVAL, "tensor %.64s...: its name is longer than %d bytes", spec.name, MLPO_MAX_TENSOR_NAME);
  if (spec.ndim > MLPO_MAX_DIMS)
    return Fail(-EINVAL, "tensor %s: %u dimensions, at most %d", spec.name, spec.ndim, MLPO_MAX_DIMS);
  if (spec.flat > 1) return Fail(-EINVAL, "tensor %s: flat is %u, neither 0 nor 1", spec.name, spec.flat);
  *record = {};
  record->numel = spec.numel;
  record->ndim = spec.ndim;
  record->name_bytes = static_cast<uint32_t>(name_bytes);
  memcpy(record->name, spec.name, name_bytes);
  if (spec.ndim == 0) {
    if (spec.flat != 0) return Fail(-EINVAL, "tensor %s: flat without a global shape", spec.name);
    record->ndim = 1;
    record->shape[0] = record->global_shape[0] = spec.numel;
    return 0;
  }
  return spec.flat != 0 ? FillFlat(spec, record) : FillBox(spec, record);
}

// The i-th tensor of the options: their array is of the caller's struct size.
int TakeTensor(const mlpo_subgroup_options& options, uint32_t i, mlpo_tensor_record* record) {
  mlpo_tensor_spec spec = {};
  if (options.tensors == nullptr) {
    spec.name = options.key;
    spec.numel = options.numel;
  } else {
    const auto* base = reinterpret_cast<const std::byte*>(options.tensors);
    const auto* given = reinterpret_cast<const mlpo_tensor_spec*>(base + i * options.tensors[0].struct_size);
    if (given->struct_size != options.tensors[0].struct_size)
      return Fail(-EINVAL, "tensors[%u].struct_size differs from tensors[0]'s", i);
    if (int code = TakeStruct(given, &spec, "mlpo_tensor_spec"); code != 0) return code;
  }
  return FillTensor(spec, record);
}

uint32_t TensorCount(const mlpo_subgroup_options& options) {
  return options.tensors == nullptr ? 1 : options.tensor_count;
}

int CheckOptions(mlpo_subgroup_options* options) {
  if (options->key == nullptr || *options->key == '\0') return Fail(-EINVAL, "the subgroup has no key");
  if (strlen(options->key) > MLPO_MAX_KEY)
    return Fail(-EINVAL, "key %.64s... is longer than %d bytes", options->key, MLPO_MAX_KEY);
  if (options->grad_dtype == 0) options->grad_dtype = options->dtype;
  if (!KnownType(options->dtype)) return Fail(-EINVAL, "subgroup %s: dtype %d", options->key, options->dtype);
  if (!KnownType(options->grad_dtype))
    return Fail(-EINVAL, "subgroup %s: grad_dtype %d", options->key, options->grad_dtype);
  if (options->keep > 1) return Fail(-EINVAL, "subgroup %s: keep is %u, neither 0 nor 1", options->key, options->keep);
  if (options->tensors != nullptr && options->tensor_count == 0)
    return Fail(-EINVAL, "subgroup %s: tensors without a tensor_count", options->key);
  uint64_t total = 0;
  for (uint32_t i = 0; i < TensorCount(*options); ++i) {
    mlpo_tensor_record record;
    if (int code = TakeTensor(*options, i, &record); code != 0) return code;
    if (__builtin_add_overflow(total, record.numel, &total)) total = UINT64_MAX;
  }
  if (total != options->numel) {
    return Fail(-EINVAL, "subgroup %s: its tensors have %llu elements, numel says %llu", options->key,
                static_cast<unsigned long long>(total), static_cast<unsigned long long>(options->numel));
  }
  return 0;
}

int SendTensors(SessionSocket& socket, const mlpo_subgroup_options& options, uint32_t seq, Deadline deadline) {
  // 60 KiB: not on the stack of a caller's thread.
  constexpr size_t kMost = sizeof(mlpo_register_tensors) + MLPO_TENSORS_PER_FRAME * sizeof(mlpo_tensor_record);
  auto* frame = static_cast<mlpo_register_tensors*>(malloc(kMost));
  if (frame == nullptr) return socket.EndSession(Fail(-ENOMEM, "no memory for a frame"));
  int code = 0;
  const uint32_t tensors = TensorCount(options);
  for (uint32_t first = 0; first < tensors && code == 0; first += MLPO_TENSORS_PER_FRAME) {
    const uint32_t count = tensors - first < MLPO_TENSORS_PER_FRAME ? tensors - first : MLPO_TENSORS_PER_FRAME;
    const size_t bytes = sizeof *frame + count * sizeof(mlpo_tensor_record);
    SetHeader(frame, MLPO_FRAME_REGISTER_TENSORS, seq, bytes);
    frame->count = count;
    frame->reserved = 0;
    auto* records = reinterpret_cast<mlpo_tensor_record*>(frame + 1);
    for (uint32_t i = 0; i < count && code == 0; ++i) code = TakeTensor(options, first + i, &records[i]);
    code = code == 0 ? socket.Send(frame, bytes, deadline) : socket.EndSession(code);  // changed under our hands
  }
  free(frame);
  return code;
}

int SendRegistration(SessionSocket& socket, const mlpo_subgroup_options& options, uint32_t seq, Deadline deadline) {
  mlpo_register_begin begin = {};
  SetHeader(&begin, MLPO_FRAME_REGISTER_BEGIN, seq);
  begin.dtype = static_cast<uint32_t>(options.dtype);
  begin.grad_dtype = static_cast<uint32_t>(options.grad_dtype);
  begin.numel = options.numel;
  begin.tensors = TensorCount(options);
  begin.key_bytes = static_cast<uint32_t>(strlen(options.key));
  memcpy(begin.key, options.key, begin.key_bytes);
  int code = socket.Send(&begin, sizeof begin, deadline);
  if (code == 0 && options.keep != 0) {
    mlpo_frame keep;
    SetHeader(&keep, MLPO_FRAME_REGISTER_KEEP, seq);
    code = socket.Send(&keep, sizeof keep, deadline);
  }
  if (code == 0) code = SendTensors(socket, options, seq, deadline);
  if (code != 0) return code;
  mlpo_frame end;
  SetHeader(&end, MLPO_FRAME_REGISTER_END, seq);
  return socket.Send(&end, sizeof end, deadline);
}

// The slot, checked to lie within the arena and to be aligned for its element types.
int TakeSlot(SessionSocket& socket, const ReceivedFrame& answer, mlpo_subgroup* subgroup) {
  const auto* registered = answer.As<mlpo_registered>();
  if (registered != nullptr && registered->subgroup != 0 && registered->reserved == 0 && subgroup->slot_bytes != 0 &&
      (registered->arena | registered->header_offset | registered->grad_offset | registered->param_offset) == 0) {
    subgroup->handle = registered->subgroup;
    return 0;
  }
  if (registered != nullptr && registered->subgroup != 0 && registered->reserved == 0 && subgroup->slot_bytes == 0) {
    const uint64_t grad_bytes = subgroup->numel * ElementBytes(subgroup->grad_dtype);
    const uint64_t param_bytes = subgroup->numel * ElementBytes(subgroup->dtype);
    subgroup->handle = registered->subgroup;
    subgroup->header = socket.ArenaBytes(registered->arena, registered->header_offset, MLPO_SLOT_HEADER_BYTES);
    subgroup->grad = socket.ArenaBytes(registered->arena, registered->grad_offset, grad_bytes);
    subgroup->param = socket.ArenaBytes(registered->arena, registered->param_offset, param_bytes);
    const bool aligned = (registered->header_offset | registered->grad_offset | registered->param_offset) % 64 == 0;
    const bool shared = grad_bytes == param_bytes;
    if (subgroup->header != nullptr && subgroup->grad != nullptr && subgroup->param != nullptr && aligned &&
        (subgroup->grad == subgroup->param) == (shared || subgroup->numel == 0))
      return 0;
  }
  return socket.EndSession(Fail(MLPO_E_PROTOCOL, "the daemon sent a malformed REGISTERED frame"));
}

int Register(mlpo_client* client, const mlpo_subgroup_options& options, mlpo_subgroup* subgroup, Deadline deadline) {
  SessionSocket& socket = client->socket;
  TurnHolder turn(socket.turn(), deadline);
  if (!turn.held()) return Fail(-ETIMEDOUT, "another thread's registration still runs");
  uint32_t seq;
  int code = options.keep != 0 ? client->lent.Open(client, deadline) : 0;
  if (code == 0) code = socket.Begin(deadline, &seq);
  if (code == 0) code = SendRegistration(socket, options, seq, deadline);
  ReceivedFrame answer;
  if (code == 0) code = socket.Await(MLPO_FRAME_REGISTERED, &answer, deadline);
  if (code == 0) code = TakeSlot(socket, answer, subgroup);
  return code;
}

// What has to be there before the lent area takes all that is left: the staging area, small enough to leave the most.
int PrepareLending(mlpo_client* client, Deadline deadline) {
  if ((client->features & MLPO_FEATURE_KEEP) == 0)
    return Fail(-EOPNOTSUPP, "this daemon keeps no gradients: register the subgroup without keep");
  if (client->arena_bytes == 0) {
    return Fail(-EINVAL,
                "subgroups with keep share what is left of an arena of a fixed size: connect with arena_bytes");
  }
  TurnHolder turn(client->staging.turn(), deadline);
  if (!turn.held()) return Fail(-ETIMEDOUT, "another thread's state operation still runs");
  return client->staging.Open(client, deadline, client->arena_bytes / 8);
}

// A slot for everything that must fit one, with a header.
uint64_t LentSlotBytes(const mlpo_subgroup_options& options) {
  const uint64_t grad_bytes = options.numel * ElementBytes(options.grad_dtype);
  const uint64_t param_bytes = options.numel * ElementBytes(options.dtype);
  const uint64_t bytes = MLPO_SLOT_HEADER_BYTES + (grad_bytes > param_bytes ? grad_bytes : param_bytes);
  return (bytes + MLPO_SLOT_ALIGN - 1) / MLPO_SLOT_ALIGN * MLPO_SLOT_ALIGN;
}

}  // namespace
}  // namespace mlpo::client

using mlpo::client::Deadline;
using mlpo::client::Fail;
using mlpo::client::MutexLock;

extern "C" {

int mlpo_subgroup_register(mlpo_client* client, const mlpo_subgroup_options* given, int64_t timeout_ns,
                           mlpo_subgroup** out) {
  if (client == nullptr || given == nullptr || out == nullptr)
    return Fail(-EINVAL, "client, options or subgroup is NULL");
  *out = nullptr;
  if (int code = client->CheckProcess(); code != 0) return code;
  mlpo_subgroup_options options = MLPO_SUBGROUP_OPTIONS_INIT;
  if (int code = mlpo::client::TakeStruct(given, &options, "mlpo_subgroup_options"); code != 0) return code;
  if (int code = mlpo::client::CheckOptions(&options); code != 0) return code;
  void* memory = malloc(sizeof(mlpo_subgroup));
  if (memory == nullptr) return Fail(-ENOMEM, "no memory for a subgroup");
  auto* subgroup = new (memory) mlpo_subgroup();
  subgroup->client = client;
  subgroup->numel = options.numel;
  subgroup->dtype = options.dtype;
  subgroup->grad_dtype = options.grad_dtype;
  subgroup->tensor_count = mlpo::client::TensorCount(options);
  const Deadline deadline = Deadline::In(timeout_ns);
  int code = 0;
  if (options.keep != 0) {
    subgroup->slot_bytes = mlpo::client::LentSlotBytes(options);
    code = mlpo::client::PrepareLending(client, deadline);
  }
  if (code == 0) code = mlpo::client::Register(client, options, subgroup, deadline);
  if (code != 0) {
    free(memory);
    return code;
  }
  client->Ref();
  if (options.initial != nullptr && options.numel > 0)
    code = mlpo_write_state(subgroup, 0, options.numel, options.initial, nullptr, nullptr, deadline.LeftNs());
  if (code != 0) {
    mlpo_subgroup_free(subgroup);
    return code;
  }
  *out = subgroup;
  return 0;
}

void mlpo_subgroup_free(mlpo_subgroup* subgroup) {
  if (subgroup == nullptr) return;
  mlpo_client* client = subgroup->client;
  if (client->InChild()) {
    free(subgroup);
  } else {
    MutexLock lock(client->ring.lock());
    subgroup->freed = true;
    subgroup->watch = nullptr;
    subgroup->FreeIfUnused();
    client->ring.WakeWaiters();  // its slot may have come back
  }
  client->Unref();
}

int mlpo_slot_lend(mlpo_subgroup* subgroup, int64_t timeout_ns) {
  if (subgroup == nullptr) return Fail(-EINVAL, "subgroup is NULL");
  mlpo_client* client = subgroup->client;
  if (int code = client->CheckProcess(); code != 0) return code;
  MutexLock lock(client->ring.lock());
  if (int code = client->ring.CheckOpen(); code != 0 || subgroup->slot_bytes == 0) return code;
  return client->ring.WaitForSlot(&client->lent, subgroup, Deadline::In(timeout_ns));
}

int mlpo_slot_give_back(mlpo_subgroup* subgroup) {
  if (subgroup == nullptr) return Fail(-EINVAL, "subgroup is NULL");
  mlpo_client* client = subgroup->client;
  if (int code = client->CheckProcess(); code != 0) return code;
  MutexLock lock(client->ring.lock());
  client->ring.Reap();
  if (int code = client->ring.CheckOpen(); code != 0 || subgroup->slot == nullptr) return code;
  if (!subgroup->MayGiveSlotBack()) {
    return Fail(MLPO_ERR_SLOT_BUSY,
                "the daemon has the subgroup's slot, or an update of it failed: wait for its requests, and end an open "
                "window by an update or a discard");
  }
  client->lent.GiveBack(subgroup);
  client->ring.WakeWaiters();
  return 0;
}

int mlpo_subgroup_watch(mlpo_subgroup* subgroup, uint64_t* word) {
  if (subgroup == nullptr) return Fail(-EINVAL, "subgroup is NULL");
  if (reinterpret_cast<uintptr_t>(word) % sizeof *word != 0) return Fail(-EINVAL, "word is not a multiple of 8");
  mlpo_client* client = subgroup->client;
  if (int code = client->CheckProcess(); code != 0) return code;
  MutexLock lock(client->ring.lock());
  // Who waits for the first word would wait for ever.
  if (word != nullptr && subgroup->watch != nullptr) return Fail(-EEXIST, "the subgroup has a watched word already");
  subgroup->watch = word;
  subgroup->ShowEnded();
  return 0;
}

int mlpo_subgroup_info(mlpo_subgroup* subgroup, struct mlpo_subgroup_info* info) {
  if (subgroup == nullptr) return Fail(-EINVAL, "subgroup is NULL");
  mlpo_client* client = subgroup->client;
  if (int code = client->CheckProcess(); code != 0) return code;
  struct mlpo_subgroup_info full = {};
  full.struct_size = sizeof full;
  full.numel = subgroup->numel;
  full.dtype = subgroup->dtype;
  full.grad_dtype = subgroup->grad_dtype;
  full.tensor_count = subgroup->tensor_count;
  full.keep = subgroup->slot_bytes != 0 ? 1 : 0;
  {
    MutexLock lock(client->ring.lock());
    client->ring.Reap();
    full.grad = subgroup->grad;
    full.param = subgroup->param;
    full.epoch_word = reinterpret_cast<uint64_t*>(subgroup->header);
    full.epoch = subgroup->epoch;
    full.updates_ended = subgroup->updates_ended;
    full.update_outstanding = subgroup->update_outstanding ? 1 : 0;
    full.holds_param = subgroup->holds_param ? 1 : 0;
  }
  return mlpo::client::GiveStruct(full, info, "mlpo_subgroup_info");
}

}  // extern "C"
