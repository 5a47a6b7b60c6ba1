#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "daemon/config/load.h"

namespace mlpo {
namespace {

bool IsOwnFolder(const std::string& folder) {
  struct stat st;
  return ::lstat(folder.c_str(), &st) == 0 && S_ISDIR(st.st_mode) && st.st_uid == ::geteuid();
}

}  // namespace

Result<std::string> ResolveSocket(const Config& config, const Environment& environment, const std::string& run_folder) {
  if (!config.daemon.socket.empty()) return config.daemon.socket;
  const std::string own = run_folder + "/" + std::to_string(::geteuid());
  if (IsOwnFolder(own)) return own + "/mlpo.sock";
  const auto runtime = environment.find("XDG_RUNTIME_DIR");
  if (runtime == environment.end() || runtime->second.empty())
    return Status(-ENOENT, "no place for the socket: " + own +
                               " is not a folder of ours and XDG_RUNTIME_DIR is not set; give --socket PATH");
  if (runtime->second[0] != '/')
    return Status::Invalid("XDG_RUNTIME_DIR is not an absolute path: " + runtime->second + "; give --socket PATH");
  const std::string folder = runtime->second + "/mlpo";
  if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST)
    return Status::Errno(errno, "making folder " + folder + " for the socket (or give --socket PATH)");
  if (!IsOwnFolder(folder))
    return Status(-EPERM, folder + " is not a folder of ours: refused as the socket's place; give --socket PATH");
  return folder + "/mlpo.sock";
}

}  // namespace mlpo
