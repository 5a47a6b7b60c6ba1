#include "client/ctl/findings.h"

#include <cstdio>
#include <string>

#include "client/ctl/answer.h"
#include "client/ctl/exit_code.h"

namespace mlpo::ctl {

using nlohmann::json;

std::optional<int> CodeOfFindings(const json& report) {
  const std::string state = report.is_object() ? Text(report, "state") : "";
  if (state == "fine") return kFine;
  if (state == "degraded") return kDegraded;
  if (state == "failed") return kFailed;
  return std::nullopt;
}

void PrintFindings(const json& report) {
  for (const json& finding : Member(report, "findings", json::value_t::array)) {
    if (!finding.is_object()) continue;
    const auto text = [&](const char* name) { return finding.contains(name) ? Text(finding, name) : std::string(); };
    const std::string path = text("path");
    std::printf("  %-7s  %-13s  %s%s\n", text("level").c_str(), text("check").c_str(),
                path.empty() ? "" : (path + ": ").c_str(), text("what").c_str());
    if (const std::string advice = text("advice"); !advice.empty())
      std::printf("  %-7s  %-13s  -> %s\n", "", "", advice.c_str());
  }
}

}  // namespace mlpo::ctl
