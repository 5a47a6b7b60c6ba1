// ForkMark: tells the process that made it from its forked children, with one load instead of a system call.
//
// A page of its own that the kernel hands to a child as zeros (MADV_WIPEONFORK). Unlike a pthread_atfork handler it
// also notices children made by clone(). A child that shares our memory (vfork) is not told apart: it may only exec.
// Threads: Open before others use it; InChild from any thread.
#pragma once

#include <atomic>
#include <cstdint>

namespace mlpo::client {

class ForkMark {
 public:
  ForkMark() = default;
  ForkMark(const ForkMark&) = delete;
  ForkMark& operator=(const ForkMark&) = delete;

  int Open();  // 0, or a negative errno with its text in mlpo_last_error()
  // Also in a child, whose copy of the page is its own.
  void Close();
  bool InChild() const { return std::atomic_ref<uint32_t>(*ours_).load(std::memory_order_relaxed) == 0; }

 private:
  uint32_t* ours_ = nullptr;  // 1 in the process that made it, 0 in its children
};

}  // namespace mlpo::client
