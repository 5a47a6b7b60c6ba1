#include "client/src/json_scan.h"

#include <stdint.h>
#include <string.h>

namespace mlpo::client {
namespace {

constexpr int kMostDepth = 128;

// Each Skip moves `at` behind what it names, or returns false.
struct Scanner {
  const char* at;
  const char* end;

  bool More() const { return at < end; }
  bool Take(char c) {
    if (!More() || *at != c) return false;
    ++at;
    return true;
  }
  void SkipSpace() {
    while (More() && (*at == ' ' || *at == '\t' || *at == '\n' || *at == '\r')) ++at;
  }
  static bool Digit(char c) { return c >= '0' && c <= '9'; }
  static bool Hex(char c) { return Digit(c) || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F'); }
  bool SkipDigits() {
    if (!More() || !Digit(*at)) return false;
    while (More() && Digit(*at)) ++at;
    return true;
  }
  bool SkipWord(const char* word) {
    for (; *word != '\0'; ++word) {
      if (!Take(*word)) return false;
    }
    return true;
  }
  bool SkipString() {
    if (!Take('"')) return false;
    while (More()) {
      const char c = *at++;
      if (c == '"') return true;
      if (static_cast<unsigned char>(c) < 0x20) return false;
      if (c != '\\') continue;
      if (!More()) return false;
      const char escape = *at++;
      if (escape == 'u') {
        for (int i = 0; i < 4; ++i, ++at) {
          if (!More() || !Hex(*at)) return false;
        }
      } else if (strchr("\"\\/bfnrt", escape) == nullptr || escape == '\0') {
        return false;
      }
    }
    return false;
  }
  bool SkipNumber() {
    Take('-');
    if (!Take('0') && !SkipDigits()) return false;
    if (Take('.') && !SkipDigits()) return false;
    if (More() && (*at == 'e' || *at == 'E')) {
      ++at;
      if (!Take('+')) Take('-');
      if (!SkipDigits()) return false;
    }
    return true;
  }
  // Members of an object (with keys) or items of an array; `at` is behind the opening bracket.
  bool SkipRest(char close, bool keys, int depth) {
    SkipSpace();
    if (Take(close)) return true;
    for (;;) {
      SkipSpace();
      if (keys) {
        if (!SkipString()) return false;
        SkipSpace();
        if (!Take(':')) return false;
      }
      if (!SkipValue(depth)) return false;
      SkipSpace();
      if (Take(close)) return true;
      if (!Take(',')) return false;
    }
  }
  bool SkipValue(int depth) {
    SkipSpace();
    if (!More() || depth > kMostDepth) return false;
    switch (*at) {
      case '{':
        ++at;
        return SkipRest('}', true, depth + 1);
      case '[':
        ++at;
        return SkipRest(']', false, depth + 1);
      case '"':
        return SkipString();
      case 't':
        return SkipWord("true");
      case 'f':
        return SkipWord("false");
      case 'n':
        return SkipWord("null");
      default:
        return SkipNumber();
    }
  }
};

uint32_t HexValue(const char* digits) {
  uint32_t value = 0;
  for (int i = 0; i < 4; ++i) {
    const char c = digits[i];
    value = value * 16 + static_cast<uint32_t>(Scanner::Digit(c) ? c - '0' : (c | 0x20) - 'a' + 10);
  }
  return value;
}

size_t EncodeUtf8(uint32_t point, char (&out)[4]) {
  if (point < 0x80) {
    out[0] = static_cast<char>(point);
    return 1;
  }
  const int more = point < 0x800 ? 1 : point < 0x10000 ? 2 : 3;
  for (int i = more; i > 0; --i, point >>= 6) out[i] = static_cast<char>(0x80 | (point & 0x3f));
  static constexpr unsigned char kLead[] = {0, 0xc0, 0xe0, 0xf0};
  out[0] = static_cast<char>(kLead[more] | point);
  return static_cast<size_t>(more) + 1;
}

char Unescape(char escape) {
  switch (escape) {
    case 'b':
      return '\b';
    case 'f':
      return '\f';
    case 'n':
      return '\n';
    case 'r':
      return '\r';
    case 't':
      return '\t';
    default:
      return escape;
  }
}

// The code point of an escape that `at` is behind the `u` of; surrogates in pairs, alone they become U+FFFD.
uint32_t DecodeEscape(const char*& at, const char* end) {
  uint32_t point = HexValue(at);
  at += 4;
  if (point >= 0xdc00 && point < 0xe000) return 0xfffd;
  if (point < 0xd800 || point >= 0xdc00) return point;
  if (end - at >= 6 && at[0] == '\\' && at[1] == 'u') {
    const uint32_t low = HexValue(at + 2);
    if (low >= 0xdc00 && low < 0xe000) {
      at += 6;
      return 0x10000 + ((point - 0xd800) << 10) + (low - 0xdc00);
    }
  }
  return 0xfffd;
}

}  // namespace

bool IsJson(JsonText text) {
  if (text.begin == nullptr) return false;
  Scanner scan{text.begin, text.end};
  if (!scan.SkipValue(0)) return false;
  scan.SkipSpace();
  return !scan.More();
}

JsonText FindMember(JsonText text, const char* key) {
  JsonText found;
  if (!IsJson(text)) return found;
  Scanner scan{text.begin, text.end};
  scan.SkipSpace();
  if (!scan.Take('{')) return found;
  scan.SkipSpace();
  const size_t key_bytes = strlen(key);
  while (scan.More() && *scan.at == '"') {
    const char* name = scan.at + 1;
    scan.SkipString();
    const bool match = static_cast<size_t>(scan.at - 1 - name) == key_bytes && memcmp(name, key, key_bytes) == 0;
    scan.SkipSpace();
    scan.Take(':');
    scan.SkipSpace();
    const char* value = scan.at;
    scan.SkipValue(0);
    if (match) found = {value, scan.at};
    scan.SkipSpace();
    scan.Take(',');
    scan.SkipSpace();
  }
  return found;
}

bool DecodeString(JsonText text, char* out, size_t out_bytes) {
  if (!IsJson(text) || *text.begin != '"' || out_bytes == 0) return false;
  const char* end = text.end;
  while (end[-1] != '"') --end;
  --end;
  size_t used = 0;
  for (const char* at = text.begin + 1; at < end;) {
    char bytes[4] = {*at++};
    size_t count = 1;
    if (bytes[0] == '\\') {
      const char escape = *at++;
      if (escape == 'u') {
        count = EncodeUtf8(DecodeEscape(at, end), bytes);
      } else {
        bytes[0] = Unescape(escape);
      }
    }
    if (used + count >= out_bytes) break;
    memcpy(out + used, bytes, count);
    used += count;
  }
  out[used] = '\0';
  return true;
}

}  // namespace mlpo::client
