#include "daemon/base/log.h"

#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <sys/stat.h>

#include <cstdlib>
#include <memory>

namespace mlpo {
namespace {

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

}  // namespace

void StartLogging(const std::string& level) {
  auto logger = std::make_shared<spdlog::logger>("mlpo-daemon", std::make_shared<spdlog::sinks::stderr_sink_mt>());
  auto formatter = std::make_unique<spdlog::pattern_formatter>();
  if (StderrIsJournal()) {
    formatter->add_flag<PriorityFlag>('*').set_pattern("%*%v");
  } else {
    formatter->set_pattern("%Y-%m-%dT%H:%M:%S.%e%z %l %v");
  }
  logger->set_formatter(std::move(formatter));
  logger->set_level(spdlog::level::from_str(level));
  logger->flush_on(spdlog::level::trace);
  spdlog::set_default_logger(std::move(logger));
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
