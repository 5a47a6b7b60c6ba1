// CountersFile: "<socket>.counters" (proto/counters.h), written by a thread of its own, so that it goes on when every
// other thread is stuck: with the times at which those were last seen.
//
// It is written with pwrite, not through a mapping: somebody who cuts the file short must not end the daemon. It is
// locked (flock) from before it has its name until its end: a file that nobody holds is of a daemon that died, and the
// next start on the same socket, which has the socket's lock, replaces it. Owner: the main thread.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "daemon/base/status.h"
#include "daemon/base/unique_fd.h"

namespace mlpo {

class LiveCounters;

class CountersFile {
 public:
  // `live` is prepared, borrowed, and outlives the file. Errors name the file and say what to do.
  static Result<std::unique_ptr<CountersFile>> Open(const std::string& path, const LiveCounters* live);
  // Ends the thread and removes the file, unless another one has its name by then.
  ~CountersFile();
  CountersFile(const CountersFile&) = delete;
  CountersFile& operator=(const CountersFile&) = delete;

 private:
  CountersFile(std::string path, const LiveCounters* live) : path_(std::move(path)), live_(live) {}
  Status Make();
  Status Write();
  void Run();

  const std::string path_;
  const LiveCounters* const live_;
  UniqueFd fd_;
  uint64_t sequence_ = 0;
  std::vector<std::byte> page_;  // kept for its storage

  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;  // guarded by mutex_
  std::thread thread_;
};

}  // namespace mlpo
