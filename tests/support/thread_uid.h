// ThreadUid: the calling thread (not the process) has another effective uid and supplementary groups while this lives.
// Needs root; what is made meanwhile, sockets too, is that user's.
#pragma once

#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#include <cstdlib>
#include <vector>

#include "tests/support/catch.h"

class ThreadUid {
 public:
  ThreadUid(uid_t uid, std::vector<gid_t> groups) {
    saved_.resize(static_cast<size_t>(::getgroups(0, nullptr)));
    REQUIRE(::getgroups(static_cast<int>(saved_.size()), saved_.data()) >= 0);
    REQUIRE(::syscall(SYS_setgroups, groups.size(), groups.data()) == 0);
    REQUIRE(::syscall(SYS_setresuid, -1, uid, -1) == 0);
  }
  ~ThreadUid() {
    const bool back =
        ::syscall(SYS_setresuid, -1, 0, -1) == 0 && ::syscall(SYS_setgroups, saved_.size(), saved_.data()) == 0;
    if (!back) std::abort();
  }
  ThreadUid(const ThreadUid&) = delete;
  ThreadUid& operator=(const ThreadUid&) = delete;

 private:
  std::vector<gid_t> saved_;
};
