// CheckDistinctPaths: two paths must not be one place, whatever their names are.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <cerrno>
#include <climits>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "daemon/base/unique_fd.h"
#include "daemon/io/mount_info.h"
#include "daemon/io/path.h"
#include "daemon/io/path_folders.h"

namespace mlpo {
namespace {

// A directory by its resolved name, by inode, and by its place in its own file system: bind mounts and links have
// other names for the same place.
struct Place {
  std::string name;       // resolved
  std::string in_device;  // "<major>:<minor>" and the name from the file system's root; "" if unknown
  dev_t device = 0;
  ino_t inode = 0;
};

// True for `inner` equal to or below `outer`.
bool Contains(const std::string& outer, const std::string& inner) {
  if (outer == inner || outer == "/") return true;
  return inner.starts_with(outer) && inner[outer.size()] == '/';
}

std::string PlaceInDevice(const std::vector<Mount>& mounts, const std::string& name) {
  size_t best = 0;
  std::string place;
  for (const Mount& mount : mounts) {
    // The longest mount point is the one we are on; of equal ones the later is on top.
    if (!Contains(mount.point, name) || mount.point.size() < best) continue;
    best = mount.point.size();
    const std::string below = mount.point == "/" ? name : name.substr(mount.point.size());
    place = mount.device + " " + (mount.root == "/" ? "" : mount.root) + (below == "/" ? "" : below);
  }
  return place;
}

Result<Place> Locate(const std::vector<Mount>& mounts, const std::string& directory) {
  Result<UniqueFd> fd = OpenPathDirectory(directory);
  if (!fd.ok()) return fd.status();
  struct stat st;
  if (::fstat(fd->get(), &st) != 0) return PathError(errno, "looking at the path directory", directory);
  char resolved[PATH_MAX];
  if (::realpath(directory.c_str(), resolved) == nullptr)
    return PathError(errno, "resolving the path directory", directory);
  return Place{resolved, PlaceInDevice(mounts, resolved), st.st_dev, st.st_ino};
}

bool Inside(const Place& outer, const Place& inner) {
  return Contains(outer.name, inner.name) ||
         (!outer.in_device.empty() && !inner.in_device.empty() && Contains(outer.in_device, inner.in_device));
}

}  // namespace

Status CheckDistinctPaths(const std::vector<PathConfig>& paths) {
  std::ifstream file("/proc/self/mountinfo");  // without it names and inodes are compared
  std::ostringstream text;
  text << file.rdbuf();
  const std::vector<Mount> mounts = ParseMountInfo(text.str());
  std::vector<Place> places;
  for (const PathConfig& path : paths) {
    Result<Place> place = Locate(mounts, path.directory);
    if (!place.ok()) return place.status();
    for (size_t i = 0; i < places.size(); ++i) {
      const Place &a = places[i], &b = *place;
      const std::string& a_given = paths[i].directory;
      if ((a.device == b.device && a.inode == b.inode) || a.name == b.name)
        return Status(-EEXIST, "the paths " + a_given + " and " + path.directory + " are the same directory (" +
                                   b.name + "); name each directory once");
      const bool a_outer = Inside(a, b);
      if (a_outer || Inside(b, a))
        return Status(-EEXIST, "the path " + (a_outer ? path.directory : a_given) + " lies inside the path " +
                                   (a_outer ? a_given : path.directory) + "; use directories beside each other");
    }
    places.push_back(std::move(*place));
  }
  return Status();
}

}  // namespace mlpo
