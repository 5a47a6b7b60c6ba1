// Paths that cannot take a block while a trainer trains: the daemon waits, then says which path, why and what is left;
// after space is back the identical update finishes what it began, to the bit.
#include <sys/resource.h>

#include <chrono>
#include <thread>

#include "tests/support/catch.h"
#include "tests/support/daemon_process.h"
#include "tests/support/daemon_status.h"
#include "tests/support/reference_trainer.h"

using namespace mlpo::test;
using mlpo::Client;

namespace {

// RLIMIT_FSIZE of a running daemon: writes beyond it are EFBIG, on every path.
void LimitFileBytes(const DaemonProcess& daemon, rlim_t bytes) {
  struct rlimit limit = {};
  REQUIRE(::prlimit(daemon.pid(), RLIMIT_FSIZE, nullptr, &limit) == 0);
  limit.rlim_cur = bytes;
  REQUIRE(::prlimit(daemon.pid(), RLIMIT_FSIZE, &limit, nullptr) == 0);
}

DaemonProcess::Options SmallPool(const char* engine) {
  return {.paths = 2, .memory = "147456", .engine = engine, .config = "[scheduler]\nno_path_timeout = 5\n"};
}

void FillAndGoOn(const char* engine) {
  DaemonProcess daemon(SmallPool(engine));
  Client client = Connect(daemon.socket());
  ReferenceTrainer trainer(client, {"large", 60'013, MLPO_BFLOAT16, MLPO_BFLOAT16, 1});
  trainer.Step();
  trainer.WriteGradient();
  trainer.subgroup().SubmitGrad().Wait();
  LimitFileBytes(daemon, 4096);  // nothing can be written any more
  const auto start = std::chrono::steady_clock::now();
  std::string text;
  int code = 0;
  try {
    trainer.SubmitUpdate().Wait();
  } catch (const mlpo::Error& error) {
    code = error.code();
    text = error.what();
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  CAPTURE(text);
  CHECK(code == MLPO_ERR_IO);
  CHECK(seconds > 4.5);
  CHECK(seconds < 30);
  CHECK(text.find("'path0' is full") != std::string::npos);
  CHECK(text.find("'path1' is full") != std::string::npos);
  CHECK(text.find("File too large") != std::string::npos);
  CHECK(text.find("RLIMIT_FSIZE") != std::string::npos);
  const nlohmann::json status = DaemonStatus(daemon.socket());
  for (const nlohmann::json& path : status.at("paths")) CHECK(path.at("state") == "full");
  REQUIRE(daemon.running());
  // While it is torn nothing else may touch it; other subgroups may go on as soon as there is space.
  CHECK_THROWS_AS(trainer.subgroup().Discard(), mlpo::Error);
  LimitFileBytes(daemon, RLIM_INFINITY);
  trainer.SubmitUpdate().Wait();
  trainer.StepReference();
  CHECK(trainer.Difference() == "");
  for (int i = 0; i < 3; ++i) trainer.Step();
  CHECK(trainer.Difference() == "");
  // Both come back by themselves: each is tried again a second after it failed.
  CHECK(Eventually([&] {
    trainer.Step();
    const nlohmann::json paths = DaemonStatus(daemon.socket()).at("paths");
    return paths.at(0).at("state") == "healthy" && paths.at(1).at("state") == "healthy";
  }));
  CHECK(trainer.Difference() == "");
}

}  // namespace

TEST_CASE("C11_BothPathsFullIsAClearErrorAndTheSameUpdateGoesOn") { FillAndGoOn("auto"); }
TEST_CASE("C11_BothPathsFullThreadEngine") { FillAndGoOn("threads"); }

// Files that may not grow to where some extents are: what does not fit goes elsewhere, and nothing is lost.
TEST_CASE("C11_PartlyFullPathsTakeWhatFits") {
  DaemonProcess::Options options = SmallPool("auto");
  options.path_settings = {"read_limit = \"600MB/s\"\nwrite_limit = \"600MB/s\"\n",
                           "read_limit = \"100MB/s\"\nwrite_limit = \"100MB/s\"\n"};
  DaemonProcess daemon(options);
  Client client = Connect(daemon.socket());
  ReferenceTrainer trainer(client, {"large", 160'013, MLPO_BFLOAT16, MLPO_BFLOAT16, 1});
  trainer.Step();
  LimitFileBytes(daemon, 4096 + 22 * 49'152);  // of 40 blocks the first path should hold 34
  for (int i = 0; i < 3; ++i) trainer.Step();
  CHECK(trainer.Difference() == "");
  uint64_t errors = 0;
  const nlohmann::json status = DaemonStatus(daemon.socket());
  for (const nlohmann::json& path : status.at("paths")) errors += path.at("write_errors").get<uint64_t>();
  CHECK(errors > 0);  // or nothing was shown
  LimitFileBytes(daemon, RLIM_INFINITY);
  trainer.Step();
  CHECK(trainer.Difference() == "");
}
