// Copies between slots and a device, in stream order.
#include <errno.h>

#include <new>

#include "client/cuda/kernels.h"
#include "client/cuda/side.h"

using mlpo::client::Deadline;
using mlpo::client::kNsPerMs;
using mlpo::client::MutexLock;
using mlpo::cuda::ArenaPins;
using mlpo::cuda::Fail;
using mlpo::cuda::FailCuda;
using mlpo::cuda::GradCopy;
using mlpo::cuda::OnDevice;
using mlpo::cuda::Passed;
using mlpo::cuda::Run;
using mlpo::cuda::Taken;

namespace {

int CheckStream(const OnDevice& on, cudaStream_t stream) {
  if (on.error() != cudaSuccess) return FailCuda(on.error(), "choosing the device");
  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  if (cudaError_t error = Taken(cudaStreamIsCapturing(stream, &capturing)); error != cudaSuccess)
    return FailCuda(error, "the stream");
  if (capturing == cudaStreamCaptureStatusNone) return 0;
  return Fail(-EINVAL, "the stream is being captured: a graph would submit the same gradient at each of its launches");
}

int CheckRange(const mlpo_cuda_slot* slot, const char* what, uint64_t first, uint64_t count) {
  const uint64_t numel = slot->info.numel;
  if (first <= numel && count <= numel - first) return 0;
  return Fail(-EINVAL, "%s is [%llu, +%llu) of a subgroup of %llu elements", what,
              static_cast<unsigned long long>(first), static_cast<unsigned long long>(count),
              static_cast<unsigned long long>(numel));
}

int CheckPieces(const mlpo_cuda_slot* slot, const mlpo_cuda_piece* pieces, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    if (int code = CheckRange(slot, "a piece", pieces[i].first, pieces[i].count); code != 0) return code;
    const mlpo_cuda_piece& piece = pieces[i];
    if ((piece.flags & ~uint32_t{MLPO_CUDA_IN_SLOT}) != 0)
      return Fail(-EINVAL, "pieces[%zu].flags is %u", i, piece.flags);
    const bool in_slot = piece.flags != 0;
    if (in_slot && (piece.kind != MLPO_GRAD_VALUE || piece.device != nullptr))
      return Fail(-EINVAL, "pieces[%zu] is in the slot, but is no VALUE, or has a device address", i);
    if (!in_slot && piece.kind == MLPO_GRAD_VALUE && piece.device == nullptr && piece.count > 0)
      return Fail(-EINVAL, "pieces[%zu].device is NULL", i);
  }
  return 0;
}

// The stream's call-back. Waits for nothing and calls nothing of CUDA; the copy is not touched after its last line.
void PostGrad(void* argument) {
  auto* copy = static_cast<GradCopy*>(argument);
  int copying = GradCopy::kCopying;
  mlpo_request* request = copy->request;
  if (!copy->state.compare_exchange_strong(copying, GradCopy::kPosting)) return;
  mlpo_request_post(request);  // a failure is the request's end
  copy->state.store(GradCopy::kPosted, std::memory_order_release);
}

// Slot lock held. What still reads the parameters stays on the list: other pieces may come on other streams.
int FollowReaders(mlpo_cuda_slot* slot, cudaStream_t stream) {
  for (const cudaEvent_t reader : slot->readers) {
    if (cudaError_t error = Taken(cudaStreamWaitEvent(stream, reader, 0)); error != cudaSuccess)
      return FailCuda(error, "ordering a gradient behind the parameters that are read");
  }
  return 0;
}

// Slot lock held.
int FollowWrites(const mlpo_cuda_slot* slot, cudaStream_t stream) {
  if (slot->written == nullptr) return 0;
  const cudaError_t error = Taken(cudaStreamWaitEvent(stream, slot->written, 0));
  return error == cudaSuccess ? 0 : FailCuda(error, "following what was written of a gradient");
}

// Slot lock held.
void DropReadersThatEnded(mlpo_cuda_slot* slot) {
  std::erase_if(slot->readers, [slot](cudaEvent_t reader) {
    if (Passed(reader) == cudaErrorNotReady) return false;
    MutexLock lock(slot->side->lock);
    slot->side->GiveEvent(reader);
    return true;
  });
}

// Slot lock held. What was put on the stream so far reads the slot.
int NoteReader(mlpo_cuda_slot* slot, cudaStream_t stream) {
  cudaEvent_t event;
  cudaError_t error = slot->side->TakeEvent(&event);
  if (error == cudaSuccess) {
    slot->readers.push_back(event);
    error = Taken(cudaEventRecord(event, stream));
    if (error == cudaSuccess) return 0;
  }
  // Without an event nobody would know when the slot may be written again.
  Taken(cudaStreamSynchronize(stream));
  return FailCuda(error, "marking where the parameters have been read");
}

// Slot lock held. What was put on the stream so far writes the slot.
int NoteWrite(mlpo_cuda_slot* slot, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  if (slot->written == nullptr) {
    cudaEvent_t event;
    error = slot->side->TakeEvent(&event);
    if (error == cudaSuccess) slot->written = event;
  }
  if (error == cudaSuccess) error = Taken(cudaEventRecord(slot->written, stream));
  if (error == cudaSuccess) return 0;
  // Without it nobody would know when the gradient is there.
  Taken(cudaStreamSynchronize(stream));
  return FailCuda(error, "marking where a gradient has been written");
}

int CopyIn(mlpo_cuda_slot* slot, uint64_t first, uint64_t count, const void* device, cudaStream_t stream) {
  const auto* from = static_cast<const std::byte*>(device);
  auto* to = static_cast<std::byte*>(slot->info.grad) + first * slot->grad_bytes;
  for (const Run& run : slot->side->pins.Runs(to, count * slot->grad_bytes)) {
    const cudaError_t error = Taken(cudaMemcpyAsync(run.host, from, run.bytes, cudaMemcpyDeviceToHost, stream));
    if (error != cudaSuccess)
      return FailCuda(error, "copying a gradient of %llu bytes into its slot",
                      static_cast<unsigned long long>(run.bytes));
    from += run.bytes;
  }
  return 0;
}

// The copies, the call-back, and the event behind it.
int EnqueueGrad(GradCopy* copy, const mlpo_cuda_piece* pieces, size_t count, cudaStream_t stream) {
  mlpo_cuda_slot* slot = copy->slot;
  int code;
  {
    MutexLock lock(slot->lock);
    DropReadersThatEnded(slot);
    code = FollowReaders(slot, stream);
    if (code == 0) code = FollowWrites(slot, stream);
  }
  for (size_t i = 0; i < count && code == 0; ++i) {
    const mlpo_cuda_piece& piece = pieces[i];
    if (piece.kind != MLPO_GRAD_VALUE || piece.flags != 0) continue;
    code = CopyIn(slot, piece.first, piece.count, piece.device, stream);
  }
  if (code == 0) {
    if (cudaError_t error = Taken(cudaLaunchHostFunc(stream, PostGrad, copy)); error != cudaSuccess)
      code = FailCuda(error, "having a gradient submitted by its stream");
  }
  // Behind whatever was enqueued, also after a failure: until then the slot's bytes may change.
  if (cudaError_t error = Taken(cudaEventRecord(copy->passed, stream)); error != cudaSuccess) {
    Taken(cudaStreamSynchronize(stream));
    if (code == 0) code = FailCuda(error, "marking where a gradient has been copied");
  }
  return code;
}

struct Wait {
  bool needed = false;
  uint64_t value = 0;  // of the slot's word
  uint64_t epoch = 0;  // of a success
};

// What a reader of the parameters has to wait for now.
int LookAt(mlpo_cuda_slot* slot, Wait* wait, bool* holds_param) {
  struct mlpo_subgroup_info info = {};
  info.struct_size = sizeof info;
  if (int code = mlpo_subgroup_info(slot->subgroup, &info); code != 0) return code;
  wait->needed = info.update_outstanding != 0;
  wait->value = info.updates_ended + 1;
  wait->epoch = uint64_t{info.epoch} + 1;
  *holds_param = info.holds_param != 0;
  return 0;
}

// The calling thread waits.
int AwaitUpdate(mlpo_cuda_slot* slot, uint64_t value, Deadline deadline) {
  uint64_t seen = 0;
  while (slot->Ended() < value) {
    if (deadline.Passed()) return Fail(-ETIMEDOUT, "the update has not ended in time; it goes on");
    const int64_t left_ns = deadline.LeftNs();
    const int64_t slice_ns = 100 * kNsPerMs;
    const int code = mlpo_client_await(slot->side->client, &seen, left_ns < slice_ns ? left_ns : slice_ns);
    // After the session's end every update has ended, so the word has moved.
    if (code != 0 && code != -ETIMEDOUT && slot->Ended() < value) return code;
  }
  return 0;
}

// False: the driver does not let this stream wait.
bool LetStreamWait(mlpo_cuda_slot* slot, const Wait& wait, cudaStream_t stream) {
  if (slot->word_device == 0) return false;
  slot->side->Await(slot, wait.value);
  return slot->side->wait.Enqueue(stream, slot->word_device, wait.value);
}

// Slot lock held. Copies that look at the slot's epoch when the stream gets there.
int CopyOutIfUpdated(const std::vector<Run>& runs, void* device, uintptr_t epoch_word, uint64_t epoch,
                     cudaStream_t stream) {
  auto* to = static_cast<std::byte*>(device);
  for (const Run& run : runs) {
    const cudaError_t error = Taken(mlpo::cuda::LaunchCopyIf(to, run.device, run.bytes, epoch_word, epoch, stream));
    if (error != cudaSuccess) return FailCuda(error, "launching the copy of parameters");
    to += run.bytes;
  }
  return 0;
}

int CopyOut(const std::vector<Run>& runs, void* device, cudaStream_t stream) {
  auto* to = static_cast<std::byte*>(device);
  for (const Run& run : runs) {
    const cudaError_t error = Taken(cudaMemcpyAsync(to, run.host, run.bytes, cudaMemcpyHostToDevice, stream));
    if (error != cudaSuccess)
      return FailCuda(error, "copying %llu bytes of a slot to the device", static_cast<unsigned long long>(run.bytes));
    to += run.bytes;
  }
  return 0;
}

bool AllPinned(const std::vector<Run>& runs) {
  for (const Run& run : runs) {
    if (run.device == nullptr) return false;
  }
  return true;
}

}  // namespace

extern "C" {

int mlpo_cuda_copy_grad(mlpo_cuda_slot* slot, const mlpo_cuda_piece* pieces, size_t count, mlpo_cuda_stream stream,
                        mlpo_request** request) {
  if (slot == nullptr || pieces == nullptr || request == nullptr)
    return Fail(-EINVAL, "slot, pieces or request is NULL");
  *request = nullptr;
  mlpo_cuda* side = slot->side;
  if (int code = side->CheckProcess(); code != 0) return code;
  if (int code = CheckPieces(slot, pieces, count); code != 0) return code;
  const OnDevice on(side->device);
  if (int code = CheckStream(on, stream); code != 0) return code;

  auto* copy = new (std::nothrow) GradCopy();
  auto* named = new (std::nothrow) mlpo_grad_piece[count + 1];
  int code = copy == nullptr || named == nullptr ? Fail(-ENOMEM, "no memory for a gradient of %zu pieces", count) : 0;
  if (code == 0) {
    copy->slot = slot;
    if (cudaError_t error = side->TakeEvent(&copy->passed); error != cudaSuccess) code = FailCuda(error, "an event");
  }
  if (code == 0) {
    for (size_t i = 0; i < count; ++i) named[i] = {pieces[i].first, pieces[i].count, pieces[i].kind, 0};
    code = mlpo_prepare_grad(slot->subgroup, named, count, &copy->request);
    if (code != 0) {
      MutexLock lock(side->lock);
      side->GiveEvent(copy->passed);
    }
  }
  delete[] named;
  if (code != 0) {
    delete copy;
    return code;
  }
  mlpo_request* made = copy->request;
  code = EnqueueGrad(copy, pieces, count, stream);
  int copying = GradCopy::kCopying;
  if (code != 0 && copy->state.compare_exchange_strong(copying, GradCopy::kAbandoned)) {
    mlpo_request_abandon(made, code, mlpo_last_error());
    mlpo_request_free(made);
  } else {
    // The call-back is on its way, so a failure after it is not the request's.
    code = 0;
    *request = made;
  }
  side->Watch(copy);
  return code;
}

int mlpo_cuda_write_grad(mlpo_cuda_slot* slot, uint64_t first, uint64_t count, const void* device,
                         mlpo_cuda_stream stream) {
  if (slot == nullptr || (device == nullptr && count > 0)) return Fail(-EINVAL, "slot or device is NULL");
  if (int code = slot->side->CheckProcess(); code != 0) return code;
  if (int code = CheckRange(slot, "what is to be written", first, count); code != 0) return code;
  const OnDevice on(slot->side->device);
  if (int code = CheckStream(on, stream); code != 0) return code;

  MutexLock lock(slot->lock);
  if (int code = mlpo_grad_begin(slot->subgroup); code != 0) return code;
  DropReadersThatEnded(slot);
  if (int code = FollowReaders(slot, stream); code != 0) return code;
  if (int code = FollowWrites(slot, stream); code != 0) return code;
  const int code = CopyIn(slot, first, count, device, stream);
  // Also after a failure: some of it may be on its way.
  const int noted = NoteWrite(slot, stream);
  return code != 0 ? code : noted;
}

int mlpo_cuda_read_grad(mlpo_cuda_slot* slot, uint64_t first, uint64_t count, void* device, mlpo_cuda_stream stream) {
  if (slot == nullptr || (device == nullptr && count > 0)) return Fail(-EINVAL, "slot or device is NULL");
  if (int code = slot->side->CheckProcess(); code != 0) return code;
  if (int code = CheckRange(slot, "what is to be read", first, count); code != 0) return code;
  const OnDevice on(slot->side->device);
  if (int code = CheckStream(on, stream); code != 0) return code;

  MutexLock lock(slot->lock);
  // While an update runs there is no gradient, and else no parameters that anybody could still ask for.
  if (int code = mlpo_grad_begin(slot->subgroup); code != 0) return code;
  DropReadersThatEnded(slot);
  if (int code = FollowWrites(slot, stream); code != 0) return code;
  auto* from = static_cast<std::byte*>(slot->info.grad) + first * slot->grad_bytes;
  const int code = CopyOut(slot->side->pins.Runs(from, count * slot->grad_bytes), device, stream);
  const int noted = NoteReader(slot, stream);
  return code != 0 ? code : noted;
}

int mlpo_cuda_copy_param(mlpo_cuda_slot* slot, uint64_t first, uint64_t count, void* device, mlpo_cuda_stream stream,
                         int64_t timeout_ns) {
  if (slot == nullptr || (device == nullptr && count > 0)) return Fail(-EINVAL, "slot or device is NULL");
  mlpo_cuda* side = slot->side;
  if (int code = side->CheckProcess(); code != 0) return code;
  if (int code = CheckRange(slot, "what is to be copied", first, count); code != 0) return code;
  const OnDevice on(side->device);
  if (int code = CheckStream(on, stream); code != 0) return code;

  MutexLock lock(slot->lock);
  DropReadersThatEnded(slot);
  Wait wait;
  bool holds_param = false;
  if (int code = LookAt(slot, &wait, &holds_param); code != 0) return code;
  const std::vector<Run> runs =
      side->pins.Runs(static_cast<std::byte*>(slot->info.param) + first * slot->param_bytes, count * slot->param_bytes);
  if (wait.needed) {
    const uintptr_t epoch_word = side->pins.DeviceAddress(slot->info.epoch_word, sizeof(uint64_t));
    if (epoch_word != 0 && AllPinned(runs) && LetStreamWait(slot, wait, stream)) {
      const int code = CopyOutIfUpdated(runs, device, epoch_word, wait.epoch, stream);
      const int noted = NoteReader(slot, stream);
      return code != 0 ? code : noted;
    }
    if (int code = AwaitUpdate(slot, wait.value, Deadline::In(timeout_ns)); code != 0) return code;
    const uint64_t epoch = wait.epoch;
    if (int code = LookAt(slot, &wait, &holds_param); code != 0) return code;
    if (wait.epoch <= epoch) return Fail(-ECANCELED, "the update failed, nothing was copied; its request says why");
  }
  if (!holds_param) {
    return Fail(-ENODATA,
                "the slot holds no parameters: no update of it is outstanding, and none has ended well since "
                "its last gradient");
  }
  const int code = CopyOut(runs, device, stream);
  const int noted = NoteReader(slot, stream);
  return code != 0 ? code : noted;
}

int mlpo_cuda_wait(mlpo_cuda_slot* slot, mlpo_cuda_stream stream, int64_t timeout_ns) {
  if (slot == nullptr) return Fail(-EINVAL, "slot is NULL");
  if (int code = slot->side->CheckProcess(); code != 0) return code;
  const OnDevice on(slot->side->device);
  if (int code = CheckStream(on, stream); code != 0) return code;
  MutexLock lock(slot->lock);
  DropReadersThatEnded(slot);
  Wait wait;
  bool holds_param = false;
  if (int code = LookAt(slot, &wait, &holds_param); code != 0) return code;
  if (!wait.needed) return 0;
  if (LetStreamWait(slot, wait, stream)) return NoteReader(slot, stream);
  return AwaitUpdate(slot, wait.value, Deadline::In(timeout_ns));
}

}  // extern "C"
