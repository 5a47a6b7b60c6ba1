#include "daemon/left_file.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "daemon/base/log.h"
#include "daemon/base/status.h"
#include "daemon/io/path.h"

namespace mlpo {

uint64_t GiveBackUnused(int fd, std::vector<Extent> used, uint64_t size, const std::string& shown) {
  std::sort(used.begin(), used.end(), [](const Extent& a, const Extent& b) { return a.offset < b.offset; });
  uint64_t at = Path::kFileHeaderBytes;
  int error = 0;
  for (const Extent& extent : used) {
    const uint64_t first = Path::kFileHeaderBytes + extent.offset;
    if (first > at && error == 0 &&
        ::fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(at),
                    static_cast<off_t>(first - at)) != 0)
      error = errno;
    at = std::max(at, first + extent.bytes);
  }
  if (at < size && ::ftruncate(fd, static_cast<off_t>(at)) != 0) error = errno;
  if (error != 0 && error != EOPNOTSUPP)
    spdlog::warn("event=checkpoint_space_kept file={} reason=\"{}\"", shown,
                 Status::Errno(error, "giving unused space back").message());
  return std::min(at, size);
}

}  // namespace mlpo
