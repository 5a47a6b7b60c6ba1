#include "daemon/scheduler/placement.h"

#include <algorithm>

namespace mlpo {

double PathWorth(const PathParameters& path) {
  if (path.read_bytes_per_s <= 0 || path.write_bytes_per_s <= 0) return 0;
  const double r = 1 / path.read_bytes_per_s;
  const double w = 1 / path.write_bytes_per_s;
  return 1 / std::max({r, w, path.duplex * (r + w)});
}

std::vector<double> PathShares(const std::vector<PathParameters>& paths) {
  std::vector<double> worths;
  double sum = 0;
  int declared = 0;
  for (const PathParameters& path : paths) {
    worths.push_back(PathWorth(path));
    sum += worths.back();
    declared += worths.back() > 0;
  }
  const double undeclared = declared > 0 ? sum / declared : 1;
  sum = 0;
  for (double& worth : worths) {
    if (worth <= 0) worth = undeclared;
    sum += worth;
  }
  for (double& worth : worths) worth /= sum;
  return worths;
}

}  // namespace mlpo
