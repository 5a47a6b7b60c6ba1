#include "client/src/mapping.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "client/src/error.h"
#include "proto/status.h"

namespace mlpo::client {

int Mapping::Map(int fd, uint64_t bytes, bool writable, const char* what) {
  struct stat about;
  if (fstat(fd, &about) != 0) return FailErrno(errno, "fstat of the %s that the daemon sent", what);
  if (!S_ISREG(about.st_mode) || bytes == 0 || bytes > static_cast<uint64_t>(about.st_size)) {
    return Fail(MLPO_E_PROTOCOL, "the daemon announced %llu bytes for the %s but sent an object of %lld",
                static_cast<unsigned long long>(bytes), what, static_cast<long long>(about.st_size));
  }
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    return Fail(MLPO_E_PROTOCOL, "the %s that the daemon sent is not sealed against shrinking", what);
  }
  void* base = mmap(nullptr, bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) {
    return FailErrno(errno, "mmap of %llu bytes for the %s", static_cast<unsigned long long>(bytes), what);
  }
  if (madvise(base, bytes, MADV_DONTFORK) != 0) {
    const int error = errno;
    munmap(base, bytes);
    return FailErrno(error, "madvise(MADV_DONTFORK) on the %s", what);
  }
  base_ = static_cast<std::byte*>(base);
  bytes_ = bytes;
  return 0;
}

void Mapping::Unmap() {
  if (base_ != nullptr) munmap(base_, bytes_);
  base_ = nullptr;
  bytes_ = 0;
}

}  // namespace mlpo::client
