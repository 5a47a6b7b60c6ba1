#include "daemon/io/scratch_cleanup.h"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <optional>
#include <string_view>
#include <system_error>
#include <vector>

#include "daemon/base/file_io.h"
#include "daemon/base/name.h"
#include "daemon/base/unique_fd.h"
#include "daemon/io/file_header.h"
#include "daemon/io/path_folders.h"
#include "daemon/io/path_record.h"
#include "daemon/io/scratch_layout.h"

namespace mlpo {
namespace {

constexpr int kFolderFlags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;

// "<number>-<rest>", written as we write it: no sign, no leading zero. nullopt if it is something else.
template <class Number>
std::optional<std::pair<Number, std::string_view>> SplitNumber(std::string_view name) {
  Number number = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), number);
  if (error != std::errc() || end == name.data() + name.size() || *end != '-') return std::nullopt;
  const std::string_view rest = name.substr(static_cast<size_t>(end - name.data()) + 1);
  if (name != std::to_string(number) + "-" + std::string(rest)) return std::nullopt;
  return std::make_pair(number, rest);
}

// The names in a folder, without "." and "..".
Result<std::vector<std::string>> List(int folder_fd, const std::string& shown) {
  std::vector<std::string> names;
  if (const int error = ListNames(folder_fd, &names); error != 0) return PathError(error, "listing", shown);
  return names;
}

class Cleanup {
 public:
  Cleanup(int node_fd, const std::string& node, const std::string& shown, const CleanupOptions& options)
      : node_fd_(node_fd), node_(node), shown_(shown), options_(options) {
    report_.dry_run = options.dry_run;
  }

  Result<GcReport> Run() {
    Result<std::vector<std::string>> jobs = List(node_fd_, shown_);
    if (!jobs.ok()) return jobs.status();
    for (const std::string& name : *jobs) {
      if (name == std::string(kRecordFile) + ".new" || name == kProbeFile || name.starts_with(kNowFile)) {
        const Status done = RemoveHalfMade(name);
        if (!done.ok()) return done;
        continue;
      }
      const auto job = SplitNumber<uint32_t>(name);
      if (!job || !IsName(job->second)) continue;  // the lock, a journal, a stranger
      const Status done = CleanJob(name, {job->first, std::string(job->second), 0, 0});
      if (!done.ok()) return done;
    }
    if (options_.journal) {
      const Status done = options_.journal(node_fd_, options_.dry_run, &report_);
      if (!done.ok()) return done;
    }
    return report_;
  }

 private:
  Status RemoveHalfMade(const std::string& name) {
    struct stat st;
    if (::fstatat(node_fd_, name.c_str(), &st, AT_SYMLINK_NOFOLLOW) != 0)
      return errno == ENOENT ? Status() : PathError(errno, "looking at", shown_ + "/" + name);
    if (!S_ISREG(st.st_mode) || st.st_uid != ::geteuid()) return Keep(shown_ + "/" + name, EPERM);
    return RemoveFile(node_fd_, name, shown_ + "/" + name, st, "it was being made when its daemon ended");
  }

  Status RemoveFile(int folder_fd, const std::string& name, const std::string& shown, const struct stat& st,
                    const std::string& why) {
    if (!options_.dry_run && ::unlinkat(folder_fd, name.c_str(), 0) != 0)
      return PathError(errno, "removing a dead session's", shown);
    report_.removed.push_back({shown, static_cast<uint64_t>(st.st_blocks) * 512, why});
    return Status();
  }

  Status CleanJob(const std::string& name, FileOwner owner) {
    const std::string shown = shown_ + "/" + name;
    UniqueFd folder(::openat(node_fd_, name.c_str(), kFolderFlags));
    if (!folder) return Keep(shown, errno);
    Result<std::vector<std::string>> ranks = List(folder.get(), shown);
    if (!ranks.ok()) return ranks.status();
    for (const std::string& rank_name : *ranks) {
      const std::string objects = std::string(kObjectsFolder) + "-";
      const auto rank = rank_name.starts_with(objects)
                            ? std::make_pair(kObjectsRank, std::string_view(rank_name).substr(objects.size()))
                            : SplitNumber<uint32_t>(rank_name);
      const std::string tail = rank ? std::string(rank->second) + "-" : "";
      const auto generation = SplitNumber<uint64_t>(tail);
      if (!generation || !generation->second.empty()) {
        (void)Keep(shown + "/" + rank_name, 0);
        continue;
      }
      owner.rank = rank->first;
      owner.generation = generation->first;
      const Status done = CleanRank(folder.get(), rank_name, owner, shown + "/" + rank_name);
      if (!done.ok()) return done;
    }
    return RemoveFolder(node_fd_, name, shown);
  }

  Status CleanRank(int job_fd, const std::string& name, const FileOwner& owner, const std::string& shown) {
    if (options_.is_live && options_.is_live(owner)) return Status();
    UniqueFd folder(::openat(job_fd, name.c_str(), kFolderFlags));
    if (!folder) return Keep(shown, errno);
    UniqueFd file(::openat(folder.get(), kStateFile, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    if (!file) {
      if (errno == ENOENT) return RemoveFolder(job_fd, name, shown);
      return Keep(shown + "/" + kStateFile, errno);
    }
    struct stat st;
    if (::fstat(file.get(), &st) != 0) return PathError(errno, "looking at", shown);
    if (!S_ISREG(st.st_mode) || st.st_uid != ::geteuid()) return Keep(shown + "/" + kStateFile, EPERM);
    const std::string state = shown + "/" + kStateFile;
    std::string why = "it was made, and its daemon ended before it had its header";
    if (st.st_size > 0) {
      const Status ours = CheckFileHeader(file.get(), {node_, ::geteuid(), owner});
      if (!ours.ok()) {
        report_.kept.push_back({state, 0, ours.message()});
        return Status();
      }
      why = "its session is gone";
    }
    const Status removed = RemoveFile(folder.get(), kStateFile, state, st, why);
    return removed.ok() ? RemoveFolder(job_fd, name, shown) : removed;
  }

  // A folder that is not empty holds something that is in use, or not ours to remove: it stays.
  Status RemoveFolder(int parent_fd, const std::string& name, const std::string& shown) {
    if (options_.dry_run || ::unlinkat(parent_fd, name.c_str(), AT_REMOVEDIR) == 0) return Status();
    if (options_.is_live && (errno == ENOTEMPTY || errno == EEXIST)) return Status();
    if (errno == ENOTEMPTY || errno == EEXIST) return Keep(shown, ENOTEMPTY);
    return PathError(errno, "removing", shown);
  }

  Status Keep(const std::string& what, int error) {
    const std::string reason = error == 0 ? "" : ": " + std::generic_category().message(error);
    report_.kept.push_back({what, 0, "not a file that this daemon wrote" + reason});
    return Status();
  }

  const int node_fd_;
  const std::string& node_;
  const std::string& shown_;
  const CleanupOptions& options_;
  GcReport report_;
};

// A folder that is there, ours and no link; an invalid descriptor if there is none.
Result<UniqueFd> OpenThere(int parent_fd, const std::string& name, const std::string& shown) {
  UniqueFd fd(::openat(parent_fd, name.c_str(), kFolderFlags));
  if (!fd && errno == ENOENT) return fd;
  if (!fd) return PathError(errno, "opening", shown);
  struct stat st;
  if (::fstat(fd.get(), &st) != 0) return PathError(errno, "looking at", shown);
  if (name != kTopFolder && st.st_uid != ::geteuid())
    return Status(-EPERM, shown + " belongs to uid " + std::to_string(st.st_uid) + ", not to uid " +
                              std::to_string(::geteuid()) + ": run gc as that user");
  return fd;
}

// What the file system takes to be now, in seconds.
Result<int64_t> FileSystemNow(int folder_fd, const std::string& shown) {
  uint64_t random = 0;
  if (::getrandom(&random, sizeof random, 0) != sizeof random) return Status::Errno(errno, "getrandom");
  const std::string name = kNowFile + std::to_string(random);
  UniqueFd fd(::openat(folder_fd, name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!fd) return PathError(errno, "making a file in", shown);
  struct stat st;
  int error = ::pwrite(fd.get(), "x", 1, 0) == 1 ? 0 : errno;
  if (error == 0 && ::fstat(fd.get(), &st) != 0) error = errno;
  if (::unlinkat(folder_fd, name.c_str(), 0) != 0 && error == 0) error = errno;
  if (error != 0) return PathError(error, "asking for the time of", shown);
  return static_cast<int64_t>(st.st_mtime);
}

// Whether its daemon is surely gone: the lock, held from now on; an invalid descriptor if there never was one. EBUSY
// with who has it.
Result<UniqueFd> LockDeadNode(int node_fd, const std::string& shown) {
  UniqueFd lock(::openat(node_fd, kLockFile, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (!lock && errno == ENOENT) return lock;
  if (!lock) return PathError(errno, "opening the lock file in", shown);
  struct stat st;
  if (::fstat(lock.get(), &st) != 0) return PathError(errno, "looking at the lock file in", shown);
  if (!S_ISREG(st.st_mode)) return Status(-EPERM, "the lock file in " + shown + " is not a regular file");
  const NodeHolder holder = ReadHolder(lock.get());
  if (!TryLock(lock.get())) {
    if (errno != EWOULDBLOCK) return PathError(errno, "locking", shown);
    return Status(-EBUSY, shown + " is in use by a daemon (" + holder.text + "): ask that one");
  }
  char host[256] = "";
  if (::gethostname(host, sizeof host - 1) != 0) return Status::Errno(errno, "gethostname");
  if (holder.host == host) return lock;
  const Result<int64_t> now_s = FileSystemNow(node_fd, shown);
  if (!now_s.ok()) return now_s.status();
  const int64_t age_s = now_s.value() - static_cast<int64_t>(st.st_mtime);
  if (age_s >= kDeadAfterS) return lock;
  return Status(-EBUSY, shown + " was touched " + std::to_string(age_s) + " s ago by a daemon on another host (" +
                            holder.text + "), and locks may not reach it: it counts as gone after " +
                            std::to_string(kDeadAfterS) + " s");
}

}  // namespace

Result<GcReport> CleanScratch(int node_fd, const std::string& node, const std::string& shown,
                              const CleanupOptions& options) {
  return Cleanup(node_fd, node, shown, options).Run();
}

Result<GcReport> CleanNode(const std::string& directory, const std::string& node, const CleanupOptions& options) {
  if (!IsName(node)) return Status::Invalid("\"" + node + "\" is no node's name");
  GcReport nothing;
  nothing.dry_run = options.dry_run;
  Result<UniqueFd> folder = OpenPathDirectory(directory);
  std::string shown = directory;
  for (const std::string& name : {std::string(kTopFolder), std::to_string(::geteuid()), node}) {
    if (!folder.ok()) return folder.status();
    if (!*folder) return nothing;
    shown += "/" + name;
    folder = OpenThere(folder->get(), name, shown);
  }
  if (!folder.ok()) return folder.status();
  if (!*folder) return nothing;
  const Result<UniqueFd> lock = LockDeadNode(folder->get(), shown);
  if (!lock.ok()) return lock.status();
  return CleanScratch(folder->get(), node, shown, options);
}

}  // namespace mlpo
