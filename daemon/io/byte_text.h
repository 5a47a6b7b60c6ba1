// ByteText: a number of bytes for messages, exact and readable: "2147483648 bytes (2.00 GiB)".
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

namespace mlpo {

inline std::string ByteText(uint64_t bytes) {
  static constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  std::string text = std::to_string(bytes) + " bytes";
  if (bytes < 1024) return text;
  double value = static_cast<double>(bytes) / 1024;
  size_t unit = 0;
  for (; value >= 1024 && unit + 1 < std::size(kUnits); ++unit) value /= 1024;
  char readable[32];
  std::snprintf(readable, sizeof readable, " (%.2f %s)", value, kUnits[unit]);
  return text + readable;
}

}  // namespace mlpo
