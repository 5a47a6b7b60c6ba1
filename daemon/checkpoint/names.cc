#include "daemon/checkpoint/names.h"

#include <algorithm>
#include <charconv>

namespace mlpo {
namespace {

constexpr std::string_view kPart = "part-";
constexpr std::string_view kData = "data-";
constexpr std::string_view kManifest = "manifest-";
constexpr std::string_view kNew = ".new";
constexpr size_t kAttemptDigits = 32;

// Written as we write it: no sign, no leading zero. nullopt if it is something else.
std::optional<uint32_t> ParseNumber(std::string_view text) {
  uint32_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || text != std::to_string(number)) return std::nullopt;
  return number;
}

bool TakePrefix(std::string_view* text, std::string_view prefix) {
  if (!text->starts_with(prefix)) return false;
  text->remove_prefix(prefix.size());
  return true;
}

}  // namespace

std::string AttemptText(const AttemptId& attempt) {
  constexpr char kHex[] = "0123456789abcdef";
  std::string text;
  for (const uint8_t byte : attempt.bytes) text += {kHex[byte >> 4], kHex[byte & 15]};
  return text;
}

std::optional<AttemptId> ParseAttempt(std::string_view text) {
  if (text.size() != kAttemptDigits) return std::nullopt;
  const auto digit = [](char c) { return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1; };
  AttemptId attempt;
  for (size_t i = 0; i < attempt.bytes.size(); ++i) {
    const int high = digit(text[2 * i]), low = digit(text[2 * i + 1]);
    if (high < 0 || low < 0) return std::nullopt;
    attempt.bytes[i] = static_cast<uint8_t>(high << 4 | low);
  }
  if (attempt.zero()) return std::nullopt;
  return attempt;
}

AttemptId NewAttempt(const std::array<uint8_t, 16>& random_bytes) {
  AttemptId attempt{random_bytes};
  if (attempt.zero()) attempt.bytes.back() = 1;
  return attempt;
}

std::string PartFolderName(uint32_t rank) { return std::string(kPart) + std::to_string(rank); }

std::optional<uint32_t> ParsePartFolderName(std::string_view name) {
  if (!TakePrefix(&name, kPart)) return std::nullopt;
  return ParseNumber(name);
}

std::string DataName(const AttemptId& attempt, uint32_t index) {
  return std::string(kData) + AttemptText(attempt) + "-" + std::to_string(index);
}

std::string ManifestName(const AttemptId& attempt) { return std::string(kManifest) + AttemptText(attempt); }

std::string NewManifestName(const AttemptId& attempt) { return ManifestName(attempt) + std::string(kNew); }

bool IsAsideName(std::string_view name) {
  if (!TakePrefix(&name, ".") || (!TakePrefix(&name, kData) && !TakePrefix(&name, kManifest))) return false;
  const auto is_digit = [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); };
  return name.size() == kAttemptDigits + kNew.size() && name.ends_with(kNew) &&
         std::all_of(name.begin(), name.begin() + kAttemptDigits, is_digit);
}

std::optional<PartFileName> ParsePartFileName(std::string_view name) {
  PartFileName found;
  const bool data = TakePrefix(&name, kData);
  if (!data && !TakePrefix(&name, kManifest)) return std::nullopt;
  const std::optional<AttemptId> attempt = ParseAttempt(name.substr(0, std::min(name.size(), kAttemptDigits)));
  if (!attempt) return std::nullopt;
  found.attempt = *attempt;
  name.remove_prefix(kAttemptDigits);
  if (!data) {
    if (!name.empty() && name != kNew) return std::nullopt;
    found.kind = name.empty() ? PartFileName::Kind::kManifest : PartFileName::Kind::kNewManifest;
    return found;
  }
  if (!TakePrefix(&name, "-")) return std::nullopt;
  const std::optional<uint32_t> index = ParseNumber(name);
  if (!index) return std::nullopt;
  found.index = *index;
  return found;
}

}  // namespace mlpo
