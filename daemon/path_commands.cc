#include <utility>  // before Asio of Boost 1.74 in C++20

#include "daemon/path_commands.h"

#include <spdlog/spdlog.h>

#include <cerrno>
#include <chrono>
#include <memory>
#include <optional>

#include "daemon/io/extent_store.h"
#include "daemon/io/path_record.h"

namespace mlpo {
namespace {

constexpr auto kRetakePatience = std::chrono::seconds(60);
constexpr auto kProbePatience = std::chrono::seconds(10);  // after it, nothing else is asked of the path's file system

}  // namespace

PathCommands::PathCommands(Parts parts)
    : parts_(std::move(parts)),
      path_states_(parts_.paths.size(), "healthy"),
      disabled_(parts_.paths.size()),
      enabling_(parts_.paths.size()) {}

void PathCommands::LogPathStates(const std::vector<PathSnapshot>& paths) {
  for (size_t i = 0; i < paths.size(); ++i) {
    const PathSnapshot& path = paths[i];
    if (path.state.empty() || path.state == path_states_[i]) continue;  // empty: the data thread has told nothing yet
    const auto level = path.state == "healthy" ? spdlog::level::info : spdlog::level::warn;
    spdlog::log(level, "event=path_state path={} state={} before={} errno={}", path.name, path.state, path_states_[i],
                path.error);
    path_states_[i] = path.state;
    if (path.state == "healthy") parts_.storages->UseAgain(static_cast<PathIndex>(i));
  }
}

std::vector<bool> PathCommands::UsedPaths() const {
  std::vector<bool> uses(parts_.paths.size());
  bool any = false;
  for (size_t i = 0; i < uses.size(); ++i) {
    uses[i] = !disabled_[i] && (path_states_[i] == "healthy" || path_states_[i] == "full");
    any |= uses[i];
  }
  for (size_t i = 0; i < uses.size() && !any; ++i) uses[i] = !disabled_[i];
  return uses;
}

void PathCommands::Probe(PathIndex path, uint64_t end) {
  const auto probe = [this, path, end] {
    const Status probed = parts_.paths[path]->Probe(parts_.buffer_bytes, end);
    if (!probed.ok()) {
      spdlog::warn("event=probe_failed path={} code={} reason=\"{}\"", parts_.paths[path]->name(), probed.code(),
                   probed.message());
    }
    const int error = probed.ok() ? 0 : probed.os_errno() != 0 ? probed.os_errno() : EIO;
    parts_.loop->Post([this, path, error] { parts_.loop->ProbeDone(path, error); });
  };
  parts_.keepers[path]->Post(probe, kProbePatience);
}

void PathCommands::CommandPath(const PathCommand& command, std::function<void(Result<std::string>)> answer) {
  std::string known;
  for (size_t i = 0; i < parts_.paths.size(); ++i) {
    known += (i > 0 ? ", " : "") + parts_.paths[i]->name();
    if (command.path != parts_.paths[i]->name() && command.path != parts_.paths[i]->directory()) continue;
    spdlog::info("event=path_command path={} command={}", parts_.paths[i]->name(), command.name);
    const auto path = static_cast<PathIndex>(i);
    if (command.name == "enable") return Enable(path, std::move(answer));
    if (enabling_[path] > 0)  // which would undo it
      return answer(
          Status(-EBUSY, "path " + parts_.paths[i]->name() + " is being enabled: ask again when that has ended"));
    return command.name == "disable" ? Disable(path, std::move(answer)) : Evacuate(path, std::move(answer));
  }
  answer(Status::Invalid("no path '" + command.path + "'; there are: " + known));
}

void PathCommands::Disable(PathIndex path, std::function<void(Result<std::string>)> answer) {
  parts_.loop->Post([this, path, answer = std::move(answer)] {
    const std::string needed = parts_.loop->WhyNeeded(path);
    if (needed.empty()) parts_.loop->DisablePath(path);
    parts_.threads->PostMain([this, path, needed, answer] {
      if (!needed.empty())
        return answer(Status(-EBUSY, "path " + parts_.paths[path]->name() + " is needed: " + needed));
      disabled_[path] = true;
      answer(std::string("{\"state\":\"disabled\"}"));
    });
  });
}

// The others are asked for room for all that sessions have, before anything is moved.
void PathCommands::Evacuate(PathIndex path, std::function<void(Result<std::string>)> answer) {
  std::vector<std::shared_ptr<Storages::Storage>> storages;
  for (const auto& [id, storage] : parts_.storages->all()) storages.push_back(storage);
  std::vector<bool> uses = UsedPaths();
  uses[path] = false;
  parts_.threads->PostHousekeeping([this, path, storages, uses, answer = std::move(answer)] {
    std::string full;
    for (const auto& storage : storages) {
      if (!storage->store || !full.empty()) continue;
      const Status room = storage->store->ReserveAgain(parts_.storages->shares(), uses);
      if (!room.ok()) full = "without it " + storage->owner + " has no place: " + room.message();
    }
    parts_.loop->Post([this, path, full, answer] {
      const std::string needed = full.empty() ? parts_.loop->WhyNeeded(path) : full;
      const uint64_t bytes = needed.empty() ? parts_.loop->EvacuatePath(path) : 0;
      parts_.threads->PostMain([this, path, needed, bytes, answer] {
        if (!needed.empty())
          return answer(Status(-ENOSPC, "path " + parts_.paths[path]->name() + " is not evacuated: " + needed));
        disabled_[path] = true;
        answer("{\"state\":\"disabled\",\"total_bytes\":" + std::to_string(bytes) + "}");
      });
    });
  });
}

// Nothing is there any more: its files go, and nothing keeps the file system from being unmounted.
void PathCommands::Evacuated(PathIndex path) {
  if (enabling_[path] > 0) return;  // which was asked for before this was known: it stays as it is
  std::vector<std::shared_ptr<Storages::Storage>> storages;
  for (const auto& [id, storage] : parts_.storages->all()) {
    if (id != Storages::kBenchStorage) storages.push_back(storage);  // a calibration uses its files past the scheduler
  }
  PathRecord record = parts_.records->records()[path];
  parts_.threads->PostHousekeeping([this, path, storages, record] {
    for (const auto& storage : storages) {
      if (!storage->store) continue;
      const Status removed = storage->store->RemoveOn(path);
      if (!removed.ok())
        spdlog::warn("event=remove_failed path={} reason=\"{}\"", parts_.paths[path]->name(), removed.message());
    }
    (void)parts_.records->SaveRecord(path, record);
    Path* const kept = parts_.paths[path];
    const std::optional<Status> released =
        parts_.keepers[path]->Ask<Status>([kept] { return kept->Release(); }, ExtentStore::kPatience);
    const Status status = released.value_or(Status(-ETIMEDOUT, "its file system does not answer"));
    if (status.ok()) {
      spdlog::info("event=evacuated path={}", kept->name());
    } else {
      spdlog::warn("event=evacuated path={} still_open=\"{}\"", kept->name(), status.message());
    }
  });
}

// Behind what an evacuation still has housekeeping do. What may take long is nothing that housekeeping, and with it
// each session that begins or ends, is to wait for.
void PathCommands::Enable(PathIndex path, std::function<void(Result<std::string>)> answer) {
  ++enabling_[path];
  parts_.threads->PostHousekeeping([this, path, answer = std::move(answer)] {
    parts_.threads->PostLookout([this, path, answer] {
      Path* const kept = parts_.paths[path];
      // Too late, nobody would use what it holds: it stays disabled. Of one that has files nothing is let go.
      const auto release = [kept](const Status& taken) {
        if (taken.ok()) (void)kept->Release();
      };
      const std::optional<Status> asked =
          parts_.keepers[path]->Ask<Status>([kept] { return kept->Retake(); }, kRetakePatience, release);
      const Status taken = asked.value_or(Status(
          -ETIMEDOUT, "the file system of path " + kept->name() + " (" + kept->directory() + ") does not answer"));
      parts_.threads->PostMain([this, path, taken, answer] { Retaken(path, taken, answer); });
    });
  });
}

// Sessions have their files there before the scheduler uses it.
void PathCommands::Retaken(PathIndex path, const Status& taken,
                           const std::function<void(Result<std::string>)>& answer) {
  if (!taken.ok()) {
    --enabling_[path];
    return answer(taken);
  }
  std::vector<std::pair<SessionId, std::shared_ptr<Storages::Storage>>> storages(parts_.storages->all().begin(),
                                                                                 parts_.storages->all().end());
  parts_.threads->PostHousekeeping([this, path, storages = std::move(storages), answer] {
    parts_.storages->AddFiles(path, storages);
    parts_.loop->Post([this, path, answer] {
      parts_.loop->EnablePath(path);
      parts_.threads->PostMain([this, path, answer] {
        --enabling_[path];
        disabled_[path] = false;
        answer(std::string("{\"state\":\"probing\"}"));
      });
    });
  });
}

}  // namespace mlpo
