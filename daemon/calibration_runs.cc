#include <utility>  // before Asio of Boost 1.74 in C++20

#include "daemon/calibration_runs.h"

#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <random>

#include "daemon/base/clock.h"
#include "daemon/control/status_json.h"
#include "daemon/io/path_record.h"
#include "daemon/scheduler/calibration.h"
#include "daemon/scheduler/path_model.h"
#include "daemon/types/snapshot.h"

namespace mlpo {
namespace {

constexpr uint64_t kBenchBytes = uint64_t{1} << 30;  // of a path's file, and in flight
constexpr char kNobodyAsks[] = "who asked for it has gone";
constexpr double kSharedDevice = 0.9;  // together, paths on devices of their own reach more of what each did alone

}  // namespace

// One calibration, on its way through the threads: files (housekeeping), buffers (data), their content (housekeeping),
// measuring (data), saving (housekeeping), answer (main).
struct CalibrationRuns::BenchRun {
  Calibration::Options options;
  std::shared_ptr<Storages::Storage> storage = std::make_shared<Storages::Storage>();
  uint32_t buffers = 0;
  FileOwner owner;
  // Why it is not to go on; kept by main. Relaxed: looked at between steps until it measures; then the loop ends it.
  std::atomic<const char*> unwanted{nullptr};
  std::vector<PathMeasurement> results;
  std::string error;
  std::vector<BenchSnapshot> shown;
  std::function<void(Result<std::string>)> answer;
};

void CalibrationRuns::Bench(const BenchRequest& request, std::function<void(Result<std::string>)> answer) {
  if (parts_.sessions->session_count() > 0 || !parts_.storages->all().empty()) {
    return answer(Status(-EBUSY, "sessions are connected (" + std::to_string(parts_.sessions->session_count()) +
                                     "): measuring needs the paths for itself; ask when no trainer runs"));
  }
  auto run = std::make_shared<BenchRun>();
  run->answer = std::move(answer);
  for (size_t i = 0; i < parts_.paths.size(); ++i) {
    const auto named = [&](const std::string& text) {
      return text == parts_.paths[i]->name() || text == parts_.paths[i]->directory();
    };
    const bool asked = std::any_of(request.paths.begin(), request.paths.end(), named);
    if (asked && parts_.commands->IsDisabled(i))
      return run->answer(
          Status(-EBUSY, "path " + parts_.paths[i]->name() + " is disabled: mlpo-ctl paths enable it first"));
    if (asked || (request.paths.empty() && !parts_.commands->IsDisabled(i)))
      run->options.paths.push_back(static_cast<PathIndex>(i));
  }
  for (const std::string& text : request.paths) {
    std::string known;
    bool found = false;
    for (const auto& path : parts_.paths) {
      found |= text == path->name() || text == path->directory();
      known += (known.empty() ? "" : ", ") + path->name();
    }
    if (!found) return run->answer(Status::Invalid("no path '" + text + "'; there are: " + known));
  }
  Calibration::Options& options = run->options;
  options.block_bytes = parts_.pool->buffer_bytes();
  options.offset_bytes = Path::kFileHeaderBytes;
  options.file_blocks = std::max<uint64_t>(4, kBenchBytes / options.block_bytes);
  options.measure_ns = static_cast<int64_t>(request.seconds * kNsPerS);
  options.warm_up_ns = options.measure_ns * 2 / 5;
  options.deadline_ns = options.warm_up_ns + options.measure_ns + 20 * kNsPerS;
  options.max_depth_bytes = kBenchBytes;
  // Not the whole pool, which may have stayed smaller than planned: a session that connects while a path hangs can
  // work.
  const uint64_t ready = parts_.pool->ready_bytes() / parts_.pool->buffer_bytes();
  run->buffers = static_cast<uint32_t>(std::min<uint64_t>(2 * options.paths.size() * options.file_blocks,
                                                          std::max<uint64_t>(2 * options.paths.size(), ready / 2)));
  run->owner = {::geteuid(), "calibration", 0, static_cast<uint64_t>(NowNs())};
  bench_ = run;
  parts_.storages->Add(Storages::kBenchStorage, run->storage);
  parts_.threads->PostHousekeeping([this, run] {
    std::vector<double> shares(parts_.paths.size());
    std::vector<bool> uses(parts_.paths.size());
    for (const PathIndex path : run->options.paths) {
      shares[path] = 1.0 / static_cast<double>(run->options.paths.size());
      uses[path] = true;
    }
    Status status = parts_.storages->MakeFiles(*run->storage, run->owner, uses);
    if (status.ok()) {
      status = run->storage->store->Reserve(shares, run->options.file_blocks * run->options.paths.size(),
                                            run->options.block_bytes, "the calibration", uses);
      run->options.files = run->storage->store->files();
      for (const PathIndex path : run->options.paths) {
        if (status.ok() && run->options.files[path] == kNone)
          status = Status(-EIO, "path " + parts_.paths[path]->name() + " cannot be used now: mlpo-ctl paths says why");
      }
    }
    if (!status.ok()) run->error = status.message();
    parts_.loop->Post([this, run] { LendToBench(run); });
  });
}

void CalibrationRuns::StopBench() {
  BenchUnwanted(kNobodyAsks);
  parts_.loop->Post([this] { parts_.loop->CancelCalibration(kNobodyAsks); });
}

// The first reason is told.
void CalibrationRuns::BenchUnwanted(const char* why) {
  const auto run = bench_.lock();
  if (run && run->unwanted.load(std::memory_order_relaxed) == nullptr)
    run->unwanted.store(why, std::memory_order_relaxed);
}

void CalibrationRuns::LendToBench(const std::shared_ptr<BenchRun>& run) {
  if (const char* why = run->unwanted.load(std::memory_order_relaxed)) run->error = why;
  if (run->error.empty()) {
    run->options.buffers = parts_.loop->LendBuffers(run->buffers);
    if (run->options.buffers.size() < 2 * run->options.paths.size()) {
      run->error = "the pool has " + std::to_string(run->options.buffers.size()) + " free buffers, and " +
                   std::to_string(run->options.paths.size()) + " paths need two each: name fewer paths, or enlarge it";
      parts_.loop->GiveBack(run->options.buffers);
    }
  }
  if (!run->error.empty()) return parts_.threads->PostMain([this, run] { EndBench(run); });
  parts_.threads->PostHousekeeping([this, run] {
    // What cannot be compressed, nor found twice. Gigabytes: whoever has come meanwhile does not wait for the rest.
    std::mt19937_64 random(static_cast<uint64_t>(NowNs()));
    for (const BufferIndex buffer : run->options.buffers) {
      if (run->unwanted.load(std::memory_order_relaxed) != nullptr) break;
      auto* words = reinterpret_cast<uint64_t*>(parts_.pool->data(buffer));
      for (uint64_t i = 0; i < parts_.pool->buffer_bytes() / sizeof(uint64_t); ++i) words[i] = random();
    }
    parts_.loop->Post([this, run] {
      if (const char* why = run->unwanted.load(std::memory_order_relaxed)) {
        parts_.loop->GiveBack(run->options.buffers);
        run->error = why;
        return parts_.threads->PostMain([this, run] { EndBench(run); });
      }
      parts_.loop->Calibrate(run->options, [this, run](const Calibration& ended) {
        run->results = ended.results();
        run->error = ended.error();
        if (ended.failed_path() != kNone)
          run->error = "path " + parts_.paths[ended.failed_path()]->name() + ": " + run->error;
        parts_.threads->PostMain([this, run] { EndBench(run); });
      });
    });
  });
}

// Takes over what was measured, then saves it.
void CalibrationRuns::EndBench(const std::shared_ptr<BenchRun>& run) {
  for (const PathMeasurement& result : run->results) parts_.records->AddWritten(result.path, result.written_bytes);
  if (!run->error.empty()) run->results.clear();
  for (const PathMeasurement& result : run->results) {
    // Where paths share a bottleneck, each is worth what it has of it when all are busy.
    const double together = result.together_bytes_per_s / result.mixed_bytes_per_s;
    const double scale = together < kSharedDevice ? together : 1;
    PathRecord::Calibration measured;
    measured.read_bytes_per_s = result.read_bytes_per_s * scale;
    measured.write_bytes_per_s = result.write_bytes_per_s * scale;
    measured.duplex = result.duplex;
    measured.read_depth_bytes = result.read_depth_bytes;
    measured.write_depth_bytes = result.write_depth_bytes;
    measured.unix_s =
        std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
    parts_.records->SetCalibration(result.path, measured);
    BenchSnapshot shown;
    shown.name = parts_.paths[result.path]->name();
    shown.read_bytes_per_s = result.read_bytes_per_s;
    shown.write_bytes_per_s = result.write_bytes_per_s;
    shown.duplex = result.duplex;
    shown.mixed_bytes_per_s = result.mixed_bytes_per_s;
    shown.together_bytes_per_s = result.together_bytes_per_s;
    shown.read_depth_bytes = result.read_depth_bytes;
    shown.write_depth_bytes = result.write_depth_bytes;
    shown.speeds_from = Name(parts_.records->parameters()[result.path].origin);
    run->shown.push_back(std::move(shown));
    parts_.loop->Post([this, path = result.path, parameters = parts_.records->parameters()[result.path]] {
      parts_.loop->SetPath(path, parameters);
    });
    spdlog::info("event=calibrated path={} read_bytes_per_s={:.0f} write_bytes_per_s={:.0f} duplex={:.2f} from={}",
                 run->shown.back().name, measured.read_bytes_per_s, measured.write_bytes_per_s, measured.duplex,
                 run->shown.back().speeds_from);
  }
  parts_.threads->PostHousekeeping(
      [this, run, records = parts_.records->records(), parameters = parts_.records->parameters()] {
        parts_.storages->SetShares(parameters);
        if (run->storage->store) {
          Status removed = run->storage->store->Remove();
          if (!removed.ok()) spdlog::warn("event=remove_failed reason=\"{}\"", removed.message());
        }
        for (size_t i = 0; i < run->results.size(); ++i) {
          run->shown[i].not_saved = parts_.records->SaveRecord(run->results[i].path, records[run->results[i].path]);
        }
        parts_.threads->PostMain([this, run] {
          parts_.storages->Erase(Storages::kBenchStorage);
          run->answer(run->error.empty() ? Result<std::string>(BenchJson(run->shown)) : Status(-ECANCELED, run->error));
          parts_.ended();
        });
      });
}

}  // namespace mlpo
