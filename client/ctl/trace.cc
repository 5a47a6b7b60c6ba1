#include "client/ctl/trace.h"

#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>
#include <utility>

#include "client/ctl/answer.h"
#include "client/ctl/endings.h"
#include "client/ctl/exit_code.h"
#include "client/ctl/table.h"
#include "mlpo/client.h"

namespace mlpo::ctl {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;

// For the signal handler.
std::atomic<const char*> half_written{nullptr};  // a file that is not to stay
static_assert(std::atomic<const char*>::is_always_lock_free);
volatile sig_atomic_t recording = 0;
volatile sig_atomic_t stop_asked = 0;

// The first SIGINT or SIGTERM ends the recording only. Every other one ends us.
void OnSignal(int signal) {
  if (recording != 0 && signal != SIGHUP) {
    recording = 0;
    stop_asked = 1;
    return;
  }
  if (const char* name = half_written.load()) ::unlink(name);
  ::signal(signal, SIG_DFL);
  ::raise(signal);  // comes when we return
}

// The file under another name until it is whole; what a link leads to, not the link. What is there and is no file (a
// device, a pipe) is written to as it is: renaming would put a file in its place.
class Output {
 public:
  explicit Output(const std::string& name) : name_(name) {}
  ~Output() {
    if (file_ == nullptr) return;
    std::fclose(file_);
    Drop();
  }
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  bool Open() {
    if (name_ == "-") return true;
    struct stat there {};
    if (::stat(name_.c_str(), &there) == 0 && S_ISREG(there.st_mode)) {
      if (char* target = ::realpath(name_.c_str(), nullptr)) {
        name_ = target;
        std::free(target);
      }
    }
    if (::lstat(name_.c_str(), &there) == 0 && !S_ISREG(there.st_mode)) {
      file_ = std::fopen(name_.c_str(), "we");
      return file_ != nullptr;
    }
    aside_ = name_ + "." + std::to_string(::getpid()) + ".new";
    const BlockEndings while_opening;
    file_ = std::fopen(aside_.c_str(), "wxe");
    if (file_ != nullptr) half_written = aside_.c_str();
    return file_ != nullptr;
  }
  std::FILE* file() const { return file_ != nullptr ? file_ : stdout; }
  bool Finish() {
    const bool written = std::fflush(file()) == 0 && std::ferror(file()) == 0;
    if (file_ == nullptr || !written) return written;
    const bool closed = std::fclose(std::exchange(file_, nullptr)) == 0;
    if (half_written == nullptr) return closed;
    const bool done = closed && std::rename(aside_.c_str(), name_.c_str()) == 0;
    const int error = errno;
    if (done) {
      half_written = nullptr;
    } else {
      Drop();
    }
    errno = error;
    return done;
  }

 private:
  void Drop() {
    if (half_written == nullptr) return;
    ::unlink(aside_.c_str());
    half_written = nullptr;
  }

  std::string name_;
  std::string aside_;
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

// Until the time has passed, or a signal has asked for the end: true. From here on another one ends us.
bool WaitForStop(double seconds) {
  const auto deadline =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  const BlockEndings while_looking;  // so that none comes between a look and the wait
  while (stop_asked == 0) {
    const int64_t left = std::chrono::duration_cast<std::chrono::nanoseconds>(deadline - Clock::now()).count();
    if (left <= 0) break;
    const timespec time{static_cast<time_t>(left / 1'000'000'000), static_cast<long>(left % 1'000'000'000)};
    sigset_t none;
    sigemptyset(&none);
    ::ppoll(nullptr, 0, &time, &none);
  }
  recording = 0;
  return stop_asked != 0;
}

int WriteFailed(const TraceOptions& options) {
  std::fprintf(stderr, "mlpo-ctl: writing %s: %s\n", options.output.c_str(), std::strerror(errno));
  return kFailed;
}

}  // namespace

int RecordTrace(const Question& question, const TraceOptions& options) {
  Output output(options.output);
  CatchEndings(OnSignal);
  if (!output.Open()) return WriteFailed(options);

  recording = 1;
  int exit_code = kFine;
  const std::optional<json> started = Call(question, "trace_start", {{"seconds", options.seconds}}, &exit_code);
  if (!started) return exit_code;
  const uint64_t number = Whole(*started, "trace");
  if (WaitForStop(options.seconds) && !Call(question, "trace_stop", {{"trace", number}}, &exit_code)) return exit_code;

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
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
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
