// A working file that a checkpoint has from now on: what of its space goes back to the file system.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "daemon/scheduler/block.h"

namespace mlpo {

// Gives back the space of a working file that nothing is in, of [Path::kFileHeaderBytes, size) all but these extents:
// it was made for what training may write, and the file is a checkpoint's from now on. What cannot be given back stays.
// Returns the bytes that the file has then, at least. Extents may reach beyond its end: a block may be shorter than its
// extent, and of one that lies behind what was reserved only what was written is there. May block.
uint64_t GiveBackUnused(int fd, std::vector<Extent> used, uint64_t size, const std::string& shown);

}  // namespace mlpo
