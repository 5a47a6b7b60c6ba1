#include "client/ctl/show.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>

#include "client/ctl/answer.h"
#include "client/ctl/counters.h"
#include "client/ctl/exit_code.h"
#include "client/ctl/table.h"
#include "mlpo/client.h"

namespace mlpo::ctl {
namespace {

using nlohmann::json;

// For status and paths: how long a daemon may take before what it exports unasked is shown instead.
constexpr int64_t kPatienceNs = 2'000'000'000;

// What the daemon exports instead of its answer to `method`; nothing after an explanation on stderr.
std::optional<json> FromCounters(const Question& question) {
  std::string problem;
  std::optional<nlohmann::ordered_json> counters = ReadCounters(question.socket, &problem);
  if (!counters) {
    std::fprintf(stderr, "mlpo-ctl: and its counters cannot be shown: %s\n", Safe(problem).c_str());
    return std::nullopt;
  }
  if (question.json) {
    std::printf("%s\n", counters->dump(-1, ' ', false, json::error_handler_t::replace).c_str());
    return *counters;
  }
  const json beats = (*counters)["counters"];
  std::printf("the daemon does not answer; these are its counters of %s ago\n",
              Seconds(Number(beats, "written_s")).c_str());
  for (const json& thread : beats["not_answering"]) {
    const auto name = thread.get<std::string>();
    if (name != "counters")
      std::printf("its %s thread has not gone round its loop for %s\n", name.c_str(),
                  Seconds(Number(beats, (name + "_s").c_str())).c_str());
    else
      std::printf("no thread of it runs: is it stopped (SIGSTOP, a frozen cgroup), or short of memory?\n");
  }
  return *counters;
}

// The daemon's answer, or nothing after an explanation on stderr and *exit_code.
std::optional<json> Ask(const Question& question, const char* method, int* exit_code, bool or_counters = false,
                        const std::string& params = "") {
  char* text = nullptr;
  const int code = mlpo_control(question.socket.empty() ? nullptr : question.socket.c_str(), method,
                                params.empty() ? nullptr : params.c_str(),
                                or_counters ? std::min(kPatienceNs, question.timeout_ns) : question.timeout_ns, &text);
  if (code != 0) {
    std::fprintf(stderr, "mlpo-ctl: %s\n", Safe(mlpo_last_error()).c_str());
    *exit_code = Unreachable(code);
    if (code == -ENOENT || code == -ECONNREFUSED)
      std::fputs(
          "mlpo-ctl: no daemon runs there: start one (systemctl start mlpo-daemon@UID, or mlpo-ctl run -- CMD), or "
          "name its socket with --socket or MLPO_SOCKET\n",
          stderr);
    if (code == -ETIMEDOUT) std::fputs("mlpo-ctl: the daemon runs but does not answer: look at its log\n", stderr);
    return code == -ETIMEDOUT && or_counters ? FromCounters(question) : std::nullopt;
  }
  json answer = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (answer.is_object()) {
    if (question.json) std::printf("%s\n", text);
    mlpo_free(text);
    return answer;
  }
  mlpo_free(text);
  std::fprintf(stderr, "mlpo-ctl: the daemon's answer to %s is no JSON object\n", method);
  *exit_code = kFailed;
  return std::nullopt;
}

// Without the data thread nobody is served; without another one trainers still are.
int Health(const json& answer) {
  const json beats = Member(answer, "counters", json::value_t::object);
  const json late = Member(beats, "not_answering", json::value_t::array);
  if (std::find(late.begin(), late.end(), "data") != late.end()) return kFailed;
  if (!late.empty()) return kDegraded;
  if (Text(answer, "state") == "degraded") return kDegraded;
  for (const json& path : Member(answer, "paths", json::value_t::array))
    if (!path.is_object() || Text(path, "state") != "healthy") return kDegraded;
  return kFine;
}

void PrintPaths(const json& answer) {
  Table table({"NAME", "STATE", "ENGINE", "DIRECT", ">READ", ">WRITTEN", ">READING", ">WRITING", ">SCRATCH",
               ">CHECKPOINTS", ">ERRORS", "DIRECTORY"});
  for (const json& p : Member(answer, "paths", json::value_t::array)) {
    if (!p.is_object()) continue;
    table.Add({Text(p, "name"), Text(p, "state"), Text(p, "engine"), Flag(p, "direct_io") ? "yes" : "no",
               Bytes(Number(p, "read_bytes")), Bytes(Number(p, "written_bytes")),
               BytesPerS(Number(p, "read_bytes_per_s")), BytesPerS(Number(p, "write_bytes_per_s")),
               Bytes(Number(p, "scratch_bytes")), Bytes(Number(p, "checkpoint_bytes")),
               Count(Whole(p, "read_errors") + Whole(p, "write_errors") + Whole(p, "checksum_errors")),
               Text(p, "directory")});
  }
  std::printf("%s", table.Text().c_str());
}

// Of paths that are not as they should be: why, since when, and how far an evacuation is.
void PrintTrouble(const json& answer) {
  for (const json& p : Member(answer, "paths", json::value_t::array)) {
    if (!p.is_object()) continue;
    const std::string error = Text(p, "error");
    const json evacuation = Member(p, "evacuation", json::value_t::object);
    std::string text;
    if (!error.empty() && error != "?") text += ": " + error;
    if (Flag(evacuation, "done")) {
      text += ": evacuated";
    } else if (!evacuation.empty()) {
      text += ": " + Bytes(Number(evacuation, "left_bytes")) + " of " + Bytes(Number(evacuation, "total_bytes")) +
              " are still to be moved";
    }
    if (text.empty()) continue;
    std::printf("%s is %s since %s%s\n", Text(p, "name").c_str(), Text(p, "state").c_str(),
                Seconds(Number(p, "state_s")).c_str(), text.c_str());
  }
}

// What the daemon believes of each path; nothing to show of counters or of an older daemon.
void PrintModel(const json& answer) {
  Table table({"NAME", "SPEEDS", ">READ", ">WRITE", ">DUPLEX", ">WORTH", ">SHARE", ">IN FLIGHT", ">EVER WRITTEN"});
  bool any = false;
  for (const json& p : Member(answer, "paths", json::value_t::array)) {
    if (!p.is_object()) continue;
    const json model = Member(p, "model", json::value_t::object);
    any |= !model.empty();
    char duplex[32], share[32];
    std::snprintf(duplex, sizeof duplex, "%.2f", Number(model, "duplex"));
    std::snprintf(share, sizeof share, "%.1f %%", 100 * Number(model, "share"));
    table.Add(
        {Text(p, "name"), Text(model, "from"), BytesPerS(Number(model, "read_bytes_per_s")),
         BytesPerS(Number(model, "write_bytes_per_s")), duplex, BytesPerS(Number(model, "worth_bytes_per_s")), share,
         std::to_string(Whole(model, "read_queue_blocks")) + "+" + std::to_string(Whole(model, "write_queue_blocks")),
         Bytes(Number(p, "lifetime_written_bytes"))});
  }
  if (any) std::printf("what they are taken for:\n%s", table.Text().c_str());
}

// Of paths that other nodes use as well; nothing to show of counters or of an older daemon.
void PrintNodeShares(const json& answer) {
  Table table({"NAME", "SHARE", ">PART", ">NODES", ">SEEN HERE", ">AT MOST"});
  bool any = false;
  for (const json& p : Member(answer, "paths", json::value_t::array)) {
    const json share = p.is_object() ? Member(p, "node_share", json::value_t::object) : json();
    if (share.empty() || Text(share, "share") == "1") continue;
    any = true;
    const double granted = Number(share, "granted_bytes_per_s");
    const uint64_t nodes = Whole(share, "nodes");
    char part[32];
    std::snprintf(part, sizeof part, "%.1f %%", 100 * Number(share, "part"));
    table.Add({Text(p, "name"), Text(share, "share"), part, nodes > 0 ? Count(nodes) : "-",
               BytesPerS(Number(share, "seen_bytes_per_s")), granted > 0 ? BytesPerS(granted) : "-"});
  }
  if (any) std::printf("shared with other nodes:\n%s", table.Text().c_str());
}

void PrintSessions(const json& answer) {
  const json sessions = Member(answer, "sessions", json::value_t::array);
  const json totals = Member(answer, "totals", json::value_t::object);
  std::printf("sessions: %zu of %llu shown, %s parameters in all\n", sessions.size(),
              static_cast<unsigned long long>(Whole(totals, "sessions")), Count(Whole(totals, "parameters")).c_str());
  if (sessions.empty()) return;
  Table table(
      {"JOB", ">RANK", ">PID", ">UID", ">EPOCH", ">SUBGROUPS", ">PARAMETERS", ">SKIPPED", ">ARENA", ">IN FLIGHT"});
  for (const json& s : sessions) {
    if (!s.is_object()) continue;
    const std::string rank = std::to_string(Whole(s, "rank")) + "/" + std::to_string(Whole(s, "world_size"));
    table.Add({Text(s, "job"), rank, std::to_string(Whole(s, "pid")), std::to_string(Whole(s, "uid")),
               std::to_string(Whole(s, "epoch")), Count(Whole(s, "subgroups")), Count(Whole(s, "parameters")),
               Count(Whole(s, "skipped_steps")), Bytes(Number(s, "arena_bytes")),
               Count(Whole(s, "requests_in_flight"))});
  }
  std::printf("%s", table.Text().c_str());
}

// Nothing, unless some are being saved.
void PrintCheckpoints(const json& answer) {
  const json running = Member(Member(answer, "checkpoints", json::value_t::object), "running", json::value_t::array);
  if (running.empty()) return;
  Table table({"JOB", ">RANK", "TAG", ">STEP", "PHASE", ">COPIED", ">OF", ">SPEED", ">LEFT", ">AT MOST", "DIRECTORY"});
  for (const json& c : running) {
    if (!c.is_object()) continue;
    const bool copying = Text(c, "phase") == "copying";
    table.Add({Text(c, "job"), std::to_string(Whole(c, "rank")), Text(c, "tag"), std::to_string(Whole(c, "step")),
               Text(c, "phase"), Bytes(Number(c, "copied_bytes")), Bytes(Number(c, "bytes")),
               BytesPerS(Number(c, "bytes_per_s")), copying ? Seconds(Number(c, "left_s")) : "",
               copying ? Seconds(Number(c, "bound_s")) : "", Text(c, "directory")});
  }
  std::printf("checkpoints:\n%s", table.Text().c_str());
}

// How much of a pool that still grows is there, and on which NUMA nodes.
std::string Growing(const json& pool) {
  std::string text;
  const double buffers = Number(pool, "buffers"), bytes = buffers * Number(pool, "buffer_bytes");
  if (Flag(pool, "growing")) text = ", " + Bytes(bytes) + " of it ready";
  const json nodes = Member(pool, "nodes", json::value_t::array);
  for (size_t i = 0; nodes.size() > 1 && i < nodes.size(); ++i) {
    text += (i == 0 ? ", node " : " and ") + Count(Whole(nodes[i], "node")) + ": ";
    text += Count(Whole(nodes[i], "buffers")) + " buffers";
  }
  return text;
}

void PrintDaemon(const json& s) {
  const json pool = Member(s, "pool", json::value_t::object);
  std::printf("mlpo-daemon %s on %s: %s (pid %llu, up %s)\n", Text(s, "version").c_str(), Text(s, "node").c_str(),
              Text(s, "state").c_str(), static_cast<unsigned long long>(Whole(s, "pid")),
              Seconds(Number(s, "uptime_s")).c_str());
  std::printf("socket: %s\n", Text(s, "socket").c_str());
  const bool counters = s.contains("counters");  // which say less
  std::printf("adam: %s%s workers\n", counters ? "" : (Text(s, "adam_target") + ", ").c_str(),
              Count(Whole(s, "adam_workers")).c_str());
  std::printf("pool: %s%s%s%s; blocks: %s cached (%s dirty), %s free\n", Bytes(Number(pool, "bytes")).c_str(),
              counters               ? ""
              : Flag(pool, "locked") ? ", locked"
                                     : ", not locked",
              Flag(pool, "huge_pages") ? ", huge pages" : "", Growing(pool).c_str(),
              Count(Whole(pool, "cached_blocks")).c_str(), Count(Whole(pool, "dirty_blocks")).c_str(),
              Count(Whole(pool, "free_blocks")).c_str());
  std::printf("arenas: %s of at most %s\n", Bytes(Number(s, "arenas_bytes")).c_str(),
              Bytes(Number(s, "arenas_limit_bytes")).c_str());
  if (Whole(s, "protocol_errors") != 0)
    std::printf("sessions ended for breaking the protocol: %s\n", Count(Whole(s, "protocol_errors")).c_str());
  if (Whole(s, "lost_wakeups") != 0)
    std::printf("lost wake-ups (a bug; please report it): %s\n", Count(Whole(s, "lost_wakeups")).c_str());
  if (!counters && Whole(s, "log_lines_dropped") != 0)
    std::printf("lines of the log that stderr did not take: %s\n", Count(Whole(s, "log_lines_dropped")).c_str());
}

}  // namespace

int ShowStatus(const Question& question) {
  int exit_code = kFine;
  const std::optional<json> answer = Ask(question, "status", &exit_code, /*or_counters=*/true);
  if (!answer) return exit_code;
  if (!question.json) {
    PrintDaemon(*answer);
    std::printf("paths:\n");
    PrintPaths(*answer);
    PrintTrouble(*answer);
    PrintNodeShares(*answer);
    PrintSessions(*answer);
    PrintCheckpoints(*answer);
  }
  return Health(*answer);
}

int ShowPaths(const Question& question) {
  int exit_code = kFine;
  const std::optional<json> answer = Ask(question, "paths", &exit_code, /*or_counters=*/true);
  if (!answer) return exit_code;
  if (!question.json) {
    PrintPaths(*answer);
    PrintTrouble(*answer);
    PrintModel(*answer);
    PrintNodeShares(*answer);
  }
  return Health(*answer);
}

int ShowSessions(const Question& question) {
  int exit_code = kFine;
  const std::optional<json> answer = Ask(question, "sessions", &exit_code);
  if (!answer) return exit_code;
  if (!question.json) PrintSessions(*answer);
  return Health(*answer);
}

int ShowMetrics(const Question& question) {
  int exit_code = kFine;
  const std::optional<json> answer = Ask(question, "metrics", &exit_code);
  if (!answer) return exit_code;
  const auto text = answer->find("text");
  if (text == answer->end() || !text->is_string()) {
    std::fputs("mlpo-ctl: the daemon's answer to metrics has no text\n", stderr);
    return kFailed;
  }
  if (!question.json) std::fputs(text->get_ref<const std::string&>().c_str(), stdout);
  return kFine;
}

int Bench(const Question& question, const std::vector<std::string>& paths, double seconds) {
  int exit_code = kFine;
  json params = {{"seconds", seconds}};
  if (!paths.empty()) params["paths"] = paths;
  const std::string text = params.dump(-1, ' ', false, json::error_handler_t::replace);
  const std::optional<json> answer = Ask(question, "bench", &exit_code, /*or_counters=*/false, text);
  if (!answer) return exit_code;
  Table table({"NAME", ">READ", ">WRITE", ">BOTH", ">DUPLEX", ">ALL AT ONCE", ">IN FLIGHT", "NOW"});
  for (const json& p : Member(*answer, "paths", json::value_t::array)) {
    if (!p.is_object()) continue;
    char duplex[32];
    std::snprintf(duplex, sizeof duplex, "%.2f", Number(p, "duplex"));
    table.Add({Text(p, "name"), BytesPerS(Number(p, "read_bytes_per_s")), BytesPerS(Number(p, "write_bytes_per_s")),
               BytesPerS(Number(p, "mixed_bytes_per_s")), duplex, BytesPerS(Number(p, "together_bytes_per_s")),
               Bytes(Number(p, "read_depth_bytes")) + " + " + Bytes(Number(p, "write_depth_bytes")), Text(p, "from")});
    if (const std::string why = Text(p, "not_saved"); !why.empty() && why != "?") {
      std::fprintf(stderr, "mlpo-ctl: not saved for the next start: %s\n", why.c_str());
      exit_code = kDegraded;
    }
  }
  if (!question.json) std::printf("%s", table.Text().c_str());
  return exit_code;
}

int RequestCheckpoint(const Question& question, const std::string& job) {
  int exit_code = kFine;
  const json params = {{"job", job}};
  const std::string text = job.empty() ? "" : params.dump(-1, ' ', false, json::error_handler_t::replace);
  const std::optional<json> answer = Ask(question, "checkpoint_request", &exit_code, /*or_counters=*/false, text);
  if (!answer) return exit_code;
  const uint64_t sessions = Whole(*answer, "sessions");
  if (sessions == 0) {
    std::fputs("mlpo-ctl: no session that could be asked is connected\n", stderr);
    return kFailed;
  }
  if (!question.json)
    std::printf("%llu sessions are asked: each trainer saves when it next looks\n",
                static_cast<unsigned long long>(sessions));
  return kFine;
}

int RequestDrain(const Question& question) {
  int exit_code = kFine;
  const std::optional<json> answer = Ask(question, "drain", &exit_code);
  if (!answer) return exit_code;
  if (!question.json) std::printf("the daemon finishes what it has accepted, and then ends\n");
  return kFine;
}

}  // namespace mlpo::ctl
