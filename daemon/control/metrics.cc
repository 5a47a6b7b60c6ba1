#include "daemon/control/metrics.h"

#include <fcntl.h>
#include <prometheus/exposer.h>
#include <prometheus/metric_family.h>
#include <prometheus/text_serializer.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <exception>
#include <future>
#include <initializer_list>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "daemon/base/clock.h"
#include "daemon/base/unique_fd.h"
#include "daemon/control/live_counters.h"

namespace mlpo {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;
using Labels = std::vector<ClientMetric::Label>;

constexpr int kAnswerSeconds = 5;
constexpr auto kLookAgain = std::chrono::milliseconds(20);  // whether the server is to end
constexpr std::initializer_list<const char*> kStates = {"starting", "ready", "degraded", "draining"};
constexpr std::initializer_list<const char*> kPathStates = {"healthy", "suspect",   "quarantined", "probing",
                                                            "full",    "read_only", "disabled"};

class Families {
 public:
  void Gauge(const char* name, const char* help) { Begin(name, help, MetricType::Gauge); }
  void Counter(const char* name, const char* help) { Begin(name, help, MetricType::Counter); }
  // A value of the family begun last.
  void Add(double value, Labels labels = {}) {
    ClientMetric metric;
    metric.label = std::move(labels);
    if (families_.back().type == MetricType::Counter)
      metric.counter.value = value;
    else
      metric.gauge.value = value;
    families_.back().metric.push_back(std::move(metric));
  }
  template <class Value>
  void Add(Value value, Labels labels = {}) {
    Add(static_cast<double>(value), std::move(labels));
  }
  void Histogram(const char* name, const char* help, const TimeHistogram& times, int64_t sum_ns) {
    Begin(name, help, MetricType::Histogram);
    ClientMetric metric;
    uint64_t count = 0;
    for (size_t i = 0; i < times.counts.size(); ++i) {
      count += times.counts[i];
      const double bound =
          i < TimeHistogram::kBoundsS.size() ? TimeHistogram::kBoundsS[i] : std::numeric_limits<double>::infinity();
      metric.histogram.bucket.push_back({count, bound});
    }
    metric.histogram.sample_count = count;
    metric.histogram.sample_sum = static_cast<double>(sum_ns) / kNsPerS;
    families_.back().metric.push_back(std::move(metric));
  }
  // One value a known state: 1 for the present one.
  void AddState(const std::string& state, std::initializer_list<const char*> known, const Labels& labels) {
    for (const char* name : known) {
      Labels all = labels;
      all.push_back({"state", name});
      Add(state == name ? 1.0 : 0.0, std::move(all));
    }
  }
  std::vector<MetricFamily> Take() { return std::move(families_); }

 private:
  void Begin(const char* name, const char* help, MetricType type) {
    MetricFamily family;
    family.name = name;
    family.help = help;
    family.type = type;
    families_.push_back(std::move(family));
  }

  std::vector<MetricFamily> families_;
};

void AddDaemon(const Snapshot& s, Families* out) {
  out->Gauge("mlpo_info", "1; the labels say what runs.");
  out->Add(1.0, {{"version", s.version}, {"node", s.node}, {"adam_target", s.adam_target}});
  out->Gauge("mlpo_state", "1 for the daemon's state, 0 for the others.");
  out->AddState(s.state, kStates, {});
  out->Gauge("mlpo_uptime_seconds", "Since the daemon's start.");
  out->Add(s.uptime_s);
  out->Gauge("mlpo_adam_workers", "Threads that run Adam.");
  out->Add(s.adam_workers);
  out->Gauge("mlpo_sessions", "Connected ranks.");
  out->Add(s.total_sessions);
  out->Gauge("mlpo_parameters", "Registered parameters of all sessions.");
  out->Add(s.total_parameters);
  out->Counter("mlpo_protocol_errors_total", "Sessions ended for breaking the protocol.");
  out->Add(s.protocol_errors);
  out->Counter("mlpo_lost_wakeups_total", "Work found by a time-out: more than 0 is a bug.");
  out->Add(s.lost_wakeups);
  out->Counter("mlpo_log_lines_dropped_total", "Lines of the log that stderr did not take.");
  out->Add(s.log_lines_dropped);
  out->Gauge("mlpo_arenas_bytes", "Shared memory of all sessions.");
  out->Add(s.arenas_bytes);
  out->Gauge("mlpo_arenas_limit_bytes", "What it may reach.");
  out->Add(s.arenas_limit_bytes);
}

void AddSteps(const Snapshot& s, Families* out) {
  const StepTotals& steps = s.steps;
  out->Histogram("mlpo_step_seconds", "Steps of sessions, from the first gradient to the last update.", steps.times,
                 steps.time_ns);
  out->Histogram("mlpo_step_fetch_wait_seconds", "Of a step, waiting for reads with no Adam running.",
                 steps.fetch_waits, steps.part_ns(StepPart::kFetchWait));
  out->Histogram("mlpo_step_flush_wait_seconds", "Of a step, waiting for a buffer that a write gives.",
                 steps.flush_waits, steps.part_ns(StepPart::kFlushWait));
  out->Counter("mlpo_step_part_seconds_total", "Where the time of all steps went; the parts add up to it.");
  for (size_t i = 0; i < kStepParts; ++i)
    out->Add(static_cast<double>(steps.parts_ns[i]) / kNsPerS, {{"part", kStepPartNames[i]}});
  out->Counter("mlpo_steps_skipped_total", "Steps whose gradients were discarded.");
  out->Add(steps.skipped);
  out->Counter("mlpo_step_blocks_total", "Blocks that updates wanted, by where they were found.");
  out->Add(steps.cached_blocks, {{"found", "cached"}});
  out->Add(steps.prefetched_blocks, {{"found", "prefetched"}});
  out->Add(steps.read_blocks, {{"found", "read"}});
  out->Counter("mlpo_workers_busy_seconds_total", "Time in which the Adam workers had something to do.");
  out->Add(static_cast<double>(s.workers_busy_ns) / kNsPerS);
}

void AddCheckpoints(const Snapshot& s, Families* out) {
  const CheckpointTotals& totals = s.checkpoint_totals;
  out->Counter("mlpo_checkpoint_parts_total", "Parts of checkpoints, a rank's each, by how they ended.");
  out->Add(totals.saved, {{"result", "saved"}});
  out->Add(totals.failed, {{"result", "failed"}});
  out->Gauge("mlpo_checkpoint_parts_running", "Parts of checkpoints that have begun and not ended.");
  out->Add(totals.begun - totals.saved - totals.failed);
  out->Counter("mlpo_checkpoint_copied_bytes_total", "Of blocks that were copied for checkpoints.");
  out->Add(totals.copied_bytes);
}

void AddPool(const PoolSnapshot& pool, Families* out) {
  out->Gauge("mlpo_pool_bytes", "Block buffers.");
  out->Add(pool.bytes);
  out->Gauge("mlpo_pool_buffer_bytes", "One block buffer.");
  out->Add(pool.buffer_bytes);
  out->Gauge("mlpo_pool_cached_blocks", "Buffers with a block, clean or dirty.");
  out->Add(pool.cached_blocks);
  out->Gauge("mlpo_pool_dirty_blocks", "Buffers with a block that storage does not have.");
  out->Add(pool.dirty_blocks);
  out->Gauge("mlpo_pool_free_blocks", "Buffers without a block.");
  out->Add(pool.free_blocks);
  out->Gauge("mlpo_pool_locked", "1 if the pool cannot be swapped out.");
  out->Add(pool.locked);
  out->Gauge("mlpo_pool_huge_pages", "1 if the pool is in huge pages.");
  out->Add(pool.huge_pages);
}

void AddPaths(const std::vector<PathSnapshot>& paths, Families* out) {
  const auto each = [&](auto add) {
    for (const PathSnapshot& path : paths) add(path);
  };
  const auto both = [&](auto read, auto written) {
    each([&](const PathSnapshot& p) {
      out->Add(p.*read, {{"path", p.name}, {"direction", "read"}});
      out->Add(p.*written, {{"path", p.name}, {"direction", "write"}});
    });
  };
  const auto one = [&](auto value) { each([&](const PathSnapshot& p) { out->Add(p.*value, {{"path", p.name}}); }); };
  out->Gauge("mlpo_path_info", "1; the labels say what the path is.");
  each([&](const PathSnapshot& p) {
    out->Add(1.0, {{"path", p.name}, {"directory", p.directory}, {"engine", p.engine}});
  });
  out->Gauge("mlpo_path_state", "1 for the path's state, 0 for the others.");
  each([&](const PathSnapshot& p) { out->AddState(p.state, kPathStates, {{"path", p.name}}); });
  out->Counter("mlpo_path_bytes_total", "Transferred since the daemon's start.");
  both(&PathSnapshot::read_bytes, &PathSnapshot::written_bytes);
  out->Counter("mlpo_path_busy_seconds_total", "Time with a transfer in flight.");
  each([&](const PathSnapshot& p) {
    out->Add(static_cast<double>(p.read_busy_ns) / kNsPerS, {{"path", p.name}, {"direction", "read"}});
    out->Add(static_cast<double>(p.write_busy_ns) / kNsPerS, {{"path", p.name}, {"direction", "write"}});
  });
  out->Gauge("mlpo_path_bytes_per_second", "Over the last seconds.");
  both(&PathSnapshot::read_bytes_per_s, &PathSnapshot::write_bytes_per_s);
  out->Counter("mlpo_path_errors_total", "Transfers that failed.");
  both(&PathSnapshot::read_errors, &PathSnapshot::write_errors);
  out->Counter("mlpo_path_checksum_mismatches_total", "Pieces of blocks that were read and were not what was written.");
  one(&PathSnapshot::checksum_mismatches);
  out->Counter("mlpo_path_checksum_errors_total", "Blocks of which that was so when they were read again, too.");
  one(&PathSnapshot::checksum_errors);
  out->Counter("mlpo_path_probes_total", "Blocks that were written and read back to see whether the path is well.");
  one(&PathSnapshot::probes);
  out->Counter("mlpo_path_probe_failures_total", "Probes that failed.");
  one(&PathSnapshot::failed_probes);
  out->Gauge("mlpo_path_transfers_in_flight", "Transfers begun and not ended.");
  one(&PathSnapshot::in_flight);
  out->Gauge("mlpo_path_scratch_bytes", "Of blocks on the path.");
  one(&PathSnapshot::scratch_bytes);
  out->Gauge("mlpo_path_evacuation_left_bytes", "What mlpo-ctl paths evacuate has still to move off the path.");
  each([&](const PathSnapshot& p) {
    out->Add(p.evacuating ? p.scratch_bytes + p.checkpoint_bytes : 0, {{"path", p.name}});
  });
  out->Gauge("mlpo_path_checkpoint_bytes", "Of checkpoints on the path.");
  one(&PathSnapshot::checkpoint_bytes);
  out->Gauge("mlpo_path_model_bytes_per_second", "What the path is believed to do.");
  both(&PathSnapshot::read_limit, &PathSnapshot::write_limit);
  out->Gauge("mlpo_path_model_duplex", "d: 0.5 full duplex, 1 half duplex, more where mixing hurts.");
  one(&PathSnapshot::duplex);
  out->Gauge("mlpo_path_worth_bytes_per_second", "Read and written at once, of the believed speeds.");
  one(&PathSnapshot::worth_bytes_per_s);
  out->Gauge("mlpo_path_share", "Of the blocks that the path is to hold.");
  one(&PathSnapshot::share);
  out->Counter("mlpo_path_lifetime_written_bytes_total", "By all daemons of this user and node.");
  one(&PathSnapshot::lifetime_written_bytes);
  out->Gauge("mlpo_path_direct_io", "1 if O_DIRECT works there.");
  one(&PathSnapshot::direct_io);
  out->Gauge("mlpo_path_registered_buffers", "1 if the pool is registered with the path's io_uring.");
  one(&PathSnapshot::registered_buffers);
}

void AddSessions(const Snapshot& s, Viewer viewer, Families* out) {
  const auto each = [&](auto value) {
    for (const SessionSnapshot& session : s.sessions) {
      if (viewer && session.uid != *viewer) continue;
      out->Add(session.*value,
               {{"job", session.job}, {"rank", std::to_string(session.rank)}, {"uid", std::to_string(session.uid)}});
    }
  };
  out->Gauge("mlpo_session_epoch", "Updates of the subgroup that has had the fewest.");
  each(&SessionSnapshot::epoch);
  out->Gauge("mlpo_session_subgroups", "Registered subgroups.");
  each(&SessionSnapshot::subgroups);
  out->Gauge("mlpo_session_parameters", "Registered parameters.");
  each(&SessionSnapshot::parameters);
  out->Counter("mlpo_session_skipped_steps_total", "Steps skipped because of an overflow.");
  each(&SessionSnapshot::skipped_steps);
  out->Gauge("mlpo_session_arena_bytes", "Shared memory of the session.");
  each(&SessionSnapshot::arena_bytes);
  out->Gauge("mlpo_session_requests_in_flight", "Requests accepted and not answered.");
  each(&SessionSnapshot::requests_in_flight);
  out->Counter("mlpo_session_submissions_total", "Requests accepted.");
  each(&SessionSnapshot::submissions);
}

void AddBeats(const LiveCounters& live, Families* out) {
  const int64_t now_ns = NowNs();
  out->Gauge("mlpo_thread_beat_age_seconds", "Since the thread last went round its loop; above 5 it is stuck.");
  out->Add(static_cast<double>(now_ns - live.main_beat_ns()) / kNsPerS, {{"thread", "main"}});
  out->Add(static_cast<double>(now_ns - live.data_beat_ns()) / kNsPerS, {{"thread", "data"}});
}

void AddSnapshot(const Snapshot& snapshot, Viewer viewer, Families* out) {
  AddDaemon(snapshot, out);
  AddSteps(snapshot, out);
  AddCheckpoints(snapshot, out);
  AddPool(snapshot.pool, out);
  AddPaths(snapshot.paths, out);
  if (viewer != kNobody) AddSessions(snapshot, viewer, out);
}

}  // namespace

std::string MetricsText(const Snapshot& snapshot, Viewer viewer) {
  Families families;
  AddSnapshot(snapshot, viewer, &families);
  return prometheus::TextSerializer().Serialize(families.Take());
}

Status WriteMetricsFile(const std::string& file, const std::string& text) {
  const std::string aside = file + "." + std::to_string(::getpid()) + ".new";
  if (::unlink(aside.c_str()) != 0 && errno != ENOENT) return Status::Errno(errno, "removing " + aside);
  UniqueFd fd(::open(aside.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!fd)
    return Status::Errno(errno, "making " + aside + " (set [daemon] metrics_file to a place that can be written)");
  int error = ::fchmod(fd.get(), 0644) == 0 ? 0 : errno;
  for (size_t at = 0; error == 0 && at < text.size();) {
    const ssize_t wrote = ::write(fd.get(), text.data() + at, text.size() - at);
    if (wrote > 0) at += static_cast<size_t>(wrote);
    if (wrote < 0 && errno != EINTR) error = errno;
  }
  fd.reset();
  if (error == 0 && ::rename(aside.c_str(), file.c_str()) != 0) error = errno;
  if (error == 0) return Status();
  (void)::unlink(aside.c_str());  // the first error is the one to report
  return Status::Errno(error, "writing metrics to " + file);
}

struct MetricsHttp::Impl : prometheus::Collectable {
  Impl(Ask a, const LiveCounters* l) : ask(std::move(a)), live(l) {}

  std::vector<MetricFamily> Collect() const override {
    Families families;
    AddBeats(*live, &families);
    // Shared with the answer, which may come after we gave up.
    auto promise = std::make_shared<std::promise<Snapshot>>();
    std::future<Snapshot> answer = promise->get_future();
    ask([promise](Snapshot snapshot) { promise->set_value(std::move(snapshot)); });
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(kAnswerSeconds);
    while (!stopping.load(std::memory_order_relaxed) && std::chrono::steady_clock::now() < deadline) {
      if (answer.wait_for(kLookAgain) != std::future_status::ready) continue;
      try {
        AddSnapshot(answer.get(), kNobody, &families);
      } catch (const std::future_error&) {  // the question was dropped: the daemon ends
      }
      break;
    }
    return families.Take();
  }

  const Ask ask;
  const LiveCounters* const live;
  std::atomic<bool> stopping{false};  // relaxed: looked at until it is seen
  std::shared_ptr<const bool> alive = std::make_shared<const bool>(true);
  std::unique_ptr<prometheus::Exposer> exposer;
};

MetricsHttp::MetricsHttp(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Result<std::unique_ptr<MetricsHttp>> MetricsHttp::Open(const std::string& listen, Ask ask, const LiveCounters* live) {
  auto impl = std::make_unique<Impl>(std::move(ask), live);
  try {
    impl->exposer = std::make_unique<prometheus::Exposer>(listen, 1);
    // The exposer wants to share it; it is ours, and outlives the exposer.
    impl->exposer->RegisterCollectable(std::shared_ptr<prometheus::Collectable>(impl->alive, impl.get()));
  } catch (const std::exception& error) {
    return Status(-EADDRINUSE, "[daemon] metrics_listen: cannot listen on " + listen + " (" + error.what() +
                                   "): is the port taken?");
  }
  return std::unique_ptr<MetricsHttp>(new MetricsHttp(std::move(impl)));
}

MetricsHttp::~MetricsHttp() {
  impl_->stopping.store(true, std::memory_order_relaxed);
  impl_->exposer.reset();  // ends and joins its threads
}

}  // namespace mlpo
