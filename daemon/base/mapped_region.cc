#include "daemon/base/mapped_region.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <cerrno>

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace mlpo {
namespace {

namespace ipc = boost::interprocess;

// What mapped_region asks of a memory-mappable object.
class Mappable {
 public:
  explicit Mappable(int fd) : fd_(fd) {}
  ipc::mapping_handle_t get_mapping_handle() const { return {fd_, false}; }

 private:
  int fd_;
};

}  // namespace

Result<MappedRegion> MappedRegion::Map(int fd, size_t bytes, Access access) {
  try {
    MappedRegion mapped;
    ipc::mapped_region region(Mappable(fd), access == Access::kReadOnly ? ipc::read_only : ipc::read_write, 0, bytes);
    mapped.region_.swap(region);
    return mapped;
  } catch (const ipc::interprocess_exception& e) {
    return Status(-(e.get_native_error() > 0 ? e.get_native_error() : EINVAL),
                  "mapping " + std::to_string(bytes) + " bytes of shared memory: " + e.what());
  }
}

Result<UniqueFd> CreateSealedMemfd(const std::string& name, size_t bytes) {
  UniqueFd fd(::memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) return Status::Errno(errno, "memfd_create");
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0)
    return Status::Errno(errno, "sizing a memfd to " + std::to_string(bytes) + " bytes");
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) return Status::Errno(errno, "sealing a memfd");
  return fd;
}

Status AllocateMemfd(int fd, size_t offset, size_t bytes) {
  int rc;
  do {
    rc = ::fallocate(fd, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  } while (rc != 0 && errno == EINTR);
  return rc == 0 ? Status() : Status::Errno(errno, "allocating " + std::to_string(bytes) + " bytes of shared memory");
}

Status SealFutureWrites(int fd) {
  if (::fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) != 0)
    return Status::Errno(errno, "F_SEAL_FUTURE_WRITE (Linux 5.1 or newer is needed)");
  return Status();
}

}  // namespace mlpo
