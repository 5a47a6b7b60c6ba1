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

// Of a node on one path, while no daemon of its name runs there: what is in its folder, and what its journal names
// elsewhere. Blocks as long as the file systems do.
Result<GcReport> CleanDeadNode(const std::string& directory, const std::string& node, bool dry_run) {
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
  return CleanNode(directory, node, options);
}

// What may hang in a directory of checkpoints, in a thread of its own.
Result<GcReport> InTime(std::function<Result<GcReport>()> work) {
  const Result<std::shared_ptr<LooseThreads>> thread = LooseThreads::Start("ckpt-gc", 1);
  if (!thread.ok()) return thread.status();
  const auto found = std::make_shared<std::promise<Result<GcReport>>>();
  std::future<Result<GcReport>> report = found->get_future();
  thread.value()->Post([found, work = std::move(work)] { found->set_value(work()); });
  if (report.wait_for(kGcPatience) != std::future_status::ready)
    return Status(-ETIMEDOUT, "it, or a directory that its journal names, does not answer in time");
  return report.get();
}

void Add(const Result<GcReport>& report, const std::string& where, GcReport* all) {
  if (report.ok()) return all->Add(report.value());
  all->failed.push_back({where, 0, report.status().message()});
}

}  // namespace

GcReport CollectGarbageOf(const Config& config, const std::string& node, bool dry_run) {
  GcReport all;
  all.dry_run = dry_run;
  const std::string& which = node.empty() ? config.daemon.node : node;
  for (const PathConfig& path : config.paths) Add(CleanDeadNode(path.directory, which, dry_run), path.directory, &all);
  return all;
}

// Each path's keeper looks at its own, so that none removes what another thread is making. What is another node's, and
// cut saves in directories of checkpoints, have threads of their own. The lookout only waits.
void Garbage::CollectGarbage(const GcRequest& request, std::function<void(Result<std::string>)> answer) {
  const bool own = request.node.empty() || request.node == parts_.config->daemon.node;
  parts_.threads->PostLookout([this, request, own, answer = std::move(answer)] {
    const bool dry_run = request.dry_run;
    GcReport all;
    all.dry_run = dry_run;
    for (size_t i = 0; i < parts_.paths.size(); ++i) {
      Path* const path = parts_.paths[i];
      const std::string& directory = path->directory();
      if (!own) {
        Add(InTime([directory, node = request.node, dry_run] { return CleanDeadNode(directory, node, dry_run); }),
            directory, &all);
        continue;
      }
      const std::optional<Result<GcReport>> report = parts_.keepers[i]->Ask<Result<GcReport>>(
          [path, dry_run] { return path->CollectGarbage(dry_run); }, kGcPatience);
      Add(report.value_or(Status(-ETIMEDOUT, "its file system does not answer in time")), directory, &all);
    }
    if (own) {
      const auto rests = [runs = parts_.checkpoints, dry_run]() -> Result<GcReport> {
        return runs->CollectGarbage(dry_run);
      };
      Add(InTime(rests), "the daemon's journal of checkpoints", &all);
    }
    spdlog::info("event=gc node={} dry_run={} removed={} bytes={} kept={} failed={}",
                 own ? parts_.config->daemon.node : request.node, request.dry_run, all.removed.size(),
                 all.removed_bytes(), all.kept.size(), all.failed.size());
    parts_.threads->PostMain([answer, text = GcJson(all)] { answer(text); });
  });
}

}  // namespace mlpo
