#include "client/ctl/trace.h"

#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "client/ctl/answer.h"
#include "client/ctl/exit_code.h"
#include "client/ctl/table.h"
#include "mlpo/client.h"

namespace mlpo::ctl {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;

// The file under another name until it is whole.
class Output {
 public:
  explicit Output(const std::string& name) : name_(name), aside_(name + "." + std::to_string(::getpid()) + ".new") {}
  ~Output() {
    if (file_ == nullptr) return;
    std::fclose(file_);
    ::unlink(aside_.c_str());
  }
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  bool Open() {
    if (name_ == "-") return true;
    file_ = std::fopen(aside_.c_str(), "wxe");
    return file_ != nullptr;
  }
  std::FILE* file() const { return file_ != nullptr ? file_ : stdout; }
  bool Finish() {
    const bool written = std::fflush(file()) == 0 && std::ferror(file()) == 0;
    if (file_ == nullptr || !written) return written;
    const bool closed = std::fclose(std::exchange(file_, nullptr)) == 0;
    if (closed && std::rename(aside_.c_str(), name_.c_str()) == 0) return true;
    ::unlink(aside_.c_str());
    return false;
  }

 private:
  const std::string name_;
  const std::string aside_;
  std::FILE* file_ = nullptr;
};

std::optional<json> Call(const Question& question, const char* method, const json& params, int* exit_code) {
  char* text = nullptr;
  const int code = mlpo_control(question.socket.empty() ? nullptr : question.socket.c_str(), method,
                                params.dump().c_str(), question.timeout_ns, &text);
  if (code != 0) {
    std::fprintf(stderr, "mlpo-ctl: %s\n", Safe(mlpo_last_error()).c_str());
    *exit_code = Unreachable(code);
    return std::nullopt;
  }
  json answer = json::parse(text, nullptr, /*allow_exceptions=*/false);
  mlpo_free(text);
  if (answer.is_object()) return answer;
  std::fprintf(stderr, "mlpo-ctl: the daemon's answer to %s is no JSON object\n", method);
  *exit_code = kFailed;
  return std::nullopt;
}

// Whether a signal came before the time had passed. `ours` are blocked.
bool WaitForSignal(const sigset_t& ours, double seconds) {
  const auto deadline =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  for (;;) {
    const int64_t left = std::chrono::duration_cast<std::chrono::nanoseconds>(deadline - Clock::now()).count();
    if (left <= 0) return false;
    const timespec time{static_cast<time_t>(left / 1'000'000'000), static_cast<long>(left % 1'000'000'000)};
    if (::sigtimedwait(&ours, nullptr, &time) > 0) return true;
    if (errno != EINTR) return false;
  }
}

int WriteFailed(const TraceOptions& options) {
  std::fprintf(stderr, "mlpo-ctl: writing %s: %s\n", options.output.c_str(), std::strerror(errno));
  return kFailed;
}

}  // namespace

int RecordTrace(const Question& question, const TraceOptions& options) {
  Output output(options.output);
  if (!output.Open()) return WriteFailed(options);
  sigset_t ours;
  sigemptyset(&ours);
  sigaddset(&ours, SIGINT);
  sigaddset(&ours, SIGTERM);
  ::sigprocmask(SIG_BLOCK, &ours, nullptr);

  int exit_code = kFine;
  const std::optional<json> started = Call(question, "trace_start", {{"seconds", options.seconds}}, &exit_code);
  if (!started) return exit_code;
  const uint64_t number = Whole(*started, "trace");
  if (WaitForSignal(ours, options.seconds) && !Call(question, "trace_stop", {{"trace", number}}, &exit_code))
    return exit_code;
  ::sigprocmask(SIG_UNBLOCK, &ours, nullptr);  // whoever does not want to wait for the rest either may go

  uint64_t from = 0;
  uint64_t events = 0;
  json first;
  const auto deadline = Clock::now() + std::chrono::nanoseconds(question.timeout_ns);
  std::fputs("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[", output.file());
  for (;;) {
    const std::optional<json> piece = Call(question, "trace_read", {{"trace", number}, {"from", from}}, &exit_code);
    if (!piece) return exit_code;
    if (piece->contains("state")) {
      if (Clock::now() > deadline) {
        std::fputs("mlpo-ctl: the recording does not end: the daemon is very busy or stuck\n", stderr);
        return kUnreachable;
      }
      WaitForSignal(ours, 0.02);
      continue;
    }
    for (const json& event : Member(*piece, "events", json::value_t::array))
      std::fprintf(output.file(), "%s%s", events++ == 0 ? "\n" : ",\n",
                   event.dump(-1, ' ', false, json::error_handler_t::replace).c_str());
    if (from == 0) first = *piece;
    const uint64_t next = Whole(*piece, "next");
    if (next <= from) break;
    from = next;
  }
  const json about = {{"seconds", Number(first, "seconds")}, {"dropped_records", Whole(first, "dropped")}};
  std::fprintf(output.file(), "\n],\"otherData\":%s}\n", about.dump().c_str());
  if (!output.Finish()) return WriteFailed(options);
  if (Whole(first, "dropped") != 0)
    std::fprintf(stderr, "mlpo-ctl: the first %s records did not fit and are missing: record for a shorter time\n",
                 Count(Whole(first, "dropped")).c_str());
  if (question.json) {
    std::fprintf(options.output == "-" ? stderr : stdout, "%s\n",
                 json{{"output", options.output},
                      {"events", events},
                      {"seconds", Number(first, "seconds")},
                      {"dropped_records", Whole(first, "dropped")}}
                     .dump()
                     .c_str());
  } else if (options.output != "-") {
    std::printf("%s: %s events of %s; open it at https://ui.perfetto.dev\n", options.output.c_str(),
                Count(events).c_str(), Seconds(Number(first, "seconds")).c_str());
  }
  return kFine;
}

}  // namespace mlpo::ctl
