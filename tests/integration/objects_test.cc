// Named objects through the real daemon: what one rank stores is what all ranks of the job read, whatever its size.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "proto/status.h"
#include "tests/support/catch.h"
#include "tests/support/daemon_process.h"
#include "tests/support/daemon_status.h"
#include "tests/support/raw_session.h"

using namespace mlpo::test;
using mlpo::Client;

namespace {

using Bytes = std::vector<std::byte>;
constexpr uint64_t kBlockBytes = 4096 * 12;
constexpr uint64_t kSmall = 16384;

Bytes Content(uint64_t seed, uint64_t bytes) {
  std::mt19937_64 random(seed);
  Bytes content(bytes);
  for (uint64_t at = 0; at < bytes; at += 8) {
    const uint64_t word = random();
    std::memcpy(content.data() + at, &word, std::min<uint64_t>(8, bytes - at));
  }
  return content;
}

Client Join(const DaemonProcess& daemon, int rank, const char* job = "job") {
  mlpo_connect_options options = MLPO_CONNECT_OPTIONS_INIT;
  const std::string socket = daemon.socket();
  options.socket = socket.c_str();
  options.job = job;
  options.rank = rank;
  options.world_size = 8;
  return Client::Connect(options);
}

Bytes FetchAll(Client& client, const std::string& name) {
  const std::optional<uint64_t> size = client.ObjectSize(name);
  REQUIRE(size);
  Bytes out(*size);
  CHECK(client.FetchObject(name, 0, out.size(), out.data()) == *size);
  return out;
}

template <class Call>
mlpo::Error ErrorOf(Call call) {
  try {
    call();
  } catch (const mlpo::Error& error) {
    return error;
  }
  return mlpo::Error(0, "no error");
}

// FETCH of "a" by hand: the client library does not stop in the middle.
struct Reader {
  explicit Reader(const std::string& socket) : session(socket, MakeHello("job", 1, 8)) {
    const mlpo_staged area = session.Stage(65536);
    staged = session.arena(area.arena) + area.offset;
  }
  std::optional<mlpo_completion> Do(uint32_t step, uint64_t first, uint64_t count) {
    mlpo_submission submission = {};
    submission.op = MLPO_OP_FETCH;
    submission.subgroup = 9;
    submission.arg = step;
    submission.first = step == MLPO_OBJECT_OPEN ? 1 : first;
    submission.count = count;
    if (step == MLPO_OBJECT_OPEN) *staged = std::byte{'a'};
    session.Push(submission);
    return session.Reap();
  }
  RawSession session;
  std::byte* staged;
};

uint64_t ScratchBytes(const DaemonProcess& daemon) {
  uint64_t bytes = 0;
  const nlohmann::json status = DaemonStatus(daemon.socket());
  for (const nlohmann::json& path : status.at("paths")) {
    bytes += path.at("scratch_bytes").get<uint64_t>();
  }
  return bytes;
}

DaemonProcess::Options ThreeBuffers(const char* engine = "auto") {
  return {.paths = 2, .memory = "147456", .engine = engine};
}

}  // namespace

// Sizes around every boundary there is: pages, the largest small object, blocks, halves of the staging area.
TEST_CASE("Objects.AnySizeIsReadBackWholeAndInParts") {
  const char* const engine = GENERATE("auto", "threads");
  DaemonProcess daemon(ThreeBuffers(engine));
  Client writer = Join(daemon, 0);
  Client reader = Join(daemon, 1);
  std::mt19937_64 random(1);
  for (const uint64_t bytes :
       {uint64_t{0}, uint64_t{1}, uint64_t{7}, uint64_t{4095}, uint64_t{4096}, kSmall, kSmall + 1, kBlockBytes / 2,
        kBlockBytes - 1, kBlockBytes, kBlockBytes + 1, 3 * kBlockBytes, 10 * kBlockBytes + 13, uint64_t{3'000'001}}) {
    CAPTURE(bytes, engine);
    const Bytes content = Content(bytes, bytes);
    writer.FlushObject("an object", content.data(), bytes);
    REQUIRE(reader.ObjectSize("an object") == bytes);
    REQUIRE(FetchAll(reader, "an object") == content);
    for (int i = 0; i < 10; ++i) {
      const uint64_t first = random() % (bytes + 1);
      Bytes part(random() % (bytes - first + 1));
      reader.FetchObject("an object", first, part.size(), part.data());
      REQUIRE(std::equal(part.begin(), part.end(), content.begin() + static_cast<ptrdiff_t>(first)));
    }
    // Many times the pool, so all of it has been on storage when it is read.
    if (bytes == 3'000'001) CHECK(ScratchBytes(daemon) > bytes - 3 * kBlockBytes);
  }
  writer.DeleteObject("an object");
  CHECK_FALSE(reader.ObjectSize("an object"));
  CHECK(daemon.ScratchGone());  // when what was being read ahead of use has been
  CHECK(ScratchBytes(daemon) == 0);
}

TEST_CASE("Objects.WhatIsRefusedSaysWhy") {
  DaemonProcess daemon;
  Client client = Join(daemon, 0);
  std::byte out[10] = {};
  for (const auto& error :
       {ErrorOf([&] { client.FetchObject("none", 0, 1, out); }), ErrorOf([&] { client.DeleteObject("none"); })}) {
    CHECK(error.code() == -ENOENT);
    CHECK(std::string(error.what()).find("'none'") != std::string::npos);
  }
  client.FlushObject("ten", out, 10);
  const mlpo::Error range = ErrorOf([&] { client.FetchObject("ten", 5, 6, out); });
  CHECK(range.code() == -EINVAL);
  CHECK(std::string(range.what()).find("which has 10") != std::string::npos);
  CHECK(ErrorOf([&] { client.FetchObject("ten", ~uint64_t{0}, 2, out); }).code() == -EINVAL);
  CHECK(ErrorOf([&] { client.FlushObject("", out, 1); }).code() == -EINVAL);
  CHECK(ErrorOf([&] { client.FlushObject(std::string(257, 'x'), out, 1); }).code() == -EINVAL);
  CHECK(ErrorOf([&] { client.FlushObject("x", nullptr, 1); }).code() == -EINVAL);
  CHECK(ErrorOf([&] { client.FlushObject("x", out, ~uint64_t{0}); }).code() == -EFBIG);
  // Names are bytes: nothing in them means anything.
  const std::vector<std::string> names = {"../../etc/passwd", "/", "\xff\x01 \n", std::string(256, '.')};
  for (const std::string& name : names) {
    client.FlushObject(name, name.data(), name.size());
    const Bytes read = FetchAll(client, name);
    CHECK(std::memcmp(read.data(), name.data(), name.size()) == 0);
  }
  for (const std::string& file : daemon.ScratchFiles()) CHECK(file.find("passwd") == std::string::npos);
}

TEST_CASE("Objects.BelongToTheJobAndEndWithItsLastSession") {
  DaemonProcess daemon(ThreeBuffers());
  const Bytes content = Content(1, 5 * kBlockBytes);
  Client first = Join(daemon, 0);
  Client other = Join(daemon, 0, "other");
  first.FlushObject("a", content.data(), content.size());
  CHECK_FALSE(other.ObjectSize("a"));
  {
    Client second = Join(daemon, 1);
    first.Close();
    CHECK(FetchAll(second, "a") == content);
    CHECK(ScratchBytes(daemon) > 0);
  }
  CHECK(daemon.ScratchGone());
  CHECK(ScratchBytes(daemon) == 0);
  Client again = Join(daemon, 1);
  CHECK_FALSE(again.ObjectSize("a"));
  const nlohmann::json pool = DaemonStatus(daemon.socket()).at("pool");
  CHECK(pool.at("free_blocks") == 3);
}

TEST_CASE("Objects.WithoutRoomTheFlushFailsAndWhatWasThereStays") {
  DaemonProcess::Options options = ThreeBuffers();
  options.path_settings = {"capacity = \"1MiB\"\n"};
  DaemonProcess daemon(options);
  Client client = Join(daemon, 0);
  const Bytes content = Content(1, 700'000);
  client.FlushObject("a", content.data(), content.size());
  const Bytes larger = Content(2, 1'900'000);  // two versions are more than the paths have
  const mlpo::Error error = ErrorOf([&] { client.FlushObject("a", larger.data(), larger.size()); });
  const std::string text = error.what();
  CAPTURE(text);
  CHECK(error.code() == -ENOSPC);
  CHECK(text.find("2600960 bytes") != std::string::npos);  // 700,000 and 1,900,000 in pages
  CHECK(text.find("'path0'") != std::string::npos);
  CHECK(text.find("'path1'") != std::string::npos);
  CHECK(FetchAll(client, "a") == content);
  client.DeleteObject("a");
  // The room is the paths' again: as soon as the files are gone.
  CHECK(daemon.ScratchGone());
  client.FlushObject("a", larger.data(), larger.size());
  CHECK(FetchAll(client, "a") == larger);
}

// A reader in the middle of a version that is overwritten and deleted has it to its end: by hand, as the client library
// does not stop there.
TEST_CASE("Objects.AReaderInTheMiddleKeepsItsVersion") {
  DaemonProcess daemon(ThreeBuffers());
  Client client = Join(daemon, 0);
  const Bytes before = Content(1, 6 * kBlockBytes + 5);
  const Bytes after = Content(2, 9 * kBlockBytes);
  client.FlushObject("a", before.data(), before.size());
  Reader reader(daemon.socket());
  REQUIRE(reader.Do(MLPO_OBJECT_OPEN, 0, 0)->value == before.size());
  REQUIRE(reader.Do(MLPO_OBJECT_PIECE, 0, 1000)->status == 0);
  CHECK(std::memcmp(reader.staged, before.data(), 1000) == 0);
  client.FlushObject("a", after.data(), after.size());
  client.DeleteObject("a");
  CHECK_FALSE(client.ObjectSize("a"));
  for (uint64_t at = 0; at < before.size(); at += kBlockBytes) {
    const uint64_t count = std::min(kBlockBytes, before.size() - at);
    REQUIRE(reader.Do(MLPO_OBJECT_PIECE, at, count)->status == 0);
    REQUIRE(std::memcmp(reader.staged, before.data() + at, count) == 0);
  }
  REQUIRE(reader.Do(MLPO_OBJECT_CLOSE, 0, 0)->status == 0);
  CHECK(reader.Do(MLPO_OBJECT_PIECE, 0, 1)->status == -EBADF);
  CHECK(reader.Do(MLPO_OBJECT_OPEN, 0, 0)->status == -ENOENT);
  CHECK(daemon.ScratchGone());
}

TEST_CASE("Objects.AKilledWriterLeavesNothing") {
  DaemonProcess daemon(ThreeBuffers());
  Client client = Join(daemon, 0);
  const Bytes content = Content(1, kBlockBytes);
  client.FlushObject("a", content.data(), content.size());
  for (int round = 0; round < 5; ++round) {
    const pid_t child = ::fork();
    if (child == 0) {
      const Bytes large = Content(2, 64 << 20);
      mlpo_connect_options options = MLPO_CONNECT_OPTIONS_INIT;
      const std::string socket = daemon.socket();
      options.socket = socket.c_str();
      options.job = "job";
      options.rank = 1;
      options.world_size = 8;
      mlpo_client* writer;
      if (mlpo_connect(&options, &writer) != 0) ::_exit(1);
      for (;;) mlpo_object_flush(writer, "a", large.data(), large.size(), MLPO_FOREVER);
    }
    REQUIRE(child > 0);
    CHECK(Eventually([&] { return ScratchBytes(daemon) > 10 * kBlockBytes; }));
    REQUIRE(::kill(child, SIGKILL) == 0);
    int status;
    REQUIRE(::waitpid(child, &status, 0) == child);
    CHECK(WIFSIGNALED(status));
    const std::optional<uint64_t> size = client.ObjectSize("a");
    REQUIRE(size);
    CHECK((*size == kBlockBytes || *size == 64 << 20));
    client.FlushObject("a", content.data(), content.size());
    CHECK(Eventually([&] { return ScratchBytes(daemon) <= kBlockBytes; }));
  }
  CHECK(FetchAll(client, "a") == content);
}

TEST_CASE("Objects.ADrainEndsThemAndLeavesNoFile") {
  DaemonProcess daemon(ThreeBuffers());
  Client client = Join(daemon, 0);
  const Bytes content = Content(1, 20 * kBlockBytes);
  client.FlushObject("a", content.data(), content.size());
  CHECK_FALSE(daemon.ScratchFiles().empty());
  daemon.Signal(SIGTERM);
  CHECK(daemon.WaitForEnd() == 0);
  CHECK(daemon.ScratchFiles().empty());
  Bytes out(1);
  CHECK(ErrorOf([&] { client.FetchObject("a", 0, 1, out.data()); }).code() == -ESHUTDOWN);
}

TEST_CASE("Objects.FilesOfAKilledDaemonGoAtTheNextStart") {
  DaemonProcess daemon(ThreeBuffers());
  {
    Client client = Join(daemon, 0);
    const Bytes content = Content(1, 20 * kBlockBytes);
    client.FlushObject("a", content.data(), content.size());
    daemon.Signal(SIGKILL);
    daemon.WaitForEnd();
  }
  CHECK_FALSE(daemon.ScratchFiles().empty());
  daemon.Start();
  CHECK(daemon.ScratchFiles().empty());
}

// A passed deadline: the daemon is paused, so nothing is answered. Afterwards the client works as before.
TEST_CASE("Objects.APassedDeadlineLeavesNoHandleBehind") {
  DaemonProcess daemon(ThreeBuffers());
  Client client = Join(daemon, 0);
  const Bytes content = Content(1, 10 * kBlockBytes);
  client.FlushObject("a", content.data(), content.size());
  Bytes out(content.size());
  for (int i = 0; i < 3; ++i) {
    daemon.Signal(SIGSTOP);
    const auto timeout = std::chrono::milliseconds(20);
    CHECK(ErrorOf([&] { client.FetchObject("a", 0, out.size(), out.data(), timeout); }).code() == -ETIMEDOUT);
    daemon.Signal(SIGCONT);
    client.FetchObject("a", 0, out.size(), out.data());
    CHECK(out == content);
  }
  client.DeleteObject("a");
  CHECK(Eventually([&] { return ScratchBytes(daemon) == 0; }));  // no handle keeps the version
  CHECK(daemon.ScratchGone());
}
