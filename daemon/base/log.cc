#include "daemon/base/log.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <spdlog/async.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/base_sink.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iterator>
#include <memory>
#include <mutex>
#include <system_error>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/base/thread.h"

namespace mlpo {
namespace {

constexpr size_t kQueueLines = 4096;  // some 2 MB
constexpr int kPatienceMs = 2000;     // of FinishLogging
constexpr const char* kName = "mlpo-daemon";

// "%*" in the pattern: the syslog priority that the journal reads at the start of a line.
class PriorityFlag : public spdlog::custom_flag_formatter {
 public:
  void format(const spdlog::details::log_msg& message, const std::tm&, spdlog::memory_buf_t& out) override {
    const char* priority = "<7>";
    switch (message.level) {
      case spdlog::level::info:
        priority = "<6>";
        break;
      case spdlog::level::warn:
        priority = "<4>";
        break;
      case spdlog::level::err:
        priority = "<3>";
        break;
      case spdlog::level::critical:
        priority = "<2>";
        break;
      default:
        break;
    }
    out.append(priority, priority + 3);
  }
  std::unique_ptr<custom_flag_formatter> clone() const override { return spdlog::details::make_unique<PriorityFlag>(); }
};

// systemd sets JOURNAL_STREAM to "<device>:<inode>" of the stream that it gave us.
bool StderrIsJournal() {
  const char* stream = std::getenv("JOURNAL_STREAM");
  struct stat st;
  if (stream == nullptr || ::fstat(STDERR_FILENO, &st) != 0) return false;
  return std::to_string(st.st_dev) + ":" + std::to_string(st.st_ino) == stream;
}

// What a line passes. Never destroyed: threads that nobody waits for log until the process has ended.
// Counts are relaxed: nothing is read because of them.
struct Log {
  std::shared_ptr<spdlog::details::thread_pool> thread;  // spdlog's: the queue, and who takes lines out of it
  std::shared_ptr<spdlog::async_logger> queue;           // what puts them in
  std::shared_ptr<spdlog::sinks::sink> in_line;          // instead of both
  std::shared_ptr<spdlog::logger> front;                 // before them: spdlog's own reference ends before we do
  std::atomic<bool> is_in_line{false};
  std::atomic<uint64_t> queued{0};
  std::atomic<uint64_t> done{0};     // by the thread
  std::atomic<uint64_t> overrun{0};  // dropped from the queue, as the thread saw it last
  std::atomic<uint64_t> failed{0};

  // A handler of signals may ask.
  bool Written() const {
    if (is_in_line.load(std::memory_order_relaxed)) return true;
    const uint64_t gone = done.load(std::memory_order_relaxed) + overrun.load(std::memory_order_relaxed);
    return gone >= queued.load(std::memory_order_relaxed);
  }
};

std::atomic<Log*> the_log{nullptr};

// To stderr, as long as it takes: who waits for this thread has a deadline.
bool WriteAll(const char* data, size_t bytes) {
  while (bytes > 0) {
    const ssize_t wrote = ::write(STDERR_FILENO, data, bytes);
    if (wrote > 0) {
      data += wrote;
      bytes -= static_cast<size_t>(wrote);
    } else if (wrote < 0 && errno == EAGAIN) {  // somebody who has it, too, wants it so
      pollfd ready{STDERR_FILENO, POLLOUT, 0};
      if (::poll(&ready, 1, -1) < 0 && errno != EINTR) return false;
    } else if (wrote == 0 || errno != EINTR) {
      return false;
    }
  }
  return true;
}

// What the thread does with a line.
class Writer : public spdlog::sinks::base_sink<std::mutex> {
 public:
  explicit Writer(Log* log) : log_(log) {}

 protected:
  void sink_it_(const spdlog::details::log_msg& message) override {
    const uint64_t overrun = log_->thread->overrun_counter();
    log_->overrun.store(overrun, std::memory_order_relaxed);
    const uint64_t dropped = overrun + log_->failed.load(std::memory_order_relaxed);
    spdlog::memory_buf_t text;
    if (dropped > told_) {
      const std::string note = "event=log_lines_dropped lines=" + std::to_string(dropped - told_) +
                               " since_start=" + std::to_string(dropped);
      formatter_->format(spdlog::details::log_msg(message.logger_name, spdlog::level::warn, note), text);
    }
    formatter_->format(message, text);
    if (WriteAll(text.data(), text.size()))
      told_ = dropped;
    else
      log_->failed.fetch_add(1, std::memory_order_relaxed);
    log_->done.fetch_add(1, std::memory_order_relaxed);
  }
  void flush_() override {}  // it keeps nothing back

 private:
  Log* const log_;
  uint64_t told_ = 0;  // of the lines dropped, those that the log has
};

// The default logger: what happens in the thread that logs.
class Front : public spdlog::logger {
 public:
  explicit Front(Log* log) : logger(kName), shared_(log) {}

 protected:
  void sink_it_(const spdlog::details::log_msg& message) override {
    try {
      if (shared_->is_in_line.load(std::memory_order_relaxed)) return shared_->in_line->log(message);
      shared_->queue->log(message.time, message.source, message.level, message.payload);
      shared_->queued.fetch_add(1, std::memory_order_relaxed);
    } catch (const std::exception&) {  // no memory: then the line is what can be spared
      shared_->failed.fetch_add(1, std::memory_order_relaxed);
    }
  }

 private:
  Log* const shared_;
};

std::unique_ptr<spdlog::formatter> MakeFormatter() {
  auto formatter = std::make_unique<spdlog::pattern_formatter>();
  if (StderrIsJournal()) {
    formatter->add_flag<PriorityFlag>('*').set_pattern("%*%v");
  } else {
    formatter->set_pattern("%Y-%m-%dT%H:%M:%S.%e%z %l %v");
  }
  return formatter;
}

// Signals are for the threads that wait for them, and one that ends the process waits for this thread. What a thread
// brings upon itself cannot wait.
void BeginWriting() {
  SetThreadName("mlpo-log");
  sigset_t others;
  ::sigfillset(&others);
  for (const int own : {SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV, SIGSYS}) ::sigdelset(&others, own);
  ::pthread_sigmask(SIG_BLOCK, &others, nullptr);
}

constexpr int kEndings[] = {SIGHUP, SIGINT, SIGQUIT, SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV, SIGSYS, SIGTERM};
struct sigaction before_us[std::size(kEndings)];

// The process ends as it would have without this handler, a little later.
void OnEnding(int signal, siginfo_t* info, void*) {
  FinishLogging();
  for (size_t i = 0; i < std::size(kEndings); ++i) {
    if (kEndings[i] == signal) ::sigaction(signal, &before_us[i], nullptr);
  }
  const bool is_fault = signal == SIGSEGV || signal == SIGBUS || signal == SIGFPE || signal == SIGILL;
  if (is_fault && info->si_code > 0) return;  // the instruction is carried out again, and that is its end
  ::raise(signal);                            // comes when we return
}

// Whoever wants one of these signals takes it from us afterwards.
void HandleEndings() {
  struct sigaction action = {};
  action.sa_sigaction = OnEnding;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  ::sigemptyset(&action.sa_mask);
  for (size_t i = 0; i < std::size(kEndings); ++i) {
    const bool is_known = ::sigaction(kEndings[i], nullptr, &before_us[i]) == 0;
    if (is_known && before_us[i].sa_handler != SIG_IGN) ::sigaction(kEndings[i], &action, nullptr);
  }
}

// In a forked child. What the thread held as the process forked would stay held in it, such as the C library's lock of
// time zones; so a fork waits for the thread as an ending does.
void OnFork() { the_log.load(std::memory_order_relaxed)->is_in_line.store(true, std::memory_order_relaxed); }

}  // namespace

void StartLogging(const std::string& level) {
  auto* const log = new Log;
  log->in_line = std::make_shared<spdlog::sinks::stderr_sink_mt>();
  log->in_line->set_formatter(MakeFormatter());
  int error = 0;
  try {
    log->thread = std::make_shared<spdlog::details::thread_pool>(kQueueLines, 1, BeginWriting);
    auto writer = std::make_shared<Writer>(log);
    writer->set_formatter(MakeFormatter());
    log->queue = std::make_shared<spdlog::async_logger>(kName, std::move(writer), log->thread,
                                                        spdlog::async_overflow_policy::overrun_oldest);
    log->queue->set_level(spdlog::level::trace);  // the front has chosen
    log->queue->set_error_handler([log](const std::string&) {
      log->failed.fetch_add(1, std::memory_order_relaxed);
      log->done.fetch_add(1, std::memory_order_relaxed);
    });
  } catch (const std::system_error& failed) {
    error = failed.code().value();
    log->is_in_line.store(true, std::memory_order_relaxed);
  }
  the_log.store(log, std::memory_order_release);
  log->front = std::make_shared<Front>(log);
  log->front->set_level(spdlog::level::from_str(level));
  spdlog::set_default_logger(log->front);
  HandleEndings();
  (void)std::atexit(FinishLogging);  // both fail for want of memory alone: then the last lines may be missing
  (void)::pthread_atfork(FinishLogging, nullptr, OnFork);
  if (error != 0) spdlog::warn("event=log_in_line errno={} what=\"no thread: whoever logs waits for stderr\"", error);
}

void FinishLogging() {
  const Log* const log = the_log.load(std::memory_order_acquire);
  if (log == nullptr) return;
  const struct timespec while_it_writes = {0, 1'000'000};
  for (int ms = 0; ms < kPatienceMs && !log->Written(); ++ms) ::nanosleep(&while_it_writes, nullptr);
}

uint64_t LogLinesDropped() {
  Log* const log = the_log.load(std::memory_order_acquire);
  if (log == nullptr) return 0;
  return (log->thread ? log->thread->overrun_counter() : 0) + log->failed.load(std::memory_order_relaxed);
}

void CheckFailed(const char* file, int line, const char* what) {
  if (the_log.load(std::memory_order_acquire) != nullptr)
    spdlog::critical("event=check_failed file={} line={} what=\"{}\"", file, line, what);
  else
    std::fprintf(stderr, "%s:%d: check failed: %s\n", file, line, what);
  std::abort();  // its handler waits until that is written
}

bool RateLimit::Allow(int64_t now_ns, uint64_t* suppressed) {
  int64_t next = next_ns_.load(std::memory_order_relaxed);
  if (now_ns < next || !next_ns_.compare_exchange_strong(next, now_ns + interval_ns_, std::memory_order_relaxed)) {
    suppressed_.fetch_add(1, std::memory_order_relaxed);
    return false;
  }
  *suppressed = suppressed_.exchange(0, std::memory_order_relaxed);
  return true;
}

}  // namespace mlpo
