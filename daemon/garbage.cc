#include <utility>  // before Asio of Boost 1.74 in C++20

#include "daemon/garbage.h"

#include <spdlog/spdlog.h>

#include <cerrno>
#include <chrono>
#include <future>
#include <optional>

#include "daemon/base/loose_threads.h"
#include "daemon/base/unique_fd.h"
#include "daemon/checkpoint/folders.h"
#include "daemon/checkpoint/journal.h"
#include "daemon/checkpoint_tool.h"
#include "daemon/control/status_json.h"
#include "daemon/io/scratch_cleanup.h"

namespace mlpo {
namespace {

constexpr auto kGcPatience = std::chrono::seconds(60);

}  // namespace

GcReport CollectGarbageOf(const Config& config, const std::string& node, bool dry_run) {
  GcReport all;
  all.dry_run = dry_run;
  CleanupOptions options;
  options.dry_run = dry_run;
  options.journal = [](int node_fd, bool dry, GcReport* report) {
    const std::string shown = std::string("the journal ") + kJournalFolder;
    Result<UniqueFd> journal = OpenFolder(node_fd, kJournalFolder, shown);
    if (journal.status().os_errno() == ENOENT) return Status();
    if (!journal.ok()) return journal.status();
    const Result<JournalRest> rest = FindRest(std::move(*journal), shown, nullptr, /*alone=*/!dry);
    if (!rest.ok()) return rest.status();
    for (const std::string& reason : rest.value().strange) report->kept.push_back({shown, 0, reason});
    RemoveRest(rest.value(), CheckWorkingHeader, dry, report);
    return Status();
  };
  for (const PathConfig& path : config.paths) {
    const Result<GcReport> report = CleanNode(path.directory, node.empty() ? config.daemon.node : node, options);
    if (report.ok()) {
      all.Add(report.value());
    } else {
      all.failed.push_back({path.directory, 0, report.status().message()});
    }
  }
  return all;
}

// Each path's keeper looks at its own, so that none removes what another thread is making. The lookout only waits.
void Garbage::CollectGarbage(const GcRequest& request, std::function<void(Result<std::string>)> answer) {
  const bool own = request.node.empty() || request.node == parts_.config->daemon.node;
  parts_.threads->PostLookout([this, request, own, answer = std::move(answer)] {
    GcReport all;
    all.dry_run = request.dry_run;
    for (size_t i = 0; i < parts_.paths.size(); ++i) {
      Path* const path = parts_.paths[i];
      const auto look = [path, request, own]() -> Result<GcReport> {
        if (own) return path->CollectGarbage(request.dry_run);
        CleanupOptions options;
        options.dry_run = request.dry_run;
        return CleanNode(path->directory(), request.node, options);
      };
      const std::optional<Result<GcReport>> report = parts_.keepers[i]->Ask<Result<GcReport>>(look, kGcPatience);
      if (report && report->ok()) {
        all.Add(report->value());
      } else {
        all.failed.push_back(
            {path->directory(), 0, report ? report->status().message() : "its file system does not answer in time"});
      }
    }
    if (own) all.Add(RestsOfSaves(request.dry_run));
    spdlog::info("event=gc node={} dry_run={} removed={} bytes={} kept={} failed={}",
                 own ? parts_.config->daemon.node : request.node, request.dry_run, all.removed.size(),
                 all.removed_bytes(), all.kept.size(), all.failed.size());
    parts_.threads->PostMain([answer, text = GcJson(all)] { answer(text); });
  });
}

// Of saves that were cut, in directories of checkpoints, which may hang. In the lookout.
GcReport Garbage::RestsOfSaves(bool dry_run) {
  GcReport failed;
  const auto fail = [&failed](const std::string& why) {
    failed.failed.push_back({"the daemon's journal of checkpoints", 0, why});
    return failed;
  };
  const Result<std::shared_ptr<LooseThreads>> thread = LooseThreads::Start("ckpt-gc", 1);
  if (!thread.ok()) return fail(thread.status().message());
  const auto found = std::make_shared<std::promise<GcReport>>();
  std::future<GcReport> report = found->get_future();
  thread.value()->Post(
      [found, runs = parts_.checkpoints, dry_run] { found->set_value(runs->CollectGarbage(dry_run)); });
  if (report.wait_for(kGcPatience) != std::future_status::ready) return fail("a directory does not answer in time");
  return report.get();
}

}  // namespace mlpo
