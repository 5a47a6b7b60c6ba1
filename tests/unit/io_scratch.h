// Scratch places for tests of io/: folders that go away, and file systems on loop devices.
#pragma once

#include <sys/mount.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>

namespace mlpo::test {

// $TMPDIR, else /tmp.
inline std::string TemporaryFolder() {
  const char* given = std::getenv("TMPDIR");
  return given != nullptr && *given != 0 ? given : "/tmp";
}

// A new folder under `parent`, removed with everything in it.
class ScratchFolder {
 public:
  explicit ScratchFolder(const std::string& parent = TemporaryFolder()) {
    std::string name = parent + "/mlpo-io-test-XXXXXX";
    if (::mkdtemp(name.data()) == nullptr) {
      std::perror(name.c_str());
      std::abort();
    }
    path_ = name;
  }
  ~ScratchFolder() {
    std::error_code ignored;  // a folder that a test left unreadable stays behind in /tmp
    std::filesystem::remove_all(path_, ignored);
  }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

inline bool RunQuietly(const std::string& command) { return std::system((command + " >/dev/null 2>&1").c_str()) == 0; }

// Something mounted at `point`; unmounted at the end. ok() false: this machine does not let us.
class ScratchMount {
 public:
  ScratchMount(const std::string& source, const std::string& point, const char* type, unsigned long flags,
               const char* data)
      : point_(point), ok_(::mount(source.c_str(), point.c_str(), type, flags, data) == 0) {}
  ~ScratchMount() {
    if (ok_) ::umount2(point_.c_str(), MNT_DETACH);
  }
  ScratchMount(const ScratchMount&) = delete;
  ScratchMount& operator=(const ScratchMount&) = delete;
  bool ok() const { return ok_; }
  const std::string& point() const { return point_; }

 private:
  std::string point_;
  bool ok_;
};

// A file system of `type` on a loop device with the given sector size, mounted with `options`.
class LoopFileSystem {
 public:
  LoopFileSystem(const std::string& type, int sector_bytes, int megabytes, const std::string& options = "")
      : reason_(SetUp(type, sector_bytes, megabytes, options)) {}
  ~LoopFileSystem() {
    mount_.reset();
    if (!device_.empty()) RunQuietly("losetup --detach " + device_);
  }
  LoopFileSystem(const LoopFileSystem&) = delete;
  LoopFileSystem& operator=(const LoopFileSystem&) = delete;

  bool ok() const { return reason_.empty(); }
  const std::string& reason() const { return reason_; }
  const std::string& point() const { return mount_->point(); }
  const std::string& device() const { return device_; }  // "/dev/loop3"
  std::string image() const { return folder_.path() + "/image"; }

 private:
  // "", or why this machine does not let us.
  std::string SetUp(const std::string& type, int sector_bytes, int megabytes, const std::string& options) {
    const std::string image = this->image(), point = folder_.path() + "/mount";
    std::filesystem::create_directory(point);
    if (::geteuid() != 0) return "loop devices need root";
    if (!RunQuietly("truncate -s " + std::to_string(megabytes) + "M " + image)) return "no room for an image";
    const std::string command =
        "losetup --find --show --sector-size " + std::to_string(sector_bytes) + " " + image + " 2>/dev/null";
    FILE* pipe = ::popen(command.c_str(), "r");
    char device[128] = "";
    const bool read = pipe != nullptr && std::fgets(device, sizeof device, pipe) != nullptr;
    if (pipe != nullptr) ::pclose(pipe);
    if (!read) return "losetup does not work here";
    device_ = device;
    device_.pop_back();
    if (!RunQuietly("mkfs." + type + " -q " + device_)) return "mkfs." + type + " does not work here";
    mount_ = std::make_unique<ScratchMount>(device_, point, type.c_str(), 0, options.c_str());
    return mount_->ok() ? "" : "mounting " + type + " does not work here";
  }

  ScratchFolder folder_;
  std::string device_;
  std::unique_ptr<ScratchMount> mount_;
  std::string reason_;
};

}  // namespace mlpo::test
