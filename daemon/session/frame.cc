#include "daemon/session/frame.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "daemon/base/close_elsewhere.h"
#include "proto/status.h"

namespace mlpo {

namespace {

constexpr size_t kMostFds = 253;  // that a message can have: the kernel's SCM_MAX_FD

}  // namespace

Frame::~Frame() { CloseElsewhere(std::move(fds_), uid_); }

Frame::Outcome Frame::Receive(int socket, uint32_t uid, Status* status) {
  CloseElsewhere(std::exchange(fds_, {}), uid_);
  uid_ = uid;
  iovec part = {buffer_, sizeof buffer_};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMostFds)];
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  ssize_t got;
  do {
    got = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  } while (got < 0 && errno == EINTR);
  if (got < 0) return errno == EAGAIN || errno == EWOULDBLOCK ? Outcome::kNothing : Outcome::kClosed;
  // Descriptors first: an empty message, which looks like the end, can bring some, too.
  for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
      fds_.emplace_back(fd);
    }
  }
  if (got == 0) {
    CloseElsewhere(std::exchange(fds_, {}), uid_);
    return Outcome::kClosed;
  }
  bytes_ = static_cast<size_t>(got);
  std::string wrong;
  if (message.msg_flags & MSG_TRUNC) {
    wrong = "it is longer than a frame may be";
  } else if (message.msg_flags & MSG_CTRUNC) {
    wrong = "it has more descriptors than the daemon can open now";
  } else if (bytes_ < sizeof(mlpo_frame)) {
    wrong = "it is shorter than its header";
  } else if (header().magic != MLPO_MAGIC) {
    wrong = "its magic number is not ours: is this an mlpo client?";
  } else if (header().bytes != bytes_ || header().reserved != 0) {
    wrong = "its header does not fit its length";
  }
  if (wrong.empty()) return Outcome::kFrame;
  CloseElsewhere(std::exchange(fds_, {}), uid_);
  *status = Status(MLPO_E_PROTOCOL, "a frame is broken: " + wrong);
  return Outcome::kBroken;
}

void CloseSocket(UniqueFd socket, uint32_t uid) {
  (void)::shutdown(socket.get(), SHUT_RDWR);  // fails where the peer has gone already
  std::vector<UniqueFd> one;
  one.push_back(std::move(socket));
  CloseElsewhere(std::move(one), uid);
}

Status SendFrame(int socket, const void* frame, size_t bytes, std::span<const int> fds) {
  iovec part = {const_cast<void*>(frame), bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * MLPO_MAX_FRAME_FDS)] = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(fds.size_bytes());
    cmsghdr* c = CMSG_FIRSTHDR(&message);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(c), fds.data(), fds.size_bytes());
  }
  ssize_t sent;
  do {
    sent = ::sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  if (sent < 0) return Status::Errno(errno, "sending a frame to the client");
  return Status();
}

void SendError(int socket, uint32_t seq, const Status& status) {
  auto frame = MakeFrame<mlpo_error>(MLPO_FRAME_ERROR, seq);
  frame.status = status.code();
  frame.os_errno = status.os_errno();
  status.message().copy(frame.text, sizeof frame.text - 1);
  (void)SendFrame(socket, &frame, sizeof frame, {});
}

}  // namespace mlpo
