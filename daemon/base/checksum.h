// Checksum: XXH3-64 (seed 0) of some bytes, with the CPU's best instruction set; the same number with any.
//
// For noticing that bytes are not what was written, not against forgers. Thread-safe; does not allocate.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mlpo {

uint64_t Checksum(const void* data, size_t bytes);

}  // namespace mlpo
