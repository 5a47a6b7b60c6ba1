// MLPO_CHECK: for our own bugs only. What a client or a disk does is never checked with it.
#pragma once

namespace mlpo {
[[noreturn]] void CheckFailed(const char* file, int line, const char* what);
}

#define MLPO_CHECK(condition) ((condition) ? static_cast<void>(0) : ::mlpo::CheckFailed(__FILE__, __LINE__, #condition))
