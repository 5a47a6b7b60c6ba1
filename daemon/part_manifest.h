// What a part's manifest says of a state that has been taken, and where its blocks are meanwhile.
#pragma once

#include <vector>

#include "daemon/checkpoint/manifest.h"
#include "daemon/scheduler/scheduler.h"

namespace mlpo {

// A state that has been taken, on its way from the data thread to its save's thread, which says what of it is in
// the part without being copied, and back.
struct TakenState {
  // A pinned block.
  struct Source {
    uint32_t subgroup = 0;   // place in the manifest
    uint32_t block = 0;      // likewise
    PathIndex path = kNone;  // kNone: nothing is stored
    FileId file = 0;
    uint64_t offset = 0;  // bytes in the file
    uint64_t bytes = 0;
    bool hashed = false;
    uint64_t hash = 0;
  };
  Manifest manifest;  // without head and files, and without the blocks' places
  std::vector<Source> sources;
  std::vector<FileId> old_files;  // per path: that the session has left; kNone: none
  std::vector<Extent> left;       // what is in use in these: once nothing is being written there any more
  std::vector<PinPlace> places;   // of the sources
};

// In the data thread; the session is there. Subgroups are in the order of their handles, sources in that of the pins.
TakenState StateOf(const Scheduler& scheduler, const StateSave& save, uint64_t extents_offset_bytes);

// The record of a pin's block in its manifest.
PartBlock& BlockOf(Manifest& manifest, const Pin& pin);

}  // namespace mlpo
