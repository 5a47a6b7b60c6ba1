// Request and Completion: a validated submission on its way in, and its one answer on its way out.
#pragma once

#include <cstdint>
#include <string>

#include "daemon/types/ids.h"
#include "proto/command.h"
#include "proto/status.h"

namespace mlpo {

struct Request {
  SessionId session = 0;
  mlpo_submission submission = {};
  mlpo_hyper hyper = {};  // UPDATE only
  std::string name;       // of an object, where the submission names one
};

// Why a request failed; becomes the completion's error record.
struct Failure {
  int status = 0;  // 0: it did not
  int os_errno = 0;
  uint32_t tensor = kNone;
  uint32_t block = kNone;
  PathIndex path = kNone;
  uint64_t first = 0;
  uint64_t count = 0;
  std::string text;
};

struct Completion {
  SessionId session = 0;
  uint64_t user_data = 0;
  uint32_t subgroup = 0;
  uint32_t flags = 0;   // MLPO_COMPLETION_*, without ERROR_RECORD
  uint64_t value = 0;   // see mlpo_completion
  uint32_t detail = 0;  // see mlpo_completion; of a success
  Failure failure;
};

}  // namespace mlpo
