#include "daemon/config/units.h"

#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <optional>

namespace mlpo {
namespace {

__extension__ typedef unsigned __int128 Wide;

constexpr uint64_t kMax = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());

struct Unit {
  std::string_view name;
  uint64_t factor;
};

constexpr std::array<Unit, 12> kPrefixes = {{{"", 1},
                                             {"k", 1000ull},
                                             {"K", 1000ull},
                                             {"M", 1000'000ull},
                                             {"G", 1000'000'000ull},
                                             {"T", 1000'000'000'000ull},
                                             {"P", 1000'000'000'000'000ull},
                                             {"Ki", 1ull << 10},
                                             {"Mi", 1ull << 20},
                                             {"Gi", 1ull << 30},
                                             {"Ti", 1ull << 40},
                                             {"Pi", 1ull << 50}}};
constexpr std::array<Unit, 1> kBillions = {{{"B", 1000'000'000ull}}};
constexpr std::array<Unit, 8> kDurations = {
    {{"", 1}, {"s", 1}, {"sec", 1}, {"m", 60}, {"min", 60}, {"h", 3600}, {"d", 86400}, {"w", 604800}}};

constexpr const char* kSizeHint =
    "use bytes or a unit: KB, MB, GB, TB, PB (powers of 1000) or KiB, MiB, GiB, TiB, PiB (powers of 1024)";
constexpr const char* kCountHint = "use a number, or one with K, M, G (powers of 1000) or Ki, Mi, Gi (powers of 1024)";
constexpr const char* kParametersHint =
    "use a number, or one with K, M, B, T (powers of 1000) or Ki, Mi, Gi (powers of 1024)";
constexpr const char* kSpeedHint = "use bytes per second, or a unit such as MB/s, GB/s or MiB/s";
constexpr const char* kBudgetHint = "use bytes, or a size such as 40TB, with or without /day";
constexpr const char* kDurationHint = "use whole seconds, or a unit: s, min, h, d";

Status Refuse(std::string_view text, const char* what, const std::string& why) {
  return Status::Invalid("\"" + std::string(text) + "\" is not " + what + ": " + why);
}

bool IsDigit(char c) { return c >= '0' && c <= '9'; }

// "12.5 MB" -> 12, .5 as 5/10, "MB". False if it does not begin with a number.
struct Split {
  std::string_view whole, fraction, unit;
};
bool SplitNumber(std::string_view text, Split* split) {
  size_t at = 0;
  while (at < text.size() && IsDigit(text[at])) ++at;
  split->whole = text.substr(0, at);
  if (split->whole.empty()) return false;
  if (at < text.size() && text[at] == '.') {
    const size_t begin = ++at;
    while (at < text.size() && IsDigit(text[at])) ++at;
    split->fraction = text.substr(begin, at - begin);
    if (split->fraction.empty()) return false;
  }
  while (at < text.size() && text[at] == ' ') ++at;
  split->unit = text.substr(at);
  return true;
}

// (whole + fraction) * factor, cut to an integer; nothing if it does not fit into 63 bits.
std::optional<uint64_t> Scale(const Split& split, uint64_t factor) {
  Wide total = 0;
  for (const char c : split.whole) {
    total = total * 10 + static_cast<unsigned>(c - '0');
    if (total > kMax) return std::nullopt;
  }
  total *= factor;
  Wide fraction = 0, divisor = 1;
  for (const char c : split.fraction.substr(0, 18)) {  // later digits are below one byte; 10^18 * 10^15 < 2^127
    fraction = fraction * 10 + static_cast<unsigned>(c - '0');
    divisor *= 10;
  }
  total += fraction * factor / divisor;
  if (total > kMax) return std::nullopt;
  return static_cast<uint64_t>(total);
}

template <class Units>
Result<uint64_t> Parse(std::string_view text, const Units& units, bool bytes, const char* what, const char* hint) {
  if (!text.empty() && text[0] == '-') return Refuse(text, what, "it must not be negative");
  Split split;
  if (!SplitNumber(text, &split)) return Refuse(text, what, hint);
  std::string_view unit = split.unit;
  if (bytes && !unit.empty() && unit.back() == 'B') unit.remove_suffix(1);
  for (const Unit& known : units) {
    if (unit != known.name) continue;
    if (const auto value = Scale(split, known.factor)) return *value;
    return Refuse(text, what, "it is too large");
  }
  return Refuse(text, what, hint);
}

// The largest of `units` that divides `value`, so that nothing is lost.
std::string Format(uint64_t value, std::initializer_list<Unit> units, const char* suffix) {
  for (const Unit& unit : units) {
    if (value >= unit.factor && value % unit.factor == 0)
      return std::to_string(value / unit.factor) + std::string(unit.name) + suffix;
  }
  return std::to_string(value);
}

}  // namespace

Result<uint64_t> ParseSize(std::string_view text) { return Parse(text, kPrefixes, true, "a size", kSizeHint); }

Result<uint64_t> ParseCount(std::string_view text) { return Parse(text, kPrefixes, false, "a count", kCountHint); }

Result<uint64_t> ParseParameters(std::string_view text) {
  constexpr const char* kWhat = "a number of parameters";
  return text.ends_with('B') ? Parse(text, kBillions, false, kWhat, kParametersHint)
                             : Parse(text, kPrefixes, false, kWhat, kParametersHint);
}

Result<double> ParseSpeed(std::string_view text) {
  if (text.ends_with("/s")) {
    Result<uint64_t> size = Parse(text.substr(0, text.size() - 2), kPrefixes, true, "a speed", kSpeedHint);
    if (!size.ok()) return size.status();
    return static_cast<double>(*size);
  }
  double value = 0;
  const char* end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || at != end || !std::isfinite(value)) return Refuse(text, "a speed", kSpeedHint);
  if (std::signbit(value)) return Refuse(text, "a speed", "it must not be negative");
  return value;
}

Result<uint64_t> ParseBudget(std::string_view text) {
  if (text.ends_with("/day")) text.remove_suffix(4);
  return Parse(text, kPrefixes, true, "bytes a day", kBudgetHint);
}

Result<int64_t> ParseDuration(std::string_view text) {
  Result<uint64_t> seconds = Parse(text, kDurations, false, "a duration", kDurationHint);
  if (!seconds.ok()) return seconds.status();
  Split split;
  if (SplitNumber(text, &split) && !split.fraction.empty()) return Refuse(text, "a duration", kDurationHint);
  return static_cast<int64_t>(*seconds);
}

std::string FormatSize(uint64_t bytes) {
  // Binary first: 64 GiB divides by 1000 only by accident.
  std::string binary =
      Format(bytes, {{"Pi", 1ull << 50}, {"Ti", 1ull << 40}, {"Gi", 1ull << 30}, {"Mi", 1ull << 20}}, "B");
  if (binary.back() == 'B') return binary;
  return Format(bytes,
                {{"P", 1000'000'000'000'000ull},
                 {"T", 1000'000'000'000ull},
                 {"G", 1000'000'000ull},
                 {"M", 1000'000ull},
                 {"Ki", 1ull << 10}},
                "B");
}

std::string FormatCount(uint64_t elements) {
  return Format(elements, {{"Gi", 1ull << 30}, {"Mi", 1ull << 20}, {"Ki", 1ull << 10}}, "");
}

std::string FormatSpeed(double bytes_per_s) {
  if (bytes_per_s >= 1e3 && bytes_per_s < 1e15 && bytes_per_s == std::floor(bytes_per_s)) {
    const std::string text =
        Format(static_cast<uint64_t>(bytes_per_s),
               {{"T", 1000'000'000'000ull}, {"G", 1000'000'000ull}, {"M", 1000'000ull}, {"K", 1000ull}}, "B/s");
    if (text.back() == 's') return text;
  }
  return FormatNumber(bytes_per_s);
}

std::string FormatBudget(uint64_t bytes) {
  const std::string text = FormatSize(bytes);
  return IsDigit(text.back()) ? text : text + "/day";
}

std::string FormatDuration(int64_t seconds) {
  const std::string text = Format(static_cast<uint64_t>(seconds), {{"d", 86400}, {"h", 3600}, {"min", 60}}, "");
  return IsDigit(text.back()) ? text + "s" : text;
}

std::string FormatNumber(double value) {
  std::array<char, 64> text;
  const auto [end, error] = std::to_chars(text.data(), text.data() + text.size(), value);
  MLPO_CHECK(error == std::errc());
  return std::string(text.data(), end);
}

}  // namespace mlpo
