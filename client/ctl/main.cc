// mlpo-ctl: what a daemon is doing, and what it should do. Exit codes: exit_code.h.
#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <cstdio>
#include <string>
#include <vector>

#include "client/ctl/checkpoint.h"
#include "client/ctl/doctor.h"
#include "client/ctl/exit_code.h"
#include "client/ctl/gc.h"
#include "client/ctl/paths.h"
#include "client/ctl/plan.h"
#include "client/ctl/run.h"
#include "client/ctl/show.h"
#include "client/ctl/top.h"
#include "client/ctl/trace.h"
#include "mlpo/client.h"

namespace {

using namespace mlpo::ctl;

constexpr const char* kRunHelp =
    "Starts a private daemon, runs CMD with MLPO_SOCKET (and MLPO_JOB, unless it is set), drains the daemon\n"
    "and passes on CMD's exit code.\n"
    "Usage: mlpo-ctl run [OPTIONS] [DAEMON FLAGS] -- CMD [ARGUMENTS]\n\n"
    "Options:\n"
    "  --json               one object about the run on stdout; CMD's stdout goes to stderr\n"
    "  --ready-timeout S    how long the daemon may take to start (300)\n"
    "  --stop-timeout S     how long it may take to drain (900)\n"
    "  other flags          are the daemon's: --path DIR, --memory SIZE, --config FILE; see mlpo-daemon --help\n";

constexpr const char* kDoctorHelp =
    "Says whether the machine is in order for the daemon: what is wrong and what to do about it. A running daemon\n"
    "looks by itself; without one, or with daemon flags, mlpo-daemon looks with that configuration and starts "
    "nothing.\n"
    "Usage: mlpo-ctl doctor [OPTIONS] [DAEMON FLAGS]\n\n"
    "Options:\n"
    "  --json               print one JSON object\n"
    "  --socket PATH        the daemon's socket (default: $MLPO_SOCKET, then the usual places)\n"
    "  --timeout S          how long to wait for an answer, in seconds (60)\n"
    "  other flags          are the daemon's: --path DIR, --memory SIZE, --config FILE; see mlpo-daemon --help\n"
    "Exit codes: 0 fine, 1 something does not work, 2 something works badly, 64 wrong usage, 69 no answer.\n";

constexpr const char* kGcHelp =
    "Removes what daemons and sessions that are gone left on the paths: working files of this user and node alone,\n"
    "never what is in use, belongs to somebody else or is a checkpoint. A running daemon does it by itself; without\n"
    "one, or with daemon flags, mlpo-daemon does it with that configuration and starts nothing.\n"
    "Usage: mlpo-ctl gc [OPTIONS] [DAEMON FLAGS]\n\n"
    "Options:\n"
    "  --dry-run            say what would be removed, and remove nothing\n"
    "  --node NAME          of another node on a shared file system, whose daemon has been gone for 15 minutes\n"
    "  --json               print one JSON object\n"
    "  --socket PATH        the daemon's socket (default: $MLPO_SOCKET, then the usual places)\n"
    "  --timeout S          how long to wait for the end, in seconds (300)\n"
    "  other flags          are the daemon's: --path DIR, --config FILE; see mlpo-daemon --help\n"
    "Exit codes: 0 done, 1 something failed, 2 something is there that is not ours to remove, 64 wrong usage, 69 no\n"
    "answer.\n";

constexpr int64_t kBenchTimeoutNs = 3'600'000'000'000;  // many paths, slow ones

int WrongUsage(const std::string& problem) {
  std::fprintf(stderr, "mlpo-ctl: %s\n", problem.c_str());
  return kUsage;
}

int RunFromArguments(const std::vector<std::string>& arguments) {
  if (!arguments.empty() && (arguments[0] == "--help" || arguments[0] == "-h")) {
    std::fputs(kRunHelp, stdout);
    return kFine;
  }
  RunOptions options;
  std::string problem;
  if (!ParseRun(arguments, &options, &problem)) return WrongUsage(problem);
  return Run(options);
}

int DoctorFromArguments(const std::vector<std::string>& arguments) {
  for (const std::string& argument : arguments) {
    if (argument != "--help" && argument != "-h") continue;
    std::fputs(kDoctorHelp, stdout);
    return kFine;
  }
  DoctorOptions options;
  std::string problem;
  if (!ParseDoctor(arguments, &options, &problem)) return WrongUsage(problem);
  return Doctor(options);
}

int GcFromArguments(const std::vector<std::string>& arguments) {
  for (const std::string& argument : arguments) {
    if (argument != "--help" && argument != "-h") continue;
    std::fputs(kGcHelp, stdout);
    return kFine;
  }
  GcOptions options;
  std::string problem;
  if (!ParseGc(arguments, &options, &problem)) return WrongUsage(problem);
  return Gc(options);
}

int Main(int argc, char** argv) {
  // The daemon's flags are for the daemon to parse.
  if (argc >= 2 && std::string(argv[1]) == "run") return RunFromArguments({argv + 2, argv + argc});
  if (argc >= 2 && std::string(argv[1]) == "doctor") return DoctorFromArguments({argv + 2, argv + argc});
  if (argc >= 2 && std::string(argv[1]) == "gc") return GcFromArguments({argv + 2, argv + argc});
  if (argc >= 2 && std::string(argv[1]) == "plan") return PlanNode({argv + 2, argv + argc});

  CLI::App app("Shows and commands the offload daemon of this node.", "mlpo-ctl");
  app.footer("Exit codes: 0 fine, 1 failed, 2 degraded, 64 wrong usage, 69 no daemon answers.");
  app.require_subcommand(1);
  app.fallthrough();
  Question question;
  double timeout_s = 15;
  bool version = false;
  app.add_flag("--json", question.json, "print one JSON object");
  app.add_option("--socket", question.socket, "the daemon's socket (default: $MLPO_SOCKET, then the usual places)");
  const CLI::Option* timeout =
      app.add_option("--timeout", timeout_s, "how long to wait for an answer, in seconds (15; bench: an hour)")
          ->check(CLI::Range(0.001, 86400.0));
  app.add_flag_callback(
      "--version", [&] { version = true; }, "print the version");
  CLI::App* status = app.add_subcommand("status", "everything at a glance");
  CLI::App* paths = app.add_subcommand("paths", "the storage paths; or a command for one of them");
  paths->require_subcommand(0, 1);
  PathOrder order;
  const auto add_order = [&](const char* command, const char* what) {
    CLI::App* added = paths->add_subcommand(command, what);
    added->add_option("PATH", order.path, "its name or directory")->required();
    added->callback([&order, command] { order.command = command; });
    return added;
  };
  add_order("disable", "write nothing more there; what is there is read (its administrators only)");
  add_order("enable", "use it again, after a probe (its administrators only)");
  add_order("evacuate", "move what is there to the other paths, as before maintenance (its administrators only)")
      ->add_option("--wait", order.wait_s, "how long to show the progress, in seconds (3600); 0: not at all")
      ->check(CLI::Range(0.0, 604800.0));
  CLI::App* sessions = app.add_subcommand("sessions", "the connected ranks");
  CLI::App* metrics = app.add_subcommand("metrics", "everything countable, as Prometheus text");
  CLI::App* bench = app.add_subcommand("bench", "measure the paths, while no trainer runs (its administrators only)");
  std::vector<std::string> bench_paths;
  double bench_seconds = 0.7;
  bench->add_option("PATH", bench_paths, "names or directories of paths (default: all)");
  bench->add_option("--seconds", bench_seconds, "how long each measurement takes")->check(CLI::Range(0.02, 60.0));
  TopOptions top_options;
  CLI::App* top = app.add_subcommand("top", "paths, sessions and where their time goes, live");
  top->add_flag("--once", top_options.once, "show one frame and exit");
  top->add_option("--interval", top_options.interval_s, "between frames, in seconds (1)")
      ->check(CLI::Range(0.1, 3600.0));
  TraceOptions trace_options;
  CLI::App* trace = app.add_subcommand("trace", "record what paths, workers and sessions do, for ui.perfetto.dev");
  trace->add_option("--seconds", trace_options.seconds, "how long to record (5)")->check(CLI::Range(0.01, 60.0));
  trace->add_option("--output", trace_options.output, "the file to write (mlpo-trace.json); -: standard output");
  CheckpointOptions checkpoint_options;
  CLI::App* checkpoint =
      app.add_subcommand("checkpoint", "list, verify or remove checkpoints in a directory, or ask trainers for one");
  checkpoint->add_option("ACTION", checkpoint_options.action, "list DIR, verify DIR [TAG], remove DIR TAG, or request")
      ->required();
  checkpoint->add_option("DIR", checkpoint_options.directory, "the directory of checkpoints");
  checkpoint->add_option("TAG", checkpoint_options.tag, "which one (verify: the newest complete one)");
  checkpoint->add_option("--job", checkpoint_options.job, "request: of this job only (all that you may ask)");
  CLI::App* drain = app.add_subcommand("drain", "finish accepted work, then end the daemon (its administrators only)");
  app.add_subcommand("gc", "remove what dead daemons left: mlpo-ctl gc [--dry-run] [--node NAME] [daemon flags]");
  app.add_subcommand("doctor", "whether the machine is in order: mlpo-ctl doctor [daemon flags]");
  app.add_subcommand("plan", "memory, storage and step time of a model on a node: mlpo-ctl plan --help");
  app.add_subcommand("run", "run a command with a private daemon: mlpo-ctl run [daemon flags] -- CMD");
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    std::fputs(app.help().c_str(), stdout);
    return kFine;
  } catch (const CLI::ParseError& error) {
    if (version) {
      std::printf("mlpo-ctl %s\n", mlpo_client_version());
      return kFine;
    }
    return WrongUsage(std::string(error.what()) + " (mlpo-ctl --help shows how)");
  }
  question.timeout_ns = static_cast<int64_t>(timeout_s * 1e9);
  if (status->parsed()) return ShowStatus(question);
  if (paths->parsed()) return order.command.empty() ? ShowPaths(question) : CommandPath(question, order);
  if (sessions->parsed()) return ShowSessions(question);
  if (metrics->parsed()) return ShowMetrics(question);
  if (bench->parsed()) {
    if (timeout->count() == 0) question.timeout_ns = kBenchTimeoutNs;
    return Bench(question, bench_paths, bench_seconds);
  }
  if (top->parsed()) return Top(question, top_options);
  if (trace->parsed()) return RecordTrace(question, trace_options);
  if (checkpoint->parsed()) {
    if (const std::string wrong = CheckCheckpoint(checkpoint_options); !wrong.empty()) return WrongUsage(wrong);
    return Checkpoint(question, checkpoint_options);
  }
  if (drain->parsed()) return RequestDrain(question);
  return WrongUsage(
      "run, gc, doctor and plan come first: mlpo-ctl run [daemon flags] -- CMD, mlpo-ctl doctor [daemon flags]");
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const int code = Main(argc, argv);
    if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
      std::perror("mlpo-ctl: writing to stdout");
      return code == kFine ? kFailed : code;
    }
    return code;
  } catch (const std::exception& error) {  // out of memory, or a bug
    std::fprintf(stderr, "mlpo-ctl: %s\n", error.what());
    return kFailed;
  }
}
