#include "daemon/base/loose_threads.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "daemon/base/thread.h"

namespace mlpo {

struct LooseThreads::Shared {
  std::mutex mutex;
  std::condition_variable work;
  std::deque<std::function<void()>> steps;  // guarded by mutex
  bool ending = false;                      // guarded by mutex

  void Run(const std::string& name) {
    SetThreadName(name);
    std::unique_lock lock(mutex);
    while (true) {
      if (steps.empty()) {
        if (ending) return;
        work.wait(lock);  // until there is a step, or the end
        continue;
      }
      std::function<void()> step = std::move(steps.front());
      steps.pop_front();
      lock.unlock();
      step();
      step = nullptr;  // what it owns goes here, too
      lock.lock();
    }
  }
};

LooseThreads::LooseThreads(std::shared_ptr<Shared> shared) : shared_(std::move(shared)) {}

Result<std::shared_ptr<LooseThreads>> LooseThreads::Start(const std::string& name, uint32_t count) {
  const auto shared = std::make_shared<Shared>();
  std::shared_ptr<LooseThreads> threads(new LooseThreads(shared));  // if none starts, it ends without a wait
  for (uint32_t i = 0; i < count; ++i) {
    try {
      std::thread([shared, name] { shared->Run(name); }).detach();
    } catch (const std::system_error& error) {  // fewer do as well, none does not
      if (i == 0) return Status::Errno(error.code().value(), "starting a thread for checkpoints");
      break;
    }
  }
  return threads;
}

LooseThreads::~LooseThreads() {
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->ending = true;
  }
  shared_->work.notify_all();
}

void LooseThreads::Post(std::function<void()> step) {
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->steps.push_back(std::move(step));
  }
  shared_->work.notify_one();
}

}  // namespace mlpo
