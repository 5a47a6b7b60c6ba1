#include "daemon/io/path_keeper.h"

#include <cerrno>
#include <system_error>

#include "daemon/base/thread.h"

namespace mlpo {

Result<std::unique_ptr<PathKeeper>> PathKeeper::Start(const std::string& name) {
  std::unique_ptr<PathKeeper> keeper(new PathKeeper());
  try {
    keeper->thread_ = std::thread([raw = keeper.get(), name] { raw->Run(name); });
  } catch (const std::system_error& error) {
    return Status::Errno(error.code().value(), "starting the thread for files of path " + name);
  }
  return keeper;
}

PathKeeper::~PathKeeper() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void PathKeeper::Post(std::function<void()> work, std::chrono::nanoseconds patience) {
  {
    const std::lock_guard lock(mutex_);
    jobs_.push_back({std::move(work), patience});
  }
  work_.notify_all();
}

bool PathKeeper::stuck() const {
  const std::lock_guard lock(mutex_);
  return late_at_ns_ != 0 && NowNs() >= late_at_ns_;
}

void PathKeeper::Run(const std::string& name) {
  SetThreadName("files-" + name);
  std::unique_lock lock(mutex_);
  while (true) {
    work_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    const Job job = std::move(jobs_.front());
    jobs_.pop_front();
    late_at_ns_ = NowNs() + job.patience.count();
    lock.unlock();
    job.work();
    lock.lock();
    late_at_ns_ = 0;
  }
}

}  // namespace mlpo
