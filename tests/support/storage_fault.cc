#include "tests/support/storage_fault.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <stdexcept>

#include "tests/support/fault_fs.h"
#include "tests/unit/io_scratch.h"

namespace mlpo::test {
namespace {

[[noreturn]] void Throw(const std::string& what) {
  const int error = errno;
  throw std::runtime_error(what + ": " + std::strerror(error));
}

// The errno of a small synced write to a new file in the folder; 0 if it works.
int WriteError(const std::string& folder) {
  const std::string name = folder + "/probe";
  const int fd = ::open(name.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (fd < 0) return errno;
  const char page[4096] = {};
  int error = ::write(fd, page, sizeof page) == static_cast<ssize_t>(sizeof page) ? 0 : errno;
  if (error == 0 && ::fsync(fd) != 0) error = errno;
  ::close(fd);
  if (::unlink(name.c_str()) != 0 && error == 0) error = errno;
  return error;
}

// ---- On loop devices: root ----

class LoopFault : public StorageFault {
 public:
  bool Repair() override { return false; }

 protected:
  LoopFault(const std::string& type, int megabytes, const std::string& options = "")
      : loop_(type, 512, megabytes, options) {
    reason_ = loop_.reason();
    if (loop_.ok()) directory_ = loop_.point();
  }
  LoopFileSystem loop_;
};

// Every call fails with EIO, as after an error in XFS's log.
class XfsShutdown : public LoopFault {
 public:
  XfsShutdown() : LoopFault("xfs", 512) {}
  void Arm() override {
    const int fd = ::open(directory_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    uint32_t no_log_flush = 2;
    const bool down = fd >= 0 && ::ioctl(fd, _IOR('X', 125, uint32_t), &no_log_flush) == 0;  // XFS_IOC_GOINGDOWN
    const int error = errno;
    if (fd >= 0) ::close(fd);
    errno = error;
    if (!down) Throw("shutting XFS down");
  }
  bool Struck() override { return WriteError(directory_) == EIO; }
};

// Most of the device is gone: reads fail; what is written later goes to a file that grows again, with holes.
class LoopCut : public LoopFault {
 public:
  LoopCut() : LoopFault("ext4", 96) {}
  void Arm() override {
    if (::truncate(loop_.image().c_str(), kLeft) != 0) Throw("cutting the image");
  }
  bool Struck() override {
    const int fd = ::open(loop_.device().c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC);
    alignas(4096) char page[4096];
    // Far behind what is written again.
    const bool failed = fd >= 0 && ::pread(fd, page, sizeof page, (96 << 20) - 4096) < 0;
    if (fd >= 0) ::close(fd);
    return failed || std::filesystem::file_size(loop_.image()) > static_cast<uintmax_t>(kLeft);
  }

 private:
  static constexpr off_t kLeft = 4 << 20;
};

// Another file takes all space that is left.
class Ext4Full : public LoopFault {
 public:
  Ext4Full() : LoopFault("ext4", 64) {}
  void Arm() override {
    const int fd = ::open(Ballast().c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0) Throw("making the ballast");
    static const char chunk[1 << 16] = {};
    size_t bytes = sizeof chunk;
    while (bytes >= 4096) {
      if (::write(fd, chunk, bytes) > 0) continue;
      if (errno != ENOSPC) Throw("writing the ballast");
      bytes /= 2;
    }
    const bool synced = ::fsync(fd) == 0 || errno == ENOSPC;
    ::close(fd);
    if (!synced) Throw("syncing the ballast");
  }
  bool Struck() override {
    struct statvfs st;
    return ::statvfs(directory_.c_str(), &st) == 0 && st.f_bavail < 16;  // ext4 keeps some for itself
  }
  bool Repair() override { return ::unlink(Ballast().c_str()) == 0; }

 private:
  std::string Ballast() const { return directory_ + "/ballast"; }
};

// An error in the file system, after which it takes no writes.
class Ext4ReadOnly : public LoopFault {
 public:
  Ext4ReadOnly() : LoopFault("ext4", 96, "errors=remount-ro") {
    if (reason_.empty() && ::access(Trigger().c_str(), W_OK) != 0) reason_ = "this kernel has no " + Trigger();
  }
  void Arm() override {
    std::ofstream trigger(Trigger());
    trigger << "1" << std::flush;
    if (!trigger) Throw("writing " + Trigger());
  }
  bool Struck() override { return WriteError(directory_) == EROFS; }

 private:
  std::string Trigger() const {
    return "/sys/fs/ext4/" + std::filesystem::path(loop_.device()).filename().string() + "/trigger_fs_error";
  }
};

// ---- By faultfs: root or fusermount3 ----

class FuseFault : public StorageFault {
 public:
  // `op`: whose counter shows that it struck; "all". `rules`: one a line.
  FuseFault(std::string op, std::string rules) : op_(std::move(op)), rules_(std::move(rules)) {
    reason_ = fs_.reason();
    if (fs_.ok()) directory_ = fs_.point();
  }
  void Arm() override {
    before_ = Acted();
    fs_.Rule(rules_);
  }
  bool Struck() override { return Acted() > before_; }
  bool Repair() override {
    fs_.Clear();
    return rules_.find("flip") == std::string::npos || op_ == "read";  // what was written wrong stays wrong
  }
  bool Hangs() const override { return rules_.find("hang") != std::string::npos; }
  bool HoldsTransfers() override { return fs_.Of("read").hanging + fs_.Of("write").hanging > 0; }

 private:
  uint64_t Acted() const {
    if (op_ != "all") return fs_.Of(op_).acted;
    uint64_t acted = 0;
    for (const char* op : {"read", "write", "fsync", "flush", "create", "fallocate"}) acted += fs_.Of(op).acted;
    return acted;
  }

  const std::string op_, rules_;
  FaultFs fs_;
  uint64_t before_ = 0;
};

using Made = std::unique_ptr<StorageFault>;

// Of blocks only, in working files, in parts of checkpoints and in the daemon's own probes: locks, records and headers
// are small and written at other times.
Made Fuse(const char* op, const std::string& action) {
  const std::string rule = std::string(op) + " " + action;
  return std::make_unique<FuseFault>(
      op, rule + " name=/state from=4096\n" + rule + " name=-0 from=4096\n" + rule + " name=/probe");
}

// A part is synced, working files are not.
Made FsyncFails() { return std::make_unique<FuseFault>("fsync", "fsync error 5 name=-0"); }

// As a server that does not answer any more: blocks, headers and records, files made and closed.
Made EverythingHangs() {
  return std::make_unique<FuseFault>("all",
                                     "read hang\nwrite hang\nfsync hang\nflush hang\ncreate hang\nfallocate hang");
}

std::string Flip(uint64_t seed) { return "flip " + std::to_string(seed); }

}  // namespace

const std::vector<FaultKind>& FaultKinds() {
  using enum Harm;
  // Of a path whose device has failed: which one depends on how often, and on whether a probe is under way.
  static constexpr std::string_view kFailed = "suspect quarantined probing";
  static const std::vector<FaultKind> kinds = {
      {"fuse_write_eio", "write", kNone, kMustLose, kFailed, true, [](uint64_t) { return Fuse("write", "error 5"); },
       ""},
      {"fuse_read_eio", "read", kMustLose, kNone, kFailed, true, [](uint64_t) { return Fuse("read", "error 5"); }, ""},
      {"fuse_fsync_eio", "fsync", kNone, kMustLose, "", true, [](uint64_t) { return FsyncFails(); }, ""},
      {"fuse_edquot", "write", kNone, kMustLose, "full", true, [](uint64_t) { return Fuse("write", "error 122"); }, ""},
      // For one that nobody waits for, as io_uring's, the kernel makes EIO of it.
      {"fuse_short_write", "write", kNone, kNone, "healthy suspect quarantined probing", true,
       [](uint64_t) { return Fuse("write", "short 8192"); }, ""},
      {"fuse_short_read", "read", kNone, kNone, "healthy", true, [](uint64_t) { return Fuse("read", "short 8192"); },
       ""},
      {"fuse_delay_write", "write", kNone, kNone, "healthy", true, [](uint64_t) { return Fuse("write", "delay 50"); },
       ""},
      {"fuse_delay_read", "read", kNone, kNone, "healthy", true, [](uint64_t) { return Fuse("read", "delay 50"); }, ""},
      {"fuse_hang_write", "write", kNone, kNone, "", true, [](uint64_t) { return Fuse("write", "hang"); }, ""},
      {"fuse_hang_read", "read", kNone, kNone, "", true, [](uint64_t) { return Fuse("read", "hang"); }, ""},
      {"fuse_hang_all", "all", kNone, kNone, "", true, [](uint64_t) { return EverythingHangs(); }, ""},
      {"fuse_hang_for_good", "read", kMustLose, kNone, "suspect", false, [](uint64_t) { return Fuse("read", "hang"); },
       "", /*for_good=*/true},
      // A block that is read wrong once is right when it is read again.
      {"fuse_flip_read", "read", kNone, kNone, "healthy", true,
       [](uint64_t seed) { return Fuse("read", Flip(seed) + " times=1"); }, ""},
      {"fuse_flip_write", "write", kMustNotice, kMustNotice, kFailed, true,
       [](uint64_t seed) { return Fuse("write", Flip(seed)); }, ""},
      // Its files may have all the room that they need.
      {"ext4_full", "write", kNone, kMustLose, "full healthy", true,
       [](uint64_t) -> Made { return std::make_unique<Ext4Full>(); }, ""},
      {"ext4_readonly", "write", kNone, kMustLose, "read_only", false,
       [](uint64_t) -> Made { return std::make_unique<Ext4ReadOnly>(); }, ""},
      {"xfs_shutdown", "all", kMustLose, kMustLose, kFailed, false,
       [](uint64_t) -> Made { return std::make_unique<XfsShutdown>(); }, ""},
      {"loop_cut", "all", kMayLose, kMayLose, "", false, [](uint64_t) -> Made { return std::make_unique<LoopCut>(); },
       ""},
      {"nfs_hang", "all", kNone, kNone, "", false, nullptr, "an NFS server is not to be had here"},
      {"kernel_quota", "all", kNone, kNone, "", false, nullptr, "kernel quotas are not to be had here"},
  };
  return kinds;
}

const FaultKind* FindFault(std::string_view name) {
  for (const FaultKind& kind : FaultKinds()) {
    if (kind.name == name) return &kind;
  }
  return nullptr;
}

}  // namespace mlpo::test
