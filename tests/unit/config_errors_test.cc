// What is wrong with a configuration is said once, with its place, what it is and what would be right.
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <initializer_list>

#include "tests/unit/config_support.h"

using namespace mlpo;

namespace {

// The line of `errors` that has `part`; "" if there is none.
std::string LineWith(const std::string& errors, const std::string& part) {
  for (size_t at = 0; at < errors.size();) {
    const size_t end = errors.find('\n', at);
    const std::string line = errors.substr(at, end - at);
    if (Has(line, part)) return line;
    at = end + 1;
  }
  return "";
}

size_t Lines(const std::string& text) { return static_cast<size_t>(std::count(text.begin(), text.end(), '\n')); }

// Loads `text`, expects one problem in line `line` that has all `parts`.
void ExpectOne(const std::string& text, int line, std::initializer_list<const char*> parts) {
  ConfigScene scene;
  const LoadOutcome outcome = scene.LoadText(text);
  INFO(text << "\n=> " << outcome.errors);
  CHECK_FALSE(outcome.config.has_value());
  CHECK(outcome.exit_code == 78);
  CHECK(Lines(outcome.errors) == 1);
  CHECK(Has(outcome.errors, "mlpo.toml:" + std::to_string(line) + ": "));
  for (const char* part : parts) CHECK(Has(outcome.errors, part));
}

}  // namespace

TEST_CASE("LoadConfig.UnknownKeysNameTheNearest") {
  ExpectOne("[memory]\npoool = 1\n", 2, {"memory.poool", "did you mean memory.pool?"});
  ExpectOne("[daemon]\n\npool = \"1GiB\"\n", 3, {"daemon.pool", "did you mean memory.pool?"});
  ExpectOne("[memry]\npool = \"1GiB\"\n", 1, {"[memry]", "did you mean [memory]?"});
  ExpectOne("[wholly.different]\nx = 1\n", 1,
            {"[wholly]", "known: [daemon] [memory] [adam] [scheduler] [quota] [checkpoint] [[path]]"});
  ExpectOne("[quotas]\njob_sessions = 1\n", 1, {"[quotas]", "did you mean [quota]?"});
  ExpectOne("[quota]\njob_session = 1\n", 2, {"quota.job_session", "did you mean quota.job_sessions?"});
  ExpectOne("pool = \"1GiB\"\n", 1, {"unknown key pool", "memory.pool"});
  ExpectOne("[[path]]\ndirectory = \"/a\"\nreadlimit = 1\n", 3, {"path.readlimit", "did you mean read_limit?"});
  ExpectOne("[[path]]\ndirectory = \"/a\"\nturn = { block = 4 }\n", 3,
            {"path.turn.block", "did you mean turn.blocks?"});
  ExpectOne("[[path]]\ndirectory = \"/a\"\nturn = 4\n", 3, {"unknown key path.turn"});
}

TEST_CASE("LoadConfig.KeysAndSectionsUsedTwiceNameBothPlaces") {
  ExpectOne("[memory]\npool = \"1GiB\"\nlock = true\npool = \"2GiB\"\n", 4, {"memory.pool is set twice", "line 2"});
  ExpectOne("[memory]\nlock = true\n[adam]\npin = true\n[memory]\n", 5, {"section [memory] is set twice", "line 1"});
  ExpectOne("[[path]]\ndirectory = \"/a\"\n[[path]]\ndirectory = \"/b\"\ndirectory = \"/c\"\n", 5,
            {"path.directory is set twice", "line 4"});
}

TEST_CASE("LoadConfig.WrongTypesSayWhatIsWanted") {
  ExpectOne("[memory]\npool = true\n", 2, {"memory.pool", "a size such as", "not a boolean"});
  ExpectOne("[memory]\npool = [1]\n", 2, {"not a table, array or date"});
  ExpectOne("[memory]\npool = { bytes = 1 }\n", 2, {"memory.pool", "not a table"});
  ExpectOne("[memory]\nlock = \"true\"\n", 2, {"true or false", "not a string"});
  ExpectOne("[memory]\nlock = 1\n", 2, {"true or false", "not an integer"});
  ExpectOne("[adam]\nworkers = \"4\"\n", 2, {"an integer", "not a string"});
  ExpectOne("[adam]\nworkers = 1979-05-27\n", 2, {"an integer"});
  ExpectOne("[daemon]\nnode = 7\n", 2, {"daemon.node", "a string", "not an integer"});
  ExpectOne("[path]\ndirectory = \"/a\"\n", 1, {"[[path]]", "two brackets"});
  ExpectOne("path = [1]\n", 1, {"[[path]]"});
  ExpectOne("memory = 3\n", 1, {"unknown key memory"});
}

TEST_CASE("LoadConfig.OutOfRangeSaysWhatIsAllowed") {
  ExpectOne("[memory]\npool = -1\n", 2, {"negative"});
  ExpectOne("[memory]\npool = \"-1GiB\"\n", 2, {"negative"});
  ExpectOne("[memory]\npool = nan\n", 2, {"finite"});
  ExpectOne("[memory]\npool = inf\n", 2, {"finite"});
  ExpectOne("[memory]\npool = 1e300\n", 2, {"too large"});
  ExpectOne("[memory]\npool = \"99999999999TB\"\n", 2, {"too large"});
  ExpectOne("[memory]\npool = 1.5\n", 2, {"whole number"});
  ExpectOne("[memory]\npool = \"12XB\"\n", 2, {"memory.pool", "12XB", "GiB"});
  ExpectOne("[memory]\nblock = 1000\n", 2, {"memory.block", "1Ki to 16Mi"});
  ExpectOne("[memory]\nblock = 1025\n", 2, {"multiple of 1Ki"});
  ExpectOne("[memory]\npool = \"35MiB\"\n", 2, {"35MiB", "36MiB"});  // 3 blocks of 12 MiB
  ExpectOne("[scheduler]\npiece = \"9MiB\"\n", 2, {"1MiB to 8MiB"});
  ExpectOne("[scheduler]\nno_path_timeout = 0\n", 2, {"1s to 1d"});
  ExpectOne("[checkpoint]\ncopy_share = 0.01\n", 2, {"0.05 to 1"});
  ExpectOne("[checkpoint]\nbuffers = 65\n", 2, {"1 to 64"});
  ExpectOne("[daemon]\nmax_sessions = 0\n", 2, {"1 to 65536"});
  ExpectOne("[daemon]\nlog_level = \"loud\"\n", 2, {"loud", "trace, debug, info, warning, error"});
  ExpectOne("[adam]\ntarget = \"sse2\"\n", 2, {"auto, scalar, avx2, avx512"});
  ExpectOne("[adam]\nworkers = 4294967297\n", 2, {"1 to 1024"});
  ExpectOne("[[path]]\ndirectory = \"/a\"\nengine = \"aio\"\n", 3, {"auto, io_uring, threads"});
  ExpectOne("[[path]]\ndirectory = \"/a\"\nexclusive = true\nturn = { blocks = 4 }\n", 1, {"leave out turn.blocks"});
  ExpectOne("[[path]]\ndirectory = \"/a\"\nturn = { direction = \"one\" }\n", 1, {"needs turn.blocks"});
  ExpectOne("[[path]]\ndirectory = \"/a\"\nduplex = 2.5\n", 3, {"path.duplex", "0.5 to 2"});
  ExpectOne("[[path]]\ndirectory = \"/a\"\nread_limit = -5\n", 3, {"path.read_limit"});
  for (const char* share : {"0", "-1", "1.5", "nan", "\"half\"", "true"}) {
    ExpectOne("[[path]]\ndirectory = \"/a\"\nshare = " + std::string(share) + "\n", 3,
              {"path.share", "above 0 and at most 1, \"equal\" or \"measured\""});
  }
  ExpectOne("[[path]]\ndirectory = \"/a\"\nread_limit = nan\n", 3, {"finite"});
  ExpectOne("[[path]]\ndirectory = \"/a\"\nread_limit = \"345MB\"\n", 3, {"345MB", "MB/s"});
}

TEST_CASE("C30_LoadConfig.NamesAndPlacesThatCouldEscapeAreRefused") {
  ExpectOne("[daemon]\nnode = \"a/b\"\n", 2, {"daemon.node", "a/b", "not a name"});
  ExpectOne("[daemon]\nnode = \"a\\nb\"\n", 2, {"a\\x0ab", "not a name"});
  ExpectOne("[daemon]\nnode = \"..\"\n", 2, {"not a name"});
  ExpectOne("[[path]]\ndirectory = \"/a\"\nname = \"../x\"\n", 3, {"path.name", "not a name"});
  ExpectOne("[[path]]\ndirectory = \"relative\"\n", 2, {"absolute"});
  ExpectOne("[[path]]\ndirectory = \"/a\\u0007\"\n", 2, {"control characters"});
  ExpectOne("[[path]]\ndirectory = \"\"\n", 2, {"must not be empty"});
  ExpectOne("[[path]]\nname = \"a\"\n", 1, {"needs a directory"});
  ExpectOne("[daemon]\nsocket = \"mlpo.sock\"\n", 2, {"absolute"});
  ExpectOne("[daemon]\nsocket = \"/" + std::string(103, 'x') + "\"\n", 2, {"104 bytes", "103"});
}

TEST_CASE("LoadConfig.PathsMustDiffer") {
  ExpectOne("[[path]]\ndirectory = \"/a\"\n[[path]]\ndirectory = \"/b/../a/\"\n", 3, {"already a path", "mlpo.toml:1"});
  ExpectOne("[[path]]\ndirectory = \"/a\"\nname = \"x\"\n[[path]]\ndirectory = \"/b\"\nname = \"x\"\n", 4,
            {"name x is already taken", "mlpo.toml:1"});
  ConfigScene scene;
  CHECK(Has(scene.Load({"--path", "/mnt/a", "--path", "/mnt/a"}).errors, "already a path"));
}

TEST_CASE("LoadConfig.AllProblemsAreListedAndSyntaxErrorsHidePrecedingNone") {
  ConfigScene scene;
  scene.environment["MLPO_ADAM__WORKRES"] = "3";
  const LoadOutcome outcome =
      scene.LoadText("[memory]\npoool = 1\nlock = 3\n[scheduler]\npiece = 7\nqueue_blocks = = 1\n[adam]\npin = 5\n");
  INFO(outcome.errors);
  CHECK(outcome.exit_code == 78);
  CHECK(LineWith(outcome.errors, "toml:2: ") != "");
  CHECK(LineWith(outcome.errors, "toml:3: ") != "");
  CHECK(LineWith(outcome.errors, "toml:5: ") != "");
  CHECK(Has(LineWith(outcome.errors, "toml:6: "), "queue_blocks = = 1"));
  CHECK(Has(LineWith(outcome.errors, "MLPO_ADAM__WORKRES"), "did you mean MLPO_ADAM__WORKERS?"));
  CHECK(Lines(outcome.errors) == 5);
}

TEST_CASE("LoadConfig.AfterAKeyUsedTwiceTheRestIsStillRead") {
  ConfigScene scene;
  const LoadOutcome outcome =
      scene.LoadText("[memory]\npool = \"1GiB\"\npool = \"2GiB\"\nlock = 3\npool = 4\n[adam]\npins = 5\n");
  INFO(outcome.errors);
  CHECK(Has(LineWith(outcome.errors, "toml:3: "), "memory.pool is set twice: here and in line 2"));
  CHECK(Has(LineWith(outcome.errors, "toml:5: "), "memory.pool is set twice: here and in line 2"));
  CHECK(LineWith(outcome.errors, "toml:4: ") != "");
  CHECK(LineWith(outcome.errors, "toml:7: ") != "");
  CHECK(Lines(outcome.errors) == 4);
}

TEST_CASE("LoadConfig.EnvironmentErrorsNameTheVariable") {
  ConfigScene scene;
  scene.environment["MLPO_MEMORY__LOCK"] = "maybe";
  CHECK(
      Has(scene.Load({"--path", "/mnt/a"}).errors, "environment MLPO_MEMORY__LOCK: memory.lock must be true or false"));
  scene.environment = {{"MLPO_MEMORY__POOL", "-4"}};
  CHECK(Has(scene.Load({"--path", "/mnt/a"}).errors, "negative"));
  scene.environment = {{"MLPO_PATH__DIRECTORY", "/x"}};
  CHECK(Has(scene.Load({"--path", "/mnt/a"}).errors, "--path"));
  scene.environment = {{"MLPO_DAEMON__POOL", "1"}};
  CHECK(Has(scene.Load({"--path", "/mnt/a"}).errors, "MLPO_MEMORY__POOL"));
  CHECK(scene.Load({"--path", "/mnt/a"}).exit_code == 78);
}

TEST_CASE("LoadConfig.WrongUsageIs64") {
  ConfigScene scene;
  for (const std::vector<std::string>& flags :
       std::vector<std::vector<std::string>>{{"--no-such-flag"},
                                             {"--path"},
                                             {"stray"},
                                             {"--path", ""},
                                             {"--path", "a="},
                                             {"--path", "-x=/mnt/a"},
                                             {"--path", "/mnt/a", "--memory", "12XB"},
                                             {"--path", "/mnt/a", "--memory", "-1"},
                                             {"--path", "/mnt/a", "--socket", ""},
                                             {"--path", "/mnt/a", "--config", ""},
                                             {"--path", "/mnt/a\nb"},
                                             {"--path", "/mnt/a", "--socket", "/a", "--socket", "/b"}}) {
    const LoadOutcome outcome = scene.Load(flags);
    INFO(flags[0] << " " << flags.back() << ": " << outcome.errors);
    CHECK(outcome.exit_code == 64);
    CHECK_FALSE(outcome.config.has_value());
    CHECK(Lines(outcome.errors) >= 1);
  }
}

TEST_CASE("LoadConfig.NoPathNamesTheFlag") {
  ConfigScene scene;
  for (const char* flag : {"--check-config", "--memory=1GiB"}) {
    const LoadOutcome outcome = scene.Load({flag});
    CHECK(outcome.exit_code == 78);
    CHECK(Has(outcome.errors, "--path DIR"));
  }
}

TEST_CASE("LoadConfig.FilesThatCannotBeRead") {
  ConfigScene scene;
  CHECK(Has(scene.Load({"--config", "/no/such/file.toml", "--path", "/a"}).errors, "/no/such/file.toml: No such file"));
  CHECK(Has(scene.Load({"--config", scene.dir().path(), "--path", "/a"}).errors, "not a regular file"));
  CHECK(Has(scene.LoadText(std::string((1u << 20) + 1, '#')).errors, "more than 1 MiB"));
  CHECK(Has(scene.LoadText("[memory]\nhuge_pages = \"\xff\"\n").errors, "mlpo.toml:2"));
  REQUIRE(::mkfifo((scene.dir() / "pipe").c_str(), 0600) == 0);
  CHECK(Has(scene.Load({"--config", scene.dir() / "pipe", "--path", "/a"}).errors, "not a regular file"));
  if (::geteuid() == 0) {
    WARN("skipped: root reads files of mode 0");
  } else {
    scene.Write("etc.toml", "");
    REQUIRE(::chmod(scene.system_file.c_str(), 0) == 0);
    CHECK(Has(scene.Load({"--path", "/a"}).errors, "Permission denied"));
  }
}
