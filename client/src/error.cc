#include "client/src/error.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "mlpo/client.h"
#include "proto/status.h"

namespace mlpo::client {
namespace {

// Trivial and constant-initialised, so that no start-up code and no libstdc++ stands behind it.
thread_local char last_text[1024];

void AppendErrno(int error) {
  char buffer[128];
  const size_t used = strlen(last_text);
  snprintf(last_text + used, sizeof last_text - used, ": %s", strerror_r(error, buffer, sizeof buffer));
}

void SetText(const char* format, va_list arguments) {
  char text[sizeof last_text];  // a second buffer: an argument may be last_text itself
  vsnprintf(text, sizeof text, format, arguments);
  memcpy(last_text, text, strlen(text) + 1);
}

}  // namespace

int Fail(int code, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  SetText(format, arguments);
  va_end(arguments);
  return code;
}

int FailErrno(int error, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  SetText(format, arguments);
  va_end(arguments);
  AppendErrno(error);
  return -error;
}

void Failure::Set(int failure_code, const char* format, ...) {
  code = failure_code;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
}

void Failure::SetFromLast(int failure_code) {
  code = failure_code;
  snprintf(text, sizeof text, "%.*s", static_cast<int>(sizeof text - 1), last_text);
}

static_assert(sizeof(KeepLastError) == sizeof last_text, "holds all of it");

KeepLastError::KeepLastError() { memcpy(text_, last_text, strlen(last_text) + 1); }

KeepLastError::~KeepLastError() { memcpy(last_text, text_, strlen(text_) + 1); }

}  // namespace mlpo::client

#define SAME(name) static_assert(static_cast<int>(MLPO_ERR_##name) == static_cast<int>(MLPO_E_##name), #name)
SAME(EPOCH);
SAME(COVERAGE);
SAME(NOT_FINITE);
SAME(TORN);
SAME(SLOT_BUSY);
SAME(PROTOCOL);
SAME(VERSION);
SAME(QUOTA);
SAME(IO);
SAME(FORKED);
SAME(CLOSED);
SAME(DAEMON_DIED);
#undef SAME

extern "C" {

const char* mlpo_strerror(int code) {
  switch (code) {
    case 0:
      return "success";
    case MLPO_ERR_EPOCH:
      return "the epoch is not the stored one + 1";
    case MLPO_ERR_COVERAGE:
      return "gradient pieces overlap, leave a gap, or skip part of a tensor";
    case MLPO_ERR_NOT_FINITE:
      return "the gradient is not finite";
    case MLPO_ERR_TORN:
      return "the subgroup is partly updated: repeat the identical update, or write its state";
    case MLPO_ERR_SLOT_BUSY:
      return "an update of the subgroup is queued or running";
    case MLPO_ERR_PROTOCOL:
      return "the protocol was broken; the session has ended";
    case MLPO_ERR_VERSION:
      return "client and daemon have no common protocol version";
    case MLPO_ERR_QUOTA:
      return "a quota or limit of the daemon is reached";
    case MLPO_ERR_IO:
      return "storage failed";
    case MLPO_ERR_FORKED:
      return "used after fork(): this process must connect itself";
    case MLPO_ERR_CLOSED:
      return "the client was closed";
    case MLPO_ERR_DAEMON_DIED:
      return "the daemon went away without a word";
  }
  const char* description = code < 0 && code > -4096 ? strerrordesc_np(-code) : nullptr;
  return description != nullptr ? description : "unknown code";
}

int mlpo_errno(int code) {
  if (code >= 0) return 0;
  if (code > -4096) return -code;
  switch (code) {
    case MLPO_ERR_EPOCH:
      return ESTALE;
    case MLPO_ERR_COVERAGE:
      return EINVAL;
    case MLPO_ERR_NOT_FINITE:
      return EDOM;
    case MLPO_ERR_TORN:
      return EUCLEAN;
    case MLPO_ERR_SLOT_BUSY:
      return EBUSY;
    case MLPO_ERR_PROTOCOL:
      return EPROTO;
    case MLPO_ERR_VERSION:
      return EPROTONOSUPPORT;
    case MLPO_ERR_QUOTA:
      return EDQUOT;
    case MLPO_ERR_IO:
      return EIO;
    case MLPO_ERR_FORKED:
      return ECHILD;
    case MLPO_ERR_CLOSED:
      return EBADF;
    case MLPO_ERR_DAEMON_DIED:
      return ECONNRESET;
  }
  return EIO;
}

const char* mlpo_last_error(void) { return mlpo::client::last_text; }

int mlpo_fail(int code, const char* text) {
  return mlpo::client::Fail(code, "%s", text != nullptr ? text : mlpo_strerror(code));
}

const char* mlpo_client_version(void) { return "0.1.0"; }

}  // extern "C"
