// How the library fails: a negative code to the caller, and a text for mlpo_last_error().
//
// Threads: the text belongs to the calling thread. Nothing here allocates, throws or prints.
#pragma once

#include <cstddef>

namespace mlpo::client {

// Stores the text for mlpo_last_error() and returns `code`.
int Fail(int code, const char* format, ...) __attribute__((format(printf, 2, 3)));
// The same with ": <strerror(error)>" at the end; returns -error.
int FailErrno(int error, const char* format, ...) __attribute__((format(printf, 2, 3)));

// A failure that is kept, to be told again to every caller that meets it.
struct Failure {
  int code = 0;
  char text[512] = {};

  void Set(int failure_code, const char* format, ...) __attribute__((format(printf, 3, 4)));
  // Takes the calling thread's last error over.
  void SetFromLast(int failure_code);
  int Report() const { return Fail(code, "%s", text); }
};

// Leaves mlpo_last_error() as it was: for what fails inside a call that does not.
class KeepLastError {
 public:
  KeepLastError();
  KeepLastError(const KeepLastError&) = delete;
  KeepLastError& operator=(const KeepLastError&) = delete;
  ~KeepLastError();

 private:
  char text_[1024];
};

}  // namespace mlpo::client
