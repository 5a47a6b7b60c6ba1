// The drives under a file system, as the kernel's /sys has them. No state; any thread.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace mlpo {

// The /sys folders of the whole drives below a device: of a partition its drive, of RAID and device mapper what they
// are made of. Empty for what is no block device (NFS, tmpfs, overlay, btrfs). `root` goes before /sys.
std::vector<std::filesystem::path> DrivesBelow(const std::string& root, unsigned major_number, unsigned minor_number);

// The NUMA node that all of them are attached to; -1 if the kernel does not say, or they are on several.
int DriveNode(const std::string& root, unsigned major_number, unsigned minor_number);

}  // namespace mlpo
