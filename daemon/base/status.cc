#include "daemon/base/status.h"

#include <system_error>

namespace mlpo {

Status Status::Errno(int error, const std::string& what) {
  return Status(-error, what + ": " + std::generic_category().message(error));
}

}  // namespace mlpo
