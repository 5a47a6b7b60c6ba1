#include "client/src/ring_end.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <new>

#include "client/src/session.h"
#include "client/src/subgroup.h"
#include "proto/status.h"

namespace mlpo::client {

void RingEnd::ReleaseMemory() {
  while (free_requests_ != nullptr) {
    mlpo_request* next = free_requests_->next_free;
    free(free_requests_);
    free_requests_ = next;
  }
  free(flights_);
  free(free_flights_);
  flights_ = nullptr;
  free_flights_ = nullptr;
}

int RingEnd::Open(const RingAreas& areas, const WaitTuning& tuning, Probe probe, void* probe_context) {
  areas_ = areas;
  tuning_ = tuning;
  probe_ = probe;
  probe_context_ = probe_context;
  if (sysconf(_SC_NPROCESSORS_ONLN) < 2) tuning_.spin_ns = 0;  // spinning would keep the daemon from working
  flights_ = static_cast<Flight*>(calloc(areas.entries, sizeof(Flight)));
  free_flights_ = static_cast<uint32_t*>(calloc(areas.entries, sizeof(uint32_t)));
  if (flights_ == nullptr || free_flights_ == nullptr)
    return Fail(-ENOMEM, "no memory for %u ring entries", areas.entries);
  for (uint32_t i = 0; i < areas.entries; ++i) {
    new (&flights_[i]) Flight();
    free_flights_[i] = areas.entries - 1 - i;
  }
  free_count_ = areas.entries;
  producer_ = {areas.submissions, areas.entries, &areas.client_lines->submission_tail,
               &areas.daemon_lines->submission_head};
  consumer_ = {areas.completions, areas.entries, &areas.daemon_lines->completion_tail,
               &areas.client_lines->completion_head};
  return 0;
}

uint32_t RingEnd::session_state() const {
  // seq_cst: the last look before sleeping; the daemon stores it, then wakes.
  return SharedWords::Load(&areas_.daemon_lines->state, std::memory_order_seq_cst);
}

uint32_t RingEnd::checkpoint_requests() const {
  return SharedWords::Load(&areas_.daemon_lines->checkpoint_requests, std::memory_order_relaxed);
}

mlpo_request* RingEnd::NewRequest(mlpo_client* client, uint32_t submissions) {
  mlpo_request* request = free_requests_;
  if (request != nullptr) {
    free_requests_ = request->next_free;
  } else {
    void* memory = malloc(sizeof(mlpo_request));
    if (memory == nullptr) {
      Fail(-ENOMEM, "no memory for a request");
      return nullptr;
    }
    request = new (memory) mlpo_request();
  }
  request->Start(client, submissions);
  client->Ref();
  return request;
}

void RingEnd::FreeRequest(mlpo_request* request) {
  if (!request->ended.load(std::memory_order_relaxed)) {
    request->freed = true;  // EndFlight frees it
    return;
  }
  request->next_free = free_requests_;
  free_requests_ = request;
}

void RingEnd::FreeInChild(mlpo_request* request) { free(request); }

void RingEnd::Push(mlpo_submission submission, const mlpo_hyper* hyper, mlpo_request* request,
                   mlpo_subgroup* subgroup) {
  const uint32_t index = free_flights_[--free_count_];
  Flight& flight = flights_[index];
  flight.request = request;
  flight.subgroup = subgroup;
  flight.op = submission.op;
  flight.used = true;
  ++flight.generation;
  if (subgroup != nullptr) {
    ++subgroup->flights;
    if (submission.op == MLPO_OP_GRAD) ++subgroup->grad_flights;
  }
  submission.user_data = static_cast<uint64_t>(flight.generation) << 32 | index;
  if (hyper != nullptr) CopyIn(&areas_.hypers[producer_.next_place()], *hyper);
  producer_.Push(submission);
}

void RingEnd::Publish() {
  producer_.Publish();
  if (!SpscProducer<mlpo_submission>::ConsumerSleeps(&areas_.daemon_lines->doorbell_wanted)) return;
  const uint64_t one = 1;
  ssize_t written;
  do {
    written = write(areas_.doorbell, &one, sizeof one);
  } while (written < 0 && errno == EINTR);
  // EAGAIN: the count is at its end, so the eventfd is readable and the daemon was woken. Anything else cannot be
  // repaired by waiting.
  if (written < 0 && errno != EAGAIN) Broken("writing the daemon's doorbell failed with errno %d", errno);
}

void RingEnd::Reap() {
  if (end_.code != 0) return;
  const int64_t available = consumer_.Available();
  if (available < 0) {
    Broken("the daemon's completion index is impossible");
    return;
  }
  for (int64_t i = 0; i < available; ++i) {
    if (!TakeIn(consumer_.Pop())) return;
  }
  if (available > 0) consumer_.Release();
  if (deferred_ != nullptr) PushDeferred();
  if (available > 0 && followers_ > 0) progress_.NotifyAll();
}

mlpo_request* RingEnd::Prepare(mlpo_client* client, mlpo_subgroup* subgroup, mlpo_grad_piece* pieces, uint32_t count) {
  mlpo_request* request = NewRequest(client, count);
  if (request == nullptr) return nullptr;
  client->Ref();
  request->stage = mlpo_request::Stage::kPrepared;
  request->subgroup = subgroup;
  request->pieces = pieces;
  request->piece_count = count;
  request->pushed = 0;
  request->next_deferred = nullptr;
  ++subgroup->unposted;
  ++unposted_;
  subgroup->GradBegins();
  return request;
}

int RingEnd::Post(mlpo_request* request) {
  request->stage = mlpo_request::Stage::kDeferred;
  if (end_.code != 0) {
    FailRest(request, end_.code, end_.text);
    return end_.Report();
  }
  *deferred_end_ = request;
  deferred_end_ = &request->next_deferred;
  Reap();
  return 0;
}

void RingEnd::Abandon(mlpo_request* request, int code, const char* text) { FailRest(request, code, text); }

// Fills the free places of the ring from the list.
void RingEnd::PushDeferred() {
  bool pushed = false;
  while (deferred_ != nullptr) {
    const int64_t places = producer_.Free();
    if (places < 0) {
      Broken("the daemon's submission index is impossible");
      return;
    }
    mlpo_request* request = deferred_;
    uint32_t count = request->piece_count - request->pushed;
    if (count > free_count_) count = free_count_;
    if (count > places) count = static_cast<uint32_t>(places);
    if (count == 0) break;
    PushPieces(request->subgroup, request->pieces + request->pushed, count, request);
    request->pushed += count;
    pushed = true;
    if (request->pushed < request->piece_count) break;
    deferred_ = request->next_deferred;
    if (deferred_ == nullptr) deferred_end_ = &deferred_;
    LeavePrepared(request);
  }
  if (pushed) Publish();
}

void RingEnd::PushPieces(mlpo_subgroup* subgroup, const mlpo_grad_piece* pieces, uint32_t count,
                         mlpo_request* request) {
  for (uint32_t i = 0; i < count; ++i) {
    mlpo_submission submission = {};
    submission.op = MLPO_OP_GRAD;
    submission.subgroup = subgroup->handle;
    submission.epoch = subgroup->epoch + 1;
    submission.arg = pieces[i].kind;
    submission.first = pieces[i].first;
    submission.count = pieces[i].count;
    if (subgroup->slot != nullptr) {
      submission.flags = MLPO_GRAD_KEEP;
      submission.staging_offset = subgroup->slot_offset;
    }
    Push(submission, nullptr, request, subgroup);
  }
}

// Nothing of the request is outside the ring any more.
void RingEnd::LeavePrepared(mlpo_request* request) {
  mlpo_subgroup* subgroup = request->subgroup;
  request->stage = mlpo_request::Stage::kSubmitted;
  request->subgroup = nullptr;
  free(request->pieces);
  request->pieces = nullptr;
  --subgroup->unposted;
  --unposted_;
  subgroup->FreeIfUnused();
}

// Ends what of the request is not in the ring.
void RingEnd::FailRest(mlpo_request* request, int code, const char* text) {
  const uint32_t rest = request->piece_count - request->pushed;
  LeavePrepared(request);
  ended_ += rest;
  request->AddFailures(rest, code, text);
  if (request->freed && request->ended.load(std::memory_order_relaxed)) FreeRequest(request);
  if (followers_ > 0) progress_.NotifyAll();
  WakeSleeper();
}

// Checks a completion and ends its flight; false if the session had to be ended.
bool RingEnd::TakeIn(const mlpo_completion& completion) {
  constexpr uint32_t kKnownFlags =
      MLPO_COMPLETION_ERROR_RECORD | MLPO_COMPLETION_ALL_FINITE | MLPO_COMPLETION_WINDOW_COMPLETE;
  const auto index = static_cast<uint32_t>(completion.user_data);
  if (index >= areas_.entries || !flights_[index].used ||
      flights_[index].generation != static_cast<uint32_t>(completion.user_data >> 32)) {
    Broken("the daemon completed a request that is not in flight (user_data %016llx)",
           static_cast<unsigned long long>(completion.user_data));
    return false;
  }
  const bool has_record = (completion.flags & MLPO_COMPLETION_ERROR_RECORD) != 0;
  if (completion.status > 0 || (completion.flags & ~kKnownFlags) != 0 || completion.reserved != 0 ||
      (has_record && completion.detail >= areas_.entries)) {
    Broken("the daemon's completion is malformed (status %d, flags %x, detail %u)", completion.status, completion.flags,
           completion.detail);
    return false;
  }
  mlpo_error_record record;
  Outcome outcome{completion.status, completion.flags, completion.value, nullptr};
  if (has_record) {
    record = CopyOut(&areas_.errors[completion.detail]);
    outcome.record = &record;
  }
  mlpo_subgroup* subgroup = flights_[index].subgroup;
  if (subgroup != nullptr && flights_[index].op == MLPO_OP_UPDATE && outcome.status == 0 &&
      outcome.value != subgroup->epoch + uint64_t{1}) {
    Broken("the daemon completed an update to epoch %llu, expected %llu",
           static_cast<unsigned long long>(outcome.value),
           static_cast<unsigned long long>(subgroup->epoch + uint64_t{1}));
    return false;
  }
  EndFlight(index, outcome);
  return true;
}

void RingEnd::EndFlight(uint32_t index, const Outcome& outcome) {
  Flight& flight = flights_[index];
  if (mlpo_subgroup* subgroup = flight.subgroup; subgroup != nullptr) {
    if (flight.op == MLPO_OP_UPDATE) subgroup->UpdateEnded(outcome.status);
    if (flight.op == MLPO_OP_GRAD) {
      --subgroup->grad_flights;
      if (outcome.status == 0 && (outcome.flags & MLPO_COMPLETION_WINDOW_COMPLETE) != 0) subgroup->WindowComplete();
    }
    if (flight.op == MLPO_OP_DISCARD && outcome.status == 0) subgroup->WindowDiscarded();
    if (flight.op == MLPO_OP_RESTORE) subgroup->RestoreEnded(outcome.status);
    --subgroup->flights;
    subgroup->SettleSlot();
    subgroup->FreeIfUnused();
  } else if (flight.op == MLPO_OP_DISCARD && outcome.status == 0) {
    flight.request->client->lent.WindowsDiscarded();
  }
  mlpo_request* request = flight.request;
  ++ended_;
  request->Add(flight.op, outcome);
  if (request->freed && request->ended.load(std::memory_order_relaxed)) FreeRequest(request);
  flight.used = false;
  flight.request = nullptr;
  flight.subgroup = nullptr;
  free_flights_[free_count_++] = index;
}

void RingEnd::FailFlights() {
  for (uint32_t i = 0; i < areas_.entries; ++i) {
    Flight& flight = flights_[i];
    if (!flight.used) continue;
    EndFlight(i, Outcome{end_.code, 0, 0, nullptr, end_.text});
  }
  while (deferred_ != nullptr) {
    mlpo_request* request = deferred_;
    deferred_ = request->next_deferred;
    FailRest(request, end_.code, end_.text);
  }
  deferred_end_ = &deferred_;
}

void RingEnd::End(const Failure& failure, bool reap_first) {
  if (reap_first) Reap();
  if (end_.code != 0) return;
  end_ = failure;
  FailFlights();
  progress_.NotifyAll();
  WakeSleeper();
}

void RingEnd::Close(const Failure& closed) {
  End(closed, /*reap_first=*/true);
  end_ = closed;
}

void RingEnd::Broken(const char* format, ...) {
  Failure failure;
  failure.code = MLPO_E_PROTOCOL;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(failure.text, sizeof failure.text, format, arguments);
  va_end(arguments);
  End(failure, /*reap_first=*/false);
}

}  // namespace mlpo::client
