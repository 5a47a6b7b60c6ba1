// Named objects: each call opens a version of one, moves its bytes through the staging area, and commits or closes it.
#include <errno.h>
#include <string.h>

#include "client/src/error.h"
#include "client/src/session.h"
#include "client/src/staging.h"
#include "client/src/stream.h"
#include "client/src/submit.h"
#include "proto/abi.h"
#include "proto/command.h"

namespace mlpo::client {
namespace {

// One call. The staging turn is held, and the area is open.
class ObjectCall {
 public:
  ObjectCall(mlpo_client* client, const char* name, Deadline deadline)
      : client_(client), staging_(client->staging), name_(name), deadline_(deadline) {}

  int Flush(const void* data, uint64_t bytes) {
    mlpo_submission submission = OnHandle(MLPO_OP_FLUSH, MLPO_OBJECT_OPEN);
    submission.count = bytes;
    int code = Named(submission, nullptr);
    if (code != 0 && code != -ETIMEDOUT) return code;  // nothing was opened
    if (code == 0) code = Move(MLPO_OP_FLUSH, 0, bytes, const_cast<void*>(data));
    if (code == 0) code = SubmitAndWait(client_, nullptr, OnHandle(MLPO_OP_FLUSH, MLPO_OBJECT_COMMIT), deadline_);
    if (code != 0) Close(MLPO_OP_FLUSH);
    return code;
  }

  int Fetch(uint64_t first, uint64_t count, void* out, uint64_t* bytes) {
    uint64_t size = 0;
    int code = Named(OnHandle(MLPO_OP_FETCH, MLPO_OBJECT_OPEN), &size);
    if (code != 0 && code != -ETIMEDOUT) return code;
    if (code == 0) {
      if (bytes != nullptr) *bytes = size;
      if (first > size || count > size - first) {
        code = Fail(-EINVAL, "bytes [%llu, +%llu) of object '%.64s', which has %llu",
                    static_cast<unsigned long long>(first), static_cast<unsigned long long>(count), name_,
                    static_cast<unsigned long long>(size));
      } else {
        code = Move(MLPO_OP_FETCH, first, count, out);
      }
    }
    Close(MLPO_OP_FETCH);
    return code;
  }

  int Size(uint64_t* bytes) {
    mlpo_submission submission = {};
    submission.op = MLPO_OP_FETCH;
    submission.arg = MLPO_OBJECT_SIZE;
    return Named(submission, bytes);
  }

  int Delete() {
    mlpo_submission submission = {};
    submission.op = MLPO_OP_DELETE;
    return Named(submission, nullptr);
  }

 private:
  mlpo_submission OnHandle(uint16_t op, uint32_t step) const {
    mlpo_submission submission = {};
    submission.op = op;
    submission.arg = step;
    submission.subgroup = handle_;
    return submission;
  }

  // Submits with the name in the first half, and waits.
  int Named(mlpo_submission submission, uint64_t* value) {
    Staging::Half& half = staging_.half(0);
    submission.first = strlen(name_);
    submission.staging_offset = half.offset;
    memcpy(half.data, name_, submission.first);
    if (int code = Submit(client_, nullptr, submission, deadline_, &half.pending); code != 0) return code;
    return Staging::Settle(&half, deadline_, value);
  }

  int Move(uint16_t op, uint64_t first, uint64_t count, void* data) {
    if (count == 0) return 0;  // an empty array may well be NULL
    StreamArrays arrays;
    arrays.Add(0, data);
    arrays.item_bytes = 1;
    mlpo_submission each = OnHandle(op, MLPO_OBJECT_PIECE);
    each.first = first;
    return Stream(client_, nullptr, arrays, each, count, op == MLPO_OP_FLUSH, deadline_).Run();
  }

  // Nobody waits for it. Where it cannot be submitted, the handle ends with the session.
  void Close(uint16_t op) {
    constexpr int64_t kPatienceNs = kNsPerS;  // beside a deadline that may have passed
    KeepLastError kept;
    mlpo_request* request;
    const mlpo_submission submission = OnHandle(op, MLPO_OBJECT_CLOSE);
    if (Submit(client_, nullptr, submission, Deadline::In(kPatienceNs), &request) == 0) mlpo_request_free(request);
  }

  mlpo_client* const client_;
  Staging& staging_;
  const char* const name_;
  const Deadline deadline_;
  const uint32_t handle_ = staging_.NextHandle();
};

template <class Use>
int OnObject(mlpo_client* client, const char* name, int64_t timeout_ns, Use use) {
  if (client == nullptr || name == nullptr) return Fail(-EINVAL, "client or name is NULL");
  if (int code = client->CheckProcess(); code != 0) return code;
  const size_t length = strlen(name);
  if (length == 0 || length > MLPO_MAX_OBJECT_NAME)
    return Fail(-EINVAL, "the name of an object has %zu bytes: 1 to %u are allowed", length, MLPO_MAX_OBJECT_NAME);
  if ((client->features & MLPO_FEATURE_OBJECTS) == 0)
    return Fail(-EOPNOTSUPP, "this daemon has no named objects: update mlpo-daemon");
  const Deadline deadline = Deadline::In(timeout_ns);
  TurnHolder turn(client->staging.turn(), deadline);
  if (!turn.held()) return Fail(-ETIMEDOUT, "another thread's reading or writing of state or objects still runs");
  if (int code = client->staging.Open(client, deadline); code != 0) return code;
  ObjectCall call(client, name, deadline);
  return use(call);
}

}  // namespace
}  // namespace mlpo::client

using mlpo::client::Fail;
using mlpo::client::ObjectCall;
using mlpo::client::OnObject;

extern "C" {

int mlpo_object_flush(mlpo_client* client, const char* name, const void* data, uint64_t bytes, int64_t timeout_ns) {
  if (data == nullptr && bytes != 0) return Fail(-EINVAL, "data is NULL");
  if (bytes > MLPO_MAX_OBJECT_BYTES) {
    return Fail(-EFBIG, "an object of %llu bytes: at most %llu are allowed", static_cast<unsigned long long>(bytes),
                static_cast<unsigned long long>(MLPO_MAX_OBJECT_BYTES));
  }
  return OnObject(client, name, timeout_ns, [&](ObjectCall& call) { return call.Flush(data, bytes); });
}

int mlpo_object_fetch(mlpo_client* client, const char* name, uint64_t first, uint64_t count, void* out, uint64_t* bytes,
                      int64_t timeout_ns) {
  if (out == nullptr && count != 0) return Fail(-EINVAL, "out is NULL");
  return OnObject(client, name, timeout_ns, [&](ObjectCall& call) { return call.Fetch(first, count, out, bytes); });
}

int mlpo_object_size(mlpo_client* client, const char* name, uint64_t* bytes, int64_t timeout_ns) {
  if (bytes == nullptr) return Fail(-EINVAL, "bytes is NULL");
  return OnObject(client, name, timeout_ns, [&](ObjectCall& call) { return call.Size(bytes); });
}

int mlpo_object_delete(mlpo_client* client, const char* name, int64_t timeout_ns) {
  return OnObject(client, name, timeout_ns, [](ObjectCall& call) { return call.Delete(); });
}

}  // extern "C"
