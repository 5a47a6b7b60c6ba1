// SlowClose: a descriptor whose closing waits, as that of a file may whose file system is served by somebody who does
// not answer: a TCP socket that lingers over bytes which nobody reads.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "daemon/base/unique_fd.h"

namespace mlpo::test {

class SlowClose {
 public:
  static constexpr int kLingerSeconds = 120;  // longer than any test

  SlowClose() {
    const UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t bytes = sizeof address;
    auto* const any = reinterpret_cast<sockaddr*>(&address);
    file_ = UniqueFd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const int small = 4096;  // as little as the kernel allows waits to be read
    (void)::setsockopt(listener.get(), SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
    (void)::setsockopt(file_.get(), SOL_SOCKET, SO_SNDBUF, &small, sizeof small);
    const bool connected = listener && file_ && ::bind(listener.get(), any, bytes) == 0 &&
                           ::listen(listener.get(), 1) == 0 && ::getsockname(listener.get(), any, &bytes) == 0 &&
                           ::connect(file_.get(), any, bytes) == 0;
    if (connected) reader_ = UniqueFd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    const linger lingers = {1, kLingerSeconds};
    if (!reader_ || ::setsockopt(file_.get(), SOL_SOCKET, SO_LINGER, &lingers, sizeof lingers) != 0)
      throw std::runtime_error(std::string("a socket that lingers: ") + std::strerror(errno));
    const std::string much(1 << 16, 'x');
    while (::send(file_.get(), much.data(), much.size(), MSG_DONTWAIT | MSG_NOSIGNAL) > 0) {
    }
  }

  int fd() const { return file_.get(); }
  // The caller's to close.
  UniqueFd Take() { return std::move(file_); }
  // Whoever closes it, or has been waiting to, goes on.
  void Release() { reader_.reset(); }

 private:
  UniqueFd reader_;  // closed first, so that the other may be
  UniqueFd file_;
};

}  // namespace mlpo::test
