// Loading a configuration from text, flags and a made-up environment, as the tests of config/ need it.
#pragma once

#include <fstream>
#include <string>
#include <vector>

#include "daemon/config/load.h"
#include "tests/support/catch.h"
#include "tests/support/scratch_dir.h"

class ConfigScene {
  ScratchDir dir_;  // before what is made from it

 public:
  // No system file unless a test writes one; HOME and XDG_CONFIG_HOME unset unless a test sets them.
  mlpo::Environment environment;
  std::string system_file = dir_ / "etc.toml";

  std::string Write(const std::string& name, const std::string& text) {
    std::ofstream(dir_ / name) << text;
    return dir_ / name;
  }
  mlpo::LoadOutcome Load(std::vector<std::string> flags) const {
    flags.insert(flags.begin(), "mlpo-daemon");
    std::vector<const char*> argv;
    for (const std::string& flag : flags) argv.push_back(flag.c_str());
    return mlpo::LoadConfig(static_cast<int>(argv.size()), argv.data(), environment, system_file);
  }
  // Loads a file of this text, with a path on the command line unless the text has one.
  mlpo::LoadOutcome LoadText(const std::string& text, std::vector<std::string> flags = {}) {
    flags.insert(flags.begin(), {"--config", Write("mlpo.toml", text)});
    if (text.find("path") == std::string::npos) flags.insert(flags.end(), {"--path", "/mnt/a"});
    return Load(flags);
  }
  mlpo::Config Good(const mlpo::LoadOutcome& outcome) const {
    INFO(outcome.errors);
    REQUIRE(outcome.config.has_value());
    REQUIRE(outcome.exit_code == 0);
    return *outcome.config;
  }
  const ScratchDir& dir() const { return dir_; }
};

inline bool Has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }
