// JSON as a checkpoint's files have it: names that are any bytes, and members that are checked as they are taken.
//
// A file that is read may come from anywhere: what is missing, of another type or out of range is an error that names
// it. Only this folder's sources include this.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "daemon/base/status.h"
#include "daemon/checkpoint/manifest.h"

namespace mlpo {

// A string, or {"hex": "..."} of bytes that are no UTF-8.
nlohmann::json NameToJson(const std::string& name);
std::optional<std::string> NameFromJson(const nlohmann::json& value);

std::string HexText(uint64_t value);  // 16 digits
std::optional<uint64_t> ParseHex(std::string_view text);

// Takes members of one object; the first failure stays, and what is taken after it is worth nothing.
class JsonReader {
 public:
  // `who`: what it is, for messages.
  JsonReader(const nlohmann::json& object, std::string who);

  const nlohmann::json& Member(const char* key);  // null if it is missing
  bool Has(const char* key) const { return object_.is_object() && object_.contains(key); }
  uint64_t Whole(const char* key, uint64_t max);
  std::string Text(const char* key);
  std::string Name(const char* key);  // NameFromJson
  uint64_t Hex(const char* key);
  const nlohmann::json& Array(const char* key);  // an empty one if it is none
  void Fail(const std::string& what);
  const Status& status() const { return status_; }

 private:
  const nlohmann::json& object_;
  const std::string who_;
  Status status_;
};

// The members that say whose working file one was, beside others: in manifests and journals.
void PutOrigin(const WorkingOrigin& origin, nlohmann::json* object);
WorkingOrigin TakeOrigin(JsonReader& reader);

}  // namespace mlpo
