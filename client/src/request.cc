#include "client/src/request.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "client/src/error.h"
#include "client/src/session.h"
#include "client/src/versioned_struct.h"

void mlpo_request::Start(mlpo_client* owner, uint32_t submissions) {
  client = owner;
  next_free = nullptr;
  freed = false;
  stage = Stage::kSubmitted;
  pending = submissions;
  result = {};
  result.struct_size = sizeof result;
  result.all_finite = 1;
  result.tensor = result.block = result.path = UINT32_MAX;
  ended.store(false, std::memory_order_relaxed);  // nobody else has the request yet
}

void mlpo_request::Add(uint16_t op, const mlpo::client::Outcome& outcome) {
  if (outcome.status != 0 && result.status == 0) {
    Fail(outcome.status, outcome.text != nullptr ? outcome.text : mlpo_strerror(outcome.status));
    if (const mlpo_error_record* record = outcome.record) {
      result.os_errno = record->os_errno;
      result.tensor = record->tensor;
      result.block = record->block;
      result.path = record->path;
      result.first = record->first;
      result.count = record->count;
      if (record->text[0] != '\0')
        snprintf(result.text, sizeof result.text, "%.*s", static_cast<int>(sizeof record->text), record->text);
    }
  }
  if (op == MLPO_OP_GRAD && outcome.status == 0) {
    double sum;
    memcpy(&sum, &outcome.value, sizeof sum);
    const bool finite = (outcome.flags & MLPO_COMPLETION_ALL_FINITE) != 0;
    if ((outcome.flags & MLPO_COMPLETION_WINDOW_COMPLETE) != 0) {
      // Of the whole window: it stands above the pieces' own.
      result.window_complete = 1;
      result.sum_of_squares = sum;
      result.all_finite = finite;
    } else if (!result.window_complete) {
      result.sum_of_squares += sum;
      result.all_finite = result.all_finite && finite;
    }
  }
  if (op != MLPO_OP_GRAD && outcome.status == 0) result.value = outcome.value;
  EndOne(1);
}

void mlpo_request::AddFailures(uint32_t count, int code, const char* text) {
  if (result.status == 0) Fail(code, text);
  EndOne(count);
}

void mlpo_request::Fail(int code, const char* text) {
  result.status = code;
  snprintf(result.text, sizeof result.text, "%s", text);
}

void mlpo_request::EndOne(uint32_t count) {
  pending -= count;
  if (pending != 0) return;
  if (result.status != 0) {
    result.sum_of_squares = 0;
    result.all_finite = 0;
    result.window_complete = 0;
  }
  ended.store(true, std::memory_order_release);  // pairs with the loads in wait and done
}

using mlpo::client::Deadline;
using mlpo::client::MutexLock;

extern "C" {

int mlpo_request_wait(mlpo_request* request, int64_t timeout_ns, mlpo_result* result) {
  if (request == nullptr) return mlpo::client::Fail(-EINVAL, "request is NULL");
  mlpo_client* client = request->client;
  if (int code = client->CheckProcess(); code != 0) return code;
  if (!request->ended.load(std::memory_order_acquire)) {
    MutexLock lock(client->ring.lock());
    const int code = client->ring.WaitUntilEnded(request, Deadline::In(timeout_ns));
    if (code != 0) return code;
  }
  if (result != nullptr) {
    if (int code = mlpo::client::GiveStruct(request->result, result, "mlpo_result"); code != 0) return code;
  }
  const int status = request->result.status;
  return status == 0 ? 0 : mlpo::client::Fail(status, "%s", request->result.text);
}

int mlpo_wait_any(mlpo_request* const* requests, size_t count, int64_t timeout_ns, size_t* index) {
  if (requests == nullptr || count == 0 || index == nullptr)
    return mlpo::client::Fail(-EINVAL, "requests or index is NULL, or count is 0");
  for (size_t i = 0; i < count; ++i) {
    if (requests[i] == nullptr) return mlpo::client::Fail(-EINVAL, "requests[%zu] is NULL", i);
    if (requests[i]->client != requests[0]->client)
      return mlpo::client::Fail(-EINVAL, "requests[%zu] is of another client than requests[0]", i);
  }
  mlpo_client* client = requests[0]->client;
  if (int code = client->CheckProcess(); code != 0) return code;
  MutexLock lock(client->ring.lock());
  return client->ring.WaitUntilAnyEnded(requests, count, Deadline::In(timeout_ns), index);
}

int mlpo_request_done(mlpo_request* request) {
  if (request == nullptr) return mlpo::client::Fail(-EINVAL, "request is NULL");
  mlpo_client* client = request->client;
  if (int code = client->CheckProcess(); code != 0) return code;
  if (request->ended.load(std::memory_order_acquire)) return 1;
  MutexLock lock(client->ring.lock());
  client->ring.Reap();
  return request->ended.load(std::memory_order_relaxed) ? 1 : 0;
}

int mlpo_request_post(mlpo_request* request) {
  if (request == nullptr) return mlpo::client::Fail(-EINVAL, "request is NULL");
  mlpo_client* client = request->client;
  if (int code = client->CheckProcess(); code != 0) return code;
  int code;
  {
    MutexLock lock(client->ring.lock());
    if (request->stage != mlpo_request::Stage::kPrepared)
      return mlpo::client::Fail(-EINVAL, "the request was posted before, or is none that was prepared");
    code = client->ring.Post(request);
  }
  client->Unref();  // Prepare()'s
  return code;
}

int mlpo_request_abandon(mlpo_request* request, int code, const char* text) {
  if (request == nullptr) return mlpo::client::Fail(-EINVAL, "request is NULL");
  if (code >= 0) return mlpo::client::Fail(-EINVAL, "code is %d: a negative one says why", code);
  mlpo_client* client = request->client;
  if (int forked = client->CheckProcess(); forked != 0) return forked;
  {
    MutexLock lock(client->ring.lock());
    if (request->stage != mlpo_request::Stage::kPrepared)
      return mlpo::client::Fail(-EINVAL, "the request was posted before, or is none that was prepared");
    client->ring.Abandon(request, code, text != nullptr ? text : mlpo_strerror(code));
  }
  client->Unref();  // Prepare()'s
  return 0;
}

void mlpo_request_free(mlpo_request* request) {
  if (request == nullptr) return;
  mlpo_client* client = request->client;
  if (client->InChild()) {
    // No lock may be taken here: another thread of the parent may have held it at the fork.
    mlpo::client::RingEnd::FreeInChild(request);
  } else {
    MutexLock lock(client->ring.lock());
    client->ring.FreeRequest(request);
  }
  client->Unref();
}

}  // extern "C"
