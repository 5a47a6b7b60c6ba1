// Submissions: gradients, updates, discards and round trips.
#include "client/src/submit.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/src/session.h"
#include "client/src/subgroup.h"
#include "client/src/versioned_struct.h"
#include "proto/command.h"
#include "proto/status.h"

static_assert(MLPO_GRAD_VALUE == static_cast<int>(MLPO_PIECE_VALUE) &&
                  MLPO_GRAD_ZERO == static_cast<int>(MLPO_PIECE_ZERO) &&
                  MLPO_GRAD_SKIP == static_cast<int>(MLPO_PIECE_SKIP),
              "client.h and proto/command.h");
static_assert(MLPO_OPTIMIZER_ADAMW == static_cast<int>(MLPO_ADAMW) &&
                  MLPO_OPTIMIZER_ADAM == static_cast<int>(MLPO_ADAM),
              "client.h and proto/command.h");

namespace mlpo::client {
namespace {

// Ring lock held. What ends a window (of all subgroups if nullptr) must not overtake a gradient of it.
int CheckAllPosted(const mlpo_client* client, const mlpo_subgroup* subgroup) {
  const uint32_t unposted = subgroup != nullptr ? subgroup->unposted : client->ring.unposted();
  if (unposted == 0) return 0;
  return Fail(-EBUSY, "%u prepared gradients have not been submitted yet; wait for their requests first", unposted);
}

}  // namespace

int Submit(mlpo_client* client, mlpo_subgroup* subgroup, const mlpo_submission& submission, Deadline deadline,
           mlpo_request** request) {
  RingEnd& ring = client->ring;
  MutexLock lock(ring.lock());
  if (int code = CheckTakesWork(client, deadline, 1); code != 0) return code;
  if (submission.op == MLPO_OP_DISCARD) {
    if (int code = CheckAllPosted(client, subgroup); code != 0) return code;
  }
  mlpo_request* made = ring.NewRequest(client, 1);
  if (made == nullptr) return -ENOMEM;
  ring.Push(submission, nullptr, made, subgroup);
  ring.Publish();
  *request = made;
  return 0;
}

int CheckTakesWork(mlpo_client* client, Deadline deadline, uint32_t places) {
  RingEnd& ring = client->ring;
  if (int code = ring.WaitForPlaces(places, deadline); code != 0) return code;
  if (ring.session_state() == MLPO_SESSION_DRAINING)
    return Fail(-ESHUTDOWN, "the daemon is stopping and takes no new work");
  return 0;
}

int SubmitAndWait(mlpo_client* client, mlpo_subgroup* subgroup, const mlpo_submission& submission, Deadline deadline) {
  mlpo_request* request;
  int code = Submit(client, subgroup, submission, deadline, &request);
  if (code != 0) return code;
  code = mlpo_request_wait(request, deadline.LeftNs(), nullptr);
  mlpo_request_free(request);
  return code;
}

namespace {

// Ring lock held.
int CheckSlotFree(const mlpo_subgroup* subgroup) {
  if (!subgroup->update_outstanding) return 0;
  return Fail(MLPO_ERR_SLOT_BUSY, "the update to epoch %u of the subgroup has not ended", subgroup->epoch + 1);
}

// Ring lock held. Who has no slot has put its gradient nowhere.
int CheckSlotLent(const mlpo_subgroup* subgroup) {
  if (subgroup->slot_bytes == 0 || subgroup->slot != nullptr) return 0;
  return Fail(-EINVAL, "the subgroup has no slot now: mlpo_slot_lend gives it one to write its gradient to");
}

int CheckPieces(const mlpo_subgroup* subgroup, const mlpo_grad_piece* pieces, size_t count) {
  if (count == 0) return Fail(-EINVAL, "a gradient of no pieces");
  if (count > UINT32_MAX) return Fail(-EINVAL, "%zu pieces", count);
  for (size_t i = 0; i < count; ++i) {
    const mlpo_grad_piece& piece = pieces[i];
    if (piece.kind < MLPO_GRAD_VALUE || piece.kind > MLPO_GRAD_SKIP)
      return Fail(-EINVAL, "pieces[%zu].kind is %u", i, piece.kind);
    if (piece.reserved != 0) return Fail(-EINVAL, "pieces[%zu].reserved is not 0", i);
    if (piece.first > subgroup->numel || piece.count > subgroup->numel - piece.first) {
      return Fail(-EINVAL, "pieces[%zu] is [%llu, +%llu) of a subgroup of %llu elements", i,
                  static_cast<unsigned long long>(piece.first), static_cast<unsigned long long>(piece.count),
                  static_cast<unsigned long long>(subgroup->numel));
    }
  }
  return 0;
}

// The arguments of both ways to submit a gradient; pieces may be nullptr.
int CheckGrad(const mlpo_subgroup* subgroup, const mlpo_grad_piece* pieces, size_t count, mlpo_request** request) {
  if (subgroup == nullptr || request == nullptr) return Fail(-EINVAL, "subgroup or request is NULL");
  *request = nullptr;
  if (int code = subgroup->client->CheckProcess(); code != 0) return code;
  if (pieces != nullptr) return CheckPieces(subgroup, pieces, count);
  return count == 0 ? 0 : Fail(-EINVAL, "pieces is NULL and count is %zu", count);
}

int SubmitPieces(mlpo_subgroup* subgroup, const mlpo_grad_piece* pieces, uint32_t count, Deadline deadline,
                 mlpo_request** out) {
  mlpo_client* client = subgroup->client;
  RingEnd& ring = client->ring;
  MutexLock lock(ring.lock());
  // As many as the ring holds go in together or not at all.
  uint32_t batch = count < ring.entries() ? count : ring.entries();
  if (int code = CheckTakesWork(client, deadline, batch); code != 0) return code;
  if (int code = CheckSlotFree(subgroup); code != 0) return code;
  if (int code = CheckSlotLent(subgroup); code != 0) return code;
  mlpo_request* request = ring.NewRequest(client, count);
  if (request == nullptr) return -ENOMEM;
  *out = request;
  subgroup->GradBegins();
  ring.PushPieces(subgroup, pieces, batch, request);
  ring.Publish();
  for (uint32_t done = batch; done < count; done += batch) {
    batch = count - done < ring.entries() ? count - done : ring.entries();
    if (int code = CheckTakesWork(client, deadline, batch); code != 0) {
      // The first pieces are on their way, so this is how the request ends, not how the call fails.
      char text[sizeof request->result.text];
      snprintf(text, sizeof text, "%u of %u gradient pieces were submitted: %.150s", done, count, mlpo_last_error());
      request->AddFailures(count - done, code, text);
      return 0;
    }
    ring.PushPieces(subgroup, pieces + done, batch, request);
    ring.Publish();
  }
  return 0;
}

// Ring lock not held.
int PreparePieces(mlpo_subgroup* subgroup, const mlpo_grad_piece* pieces, uint32_t count, mlpo_request** out) {
  mlpo_client* client = subgroup->client;
  RingEnd& ring = client->ring;
  auto* kept = static_cast<mlpo_grad_piece*>(malloc(count * sizeof(mlpo_grad_piece)));
  if (kept == nullptr) return Fail(-ENOMEM, "no memory for %u pieces of a gradient", count);
  memcpy(kept, pieces, count * sizeof(mlpo_grad_piece));
  int code;
  {
    MutexLock lock(ring.lock());
    ring.Reap();
    code = ring.CheckOpen();
    if (code == 0 && ring.session_state() == MLPO_SESSION_DRAINING)
      code = Fail(-ESHUTDOWN, "the daemon is stopping and takes no new work");
    if (code == 0) code = CheckSlotFree(subgroup);
    if (code == 0) code = CheckSlotLent(subgroup);
    if (code == 0) {
      *out = ring.Prepare(client, subgroup, kept, count);
      if (*out == nullptr) code = -ENOMEM;
    }
  }
  if (code != 0) free(kept);
  return code;
}

int CheckRange(const char* name, double value, double least, double below) {
  if (isfinite(value) && value >= least && value < below) return 0;
  if (below == INFINITY) return Fail(-EINVAL, "%s is %g: a finite number of at least %g is needed", name, value, least);
  return Fail(-EINVAL, "%s is %g: a number in [%g, %g) is needed", name, value, least, below);
}

int CheckHyper(const mlpo_update_options& options, mlpo_hyper* hyper) {
  int code = CheckRange("lr", options.lr, 0, INFINITY);
  if (code == 0) code = CheckRange("beta1", options.beta1, 0, 1);
  if (code == 0) code = CheckRange("beta2", options.beta2, 0, 1);
  if (code == 0) code = CheckRange("eps", options.eps, 0, INFINITY);
  if (code == 0) code = CheckRange("weight_decay", options.weight_decay, 0, INFINITY);
  if (code != 0) return code;
  if (!isfinite(options.grad_scale))
    return Fail(-EINVAL, "grad_scale is %g: a finite number is needed", options.grad_scale);
  if (options.mode != MLPO_OPTIMIZER_ADAMW && options.mode != MLPO_OPTIMIZER_ADAM)
    return Fail(-EINVAL, "mode is %d: MLPO_OPTIMIZER_ADAMW and MLPO_OPTIMIZER_ADAM are offered", options.mode);
  if ((options.no_bias_correction & ~1) != 0)
    return Fail(-EINVAL, "no_bias_correction is %d, neither 0 nor 1", options.no_bias_correction);
  if ((options.apply_nonfinite & ~1) != 0)
    return Fail(-EINVAL, "apply_nonfinite is %d, neither 0 nor 1", options.apply_nonfinite);
  *hyper = {};
  hyper->lr = options.lr;
  hyper->beta1 = options.beta1;
  hyper->beta2 = options.beta2;
  hyper->eps = options.eps;
  hyper->weight_decay = options.weight_decay;
  hyper->grad_scale = options.grad_scale;
  hyper->mode = static_cast<uint32_t>(options.mode);
  hyper->flags = options.no_bias_correction != 0 ? MLPO_HYPER_NO_BIAS_CORRECTION : 0;
  return 0;
}

// Ring lock held. What an UPDATE needs: nothing in its way, a slot for the parameters, and a place in the ring.
int PrepareUpdate(mlpo_subgroup* subgroup, Deadline deadline, mlpo_request** request) {
  mlpo_client* client = subgroup->client;
  RingEnd& ring = client->ring;
  const bool lends = subgroup->slot_bytes != 0 && subgroup->slot == nullptr;
  int code = lends ? ring.CheckOpen() : 0;
  if (code == 0 && lends) code = ring.WaitForSlot(&client->lent, subgroup, deadline);
  if (code != 0) return code;
  code = CheckTakesWork(client, deadline, 1);
  if (code == 0) code = CheckSlotFree(subgroup);
  if (code == 0) code = CheckAllPosted(client, subgroup);
  if (code == 0 && subgroup->slot_bytes != 0 && subgroup->slot == nullptr)
    code = Fail(MLPO_ERR_SLOT_BUSY, "another thread has given the subgroup's slot back meanwhile");
  if (code == 0) {
    *request = ring.NewRequest(client, 1);
    if (*request == nullptr) code = -ENOMEM;
  }
  if (code != 0 && lends && subgroup->slot != nullptr && subgroup->MayGiveSlotBack()) {
    client->lent.GiveBack(subgroup);
    ring.WakeWaiters();
  }
  return code;
}

int Discard(mlpo_client* client, mlpo_subgroup* subgroup, int overflow, int64_t timeout_ns) {
  if ((overflow & ~1) != 0) return Fail(-EINVAL, "overflow is %d, neither 0 nor 1", overflow);
  mlpo_submission submission = {};
  submission.op = MLPO_OP_DISCARD;
  submission.subgroup = subgroup != nullptr ? subgroup->handle : MLPO_ALL_SUBGROUPS;
  submission.arg = overflow != 0 ? MLPO_DISCARD_OVERFLOW : MLPO_DISCARD_USER;
  return SubmitAndWait(client, subgroup, submission, Deadline::In(timeout_ns));
}

}  // namespace
}  // namespace mlpo::client

using mlpo::client::Deadline;
using mlpo::client::Fail;
using mlpo::client::MutexLock;
using mlpo::client::RingEnd;

extern "C" {

int mlpo_submit_grad(mlpo_subgroup* subgroup, const mlpo_grad_piece* pieces, size_t count, int64_t timeout_ns,
                     mlpo_request** request) {
  if (int code = mlpo::client::CheckGrad(subgroup, pieces, count, request); code != 0) return code;
  const Deadline deadline = Deadline::In(timeout_ns);
  const mlpo_grad_piece whole = {0, subgroup->numel, MLPO_GRAD_VALUE, 0};
  if (pieces == nullptr) return mlpo::client::SubmitPieces(subgroup, &whole, 1, deadline, request);
  return mlpo::client::SubmitPieces(subgroup, pieces, static_cast<uint32_t>(count), deadline, request);
}

int mlpo_grad_begin(mlpo_subgroup* subgroup) {
  if (subgroup == nullptr) return Fail(-EINVAL, "subgroup is NULL");
  if (int code = subgroup->client->CheckProcess(); code != 0) return code;
  RingEnd& ring = subgroup->client->ring;
  MutexLock lock(ring.lock());
  ring.Reap();
  int code = ring.CheckOpen();
  if (code == 0) code = mlpo::client::CheckSlotFree(subgroup);
  if (code == 0) code = mlpo::client::CheckSlotLent(subgroup);
  if (code == 0) subgroup->GradOverwrites();
  return code;
}

int mlpo_prepare_grad(mlpo_subgroup* subgroup, const mlpo_grad_piece* pieces, size_t count, mlpo_request** request) {
  if (int code = mlpo::client::CheckGrad(subgroup, pieces, count, request); code != 0) return code;
  const mlpo_grad_piece whole = {0, subgroup->numel, MLPO_GRAD_VALUE, 0};
  if (pieces == nullptr) return mlpo::client::PreparePieces(subgroup, &whole, 1, request);
  return mlpo::client::PreparePieces(subgroup, pieces, static_cast<uint32_t>(count), request);
}

int mlpo_submit_update(mlpo_subgroup* subgroup, const mlpo_update_options* given, int64_t timeout_ns,
                       mlpo_request** request) {
  if (subgroup == nullptr || request == nullptr) return Fail(-EINVAL, "subgroup or request is NULL");
  *request = nullptr;
  mlpo_client* client = subgroup->client;
  if (int code = client->CheckProcess(); code != 0) return code;
  mlpo_update_options options = MLPO_UPDATE_OPTIONS_INIT;
  if (given != nullptr) {
    if (int code = mlpo::client::TakeStruct(given, &options, "mlpo_update_options"); code != 0) return code;
  }
  mlpo_hyper hyper;
  if (int code = mlpo::client::CheckHyper(options, &hyper); code != 0) return code;
  RingEnd& ring = client->ring;
  MutexLock lock(ring.lock());
  const Deadline deadline = Deadline::In(timeout_ns);
  mlpo_request* made;
  if (int code = mlpo::client::PrepareUpdate(subgroup, deadline, &made); code != 0) return code;
  mlpo_submission submission = {};
  submission.op = MLPO_OP_UPDATE;
  submission.flags = options.apply_nonfinite != 0 ? MLPO_UPDATE_APPLY_NONFINITE : 0;
  submission.subgroup = subgroup->handle;
  submission.epoch = subgroup->epoch + 1;
  submission.arg = options.priority;
  if (subgroup->slot != nullptr) {
    submission.flags |= MLPO_UPDATE_OUTPUT;
    submission.staging_offset = subgroup->slot_offset;
  }
  subgroup->update_outstanding = true;
  subgroup->holds_param = false;
  ring.Push(submission, &hyper, made, subgroup);
  ring.Publish();
  *request = made;
  return 0;
}

int mlpo_subgroup_discard(mlpo_subgroup* subgroup, int overflow, int64_t timeout_ns) {
  if (subgroup == nullptr) return Fail(-EINVAL, "subgroup is NULL");
  if (int code = subgroup->client->CheckProcess(); code != 0) return code;
  return mlpo::client::Discard(subgroup->client, subgroup, overflow, timeout_ns);
}

int mlpo_client_discard(mlpo_client* client, int overflow, int64_t timeout_ns) {
  if (client == nullptr) return Fail(-EINVAL, "client is NULL");
  if (int code = client->CheckProcess(); code != 0) return code;
  return mlpo::client::Discard(client, nullptr, overflow, timeout_ns);
}

int mlpo_submit_nop(mlpo_client* client, int64_t timeout_ns, mlpo_request** request) {
  if (client == nullptr || request == nullptr) return Fail(-EINVAL, "client or request is NULL");
  *request = nullptr;
  if (int code = client->CheckProcess(); code != 0) return code;
  mlpo_submission submission = {};
  submission.op = MLPO_OP_NOP;
  return mlpo::client::Submit(client, nullptr, submission, Deadline::In(timeout_ns), request);
}

}  // extern "C"
