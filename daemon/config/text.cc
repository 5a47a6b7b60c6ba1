#include "daemon/config/text.h"

#include <array>
#include <cstdint>
#include <cstdio>

namespace mlpo {
namespace {

// Bytes of the UTF-8 character at the start of `text` (RFC 3629: no overlong forms, no surrogates), 0 if there is none.
size_t CharacterBytes(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t first = byte(0);
  if (first < 0x80) return 1;
  const size_t bytes = first >= 0xc2 && first <= 0xdf   ? 2
                       : first >= 0xe0 && first <= 0xef ? 3
                       : first >= 0xf0 && first <= 0xf4 ? 4
                                                        : 0;
  if (bytes == 0 || text.size() < bytes) return 0;
  for (size_t i = 1; i < bytes; ++i)
    if ((byte(i) & 0xc0) != 0x80) return 0;
  if ((first == 0xe0 && byte(1) < 0xa0) || (first == 0xed && byte(1) > 0x9f) || (first == 0xf0 && byte(1) < 0x90) ||
      (first == 0xf4 && byte(1) > 0x8f))
    return 0;
  return bytes;
}

bool IsControl(std::string_view character) {
  const auto first = static_cast<uint8_t>(character[0]);
  if (character.size() == 2) return first == 0xc2 && static_cast<uint8_t>(character[1]) < 0xa0;  // C1
  return character.size() == 1 && (first < 0x20 || first == 0x7f);
}

}  // namespace

bool IsPrintableUtf8(std::string_view text) {
  while (!text.empty()) {
    const size_t bytes = CharacterBytes(text);
    if (bytes == 0 || IsControl(text.substr(0, bytes))) return false;
    text.remove_prefix(bytes);
  }
  return true;
}

std::string Printable(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    size_t bytes = CharacterBytes(text);
    if (bytes != 0 && !IsControl(text.substr(0, bytes))) {
      out += text.substr(0, bytes);
    } else {
      if (bytes == 0) bytes = 1;
      for (size_t i = 0; i < bytes; ++i) {
        std::array<char, 8> hex;
        std::snprintf(hex.data(), hex.size(), "\\x%02x", static_cast<unsigned>(static_cast<uint8_t>(text[i])));
        out += hex.data();
      }
    }
    text.remove_prefix(bytes);
  }
  return out;
}

std::string Quote(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + "\"";
}

}  // namespace mlpo
