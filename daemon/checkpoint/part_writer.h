// PartWriter: writes blocks to a part's data file in threads of its own: a target that is slow or hangs holds up its
// own checkpoint and nothing else.
//
// Each block's hash (block_hash.h) is formed on the way, in the same thread: whoever knows what it should be compares.
//
// O_DIRECT where the file takes it, else through the page cache, and then no more than what is in flight is left dirty
// there: a state much larger than memory goes to a slow target without pushing everything else out. Write: the data
// thread, never blocks. `done` is called in a writer's thread, once for each Write. The destructor lets everything
// accepted end first, and so may wait for a hung target: a thread of the save's own; or Leave comes first.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "daemon/base/status.h"
#include "daemon/base/unique_fd.h"

namespace mlpo {

class PartWriter {
 public:
  struct Written {
    uint64_t id = 0;
    int error = 0;  // errno; 0: all bytes were written
    uint64_t bytes = 0;
    uint64_t hash = 0;  // of what was to be written
    int64_t started_ns = 0;
    int64_t finished_ns = 0;
  };

  // `fd`: of the data file; a duplicate is kept, which has the same flags: O_DIRECT is set on it if `direct`. `done`
  // goes when that has been closed.
  static Result<std::unique_ptr<PartWriter>> Start(int fd, bool direct, uint32_t threads, const std::string& shown,
                                                   std::function<void(const Written&)> done);
  ~PartWriter();
  PartWriter(const PartWriter&) = delete;
  PartWriter& operator=(const PartWriter&) = delete;

  // What cannot be waited for: what has not begun never will, `done` is not called any more from the return on, and a
  // thread that hangs in the target stays there by itself; what it has of a block it only hands to the kernel.
  void Leave();

  // Of the part, for messages.
  const std::string& shown() const;

  // A block of `arrays` (1 or 3) arrays of `array_bytes` each, kept until it is done; aligned, as offset and sizes are,
  // to MLPO_ALIGN.
  void Write(uint64_t id, const std::byte* data, uint32_t arrays, uint64_t array_bytes, uint64_t offset);

 private:
  struct Job {
    uint64_t id = 0;
    const std::byte* data = nullptr;
    uint32_t arrays = 0;
    uint64_t bytes = 0;  // of all of them
    uint64_t offset = 0;
  };

  // What the threads have of it, who may outlive it.
  struct Shared {
    Shared(UniqueFd f, bool d, std::string s, std::function<void(const Written&)> when_done)
        : done(std::move(when_done)), fd(std::move(f)), shown(std::move(s)), direct(d) {}
    void Run();
    int Carry(const Job& job, uint64_t* written);
    bool GiveUpDirect();

    const std::function<void(const Written&)> done;
    const UniqueFd fd;
    const std::string shown;

    std::mutex mutex;
    std::condition_variable work;
    std::deque<Job> jobs;   // guarded by mutex
    bool stopping = false;  // guarded by mutex
    bool left = false;      // guarded by mutex, which is held over `done`
    bool direct = false;    // guarded by mutex
  };

  explicit PartWriter(std::shared_ptr<Shared> shared) : shared_(std::move(shared)) {}

  const std::shared_ptr<Shared> shared_;
  std::vector<std::thread> threads_;
};

}  // namespace mlpo
