#include "daemon/control/counters_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>

#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/base/thread.h"
#include "daemon/control/live_counters.h"
#include "proto/counters.h"

namespace mlpo {
namespace {

template <size_t N>
void Put(char (&field)[N], const std::string& text) {
  std::memset(field, 0, N);
  std::memcpy(field, text.data(), std::min(text.size(), N - 1));
}

uint32_t StateNumber(const std::string& state) {
  if (state == "starting") return MLPO_COUNTERS_STARTING;
  return state == "draining" ? MLPO_COUNTERS_DRAINING : MLPO_COUNTERS_READY;
}

uint32_t PathStateNumber(const std::string& state) {
  static constexpr std::array<const char*, 7> kNames = {"healthy", "suspect",   "quarantined", "probing",
                                                        "full",    "read_only", "disabled"};
  const auto found = std::find(kNames.begin(), kNames.end(), state);
  return found == kNames.end() ? UINT32_MAX : static_cast<uint32_t>(found - kNames.begin());
}

mlpo_counters_path PathRecord(const PathSnapshot& path) {
  mlpo_counters_path record{};
  Put(record.name, path.name);
  Put(record.directory, path.directory);
  record.state = PathStateNumber(path.state);
  record.engine = path.engine == "io_uring" ? 0 : 1;
  record.direct_io = path.direct_io ? 1 : 0;
  record.in_flight = path.in_flight;
  record.read_bytes = path.read_bytes;
  record.written_bytes = path.written_bytes;
  record.read_bytes_per_s = static_cast<uint64_t>(path.read_bytes_per_s);
  record.write_bytes_per_s = static_cast<uint64_t>(path.write_bytes_per_s);
  record.scratch_bytes = path.scratch_bytes;
  record.checkpoint_bytes = path.checkpoint_bytes;
  record.read_errors = path.read_errors;
  record.write_errors = path.write_errors;
  return record;
}

mlpo_counters Header(const Snapshot& s) {
  mlpo_counters header{};
  header.magic = MLPO_COUNTERS_MAGIC;
  header.version = MLPO_COUNTERS_VERSION;
  header.bytes = static_cast<uint32_t>(sizeof(mlpo_counters) + s.paths.size() * sizeof(mlpo_counters_path));
  header.pid = s.pid;
  header.paths = static_cast<uint32_t>(s.paths.size());
  header.state = StateNumber(s.state);
  header.adam_workers = s.adam_workers;
  header.sessions = s.total_sessions;
  header.parameters = s.total_parameters;
  header.protocol_errors = s.protocol_errors;
  header.lost_wakeups = s.lost_wakeups;
  header.arenas_bytes = s.arenas_bytes;
  header.arenas_limit_bytes = s.arenas_limit_bytes;
  header.pool_bytes = s.pool.bytes;
  header.pool_buffer_bytes = s.pool.buffer_bytes;
  header.cached_blocks = s.pool.cached_blocks;
  header.dirty_blocks = s.pool.dirty_blocks;
  header.free_blocks = s.pool.free_blocks;
  Put(header.daemon_version, s.version);
  Put(header.node, s.node);
  return header;
}

}  // namespace

Result<std::unique_ptr<CountersFile>> CountersFile::Open(const std::string& path, const LiveCounters* live) {
  std::unique_ptr<CountersFile> file(new CountersFile(path, live));
  if (Status made = file->Make(); !made.ok()) return made;
  try {
    file->thread_ = std::thread([raw = file.get()] { raw->Run(); });
  } catch (const std::system_error& error) {
    return Status::Errno(error.code().value(), "starting the thread that writes " + path);
  }
  return file;
}

// Aside, locked and whole before it has its name. Nobody else makes this name: we hold the socket's lock, and the
// socket's folder lets nobody else remove or replace what is ours.
Status CountersFile::Make() {
  struct stat st;
  if (::lstat(path_.c_str(), &st) == 0) {
    if (st.st_uid != ::geteuid())
      return Status(-EPERM, path_ + " belongs to uid " + std::to_string(st.st_uid) + ": refused; have it removed");
    if (!S_ISREG(st.st_mode)) return Status(-EEXIST, path_ + " is not a regular file: remove it");
  }
  const std::string aside = path_ + ".new";
  if (::unlink(aside.c_str()) != 0 && errno != ENOENT) return Status::Errno(errno, "removing " + aside);
  fd_.reset(::open(aside.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!fd_) return Status::Errno(errno, "making " + aside);
  const auto fail = [&](const char* what) {
    const Status status = Status::Errno(errno, std::string(what) + " " + aside);
    (void)::unlink(aside.c_str());  // the first error is the one to report
    fd_.reset();
    return status;
  };
  // Totals and paths are for everybody who reaches the folder, as on the control socket.
  if (::fchmod(fd_.get(), 0644) != 0) return fail("setting the mode of");
  if (::flock(fd_.get(), LOCK_EX | LOCK_NB) != 0) return fail("locking");
  if (Status written = Write(); !written.ok()) {
    (void)::unlink(aside.c_str());
    fd_.reset();
    return written;
  }
  if (::rename(aside.c_str(), path_.c_str()) != 0) return fail("naming");
  return Status();
}

CountersFile::~CountersFile() {
  if (thread_.joinable()) {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_one();
    thread_.join();
  }
  if (!fd_) return;
  struct stat held, named;
  if (::fstat(fd_.get(), &held) == 0 && ::lstat(path_.c_str(), &named) == 0 && held.st_ino == named.st_ino &&
      held.st_dev == named.st_dev && ::unlink(path_.c_str()) != 0)
    spdlog::warn("event=remove_failed file={} errno={}", path_, errno);
}

Status CountersFile::Write() {
  const Snapshot snapshot = live_->Take();
  mlpo_counters header = Header(snapshot);
  header.started_ns = live_->started_ns();
  header.main_beat_ns = live_->main_beat_ns();
  header.data_beat_ns = live_->data_beat_ns();
  header.written_ns = NowNs();
  header.sequence = sequence_ + 1;  // odd: being written
  page_.resize(header.bytes);
  std::memcpy(page_.data(), &header, sizeof header);
  for (size_t i = 0; i < snapshot.paths.size(); ++i) {
    const mlpo_counters_path record = PathRecord(snapshot.paths[i]);
    std::memcpy(page_.data() + sizeof header + i * sizeof record, &record, sizeof record);
  }
  const auto put = [&](const void* data, size_t bytes, off_t offset) {
    const ssize_t wrote = ::pwrite(fd_.get(), data, bytes, offset);
    if (wrote == static_cast<ssize_t>(bytes)) return Status();
    return Status::Errno(wrote < 0 ? errno : ENOSPC, "writing " + path_);
  };
  constexpr off_t kSequenceAt = offsetof(mlpo_counters, sequence);
  Status status = put(&header.sequence, sizeof header.sequence, kSequenceAt);
  if (status.ok()) status = put(page_.data(), page_.size(), 0);
  sequence_ += 2;
  if (status.ok()) status = put(&sequence_, sizeof sequence_, kSequenceAt);
  return status;
}

void CountersFile::Run() {
  SetThreadName("mlpo-counters");
  RateLimit failures(60 * kNsPerS);
  std::unique_lock lock(mutex_);
  while (!wake_.wait_for(lock, std::chrono::nanoseconds(MLPO_COUNTERS_PERIOD_NS), [this] { return stopping_; })) {
    lock.unlock();
    uint64_t suppressed = 0;
    if (Status status = Write(); !status.ok() && failures.Allow(NowNs(), &suppressed))
      spdlog::warn("event=counters_not_written suppressed={} reason=\"{}\"", suppressed, status.message());
    lock.lock();
  }
}

}  // namespace mlpo
