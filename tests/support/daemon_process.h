// DaemonProcess: a real mlpo-daemon of a test's own: its socket, its paths in a temporary folder, its log.
//
// The program is $MLPO_DAEMON, else the one in the build tree of this test. Killed and cleaned up at the end of its
// life.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

namespace mlpo::test {

class DaemonProcess {
 public:
  struct Options {
    int paths = 2;
    std::string memory = "16MiB";
    std::string block = "4096";                 // elements
    std::string engine = "auto";                // of all paths
    std::vector<std::string> environment = {};  // more "NAME=value"
    std::vector<std::string> arguments = {};    // more flags
    bool wait_ready = true;
    int log = -1;             // its stderr, instead of a file; then without wait_ready
    std::string config = {};  // more lines, in front of the others
    std::vector<std::string> path_settings =
        {};  // more lines of each [[path]]; the last one is also of those behind it
  };
  // For path_settings: which of the paths are persistent, so that a checkpoint on their file system clones or takes
  // over what is on them. By `which` modulo 3: none, all, all but the first.
  static std::vector<std::string> PersistentPaths(uint64_t which);
  DaemonProcess() : DaemonProcess(Options{}) {}
  explicit DaemonProcess(Options options);
  ~DaemonProcess();
  DaemonProcess(const DaemonProcess&) = delete;
  DaemonProcess& operator=(const DaemonProcess&) = delete;

  static std::string Program();
  void Start();  // again, after it ended; waits until it is ready
  pid_t pid() const { return pid_; }
  std::string socket() const { return folder_ + "/mlpo.sock"; }
  std::string path(int i) const { return folder_ + "/path" + std::to_string(i); }
  const std::string& folder() const { return folder_; }
  std::string log() const;
  void Signal(int signal);
  // Its exit code, or 128 + signal; fails the test if it does not end within `seconds`.
  int WaitForEnd(int seconds = 30);
  bool running();
  int OpenDescriptors() const;
  // Once what belonged to ended sessions has gone: when the number has been the same for a while.
  int SettledDescriptors() const;
  uint64_t ResidentBytes() const;
  double CpuSeconds() const;  // of all its threads, since its start
  // Regular files below the paths, but for the daemon's own lock files.
  std::vector<std::string> ScratchFiles() const;
  // Polls until there are no scratch files, and says whether that came within `seconds`.
  bool ScratchGone(int seconds = 10) const;

 private:
  Options options_;
  std::string folder_;
  pid_t pid_ = -1;
  int starts_ = 0;
};

}  // namespace mlpo::test
