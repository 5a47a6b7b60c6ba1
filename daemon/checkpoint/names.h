// Names of what a checkpoint is made of: <directory>/<tag>/part-<rank>/{data-<attempt>-<index>, manifest-<attempt>}.
//
// All files of a part carry the attempt in their names, so that those of several attempts stand beside each other and
// none is taken for another's. A name that comes from outside (a folder's listing, a manifest, a client) becomes part
// of a path only after it has passed one of these, or IsName (base/name.h). No state; any thread.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace mlpo {

// What tells the parts of one save from those of another one under the same tag. All zero: none.
struct AttemptId {
  std::array<uint8_t, 16> bytes{};
  bool zero() const { return *this == AttemptId(); }
  auto operator<=>(const AttemptId&) const = default;
};

std::string AttemptText(const AttemptId& attempt);                  // 32 hexadecimal digits, lower case
std::optional<AttemptId> ParseAttempt(std::string_view text);       // of exactly that form, and not all zero
AttemptId NewAttempt(const std::array<uint8_t, 16>& random_bytes);  // never zero

std::string PartFolderName(uint32_t rank);
std::optional<uint32_t> ParsePartFolderName(std::string_view name);

std::string DataName(const AttemptId& attempt, uint32_t index);
std::string ManifestName(const AttemptId& attempt);
std::string NewManifestName(const AttemptId& attempt);  // while it is being written

struct PartFileName {
  enum class Kind : uint8_t { kData, kManifest, kNewManifest };
  Kind kind = Kind::kData;
  AttemptId attempt;
  uint32_t index = 0;  // of a data file
};
std::optional<PartFileName> ParsePartFileName(std::string_view name);

// ".data-<32 digits>.new", ".manifest-<32 digits>.new": of a file that a client has made and not given its name yet,
// where the file system has no nameless ones. The digits are no attempt.
bool IsAsideName(std::string_view name);

}  // namespace mlpo
