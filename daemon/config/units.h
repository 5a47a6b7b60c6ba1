// Units: sizes, counts, speeds and durations as people write them, and back.
//
// Parsing is exact (no rounding through floating point before the last digit) and refuses signs, NaN, unknown units and
// what does not fit. Errors are -EINVAL and say what is allowed. Formatting picks the largest unit that loses nothing,
// so parsing the text gives the same value. Pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "daemon/base/status.h"

namespace mlpo {

// "64GiB", "600MB", "1.5TiB", "4096" -> bytes. K M G T P are powers of 1000, Ki Mi Gi Ti Pi of 1024, each with or
// without B.
Result<uint64_t> ParseSize(std::string_view text);
// "1Mi", "500K", "4096" -> elements; the same prefixes, without B.
Result<uint64_t> ParseCount(std::string_view text);
// The same, and with B for billions, as people write the sizes of models: "70B", "268M".
Result<uint64_t> ParseParameters(std::string_view text);
// "345MB/s", "1.2GiB/s", "345e6" -> bytes per second.
Result<double> ParseSpeed(std::string_view text);
// "40TB/day", or a size -> bytes a day.
Result<uint64_t> ParseBudget(std::string_view text);
// "30s", "5min", "2h", "1d", "45" -> seconds.
Result<int64_t> ParseDuration(std::string_view text);

std::string FormatSize(uint64_t bytes);       // "64GiB", "600MB", "17"
std::string FormatCount(uint64_t elements);   // "1Mi", "500000"
std::string FormatSpeed(double bytes_per_s);  // "345MB/s", or a number
std::string FormatBudget(uint64_t bytes);     // "40TB/day", or a number
std::string FormatDuration(int64_t seconds);  // "5min", "90s"
std::string FormatNumber(double value);       // the shortest text that reads back as the same number

}  // namespace mlpo
