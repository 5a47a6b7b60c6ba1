// SessionSocket: requests on the session socket after the handshake (registration, staging area), and the arena that
// comes with their answers.
//
// Threads: a request holds turn() from Begin() to its answer; Bye(), Probe() and arena_bytes() from any thread. What
// ends the session (a frame that says so, the socket's end, a broken protocol) is told to the ring.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>

#include "client/src/error.h"
#include "client/src/frame_socket.h"
#include "client/src/lock.h"
#include "client/src/mapping.h"

namespace mlpo::client {

class RingEnd;

// The daemon's refusal as this side's failure.
void ReadRefusal(const mlpo_error& error, Failure* failure);

class SessionSocket {
 public:
  void Open(FrameSocket&& socket, RingEnd* ring);

  Turn& turn() { return turn_; }
  // Waits for the answer to an earlier request that its caller no longer waited for.
  int Drain(Deadline deadline);
  // The same, then opens a new request.
  int Begin(Deadline deadline, uint32_t* seq);
  int Send(const void* frame, size_t bytes, Deadline deadline) { return Send(frame, bytes, nullptr, 0, deadline); }
  int Send(const void* frame, size_t bytes, const int* fds, uint32_t count, Deadline deadline);
  // The answer of the given type to the request that is open; maps pieces of the arena that come before it. The
  // daemon's refusal is returned with its text. After -ETIMEDOUT the request stays open.
  int Await(mlpo_frame_type type, ReceivedFrame* answer, Deadline deadline);
  // The bytes [offset, offset + length) of a piece of the arena, or nullptr.
  std::byte* ArenaBytes(uint32_t arena, uint64_t offset, uint64_t length) const;
  // False if there are not so many pieces. Any thread, without turn().
  bool ArenaPiece(uint32_t index, void** base, uint64_t* bytes);
  // The answer to STAGING, which comes once, though perhaps after its caller had given up; bytes is 0 before.
  const mlpo_staged& staged() const { return staged_; }
  // The same of LEND.
  const mlpo_staged& lent() const { return lent_; }
  // The handle of the last CHECKPOINTING or RESTORING that nobody has taken yet, perhaps since its caller had given up;
  // 0: there is none.
  uint32_t TakeUnclaimedSave() { return std::exchange(save_, 0u); }
  uint32_t TakeUnclaimedRestore() { return std::exchange(restore_, 0u); }
  // Ends the session because what the daemon sent breaks the protocol; `code` and text are the last error's.
  int EndSession(int code);

  // A Probe for the ring: ring lock held.
  static bool Probe(void* self, Failure* failure);
  void Bye();
  uint64_t arena_bytes() const { return arena_bytes_.load(std::memory_order_relaxed); }
  // With no other thread inside.
  void Close();
  void ReleaseMemory();

 private:
  int TakeArena(const ReceivedFrame& frame, Deadline deadline);
  void SayWhyEnded(int code, Failure* failure) const;
  bool NoteError(const mlpo_error& error, Failure* failure);
  bool ReadEnd(Failure* failure);
  void NoteAnswer(const ReceivedFrame& answer);

  Turn turn_;
  FrameSocket socket_;
  RingEnd* ring_ = nullptr;
  uint32_t seq_ = 0;   // of the newest request
  uint32_t open_ = 0;  // seq of the request that has no answer yet, 0 if none
  mlpo_staged staged_ = {};
  mlpo_staged lent_ = {};
  uint32_t save_ = 0;
  uint32_t restore_ = 0;
  Failure reason_;     // of an ERROR that answered no request: what the end of the socket means if it follows
  Mutex arenas_lock_;  // changes have turn() as well, so its holder reads without
  Mapping* arenas_ = nullptr;
  uint32_t arena_count_ = 0;
  uint32_t arena_capacity_ = 0;
  std::atomic<uint64_t> arena_bytes_{0};  // relaxed: a count
  int64_t ended_since_ns_ = 0;            // guarded by the ring's lock: when the state word was first seen at ENDED
};

}  // namespace mlpo::client
