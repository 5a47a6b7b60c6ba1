// A path on a file system of a test's own (faultfs) that is slow, silent, over its quota, or a pass-through to another
// one: what a daemon makes of it, with a trainer whose bits are compared.
#include <fcntl.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "daemon/base/unique_fd.h"
#include "daemon/session/frame.h"
#include "tests/support/catch.h"
#include "tests/support/checkpoints.h"
#include "tests/support/daemon_process.h"
#include "tests/support/daemon_status.h"
#include "tests/support/fault_fs.h"
#include "tests/support/raw_session.h"
#include "tests/support/reference_trainer.h"

using namespace mlpo::test;
using mlpo::Client;
namespace fs = std::filesystem;

namespace {

constexpr uint64_t kNumel = 200'003;  // 49 blocks; the pool has eight

bool Missing(const FaultFs& faulty) {
  if (faulty.ok()) return false;
  WARN("skipped: " << faulty.reason());
  return true;
}

// The path 'faulty', and others in the temporary folder.
DaemonProcess::Options On(const FaultFs& faulty, int others, const std::string& settings = "") {
  DaemonProcess::Options options;
  options.paths = others;
  options.memory = std::to_string(8 * 49'152);
  options.config = "[[path]]\nname = \"faulty\"\ndirectory = \"" + faulty.point() + "\"\n" + settings;
  return options;
}

nlohmann::json FaultyPath(const DaemonProcess& daemon) {
  const nlohmann::json status = DaemonStatus(daemon.socket());
  for (const nlohmann::json& path : status.at("paths")) {
    if (path.at("name") == "faulty") return path;
  }
  FAIL("status does not have the path");
  return {};
}

std::vector<fs::path> StateFiles(const FaultFs& faulty) {
  std::vector<fs::path> files;
  std::error_code error;  // files go while we look
  for (fs::recursive_directory_iterator it(faulty.source(), error), end; it != end && !error; it.increment(error)) {
    if (it->path().filename() == "state") files.push_back(it->path());
  }
  return files;
}

size_t WorkingFiles(const FaultFs& faulty) { return StateFiles(faulty).size(); }

size_t CheckpointFiles(const FaultFs& faulty, const std::string& prefix) {
  size_t count = 0;
  std::error_code error;  // files go while we look
  fs::recursive_directory_iterator it(faulty.source() + "/checkpoints", error), end;
  for (; it != end && !error; it.increment(error)) {
    count += it->is_regular_file(error) && it->path().filename().string().starts_with(prefix) ? 1 : 0;
  }
  return count;
}

int CodeOf(const std::function<void()>& act) {
  try {
    act();
    return 0;
  } catch (const mlpo::Error& error) {
    return error.code();
  }
}

// An update that has begun, and that many slow writes are still to come of.
mlpo::Request LongUpdate(FaultFs& faulty, ReferenceTrainer& trainer) {
  trainer.Step();
  faulty.Rule("write delay 25 name=/state from=4096");
  trainer.WriteGradient();
  trainer.subgroup().SubmitGrad().Wait();
  mlpo::Request update = trainer.SubmitUpdate();
  REQUIRE(Eventually([&] { return faulty.Of("write").acted > 0; }));
  REQUIRE(!update.done());
  return update;
}

// A checkpoint that is being copied to storage that is slow, by a client that may have gone: two seconds and more of it
// are still to come. All paths are well.
class SlowSave {
 public:
  explicit SlowSave(bool client_goes) : daemon_(OnTwoPaths()), directory_(slow_.point() + "/checkpoints") {
    if (!slow_.ok()) return;
    REQUIRE(fs::create_directory(directory_));
    client_.emplace(Connect(daemon_.socket()));
    trainer_.emplace(*client_, kTrainer);
    for (int i = 0; i < 2; ++i) trainer_->Step();
    taken_ = trainer_->expected();
    Save save(*client_, directory_, "one", 2);
    slow_.Rule("write delay 100");
    mlpo::Request take = save.Take();
    saved_.emplace(save.Saved());
    take.Wait();
    REQUIRE(Eventually([&] { return Running("copying"); }));
    if (!client_goes) return;
    saved_.reset();
    client_->Close();
    REQUIRE(Eventually([&] { return DaemonStatus(daemon_.socket()).at("sessions").empty(); }));
    REQUIRE(Running("copying"));
  }

  const FaultFs& slow() const { return slow_; }
  DaemonProcess& daemon() { return daemon_; }
  mlpo::Request& saved() { return *saved_; }
  void BeginsToStop() {
    daemon_.Signal(SIGTERM);
    REQUIRE(Eventually([&] { return DaemonStatus(daemon_.socket()).at("state") == "draining"; }));
  }
  size_t Files(const std::string& prefix = "") const { return CheckpointFiles(slow_, prefix); }
  // In a new daemon: -ENOENT, there is none that is complete; 0: what it has is the state as it was taken, to the bit.
  int Restore() {
    saved_.reset();
    trainer_.reset();
    client_.reset();
    Client client = Connect(daemon_.socket());
    ReferenceTrainer trainer(client, kTrainer);
    const int code = CodeOf([&] {
      Restoring restoring(client, directory_, "one");
      restoring.Submit(trainer.subgroup()).Wait();
      restoring.End();
    });
    if (code != 0) return code;
    trainer.GoOnFrom(taken_);
    CHECK(trainer.Difference() == "");
    return 0;
  }

 private:
  static inline const TrainerOptions kTrainer = {"large", kNumel};
  static DaemonProcess::Options OnTwoPaths() {
    DaemonProcess::Options options;
    options.memory = std::to_string(8 * 49'152);
    return options;
  }
  bool Running(const std::string& phase) const {
    const nlohmann::json status = DaemonStatus(daemon_.socket());
    const nlohmann::json& running = status.at("checkpoints").at("running");
    return running.size() == 1 && running[0].at("phase") == phase;
  }

  FaultFs slow_;
  DaemonProcess daemon_;
  const std::string directory_;
  std::optional<Client> client_;
  std::optional<ReferenceTrainer> trainer_;
  std::optional<mlpo::Request> saved_;
  ReferenceTrainer::Expected taken_;
};

}  // namespace

TEST_CASE("C11_APathOverItsQuotaIsFullNotBrokenAndComesBack") {
  FaultFs faulty;
  if (Missing(faulty)) return;
  DaemonProcess daemon(On(faulty, 1));
  Client client = Connect(daemon.socket());
  ReferenceTrainer trainer(client, {"large", kNumel});
  for (int i = 0; i < 2; ++i) trainer.Step();
  REQUIRE(FaultyPath(daemon).at("scratch_bytes") > 0);
  faulty.Rule("write error " + std::to_string(EDQUOT) + " name=/state from=4096");
  REQUIRE(Eventually([&] {
    trainer.Step();
    const std::string state = FaultyPath(daemon).at("state");
    CHECK((state == "healthy" || state == "full"));
    return state == "full" && faulty.Of("write").acted > 0;
  }));
  for (int i = 0; i < 2; ++i) trainer.Step();  // all of it elsewhere
  CHECK(trainer.Difference() == "");
  faulty.Clear();
  const uint64_t written = FaultyPath(daemon).at("written_bytes");
  CHECK(Eventually([&] {
    trainer.Step();
    const nlohmann::json path = FaultyPath(daemon);
    return path.at("state") == "healthy" && path.at("written_bytes") > written;
  }));
  CHECK(trainer.Difference() == "");
}

// Neither its blocks nor what the daemon writes down about the save have to be there.
TEST_CASE("C11_AFullPathIsNoReasonNotToSave") {
  FaultFs faulty;
  if (Missing(faulty)) return;
  DaemonProcess daemon(On(faulty, 1));
  const std::string directory = daemon.folder() + "/checkpoints";
  REQUIRE(fs::create_directory(directory));
  Client client = Connect(daemon.socket());
  ReferenceTrainer trainer(client, {"large", kNumel});
  for (int i = 0; i < 2; ++i) trainer.Step();
  faulty.Rule("write error " + std::to_string(ENOSPC));
  Save save(client, directory, "one", 2);
  mlpo::Request take = save.Take(), saved = save.Saved();
  take.Wait();
  CHECK(saved.Wait().value == 1);
  trainer.Step();
  CHECK(trainer.Difference() == "");
}

// The save's files are there, and it wants the session's, when these are going already.
TEST_CASE("Checkpoint.OneWhoseSessionGoesAsItBeginsHarmsNobody") {
  FaultFs faulty;
  if (Missing(faulty)) return;
  DaemonProcess daemon(On(faulty, 0));
  const std::string directory = faulty.point() + "/checkpoints";
  REQUIRE(fs::create_directory(directory));
  {
    RawSession session(daemon.socket(), MakeHello("goes"));
    session.Register("layer", 20'000);
    faulty.Rule("fsync delay 300 name=-0");       // of the part: the session has ended when it has been begun
    faulty.Rule("flush delay 1500 name=/state");  // as the working file is closed, before it is removed
    auto frame = mlpo::MakeFrame<mlpo_checkpoint>(MLPO_FRAME_CHECKPOINT, 7);
    frame.tag_bytes = 1;
    frame.tag[0] = 't';
    frame.directory_bytes = static_cast<uint32_t>(directory.copy(frame.directory, sizeof frame.directory));
    REQUIRE(session.Send(frame));
  }
  // Everything is given back, once.
  CHECK(Eventually([&] {
    const nlohmann::json status = DaemonStatus(daemon.socket());
    return status.at("sessions").empty() && status.at("quotas").empty() && fs::is_empty(directory);
  }));
  CHECK(WorkingFiles(faulty) == 0);
  faulty.Clear();
  Client client = Connect(daemon.socket());
  ReferenceTrainer trainer(client, {"large", kNumel});
  for (int i = 0; i < 2; ++i) trainer.Step();
  CHECK(trainer.Difference() == "");
}

// Each would have threads that hang in what its client has passed, and count for no session.
TEST_CASE("BadInput.ARestoreWhoseSessionHasGoneDoesNotBegin") {
  FaultFs faulty;
  if (Missing(faulty)) return;
  DaemonProcess daemon;
  std::ofstream(faulty.source() + "/manifest") << std::string(4096, '{');
  const mlpo::UniqueFd file(::open((faulty.point() + "/manifest").c_str(), O_RDONLY | O_CLOEXEC));
  REQUIRE(file);
  faulty.Rule("read hang name=/manifest");
  auto restore = mlpo::MakeFrame<mlpo_restore>(MLPO_FRAME_RESTORE, 7);
  restore.files = 1;
  auto files = mlpo::MakeFrame<mlpo_restore_files>(MLPO_FRAME_RESTORE_FILES, 7);
  files.count = 1;
  const int fds[] = {file.get()};
  std::vector<std::unique_ptr<RawSession>> sessions;
  for (int i = 0; i < 20; ++i)
    sessions.push_back(std::make_unique<RawSession>(daemon.socket(), MakeHello("job" + std::to_string(i))));
  daemon.Signal(SIGSTOP);  // so that it reads all of a session at once, its end too
  for (const auto& session : sessions) {
    REQUIRE(session->Send(restore));
    REQUIRE(session->Send(files, fds));
    session->Close();
  }
  daemon.Signal(SIGCONT);
  REQUIRE(Eventually([&] { return DaemonStatus(daemon.socket()).at("sessions").empty(); }));
  CHECK_FALSE(Eventually([&] { return faulty.Of("read").hanging > 0; }, 1));
  // One that stays waits for it.
  RawSession stays(daemon.socket(), MakeHello("stays"));
  REQUIRE(stays.Send(restore));
  REQUIRE(stays.Send(files, fds));
  CHECK(Eventually([&] { return faulty.Of("read").hanging == 1; }));
  faulty.Clear();
  REQUIRE(stays.Receive());
  REQUIRE(stays.type() == MLPO_FRAME_ERROR);
  CHECK(stays.As<mlpo_error>().status == -EINVAL);  // no manifest
}

// Whoever serves a file says how large it is, and need never give what is in it.
TEST_CASE("BadInput.ManifestsThatArePassedTakeNoMoreMemoryThanHasComeOfThemAndHaveALimit") {
  FaultFs faulty;
  if (Missing(faulty)) return;
  DaemonProcess daemon;
  const std::string manifest = faulty.source() + "/manifest";
  std::ofstream(manifest).close();
  fs::resize_file(manifest, uint64_t{200} << 20);
  const mlpo::UniqueFd file(::open((faulty.point() + "/manifest").c_str(), O_RDONLY | O_CLOEXEC));
  REQUIRE(file);
  faulty.Rule("read hang name=/manifest");
  auto restore = mlpo::MakeFrame<mlpo_restore>(MLPO_FRAME_RESTORE, 7);
  restore.files = 1;
  auto files = mlpo::MakeFrame<mlpo_restore_files>(MLPO_FRAME_RESTORE_FILES, 7);
  files.count = 1;
  const int fds[] = {file.get()};
  RawSession one(daemon.socket(), MakeHello("one")), two(daemon.socket(), MakeHello("two"));
  const uint64_t before = daemon.ResidentBytes();
  REQUIRE(one.Send(restore));
  REQUIRE(one.Send(files, fds));
  REQUIRE(Eventually([&] { return faulty.Of("read").hanging == 1; }));
  CHECK(daemon.ResidentBytes() < before + (uint64_t{50} << 20));
  const auto refusal = [&](RawSession& session) {
    REQUIRE(session.Receive());
    REQUIRE(session.type() == MLPO_FRAME_ERROR);
    return session.As<mlpo_error>().status;
  };
  REQUIRE(two.Send(restore));
  REQUIRE(two.Send(files, fds));
  CHECK(refusal(two) == MLPO_E_QUOTA);
  fs::resize_file(manifest, 0);
  faulty.Clear();
  CHECK(refusal(one) == -EINVAL);  // nothing came
  fs::resize_file(manifest, uint64_t{200} << 20);
  faulty.Rule("read error 5 name=/manifest");
  CHECK(Eventually([&] {  // once the first one's counts no more
    REQUIRE(two.Send(restore));
    REQUIRE(two.Send(files, fds));
    return refusal(two) == -EIO;
  }));
}

TEST_CASE("C13_APassThroughIsUsedEitherWay") {
  for (const bool direct : {true, false}) {
    CAPTURE(direct);
    FaultFs faulty;
    if (Missing(faulty)) return;
    DaemonProcess daemon(On(faulty, 0, direct ? "" : "direct = false\n"));
    CHECK(FaultyPath(daemon).at("direct_io") == direct);
    Client client = Connect(daemon.socket());
    ReferenceTrainer trainer(client, {"large", kNumel});
    for (int i = 0; i < 3; ++i) trainer.Step();
    CHECK(trainer.Difference() == "");
    CHECK(faulty.Of("write").requests > 0);
  }
}

// The first path has the journal, if it answers: it does not, which costs ten seconds, and once.
TEST_CASE("C26_APathThatHangsIsNoReasonNotToSave") {
  FaultFs faulty;
  if (Missing(faulty)) return;
  DaemonProcess daemon(On(faulty, 1));
  const std::string directory = daemon.folder() + "/checkpoints";
  REQUIRE(fs::create_directory(directory));
  Client client = Connect(daemon.socket());
  ReferenceTrainer trainer(client, {"large", kNumel});
  for (int i = 0; i < 2; ++i) trainer.Step();
  for (const char* op : {"create", "fsync", "fallocate"}) faulty.Rule(std::string(op) + " hang");
  for (const bool first : {true, false}) {
    const auto begun = std::chrono::steady_clock::now();
    Save save(client, directory, first ? "one" : "two", 2);
    mlpo::Request take = save.Take(), saved = save.Saved();
    take.Wait();
    CHECK(saved.Wait().value == 1);
    CHECK(std::chrono::steady_clock::now() - begun < std::chrono::seconds(first ? 40 : 8));
  }
  CHECK(faulty.Of("create").hanging > 0);
  trainer.Step();
  faulty.Clear();
  trainer.Step();
  CHECK(trainer.Difference() == "");
}

// NFS, Lustre and CephFS are such file systems.
TEST_CASE("FaultyPath.FilesAreHandedOverWhereARenameTakesNoFlags") {
  FaultFs faulty;
  if (Missing(faulty)) return;
  DaemonProcess daemon(On(faulty, 0, "persistent = true\n"));
  const std::string directory = faulty.point() + "/checkpoints";
  REQUIRE(fs::create_directory(directory));
  Client client = Connect(daemon.socket());
  ReferenceTrainer trainer(client, {"large", kNumel});
  for (int i = 0; i < 2; ++i) trainer.Step();
  faulty.Rule("rename error " + std::to_string(EINVAL));
  Save save(client, directory, "one", 2);
  mlpo::Request take = save.Take(), saved = save.Saved();
  take.Wait();
  CHECK(saved.Wait().value == 1);
  CHECK(faulty.Of("rename").acted == 1);
  CHECK(CheckpointFiles(faulty, "data-") == 2);  // the part's own, and the session's
  trainer.Step();
  CHECK(trainer.Difference() == "");
}

TEST_CASE("C16_AnOrderlyStopDropsNothingThatWasAccepted") {
  for (const bool by_command : {false, true}) {
    CAPTURE(by_command);
    FaultFs faulty;
    if (Missing(faulty)) return;
    DaemonProcess daemon(On(faulty, 0));
    Client client = Connect(daemon.socket());
    ReferenceTrainer trainer(client, {"large", 2 * kNumel});
    mlpo::Request update = LongUpdate(faulty, trainer);
    if (by_command) {
      char* text = nullptr;
      mlpo::Check(mlpo_control(daemon.socket().c_str(), "drain", nullptr, 10'000'000'000, &text));
      mlpo_free(text);
    } else {
      daemon.Signal(SIGTERM);
    }
    CHECK(Eventually([&] { return CodeOf([&] { client.SubmitNop().Wait(); }) == -ESHUTDOWN; }));
    CHECK(CodeOf([&] { update.Wait(); }) == 0);
    trainer.StepReference();
    CHECK(trainer.ParametersAreRight());
    CHECK(daemon.WaitForEnd() == 0);
    CHECK(WorkingFiles(faulty) == 0);
  }
}

TEST_CASE("C16_ASecondSignalStopsFastAndLeavesNothing") {
  FaultFs faulty;
  if (Missing(faulty)) return;
  DaemonProcess daemon(On(faulty, 0));
  Client client = Connect(daemon.socket());
  ReferenceTrainer trainer(client, {"large", 2 * kNumel});
  mlpo::Request update = LongUpdate(faulty, trainer);
  daemon.Signal(SIGTERM);
  CHECK(Eventually([&] { return CodeOf([&] { client.SubmitNop().Wait(); }) == -ESHUTDOWN; }));
  daemon.Signal(SIGTERM);
  const int code = CodeOf([&] { update.Wait(); });
  // Done, or said not to be.
  CHECK((code == 0 || code == -ESHUTDOWN));
  CHECK(daemon.WaitForEnd(20) == 0);
  CHECK(WorkingFiles(faulty) == 0);
}

TEST_CASE("C16_AnOrderlyStopEndsTheCheckpointThatIsUnderWay") {
  for (const bool client_goes : {false, true}) {
    CAPTURE(client_goes);
    SlowSave save(client_goes);
    if (Missing(save.slow())) return;
    save.BeginsToStop();
    CHECK(save.Files("manifest-") == 0);
    if (!client_goes) CHECK(save.saved().Wait().value == 1);
    CHECK(save.daemon().WaitForEnd() == 0);
    CHECK(save.Files("manifest-") == 1);
    save.slow().Clear();
    save.daemon().Start();
    CHECK(save.Restore() == 0);
  }
}

// The save is given up after a minute, and then nothing else is waited for.
TEST_CASE("C16_AnOrderlyStopLeavesACheckpointThatHangs") {
  if (!LongForm()) {
    WARN("skipped: takes a minute, MLPO_LONG=1");
    return;
  }
  SlowSave save(false);
  if (Missing(save.slow())) return;
  save.slow().Clear();
  save.slow().Rule("write hang");
  REQUIRE(Eventually([&] { return save.slow().Of("write").hanging > 0; }));
  const auto begun = std::chrono::steady_clock::now();
  save.BeginsToStop();
  CHECK(save.daemon().WaitForEnd(120) == 0);
  CHECK(std::chrono::steady_clock::now() - begun < std::chrono::seconds(80));
  CHECK(save.Files("manifest-") == 0);
}

TEST_CASE("C16_ASecondSignalLeavesNoCheckpointThatLooksComplete") {
  for (const bool client_goes : {false, true}) {
    CAPTURE(client_goes);
    SlowSave save(client_goes);
    if (Missing(save.slow())) return;
    save.BeginsToStop();
    save.daemon().Signal(SIGTERM);
    if (!client_goes) CHECK(CodeOf([&] { save.saved().Wait(); }) != 0);
    CHECK(save.daemon().WaitForEnd(20) == 0);
    CHECK(save.Files("manifest-") == 0);
    save.slow().Clear();
    save.daemon().Start();
    CHECK(Eventually([&] { return save.Files() == 0; }));
    CHECK(save.Restore() == -ENOENT);
  }
}

TEST_CASE("C16_AClientThatLeavesWithWorkQueuedHoldsNobodyUp") {
  FaultFs faulty;
  if (Missing(faulty)) return;
  DaemonProcess daemon(On(faulty, 0));
  {
    Client client = Connect(daemon.socket());
    ReferenceTrainer trainer(client, {"large", 2 * kNumel});
    const mlpo::Request update = LongUpdate(faulty, trainer);
    client.Close();
  }
  CHECK(Eventually([&] { return DaemonStatus(daemon.socket()).at("sessions").empty(); }));
  CHECK(Eventually([&] { return WorkingFiles(faulty) == 0; }));
  faulty.Clear();
  Client next = Connect(daemon.socket());
  ReferenceTrainer trainer(next, {"large", kNumel});
  for (int i = 0; i < 2; ++i) trainer.Step();
  CHECK(trainer.Difference() == "");
}

// Reads that fail lose what is there alone: who has all of its blocks in memory goes on. (With less memory: the first
// update that needs one fails and names the path, tests/stress/faults.)
TEST_CASE("FaultyPath.ReadsThatFailHarmNobodyWhoseBlocksAreInMemory") {
  FaultFs faulty;
  if (Missing(faulty)) return;
  DaemonProcess::Options options = On(faulty, 1);
  options.memory = std::to_string(64 * 49'152);
  DaemonProcess daemon(options);
  Client client = Connect(daemon.socket());
  ReferenceTrainer trainer(client, {"large", kNumel});
  for (int i = 0; i < 2; ++i) trainer.Step();
  faulty.Rule("read error 5 name=/state from=4096");
  for (int i = 0; i < 5; ++i) trainer.Step();
  CHECK(trainer.Difference() == "");
}

// Whose I/O hangs, and who ends for it, comes again under the same name: not after the path has come back, but after
// ten seconds.
TEST_CASE("C26_ARankComesAgainThoughItsIoHangs") {
  FaultFs faulty;
  if (Missing(faulty)) return;
  DaemonProcess daemon(On(faulty, 1));
  fs::path left;  // until its I/O has come back
  {
    Client client = Connect(daemon.socket());
    ReferenceTrainer trainer(client, {"large", kNumel});
    for (int i = 0; i < 2; ++i) trainer.Step();
    left = StateFiles(faulty).at(0);
    faulty.Rule("read hang name=/state from=4096");
    trainer.WriteGradient();
    trainer.subgroup().SubmitGrad().Wait();
    const mlpo::Request update = trainer.SubmitUpdate();
    REQUIRE(Eventually([&] { return faulty.Of("read").hanging > 0; }));
    client.Close();
  }
  const auto ended = std::chrono::steady_clock::now();
  Client client = Connect(daemon.socket());
  CHECK(std::chrono::steady_clock::now() - ended < std::chrono::seconds(20));
  CHECK(faulty.Of("read").hanging > 0);
  ReferenceTrainer trainer(client, {"large", kNumel});
  for (int i = 0; i < 2; ++i) trainer.Step();
  CHECK(fs::exists(left));
  faulty.Clear();
  CHECK(Eventually([&] { return !fs::exists(left); }));
  trainer.Step();
  CHECK(trainer.Difference() == "");
}

TEST_CASE("C26_TheDoctorAnswersWhileAPathHangs") {
  FaultFs faulty;
  if (Missing(faulty)) return;
  DaemonProcess daemon(On(faulty, 1));
  faulty.Rule("create hang");
  for (int i = 0; i < 2; ++i) {
    const auto asked = std::chrono::steady_clock::now();
    char* text = nullptr;
    mlpo::Check(mlpo_control(daemon.socket().c_str(), "doctor", nullptr, 30'000'000'000, &text));
    const std::string report = text;
    mlpo_free(text);
    CHECK(report.find("has not answered") != std::string::npos);
    CHECK(std::chrono::steady_clock::now() - asked < std::chrono::seconds(15));
    CHECK(faulty.Of("create").hanging == 1);  // what hangs is not joined by another
  }
  // Nor is anybody else held up by what it has left.
  char* text = nullptr;
  mlpo::Check(mlpo_control(daemon.socket().c_str(), "gc", nullptr, 10'000'000'000, &text));
  mlpo_free(text);
  faulty.Clear();
}

// Longer than a path needs to be called suspect. 90 s with MLPO_LONG=1.
TEST_CASE("C26_APathThatAnswersLateIsWaitedFor") {
  FaultFs faulty;
  if (Missing(faulty)) return;
  DaemonProcess daemon(On(faulty, 1));
  Client client = Connect(daemon.socket());
  ReferenceTrainer trainer(client, {"large", kNumel});
  for (int i = 0; i < 2; ++i) trainer.Step();
  faulty.Rule("read hang name=/state from=4096");
  trainer.WriteGradient();
  trainer.subgroup().SubmitGrad().Wait();
  mlpo::Request update = trainer.SubmitUpdate();
  CHECK(!update.WaitFor(std::chrono::seconds(LongForm() ? 90 : 7)));
  CHECK(FaultyPath(daemon).at("state") == "suspect");
  CHECK(DaemonStatus(daemon.socket()).at("sessions").size() == 1);
  faulty.Clear();
  update.Wait();
  trainer.StepReference();
  CHECK(trainer.Difference() == "");
}
