// Answer: reads a daemon's JSON answer, which may be of another version: members that are missing or of another type
// are
// "?", 0 or empty. Text is made safe for a terminal.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

namespace mlpo::ctl {

std::string Text(const nlohmann::json& object, const char* name);
double Number(const nlohmann::json& object, const char* name);
uint64_t Whole(const nlohmann::json& object, const char* name);
bool Flag(const nlohmann::json& object, const char* name);
nlohmann::json Member(const nlohmann::json& object, const char* name, nlohmann::json::value_t kind);
// The exit code for an error of mlpo_control.
int Unreachable(int code);

}  // namespace mlpo::ctl
