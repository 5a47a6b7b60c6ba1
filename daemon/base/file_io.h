// Files read and written to the end of what is asked for, whatever the kernel does at a time; the names in a folder;
// a name that moves.
//
// All of it may block on a slow or hung file system. Errors are an errno, 0 is none: what they are about, and what is
// to be done, callers know. Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace mlpo {

// All of it; ENOSPC for a write of nothing: a limit or a full file system cuts a write short before it says so.
int WriteAt(int fd, const void* data, size_t bytes, uint64_t offset);
// As many bytes as there are: *got of them, also before an error. Fewer than `bytes` without one: the file ends there.
int ReadAt(int fd, void* to, size_t bytes, uint64_t offset, size_t* got);
// Without "." and "..", in order.
int ListNames(int folder_fd, std::vector<std::string>* names);
// A file or folder, within one file system; EEXIST if the new name is taken. Where the kernel can look and move in one
// go only then: NFS, Lustre and CephFS cannot, and a file that comes in between is replaced, or a folder if it is
// empty.
int MoveToFreeName(int from_fd, const std::string& name, int to_fd, const std::string& new_name);

}  // namespace mlpo
