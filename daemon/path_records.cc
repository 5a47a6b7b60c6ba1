#include <utility>  // before Asio of Boost 1.74 in C++20

#include "daemon/path_records.h"

#include <spdlog/spdlog.h>

#include <cerrno>
#include <chrono>
#include <optional>

#include "daemon/base/status.h"

namespace mlpo {
namespace {

constexpr double kSecondsPerDay = 86400;
constexpr double kStateBytesPerParameter = 12;
constexpr auto kRecordsPeriod = std::chrono::seconds(60);
constexpr auto kRecordPatience = std::chrono::seconds(5);

// Declared speeds go over measured ones; either are those of all nodes together.
PathParameters ParametersOf(const PathConfig& config, const PathRecord& record, double node_part) {
  PathParameters path;
  if (const auto& measured = record.calibration) {
    path.read_bytes_per_s = measured->read_bytes_per_s;
    path.write_bytes_per_s = measured->write_bytes_per_s;
    path.duplex = measured->duplex;
    path.duplex_known = true;
    path.read_depth_bytes = measured->read_depth_bytes;
    path.write_depth_bytes = measured->write_depth_bytes;
    path.origin = SpeedOrigin::kCalibrated;
  }
  if (config.read_limit > 0) path.read_bytes_per_s = config.read_limit;
  if (config.write_limit > 0) path.write_bytes_per_s = config.write_limit;
  if (config.duplex > 0) {
    path.duplex = config.duplex;
    path.duplex_known = true;
  }
  if (config.read_limit > 0 || config.write_limit > 0) path.origin = SpeedOrigin::kDeclared;
  path.read_bytes_per_s *= node_part;
  path.write_bytes_per_s *= node_part;
  path.capacity_bytes = config.capacity_bytes;
  path.weight = config.weight;
  path.write_budget_bytes_per_s = static_cast<double>(config.write_budget_bytes) / kSecondsPerDay;
  return path;
}

}  // namespace

double ParametersPerS(const std::vector<PathConfig>& paths) {
  double bytes_per_s = 0;
  for (const PathConfig& path : paths) {
    const double worth = PathWorth(ParametersOf(path, PathRecord(), path.share));
    if (worth <= 0) return 0;
    bytes_per_s += worth;
  }
  return bytes_per_s / kStateBytesPerParameter;
}

PathRecords::PathRecords(Parts parts) : parts_(std::move(parts)), records_due_(parts_.threads->main) {
  for (size_t i = 0; i < parts_.paths.size(); ++i) {
    records_.push_back(parts_.paths[i]->record());
    written_before_.push_back(records_.back().written_bytes);
    node_parts_.push_back(parts_.config->paths[i].share);
    parameters_.push_back(ParametersOf(parts_.config->paths[i], records_.back(), node_parts_.back()));
  }
}

void PathRecords::SetCalibration(size_t path, const PathRecord::Calibration& measured) {
  records_[path].calibration = measured;
  parameters_[path] = ParametersOf(parts_.config->paths[path], records_[path], node_parts_[path]);
}

void PathRecords::SetPart(size_t path, double part) {
  node_parts_[path] = part;
  parameters_[path] = ParametersOf(parts_.config->paths[path], records_[path], part);
}

// How much has been written to each path, for the next daemon. Now and then, and after the data thread's end
// (SaveRecords).
void PathRecords::StoreRecords() {
  records_due_.expires_after(kRecordsPeriod);
  records_due_.async_wait([this](boost::system::error_code error) {
    if (error) return;
    for (size_t i = 0; i < parts_.keepers.size(); ++i) {
      if (parts_.keepers[i]->stuck()) continue;  // or they would pile up
      parts_.keepers[i]->Post(
          [path = parts_.paths[i]] {
            const Status beat = path->Beat();
            if (!beat.ok()) spdlog::warn("event=beat_failed path={} reason=\"{}\"", path->name(), beat.message());
          },
          kRecordPatience);
    }
    parts_.take_snapshot([this](const Snapshot& snapshot) {
      parts_.threads->PostHousekeeping([this, changed = TakeLifetimes(snapshot)] {
        for (const auto& [path, record] : changed) (void)SaveRecord(path, record);
        parts_.threads->PostMain([this] { StoreRecords(); });
      });
    });
  });
}

// The records of paths that have been written to since.
std::vector<std::pair<size_t, PathRecord>> PathRecords::TakeLifetimes(const Snapshot& snapshot) {
  std::vector<std::pair<size_t, PathRecord>> changed;
  for (size_t i = 0; i < records_.size(); ++i) {
    const uint64_t written = written_before_[i] + snapshot.paths[i].written_bytes;
    if (std::exchange(records_[i].written_bytes, written) != written) changed.emplace_back(i, records_[i]);
  }
  return changed;
}

void PathRecords::SaveRecords(const Snapshot& snapshot) {
  for (const auto& [path, record] : TakeLifetimes(snapshot)) (void)SaveRecord(path, record);
}

std::string PathRecords::SaveRecord(size_t path, const PathRecord& record) {
  Path* const kept = parts_.paths[path];
  const std::optional<Status> asked =
      parts_.keepers[path]->Ask<Status>([kept, record] { return kept->SaveRecord(record); }, kRecordPatience);
  const Status saved = asked.value_or(Status(-ETIMEDOUT, "the file system does not answer"));
  if (saved.ok()) return "";
  spdlog::warn("event=record_not_saved path={} reason=\"{}\"", parts_.paths[path]->name(), saved.message());
  return saved.message();
}

}  // namespace mlpo
