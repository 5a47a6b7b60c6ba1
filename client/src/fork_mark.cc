#include "client/src/fork_mark.h"

#include <errno.h>
#include <sys/mman.h>

#include "client/src/error.h"

namespace mlpo::client {
namespace {

constexpr size_t kBytes = 4096;  // the kernel rounds up to its page

}  // namespace

int ForkMark::Open() {
  void* page = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return FailErrno(errno, "mmap of a page");
  if (madvise(page, kBytes, MADV_WIPEONFORK) != 0) {
    const int error = errno;
    munmap(page, kBytes);
    return FailErrno(error, "madvise(MADV_WIPEONFORK) (Linux 4.14 or newer is needed)");
  }
  ours_ = static_cast<uint32_t*>(page);
  *ours_ = 1;
  return 0;
}

void ForkMark::Close() {
  if (ours_ != nullptr) munmap(ours_, kBytes);
  ours_ = nullptr;
}

}  // namespace mlpo::client
