// Findings: what mlpo-daemon finds wrong with a machine or a plan, and what to do about it.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>

namespace mlpo::ctl {

// The exit code that a report's "state" stands for; nullopt if it is no report.
std::optional<int> CodeOfFindings(const nlohmann::json& report);
// To stdout, for people.
void PrintFindings(const nlohmann::json& report);

}  // namespace mlpo::ctl
