// Metrics: a snapshot as Prometheus text, for `mlpo-ctl metrics`, for a file and, when asked, over HTTP on loopback.
// Names are mlpo_*, units are base units, labels are path, direction,
// state, part, found, job, rank and uid. The names are read by
// dashboards: only add. The only place that sees prometheus-cpp.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "daemon/base/status.h"
#include "daemon/control/status_json.h"
#include "daemon/types/snapshot.h"

namespace mlpo {

class LiveCounters;

// No uid: of whom nothing is shown but totals. A file and HTTP cannot tell who reads.
inline constexpr Viewer kNobody = 0xffffffffu;

// Text format 0.0.4, sessions as the viewer may see them. Pure.
std::string MetricsText(const Snapshot& snapshot, Viewer viewer);

// Puts `text` in place of the file in one step, mode 0644. May block.
Status WriteMetricsFile(const std::string& file, const std::string& text);

// Serves /metrics to whoever asks on this host. Threads of its own; `ask` is called in them, and answers in any thread,
// now or later. Where no answer comes in time, the times since the threads' last beats are served alone.
class MetricsHttp {
 public:
  using Ask = std::function<void(std::function<void(Snapshot)> answer)>;
  // `listen`: "127.0.0.1:9464", checked by the configuration. `live` is borrowed.
  static Result<std::unique_ptr<MetricsHttp>> Open(const std::string& listen, Ask ask, const LiveCounters* live);
  // Ends what is being served; not later than an answer's deadline.
  ~MetricsHttp();
  MetricsHttp(const MetricsHttp&) = delete;
  MetricsHttp& operator=(const MetricsHttp&) = delete;

 private:
  struct Impl;
  explicit MetricsHttp(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace mlpo
