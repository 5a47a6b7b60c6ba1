// ServiceManager: what systemd (Type=notify) is told of this process, over the socket that it named in NOTIFY_SOCKET.
//
// The protocol is one datagram of NAME=value lines, fixed by sd_notify(3): it needs no library, and a daemon built
// anywhere has it. Started by anything else, every call does nothing. What cannot be sent is lost, which is logged the
// first time: serving goes on. Main thread.
#pragma once

#include <sys/un.h>

#include <cstdint>
#include <string>

#include "daemon/base/unique_fd.h"

namespace mlpo {

class ServiceManager {
 public:
  ServiceManager() = default;  // nobody is told
  // By NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID.
  static ServiceManager FromEnvironment();

  bool listens() const { return static_cast<bool>(fd_); }
  int64_t watchdog_ns() const { return watchdog_ns_; }  // Alive() at least this often; 0: not asked for

  void Ready();
  void Stopping();
  void Alive();
  // From now on start or stop takes at most `seconds` until the next call, or the end.
  void Extend(int64_t seconds);
  // One line for people (systemctl status); sent when it is another than before.
  void Show(const std::string& text);

 private:
  void Send(const std::string& message);

  UniqueFd fd_;
  sockaddr_un address_{};
  socklen_t address_bytes_ = 0;
  int64_t watchdog_ns_ = 0;
  std::string shown_;
  bool failed_ = false;  // to send
};

}  // namespace mlpo
