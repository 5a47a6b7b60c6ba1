#include "client/ctl/table.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

namespace mlpo::ctl {
namespace {

// Characters, not bytes: continuation bytes of UTF-8 take no column.
size_t Width(const std::string& text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }));
}

std::string Fixed(double value, int digits, const char* unit) {
  std::array<char, 64> text;
  std::snprintf(text.data(), text.size(), "%.*f %s", digits, value, unit);
  return text.data();
}

template <size_t N>
std::string Scaled(double value, double step, const std::array<const char*, N>& units) {
  size_t unit = 0;
  // 999.96 would be shown as 1000.0.
  while (unit + 1 < N && std::abs(value) >= step - 0.05) {
    value /= step;
    ++unit;
  }
  return Fixed(value, unit == 0 ? 0 : 1, units[unit]);
}

}  // namespace

std::string Table::Text() const {
  std::vector<size_t> widths(rows_[0].size(), 0);
  auto cell = [&](size_t row, size_t column) {
    const std::string& text = rows_[row][column];
    return row == 0 && !text.empty() && text[0] == '>' ? text.substr(1) : text;
  };
  for (size_t row = 0; row < rows_.size(); ++row)
    for (size_t column = 0; column < widths.size(); ++column)
      widths[column] = std::max(widths[column], Width(cell(row, column)));
  std::string out;
  for (size_t row = 0; row < rows_.size(); ++row) {
    std::string line = " ";
    for (size_t column = 0; column < widths.size(); ++column) {
      const std::string text = cell(row, column);
      const std::string blanks(widths[column] - Width(text), ' ');
      line += column == 0 ? " " : "  ";
      line += rows_[0][column][0] == '>' ? blanks + text : text + blanks;
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + "\n";
  }
  return out;
}

std::string Bytes(double bytes) {
  return Scaled(bytes, 1024, std::array{"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"});
}

std::string BytesPerS(double speed) { return Scaled(speed, 1000, std::array{"B/s", "kB/s", "MB/s", "GB/s", "TB/s"}); }

std::string Count(uint64_t count) {
  if (count < 10000) return std::to_string(count);
  return Scaled(static_cast<double>(count), 1000, std::array{"", "K", "M", "B", "T"});
}

std::string Seconds(double seconds) {
  if (seconds < 60) return Fixed(seconds, 1, "s");
  const auto whole = static_cast<uint64_t>(seconds);
  auto two = [](uint64_t big, const char* big_unit, uint64_t small, const char* small_unit) {
    return std::to_string(big) + " " + big_unit + " " + std::to_string(small) + " " + small_unit;
  };
  if (whole < 3600) return two(whole / 60, "min", whole % 60, "s");
  if (whole < 86400) return two(whole / 3600, "h", whole % 3600 / 60, "min");
  return two(whole / 86400, "d", whole % 86400 / 3600, "h");
}

std::string Safe(const std::string& text) {
  std::string safe = text;
  for (size_t i = 0; i < safe.size(); ++i) {
    const auto byte = static_cast<unsigned char>(safe[i]);
    if (byte < 0x20 || byte == 0x7f) safe[i] = '?';
    // C1 controls, as two bytes in UTF-8.
    if (byte == 0xc2 && i + 1 < safe.size() && static_cast<unsigned char>(safe[i + 1]) < 0xa0) {
      safe[i] = '?';
      safe[i + 1] = '?';
    }
  }
  return safe;
}

}  // namespace mlpo::ctl
