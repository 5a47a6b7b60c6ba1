// The signals that end a program: SIGINT, SIGTERM and SIGHUP.
#pragma once

#include <signal.h>

namespace mlpo::ctl {

inline sigset_t Endings() {
  sigset_t all;
  sigemptyset(&all);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) sigaddset(&all, signal);
  return all;
}

// One does not come in the middle of another. A SIGHUP that is ignored (nohup) stays so.
inline void CatchEndings(void (*handler)(int)) {
  struct sigaction action {};
  action.sa_handler = handler;
  action.sa_mask = Endings();
  action.sa_flags = SA_RESTART;
  for (const int signal : {SIGINT, SIGTERM}) ::sigaction(signal, &action, nullptr);
  struct sigaction before {};
  ::sigaction(SIGHUP, nullptr, &before);
  if (before.sa_handler != SIG_IGN) ::sigaction(SIGHUP, &action, nullptr);
}

// They wait while it lives.
class BlockEndings {
 public:
  BlockEndings() {
    const sigset_t all = Endings();
    ::sigprocmask(SIG_BLOCK, &all, &before_);
  }
  ~BlockEndings() { ::sigprocmask(SIG_SETMASK, &before_, nullptr); }
  BlockEndings(const BlockEndings&) = delete;
  BlockEndings& operator=(const BlockEndings&) = delete;

 private:
  sigset_t before_{};
};

}  // namespace mlpo::ctl
