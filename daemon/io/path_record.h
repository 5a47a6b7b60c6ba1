// PathRecord: what is kept about a path from one daemon to the next, in a small file of its <uid>/<node> folder.
//
// A file that is missing or that we did not write so is as none: nothing in it is worth a failed start. Written aside
// and renamed. Blocks on a slow file system: at start, or in the housekeeping thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "daemon/base/status.h"

namespace mlpo {

struct PathRecord {
  struct Calibration {  // of mlpo-ctl bench; bytes, bytes per second
    double read_bytes_per_s = 0;
    double write_bytes_per_s = 0;
    double duplex = 1;
    uint64_t read_depth_bytes = 0;
    uint64_t write_depth_bytes = 0;
    int64_t unix_s = 0;  // when
  };
  uint64_t written_bytes = 0;  // by all daemons of this user and node
  std::optional<Calibration> calibration;
};

inline constexpr char kRecordFile[] = "record.json";

// `shown`: the folder's name for messages. No file: an empty record. The error says what is wrong with the file.
Result<PathRecord> LoadPathRecord(int folder_fd, const std::string& shown);
Status SavePathRecord(int folder_fd, const std::string& shown, const PathRecord& record);

}  // namespace mlpo
