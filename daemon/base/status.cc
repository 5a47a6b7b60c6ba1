#include "daemon/base/status.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <system_error>

namespace mlpo {

Status Status::Errno(int error, const std::string& what) {
  return Status(-error, what + ": " + std::generic_category().message(error));
}

void CheckFailed(const char* file, int line, const char* what) {
  std::fprintf(stderr, "%s:%d: check failed: %s\n", file, line, what);
  std::abort();
}

}  // namespace mlpo
