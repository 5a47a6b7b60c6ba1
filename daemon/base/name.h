// IsName: whether a text that comes from outside may become a file's name, or part of one: of jobs, tags, nodes and
// paths. Neither "." nor "..", no slash, no newline, whatever the locale.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string_view>

namespace mlpo {

inline constexpr size_t kMaxName = 128;  // MLPO_MAX_JOB and MLPO_MAX_TAG
inline constexpr const char* kNameRule = "1 to 128 of A-Z a-z 0-9 . _ -, not beginning with . or -";

// [A-Za-z0-9_][A-Za-z0-9._-]{0,127}
inline bool IsName(std::string_view text) {
  const auto plain = [](char c) {
    return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_';
  };
  if (text.empty() || text.size() > kMaxName || !plain(text.front())) return false;
  return std::all_of(text.begin(), text.end(), [&](char c) { return plain(c) || c == '.' || c == '-'; });
}

}  // namespace mlpo
