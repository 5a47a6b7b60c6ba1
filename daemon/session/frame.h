// Frames on a session's socket: one datagram with its descriptors, received once and checked, or sent.
//
// Threads: none of its own; one socket is used by one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "daemon/base/status.h"
#include "daemon/base/unique_fd.h"
#include "proto/control.h"

namespace mlpo {

class Frame {
 public:
  Frame() = default;
  // Descriptors that nobody has taken are a stranger's: closing them may wait for it, and is not done here.
  ~Frame();
  Frame(const Frame&) = delete;
  Frame& operator=(const Frame&) = delete;

  enum class Outcome { kFrame, kNothing, kClosed, kBroken };
  // Never blocks. kBroken: *status says what is wrong with what came; its descriptors are closed. All that come are
  // taken, also more than a frame may have, which its receiver has to look at: those that are not taken the kernel
  // closes in this thread, and that may wait for somebody (a socket that lingers). `uid`: who has the other end.
  Outcome Receive(int socket, uint32_t uid, Status* status);

  uint16_t type() const { return header().type; }
  uint32_t seq() const { return header().seq; }
  std::vector<UniqueFd>& fds() { return fds_; }
  // The frame as its struct if it is exactly as long; nullptr otherwise.
  template <class T>
  const T* As() const {
    return bytes_ == sizeof(T) ? reinterpret_cast<const T*>(buffer_) : nullptr;
  }
  // The whole frame.
  std::span<const std::byte> bytes() const { return {buffer_, bytes_}; }

 private:
  const mlpo_frame& header() const { return *reinterpret_cast<const mlpo_frame*>(buffer_); }

  alignas(8) std::byte buffer_[MLPO_MAX_FRAME];
  size_t bytes_ = 0;
  std::vector<UniqueFd> fds_;
  uint32_t uid_ = 0;  // who has passed these
};

// A zeroed frame of type T with its header filled in.
template <class T>
T MakeFrame(uint16_t type, uint32_t seq) {
  T frame = {};
  mlpo_frame* header = reinterpret_cast<mlpo_frame*>(&frame);
  header->magic = MLPO_MAGIC;
  header->type = type;
  header->bytes = sizeof frame;
  header->seq = seq;
  return frame;
}

// Ends a connection. The peer sees it at once; the socket is closed elsewhere, for with it goes what is unread, and
// closing a descriptor that is on its way may wait. `uid`: who has the other end.
void CloseSocket(UniqueFd socket, uint32_t uid);

// Never blocks: a peer that does not read its answers is an error (EAGAIN).
Status SendFrame(int socket, const void* frame, size_t bytes, std::span<const int> fds);
// An ERROR frame for `status`. Failure to send it is not worth more than the failure it reports.
void SendError(int socket, uint32_t seq, const Status& status);

}  // namespace mlpo
