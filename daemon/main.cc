// mlpo-daemon: reads its configuration, checks what it needs, serves, and says why if it cannot. Exit codes: sysexits.
#include <utility>  // before Asio of Boost 1.74 in C++20

#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <sysexits.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <string_view>

#include "daemon/base/log.h"
#include "daemon/base/service_manager.h"
#include "daemon/checkpoint_tool.h"
#include "daemon/config/load.h"
#include "daemon/control/status_json.h"
#include "daemon/daemon.h"
#include "daemon/doctor/gather.h"
#include "daemon/doctor/judge.h"
#include "daemon/garbage.h"
#include "daemon/io/path.h"
#include "daemon/path_records.h"
#include "daemon/plan_tool.h"

namespace {

using mlpo::Status;

int ExitCode(const Status& status) {
  switch (-status.code()) {
    case EINVAL:
    case ENOTSUP:
    case ENOENT:
    case ENOTDIR:
      return EX_CONFIG;
    case EACCES:
    case EPERM:
    case EROFS:
      return EX_NOPERM;
    case EADDRINUSE:
    case EBUSY:
      return EX_UNAVAILABLE;
    case ENOSPC:
    case EDQUOT:
    case EEXIST:
      return EX_CANTCREAT;
    case EIO:
      return EX_IOERR;
    default:
      return EX_OSERR;
  }
}

int Refuse(const Status& status, mlpo::ServiceManager& service) {
  spdlog::error("event=start_failed reason=\"{}\"", status.message());
  service.Show(status.message());
  return ExitCode(status);
}

int Doctor(const mlpo::LoadOutcome& loaded, const mlpo::Environment& environment) {
  mlpo::StartLogging("warning");  // to stderr: stdout has the report alone
  const std::vector<mlpo::Finding> findings =
      loaded.config ? mlpo::Judge(mlpo::GatherFacts(*loaded.config, environment, nullptr,
                                                    mlpo::ParametersPerS(loaded.config->paths)))
                    : mlpo::JudgeProblems(loaded.problems);
  std::puts(mlpo::ReportJson(findings, /*running=*/false).c_str());
  return mlpo::ReportCode(findings);
}

int CollectGarbage(const mlpo::LoadOutcome& loaded) {
  mlpo::StartLogging("warning");  // to stderr: stdout has the report alone
  const mlpo::GcReport report = mlpo::CollectGarbageOf(*loaded.config, loaded.gc_node, loaded.dry_run);
  std::puts(mlpo::GcJson(report).c_str());
  return !report.failed.empty() ? 1 : !report.kept.empty() ? 2 : 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && std::string_view(argv[1]) == "checkpoint") return mlpo::CheckpointTool({argv + 2, argv + argc});
  if (argc > 1 && std::string_view(argv[1]) == "plan") return mlpo::PlanTool({argv + 2, argv + argc});
  const mlpo::Environment environment = mlpo::ReadEnvironment();
  mlpo::LoadOutcome loaded = mlpo::LoadConfig(argc, argv, environment);
  std::fputs(loaded.output.c_str(), stdout);
  std::fputs(loaded.errors.c_str(), stderr);
  if (loaded.doctor) return Doctor(loaded, environment);
  if (!loaded.config) return loaded.exit_code;
  if (loaded.gc) return CollectGarbage(loaded);
  mlpo::Config& config = *loaded.config;
  mlpo::StartLogging(config.daemon.log_level);
  ::signal(SIGPIPE, SIG_IGN);
  ::signal(SIGXFSZ, SIG_IGN);  // a write beyond RLIMIT_FSIZE is EFBIG, an error of that path
  ::umask(077);
  mlpo::ServiceManager service = mlpo::ServiceManager::FromEnvironment();

  Status status = mlpo::CheckKernel();
  if (status.ok()) status = mlpo::CheckDistinctPaths(config.paths);
  if (!status.ok()) return Refuse(status, service);
  mlpo::Result<std::string> socket = mlpo::ResolveSocket(config, environment);
  if (!socket.ok()) return Refuse(socket.status(), service);
  mlpo::Result<std::unique_ptr<mlpo::Daemon>> daemon = mlpo::Daemon::Create(std::move(config), *socket, &service);
  if (!daemon.ok()) return Refuse(daemon.status(), service);
  return (*daemon)->Run();
}
