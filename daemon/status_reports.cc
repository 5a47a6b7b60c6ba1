#include <utility>  // before Asio of Boost 1.74 in C++20

#include "daemon/status_reports.h"

#include <spdlog/spdlog.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <map>

#include "daemon/adam/kernel.h"
#include "daemon/base/log.h"
#include "daemon/config/load.h"
#include "daemon/control/status_json.h"
#include "daemon/doctor/gather.h"
#include "daemon/doctor/judge.h"
#include "daemon/session/quota_book.h"
#include "proto/counters.h"

namespace mlpo {
namespace {

constexpr auto kCountersPeriod = std::chrono::milliseconds(500);

}  // namespace

StatusReports::StatusReports(Parts parts)
    : parts_(std::move(parts)),
      trace_end_(parts_.threads->main),
      counters_due_(parts_.threads->main),
      metrics_due_(parts_.threads->main) {}

void StatusReports::StopShowing() {
  metrics_http_.reset();
  counters_.reset();
}

// A collector would go on showing what was.
void StatusReports::RemoveMetricsFile() {
  const std::string& metrics = parts_.config->daemon.metrics_file;
  if (metrics_written_ && ::unlink(metrics.c_str()) != 0 && errno != ENOENT)
    spdlog::warn("event=remove_failed file={} errno={}", metrics, errno);
}

// What is told without the control socket: the counters file, and metrics over HTTP.
Status StatusReports::ShowOutside(const std::string& socket) {
  Snapshot fixed;
  FillFixed(&fixed);
  fixed.state = parts_.state_name(fixed);
  parts_.live->Prepare(std::move(fixed), parts_.started_ns);
  Result<std::unique_ptr<CountersFile>> counters = CountersFile::Open(socket + MLPO_COUNTERS_SUFFIX, parts_.live);
  if (!counters.ok()) return counters.status();
  counters_ = std::move(*counters);
  if (parts_.config->daemon.metrics_listen.empty()) return Status();
  MetricsHttp::Ask ask = [this](std::function<void(Snapshot)> answer) {
    parts_.threads->PostMain([this, answer = std::move(answer)] { TakeSnapshot(answer); });
  };
  Result<std::unique_ptr<MetricsHttp>> http =
      MetricsHttp::Open(parts_.config->daemon.metrics_listen, std::move(ask), parts_.live);
  if (!http.ok()) return http.status();
  metrics_http_ = std::move(*http);
  return Status();
}

// Leaves for the counters file that this thread goes round its loop, and what only it knows.
void StatusReports::StoreCounters() {
  parts_.live->BeatMain(NowNs());
  std::vector<PathSnapshot> paths;
  parts_.live->Update([&](Snapshot* snapshot) {
    snapshot->state = parts_.state_name(*snapshot);
    snapshot->protocol_errors = parts_.sessions->protocol_errors();
    snapshot->arenas_bytes = parts_.sessions->arenas_bytes();
    paths = snapshot->paths;
  });
  parts_.commands->LogPathStates(paths);
  counters_due_.expires_after(kCountersPeriod);
  counters_due_.async_wait([this](boost::system::error_code error) {
    if (!error) StoreCounters();
  });
}

void StatusReports::PoolGrown(const Status& status) {
  if (!status.ok()) spdlog::warn("event=pool_smaller bytes={} reason=\"{}\"", PoolBytes(), status.message());
  parts_.live->Update([this](Snapshot* snapshot) { FillPool(&snapshot->pool); });
}

// Now, and again an interval after it is done; the file system may be slow.
void StatusReports::WriteMetrics() {
  TakeSnapshot([this](Snapshot snapshot) {
    parts_.threads->PostLookout([this, snapshot = std::move(snapshot)] {
      Status status = WriteMetricsFile(parts_.config->daemon.metrics_file, MetricsText(snapshot, kNobody));
      if (status.ok()) metrics_written_.store(true, std::memory_order_relaxed);
      uint64_t suppressed = 0;
      if (!status.ok() && metrics_failures_.Allow(NowNs(), &suppressed))
        spdlog::warn("event=metrics_not_written suppressed={} reason=\"{}\"", suppressed, status.message());
      parts_.threads->PostMain([this] {
        metrics_due_.expires_after(std::chrono::seconds(parts_.config->daemon.metrics_interval_s));
        metrics_due_.async_wait([this](boost::system::error_code error) {
          if (!error) WriteMetrics();
        });
      });
    });
  });
}

void StatusReports::FillQuotas(Snapshot* snapshot) const {
  for (const QuotaBook::Entry& entry : parts_.sessions->quotas().Entries()) {
    QuotaSnapshot quota;
    quota.uid = entry.uid;
    quota.job = entry.job;
    for (size_t i = 0; i < kQuotas; ++i) quota.amounts.push_back({kQuotaNames[i], entry.used[i], entry.limits[i]});
    uint64_t blocks = 0;
    for (const PoolUseSnapshot& use : snapshot->pool_use) {
      if (use.uid == quota.uid && (quota.job.empty() || use.job == quota.job)) blocks += use.blocks;
    }
    const uint64_t limit =
        quota.job.empty() ? parts_.config->quota.user_pool_bytes : parts_.config->quota.job_pool_bytes;
    quota.amounts.push_back({"pool", blocks * parts_.pool->buffer_bytes(), limit});
    snapshot->quotas.push_back(std::move(quota));
  }
}

// What it is to be, or what it has become.
uint64_t StatusReports::PoolBytes() const {
  return parts_.pool->growing() ? parts_.pool->pool_bytes() : parts_.pool->ready_bytes();
}

void StatusReports::FillPool(PoolSnapshot* pool) const {
  pool->bytes = PoolBytes();
  pool->buffer_bytes = parts_.pool->buffer_bytes();
  pool->locked = parts_.pool->locked();
  pool->huge_pages = parts_.pool->huge_pages();
  pool->huge_bytes = parts_.pool->huge_bytes();
  pool->growing = parts_.pool->growing();
  std::map<int, uint64_t> on;
  for (uint32_t piece = 0; piece < parts_.pool->piece_count(); ++piece) {
    if (parts_.pool->IsReady(piece) && parts_.pool->piece(piece).node >= 0)
      on[parts_.pool->piece(piece).node] += parts_.pool->piece(piece).count;
  }
  pool->nodes.clear();
  for (const auto& [node, buffers] : on) pool->nodes.push_back({node, buffers});
}

void StatusReports::FillFixed(Snapshot* snapshot) const {
  snapshot->version = DaemonVersion();
  snapshot->node = parts_.config->daemon.node;
  snapshot->socket = parts_.socket;
  snapshot->pid = ::getpid();
  snapshot->uptime_s = static_cast<double>(NowNs() - parts_.started_ns) / kNsPerS;
  snapshot->adam_target = ActiveTarget();
  snapshot->adam_workers = parts_.workers->workers();
  snapshot->protocol_errors = parts_.sessions->protocol_errors();
  snapshot->log_lines_dropped = LogLinesDropped();
  snapshot->arenas_bytes = parts_.sessions->arenas_bytes();
  snapshot->arenas_limit_bytes = parts_.arenas_limit_bytes;
  FillPool(&snapshot->pool);
  for (size_t i = 0; i < parts_.paths.size(); ++i) {
    PathSnapshot path;
    path.name = parts_.paths[i]->name();
    path.directory = parts_.paths[i]->directory();
    path.direct_io = parts_.paths[i]->direct_io();
    path.engine = parts_.queues[i]->engine();
    path.registered_buffers = parts_.queues[i]->registered_buffers();
    snapshot->paths.push_back(std::move(path));
  }
}

// What the machine is like for this daemon. Probes may take seconds.
void StatusReports::Examine(std::function<void(std::string)> answer) {
  RunningFacts running;
  running.socket = parts_.socket;
  running.pool = PoolBytes();
  running.pool_locked = parts_.pool->locked();
  running.pool_huge = parts_.pool->huge_pages();
  running.workers = parts_.workers->workers();
  for (size_t i = 0; i < parts_.paths.size(); ++i)
    running.paths.push_back({parts_.queues[i]->engine(), parts_.paths[i]->ReservedBytes()});
  parts_.threads->PostLookout([this, running = std::move(running), answer = std::move(answer)] {
    std::string report = ReportJson(
        Judge(GatherFacts(*parts_.config, {}, &running, ParametersPerS(parts_.config->paths))), /*running=*/true);
    parts_.threads->PostMain([answer, report = std::move(report)] { answer(report); });
  });
}

// Takes the place of one that goes on, which is not answered.
void StatusReports::RecordTrace(double seconds, std::function<void(Trace)> answer) {
  parts_.loop->Post([this] { parts_.loop->StartTrace(); });
  trace_end_.expires_after(std::chrono::nanoseconds(static_cast<int64_t>(seconds * kNsPerS)));
  trace_end_.async_wait([this, number = ++traces_, answer = std::move(answer)](boost::system::error_code) {
    if (number != traces_) return;
    parts_.loop->Post([this, answer] {
      parts_.threads->PostMain(
          [answer, trace = std::make_shared<Trace>(parts_.loop->StopTrace())] { answer(std::move(*trace)); });
    });
  });
}

void StatusReports::TakeSnapshot(std::function<void(Snapshot)> answer) {
  auto snapshot = std::make_shared<Snapshot>();
  FillFixed(snapshot.get());
  parts_.loop->Post([this, snapshot, answer = std::move(answer)] {
    parts_.loop->Fill(snapshot.get());
    parts_.threads->PostMain([this, snapshot, answer] {
      for (SessionSnapshot& session : snapshot->sessions) {
        const ClientConnection* connection = parts_.sessions->Find(session.id);
        if (connection != nullptr) session.arena_bytes = connection->arena_bytes();
      }
      for (size_t i = 0; i < parts_.paths.size(); ++i) {
        snapshot->paths[i].lifetime_written_bytes =
            parts_.records->written_before(i) + snapshot->paths[i].written_bytes;
      }
      snapshot->state = parts_.state_name(*snapshot);
      parts_.shares->Fill(snapshot.get());
      FillQuotas(snapshot.get());
      answer(std::move(*snapshot));
    });
  });
}

}  // namespace mlpo
