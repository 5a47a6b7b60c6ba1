#include "client/ctl/paths.h"

#include <time.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "client/ctl/answer.h"
#include "client/ctl/exit_code.h"
#include "client/ctl/table.h"
#include "mlpo/client.h"

namespace mlpo::ctl {
namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::json;

constexpr auto kPoll = std::chrono::milliseconds(500);
constexpr auto kPatience = std::chrono::seconds(5);       // nothing moves, and some blocks cannot be read: that is all
constexpr auto kLongPatience = std::chrono::seconds(30);  // nothing moves: say so, once

void Say(const std::string& text) { std::fprintf(stderr, "mlpo-ctl: %s\n", Safe(text).c_str()); }

std::optional<json> Ask(const Question& question, const std::string& method, const std::string& params,
                        int* exit_code) {
  char* text = nullptr;
  const int code = mlpo_control(question.socket.empty() ? nullptr : question.socket.c_str(), method.c_str(),
                                params.empty() ? nullptr : params.c_str(), question.timeout_ns, &text);
  if (code != 0) {
    Say(mlpo_last_error());
    *exit_code = Unreachable(code);
    return std::nullopt;
  }
  json answer = json::parse(text, nullptr, /*allow_exceptions=*/false);
  mlpo_free(text);
  if (answer.is_object()) return answer;
  Say("the daemon's answer to " + method + " is no JSON object");
  *exit_code = kFailed;
  return std::nullopt;
}

void Print(const Question& question, const json& answer) {
  if (question.json) std::printf("%s\n", answer.dump(-1, ' ', false, json::error_handler_t::replace).c_str());
}

// The path that is meant, of the answer to "paths".
json Find(const json& answer, const std::string& path) {
  for (const json& p : Member(answer, "paths", json::value_t::array)) {
    if (!p.is_object()) continue;
    const auto is = [&](const char* name) { return p.value(name, json()) == path; };
    if (is("name") || is("directory")) return p;
  }
  return json::object();
}

// How far an evacuation is; what has been printed before gives way on a terminal.
class Progress {
 public:
  explicit Progress(bool shown) : shown_(shown && ::isatty(STDOUT_FILENO) == 1) {}
  // Of what follows: the line is clear.
  void End() {
    if (std::exchange(any_, false)) std::printf("\r\033[K");
    std::fflush(stdout);
  }
  void Show(uint64_t left, uint64_t total) {
    if (!shown_) return;
    any_ = true;
    std::printf("\r\033[K%s of %s left", Bytes(static_cast<double>(left)).c_str(),
                Bytes(static_cast<double>(total)).c_str());
    std::fflush(stdout);
  }

 private:
  const bool shown_;
  bool any_ = false;
};

// What an evacuation may wait for: "" if one of the other paths is healthy.
std::string NobodyTakes(const json& answer, const json& path) {
  std::string others;
  for (const json& p : Member(answer, "paths", json::value_t::array)) {
    if (!p.is_object() || Text(p, "name") == Text(path, "name")) continue;
    if (Text(p, "state") == "healthy") return "";
    const std::string error = Text(p, "error");
    others += (others.empty() ? "'" : ", '") + Text(p, "name") + "' is " + Text(p, "state") +
              (error.empty() ? "" : " (" + error + ")");
  }
  return others.empty() ? "" : "no other path takes what is written: " + others;
}

// Until nothing is left, nothing more can be moved, or the time is over.
int Watch(const Question& question, const PathOrder& order) {
  const auto end =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(order.wait_s));
  auto moved = Clock::now();
  uint64_t last = UINT64_MAX;
  bool said = false;
  json path;
  int code = kFine;
  std::string verdict;
  Progress progress(!question.json);
  while (true) {
    const std::optional<json> answer = Ask(question, "paths", "", &code);
    if (!answer) {
      progress.End();
      return code;
    }
    path = Find(*answer, order.path);
    const json evacuation = Member(path, "evacuation", json::value_t::object);
    const uint64_t left = Whole(evacuation, "left_bytes");
    const uint64_t unreadable = Whole(evacuation, "unreadable_blocks");
    const auto now = Clock::now();
    if (left != std::exchange(last, left)) moved = now;
    progress.Show(left, Whole(evacuation, "total_bytes"));
    if (evacuation.empty()) {
      code = kFailed;
      verdict = "the evacuation has been ended: the path is " + Text(path, "state");
      break;
    }
    if (Flag(evacuation, "done")) {
      verdict = "nothing is left there: its file system can be unmounted, and mlpo-ctl paths enable takes it back";
      break;
    }
    if (unreadable > 0 && now - moved >= kPatience) {
      code = kDegraded;
      verdict = Count(unreadable) + " blocks cannot be read and stay there (" + Text(path, "error") +
                "): until they are updated, nothing else can be done for them";
      break;
    }
    if (now >= end) {
      code = kDegraded;
      const std::string waits = NobodyTakes(*answer, path);
      verdict = waits.empty() ? "it takes longer than --wait, and goes on"
                              : "it takes longer than --wait: " + waits + "; it goes on when one does";
      break;
    }
    if (!said && now - moved >= kLongPatience) {
      said = true;
      progress.End();
      const std::string waits = NobodyTakes(*answer, path);
      Say("nothing has moved for a while: " +
          (waits.empty() ? "do the other paths take what is written (mlpo-ctl paths), and do checkpoints go on "
                           "(mlpo-ctl status)?"
                         : waits));
    }
    const timespec pause{0, std::chrono::nanoseconds(kPoll).count()};
    ::nanosleep(&pause, nullptr);
  }
  progress.End();
  Print(question, path);
  if (code != kFine) {
    Say(verdict);
  } else if (!question.json) {
    std::printf("%s\n", Safe(verdict).c_str());
  }
  return code;
}

}  // namespace

int CommandPath(const Question& question, const PathOrder& order) {
  int exit_code = kFine;
  const std::string params = json{{"path", order.path}}.dump(-1, ' ', false, json::error_handler_t::replace);
  const std::optional<json> answer = Ask(question, "paths_" + order.command, params, &exit_code);
  if (!answer) return exit_code == kFine ? kFailed : exit_code;
  const bool watches = order.command == "evacuate" && order.wait_s > 0;
  if (!watches) Print(question, *answer);
  if (question.json && !watches) return kFine;
  if (order.command == "disable") {
    std::printf("nothing more is written there; what is there is read when it is needed\n");
  } else if (order.command == "enable") {
    std::printf("it is probed, and used as soon as it proves well (mlpo-ctl paths)\n");
  } else if (!question.json) {
    std::printf(
        "%s are moved to the other paths; this goes on when mlpo-ctl ends, and mlpo-ctl paths enable stops it\n",
        Bytes(Number(*answer, "total_bytes")).c_str());
  }
  return watches ? Watch(question, order) : kFine;
}

}  // namespace mlpo::ctl
