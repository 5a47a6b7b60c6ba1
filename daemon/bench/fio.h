// fio, another program's word on what a directory can do.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace mlpo::bench {

bool FioIsThere();

struct FioRun {
  std::vector<std::string> files;  // one job each, side by side
  uint64_t file_bytes = 0;
  uint64_t block_bytes = 0;
  uint32_t depth = 0;  // blocks in flight a job, both directions together
  // read, write; readwrite: half of each. "write" with seconds = 0 writes every file once.
  std::string mix;
  double seconds = 0;
  double warm_up_seconds = 0;  // before these, not counted
  bool direct = true;
};
struct FioSpeed {
  double read_bytes_per_s = 0;
  double write_bytes_per_s = 0;
};
// By file. Files that are read have been written by a run before. Throws with fio's own words.
std::vector<FioSpeed> RunFio(const FioRun& run);

}  // namespace mlpo::bench
