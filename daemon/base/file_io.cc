#include "daemon/base/file_io.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

#include "daemon/base/unique_fd.h"

namespace mlpo {

int WriteAt(int fd, const void* data, size_t bytes, uint64_t offset) {
  const auto* from = static_cast<const std::byte*>(data);
  while (bytes > 0) {
    const ssize_t put = ::pwrite(fd, from, bytes, static_cast<off_t>(offset));
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) return put < 0 ? errno : ENOSPC;
    from += put;
    bytes -= static_cast<size_t>(put);
    offset += static_cast<uint64_t>(put);
  }
  return 0;
}

int ReadAt(int fd, void* to, size_t bytes, uint64_t offset, size_t* got) {
  auto* const at = static_cast<std::byte*>(to);
  *got = 0;
  while (*got < bytes) {
    const ssize_t more = ::pread(fd, at + *got, bytes - *got, static_cast<off_t>(offset + *got));
    if (more < 0 && errno == EINTR) continue;
    if (more < 0) return errno;
    if (more == 0) break;
    *got += static_cast<size_t>(more);
  }
  return 0;
}

int ListNames(int folder_fd, std::vector<std::string>* names) {
  names->clear();
  UniqueFd own(::openat(folder_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));  // with a place of its own
  if (!own) return errno;
  std::unique_ptr<DIR, int (*)(DIR*)> folder(::fdopendir(own.get()), ::closedir);
  if (folder == nullptr) return errno;
  own.release();
  while (true) {
    errno = 0;
    const dirent* entry = ::readdir(folder.get());
    if (entry == nullptr) break;
    if (std::strcmp(entry->d_name, ".") != 0 && std::strcmp(entry->d_name, "..") != 0) names->push_back(entry->d_name);
  }
  if (errno != 0) return errno;
  std::sort(names->begin(), names->end());
  return 0;
}

int MoveToFreeName(int from_fd, const std::string& name, int to_fd, const std::string& new_name) {
  if (::renameat2(from_fd, name.c_str(), to_fd, new_name.c_str(), RENAME_NOREPLACE) == 0) return 0;
  if (errno != EINVAL && errno != ENOSYS && errno != EOPNOTSUPP) return errno;
  struct stat taken;
  if (::fstatat(to_fd, new_name.c_str(), &taken, AT_SYMLINK_NOFOLLOW) == 0) return EEXIST;
  if (errno != ENOENT) return errno;
  if (::renameat(from_fd, name.c_str(), to_fd, new_name.c_str()) == 0) return 0;
  return errno == ENOTEMPTY ? EEXIST : errno;
}

}  // namespace mlpo
