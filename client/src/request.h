// mlpo_request: one or more submissions that a caller waits for together. Ends exactly once.
//
// Everything but `ended` is guarded by the ring's lock until `ended`; afterwards nothing changes any more. Memory: from
// the ring's free list, back to it when the caller has freed it and all of its submissions have ended.
#pragma once

#include <atomic>
#include <cstdint>

#include "mlpo/client.h"
#include "proto/command.h"

namespace mlpo::client {

// What one submission ended with.
struct Outcome {
  int32_t status = 0;
  uint32_t flags = 0;
  uint64_t value = 0;
  const mlpo_error_record* record = nullptr;  // if the daemon made one
  const char* text = nullptr;                 // of a failure of this side
};

}  // namespace mlpo::client

struct mlpo_request {
  mlpo_client* client = nullptr;
  mlpo_request* next_free = nullptr;
  std::atomic<bool> ended{false};  // store: release, under the ring's lock; load: acquire, anywhere
  bool freed = false;              // by the caller, before it ended
  // Of a prepared gradient: what is not in the ring yet. Deferred: posted, on the ring's list.
  enum class Stage : uint8_t { kSubmitted, kPrepared, kDeferred };
  Stage stage = Stage::kSubmitted;
  mlpo_subgroup* subgroup = nullptr;
  mlpo_grad_piece* pieces = nullptr;  // malloc'ed; `pushed` of `piece_count` are in the ring
  uint32_t piece_count = 0;
  uint32_t pushed = 0;
  mlpo_request* next_deferred = nullptr;
  uint32_t pending = 0;  // submissions that have not ended
  mlpo_result result = {};

  // A new request of `submissions` submissions.
  void Start(mlpo_client* owner, uint32_t submissions);
  // One submission has ended. The first failure wins.
  void Add(uint16_t op, const mlpo::client::Outcome& outcome);
  // `count` submissions end with a failure of this side.
  void AddFailures(uint32_t count, int code, const char* text);

 private:
  void Fail(int code, const char* text);
  void EndOne(uint32_t count);
};
