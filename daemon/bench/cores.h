// Which thread runs where, for measurements between two cores.
#pragma once

#include <sched.h>
#include <sys/types.h>

#include <string>
#include <utility>

namespace mlpo::bench {

// Two cores that this process may use, not two threads of one core if that can be had. Throws where there is one only.
std::pair<int, int> TwoCores();

// Binds a thread (0: this one) to a core, and gives it back what it had at the end.
class Pinned {
 public:
  Pinned(pid_t thread, int core);
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;
  ~Pinned();

 private:
  const pid_t thread_;
  cpu_set_t before_;
};

// The thread of that name. Throws if the process has none.
pid_t ThreadNamed(pid_t process, const std::string& name);

}  // namespace mlpo::bench
