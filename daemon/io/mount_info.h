// Mount: a line of /proc/<pid>/mountinfo. No state; any thread.
#pragma once

#include <string>
#include <vector>

namespace mlpo {

struct Mount {
  std::string device;   // "<major>:<minor>"
  std::string root;     // what of the file system is seen at `point`
  std::string point;    // where
  std::string type;     // ext4, cgroup2
  std::string options;  // of the file system; for cgroup its controllers
};

// In the order of the text: of equal points the last is on top. Lines of another form are left out.
std::vector<Mount> ParseMountInfo(const std::string& text);

}  // namespace mlpo
