// Threads: those of the daemon's threads that carry out what is posted to them, in its order: main, housekeeping,
// lookout.
//
// Any thread may post; nothing is waited for. Parts of the daemon post functions that have pointers to themselves: so
// housekeeping and lookout are joined, and main runs no more, before the first part goes; what was posted later is
// dropped.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/thread_pool.hpp>
#include <utility>

namespace mlpo {

struct Threads {
  boost::asio::io_context main;  // also of sockets, signals and timers
  // Whatever may block on a file system or on memory. Sessions that begin and end wait for it.
  boost::asio::thread_pool housekeeping{1};
  boost::asio::thread_pool lookout{1};  // doctor, gc, metrics file, paths taken back: no session waits

  template <class F>
  void PostMain(F&& f) {
    boost::asio::post(main, std::forward<F>(f));
  }
  template <class F>
  void PostHousekeeping(F&& f) {
    boost::asio::post(housekeeping, std::forward<F>(f));
  }
  template <class F>
  void PostLookout(F&& f) {
    boost::asio::post(lookout, std::forward<F>(f));
  }
};

}  // namespace mlpo
