// File and folder operations of checkpoints: by one name at a time, never through a link, each made durable where the
// order of a commit needs it.
//
// A name comes from names.h or is a tag that has passed IsName: none has a slash or is "..". Everything may block on a
// slow or hung file system: called in threads of saves and restores only. `shown` is the full name for messages; errors
// carry the errno.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/base/status.h"
#include "daemon/base/unique_fd.h"

namespace mlpo {

// The seam through which tests stop a process between any two steps that change what is on storage: told the step's
// name and what it is about, before it. Only tests set it, before threads use this.
using StepHook = std::function<void(std::string_view step, std::string_view shown)>;
void SetStepHook(StepHook hook);

// Of a name for messages: that of the folder it is in.
std::string ParentOf(const std::string& shown);

// The directory that the user named: absolute; links in it are the user's own, and followed.
Result<UniqueFd> OpenCheckpointDirectory(const std::string& directory);

// A folder below. ELOOP or ENOTDIR if something else is in its place.
Result<UniqueFd> OpenFolder(int parent_fd, const std::string& name, const std::string& shown);
// Made with mode 0700 if it is not there, and its entry made durable. EPERM if it is somebody else's, or others may
// write to it.
Result<UniqueFd> MakeFolder(int parent_fd, const std::string& name, const std::string& shown);
// Without "." and "..", in order.
Result<std::vector<std::string>> ListFolder(int folder_fd, const std::string& shown);
Status SyncFolder(int folder_fd, const std::string& shown);
// False if it is not empty, or not there.
Result<bool> RemoveEmptyFolder(int parent_fd, const std::string& name, const std::string& shown);

// A regular file below, with these flags of open(2). EINVAL if it is none.
Result<UniqueFd> OpenFile(int folder_fd, const std::string& name, int flags, const std::string& shown);
// The same of what is to be believed: EPERM unless it belongs to this user, to root, or to the owner of the directory
// of checkpoints. Anybody may have put something into one that a group can write to. `directory`: that one's place from
// the parent: "." of a tag's folder, ".." of a part's. A file is in a part's folder.
Result<UniqueFd> OpenBelievedFolder(int parent_fd, const std::string& name, const char* directory,
                                    const std::string& shown);
Result<UniqueFd> OpenBelievedFile(int folder_fd, const std::string& name, int flags, const std::string& shown);
// A new file, mode 0600, for reading and writing: without a name yet (EOPNOTSUPP, EISDIR or the like where the file
// system cannot), or with one (EEXIST if it is taken).
Result<UniqueFd> MakeNamelessFile(int folder_fd, const std::string& shown);
Result<UniqueFd> MakeFile(int folder_fd, const std::string& name, const std::string& shown);
// EEXIST if it is taken. Durable with the next SyncFolder.
Status GiveName(int fd, int folder_fd, const std::string& name, const std::string& shown);
// From one folder to another of the same file system: EXDEV and the like, EEXIST if the name is taken, and it is where
// it was. Durable with SyncFolder of both. `new_name` is one that only its owner makes up (it has an attempt's number
// in it): see MoveToFreeName.
Status MoveFile(int from_fd, const std::string& name, int to_fd, const std::string& new_name, const std::string& shown,
                const std::string& new_shown);
// False if it is not there.
Result<bool> RemoveFile(int folder_fd, const std::string& name, const std::string& shown);
Result<uint64_t> InodeOf(int fd, const std::string& shown);
// Whether there is anything of that name.
Result<bool> IsThere(int folder_fd, const std::string& name, const std::string& shown);
// Whether the name in the folder is that of the open file; false if it is another's or nobody's.
Result<bool> IsNamed(int folder_fd, const std::string& name, int fd, const std::string& shown);

// Which folder it is, whatever stands under its name later: another one made there, another file system mounted there.
// `file_system` may change with a restart of the machine (XFS), so that equal marks are one folder, and other ones may
// be.
struct FolderMark {
  uint64_t inode = 0;
  uint64_t file_system = 0;  // statfs(2)'s number, its kind where it has none; never 0 of a folder that is there
  bool operator==(const FolderMark&) const = default;
};
Result<FolderMark> MarkOf(int folder_fd, const std::string& shown);
// Of the folder that this one is in.
Result<FolderMark> MarkOfParent(int folder_fd, const std::string& shown);

// flock(2): lets go with UnlockFile, with the last copy of the descriptor, or with the process. Never waits.
enum class FileLock : uint8_t {
  kTaken,
  kHeld,    // by somebody else, so that this one has none
  kUnknown  // the file system has no such locks
};
Result<FileLock> LockFile(int fd, bool shared, const std::string& shown);
Status UnlockFile(int fd, const std::string& shown);

// All of it, whatever the kernel takes at a time. ENOSPC for a write of nothing.
Status WriteAll(int fd, const void* data, size_t bytes, uint64_t offset, const std::string& shown);
Status SyncData(int fd, const std::string& shown);
// Of a file that is to be believed. EINVAL if it has more than `max_bytes`.
Result<std::string> ReadText(int folder_fd, const std::string& name, uint64_t max_bytes, const std::string& shown);
// Of a file's beginning, as many bytes as there are.
Result<std::string> ReadBeginning(int fd, size_t max_bytes, const std::string& shown);
// The file `name` has this text, durably, or is as it was: written as `new_name`, synced, renamed, the folder synced.
Status CommitText(int folder_fd, const std::string& new_name, const std::string& name, std::string_view text,
                  const std::string& shown);

}  // namespace mlpo
