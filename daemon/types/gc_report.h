// GcReport: what was found of dead daemons and sessions, and what became of it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace mlpo {

struct GcItem {
  std::string file;    // or folder
  uint64_t bytes = 0;  // of storage
  std::string why;     // it may go, or stays
};

struct GcReport {
  bool dry_run = false;         // nothing was removed: `removed` is what would be
  std::vector<GcItem> removed;  // files; empty folders go with them, and are not listed
  std::vector<GcItem> kept;     // in our layout, and not ours to remove
  std::vector<GcItem> failed;   // what could not be looked at, or not removed

  uint64_t removed_bytes() const {
    uint64_t bytes = 0;
    for (const GcItem& item : removed) bytes += item.bytes;
    return bytes;
  }
  void Add(const GcReport& other) {
    removed.insert(removed.end(), other.removed.begin(), other.removed.end());
    kept.insert(kept.end(), other.kept.begin(), other.kept.end());
    failed.insert(failed.end(), other.failed.begin(), other.failed.end());
  }
};

}  // namespace mlpo
