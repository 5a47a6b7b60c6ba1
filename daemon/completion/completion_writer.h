// CompletionWriter: the only producer of a session's completions, and its client's wake-up.
//
// Never blocks and never fails: a submission is accepted only while a place for its answer is free (Room), so
// there is always one. Completions written in one turn of the data thread are shown together by Publish. Owner and only
// user: the data thread. Memory of the areas is borrowed.
#pragma once

#include <cstdint>

#include "daemon/types/request.h"
#include "proto/ring.h"
#include "proto/spsc_ring.hpp"

namespace mlpo {

class CompletionWriter {
 public:
  CompletionWriter(uint32_t entries, mlpo_completion* completions, mlpo_error_record* errors, mlpo_daemon_lines* daemon,
                   const mlpo_client_lines* client);

  // How many more submissions can be answered; -1 if the client's index is impossible, which is noticed when what it
  // said before leaves fewer than `wanted`.
  int64_t Room(int64_t wanted);
  // Whether the client's index is possible now.
  bool IndexIsPossible() { return ring_.Free() >= 0; }
  void Accepted() { ++unanswered_; }
  // Writes the answer of an accepted submission.
  void Write(const Completion& completion);
  // Shows what was written, and wakes the client if it sleeps.
  void Publish();
  // Changes daemon_lines->state (enum mlpo_session_state) and wakes the client.
  void SetState(uint32_t state);
  // Counts daemon_lines->checkpoint_requests up; the client looks when it suits it.
  void AskForCheckpoint();

 private:
  void Wake();

  SpscProducer<mlpo_completion> ring_;
  mlpo_error_record* const errors_;
  mlpo_daemon_lines* const daemon_;
  const mlpo_client_lines* const client_;
  int64_t unanswered_ = 0;  // accepted and not written
  bool written_ = false;    // since the last Publish
  uint32_t checkpoint_requests_ = 0;
};

}  // namespace mlpo
