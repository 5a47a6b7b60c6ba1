#include "client/src/socket_path.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "client/src/error.h"

namespace mlpo::client {
namespace {

int Take(const char* found, char* path, size_t path_bytes) {
  const int length = snprintf(path, path_bytes, "%s", found);
  if (length <= 0) return Fail(-EINVAL, "the socket's path is empty");
  if (static_cast<size_t>(length) >= path_bytes)
    return Fail(-ENAMETOOLONG, "socket path %s is longer than %zu bytes", found, path_bytes - 1);
  return 0;
}

}  // namespace

int FindSocket(const char* given, char* path, size_t path_bytes) {
  if (given != nullptr) return Take(given, path, path_bytes);
  if (const char* variable = getenv("MLPO_SOCKET"); variable != nullptr && *variable != '\0')
    return Take(variable, path, path_bytes);
  char candidates[3][256];
  snprintf(candidates[0], sizeof candidates[0], "/run/mlpo/%u/mlpo.sock", geteuid());
  snprintf(candidates[1], sizeof candidates[1], "/run/mlpo/mlpo.sock");
  const char* runtime = getenv("XDG_RUNTIME_DIR");
  const bool has_runtime = runtime != nullptr && *runtime != '\0';
  if (has_runtime) snprintf(candidates[2], sizeof candidates[2], "%s/mlpo/mlpo.sock", runtime);
  const int count = has_runtime ? 3 : 2;
  for (int i = 0; i < count; ++i) {
    if (access(candidates[i], F_OK) == 0) return Take(candidates[i], path, path_bytes);
  }
  return Fail(-ENOENT, "no daemon's socket at %s, %s%s%s: start mlpo-daemon, or set MLPO_SOCKET", candidates[0],
              candidates[1], has_runtime ? ", " : "", has_runtime ? candidates[2] : "");
}

}  // namespace mlpo::client
