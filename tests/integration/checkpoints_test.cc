// Checkpoints of a real daemon: which attempt is saved and restored, what becomes of one that is given up at any
// moment, and what room there is. That a checkpoint is the state as it was taken is compared with the scalar reference.
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "daemon/session/frame.h"
#include "tests/support/catch.h"
#include "tests/support/daemon_process.h"
#include "tests/support/daemon_status.h"
#include "tests/support/raw_session.h"
#include "tests/support/reference_trainer.h"

using namespace mlpo::test;
using mlpo::Client;
using mlpo::Request;
namespace fs = std::filesystem;

namespace {

constexpr int64_t kPatienceNs = 60'000'000'000;
using Attempt = std::array<uint8_t, 16>;

struct Save {
  std::string directory;
  std::string tag = "tag";
  uint64_t step = 1;
  bool overwrite = false;
};
struct Begun {
  int code = 0;
  uint32_t handle = 0;
  Attempt attempt{};
};

Begun Begin(Client& client, const Save& save) {
  mlpo_checkpoint_options options = MLPO_CHECKPOINT_OPTIONS_INIT;
  options.directory = save.directory.c_str();
  options.tag = save.tag.c_str();
  options.step = save.step;
  options.overwrite = save.overwrite;
  mlpo_checkpoint_info info = {};
  info.struct_size = sizeof info;
  Begun begun;
  begun.code = mlpo_checkpoint_begin(client.get(), &options, kPatienceNs, &info);
  begun.handle = info.handle;
  std::memcpy(begun.attempt.data(), info.attempt, begun.attempt.size());
  return begun;
}

Request Take(Client& client, uint32_t handle) {
  mlpo_request* request = nullptr;
  mlpo::Check(mlpo_checkpoint_take(client.get(), handle, kPatienceNs, &request));
  return Request(request);
}

Request Saved(Client& client, uint32_t handle) {
  mlpo_request* request = nullptr;
  mlpo::Check(mlpo_checkpoint_saved(client.get(), handle, kPatienceNs, &request));
  return Request(request);
}

int CodeOf(Request& request) {
  mlpo_result result = {};
  result.struct_size = sizeof result;
  return mlpo_request_wait(request.get(), kPatienceNs, &result);
}

// Its attempt; complete if `complete`.
Attempt SaveAll(Client& client, const Save& save, bool complete = true) {
  const Begun begun = Begin(client, save);
  INFO(mlpo_last_error());
  REQUIRE(begun.code == 0);
  Take(client, begun.handle).Wait();
  CHECK((Saved(client, begun.handle).Wait().value == 1) == complete);
  return begun.attempt;
}

struct Restored {
  int code = 0;
  uint64_t step = 0;
  Attempt attempt{};
};

Restored Restore(Client& client, mlpo::Subgroup& subgroup, const std::string& directory, const char* tag,
                 const std::optional<Attempt>& attempt = std::nullopt) {
  mlpo_restore_info info = {};
  info.struct_size = sizeof info;
  Restored restored;
  restored.code =
      mlpo_restore_begin(client.get(), directory.c_str(), tag, attempt ? attempt->data() : nullptr, kPatienceNs, &info);
  if (restored.code != 0) return restored;
  restored.step = info.step;
  std::memcpy(restored.attempt.data(), info.attempt, restored.attempt.size());
  mlpo_request* request = nullptr;
  mlpo::Check(mlpo_submit_restore(subgroup.get(), info.handle, kPatienceNs, &request));
  Request(request).Wait();
  mlpo::Check(mlpo_restore_end(client.get(), info.handle, kPatienceNs));
  return restored;
}

struct State {
  explicit State(uint64_t numel) : p(numel), m(numel), v(numel) {}
  std::vector<float> p, m, v;
  bool operator==(const State&) const = default;
};

State StateOf(mlpo::Subgroup& subgroup, uint64_t numel) {
  State state(numel);
  subgroup.ReadState(0, numel, state.p.data(), state.m.data(), state.v.data());
  return state;
}

std::string DirectoryOf(const DaemonProcess& daemon, const std::string& name = "saved") {
  const std::string directory = daemon.folder() + "/" + name;
  fs::create_directories(directory);
  return directory;
}

std::vector<fs::path> FilesBelow(const std::string& directory, const std::string& beginning) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::recursive_directory_iterator(directory)) {
    if (entry.is_regular_file() && entry.path().filename().string().starts_with(beginning))
      files.push_back(entry.path());
  }
  return files;
}

bool NothingIsSaving(const DaemonProcess& daemon) {
  const nlohmann::json status = DaemonStatus(daemon.socket());
  uint64_t pinned = 0;
  for (const nlohmann::json& path : status.at("paths")) pinned += path.at("checkpoint_bytes").get<uint64_t>();
  return pinned == 0 && status.at("checkpoints").at("running").empty();
}

}  // namespace

// As two ranks may find another one each: of two complete attempts of a tag, the one that is asked for.
TEST_CASE("Checkpoint.TheAttemptThatIsAskedForIsRestored") {
  constexpr uint64_t kNumel = 50'021;
  DaemonProcess daemon;
  const std::string directory = DirectoryOf(daemon), aside = DirectoryOf(daemon, "aside");
  Client client = Connect(daemon.socket());
  TrainerOptions options;
  options.numel = kNumel;
  ReferenceTrainer trainer(client, options);
  trainer.Step();
  const State first = StateOf(trainer.subgroup(), kNumel);
  const Attempt one = SaveAll(client, {.directory = directory, .step = 1});
  fs::copy(directory, aside, fs::copy_options::recursive);
  trainer.Step();
  const State second = StateOf(trainer.subgroup(), kNumel);
  const Attempt two = SaveAll(client, {.directory = directory, .step = 2, .overwrite = true});
  REQUIRE(one != two);
  // The first is there again, as if it had become complete between the calls of two ranks.
  fs::copy(aside, directory, fs::copy_options::recursive | fs::copy_options::skip_existing);
  const Restored old = Restore(client, trainer.subgroup(), directory, "tag", one);
  CHECK(old.code == 0);
  CHECK(old.step == 1);
  CHECK(old.attempt == one);
  CHECK(StateOf(trainer.subgroup(), kNumel) == first);
  const Restored last = Restore(client, trainer.subgroup(), directory, "tag");
  CHECK(last.code == 0);
  CHECK(last.step == 2);
  CHECK(last.attempt == two);
  CHECK(StateOf(trainer.subgroup(), kNumel) == second);
  CHECK(Restore(client, trainer.subgroup(), directory, "tag", two).code == 0);
  Attempt none = one;
  none[0] ^= 1;
  CHECK(Restore(client, trainer.subgroup(), directory, "tag", none).code == -ENOENT);
  CHECK(Restore(client, trainer.subgroup(), directory, nullptr, one).code == -EINVAL);
  CHECK(StateOf(trainer.subgroup(), kNumel) == second);
}

// The last checkpoint of a job: one rank has saved its part, and ended, before the other begins.
TEST_CASE("Checkpoint.ARankThatIsLateCompletesIt") {
  DaemonProcess daemon;
  const std::string directory = DirectoryOf(daemon);
  std::optional<Client> early = Connect(daemon.socket(), "job", 0, 2);
  Client late = Connect(daemon.socket(), "job", 1, 2);
  std::optional<ReferenceTrainer> first;
  first.emplace(*early, TrainerOptions{.key = "one"});
  ReferenceTrainer second(late, {.key = "two"});
  first->Step();
  second.Step();
  const Attempt attempt = SaveAll(*early, {.directory = directory}, /*complete=*/false);
  first.reset();
  early.reset();
  REQUIRE(Eventually([&] { return DaemonStatus(daemon.socket()).at("sessions").size() == 1; }));
  CHECK(SaveAll(late, {.directory = directory}) == attempt);
  // A rank that begins anew is not taken for one that is late.
  Client anew = Connect(daemon.socket(), "job", 0, 2);
  ReferenceTrainer third(anew, {.key = "one"});
  const Begun other = Begin(anew, {.directory = directory, .overwrite = true});
  REQUIRE(other.code == 0);
  CHECK(other.attempt != attempt);
}

TEST_CASE("Checkpoint.OneThatIsRefusedLeavesTheOthersTheirAttempt") {
  DaemonProcess daemon;
  const std::string directory = DirectoryOf(daemon);
  Client one = Connect(daemon.socket(), "job", 0, 2), two = Connect(daemon.socket(), "job", 1, 2);
  ReferenceTrainer first(one, {.key = "one"}), second(two, {.key = "two"});
  first.Step();
  second.Step();
  const Begun begun = Begin(one, {.directory = directory});
  REQUIRE(begun.code == 0);
  CHECK(Begin(one, {.directory = directory}).code == -EBUSY);
  const Begun other = Begin(two, {.directory = directory});
  REQUIRE(other.code == 0);
  CHECK(other.attempt == begun.attempt);
  Take(one, begun.handle).Wait();
  CHECK(Saved(one, begun.handle).Wait().value == 0);
  Take(two, other.handle).Wait();
  CHECK(Saved(two, other.handle).Wait().value == 1);
}

TEST_CASE("Checkpoint.SubgroupsThatComeAfterItBeganNeedANewOne") {
  DaemonProcess daemon;
  const std::string directory = DirectoryOf(daemon);
  Client client = Connect(daemon.socket());
  const Begun early = Begin(client, {.directory = directory});  // of nothing
  REQUIRE(early.code == 0);
  TrainerOptions options;
  options.numel = 50'021;
  ReferenceTrainer trainer(client, options);
  trainer.Step();
  Request take = Take(client, early.handle);
  CHECK(CodeOf(take) == -ESTALE);
  CHECK(mlpo_checkpoint_abandon(client.get(), early.handle, kPatienceNs) == 0);
  Begun begun;
  REQUIRE(Eventually([&] {  // once the first is gone
    begun = Begin(client, {.directory = directory});
    return begun.code != -EBUSY;
  }));
  REQUIRE(begun.code == 0);
  Take(client, begun.handle).Wait();
  CHECK(Saved(client, begun.handle).Wait().value == 1);
  trainer.Step();
  CHECK(trainer.Difference() == "");
  const State now = StateOf(trainer.subgroup(), options.numel);
  CHECK(Restore(client, trainer.subgroup(), directory, "tag").code == 0);
  CHECK_FALSE(StateOf(trainer.subgroup(), options.numel) == now);
}

// As soon as the client has heard that the last one has ended; one that was given up is busy until then, nothing else.
TEST_CASE("Checkpoint.TheNextOneBeginsRightBehindTheLast") {
  DaemonProcess daemon;
  const std::string directory = DirectoryOf(daemon);
  Client client = Connect(daemon.socket());
  ReferenceTrainer trainer(client, {});
  trainer.Step();
  for (int round = 0; round < 50; ++round) {
    CAPTURE(round);
    const Begun saved = Begin(client, {.directory = directory, .overwrite = true});
    REQUIRE(saved.code == 0);
    Take(client, saved.handle).Wait();
    CHECK(Saved(client, saved.handle).Wait().value == 1);
    const Begun given_up = Begin(client, {.directory = directory, .overwrite = true});
    REQUIRE(given_up.code == 0);
    REQUIRE(mlpo_checkpoint_abandon(client.get(), given_up.handle, kPatienceNs) == 0);
    if (round % 2 == 0) {
      Request end = Saved(client, given_up.handle);
      CHECK(CodeOf(end) == -ECANCELED);
      continue;
    }
    Begun next;
    REQUIRE(Eventually([&] {
      next = Begin(client, {.directory = directory, .overwrite = true});
      return next.code != -EBUSY;
    }));
    REQUIRE(next.code == 0);
    Take(client, next.handle).Wait();
    CHECK(Saved(client, next.handle).Wait().value == 1);
  }
}

// While it is taken, placed, copied or made durable, in whatever thread that is: by the client, or with its session.
TEST_CASE("Checkpoint.MayBeGivenUpAtAnyMoment") {
  constexpr uint64_t kNumel = 200'003;
  constexpr int kRounds = 60;
  DaemonProcess daemon({.memory = "4MiB"});
  const std::string directory = DirectoryOf(daemon);
  std::mt19937 random(1);
  const auto pause = [&] {
    std::this_thread::sleep_for(std::chrono::microseconds(std::uniform_int_distribution<int>(0, 6000)(random)));
  };
  Client client = Connect(daemon.socket(), "stays");
  TrainerOptions options;
  options.numel = kNumel;
  ReferenceTrainer trainer(client, options);
  trainer.Step();
  int given_up = 0, saved = 0;
  for (int round = 0; round < kRounds; ++round) {
    CAPTURE(round);
    const std::string tag = "tag" + std::to_string(round);
    if (round % 3 == 2) {
      Client ends = Connect(daemon.socket(), "ends");
      TrainerOptions other;
      other.numel = kNumel;
      other.seed = static_cast<uint64_t>(round);
      ReferenceTrainer short_lived(ends, other);
      short_lived.Step();
      const Begun begun = Begin(ends, {.directory = directory, .tag = tag});
      REQUIRE(begun.code == 0);
      const Request take = Take(ends, begun.handle);
      pause();
      continue;  // and it is gone
    }
    const Begun begun = Begin(client, {.directory = directory, .tag = tag});
    INFO(mlpo_last_error());
    REQUIRE(begun.code == 0);
    Request take = Take(client, begun.handle);
    pause();
    const int abandoned = mlpo_checkpoint_abandon(client.get(), begun.handle, kPatienceNs);
    Request end = Saved(client, begun.handle);
    const int code = CodeOf(end);
    const bool there = fs::exists(directory + "/" + tag) && !FilesBelow(directory + "/" + tag, "manifest-").empty();
    CHECK(there == (code == 0));
    if (abandoned == 0 && code != 0) {
      CHECK(code == -ECANCELED);
      CHECK((!fs::exists(directory + "/" + tag) || FilesBelow(directory + "/" + tag, "").empty()));
      ++given_up;
    } else {  // too late, or it had ended
      CHECK((abandoned == -EALREADY || abandoned == -EBADF));
      CHECK(code == 0);
      ++saved;
    }
    const int taken = CodeOf(take);
    CHECK((taken == 0 || taken == -ECANCELED));
    if (round % 10 == 0) trainer.Step();
  }
  INFO("given up " << given_up << ", saved all the same " << saved);
  CHECK(given_up > 0);
  REQUIRE(Eventually([&] { return NothingIsSaving(daemon); }));
  // A part is there as a whole, or not at all.
  for (const auto& entry : fs::directory_iterator(directory)) {
    const std::string tag = entry.path().string();
    CHECK(FilesBelow(tag, "manifest-").size() == FilesBelow(tag, "data-").size());
    CHECK(FilesBelow(tag, "").size() == 2 * FilesBelow(tag, "manifest-").size());
  }
  trainer.Step();
  CHECK(trainer.Difference() == "");
  SaveAll(client, {.directory = directory, .tag = "last"});
  CHECK(Restore(client, trainer.subgroup(), directory, "last").code == 0);
  CHECK(trainer.Difference() == "");
  CHECK(daemon.running());
}

// So that its save comes for the session's files before they go, while they do, or after.
TEST_CASE("Checkpoint.ItsSessionMayGoAsItBegins") {
  DaemonProcess daemon;
  const std::string directory = DirectoryOf(daemon);
  std::mt19937 random(1);
  for (int round = 0; round < 80; ++round) {
    RawSession session(daemon.socket(), MakeHello("goes"));
    session.Register("layer", 20'000);
    auto frame = mlpo::MakeFrame<mlpo_checkpoint>(MLPO_FRAME_CHECKPOINT, 7);
    frame.tag_bytes = 1;
    frame.tag[0] = 't';
    frame.directory_bytes = static_cast<uint32_t>(directory.copy(frame.directory, sizeof frame.directory));
    REQUIRE(session.Send(frame));
    std::this_thread::sleep_for(std::chrono::microseconds(std::uniform_int_distribution<int>(0, 8000)(random)));
  }
  CHECK(Eventually([&] {
    const nlohmann::json status = DaemonStatus(daemon.socket());
    return status.at("sessions").empty() && status.at("quotas").empty() && fs::is_empty(directory);
  }));
  CHECK(daemon.ScratchGone());
}

// After a checkpoint that was copied the session's file has room for two. What it leaves to the next one gives that
// back, and where it goes on there is room for all of the state.
TEST_CASE("Checkpoint.AFileThatIsHandedOverIsSmallAndTheNextOneHasRoom") {
  constexpr uint64_t kNumel = 102'400, kBlocks = 25, kExtentBytes = 3 * 16384, kHeaderBytes = 4096;
  DaemonProcess daemon({.paths = 1, .path_settings = {"persistent = true\n"}});
  const std::string directory = DirectoryOf(daemon), elsewhere = "/dev/shm";
  struct stat here {
  }, there{};
  REQUIRE(::stat(directory.c_str(), &here) == 0);
  Client client = Connect(daemon.socket());
  TrainerOptions options;
  options.numel = kNumel;
  ReferenceTrainer trainer(client, options);
  trainer.Step();
  const bool copies = ::stat(elsewhere.c_str(), &there) == 0 && here.st_dev != there.st_dev;
  const std::string copied = elsewhere + "/mlpo-test-" + std::to_string(::getpid());
  if (copies) {
    fs::create_directory(copied);
    SaveAll(client, {.directory = copied});
    fs::remove_all(copied);
  }
  trainer.Step();
  const State taken = StateOf(trainer.subgroup(), kNumel);
  const Begun begun = Begin(client, {.directory = directory, .step = 2});
  INFO(mlpo_last_error());
  REQUIRE(begun.code == 0);
  std::vector<fs::path> files = FilesBelow(daemon.path(0), "state");
  for (const fs::path& file : files) CHECK(fs::file_size(file) >= kHeaderBytes + kBlocks * kExtentBytes);
  Take(client, begun.handle).Wait();
  CHECK(Saved(client, begun.handle).Wait().value == 1);
  const std::vector<fs::path> handed = FilesBelow(directory, "data-");
  if (handed.size() == 1) {
    WARN("nothing is handed over here: the file system clones, or the path is on another one");
  } else {
    REQUIRE(files.size() == 2);
    REQUIRE(handed.size() == 2);  // the part's own, and the session's
    uint64_t on_storage = 0;
    for (const fs::path& file : handed) {
      struct stat st {};
      REQUIRE(::stat(file.c_str(), &st) == 0);
      on_storage += static_cast<uint64_t>(st.st_blocks) * 512;
    }
    CHECK(on_storage <= kBlocks * kExtentBytes + (uint64_t{128} << 10));
  }
  for (int i = 0; i < 3; ++i) trainer.Step();
  CHECK(trainer.Difference() == "");
  CHECK(Restore(client, trainer.subgroup(), directory, "tag").code == 0);
  CHECK(StateOf(trainer.subgroup(), kNumel) == taken);
}
