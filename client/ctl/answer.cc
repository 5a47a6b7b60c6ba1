#include "client/ctl/answer.h"

#include <cerrno>

#include "client/ctl/exit_code.h"
#include "client/ctl/table.h"

namespace mlpo::ctl {

using nlohmann::json;

std::string Text(const json& object, const char* name) {
  const auto found = object.find(name);
  return found != object.end() && found->is_string() ? Safe(found->get<std::string>()) : "?";
}
double Number(const json& object, const char* name) {
  const auto found = object.find(name);
  return found != object.end() && found->is_number() ? found->get<double>() : 0;
}
uint64_t Whole(const json& object, const char* name) {
  const auto found = object.find(name);
  return found != object.end() && found->is_number_unsigned() ? found->get<uint64_t>() : 0;
}
bool Flag(const json& object, const char* name) {
  const auto found = object.find(name);
  return found != object.end() && found->is_boolean() && found->get<bool>();
}
json Member(const json& object, const char* name, json::value_t kind) {
  const auto found = object.find(name);
  return found != object.end() && found->type() == kind ? *found : json(kind);
}

int Unreachable(int code) {
  switch (code) {
    case -EPROTO:
    case -EINVAL:
    case -ENOMEM:
      return kFailed;
    default:
      return kUnreachable;
  }
}

}  // namespace mlpo::ctl
