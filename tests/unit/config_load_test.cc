// What a configuration means: values, precedence, origins, printing and loading back, names and places.
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>

#include "daemon/base/name.h"
#include "daemon/config/settings.h"
#include "tests/unit/config_support.h"

using namespace mlpo;

namespace {

constexpr const char* kEverySetting = R"(
[daemon]
socket = "/run/mlpo/mlpo.sock"
node = "node-17"
admin_group = "hpc-admins"
group = "gpu"
log_level = "debug"
max_sessions = 12
drain_timeout = "5min"
metrics_file = "/run/mlpo/mlpo.prom"
metrics_interval = "30s"
metrics_listen = "127.0.0.1:9464"

[memory]
pool = "64GiB"
arenas = "48GB"
block = "2Mi"
huge_pages = "never"
lock = false

[adam]
workers = 6
pin = false
target = "avx2"

[scheduler]
queue_blocks = 8
no_path_timeout = 45
hang_timeout = "2h"
piece = "4MiB"
integrity = false

[checkpoint]
copy_share = 0.25
buffers = 8
readers = 2

[[path]]
name = "nvme"
directory = "/mnt/nvme"
persistent = false
capacity = "1.5TB"
engine = "io_uring"
direct = true
read_limit = "345MB/s"
write_limit = 180000000
duplex = 1.25
exclusive = true
share = "measured"

[[path]]
directory = "/scratch/pfs"
persistent = true
engine = "threads"
direct = false
turn = { blocks = 8, direction = "one" }
share = 0.25

[quota]
user_sessions = 64
user_requests = "8Ki"
user_arenas = "96GB"
user_capacity = "2TB"
user_pool = "16GB"
job_sessions = 8
job_requests = 1024
job_arenas = "48GB"
job_capacity = "1TB"
job_pool = "8GB"
)";

void CheckEverySetting(const Config& config) {
  CHECK(config.daemon.socket == "/run/mlpo/mlpo.sock");
  CHECK(config.daemon.node == "node-17");
  CHECK(config.daemon.admin_group == "hpc-admins");
  CHECK(config.daemon.group == "gpu");
  CHECK(config.daemon.log_level == "debug");
  CHECK(config.daemon.max_sessions == 12);
  CHECK(config.daemon.drain_timeout_s == 300);
  CHECK(config.daemon.metrics_file == "/run/mlpo/mlpo.prom");
  CHECK(config.daemon.metrics_interval_s == 30);
  CHECK(config.daemon.metrics_listen == "127.0.0.1:9464");
  CHECK(config.memory.pool_bytes == 68719476736ull);
  CHECK(config.memory.arenas_bytes == 48000000000ull);
  CHECK(config.memory.block_elements == 2097152);
  CHECK(config.memory.huge_pages == "never");
  CHECK_FALSE(config.memory.lock);
  CHECK(config.adam.workers == 6);
  CHECK_FALSE(config.adam.pin);
  CHECK(config.adam.target == "avx2");
  CHECK(config.scheduler.queue_blocks == 8);
  CHECK(config.scheduler.no_path_timeout_s == 45);
  CHECK(config.scheduler.hang_timeout_s == 7200);
  CHECK(config.scheduler.piece_bytes == 4194304);
  CHECK_FALSE(config.scheduler.integrity);
  CHECK(config.quota.user_sessions == 64);
  CHECK(config.quota.user_requests == 8192);
  CHECK(config.quota.user_arenas_bytes == 96'000'000'000ull);
  CHECK(config.quota.user_capacity_bytes == 2'000'000'000'000ull);
  CHECK(config.quota.user_pool_bytes == 16'000'000'000ull);
  CHECK(config.quota.job_pool_bytes == 8'000'000'000ull);
  CHECK(config.quota.job_sessions == 8);
  CHECK(config.quota.job_requests == 1024);
  CHECK(config.quota.job_arenas_bytes == 48'000'000'000ull);
  CHECK(config.quota.job_capacity_bytes == 1'000'000'000'000ull);
  CHECK(config.checkpoint.copy_share == 0.25);
  CHECK(config.checkpoint.buffers == 8);
  CHECK(config.checkpoint.writers == 2);
  CHECK(config.checkpoint.readers == 2);
  REQUIRE(config.paths.size() == 2);
  CHECK(config.paths[0].name == "nvme");
  CHECK(config.paths[0].directory == "/mnt/nvme");
  CHECK_FALSE(config.paths[0].persistent);
  CHECK(config.paths[0].capacity_bytes == 1500000000000ull);
  CHECK(config.paths[0].engine == "io_uring");
  CHECK(config.paths[0].direct);
  CHECK(config.paths[0].read_limit == 345e6);
  CHECK(config.paths[0].write_limit == 180e6);
  CHECK(config.paths[0].duplex == 1.25);
  CHECK(config.paths[0].exclusive);
  CHECK(config.paths[0].share_rule == ShareRule::kMeasured);
  CHECK(config.paths[0].turn_blocks == 0);
  CHECK(config.paths[0].turn_direction == "both");
  CHECK(config.paths[1].name == "pfs");
  CHECK(config.paths[1].directory == "/scratch/pfs");
  CHECK(config.paths[1].persistent);
  CHECK(config.paths[1].engine == "threads");
  CHECK_FALSE(config.paths[1].direct);
  CHECK(config.paths[1].capacity_bytes == 0);
  CHECK(config.paths[1].share_rule == ShareRule::kFixed);
  CHECK(config.paths[1].share == 0.25);
  CHECK(config.paths[1].turn_blocks == 8);
  CHECK(config.paths[1].turn_direction == "one");
}

}  // namespace

TEST_CASE("LoadConfig.EverySettingOfAFile") {
  ConfigScene scene;
  const Config config = scene.Good(scene.LoadText(kEverySetting));
  CheckEverySetting(config);
  CHECK(config.origins.at("memory.pool") == (scene.dir() / "mlpo.toml") + ":15");
  CHECK(config.origins.at("path.nvme.duplex") == (scene.dir() / "mlpo.toml") + ":47");
  CHECK(config.origins.at("path.pfs.capacity") == "default");
}

TEST_CASE("LoadConfig.ANodesShareOfAPathIsANumberOrARule") {
  ConfigScene scene;
  const auto share = [&](const std::string& text) {
    return scene.Good(scene.LoadText("[[path]]\ndirectory = \"/a\"\n" + text)).paths.at(0);
  };
  CHECK(share("").share_rule == ShareRule::kFixed);
  CHECK(share("").share == 1);
  CHECK(share("share = \"equal\"\n").share_rule == ShareRule::kEqual);
  CHECK(share("share = \"0.5\"\n").share == 0.5);  // as the environment has it
  CHECK(share("share = 1\n").share == 1);
  const LoadOutcome printed = scene.LoadText("[[path]]\ndirectory = \"/a\"\nshare = \"equal\"\n", {"--print-config"});
  CHECK(Has(printed.output, "share = \"equal\""));
}

TEST_CASE("LoadConfig.TheTableHasEveryFieldOfConfig") {
  // Each field of config.h must be settable and printed.
  CHECK(Settings().size() == 42);
  CHECK(PathSettings().size() == 15);
}

TEST_CASE("PrintConfig.LoadsBackToTheSame") {
  ConfigScene scene;
  const std::string file = scene.Write("first.toml", kEverySetting);
  const LoadOutcome printed = scene.Load({"--config", file, "--print-config"});
  REQUIRE(printed.errors == "");
  CHECK(printed.exit_code == 0);
  CHECK_FALSE(printed.config.has_value());
  CHECK(Has(printed.output, "pool = \"64GiB\"  # " + file + ":15"));
  CHECK(Has(printed.output, "capacity = 0  # default"));
  CheckEverySetting(scene.Good(scene.LoadText(printed.output)));

  // Awkward values, through flags and environment.
  const std::string odd = "/mnt/quo\"te \\ # \xc3\xa4";
  scene.environment["MLPO_MEMORY__POOL"] = "68719476737";
  const LoadOutcome second =
      scene.Load({"--path", "x=" + odd, "--path", "/mnt/b", "--socket", "/tmp/a b.sock", "--print-config"});
  REQUIRE(second.errors == "");
  scene.environment.clear();
  const Config config = scene.Good(scene.LoadText(second.output));
  CHECK(config.paths.at(0).directory == odd);
  CHECK(config.paths.at(0).name == "x");
  CHECK(config.daemon.socket == "/tmp/a b.sock");
  CHECK(config.memory.pool_bytes == 68719476737ull);
  // Printing what was loaded changes origins only.
  const std::string again = scene.LoadText(second.output, {"--print-config"}).output;
  auto without_comments = [](const std::string& text) {
    std::string out;
    for (size_t at = 0; at < text.size();) {
      const size_t end = text.find('\n', at);
      out += text.substr(at, end - at).substr(0, text.substr(at, end - at).rfind("  # ")) + "\n";
      at = end + 1;
    }
    return out;
  };
  CHECK(without_comments(again) == without_comments(second.output));
}

TEST_CASE("PrintConfig.ShowsDefaultsWithoutAnyPath") {
  ConfigScene scene;
  const LoadOutcome outcome = scene.Load({"--print-config"});
  CHECK(outcome.exit_code == 0);
  CHECK(Has(outcome.output, "block = \"1Mi\"  # default"));
  CHECK(Has(outcome.output, "drain_timeout = \"5min\"  # default"));
  CHECK_FALSE(Has(outcome.output, "[[path]]"));
}

TEST_CASE("LoadConfig.CommandLineOverEnvironmentOverFileOverDefault") {
  ConfigScene scene;
  const std::string text = "[memory]\npool = \"1GiB\"\n";
  Config config = scene.Good(scene.Load({"--path", "/mnt/a"}));
  CHECK(config.memory.pool_bytes == 0);
  CHECK(config.origins.at("memory.pool") == "default");
  CHECK(scene.Good(scene.LoadText(text)).memory.pool_bytes == 1u << 30);
  scene.environment["MLPO_MEMORY__POOL"] = "2GiB";
  config = scene.Good(scene.LoadText(text));
  CHECK(config.memory.pool_bytes == 2ull << 30);
  CHECK(config.origins.at("memory.pool") == "environment MLPO_MEMORY__POOL");
  config = scene.Good(scene.LoadText(text, {"--memory", "3GiB"}));
  CHECK(config.memory.pool_bytes == 3ull << 30);
  CHECK(config.origins.at("memory.pool") == "command line --memory");
}

TEST_CASE("LoadConfig.EnvironmentSetsEveryKindOfValue") {
  ConfigScene scene;
  scene.environment = {{"MLPO_MEMORY__LOCK", "false"},      {"MLPO_ADAM__WORKERS", "7"},
                       {"MLPO_ADAM__TARGET", "scalar"},     {"MLPO_SCHEDULER__NO_PATH_TIMEOUT", "2min"},
                       {"MLPO_MEMORY__BLOCK", "64Ki"},      {"MLPO_JOB", "ignored: the clients'"},
                       {"MLPO_DAEMON__LOG_LEVEL", "error"}, {"OTHER__THING", "x"}};
  const Config config = scene.Good(scene.Load({"--path", "/mnt/a"}));
  CHECK_FALSE(config.memory.lock);
  CHECK(config.adam.workers == 7);
  CHECK(config.adam.target == "scalar");
  CHECK(config.scheduler.no_path_timeout_s == 120);
  CHECK(config.memory.block_elements == 65536);
  CHECK(config.daemon.log_level == "error");
}

TEST_CASE("LoadConfig.SystemFileThenUserFileUnlessOneIsGiven") {
  ConfigScene scene;
  scene.Write("etc.toml", "[memory]\npool = \"1GiB\"\nblock = 2048\n[[path]]\ndirectory = \"/mnt/system\"\n");
  Config config = scene.Good(scene.Load({}));
  CHECK(config.memory.pool_bytes == 1u << 30);
  CHECK(config.paths.at(0).directory == "/mnt/system");

  std::filesystem::create_directories(scene.dir() / "home/.config/mlpo");
  scene.Write("home/.config/mlpo/mlpo.toml", "[memory]\npool = \"2GiB\"\n");
  scene.environment["HOME"] = scene.dir() / "home";
  config = scene.Good(scene.Load({}));
  CHECK(config.memory.pool_bytes == 2ull << 30);
  CHECK(config.memory.block_elements == 2048);
  CHECK(config.paths.size() == 1);

  std::filesystem::create_directories(scene.dir() / "xdg/mlpo");
  scene.Write("xdg/mlpo/mlpo.toml", "[[path]]\ndirectory = \"/mnt/user\"\n");
  scene.environment["XDG_CONFIG_HOME"] = scene.dir() / "xdg";
  config = scene.Good(scene.Load({}));
  CHECK(config.memory.pool_bytes == 1u << 30);
  CHECK(config.paths.size() == 1);
  CHECK(config.paths.at(0).directory == "/mnt/user");

  const std::string only = scene.Write("only.toml", "[[path]]\ndirectory = \"/mnt/only\"\n");
  config = scene.Good(scene.Load({"--config", only}));
  CHECK(config.memory.pool_bytes == 0);
  CHECK(config.paths.at(0).directory == "/mnt/only");
}

TEST_CASE("LoadConfig.PathFlagsReplaceTheFilesPathsAndKeepTheirSettings") {
  ConfigScene scene;
  const Config config = scene.Good(scene.LoadText(
      kEverySetting, {"--path", "/mnt/nvme/", "--path", "data=/mnt/data", "--path", "/other/data", "--path", "/"}));
  REQUIRE(config.paths.size() == 4);
  CHECK(config.paths[0].name == "nvme");
  CHECK(config.paths[0].read_limit == 345e6);
  CHECK(config.paths[1].name == "data");
  CHECK(config.paths[1].read_limit == 0);
  CHECK(config.paths[2].name == "data-2");  // made unique
  CHECK(config.paths[3].name == "root");
  CHECK(config.origins.at("path.data.directory") == "command line --path");
  CHECK(config.origins.at("path.nvme.read_limit") == (scene.dir() / "mlpo.toml") + ":45");
}

TEST_CASE("LoadConfig.RelativeFlagsAreMadeAbsolute") {
  ConfigScene scene;
  const std::string here = std::filesystem::current_path().string();
  const Config config = scene.Good(scene.Load({"--path", "a/../b", "--path", "./x=y", "--socket", "s.sock"}));
  CHECK(config.paths.at(0).directory == here + "/b");
  CHECK(config.paths.at(1).directory == here + "/x=y");
  CHECK(config.paths.at(1).name == "x_y");
  CHECK(config.daemon.socket == here + "/s.sock");
}

TEST_CASE("LoadConfig.SocketFromFlagVariableAndFile") {
  ConfigScene scene;
  const std::string text = "[daemon]\nsocket = \"/s/file\"\n";
  CHECK(scene.Good(scene.LoadText(text)).daemon.socket == "/s/file");
  scene.environment["MLPO_SOCKET"] = "/s/client";
  CHECK(scene.Good(scene.LoadText(text)).daemon.socket == "/s/client");
  scene.environment["MLPO_DAEMON__SOCKET"] = "/s/daemon";
  CHECK(scene.Good(scene.LoadText(text)).daemon.socket == "/s/daemon");
  CHECK(scene.Good(scene.LoadText(text, {"--socket", "/s/flag"})).daemon.socket == "/s/flag");
}

TEST_CASE("LoadConfig.NodeIsTheHostNameUnlessSet") {
  ConfigScene scene;
  char host[256] = {};
  REQUIRE(::gethostname(host, sizeof host - 1) == 0);
  const LoadOutcome outcome = scene.Load({"--path", "/mnt/a"});
  if (!IsName(host)) {
    CHECK(Has(outcome.errors, "set daemon.node"));
    return;
  }
  CHECK(scene.Good(outcome).daemon.node == host);
  CHECK(outcome.config->origins.at("daemon.node") == "host name");
}

TEST_CASE("LoadConfig.HelpVersionAndCheck") {
  ConfigScene scene;
  LoadOutcome outcome = scene.Load({"--version"});
  CHECK(outcome.exit_code == 0);
  CHECK_FALSE(outcome.config.has_value());
  CHECK(outcome.output == std::string("mlpo-daemon ") + DaemonVersion() + "\n");
  outcome = scene.Load({"--help"});
  CHECK(outcome.exit_code == 0);
  for (const char* flag : {"--config", "--socket", "--path", "--memory", "--check-config", "--print-config"})
    CHECK(Has(outcome.output, flag));
  outcome = scene.Load({"--check-config", "--path", "/mnt/a"});
  CHECK(outcome.exit_code == 0);
  CHECK(outcome.errors == "");
  CHECK_FALSE(outcome.config.has_value());
}

TEST_CASE("ResolveSocket.TriesInOrder") {
  ConfigScene scene;
  Config config;
  const std::string run = scene.dir() / "run";
  std::filesystem::create_directory(run);
  Result<std::string> socket = ResolveSocket(config, scene.environment, run);
  REQUIRE_FALSE(socket.ok());
  CHECK(Has(socket.status().message(), "--socket"));
  scene.environment["XDG_RUNTIME_DIR"] = "relative";
  CHECK_FALSE(ResolveSocket(config, scene.environment, run).ok());
  scene.environment["XDG_RUNTIME_DIR"] = scene.dir() / "xdg";
  CHECK(ResolveSocket(config, scene.environment, run).status().code() == -ENOENT);
  std::filesystem::create_directory(scene.dir() / "xdg");
  CHECK(*ResolveSocket(config, scene.environment, run) == (scene.dir() / "xdg/mlpo/mlpo.sock"));
  struct stat st;
  REQUIRE(::stat((scene.dir() / "xdg/mlpo").c_str(), &st) == 0);
  CHECK((st.st_mode & 0777) == 0700);
  CHECK(ResolveSocket(config, scene.environment, run).ok());  // it exists now
  const std::string own = run + "/" + std::to_string(::geteuid());
  std::filesystem::create_directory(own);
  CHECK(*ResolveSocket(config, scene.environment, run) == own + "/mlpo.sock");
  if (::geteuid() == 0) {  // a folder there of somebody else is not used
    REQUIRE(::chown(own.c_str(), 65534, 65534) == 0);
    CHECK(*ResolveSocket(config, scene.environment, run) == (scene.dir() / "xdg/mlpo/mlpo.sock"));
  } else {
    WARN("skipped: a foreign folder needs root to make");
  }
  config.daemon.socket = "/s/given";
  CHECK(*ResolveSocket(config, scene.environment, run) == "/s/given");
}
