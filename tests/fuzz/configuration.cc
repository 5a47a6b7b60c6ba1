// A configuration file, variables and flags. An input is the file; behind a zero byte, and separated by more of them,
// up to 16 flags ("--memory=1GiB") and variables ("MLPO_MEMORY__POOL=1GiB"). Either everything that is wrong is said,
// or what is printed loads to the same configuration.
#include <sys/mman.h>
#include <sysexits.h>
#include <unistd.h>

#include "daemon/base/unique_fd.h"
#include "daemon/config/load.h"
#include "tests/fuzz/fuzz_target.h"

namespace {

using namespace mlpo;

constexpr size_t kMostExtras = 16;

LoadOutcome Load(std::string_view file, const std::vector<std::string>& flags, const Environment& environment) {
  const UniqueFd memory(::memfd_create("mlpo.toml", MFD_CLOEXEC));
  FUZZ_CHECK(memory && ::write(memory.get(), file.data(), file.size()) == static_cast<ssize_t>(file.size()),
             "writing the input");
  const std::string name = "/proc/self/fd/" + std::to_string(memory.get());
  std::vector<const char*> argv = {"mlpo-daemon", "--config", name.c_str()};
  for (const std::string& flag : flags) argv.push_back(flag.c_str());
  return LoadConfig(static_cast<int>(argv.size()), argv.data(), environment, "/nonexistent");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string_view rest(reinterpret_cast<const char*>(data), size);
  const auto next = [&rest] {
    const std::string_view part = rest.substr(0, rest.find('\0'));
    rest.remove_prefix(std::min(part.size() + 1, rest.size()));
    return part;
  };
  const std::string_view file = next();
  std::vector<std::string> flags;
  Environment environment;
  for (size_t i = 0; i < kMostExtras && !rest.empty(); ++i) {
    const std::string_view extra = next();
    const size_t equals = extra.find('=');
    if (extra.rfind("--config", 0) == 0) continue;  // no file of this machine
    if (extra.rfind("-", 0) == 0) {
      flags.emplace_back(extra);
    } else if (equals != std::string_view::npos) {
      environment[std::string(extra.substr(0, equals))] = extra.substr(equals + 1);
    }
  }
  LoadOutcome outcome = Load(file, flags, environment);
  const int code = outcome.exit_code;
  FUZZ_CHECK(code == 0 || code == EX_USAGE || code == EX_CONFIG, std::to_string(code));
  FUZZ_CHECK((code == 0) == outcome.errors.empty(), outcome.errors);
  FUZZ_CHECK(code == 0 || !outcome.config, "a configuration with errors");
  if (!outcome.config) return 0;
  outcome.config->origins.clear();  // each value then says "default"
  const std::string printed = PrintConfig(*outcome.config);
  LoadOutcome again = Load(printed, {}, {});
  FUZZ_CHECK(again.config.has_value(), again.errors + "\n" + printed);
  again.config->origins.clear();
  const std::string printed_again = PrintConfig(*again.config);
  FUZZ_CHECK(printed == printed_again, printed + "\nis read as\n" + printed_again);
  return 0;
}

// Files are in corpus/configuration.
std::vector<std::string> mlpo::test::FuzzSeeds() {
  using namespace std::string_literals;
  return {
      "[memory]\npool = \"1GiB\"\n\0--path=/mnt/a\0MLPO_MEMORY__POOL=2GiB\0--memory=3GiB"s,
      "\0--path=/a\0--path=/b\0--socket=/tmp/s\0MLPO_SOCKET=/tmp/t\0MLPO_DAEMON__NODE=n\0HOME=/nonexistent"s,
      "\0--path=/a\0MLPO_PATH__0__READ_LIMIT=1GB/s\0MLPO_ADAM__TARGET=scalar\0MLPO_SCHEDULER__ORDER=ascending"s,
      "\0--print-config\0--path=/a"s,
      "\0--check-config\0--path=/a"s,
      "\0--help"s,
      "\0--memory\0--path"s,
  };
}
