#include "daemon/checkpoint/json_text.h"

#include "daemon/base/name.h"

namespace mlpo {
namespace {

using nlohmann::json;

constexpr char kDigits[] = "0123456789abcdef";

int Digit(char c) { return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1; }

bool IsUtf8(const std::string& text) {
  try {
    (void)json(text).dump();  // the library's own judgement: what it would refuse to write is no UTF-8
    return true;
  } catch (const json::type_error&) {
    return false;
  }
}

}  // namespace

json NameToJson(const std::string& name) {
  if (IsUtf8(name)) return name;
  std::string hex;
  for (const char c : name) {
    const auto byte = static_cast<unsigned char>(c);
    hex += {kDigits[byte >> 4], kDigits[byte & 15]};
  }
  return {{"hex", hex}};
}

std::optional<std::string> NameFromJson(const json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_object() || value.size() != 1) return std::nullopt;
  const auto found = value.find("hex");
  if (found == value.end() || !found->is_string()) return std::nullopt;
  const std::string hex = found->get<std::string>();
  if (hex.size() % 2 != 0) return std::nullopt;
  std::string name;
  for (size_t i = 0; i < hex.size(); i += 2) {
    const int high = Digit(hex[i]), low = Digit(hex[i + 1]);
    if (high < 0 || low < 0) return std::nullopt;
    name += static_cast<char>(high << 4 | low);
  }
  return name;
}

std::string HexText(uint64_t value) {
  std::string text(16, '0');
  for (size_t i = text.size(); i-- > 0; value >>= 4) text[i] = kDigits[value & 15];
  return text;
}

std::optional<uint64_t> ParseHex(std::string_view text) {
  if (text.size() != 16) return std::nullopt;
  uint64_t value = 0;
  for (const char c : text) {
    const int digit = Digit(c);
    if (digit < 0) return std::nullopt;
    value = value << 4 | static_cast<uint64_t>(digit);
  }
  return value;
}

JsonReader::JsonReader(const json& object, std::string who) : object_(object), who_(std::move(who)) {
  if (!object_.is_object()) status_ = Status::Invalid(who_ + " is no JSON object");
}

void JsonReader::Fail(const std::string& what) {
  if (status_.ok()) status_ = Status::Invalid(who_ + " " + what);
}

const json& JsonReader::Member(const char* key) {
  static const json kNull;
  if (!object_.is_object()) return kNull;
  const auto found = object_.find(key);
  if (found != object_.end()) return *found;
  Fail(std::string("has no \"") + key + "\"");
  return kNull;
}

uint64_t JsonReader::Whole(const char* key, uint64_t max) {
  const json& value = Member(key);
  if (value.is_number_unsigned() && value.get<uint64_t>() <= max) return value.get<uint64_t>();
  Fail(std::string("has no whole number up to ") + std::to_string(max) + " as \"" + key + "\"");
  return 0;
}

std::string JsonReader::Text(const char* key) {
  const json& value = Member(key);
  if (value.is_string()) return value.get<std::string>();
  Fail(std::string("has no text as \"") + key + "\"");
  return "";
}

std::string JsonReader::Name(const char* key) {
  std::optional<std::string> name = NameFromJson(Member(key));
  if (name) return std::move(*name);
  Fail(std::string("has no name as \"") + key + "\"");
  return "";
}

uint64_t JsonReader::Hex(const char* key) {
  const std::optional<uint64_t> value = ParseHex(Text(key));
  if (!value) Fail(std::string("has no 16 hexadecimal digits as \"") + key + "\"");
  return value.value_or(0);
}

const json& JsonReader::Array(const char* key) {
  static const json kEmpty = json::array();
  const json& value = Member(key);
  if (value.is_array()) return value;
  Fail(std::string("has no array as \"") + key + "\"");
  return kEmpty;
}

void PutOrigin(const WorkingOrigin& origin, json* object) {
  json& out = *object;
  out["node"] = origin.node;
  out["daemon_uid"] = origin.daemon_uid;
  out["client_uid"] = origin.client_uid;
  out["job"] = origin.job;
  out["rank"] = origin.rank;
  out["generation"] = origin.generation;
}

WorkingOrigin TakeOrigin(JsonReader& reader) {
  WorkingOrigin origin;
  origin.node = reader.Text("node");
  origin.daemon_uid = static_cast<uint32_t>(reader.Whole("daemon_uid", UINT32_MAX));
  origin.client_uid = static_cast<uint32_t>(reader.Whole("client_uid", UINT32_MAX));
  origin.job = reader.Text("job");
  origin.rank = static_cast<uint32_t>(reader.Whole("rank", UINT32_MAX));
  origin.generation = reader.Whole("generation", UINT64_MAX);
  if (!IsName(origin.node) || !IsName(origin.job)) reader.Fail("comes from a node or job without a name");
  return origin;
}

}  // namespace mlpo
