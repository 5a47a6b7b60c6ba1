#include "daemon/base/service_manager.h"

#include <spdlog/spdlog.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "daemon/base/clock.h"

namespace mlpo {
namespace {

constexpr timeval kSendTimeout = {.tv_sec = 5, .tv_usec = 0};

// A positive decimal number, else 0.
int64_t Number(const char* text) {
  if (text == nullptr) return 0;
  int64_t value = 0;
  const char* end = text + std::strlen(text);
  const auto [at, error] = std::from_chars(text, end, value);
  return error == std::errc() && at == end && value > 0 ? value : 0;
}

int64_t WatchdogNs() {
  constexpr int64_t kMaxUs = INT64_MAX / 1000;
  const char* pid = std::getenv("WATCHDOG_PID");
  if (pid != nullptr && Number(pid) != ::getpid()) return 0;  // meant for another process
  return std::min(Number(std::getenv("WATCHDOG_USEC")), kMaxUs) * 1000;
}

}  // namespace

ServiceManager ServiceManager::FromEnvironment() {
  ServiceManager manager;
  const char* variable = std::getenv("NOTIFY_SOCKET");
  if (variable == nullptr || *variable == '\0') return manager;
  const std::string_view name = variable;
  if ((name[0] != '/' && name[0] != '@') || name.size() < 2 || name.size() >= sizeof manager.address_.sun_path) {
    spdlog::warn("event=no_service_manager reason=\"NOTIFY_SOCKET is no unix socket: {}\"", name);
    return manager;
  }
  manager.address_.sun_family = AF_UNIX;
  std::memcpy(manager.address_.sun_path, name.data(), name.size());
  if (name[0] == '@') manager.address_.sun_path[0] = '\0';
  manager.address_bytes_ = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + name.size());
  UniqueFd fd(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!fd || ::setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &kSendTimeout, sizeof kSendTimeout) != 0) {
    spdlog::warn("event=no_service_manager reason=\"socket(AF_UNIX): {}\"", std::strerror(errno));
    return manager;
  }
  manager.fd_ = std::move(fd);
  manager.watchdog_ns_ = WatchdogNs();
  return manager;
}

void ServiceManager::Ready() { Send("READY=1"); }
void ServiceManager::Stopping() { Send("STOPPING=1"); }
void ServiceManager::Alive() { Send("WATCHDOG=1"); }
void ServiceManager::Extend(int64_t seconds) { Send("EXTEND_TIMEOUT_USEC=" + std::to_string(seconds * 1'000'000)); }

void ServiceManager::Show(const std::string& text) {
  if (text == shown_) return;
  shown_ = text;
  std::string line = "STATUS=" + text;
  std::replace(line.begin(), line.end(), '\n', ' ');  // a line is a variable
  Send(line);
}

void ServiceManager::Send(const std::string& message) {
  if (!fd_) return;
  ssize_t sent;
  do {
    sent = ::sendto(fd_.get(), message.data(), message.size(), MSG_NOSIGNAL,
                    reinterpret_cast<const sockaddr*>(&address_), address_bytes_);
  } while (sent < 0 && errno == EINTR);
  if (sent >= 0 || failed_) return;
  failed_ = true;
  spdlog::warn("event=service_manager_not_told message=\"{}\" reason=\"{}\"", message, std::strerror(errno));
}

}  // namespace mlpo
