// PlainText: bytes as a log or a message can have them. Keys and names of tensors are any bytes.
#pragma once

#include <string>
#include <string_view>

namespace mlpo {

// What is not printable ASCII is '?'.
inline std::string PlainText(std::string_view bytes) {
  std::string text;
  for (const char c : bytes) text += c >= 0x20 && c < 0x7f ? c : '?';
  return text;
}

}  // namespace mlpo
