// Text: what may stand in a setting, a log line or a TOML string. Pure functions.
#pragma once

#include <string>
#include <string_view>

namespace mlpo {

// Valid UTF-8 without control characters.
bool IsPrintableUtf8(std::string_view text);
// For messages: control characters and bytes that are no UTF-8 as \xNN, so that no input can break a line.
std::string Printable(std::string_view text);
// `text`, which IsPrintableUtf8, as a TOML basic string with its quotes.
std::string Quote(const std::string& text);

}  // namespace mlpo
