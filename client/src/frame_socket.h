// FrameSocket: the client's end of the session socket (AF_UNIX, SOCK_SEQPACKET): whole frames with descriptors.
//
// Threads: one sender and one receiver at a time; Shutdown() from any. Every wait has a deadline. Errors: negative
// codes with a text in mlpo_last_error(); kSocketEnded when the daemon's end is gone.
#pragma once

#include <errno.h>

#include <cstddef>
#include <cstdint>

#include "client/src/clock.h"
#include "client/src/fd.h"
#include "proto/control.h"

namespace mlpo::client {

inline constexpr int kSocketEnded = -ECONNRESET;

// One received frame; closes those of its descriptors that nobody took.
struct ReceivedFrame {
  // The longest frame of the daemon is ERROR; more room lets a later minor version append fields.
  alignas(8) std::byte bytes[1024];
  size_t size = 0;
  Fd fds[MLPO_MAX_FRAME_FDS];
  int fd_count = 0;

  void Clear();
  const mlpo_frame& header() const { return *reinterpret_cast<const mlpo_frame*>(bytes); }
  // The frame as T, or nullptr if it is shorter or has not exactly `want_fds` descriptors.
  template <class T>
  const T* As(int want_fds = 0) const {
    return size >= sizeof(T) && fd_count == want_fds ? reinterpret_cast<const T*>(bytes) : nullptr;
  }
};

class FrameSocket {
 public:
  // -ENOENT, -ECONNREFUSED: no daemon; -EACCES; -ETIMEDOUT.
  int Connect(const char* path, Deadline deadline);
  // Sends `bytes` from `frame` (which begins with a struct mlpo_frame, filled in) and at most one descriptor.
  int Send(const void* frame, size_t bytes, int fd, Deadline deadline) {
    return Send(frame, bytes, &fd, fd >= 0 ? 1 : 0, deadline);
  }
  // Likewise with `count` descriptors, at most MLPO_MAX_FRAME_FDS.
  int Send(const void* frame, size_t bytes, const int* fds, uint32_t count, Deadline deadline);
  // Waits for one frame. -ETIMEDOUT, kSocketEnded, MLPO_E_PROTOCOL for what is no frame.
  int Receive(ReceivedFrame* frame, Deadline deadline);
  // Both directions, for every thread that waits here.
  void Shutdown();
  void Close() { fd_.Reset(); }
  int fd() const { return fd_.get(); }

 private:
  int WaitReady(short events, Deadline deadline);

  Fd fd_;
};

// Fills in a frame's header.
template <class T>
void SetHeader(T* frame, mlpo_frame_type type, uint32_t seq, size_t bytes = sizeof(T)) {
  auto* header = reinterpret_cast<mlpo_frame*>(frame);
  header->magic = MLPO_MAGIC;
  header->type = static_cast<uint16_t>(type);
  header->reserved = 0;
  header->bytes = static_cast<uint32_t>(bytes);
  header->seq = seq;
}

}  // namespace mlpo::client
