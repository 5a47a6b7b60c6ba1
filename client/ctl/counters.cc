#include "client/ctl/counters.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <nlohmann/json.hpp>
#include <vector>

#include "client/src/socket_path.h"
#include "mlpo/client.h"
#include "proto/counters.h"

namespace mlpo::ctl {
namespace {

using nlohmann::ordered_json;

constexpr int kAttempts = 50;  // to see the file between two writes
constexpr long kAttemptPauseNs = 2'000'000;
constexpr const char* kStates[] = {"starting", "ready", "draining"};
constexpr const char* kPathStates[] = {"healthy", "suspect", "quarantined", "probing", "full", "read_only", "disabled"};

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

int64_t NowNs() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{1'000'000'000} * now.tv_sec + now.tv_nsec;
}

template <size_t N>
std::string Text(const char (&field)[N]) {
  return std::string(field, ::strnlen(field, N));
}
template <size_t N>
const char* Name(const char* const (&names)[N], uint32_t number) {
  return number < N ? names[number] : "?";
}

struct Contents {
  mlpo_counters header{};
  std::vector<mlpo_counters_path> paths;
};

// One look at the file. "" or what is wrong with it; *torn if the daemon was writing meanwhile.
std::string Look(int fd, Contents* contents, bool* torn) {
  struct stat st;
  if (::fstat(fd, &st) != 0) return ::strerror(errno);
  if (!S_ISREG(st.st_mode)) return "it is not a regular file";
  if (st.st_size > MLPO_COUNTERS_MAX_BYTES) return "it has " + std::to_string(st.st_size) + " bytes, which is too many";
  std::vector<char> bytes(static_cast<size_t>(st.st_size));
  const ssize_t got = ::pread(fd, bytes.data(), bytes.size(), 0);
  if (got < 0) return ::strerror(errno);
  bytes.resize(static_cast<size_t>(got));
  mlpo_counters& header = contents->header;
  if (bytes.size() < sizeof header) return "it is cut short: " + std::to_string(bytes.size()) + " bytes";
  std::memcpy(&header, bytes.data(), sizeof header);
  if (header.magic != MLPO_COUNTERS_MAGIC) return "it does not begin as a counters file does";
  if (header.version != MLPO_COUNTERS_VERSION)
    return "its layout is version " + std::to_string(header.version) + ", and this mlpo-ctl knows version " +
           std::to_string(MLPO_COUNTERS_VERSION) + ": use the mlpo-ctl that came with the daemon";
  if (header.bytes != bytes.size() ||
      uint64_t{header.paths} * sizeof(mlpo_counters_path) + sizeof header != bytes.size())
    return "it has " + std::to_string(bytes.size()) + " bytes, and says " + std::to_string(header.bytes) + " with " +
           std::to_string(header.paths) + " paths";
  contents->paths.resize(header.paths);
  for (size_t i = 0; i < contents->paths.size(); ++i)
    std::memcpy(&contents->paths[i], bytes.data() + sizeof header + i * sizeof(mlpo_counters_path),
                sizeof(mlpo_counters_path));
  uint64_t sequence = 0;
  const ssize_t again = ::pread(fd, &sequence, sizeof sequence, offsetof(mlpo_counters, sequence));
  *torn = again != sizeof sequence || sequence != header.sequence || sequence % 2 != 0;
  return "";
}

double SecondsSince(int64_t then_ns, int64_t now_ns) {
  return then_ns >= now_ns ? 0 : (static_cast<double>(now_ns) - static_cast<double>(then_ns)) / 1e9;
}

ordered_json Paths(const Contents& contents) {
  ordered_json all = ordered_json::array();
  for (const mlpo_counters_path& p : contents.paths) {
    all.push_back({{"name", Text(p.name)},
                   {"directory", Text(p.directory)},
                   {"state", Name(kPathStates, p.state)},
                   {"engine", p.engine == 0 ? "io_uring" : "threads"},
                   {"direct_io", p.direct_io != 0},
                   {"read_bytes", p.read_bytes},
                   {"written_bytes", p.written_bytes},
                   {"read_bytes_per_s", p.read_bytes_per_s},
                   {"write_bytes_per_s", p.write_bytes_per_s},
                   {"scratch_bytes", p.scratch_bytes},
                   {"checkpoint_bytes", p.checkpoint_bytes},
                   {"read_errors", p.read_errors},
                   {"write_errors", p.write_errors},
                   {"in_flight", p.in_flight}});
  }
  return all;
}

// Which threads are late. One of them alone is stuck; all three: the whole daemon is stopped (SIGSTOP, a frozen
// cgroup), or waits for memory.
ordered_json Beats(const mlpo_counters& c, int64_t now_ns) {
  ordered_json late = ordered_json::array();
  const auto is_late = [&](int64_t beat_ns) { return beat_ns < now_ns - MLPO_COUNTERS_LATE_NS; };
  if (is_late(c.main_beat_ns)) late.push_back("main");
  if (is_late(c.data_beat_ns)) late.push_back("data");
  if (is_late(c.written_ns)) late.push_back("counters");
  return {{"written_s", SecondsSince(c.written_ns, now_ns)},
          {"main_s", SecondsSince(c.main_beat_ns, now_ns)},
          {"data_s", SecondsSince(c.data_beat_ns, now_ns)},
          {"not_answering", late}};
}

ordered_json AsStatus(const Contents& contents, const std::string& socket) {
  const mlpo_counters& c = contents.header;
  const int64_t now_ns = NowNs();
  std::string state = Name(kStates, c.state);
  const auto healthy = [](const mlpo_counters_path& path) { return path.state == MLPO_COUNTERS_HEALTHY; };
  if (c.state == MLPO_COUNTERS_READY && !std::all_of(contents.paths.begin(), contents.paths.end(), healthy))
    state = "degraded";
  return {{"state", state},
          {"version", Text(c.daemon_version)},
          {"node", Text(c.node)},
          {"socket", socket},
          {"pid", c.pid},
          {"uptime_s", SecondsSince(c.started_ns, now_ns)},
          {"adam_workers", c.adam_workers},
          {"protocol_errors", c.protocol_errors},
          {"lost_wakeups", c.lost_wakeups},
          {"arenas_bytes", c.arenas_bytes},
          {"arenas_limit_bytes", c.arenas_limit_bytes},
          {"totals", {{"sessions", c.sessions}, {"parameters", c.parameters}}},
          {"sessions", ordered_json::array()},
          {"paths", Paths(contents)},
          {"pool",
           {{"bytes", c.pool_bytes},
            {"buffer_bytes", c.pool_buffer_bytes},
            {"cached_blocks", c.cached_blocks},
            {"dirty_blocks", c.dirty_blocks},
            {"free_blocks", c.free_blocks}}},
          {"counters", Beats(c, now_ns)}};
}

}  // namespace

std::optional<ordered_json> ReadCounters(const std::string& given, std::string* problem) {
  char socket[112];
  if (client::FindSocket(given.empty() ? nullptr : given.c_str(), socket, sizeof socket) != 0) {
    *problem = mlpo_last_error();
    return std::nullopt;
  }
  const std::string name = std::string(socket) + MLPO_COUNTERS_SUFFIX;
  const auto fail = [&](const std::string& why) {
    *problem = name + ": " + why;
    return std::nullopt;
  };
  const Descriptor file(::open(name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
  if (file.get() < 0) return fail(::strerror(errno));
  Contents contents;
  bool torn = true;
  for (int i = 0; i < kAttempts && torn; ++i) {
    // A daemon that is stopped while it writes leaves it so: then what is there is shown.
    if (const std::string wrong = Look(file.get(), &contents, &torn); !wrong.empty()) return fail(wrong);
    const timespec pause{0, kAttemptPauseNs};
    if (torn) ::nanosleep(&pause, nullptr);
  }
  if (::flock(file.get(), LOCK_SH | LOCK_NB) == 0) return fail("the daemon that wrote it has died");
  if (errno != EWOULDBLOCK) return fail(std::string("flock: ") + ::strerror(errno));
  return AsStatus(contents, socket);
}

}  // namespace mlpo::ctl
