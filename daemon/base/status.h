// Status and Result<T>: how fallible calls answer. No exceptions cross a folder.
//
// A code is one of proto/status.h (0, a negated errno, or an MLPO_E_ value); the message says what, where and what to
// do.
#pragma once

#include <cerrno>
#include <optional>
#include <string>
#include <utility>

#include "daemon/base/check.h"
#include "proto/status.h"

namespace mlpo {

class [[nodiscard]] Status {
 public:
  Status() = default;  // success
  Status(int code, std::string message) : code_(code), message_(std::move(message)) {}
  // "<what>: <strerror>", code = -error.
  static Status Errno(int error, const std::string& what);
  static Status Invalid(std::string message) { return Status(-EINVAL, std::move(message)); }

  bool ok() const { return code_ == 0; }
  int code() const { return code_; }
  const std::string& message() const { return message_; }
  // The errno in the code, 0 if it is another kind.
  int os_errno() const { return code_ < 0 && code_ > -4096 ? -code_ : 0; }
  // The same failure with "<context>: " in front.
  Status Within(const std::string& context) const { return ok() ? *this : Status(code_, context + ": " + message_); }

 private:
  int code_ = 0;
  std::string message_;
};

template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}                                      // NOLINT: implicit on purpose
  Result(Status status) : status_(std::move(status)) { MLPO_CHECK(!status_.ok()); }  // NOLINT: implicit on purpose

  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }
  T& value() {
    MLPO_CHECK(ok());
    return *value_;
  }
  const T& value() const {
    MLPO_CHECK(ok());
    return *value_;
  }
  T& operator*() { return value(); }
  T* operator->() { return &value(); }

 private:
  std::optional<T> value_;
  Status status_;
};

}  // namespace mlpo
