// Where the daemon's socket is looked for.
#pragma once

#include <cstddef>

namespace mlpo::client {

// `given`, else $MLPO_SOCKET, else the first that exists of the usual places. -ENOENT names those.
int FindSocket(const char* given, char* path, size_t path_bytes);

}  // namespace mlpo::client
