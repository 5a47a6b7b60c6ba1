#include "daemon/base/close_elsewhere.h"

#include <sys/resource.h>

#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "daemon/base/log.h"
#include "daemon/base/thread.h"
#include "proto/status.h"

namespace mlpo {
namespace {

constexpr uint64_t kShareOfAll = 2;  // of RLIMIT_NOFILE, its inverse
constexpr uint64_t kShareOfOne = 8;  // likewise

// RLIMIT_NOFILE, or what is usual if there is none.
uint64_t OpenFiles() {
  struct rlimit limit = {};
  const bool known = ::getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
  return known ? limit.rlim_cur : 65536;
}

class Book {
 public:
  Status Take(uint32_t uid, size_t count) {
    const std::lock_guard lock(mutex_);
    const Status status = CheckRoom(uid, count);
    if (status.ok()) Count(uid, count);
    return status;
  }
  Status Check(uint32_t uid) {
    const std::lock_guard lock(mutex_);
    const auto found = users_.find(uid);
    const size_t waiting = found == users_.end() ? 0 : found->second.closing.size();
    if (waiting < OpenFiles() / kShareOfOne) return Status();
    return Status(MLPO_E_QUOTA, std::to_string(waiting) + " descriptors that uid " + std::to_string(uid) +
                                    " has passed wait to be closed: what serves their file system does not answer; "
                                    "end it, and try again");
  }
  size_t CountOf(uint32_t uid) {
    const std::lock_guard lock(mutex_);
    const auto found = users_.find(uid);
    return found == users_.end() ? 0 : found->second.count;
  }
  // `counted`: so many of them have been counted before.
  void Close(uint32_t uid, std::vector<UniqueFd> files, size_t counted) {
    std::erase_if(files, [](const UniqueFd& file) { return !file; });
    const std::lock_guard lock(mutex_);
    if (files.size() > counted) Count(uid, files.size() - counted);
    if (!files.empty()) {
      User& user = users_.at(uid);
      for (UniqueFd& file : files) user.closing.push_back(std::move(file));
      if (user.threads < kCloseThreads) Start(uid, &user);
    }
    if (files.size() < counted) Give(uid, counted - files.size());
  }

 private:
  struct User {
    size_t count = 0;  // of descriptors: those in use, and those that are being closed
    std::deque<UniqueFd> closing;
    uint32_t threads = 0;
  };

  // With the lock held, all of these.
  Status CheckRoom(uint32_t uid, uint64_t more) const {
    const auto found = users_.find(uid);
    const uint64_t has = found == users_.end() ? 0 : found->second.count;
    const auto refuse = [&](const std::string& whose, uint64_t used, uint64_t limit) {
      return Status(MLPO_E_QUOTA, whose + " has " + std::to_string(used) +
                                      " descriptors that clients have passed, and " + std::to_string(more) +
                                      " more are above " + std::to_string(limit) +
                                      ": let ranks restore one after another, raise the daemon's RLIMIT_NOFILE, or "
                                      "run a daemon as uid " +
                                      std::to_string(uid));
    };
    const uint64_t most = OpenFiles() / kShareOfOne, most_of_all = OpenFiles() / kShareOfAll;
    if (has + more > most) return refuse("uid " + std::to_string(uid), has, most);
    if (all_ + more > most_of_all) return refuse("the daemon", all_, most_of_all);
    return Status();
  }
  void Count(uint32_t uid, size_t count) {
    users_[uid].count += count;
    all_ += count;
  }
  void Give(uint32_t uid, size_t count) {
    const auto found = users_.find(uid);
    found->second.count -= count;
    all_ -= count;
    Settle(found);
  }
  void Settle(std::map<uint32_t, User>::iterator user) {
    if (user->second.count == 0 && user->second.threads == 0) users_.erase(user);
  }
  void Start(uint32_t uid, User* user) {
    try {
      std::thread([this, uid] { Run(uid); }).detach();
      ++user->threads;
    } catch (const std::system_error& error) {
      spdlog::warn("event=close_later uid={} files={} errno={}", uid, user->closing.size(), error.code().value());
    }
  }
  void Run(uint32_t uid) {
    SetThreadName("mlpo-close");
    std::unique_lock lock(mutex_);
    while (!users_.at(uid).closing.empty()) {
      User& user = users_.at(uid);  // as long as a thread of it runs
      UniqueFd file = std::move(user.closing.front());
      user.closing.pop_front();
      lock.unlock();
      file.reset();
      lock.lock();
      --user.count;
      --all_;
    }
    const auto found = users_.find(uid);
    --found->second.threads;
    Settle(found);
  }

  std::mutex mutex_;
  std::map<uint32_t, User> users_;
  uint64_t all_ = 0;  // sum of their counts
};

// Its threads may outlive everything else.
Book& TheBook() {
  static Book* const book = new Book;
  return *book;
}

}  // namespace

void CloseElsewhere(std::vector<UniqueFd> files, uint32_t uid) {
  if (!files.empty()) TheBook().Close(uid, std::move(files), 0);
}

Result<ForeignFiles> ShareForeign(std::vector<UniqueFd> files, uint32_t uid, size_t most) {
  const Status taken = TheBook().Take(uid, most);
  if (!taken.ok()) {
    CloseElsewhere(std::move(files), uid);
    return taken;
  }
  return ForeignFiles(new std::vector<UniqueFd>(std::move(files)), [uid, most](std::vector<UniqueFd>* shared) {
    TheBook().Close(uid, std::move(*shared), most);
    delete shared;
  });
}

Status CheckForeign(uint32_t uid) { return TheBook().Check(uid); }

size_t CountForeign(uint32_t uid) { return TheBook().CountOf(uid); }

}  // namespace mlpo
