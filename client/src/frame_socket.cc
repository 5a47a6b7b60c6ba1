#include "client/src/frame_socket.h"

#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "client/src/error.h"
#include "proto/status.h"

namespace mlpo::client {

void ReceivedFrame::Clear() {
  for (Fd& fd : fds) fd.Reset();
  fd_count = 0;
  size = 0;
}

int FrameSocket::Connect(const char* path, Deadline deadline) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (strlen(path) >= sizeof address.sun_path)
    return Fail(-ENAMETOOLONG, "socket path %s is longer than %zu bytes", path, sizeof address.sun_path - 1);
  strcpy(address.sun_path, path);
  Fd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) return FailErrno(errno, "socket(AF_UNIX, SOCK_SEQPACKET)");
  while (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    const int error = errno;
    if (error == EINTR) continue;
    if (error != EAGAIN) {
      const char* hint = error == ENOENT || error == ECONNREFUSED ? " (no mlpo-daemon listens there)" : "";
      return FailErrno(error, "connect to %s%s", path, hint);
    }
    // The backlog is full. There is nothing to wait on but time.
    if (deadline.Passed()) return Fail(-ETIMEDOUT, "connect to %s: the daemon does not accept", path);
    const timespec pause = ToTimespec(5 * kNsPerMs);
    nanosleep(&pause, nullptr);
  }
  fd_ = static_cast<Fd&&>(fd);
  return 0;
}

int FrameSocket::WaitReady(short events, Deadline deadline) {
  for (;;) {
    pollfd wait = {fd_.get(), events, 0};
    const int ready = poll(&wait, 1, deadline.PollMs(1000));
    if (ready > 0) return 0;
    if (ready < 0 && errno != EINTR) return FailErrno(errno, "poll on the daemon's socket");
    if (deadline.Passed()) return Fail(-ETIMEDOUT, "the daemon did not answer in time");
  }
}

int FrameSocket::Send(const void* frame, size_t bytes, const int* fds, uint32_t count, Deadline deadline) {
  if (count > MLPO_MAX_FRAME_FDS) return Fail(-EINVAL, "a frame has at most %d descriptors", MLPO_MAX_FRAME_FDS);
  iovec part = {const_cast<void*>(frame), bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(MLPO_MAX_FRAME_FDS * sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (count > 0) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(count * sizeof(int));
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(count * sizeof(int));
    memcpy(CMSG_DATA(header), fds, count * sizeof(int));
  }
  for (;;) {
    const ssize_t sent = sendmsg(fd_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent == static_cast<ssize_t>(bytes)) return 0;
    if (sent >= 0) return Fail(MLPO_E_PROTOCOL, "a frame of %zu bytes was sent as %zd", bytes, sent);
    if (errno == EINTR) continue;
    if (errno == EPIPE || errno == ECONNRESET || errno == ENOTCONN)
      return Fail(kSocketEnded, "the daemon closed the session socket");
    if (errno != EAGAIN) return FailErrno(errno, "sendmsg to the daemon");
    if (int code = WaitReady(POLLOUT, deadline); code != 0) return code;
  }
}

namespace {

// Takes every descriptor over before anything is checked, so that none leaks.
void TakeDescriptors(msghdr* message, ReceivedFrame* frame) {
  for (cmsghdr* header = CMSG_FIRSTHDR(message); header != nullptr; header = CMSG_NXTHDR(message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd;
      memcpy(&fd, CMSG_DATA(header) + i * sizeof fd, sizeof fd);
      if (frame->fd_count < MLPO_MAX_FRAME_FDS) {
        frame->fds[frame->fd_count++].Reset(fd);
      } else {
        close(fd);
      }
    }
  }
}

int CheckFrame(const ReceivedFrame& frame, int flags) {
  if ((flags & MSG_CTRUNC) != 0)
    return Fail(-EMFILE, "descriptors of the daemon did not arrive: raise RLIMIT_NOFILE (ulimit -n)");
  if ((flags & MSG_TRUNC) != 0)
    return Fail(MLPO_E_PROTOCOL, "the daemon sent a frame longer than %zu bytes", sizeof frame.bytes);
  if (frame.size < sizeof(mlpo_frame))
    return Fail(MLPO_E_PROTOCOL, "the daemon sent a frame of %zu bytes, shorter than its header", frame.size);
  const mlpo_frame& header = frame.header();
  if (header.magic != MLPO_MAGIC || header.reserved != 0 || header.bytes != frame.size) {
    return Fail(MLPO_E_PROTOCOL, "the daemon sent a malformed frame (magic %08x, %u bytes announced, %zu received)",
                header.magic, header.bytes, frame.size);
  }
  return 0;
}

}  // namespace

int FrameSocket::Receive(ReceivedFrame* frame, Deadline deadline) {
  frame->Clear();
  iovec part = {frame->bytes, sizeof frame->bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * MLPO_MAX_FRAME_FDS)];
  for (;;) {
    msghdr message = {};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    const ssize_t got = recvmsg(fd_.get(), &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (got > 0) {
      frame->size = static_cast<size_t>(got);
      TakeDescriptors(&message, frame);
      return CheckFrame(*frame, message.msg_flags);
    }
    if (got == 0 || errno == ECONNRESET || errno == ENOTCONN)
      return Fail(kSocketEnded, "the daemon closed the session socket");
    if (errno == EINTR) continue;
    if (errno != EAGAIN) return FailErrno(errno, "recvmsg from the daemon");
    if (int code = WaitReady(POLLIN, deadline); code != 0) return code;
  }
}

void FrameSocket::Shutdown() {
  if (fd_) shutdown(fd_.get(), SHUT_RDWR);
}

}  // namespace mlpo::client
