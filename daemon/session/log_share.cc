#include "daemon/session/log_share.h"

#include <algorithm>
#include <utility>

#include "daemon/base/clock.h"

namespace mlpo {

bool LogShare::Allow(uint32_t uid, int64_t now_ns, uint64_t* suppressed) {
  Lines& lines = users_[uid];
  lines.left = std::min<double>(kMostLines, lines.left + Seconds(now_ns - lines.at_ns) * kLinesPerS);
  lines.at_ns = now_ns;
  if (lines.left < 1) {
    ++lines.suppressed;
    return false;
  }
  lines.left -= 1;
  *suppressed = std::exchange(lines.suppressed, 0);
  return true;
}

}  // namespace mlpo
