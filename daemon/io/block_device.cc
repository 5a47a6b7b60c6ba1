#include "daemon/io/block_device.h"

#include <fstream>
#include <set>
#include <system_error>

namespace mlpo {
namespace {

namespace fs = std::filesystem;

constexpr int kDepth = 8;  // device mapper on md on partitions, with room

void AddDrives(const fs::path& device, std::set<fs::path>* drives, int depth) {
  std::error_code error;
  if (depth > kDepth) return;
  if (fs::exists(device / "partition", error)) return AddDrives(device.parent_path(), drives, depth + 1);
  std::vector<fs::path> below;
  for (fs::directory_iterator it(device / "slaves", error), end; !error && it != end; it.increment(error)) {
    const fs::path slave = fs::canonical(it->path(), error);
    if (!error) below.push_back(slave);
  }
  if (below.empty()) drives->insert(device);
  for (const fs::path& each : below) AddDrives(each, drives, depth + 1);
}

// Of the nearest device above that has one: a PCI function.
int NodeOf(const fs::path& drive, const fs::path& top) {
  for (fs::path folder = drive; folder != top && folder.has_relative_path(); folder = folder.parent_path()) {
    int node = -1;
    std::ifstream file(folder / "numa_node");
    if (file >> node) return node;
  }
  return -1;
}

}  // namespace

std::vector<fs::path> DrivesBelow(const std::string& root, unsigned major_number, unsigned minor_number) {
  std::error_code error;
  const fs::path device = fs::canonical(
      root + "/sys/dev/block/" + std::to_string(major_number) + ":" + std::to_string(minor_number), error);
  if (error) return {};
  std::set<fs::path> drives;
  AddDrives(device, &drives, 0);
  return {drives.begin(), drives.end()};
}

int DriveNode(const std::string& root, unsigned major_number, unsigned minor_number) {
  std::error_code error;
  const fs::path top = fs::canonical(root + "/sys", error);
  std::set<int> nodes;
  for (const fs::path& drive : DrivesBelow(root, major_number, minor_number)) nodes.insert(NodeOf(drive, top));
  return nodes.size() == 1 ? *nodes.begin() : -1;
}

}  // namespace mlpo
