#include "daemon/io/path_probe.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>

#include "daemon/base/check.h"
#include "daemon/base/file_io.h"
#include "daemon/base/unique_fd.h"
#include "daemon/io/path_folders.h"
#include "daemon/io/scratch_layout.h"
#include "proto/abi.h"

namespace mlpo {
namespace {

constexpr size_t kProbeBytes = 64 << 10;

// struct statx as Linux 6.1 has it; the C library's may be older.
struct StatxDio {
  uint32_t mask, blksize;
  uint64_t attributes;
  uint32_t nlink, uid, gid;
  uint16_t mode, spare0;
  uint64_t ino, size, blocks, attributes_mask;
  struct {
    int64_t sec;
    uint32_t nsec;
    int32_t pad;
  } times[4];
  uint32_t rdev_major, rdev_minor, dev_major, dev_minor;
  uint64_t mnt_id;
  uint32_t dio_mem_align, dio_offset_align;
  uint64_t spare3[12];
};
static_assert(sizeof(StatxDio) == 256 && offsetof(StatxDio, dio_mem_align) == 152);
constexpr uint32_t kStatxDioAlign = 0x2000;

struct Aligned {
  explicit Aligned(size_t bytes) : data(static_cast<std::byte*>(std::aligned_alloc(MLPO_ALIGN, bytes))) {}
  ~Aligned() { std::free(data); }
  Aligned(const Aligned&) = delete;
  Aligned& operator=(const Aligned&) = delete;
  std::byte* data;
};

// A file without a name: nothing remains of it, whenever we die. The lock of the folder is ours.
UniqueFd OpenProbeFile(int folder_fd, int extra_flags) {
  UniqueFd fd(::openat(folder_fd, ".", O_TMPFILE | O_RDWR | O_CLOEXEC | extra_flags, 0600));
  if (fd || (errno != EOPNOTSUPP && errno != EISDIR && errno != ENOENT && errno != EINVAL)) return fd;
  (void)::unlinkat(folder_fd, kProbeFile, 0);  // of a start that was killed between the next two calls
  fd.reset(::openat(folder_fd, kProbeFile, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC | extra_flags, 0600));
  const int error = errno;
  if (fd) (void)::unlinkat(folder_fd, kProbeFile, 0);
  errno = error;
  return fd;
}

// One write and one read of the whole probe at `offset`, `bytes` long. 0, or errno; *what says which step failed.
int WriteAndReadBack(int fd, const std::byte* pattern, std::byte* back, size_t bytes, off_t offset, std::string* what) {
  *what = "writing";
  const ssize_t put = ::pwrite(fd, pattern, bytes, offset);
  if (put < 0) return errno;
  if (static_cast<size_t>(put) != bytes) return ENOSPC;  // a start probe that is cut short: no room
  *what = "syncing";
  if (::fdatasync(fd) != 0) return errno;
  (void)::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);  // buffered: read from storage; else no effect
  *what = "reading back";
  std::memset(back, 0, bytes);
  const ssize_t got = ::pread(fd, back, bytes, offset);
  if (got < 0) return errno;
  *what = "comparing what was read back with what was written to";
  if (static_cast<size_t>(got) != bytes || std::memcmp(pattern, back, bytes) != 0) return EIO;
  return 0;
}

// Content that no earlier probe has written.
bool FillWithRandom(std::byte* data, size_t bytes) {
  uint64_t state = 0;
  if (::getrandom(&state, sizeof state, 0) != sizeof state) return false;
  std::mt19937_64 random(state);
  for (size_t at = 0; at < bytes; at += sizeof(uint64_t)) {
    const uint64_t word = random();
    std::memcpy(data + at, &word, sizeof word);
  }
  return true;
}

// What the kernel says about O_DIRECT on this file: 0 unknown, else the larger alignment; *refused if it says never.
uint32_t KernelAlignment(int fd, bool* refused) {
  StatxDio st{};
  if (::syscall(SYS_statx, fd, "", AT_EMPTY_PATH, kStatxDioAlign, &st) != 0) return 0;
  if ((st.mask & kStatxDioAlign) == 0) return 0;
  *refused = st.dio_offset_align == 0;
  return std::max(st.dio_mem_align, st.dio_offset_align);
}

// Tries O_DIRECT. Fills *result; an error only where the data came back wrong.
Status ProbeDirect(int folder_fd, const std::string& shown, const std::byte* pattern, std::byte* back,
                   ProbeResult* result) {
  struct statfs fs;
  if (::fstatfs(folder_fd, &fs) != 0) return PathError(errno, "fstatfs of", shown);
  if (fs.f_type == TMPFS_MAGIC || fs.f_type == RAMFS_MAGIC) {
    result->reason = "the file system is memory and only pretends to do O_DIRECT";
    return Status();
  }
  UniqueFd fd = OpenProbeFile(folder_fd, O_DIRECT);
  if (!fd) {
    result->error = errno;
    result->reason = "open with O_DIRECT is refused";
    return Status();
  }
  bool refused = false;
  uint32_t alignment = KernelAlignment(fd.get(), &refused);
  if (refused || alignment > MLPO_ALIGN) {
    result->reason = refused ? "the kernel reports no O_DIRECT for this file system"
                             : "O_DIRECT needs an alignment of " + std::to_string(alignment) + " bytes here";
    return Status();
  }
  std::string what;
  result->error = WriteAndReadBack(fd.get(), pattern, back, kProbeBytes, 0, &what);
  if (result->error == EIO || result->error == ENOSPC || result->error == EDQUOT)
    return PathError(result->error, "start probe with O_DIRECT: " + what, shown);
  if (result->error != 0) {
    result->reason = what + " with O_DIRECT fails";
    return Status();
  }
  if (alignment == 0)  // an older kernel: our transfers need 4096 only, which was just proven; try the finer one
    alignment = WriteAndReadBack(fd.get(), pattern, back, 512, 512, &what) == 0 ? 512 : MLPO_ALIGN;
  result->direct = true;
  result->alignment = alignment;
  return Status();
}

// The deepest folder of <directory>/mlpo/<uid>/<node> that is there, checked as at start; *shown gets its name.
Result<UniqueFd> OpenDeepest(const std::string& directory, const std::string& node, std::string* shown) {
  *shown = directory;
  Result<UniqueFd> folder = OpenPathDirectory(directory);
  for (const std::string& name : {std::string(kTopFolder), std::to_string(::geteuid()), node}) {
    if (!folder.ok()) return folder;
    struct stat st;
    if (::fstatat(folder->get(), name.c_str(), &st, AT_SYMLINK_NOFOLLOW) != 0) {
      if (errno == ENOENT) return folder;
      return PathError(errno, "looking at", *shown + "/" + name);
    }
    *shown += "/" + name;
    folder = name == kTopFolder ? OpenTopFolder(folder->get(), *shown) : OpenOwnFolder(folder->get(), name, *shown);
  }
  return folder;
}

}  // namespace

Result<ProbeResult> CheckPath(const std::string& directory, const std::string& node, bool want_direct) {
  std::string shown;
  Result<UniqueFd> folder = OpenDeepest(directory, node, &shown);
  if (!folder.ok()) return folder.status();
  uint64_t random = 0;
  if (::getrandom(&random, sizeof random, 0) != sizeof random) return Status::Errno(errno, "getrandom");
  const std::string name = ".mlpo-check-" + std::to_string(random);
  if (::mkdirat(folder->get(), name.c_str(), 0700) != 0) return PathError(errno, "making a folder in", shown);
  UniqueFd own(::openat(folder->get(), name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  Result<ProbeResult> result = own ? ProbeFolder(own.get(), shown, want_direct)
                                   : Result<ProbeResult>(PathError(errno, "opening a folder in", shown));
  own.reset();
  if (::unlinkat(folder->get(), name.c_str(), AT_REMOVEDIR) != 0 && result.ok())
    return PathError(errno, "removing " + name + " from", shown);
  return result;
}

Status ProbeBlock(int folder_fd, const std::string& shown, bool direct, uint64_t bytes, uint64_t end) {
  MLPO_CHECK(bytes > 0 && bytes % MLPO_ALIGN == 0 && end % MLPO_ALIGN == 0);
  Aligned pattern(bytes), back(bytes);
  if (pattern.data == nullptr || back.data == nullptr) return Status::Errno(ENOMEM, "probing " + shown);
  if (!FillWithRandom(pattern.data, bytes)) return Status::Errno(errno, "getrandom");
  UniqueFd fd = OpenProbeFile(folder_fd, direct ? O_DIRECT : 0);
  if (!fd) return PathError(errno, "probe: making a file in", shown);
  const uint64_t offset = end > bytes ? end - bytes : 0;
  if (const int error = WriteAt(fd.get(), pattern.data, bytes, offset); error != 0)
    return PathError(error, "probe: writing in", shown);
  if (::fdatasync(fd.get()) != 0) return PathError(errno, "probe: syncing in", shown);
  (void)::posix_fadvise(fd.get(), 0, 0, POSIX_FADV_DONTNEED);  // buffered: read from storage; else no effect
  std::memset(back.data, 0, bytes);
  size_t got = 0;
  if (const int error = ReadAt(fd.get(), back.data, bytes, offset, &got); error != 0)
    return PathError(error, "probe: reading back in", shown);
  if (got != bytes || std::memcmp(pattern.data, back.data, bytes) != 0)
    return PathError(EIO, "probe: what was read back is not what was written in", shown);
  return Status();
}

Result<ProbeResult> ProbeFolder(int folder_fd, const std::string& shown, bool want_direct) {
  Aligned pattern(kProbeBytes), back(kProbeBytes);
  if (pattern.data == nullptr || back.data == nullptr) return Status::Errno(ENOMEM, "start probe of " + shown);
  for (size_t done = 0; done < kProbeBytes;) {
    const ssize_t got = ::getrandom(pattern.data + done, kProbeBytes - done, 0);
    if (got < 0 && errno != EINTR) return Status::Errno(errno, "getrandom");
    if (got > 0) done += static_cast<size_t>(got);
  }
  ProbeResult result;
  if (want_direct) {
    const Status tried = ProbeDirect(folder_fd, shown, pattern.data, back.data, &result);
    if (!tried.ok()) return tried;
    if (result.direct) return result;
  } else {
    result.reason = "direct = false is configured";
  }
  UniqueFd fd = OpenProbeFile(folder_fd, 0);
  if (!fd) return PathError(errno, "start probe: making a file in", shown);
  std::string what;
  const int error = WriteAndReadBack(fd.get(), pattern.data, back.data, kProbeBytes, 0, &what);
  if (error != 0) return PathError(error, "start probe: " + what, shown);
  return result;
}

}  // namespace mlpo
