// Fail: a Failure of a status and a text.
#pragma once

#include <string>
#include <utility>

#include "daemon/types/request.h"

namespace mlpo {

inline Failure Fail(int status, std::string text) {
  Failure failure;
  failure.status = status;
  failure.text = std::move(text);
  return failure;
}

}  // namespace mlpo
