// Checkpoints: the frames that begin saving and restoring, and the submissions that carry them out.
#include <errno.h>
#include <string.h>

#include "client/src/error.h"
#include "client/src/lock.h"
#include "client/src/session.h"
#include "client/src/subgroup.h"
#include "client/src/submit.h"
#include "client/src/versioned_struct.h"
#include "proto/abi.h"
#include "proto/command.h"
#include "proto/control.h"
#include "proto/status.h"

namespace mlpo::client {
namespace {

int CheckClient(mlpo_client* client) {
  if (client == nullptr) return Fail(-EINVAL, "client is NULL");
  if (int code = client->CheckProcess(); code != 0) return code;
  if ((client->features & MLPO_FEATURE_SNAPSHOT) == 0)
    return Fail(-EOPNOTSUPP,
                "this daemon makes no checkpoints: update mlpo-daemon, or save what mlpo_read_state gives");
  return 0;
}

// Copies a text into a field of `size` bytes, which is zero behind it, and its length.
int TakeText(const char* text, char* field, size_t size, uint32_t* length, const char* name) {
  const size_t bytes = text == nullptr ? 0 : strlen(text);
  if (bytes == 0 || bytes > size) return Fail(-EINVAL, "%s has %zu bytes: 1 to %zu are allowed", name, bytes, size);
  memcpy(field, text, bytes);
  *length = static_cast<uint32_t>(bytes);
  return 0;
}

mlpo_submission Snapshot(uint32_t handle, uint32_t step) {
  mlpo_submission submission = {};
  submission.op = MLPO_OP_SNAPSHOT;
  submission.arg = step;
  submission.first = handle;
  return submission;
}

mlpo_submission RestoreOf(uint32_t handle, uint32_t subgroup) {
  mlpo_submission submission = {};
  submission.op = MLPO_OP_RESTORE;
  submission.subgroup = subgroup;
  submission.first = handle;
  return submission;
}

// What was begun for a caller that had given up waiting is nobody's. The socket's turn is not held while the ring is
// waited for: only who has it notices the daemon's death there.
int DropUnclaimed(mlpo_client* client, Deadline deadline) {
  uint32_t saving = 0, restoring = 0;
  {
    TurnHolder turn(client->socket.turn(), deadline);
    if (!turn.held()) return Fail(-ETIMEDOUT, "another thread's registration or checkpoint still begins");
    if (int code = client->socket.Drain(deadline); code != 0) return code;
    saving = client->socket.TakeUnclaimedSave();
    restoring = client->socket.TakeUnclaimedRestore();
  }
  // One that the daemon does not know any more is gone as well.
  if (saving != 0) {
    const int code = SubmitAndWait(client, nullptr, Snapshot(saving, MLPO_SNAPSHOT_ABANDON), deadline);
    if (code != 0 && code != -EBADF) return code;
  }
  if (restoring != 0) {
    const int code = SubmitAndWait(client, nullptr, RestoreOf(restoring, 0), deadline);
    if (code != 0 && code != -EBADF) return code;
  }
  return 0;
}

// `files`: two descriptors, or nullptr.
int BeginSave(mlpo_client* client, mlpo_checkpoint* ask, const int* files, Deadline deadline,
              mlpo_checkpointing* begun) {
  if (int dropped = DropUnclaimed(client, deadline); dropped != 0) return dropped;
  SessionSocket& socket = client->socket;
  TurnHolder turn(socket.turn(), deadline);
  if (!turn.held()) return Fail(-ETIMEDOUT, "another thread's registration or checkpoint still begins");
  uint32_t seq;
  int code = socket.Begin(deadline, &seq);
  if (code != 0) return code;
  SetHeader(ask, MLPO_FRAME_CHECKPOINT, seq);
  code = socket.Send(ask, sizeof *ask, files, files == nullptr ? 0 : 2, deadline);
  if (code != 0) return code;
  ReceivedFrame answer;
  if (code = socket.Await(MLPO_FRAME_CHECKPOINTING, &answer, deadline); code != 0) return code;
  const auto* frame = answer.As<mlpo_checkpointing>();
  if (frame == nullptr || frame->reserved != 0 || frame->handle == 0)
    return socket.EndSession(Fail(MLPO_E_PROTOCOL, "the daemon sent a malformed CHECKPOINTING frame"));
  *begun = *frame;
  socket.TakeUnclaimedSave();
  return 0;
}

// `files`: ask->files descriptors.
int BeginRestore(mlpo_client* client, struct mlpo_restore* ask, const int* files, Deadline deadline,
                 mlpo_restoring* begun) {
  if (int dropped = DropUnclaimed(client, deadline); dropped != 0) return dropped;
  SessionSocket& socket = client->socket;
  TurnHolder turn(socket.turn(), deadline);
  if (!turn.held()) return Fail(-ETIMEDOUT, "another thread's registration or checkpoint still begins");
  uint32_t seq;
  int code = socket.Begin(deadline, &seq);
  if (code != 0) return code;
  SetHeader(ask, MLPO_FRAME_RESTORE, seq);
  if (code = socket.Send(ask, sizeof *ask, deadline); code != 0) return code;
  for (uint32_t first = 0; first < ask->files; first += MLPO_MAX_FRAME_FDS) {
    mlpo_restore_files more = {};
    SetHeader(&more, MLPO_FRAME_RESTORE_FILES, seq);
    more.first = first;
    more.count = ask->files - first < MLPO_MAX_FRAME_FDS ? ask->files - first : MLPO_MAX_FRAME_FDS;
    if (code = socket.Send(&more, sizeof more, files + first, more.count, deadline); code != 0) return code;
  }
  ReceivedFrame answer;
  if (code = socket.Await(MLPO_FRAME_RESTORING, &answer, deadline); code != 0) return code;
  const auto* frame = answer.As<mlpo_restoring>();
  if (frame == nullptr || frame->reserved != 0 || frame->handle == 0 || frame->tag_bytes > MLPO_MAX_TAG)
    return socket.EndSession(Fail(MLPO_E_PROTOCOL, "the daemon sent a malformed RESTORING frame"));
  *begun = *frame;
  socket.TakeUnclaimedRestore();
  return 0;
}

int RestoreFrom(mlpo_client* client, struct mlpo_restore* ask, const int* files, int64_t timeout_ns,
                struct mlpo_restore_info* info) {
  if (info == nullptr) return Fail(-EINVAL, "info is NULL");
  mlpo_restoring begun = {};
  const int code = BeginRestore(client, ask, files, Deadline::In(timeout_ns), &begun);
  if (code != 0) return code;
  mlpo_restore_info full = {};
  full.handle = begun.handle;
  full.world_size = begun.world_size;
  full.step = begun.step;
  memcpy(full.attempt, begun.attempt, sizeof full.attempt);
  memcpy(full.tag, begun.tag, begun.tag_bytes);
  return GiveStruct(full, info, "mlpo_restore_info");
}

}  // namespace
}  // namespace mlpo::client

using mlpo::client::CheckClient;
using mlpo::client::Deadline;
using mlpo::client::Fail;
using mlpo::client::TakeText;

extern "C" {

int mlpo_checkpoint_begin(mlpo_client* client, const struct mlpo_checkpoint_options* options, int64_t timeout_ns,
                          struct mlpo_checkpoint_info* info) {
  if (int code = CheckClient(client); code != 0) return code;
  if (options == nullptr || info == nullptr) return Fail(-EINVAL, "options or info is NULL");
  mlpo_checkpoint_options given = MLPO_CHECKPOINT_OPTIONS_INIT;
  if (int code = mlpo::client::TakeStruct(options, &given, "mlpo_checkpoint_options"); code != 0) return code;
  mlpo_checkpoint ask = {};
  int code = TakeText(given.tag, ask.tag, sizeof ask.tag, &ask.tag_bytes, "tag");
  if (code == 0 && given.files == nullptr)
    code = TakeText(given.directory, ask.directory, sizeof ask.directory, &ask.directory_bytes, "directory");
  if (code != 0) return code;
  ask.step = given.step;
  if (given.attempt != nullptr) memcpy(ask.attempt, given.attempt, sizeof ask.attempt);
  if (given.overwrite != 0) ask.flags |= MLPO_CHECKPOINT_OVERWRITE;
  if (given.files != nullptr) ask.flags |= MLPO_CHECKPOINT_FILES;
  mlpo_checkpointing begun = {};
  const uint32_t requests = client->ring.checkpoint_requests();
  code = mlpo::client::BeginSave(client, &ask, given.files, Deadline::In(timeout_ns), &begun);
  if (code != 0) return code;
  client->requests_met.store(requests, std::memory_order_relaxed);
  mlpo_checkpoint_info full = {};
  full.handle = begun.handle;
  full.bytes = begun.bytes;
  memcpy(full.attempt, begun.attempt, sizeof full.attempt);
  return mlpo::client::GiveStruct(full, info, "mlpo_checkpoint_info");
}

int mlpo_checkpoint_take(mlpo_client* client, uint32_t handle, int64_t timeout_ns, mlpo_request** request) {
  if (int code = CheckClient(client); code != 0) return code;
  if (request == nullptr) return Fail(-EINVAL, "request is NULL");
  return mlpo::client::Submit(client, nullptr, mlpo::client::Snapshot(handle, MLPO_SNAPSHOT_TAKE),
                              Deadline::In(timeout_ns), request);
}

int mlpo_checkpoint_saved(mlpo_client* client, uint32_t handle, int64_t timeout_ns, mlpo_request** request) {
  if (int code = CheckClient(client); code != 0) return code;
  if (request == nullptr) return Fail(-EINVAL, "request is NULL");
  return mlpo::client::Submit(client, nullptr, mlpo::client::Snapshot(handle, MLPO_SNAPSHOT_SAVED),
                              Deadline::In(timeout_ns), request);
}

int mlpo_checkpoint_abandon(mlpo_client* client, uint32_t handle, int64_t timeout_ns) {
  if (int code = CheckClient(client); code != 0) return code;
  return mlpo::client::SubmitAndWait(client, nullptr, mlpo::client::Snapshot(handle, MLPO_SNAPSHOT_ABANDON),
                                     Deadline::In(timeout_ns));
}

int mlpo_checkpoint_requested(mlpo_client* client) {
  if (int code = CheckClient(client); code != 0) return code;
  return client->ring.checkpoint_requests() == client->requests_met.load(std::memory_order_relaxed) ? 0 : 1;
}

int mlpo_restore_begin(mlpo_client* client, const char* directory, const char* tag, const uint8_t* attempt,
                       int64_t timeout_ns, struct mlpo_restore_info* info) {
  if (int code = CheckClient(client); code != 0) return code;
  if (attempt != nullptr && tag == nullptr) return Fail(-EINVAL, "an attempt is one of a tag: give the tag, too");
  struct mlpo_restore ask = {};
  if (attempt != nullptr) memcpy(ask.attempt, attempt, sizeof ask.attempt);
  int code = TakeText(directory, ask.directory, sizeof ask.directory, &ask.directory_bytes, "directory");
  if (code == 0 && tag != nullptr) code = TakeText(tag, ask.tag, sizeof ask.tag, &ask.tag_bytes, "tag");
  if (code != 0) return code;
  return mlpo::client::RestoreFrom(client, &ask, nullptr, timeout_ns, info);
}

int mlpo_restore_begin_files(mlpo_client* client, const int* files, uint32_t count, int64_t timeout_ns,
                             struct mlpo_restore_info* info) {
  if (int code = CheckClient(client); code != 0) return code;
  if (files == nullptr || count == 0 || count > MLPO_MAX_RESTORE_FILES)
    return Fail(-EINVAL, "%u files: 1 to %u are allowed", files == nullptr ? 0 : count, MLPO_MAX_RESTORE_FILES);
  struct mlpo_restore ask = {};
  ask.files = count;
  return mlpo::client::RestoreFrom(client, &ask, files, timeout_ns, info);
}

int mlpo_submit_restore(mlpo_subgroup* subgroup, uint32_t handle, int64_t timeout_ns, mlpo_request** request) {
  if (subgroup == nullptr || request == nullptr) return Fail(-EINVAL, "subgroup or request is NULL");
  if (int code = CheckClient(subgroup->client); code != 0) return code;
  return mlpo::client::Submit(subgroup->client, subgroup, mlpo::client::RestoreOf(handle, subgroup->handle),
                              Deadline::In(timeout_ns), request);
}

int mlpo_restore_end(mlpo_client* client, uint32_t handle, int64_t timeout_ns) {
  if (int code = CheckClient(client); code != 0) return code;
  return mlpo::client::SubmitAndWait(client, nullptr, mlpo::client::RestoreOf(handle, 0), Deadline::In(timeout_ns));
}

}  // extern "C"
