// A strict scanner for one JSON object (RFC 8259): finds its members without building anything.
#pragma once

#include <cstddef>

namespace mlpo::client {

struct JsonText {
  const char* begin = nullptr;  // nullptr: not there
  const char* end = nullptr;
  size_t bytes() const { return static_cast<size_t>(end - begin); }
};

// Whether `text` is one JSON value with nothing but white space around it.
bool IsJson(JsonText text);
// The value of member `key` (which has no escapes) of the object `text`; not there if `text` is no valid object. Of
// members of one name the last.
JsonText FindMember(JsonText text, const char* key);
// Decodes a JSON string into `out`, cut to fit and zero-terminated. False if `text` is no string.
bool DecodeString(JsonText text, char* out, size_t out_bytes);

}  // namespace mlpo::client
