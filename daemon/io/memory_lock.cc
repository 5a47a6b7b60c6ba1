#include "daemon/io/memory_lock.h"

#include <linux/capability.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <fstream>

namespace mlpo {
namespace {

bool HasIpcLock() {
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct data[_LINUX_CAPABILITY_U32S_3] = {};
  if (::syscall(SYS_capget, &header, data) != 0) return false;
  return (data[CAP_IPC_LOCK / 32].effective >> (CAP_IPC_LOCK % 32) & 1) != 0;
}

bool InInitialUserNamespace() {
  std::ifstream map("/proc/self/uid_map");
  uint64_t inside = 1, outside = 1, count = 0;
  map >> inside >> outside >> count;
  return map && inside == 0 && outside == 0 && count == 0xffffffffu;
}

}  // namespace

std::optional<uint64_t> MemoryLockLimit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0) return 0;
  if (limit.rlim_cur == RLIM_INFINITY) return std::nullopt;
  if (HasIpcLock() && InInitialUserNamespace()) return std::nullopt;
  return limit.rlim_cur;
}

}  // namespace mlpo
