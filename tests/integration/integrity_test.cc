// A bit that flips in a daemon's working file while a trainer trains: the update that needs it fails and says where,
// nobody else notices, and with all of the state written again the run is right to the bit.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include "tests/support/catch.h"
#include "tests/support/daemon_process.h"
#include "tests/support/daemon_status.h"
#include "tests/support/reference_trainer.h"

using namespace mlpo::test;
using mlpo::Client;

namespace {

constexpr off_t kHeaderBytes = 4096;
constexpr off_t kExtentBytes = 49'152;  // of blocks of 4096 parameters

// Three buffers; the state of a trainer here is 15 blocks.
DaemonProcess::Options SmallPool(const char* engine, const char* integrity) {
  return {.paths = 1,
          .memory = "147456",
          .engine = engine,
          .config = std::string("[scheduler]\nintegrity = ") + integrity + "\n"};
}

std::string FileOfRank(const DaemonProcess& daemon, int rank) {
  for (const std::string& file : daemon.ScratchFiles()) {
    const std::string folder = std::filesystem::path(file).parent_path().filename();  // <rank>-<generation>
    if (folder.starts_with(std::to_string(rank) + "-")) return file;
  }
  FAIL("rank " << rank << " has no file");
  return "";
}

// One bit in each place that a block can have, in its master parameters.
void FlipBits(const std::string& file) {
  const int fd = ::open(file.c_str(), O_RDWR | O_CLOEXEC);
  REQUIRE(fd >= 0);
  struct stat st = {};
  REQUIRE(::fstat(fd, &st) == 0);
  bool done = st.st_size > kHeaderBytes;
  for (off_t at = kHeaderBytes + 4001; at < st.st_size; at += kExtentBytes) {
    char byte = 0;
    done &= ::pread(fd, &byte, 1, at) == 1;
    byte ^= 0x40;
    done &= ::pwrite(fd, &byte, 1, at) == 1;
  }
  done &= ::fsync(fd) == 0;
  ::close(fd);
  REQUIRE(done);
}

struct Outcome {
  int code = 0;
  std::string text;
};
template <class F>
Outcome Try(F f) {
  try {
    f();
    return {};
  } catch (const mlpo::Error& error) {
    return {error.code(), error.what()};
  }
}

void FlipAndGoOn(const char* engine) {
  DaemonProcess daemon(SmallPool(engine, "true"));
  Client client = Connect(daemon.socket(), "test", 0, 2), other_client = Connect(daemon.socket(), "test", 1, 2);
  ReferenceTrainer trainer(client, {"large", 60'013, MLPO_BFLOAT16, MLPO_BFLOAT16, 1});
  ReferenceTrainer other(other_client, {"other", 60'013, MLPO_BFLOAT16, MLPO_BFLOAT16, 2});
  for (int i = 0; i < 2; ++i) {
    trainer.Step();
    other.Step();
  }
  trainer.WriteGradient();
  trainer.subgroup().SubmitGrad().Wait();
  FlipBits(FileOfRank(daemon, 0));
  const Outcome failed = Try([&] { trainer.SubmitUpdate().Wait(); });
  CAPTURE(failed.text);
  CHECK(failed.code == MLPO_ERR_IO);
  for (const char* part : {"master in block ", "subgroup 'large'", "path 'path0'", "wrong checksum"}) {
    CHECK(failed.text.find(part) != std::string::npos);
  }
  const nlohmann::json path = DaemonStatus(daemon.socket()).at("paths").at(0);
  CHECK(path.at("checksum_errors") >= 1);
  CHECK(path.at("checksum_mismatches") >= path.at("checksum_errors"));
  CHECK(Eventually([&] { return daemon.log().find("event=wrong_checksum_again path=path0") != std::string::npos; }));

  other.Step();
  CHECK(other.Difference() == "");
  const Outcome again = Try([&] { trainer.SubmitUpdate().Wait(); });
  CHECK(again.code == MLPO_ERR_IO);

  (void)Try([&] { trainer.subgroup().Discard(); });  // refused if other blocks have been updated; then it is torn
  trainer.RestoreState();
  trainer.RewriteGradient();
  trainer.subgroup().SubmitGrad().Wait();
  trainer.SubmitUpdate().Wait();
  trainer.StepReference();
  CHECK(trainer.Difference() == "");
  for (int i = 0; i < 3; ++i) {
    trainer.Step();
    other.Step();
  }
  CHECK(trainer.Difference() == "");
  CHECK(other.Difference() == "");
}

}  // namespace

TEST_CASE("Integrity.AFlippedBitFailsItsUpdateAndNobodyElses") { FlipAndGoOn("auto"); }
TEST_CASE("Integrity.AFlippedBitThreadEngine") { FlipAndGoOn("threads"); }

// The same bits without checksums: nobody notices, and the state is wrong. So the test above shows what it seems to.
TEST_CASE("Integrity.WithoutChecksumsTheSameBitsAreBelieved") {
  DaemonProcess daemon(SmallPool("auto", "false"));
  Client client = Connect(daemon.socket(), "test", 0, 1);
  ReferenceTrainer trainer(client, {"large", 60'013, MLPO_BFLOAT16, MLPO_BFLOAT16, 1});
  for (int i = 0; i < 2; ++i) trainer.Step();
  FlipBits(FileOfRank(daemon, 0));
  trainer.Step();
  CHECK(trainer.Difference() != "");
  CHECK(DaemonStatus(daemon.socket()).at("paths").at(0).at("checksum_mismatches") == 0);
}
