// mlpo_control: one JSON-RPC 2.0 request on the daemon's control socket, one line each way.
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "client/src/clock.h"
#include "client/src/error.h"
#include "client/src/fd.h"
#include "client/src/json_scan.h"
#include "client/src/socket_path.h"
#include "mlpo/client.h"

namespace mlpo::client {
namespace {

constexpr size_t kMostAnswerBytes = size_t{64} << 20;

int Await(int fd, short events, Deadline deadline) {
  for (;;) {
    pollfd wait = {fd, events, 0};
    const int ready = poll(&wait, 1, deadline.PollMs(1000));
    if (ready > 0) return 0;
    if (ready < 0 && errno != EINTR) return FailErrno(errno, "poll on the control socket");
    if (deadline.Passed()) return Fail(-ETIMEDOUT, "the daemon did not answer on its control socket in time");
  }
}

int ConnectControl(const char* path, Deadline deadline, Fd* out) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (strlen(path) >= sizeof address.sun_path)
    return Fail(-ENAMETOOLONG, "control socket path %s is longer than %zu bytes", path, sizeof address.sun_path - 1);
  strcpy(address.sun_path, path);
  Fd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) return FailErrno(errno, "socket(AF_UNIX, SOCK_STREAM)");
  while (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    if (errno == EINTR) continue;
    if (errno != EAGAIN) return FailErrno(errno, "connect to %s", path);
    if (deadline.Passed()) return Fail(-ETIMEDOUT, "connect to %s: the daemon does not accept", path);
    const timespec pause = ToTimespec(5 * kNsPerMs);
    nanosleep(&pause, nullptr);
  }
  *out = static_cast<Fd&&>(fd);
  return 0;
}

int SendAll(int fd, const char* text, size_t bytes, Deadline deadline) {
  while (bytes > 0) {
    const ssize_t sent = send(fd, text, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) {
      text += sent;
      bytes -= static_cast<size_t>(sent);
    } else if (errno == EAGAIN) {
      if (int code = Await(fd, POLLOUT, deadline); code != 0) return code;
    } else if (errno != EINTR) {
      return FailErrno(errno, "sending to the control socket");
    }
  }
  return 0;
}

// Memory for `need` bytes and one more, or nullptr; frees `text` then.
char* Grow(char* text, size_t need) {
  auto* larger = static_cast<char*>(realloc(text, need + 1));
  if (larger == nullptr) {
    free(text);
    Fail(-ENOMEM, "no memory for an answer of %zu bytes", need);
  }
  return larger;
}

// One line without its newline, zero-terminated, to be freed.
int ReceiveLine(int fd, Deadline deadline, char** line, size_t* bytes) {
  size_t room = 64 << 10;
  size_t used = 0;
  char* text = Grow(nullptr, room);
  while (text != nullptr) {
    const ssize_t got = recv(fd, text + used, room - used, MSG_DONTWAIT);
    int code = 0;
    if (got > 0) {
      const void* newline = memchr(text + used, '\n', static_cast<size_t>(got));
      used += static_cast<size_t>(got);
      if (newline != nullptr) {
        *bytes = static_cast<size_t>(static_cast<const char*>(newline) - text);
        text[*bytes] = '\0';
        *line = text;
        return 0;
      }
      if (used == kMostAnswerBytes) code = Fail(-EMSGSIZE, "the daemon's answer is longer than 64 MiB");
      if (code == 0 && used == room) text = Grow(text, room *= 2);
    } else if (got == 0) {
      code = Fail(-ECONNRESET, "the daemon closed its control socket after %zu bytes of an answer", used);
    } else if (errno == EAGAIN) {
      code = Await(fd, POLLIN, deadline);
    } else if (errno != EINTR) {
      code = FailErrno(errno, "receiving from the control socket");
    }
    if (code != 0) {
      free(text);
      return code;
    }
  }
  return -ENOMEM;
}

// {"jsonrpc":"2.0","id":1,"method":"...","params":...} and a newline, to be freed.
int MakeRequest(const char* method, const char* params, char** request) {
  for (const char* c = method; *c != '\0'; ++c) {
    const bool fine = (*c >= 'a' && *c <= 'z') || (*c >= 'A' && *c <= 'Z') || (*c >= '0' && *c <= '9') || *c == '_' ||
                      *c == '.' || *c == '-';
    if (!fine) return Fail(-EINVAL, "method \"%.64s\": only letters, digits, . _ - are allowed", method);
  }
  if (*method == '\0') return Fail(-EINVAL, "the method's name is empty");
  if (params != nullptr && !IsJson({params, params + strlen(params)}))
    return Fail(-EINVAL, "params of %.64s is not JSON", method);
  const char* format = params != nullptr ? "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"%s\",\"params\":%s}\n"
                                         : "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"%s\"}\n";
  if (asprintf(request, format, method, params) < 0) return Fail(-ENOMEM, "no memory for the request");
  // The protocol's frame is a line: what is one JSON text may be spread over several.
  const size_t bytes = strlen(*request);
  for (size_t i = 0; i + 1 < bytes; ++i) {
    if ((*request)[i] == '\n') (*request)[i] = ' ';
  }
  return 0;
}

int TakeResult(const char* method, JsonText line, char** json) {
  if (!IsJson(line)) return Fail(-EPROTO, "the daemon's answer to %s is not JSON", method);
  if (const JsonText error = FindMember(line, "error"); error.begin != nullptr) {
    char message[600];
    if (!DecodeString(FindMember(error, "message"), message, sizeof message))
      snprintf(message, sizeof message, "%.*s", static_cast<int>(error.bytes() < 500 ? error.bytes() : 500),
               error.begin);
    return Fail(-EPROTO, "%s: %s", method, message);
  }
  const JsonText result = FindMember(line, "result");
  if (result.begin == nullptr) return Fail(-EPROTO, "the daemon's answer to %s has neither result nor error", method);
  *json = strndup(result.begin, result.bytes());
  return *json != nullptr ? 0 : Fail(-ENOMEM, "no memory for an answer of %zu bytes", result.bytes());
}

int Call(const char* path, const char* method, const char* request, Deadline deadline, char** json) {
  Fd fd;
  if (int code = ConnectControl(path, deadline, &fd); code != 0) return code;
  if (int code = SendAll(fd.get(), request, strlen(request), deadline); code != 0) return code;
  char* line;
  size_t bytes;
  if (int code = ReceiveLine(fd.get(), deadline, &line, &bytes); code != 0) return code;
  const int code = TakeResult(method, {line, line + bytes}, json);
  free(line);
  return code;
}

}  // namespace
}  // namespace mlpo::client

extern "C" {

int mlpo_control(const char* socket, const char* method, const char* params, int64_t timeout_ns, char** json) {
  using namespace mlpo::client;
  if (method == nullptr || json == nullptr) return Fail(-EINVAL, "method or json is NULL");
  *json = nullptr;
  char session_path[112];
  char path[sizeof session_path + 4];
  if (int code = FindSocket(socket, session_path, sizeof session_path); code != 0) return code;
  snprintf(path, sizeof path, "%s.ctl", session_path);
  char* request;
  if (int code = MakeRequest(method, params, &request); code != 0) return code;
  const int code = Call(path, method, request, Deadline::In(timeout_ns), json);
  free(request);
  return code;
}

void mlpo_free(void* memory) { free(memory); }

}  // extern "C"
