#include "daemon/bench/device_bytes.h"

#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <fstream>
#include <set>

namespace mlpo::bench {

std::optional<DeviceBytes> BytesOfDevices(const std::vector<std::string>& directories) {
  std::set<dev_t> devices;
  for (const std::string& directory : directories) {
    struct stat st;
    if (::stat(directory.c_str(), &st) != 0) return std::nullopt;
    devices.insert(st.st_dev);
  }
  DeviceBytes sum;
  for (const dev_t device : devices) {
    std::ifstream file("/sys/dev/block/" + std::to_string(major(device)) + ":" + std::to_string(minor(device)) +
                       "/stat");
    uint64_t reads, reads_merged, read_sectors, read_ms, writes, writes_merged, written_sectors;
    if (!(file >> reads >> reads_merged >> read_sectors >> read_ms >> writes >> writes_merged >> written_sectors)) {
      return std::nullopt;
    }
    sum.read += 512 * read_sectors;
    sum.written += 512 * written_sectors;
  }
  return sum;
}

}  // namespace mlpo::bench
