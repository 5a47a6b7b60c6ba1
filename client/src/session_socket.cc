#include "client/src/session_socket.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>

#include <new>

#include "client/src/ring_end.h"
#include "proto/status.h"

namespace mlpo::client {
namespace {

// How long the socket may keep the reason back after the state word has said that the session ended.
constexpr int64_t kReasonGraceNs = 200 * kNsPerMs;

}  // namespace

void ReadRefusal(const mlpo_error& error, Failure* failure) {
  const int code = error.status < 0 ? error.status : MLPO_E_PROTOCOL;
  failure->Set(code, "%.*s", static_cast<int>(sizeof error.text), error.text);
}

void SessionSocket::Open(FrameSocket&& socket, RingEnd* ring) {
  socket_ = static_cast<FrameSocket&&>(socket);
  ring_ = ring;
}

// Turns an ERROR frame into *failure; true if it ends the session. A refused request leaves the session as it is.
bool SessionSocket::NoteError(const mlpo_error& error, Failure* failure) {
  ReadRefusal(error, failure);
  const uint32_t seq = error.frame.seq;
  if (seq == 0 || failure->code == MLPO_E_PROTOCOL) return true;
  if (seq != open_ || failure->code == -ESHUTDOWN) reason_ = *failure;
  return false;
}

int SessionSocket::Drain(Deadline deadline) {
  {
    MutexLock lock(ring_->lock());
    if (int code = ring_->CheckOpen(); code != 0) return code;
    if (ring_->session_state() != MLPO_SESSION_RUNNING)
      return Fail(-ESHUTDOWN, "the daemon is stopping and takes no new work");
  }
  if (open_ != 0) {
    ReceivedFrame late;
    const int code = Await(static_cast<mlpo_frame_type>(0), &late, deadline);
    if (open_ != 0) return code;  // timed out or ended; a refusal is nobody's any more
    MutexLock lock(ring_->lock());
    if (int ended = ring_->CheckOpen(); ended != 0) return ended;
  }
  return 0;
}

int SessionSocket::Begin(Deadline deadline, uint32_t* seq) {
  if (int code = Drain(deadline); code != 0) return code;
  if (++seq_ == 0) ++seq_;  // 0 names no request
  reason_ = {};
  open_ = seq_;
  *seq = seq_;
  return 0;
}

int SessionSocket::Send(const void* frame, size_t bytes, const int* fds, uint32_t count, Deadline deadline) {
  // A request that was begun is sent to its end or the session cannot go on: half of one would wait for ever.
  const int code = socket_.Send(frame, bytes, fds, count, deadline);
  return code == 0 ? 0 : EndSession(code);
}

int SessionSocket::Await(mlpo_frame_type type, ReceivedFrame* answer, Deadline deadline) {
  for (;;) {
    const int code = socket_.Receive(answer, deadline);
    if (code == -ETIMEDOUT) return Fail(code, "the daemon did not answer a registration in time; it goes on");
    if (code != 0) return EndSession(code);
    const mlpo_frame& header = answer->header();
    if (header.type == MLPO_FRAME_ARENA) {
      if (int mapped = TakeArena(*answer, deadline); mapped != 0) return EndSession(mapped);
      continue;
    }
    if (header.type == MLPO_FRAME_ERROR) {
      const auto* error = answer->As<mlpo_error>();
      if (error == nullptr) return EndSession(Fail(MLPO_E_PROTOCOL, "the daemon sent a malformed ERROR frame"));
      Failure refusal;
      if (NoteError(*error, &refusal)) return EndSession(refusal.Report());
      if (header.seq != open_) continue;
      open_ = 0;
      return refusal.Report();
    }
    if (header.seq == open_ && (type == 0 || header.type == type)) {
      NoteAnswer(*answer);
      return 0;
    }
    return EndSession(Fail(MLPO_E_PROTOCOL, "the daemon sent frame %u (seq %u) where %u (seq %u) was due", header.type,
                           header.seq, type, open_));
  }
}

void SessionSocket::NoteAnswer(const ReceivedFrame& answer) {
  open_ = 0;
  const auto* staged = answer.As<mlpo_staged>();
  if (answer.header().type == MLPO_FRAME_STAGED && staged != nullptr) staged_ = *staged;
  if (answer.header().type == MLPO_FRAME_LENT && staged != nullptr) lent_ = *staged;
  const auto* save = answer.As<mlpo_checkpointing>();
  if (answer.header().type == MLPO_FRAME_CHECKPOINTING && save != nullptr) save_ = save->handle;
  const auto* restore = answer.As<mlpo_restoring>();
  if (answer.header().type == MLPO_FRAME_RESTORING && restore != nullptr) restore_ = restore->handle;
}

int SessionSocket::TakeArena(const ReceivedFrame& frame, Deadline deadline) {
  const auto* arena = frame.As<mlpo_arena>(1);
  if (arena == nullptr || arena->reserved != 0 || arena->index != arena_count_)
    return Fail(MLPO_E_PROTOCOL, "the daemon sent a malformed ARENA frame (piece %u is due)", arena_count_);
  {
    MutexLock lock(arenas_lock_);
    if (arena_count_ == arena_capacity_) {
      const uint32_t capacity = arena_capacity_ == 0 ? 8 : arena_capacity_ * 2;
      auto* larger = static_cast<Mapping*>(realloc(static_cast<void*>(arenas_), capacity * sizeof(Mapping)));
      if (larger == nullptr) return Fail(-ENOMEM, "no memory for %u pieces of the arena", capacity);
      arenas_ = larger;
      arena_capacity_ = capacity;
    }
    Mapping mapping;
    if (int code = mapping.Map(frame.fds[0].get(), arena->bytes, /*writable=*/true, "arena"); code != 0) return code;
    new (&arenas_[arena_count_++]) Mapping(mapping);
    arena_bytes_.fetch_add(mapping.bytes(), std::memory_order_relaxed);
  }
  mlpo_mapped answer = {};
  SetHeader(&answer, MLPO_FRAME_MAPPED, frame.header().seq);
  answer.index = arena->index;
  return socket_.Send(&answer, sizeof answer, -1, deadline);
}

std::byte* SessionSocket::ArenaBytes(uint32_t arena, uint64_t offset, uint64_t length) const {
  if (arena >= arena_count_ || !arenas_[arena].Holds(offset, length)) return nullptr;
  return arenas_[arena].data() + offset;
}

bool SessionSocket::ArenaPiece(uint32_t index, void** base, uint64_t* bytes) {
  MutexLock lock(arenas_lock_);
  if (index >= arena_count_) return false;
  *base = arenas_[index].data();
  *bytes = arenas_[index].bytes();
  return true;
}

int SessionSocket::EndSession(int code) {
  Failure failure;
  SayWhyEnded(code, &failure);
  MutexLock lock(ring_->lock());
  ring_->End(failure, /*reap_first=*/true);
  return ring_->CheckOpen();  // an earlier end stands
}

// `code` and the last error's text are of what the socket did.
void SessionSocket::SayWhyEnded(int code, Failure* failure) const {
  if (code != kSocketEnded) {
    failure->SetFromLast(code);
  } else if (reason_.code != 0) {
    *failure = reason_;
  } else if (ring_->session_state() == MLPO_SESSION_ENDED) {
    failure->Set(-ESHUTDOWN, "the daemon was stopped and ended the session");
  } else {
    failure->Set(MLPO_E_DAEMON_DIED,
                 "the daemon went away without a word; look at its log, start it and connect again");
  }
}

bool SessionSocket::Probe(void* self, Failure* failure) {
  auto* socket = static_cast<SessionSocket*>(self);
  KeepLastError keep;
  const bool ended = socket->ring_->session_state() == MLPO_SESSION_ENDED;
  pollfd wait = {socket->socket_.fd(), POLLIN, 0};
  const bool readable = poll(&wait, 1, 0) > 0;
  // With the turn taken a request reads the socket, and finds what there is.
  if (readable && socket->turn_.TryAcquire()) {
    const bool over = socket->ReadEnd(failure);
    socket->turn_.Release();
    if (over) return true;
  }
  if (!ended) return false;
  const int64_t now_ns = NowNs();
  if (socket->ended_since_ns_ == 0) socket->ended_since_ns_ = now_ns;
  if (now_ns - socket->ended_since_ns_ < kReasonGraceNs) return false;
  failure->Set(-ESHUTDOWN, "the daemon ended the session");
  return true;
}

// Reads what waits in the socket while no request is open or its caller has given up.
bool SessionSocket::ReadEnd(Failure* failure) {
  for (;;) {
    ReceivedFrame frame;
    int code = socket_.Receive(&frame, Deadline{0});
    if (code == -ETIMEDOUT) return false;
    if (code == 0) {
      const mlpo_frame& header = frame.header();
      const auto* error = frame.As<mlpo_error>();
      if (header.type == MLPO_FRAME_ERROR && error != nullptr) {
        if (NoteError(*error, failure)) return true;
        if (header.seq == open_) open_ = 0;
        continue;
      }
      if (header.type == MLPO_FRAME_ARENA && open_ != 0) {
        code = TakeArena(frame, Deadline{0});
        if (code == 0) continue;
      } else if (header.seq == open_ && open_ != 0) {
        NoteAnswer(frame);
        continue;
      } else {
        code = Fail(MLPO_E_PROTOCOL, "the daemon sent frame %u unasked", header.type);
      }
    }
    SayWhyEnded(code, failure);
    return true;
  }
}

void SessionSocket::Bye() {
  KeepLastError keep;
  mlpo_frame bye;
  SetHeader(&bye, MLPO_FRAME_BYE, 0);
  // If it cannot be sent, the end of the socket says the same.
  socket_.Send(&bye, sizeof bye, -1, Deadline{0});
  socket_.Shutdown();
}

void SessionSocket::Close() {
  MutexLock lock(arenas_lock_);
  for (uint32_t i = 0; i < arena_count_; ++i) arenas_[i].Unmap();
  arena_count_ = 0;
  socket_.Close();
}

void SessionSocket::ReleaseMemory() { free(static_cast<void*>(arenas_)); }

}  // namespace mlpo::client
