// What the kernel counts for the block devices below directories: another word than the daemon's on what was moved.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace mlpo::bench {

struct DeviceBytes {
  uint64_t read = 0;
  uint64_t written = 0;
};
// Of all devices together since they came up, each once. Nothing where a directory is on no block device (tmpfs, NFS,
// file systems over several devices).
std::optional<DeviceBytes> BytesOfDevices(const std::vector<std::string>& directories);

}  // namespace mlpo::bench
