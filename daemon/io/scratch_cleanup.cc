#include "daemon/io/scratch_cleanup.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "daemon/base/log.h"
#include "daemon/base/unique_fd.h"
#include "daemon/io/file_header.h"
#include "daemon/io/path_folders.h"
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
  UniqueFd own(::openat(folder_fd, ".", kFolderFlags));
  if (!own) return PathError(errno, "listing", shown);
  std::unique_ptr<DIR, int (*)(DIR*)> folder(::fdopendir(own.get()), ::closedir);
  if (folder == nullptr) return PathError(errno, "listing", shown);
  own.release();
  std::vector<std::string> names;
  while (true) {
    errno = 0;
    const dirent* entry = ::readdir(folder.get());
    if (entry == nullptr) break;
    if (std::strcmp(entry->d_name, ".") != 0 && std::strcmp(entry->d_name, "..") != 0) names.push_back(entry->d_name);
  }
  if (errno != 0) return PathError(errno, "listing", shown);
  return names;
}

class Cleanup {
 public:
  Cleanup(int node_fd, const std::string& node, const std::string& shown)
      : node_fd_(node_fd), node_(node), shown_(shown) {}

  Result<CleanupResult> Run() {
    Result<std::vector<std::string>> jobs = List(node_fd_, shown_);
    if (!jobs.ok()) return jobs.status();
    for (const std::string& name : *jobs) {
      const auto job = SplitNumber<uint32_t>(name);
      if (!job || !IsFolderName(job->second)) continue;  // the lock, a journal, a stranger
      const Status done = CleanJob(name, {job->first, std::string(job->second), 0, 0});
      if (!done.ok()) return done;
    }
    return result_;
  }

 private:
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
    const Status ours = CheckFileHeader(file.get(), {node_, ::geteuid(), owner});
    if (!ours.ok()) {
      ++result_.kept;
      spdlog::warn("event=scratch_kept file={}/{} reason=\"{}\"", shown, kStateFile, ours.message());
      return Status();
    }
    if (::unlinkat(folder.get(), kStateFile, 0) != 0) return PathError(errno, "removing a dead session's", shown);
    ++result_.removed;
    result_.bytes += static_cast<uint64_t>(st.st_blocks) * 512;
    return RemoveFolder(job_fd, name, shown);
  }

  // A folder that is not empty holds something that is not ours to remove: it stays.
  Status RemoveFolder(int parent_fd, const std::string& name, const std::string& shown) {
    if (::unlinkat(parent_fd, name.c_str(), AT_REMOVEDIR) == 0) return Status();
    if (errno == ENOTEMPTY || errno == EEXIST) return Keep(shown, ENOTEMPTY);
    return PathError(errno, "removing", shown);
  }

  Status Keep(const std::string& what, int error) {
    ++result_.kept;
    spdlog::warn("event=scratch_kept file={} errno={} reason=\"not a file that this daemon wrote\"", what, error);
    return Status();
  }

  const int node_fd_;
  const std::string& node_;
  const std::string& shown_;
  CleanupResult result_;
};

}  // namespace

Result<CleanupResult> RemoveDeadScratch(int node_fd, const std::string& node, const std::string& shown) {
  return Cleanup(node_fd, node, shown).Run();
}

}  // namespace mlpo
