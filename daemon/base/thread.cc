#include "daemon/base/thread.h"

#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace mlpo {
namespace {

constexpr uint64_t kTurnNs = 100'000;  // the least that Linux takes

// What sched_setattr(2) calls sched_attr, as it first was. <linux/sched/types.h>, which has it, cannot be included
// beside <sched.h>.
struct Attributes {
  uint32_t size;
  uint32_t policy;
  uint64_t flags;
  int32_t nice;
  uint32_t priority;
  uint64_t runtime_ns;
  uint64_t deadline_ns;
  uint64_t period_ns;
};
static_assert(sizeof(Attributes) == 48);

}  // namespace

void SetThreadName(const std::string& name) { pthread_setname_np(pthread_self(), name.substr(0, 15).c_str()); }

// Linux lets one that wakes interrupt another if it asks for shorter turns; else it waits until the other's is over.
void TakeShortTurns() {
  Attributes attributes = {};
  if (::syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0) != 0) return;
  if (attributes.policy != SCHED_OTHER) return;
  attributes.runtime_ns = kTurnNs;
  (void)::syscall(SYS_sched_setattr, 0, &attributes, 0);  // all goes as well without it, a little later
}

}  // namespace mlpo
