// Every bad input has its own clear error: what, where, what to do; the daemon's exit codes are those of sysexits.h.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sysexits.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "daemon/base/unique_fd.h"
#include "daemon/session/frame.h"
#include "proto/status.h"
#include "tests/support/catch.h"
#include "tests/support/daemon_process.h"
#include "tests/support/daemon_status.h"
#include "tests/support/program.h"
#include "tests/support/raw_session.h"
#include "tests/support/reference_trainer.h"
#include "tests/support/scratch_dir.h"
#include "tests/support/slow_close.h"

using namespace mlpo::test;
using mlpo::Client;
namespace fs = std::filesystem;

namespace {

// A daemon that must not start.
struct Refusal {
  int exit_code = 0;
  std::string text;
};
Refusal StartDaemon(std::vector<std::string> arguments, const std::map<std::string, std::string>& environment = {},
                    const std::vector<std::string>& prefix = {}) {
  std::vector<std::string> command = prefix;
  command.push_back(DaemonProcess::Program());
  command.insert(command.end(), arguments.begin(), arguments.end());
  Program program(command, environment);
  Refusal refusal;
  refusal.exit_code = program.Wait(60);
  refusal.text = program.err();
  return refusal;
}

// Names an error, not an exit code only.
void CheckRefusal(const Refusal& refusal, int exit_code, const std::vector<std::string>& words) {
  CAPTURE(refusal.text);
  CHECK(refusal.exit_code == exit_code);
  for (const std::string& word : words) {
    CAPTURE(word);
    CHECK(refusal.text.find(word) != std::string::npos);
  }
}

// A folder for a socket, one path and a configuration file.
struct Place {
  ScratchDir folder;
  std::string path = folder / "disk";
  std::string socket = folder / "mlpo.sock";
  Place() { fs::create_directory(path); }
  std::vector<std::string> Arguments(const std::vector<std::string>& more = {}) const {
    std::vector<std::string> arguments = {"--socket", socket, "--memory", "64MiB"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }
  std::string Config(const std::string& text) const {
    std::ofstream(folder / "mlpo.toml") << text;
    return folder / "mlpo.toml";
  }
};

int CodeOf(const std::function<void()>& call, std::string* text) {
  try {
    call();
  } catch (const mlpo::Error& error) {
    *text = error.what();
    return error.code();
  }
  return 0;
}

// What the daemon answers to a HELLO, and that it ends the connection.
RawSession::EndReason AnswerToHello(const std::string& socket, const mlpo_hello& hello) {
  RawSession session(socket);
  session.SendHello(hello);
  return session.WaitForEnd();
}

}  // namespace

// ---- The daemon's start ----

TEST_CASE("BadInput.MissingDirectory") {
  Place place;
  CheckRefusal(StartDaemon(place.Arguments({"--path", place.path + "/none"})), EX_CONFIG, {place.path + "/none"});
}

TEST_CASE("BadInput.UnreadableDirectory") {
  Place place;
  REQUIRE(::chmod(place.path.c_str(), 0) == 0);
  std::vector<std::string> prefix;
  if (::geteuid() == 0) {  // root without the right to pass over modes
    if (!fs::exists("/usr/bin/setpriv")) {
      WARN("skipped: as root this needs /usr/bin/setpriv (util-linux)");
      return;
    }
    prefix = {"/usr/bin/setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all"};
  }
  const Refusal refusal = StartDaemon(place.Arguments({"--path", place.path}), {}, prefix);
  REQUIRE(::chmod(place.path.c_str(), 0700) == 0);
  CheckRefusal(refusal, EX_NOPERM, {place.path, "Permission denied"});
}

TEST_CASE("BadInput.FileInPlaceOfADirectory") {
  Place place;
  std::ofstream(place.folder / "file") << "x";
  CheckRefusal(StartDaemon(place.Arguments({"--path", place.folder / "file"})), EX_CONFIG, {place.folder / "file"});
}

TEST_CASE("BadInput.PathInsideAnother") {
  Place place;
  fs::create_directory(place.path + "/inner");
  CheckRefusal(StartDaemon(place.Arguments({"--path", place.path, "--path", place.path + "/inner"})), EX_CANTCREAT,
               {place.path + "/inner", "inside"});
}

TEST_CASE("BadInput.SamePathTwice") {
  Place place;
  CheckRefusal(StartDaemon(place.Arguments({"--path", place.path, "--path", place.path})), EX_CONFIG,
               {place.path, "already a path"});
  fs::create_symlink(place.path, place.folder / "link");
  CheckRefusal(StartDaemon(place.Arguments({"--path", place.path, "--path", place.folder / "link"})), EX_CANTCREAT,
               {place.path, "same directory"});
}

TEST_CASE("BadInput.NoPath") {
  Place place;
  CheckRefusal(StartDaemon(place.Arguments(), {{"XDG_CONFIG_HOME", place.folder.path()}}), EX_CONFIG, {"--path"});
}

TEST_CASE("BadInput.PoolLargerThanMemory") {
  Place place;
  const Refusal refusal = StartDaemon({"--socket", place.socket, "--memory", "4096TiB", "--path", place.path});
  CheckRefusal(refusal, EX_OSERR, {"4.00 PiB", "has", "left", "--memory"});
}

TEST_CASE("C15_PoolBelowThreeBuffersIsRefusedAtStart") {
  Place place;
  CheckRefusal(StartDaemon({"--socket", place.socket, "--memory", "35MiB", "--path", place.path}), EX_CONFIG,
               {"36MiB", "35MiB"});
}

TEST_CASE("BadInput.WrongOwnerOfTheSocketsFolder") {
  if (::geteuid() != 0) {
    WARN("skipped: only root can give a folder to somebody else");
    return;
  }
  Place place;
  const std::string folder = place.folder / "foreign";
  fs::create_directory(folder);
  REQUIRE(::chown(folder.c_str(), 65534, 65534) == 0);
  CheckRefusal(StartDaemon({"--socket", folder + "/mlpo.sock", "--memory", "64MiB", "--path", place.path}), EX_NOPERM,
               {folder, "65534"});
  CHECK(fs::is_empty(folder));
}

TEST_CASE("BadInput.TwoDaemonsOnOneSocket") {
  DaemonProcess daemon;
  Place place;
  CheckRefusal(StartDaemon({"--socket", daemon.socket(), "--memory", "64MiB", "--path", place.path}), EX_UNAVAILABLE,
               {daemon.socket(), "another daemon"});
  Connect(daemon.socket()).SubmitNop().Wait();
}

TEST_CASE("BadInput.TwoDaemonsOfOneUserAndNodeOnOnePath") {
  DaemonProcess daemon({.paths = 1});
  Place place;
  CheckRefusal(StartDaemon(place.Arguments({"--path", daemon.path(0)})), EX_UNAVAILABLE,
               {daemon.path(0), std::to_string(daemon.pid())});
  Connect(daemon.socket()).SubmitNop().Wait();
}

TEST_CASE("BadInput.NodeNameWithSlashOrNewline") {
  Place place;
  for (const std::string node : {"a/b", "a\nb", "..", ""}) {
    if (node.empty()) continue;
    CAPTURE(node);
    CheckRefusal(StartDaemon(place.Arguments({"--path", place.path}), {{"MLPO_DAEMON__NODE", node}}), EX_CONFIG,
                 {"MLPO_DAEMON__NODE", "A-Z a-z 0-9"});
  }
}

TEST_CASE("BadInput.UnknownKeyNamesPlaceAndNearest") {
  Place place;
  const std::string config = place.Config("[memory]\npol = \"64MiB\"\n");
  CheckRefusal(StartDaemon(place.Arguments({"--config", config, "--path", place.path})), EX_CONFIG,
               {config + ":2", "memory.pol", "memory.pool"});
}

TEST_CASE("BadInput.KeyTwiceInTheFile") {
  Place place;
  const std::string config = place.Config("[memory]\npool = \"64MiB\"\npool = \"65MiB\"\n");
  CheckRefusal(StartDaemon(place.Arguments({"--config", config, "--path", place.path})), EX_CONFIG, {config, "3"});
}

// ---- Clients ----

TEST_CASE("BadInput.NoSpaceRefusesTheRegistrationWithFigures") {
  // Blocks of 4096 parameters have 49152 bytes: each path has room for 5.
  DaemonProcess daemon({.paths = 2, .path_settings = {"capacity = \"245760\"\n"}});
  Client client = Connect(daemon.socket());
  mlpo_subgroup_options options = MLPO_SUBGROUP_OPTIONS_INIT;
  options.key = "large";
  options.numel = 11 * 4096;
  std::string text;
  const int code = CodeOf([&] { client.Register(options); }, &text);
  CAPTURE(text);
  CHECK(mlpo_errno(code) == ENOSPC);
  CHECK(text.find(std::to_string(11 * 49152)) != std::string::npos);
  CHECK(text.find(std::to_string(10 * 49152)) != std::string::npos);
  options.numel = 10 * 4096;  // the session lives on, and what fits fits
  client.Register(options);
}

TEST_CASE("BadInput.JobNameWithSlashOrNewline") {
  DaemonProcess daemon;
  for (const std::string job : {"a/b", "a\nb", "..", "../x", "", "-x", "a b", "\xc3\xa4"}) {
    CAPTURE(job);
    std::string text;
    CHECK(CodeOf([&] { Connect(daemon.socket(), job); }, &text) == -EINVAL);
    CHECK(text.find("job") != std::string::npos);
    const RawSession::EndReason answer = AnswerToHello(daemon.socket(), MakeHello(job));
    CHECK(answer.status == -EINVAL);
    CHECK(answer.text.find("job") != std::string::npos);
  }
  CHECK(daemon.ScratchFiles().empty());
}

TEST_CASE("BadInput.KeyUsedTwice") {
  DaemonProcess daemon;
  Client client = Connect(daemon.socket());
  ReferenceTrainer trainer(client, {});
  std::string text;
  CHECK(CodeOf([&] { ReferenceTrainer(client, {}); }, &text) == -EEXIST);
  CHECK(text.find("'layer'") != std::string::npos);
  trainer.Step();
  CHECK(trainer.Difference() == "");
}

TEST_CASE("BadInput.WrongDtype") {
  DaemonProcess daemon;
  Client client = Connect(daemon.socket());
  mlpo_subgroup_options options = MLPO_SUBGROUP_OPTIONS_INIT;
  options.key = "x";
  options.numel = 10;
  options.dtype = 9;
  std::string text;
  CHECK(CodeOf([&] { client.Register(options); }, &text) == -EINVAL);
  CHECK(text.find("dtype") != std::string::npos);
  // Past the client library: one refusal, and the session lives.
  RawSession raw(daemon.socket(), MakeHello("raw"));
  raw.SendRegistration("x", 10, 9, 7);
  REQUIRE(raw.Receive());
  REQUIRE(raw.type() == MLPO_FRAME_ERROR);
  CHECK(raw.As<mlpo_error>().status == -EINVAL);
  CHECK(raw.As<mlpo_error>().frame.seq == 7);
  CHECK(std::string(raw.As<mlpo_error>().text).find("dtype") != std::string::npos);
  CHECK(raw.Register("x", 10).subgroup != 0);
}

TEST_CASE("BadInput.NonFiniteHyperParameters") {
  DaemonProcess daemon;
  Client client = Connect(daemon.socket());
  ReferenceTrainer trainer(client, {});
  trainer.WriteGradient();
  trainer.subgroup().SubmitGrad().Wait();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  using Change = std::pair<const char*, std::function<void(mlpo_update_options&)>>;
  const Change changes[] = {
      {"lr", [&](auto& o) { o.lr = nan; }},
      {"lr", [&](auto& o) { o.lr = infinity; }},
      {"lr", [&](auto& o) { o.lr = -1e-3; }},
      {"beta1", [&](auto& o) { o.beta1 = nan; }},
      {"beta1", [&](auto& o) { o.beta1 = 1; }},
      {"beta2", [&](auto& o) { o.beta2 = -0.5; }},
      {"eps", [&](auto& o) { o.eps = nan; }},
      {"weight_decay", [&](auto& o) { o.weight_decay = infinity; }},
      {"grad_scale", [&](auto& o) { o.grad_scale = nan; }},
      {"mode", [&](auto& o) { o.mode = 3; }},
  };
  for (const auto& [name, change] : changes) {
    CAPTURE(name);
    mlpo_update_options options = MLPO_UPDATE_OPTIONS_INIT;
    change(options);
    std::string text;
    CHECK(CodeOf([&] { trainer.subgroup().SubmitUpdate(options); }, &text) == -EINVAL);
    CHECK(text.find(name) != std::string::npos);
  }
  trainer.SubmitUpdate().Wait();
  trainer.StepReference();
  CHECK(trainer.Difference() == "");
}

TEST_CASE("BadInput.VersionMismatch") {
  DaemonProcess daemon;
  mlpo_hello hello = MakeHello("raw");
  hello.abi_major = MLPO_ABI_MAJOR + 1;
  RawSession::EndReason answer = AnswerToHello(daemon.socket(), hello);
  CHECK(answer.status == MLPO_E_VERSION);
  CHECK(answer.text.find(std::to_string(MLPO_ABI_MAJOR + 1)) != std::string::npos);
  hello = MakeHello("raw");
  hello.features_required = uint64_t{1} << 40;
  CHECK(AnswerToHello(daemon.socket(), hello).status == MLPO_E_VERSION);
  hello = MakeHello("raw");
  hello.abi_minor = 77;  // the smaller one is spoken
  RawSession newer(daemon.socket(), hello);
  CHECK(newer.welcome().abi_minor == MLPO_ABI_MINOR);
}

TEST_CASE("BadInput.SecondLiveSessionOfTheSameRankIsRefusedAtOnce") {
  DaemonProcess daemon;
  Client first = Connect(daemon.socket(), "job", 1, 2);
  const auto start = std::chrono::steady_clock::now();
  std::string text;
  CHECK(CodeOf([&] { Connect(daemon.socket(), "job", 1, 2); }, &text) == -EADDRINUSE);
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(5));
  CHECK(text.find("rank 1") != std::string::npos);
  CHECK(text.find("'job'") != std::string::npos);
  Client other_rank = Connect(daemon.socket(), "job", 0, 2);
  Client other_job = Connect(daemon.socket(), "job2", 1, 2);
  first.SubmitNop().Wait();
  // As soon as the first has closed, the next one gets in.
  for (int i = 0; i < 50; ++i) {
    first.Close();
    first = Connect(daemon.socket(), "job", 1, 2);
  }
}

TEST_CASE("BadInput.RankAndWorldSize") {
  DaemonProcess daemon;
  std::string text;
  CHECK(CodeOf([&] { Connect(daemon.socket(), "job", 0, 0); }, &text) == -EINVAL);
  CHECK(text.find("world size 0") != std::string::npos);
  CHECK(CodeOf([&] { Connect(daemon.socket(), "job", 2, 2); }, &text) == -EINVAL);
  CHECK(text.find("rank 2") != std::string::npos);
  for (const auto& [rank, world] : {std::pair<uint32_t, uint32_t>{0, 0}, {2, 2}, {0xffffffff, 1}}) {
    const RawSession::EndReason answer = AnswerToHello(daemon.socket(), MakeHello("raw", rank, world));
    CHECK(answer.status == -EINVAL);
    CHECK(answer.text.find("world size") != std::string::npos);
  }
}

TEST_CASE("BadInput.RingEntries") {
  DaemonProcess daemon;
  for (const uint32_t entries : {0u, 1u, 4u, 12u, 1u << 17, 0xffffffffu}) {
    CAPTURE(entries);
    const RawSession::EndReason answer = AnswerToHello(daemon.socket(), MakeHello("raw", 0, 1, entries));
    CHECK(answer.status == -EINVAL);
    CHECK(answer.text.find("power of two") != std::string::npos);
  }
}

// ---- Checkpoints ----

TEST_CASE("BadInput.CheckpointFramesAndWhatTheyPass") {
  DaemonProcess daemon({.memory = "1MiB"});
  int ends[2];
  REQUIRE(::pipe2(ends, O_CLOEXEC) == 0);
  const mlpo::UniqueFd read_end(ends[0]), write_end(ends[1]);
  const auto checkpoint = [](uint32_t flags) {
    auto frame = mlpo::MakeFrame<mlpo_checkpoint>(MLPO_FRAME_CHECKPOINT, 7);
    frame.flags = flags;
    frame.tag_bytes = 1;
    frame.tag[0] = 't';
    if (flags & MLPO_CHECKPOINT_FILES) return frame;
    frame.directory_bytes = 4;
    std::memcpy(frame.directory, "/tmp", 4);
    return frame;
  };
  const auto restore = [](uint32_t files) {
    auto frame = mlpo::MakeFrame<mlpo_restore>(MLPO_FRAME_RESTORE, 7);
    frame.files = files;
    return frame;
  };
  const auto more = [](uint32_t first, uint32_t count) {
    auto frame = mlpo::MakeFrame<mlpo_restore_files>(MLPO_FRAME_RESTORE_FILES, 7);
    frame.first = first;
    frame.count = count;
    return frame;
  };
  // What is asked wrongly is refused, and the session goes on.
  RawSession lives(daemon.socket(), MakeHello("lives"));
  const auto refusal = [&] {
    REQUIRE(lives.Receive());
    REQUIRE(lives.type() == MLPO_FRAME_ERROR);
    return lives.As<mlpo_error>().status;
  };
  REQUIRE(lives.Send(checkpoint(MLPO_CHECKPOINT_FILES), ends));
  CHECK(refusal() == -EINVAL);
  REQUIRE(lives.Send(restore(1)));
  REQUIRE(lives.Send(more(0, 1), {ends, 1}));
  CHECK(refusal() == -EINVAL);
  REQUIRE(lives.Send(restore(MLPO_MAX_RESTORE_FILES + 1)));
  REQUIRE(lives.Send(more(0, 2), ends));  // was under way
  CHECK(refusal() == -E2BIG);
  auto nameless = restore(0);  // an attempt, and no tag that it is one of
  nameless.attempt[0] = 1;
  nameless.directory_bytes = 4;
  std::memcpy(nameless.directory, "/tmp", 4);
  REQUIRE(lives.Send(nameless));
  CHECK(refusal() == -EINVAL);
  auto relative = checkpoint(0);
  relative.directory[0] = 'x';
  REQUIRE(lives.Send(relative));
  CHECK(refusal() != 0);
  // What honest software cannot send ends it.
  const auto ends_it = [&](const std::function<void(RawSession&)>& sends) {
    RawSession session(daemon.socket(), MakeHello("ends"));
    sends(session);
    return session.WaitForEnd().status == MLPO_E_PROTOCOL;
  };
  CHECK(ends_it([&](RawSession& s) { s.Send(checkpoint(MLPO_CHECKPOINT_FILES), {ends, 1}); }));
  CHECK(ends_it([&](RawSession& s) { s.Send(checkpoint(0), ends); }));
  CHECK(ends_it([&](RawSession& s) { s.Send(checkpoint(4)); }));
  CHECK(ends_it([&](RawSession& s) {
    auto frame = checkpoint(0);
    frame.tag_bytes = MLPO_MAX_TAG + 1;
    s.Send(frame);
  }));
  CHECK(ends_it([&](RawSession& s) { s.Send(more(0, 1), {ends, 1}); }));
  for (const mlpo_restore_files& wrong : {more(1, 1), more(0, 2), more(0, 0)}) {
    CHECK(ends_it([&](RawSession& s) {
      s.Send(restore(2));
      s.Send(wrong, {ends, 1});
    }));
  }
  CHECK(ends_it([&](RawSession& s) {
    s.Send(restore(2));
    s.Send(checkpoint(0));
  }));
  CHECK(daemon.running());
  REQUIRE(lives.Send(restore(1)));
  REQUIRE(lives.Send(more(0, 1), {ends, 1}));
  CHECK(refusal() == -EINVAL);
}

namespace {

mlpo_restore RestoreOf(uint32_t files) {
  auto frame = mlpo::MakeFrame<mlpo_restore>(MLPO_FRAME_RESTORE, 7);
  frame.files = files;
  return frame;
}

mlpo_restore_files FilesOf(uint32_t first, uint32_t count) {
  auto frame = mlpo::MakeFrame<mlpo_restore_files>(MLPO_FRAME_RESTORE_FILES, 7);
  frame.first = first;
  frame.count = count;
  return frame;
}

size_t ThreadsNamed(pid_t pid, const std::string& name) {
  size_t count = 0;
  for (const auto& task : fs::directory_iterator("/proc/" + std::to_string(pid) + "/task")) {
    std::ifstream file(task.path() / "comm");
    std::string comm;
    count += std::getline(file, comm) && comm == name;
  }
  return count;
}

}  // namespace

// A client may serve the file system of what it passes, and never answer when it is closed.
TEST_CASE("BadInput.DescriptorsWhoseClosingHangsHoldUpNobody") {
  DaemonProcess daemon({.memory = "1MiB"});
  Client other = Connect(daemon.socket(), "other");
  ReferenceTrainer trainer(other, {});
  trainer.Step();
  std::vector<std::unique_ptr<SlowClose>> slow;
  // The daemon has the last descriptor of each: the test's own is closed before it looks.
  const auto passes = [&](size_t count, const std::function<bool(RawSession&, std::span<const int>)>& sends) {
    RawSession session(daemon.socket(), MakeHello("hostile" + std::to_string(slow.size())));
    std::vector<mlpo::UniqueFd> own;
    std::vector<int> fds;
    for (size_t i = 0; i < count; ++i) {
      slow.push_back(std::make_unique<SlowClose>());
      own.push_back(slow.back()->Take());
      fds.push_back(own.back().get());
    }
    daemon.Signal(SIGSTOP);
    const bool answered = sends(session, fds);
    own.clear();
    daemon.Signal(SIGCONT);
    if (answered) (void)session.Receive();  // refused, or ended
  };
  passes(1, [](RawSession& session, std::span<const int> fds) {  // a frame that has none
    return session.Send(mlpo::MakeFrame<mlpo_frame>(MLPO_FRAME_REGISTER_END, 7), fds);
  });
  for (int i = 0; i < 3; ++i) {
    passes(1, [](RawSession& session, std::span<const int> fds) {  // no regular file
      return session.Send(RestoreOf(1)) && session.Send(FilesOf(0, 1), fds);
    });
  }
  passes(1, [](RawSession& session, std::span<const int> fds) {  // and goes before the rest of them
    session.Send(RestoreOf(2));
    session.Send(FilesOf(0, 1), fds);
    session.Close();
    return false;
  });
  passes(2, [](RawSession& session, std::span<const int> fds) {
    auto frame = mlpo::MakeFrame<mlpo_checkpoint>(MLPO_FRAME_CHECKPOINT, 7);
    frame.flags = MLPO_CHECKPOINT_FILES;
    frame.tag_bytes = 1;
    frame.tag[0] = 't';
    session.Send(frame, fds);
    return false;  // who refuses it closes them first
  });
  trainer.Step();
  Client late = Connect(daemon.socket(), "late");
  ReferenceTrainer second(late, {});  // which asks housekeeping
  second.Step();
  CHECK(trainer.Difference() == "");
  CHECK(second.Difference() == "");
  CHECK(DaemonStatus(daemon.socket()).at("sessions").size() >= 2);
  CHECK(ThreadsNamed(daemon.pid(), "mlpo-close") <= 2);
  for (const auto& one : slow) one->Release();
  CHECK(Eventually([&] { return ThreadsNamed(daemon.pid(), "mlpo-close") == 0; }));
}

TEST_CASE("BadInput.DescriptorsThatAreHeldHaveALimitAndATime") {
  DaemonProcess daemon({.memory = "1MiB"});
  struct rlimit limit = {400, 400};  // of which a user's may be 50
  REQUIRE(::prlimit(daemon.pid(), RLIMIT_NOFILE, &limit, nullptr) == 0);
  int ends[2];
  REQUIRE(::pipe2(ends, O_CLOEXEC) == 0);
  const mlpo::UniqueFd read_end(ends[0]), write_end(ends[1]);
  RawSession one(daemon.socket(), MakeHello("one")), two(daemon.socket(), MakeHello("two"));
  const auto refusal = [](RawSession& session) {
    REQUIRE(session.Receive());
    REQUIRE(session.type() == MLPO_FRAME_ERROR);
    return session.As<mlpo_error>().status;
  };
  REQUIRE(one.Send(RestoreOf(51)));
  CHECK(refusal(one) == MLPO_E_QUOTA);
  REQUIRE(one.Send(RestoreOf(30)));
  REQUIRE(one.Send(FilesOf(0, 1), {ends, 1}));
  CHECK_THROWS(one.Receive(1));  // the others are waited for
  REQUIRE(two.Send(RestoreOf(30)));
  CHECK(refusal(two) == MLPO_E_QUOTA);
  // They do not come, and then nothing is kept for them.
  CHECK(one.WaitForEnd().status == -ETIMEDOUT);
  REQUIRE(Eventually([&] {
    REQUIRE(two.Send(RestoreOf(1)));
    REQUIRE(two.Send(FilesOf(0, 1), {ends, 1}));
    return refusal(two) == -EINVAL;
  }));
  CHECK(daemon.running());
}

// Each has a thread of the daemon's, which stays with the file that it hangs in.
TEST_CASE("BadInput.CheckpointsThatHangOfEndedSessionsHaveALimit") {
  DaemonProcess daemon({.memory = "1MiB"});
  constexpr int kMost = 64;  // kMostOfEnded
  int ends[2];
  REQUIRE(::pipe2(ends, O_CLOEXEC) == 0);
  const mlpo::UniqueFd read_end(ends[0]), write_end(ends[1]);
  auto frame = mlpo::MakeFrame<mlpo_checkpoint>(MLPO_FRAME_CHECKPOINT, 7);
  frame.flags = MLPO_CHECKPOINT_FILES;
  frame.tag_bytes = 1;
  frame.tag[0] = 't';
  std::vector<std::unique_ptr<SlowClose>> slow;
  std::vector<std::unique_ptr<RawSession>> sessions;
  for (int i = 0; i < kMost; ++i) {
    sessions.push_back(std::make_unique<RawSession>(daemon.socket(), MakeHello("job" + std::to_string(i))));
    slow.push_back(std::make_unique<SlowClose>());
  }
  daemon.Signal(SIGSTOP);  // so that it has the last descriptor of each; once, as it ends what such a socket waits for
  for (size_t i = 0; i < kMost; ++i) {
    const mlpo::UniqueFd file = slow[i]->Take();
    const int fds[] = {file.get(), ends[1]};
    REQUIRE(sessions[i]->Send(frame, fds));
    sessions[i]->Close();
  }
  daemon.Signal(SIGCONT);
  REQUIRE(Eventually([&] { return DaemonStatus(daemon.socket()).at("sessions").empty(); }));
  RawSession one_more(daemon.socket(), MakeHello("one-more"));
  REQUIRE(one_more.Send(frame, ends));
  REQUIRE(one_more.Receive());
  REQUIRE(one_more.type() == MLPO_FRAME_ERROR);
  CHECK(one_more.As<mlpo_error>().status == MLPO_E_QUOTA);
  Client client = Connect(daemon.socket(), "trains");
  ReferenceTrainer trainer(client, {});
  trainer.Step();
  CHECK(trainer.Difference() == "");
  for (const auto& file : slow) file->Release();
  CHECK(Eventually([&] {
    REQUIRE(one_more.Send(frame, ends));
    REQUIRE(one_more.Receive());
    return one_more.As<mlpo_error>().status == -EINVAL;  // pipes are no files
  }));
}
