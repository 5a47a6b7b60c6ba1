// What a measurement makes for its own time: a daemon, folders, and that they go when it is interrupted.
#pragma once

#include <csignal>
#include <cstdint>
#include <string>
#include <vector>

namespace mlpo::bench {

std::string OwnProgram();

// Whether this process runs inside RunInOwnDaemon; then MLPO_SOCKET names the daemon.
bool InOwnDaemon();

struct OwnDaemon {
  std::string config;       // TOML
  uint64_t pool_bytes = 0;  // 0: the daemon's own default
};
// Runs this program with the same arguments inside "mlpo-ctl run", which starts a daemon and ends it. Returns the exit
// code.
int RunInOwnDaemon(const OwnDaemon& daemon, const std::vector<std::string>& arguments);

// While one lives, SIGINT and SIGTERM are noted, so that what was begun is cleaned up; CheckInterrupted throws then.
class CatchInterrupts {
 public:
  CatchInterrupts();
  CatchInterrupts(const CatchInterrupts&) = delete;
  CatchInterrupts& operator=(const CatchInterrupts&) = delete;
  ~CatchInterrupts();

 private:
  struct sigaction interrupt_ = {}, terminate_ = {};
};
void CheckInterrupted();

// A new folder, removed with all that is in it at the end.
class ScratchFolder {
 public:
  // Below `parent`; "": below TMPDIR or /tmp.
  explicit ScratchFolder(std::string parent = "");
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  ~ScratchFolder();
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace mlpo::bench
