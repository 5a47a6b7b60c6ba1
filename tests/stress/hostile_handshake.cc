// Clients that break the protocol on the session socket: in the handshake, in registrations, with descriptors, and
// with processes that are not what they seem. Only their own session ends, and nothing of it stays.
#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <memory>
#include <random>

#include "proto/status.h"
#include "tests/support/catch.h"
#include "tests/support/daemon_status.h"
#include "tests/support/raw_session.h"
#include "tests/support/thread_uid.h"
#include "tests/support/witness.h"

using namespace mlpo::test;

namespace {

template <class T>
T FrameOf(uint16_t type, uint32_t seq = 1) {
  T frame = {};
  const mlpo_frame header = {MLPO_MAGIC, type, 0, sizeof frame, seq};
  std::memcpy(&frame, &header, sizeof header);
  return frame;
}

mlpo_hello SmallArena(const std::string& job) {
  mlpo_hello hello = MakeHello(job);
  hello.arena_bytes = 1 << 20;
  return hello;
}

struct OneTensor {
  mlpo_register_tensors header;
  mlpo_tensor_record record;
};

mlpo_register_begin Begin(uint64_t numel, uint32_t tensors = 1) {
  auto begin = FrameOf<mlpo_register_begin>(MLPO_FRAME_REGISTER_BEGIN);
  begin.dtype = begin.grad_dtype = MLPO_FLOAT32;
  begin.numel = numel;
  begin.tensors = tensors;
  begin.key_bytes = 1;
  begin.key[0] = 'k';
  return begin;
}

OneTensor Tensor(uint64_t numel) {
  auto tensor = FrameOf<OneTensor>(MLPO_FRAME_REGISTER_TENSORS);
  tensor.header.count = 1;
  tensor.record.numel = numel;
  tensor.record.name_bytes = 1;
  tensor.record.name[0] = 't';
  return tensor;
}

// The refusal of a registration; the session goes on.
mlpo_error Refusal(RawSession& session) {
  REQUIRE(session.Receive());
  REQUIRE(session.type() == MLPO_FRAME_ERROR);
  const mlpo_error error = session.As<mlpo_error>();
  CHECK(session.Register("after", 10).subgroup != 0);
  return error;
}

}  // namespace

TEST_CASE("Hostile.LeavesAtEachStepOfTheHandshake") {
  DaemonProcess daemon;
  Witness witness(daemon);
  { RawSession warm_up(daemon.socket(), SmallArena("raw")); }
  REQUIRE(witness.Alone());
  const int descriptors = daemon.SettledDescriptors();
  for (int round = 0; round < 20; ++round) {
    { RawSession connected(daemon.socket()); }
    {
      RawSession greeted(daemon.socket());
      greeted.SendHello(SmallArena("raw"));
    }
    {
      RawSession welcomed(daemon.socket());
      welcomed.SendHello(SmallArena("raw"));
      REQUIRE(welcomed.Receive());
      REQUIRE(welcomed.type() == MLPO_FRAME_WELCOME);
    }
    { RawSession ready(daemon.socket(), SmallArena("raw")); }
    {
      RawSession begun(daemon.socket(), SmallArena("raw"));
      begun.Send(Begin(100));
    }
    {
      RawSession registering(daemon.socket(), SmallArena("raw"));
      registering.SendRegistration("k", 5000, MLPO_FLOAT32, 1);
    }
    {
      RawSession unmapped(daemon.socket(), SmallArena("raw"));  // MAPPED never comes
      unmapped.SendRegistration("k", 5000, MLPO_FLOAT32, 1);
      REQUIRE(unmapped.Receive());
      REQUIRE(unmapped.type() == MLPO_FRAME_ARENA);
    }
    {
      RawSession registered(daemon.socket(), SmallArena("raw"));
      registered.Register("k", 5000);
    }
    witness.Step();
  }
  REQUIRE(witness.Alone());
  CHECK(daemon.SettledDescriptors() == descriptors);
  CHECK(witness.ProtocolErrors() == 0);
  CHECK(witness.Complaint() == "");
}

TEST_CASE("Hostile.HalfOpenConnectionsDoNotHoldUpTheEnd") {
  DaemonProcess daemon;
  RawSession connected(daemon.socket());
  RawSession welcomed(daemon.socket());
  welcomed.SendHello(SmallArena("raw"));
  REQUIRE(welcomed.Receive());
  RawSession waiting(daemon.socket(), SmallArena("raw2"));
  daemon.Signal(SIGTERM);
  CHECK(daemon.WaitForEnd(3) == 0);  // before the handshake's deadline would have ended them
}

TEST_CASE("Hostile.OneUserCannotTakeAllConnections") {
  constexpr gid_t kGroup = 1;
  const struct group* const named = ::geteuid() == 0 ? ::getgrgid(kGroup) : nullptr;
  if (named == nullptr) {
    WARN("skipped: only root can be other users, of a group with the number 1");
    return;
  }
  // 20 handshakes are a user's.
  const std::string name = named->gr_name;
  DaemonProcess daemon({.config = "[daemon]\nmax_sessions = 16\ngroup = \"" + name + "\"\n"});
  REQUIRE(::chmod(daemon.folder().c_str(), 0755) == 0);
  std::vector<std::unique_ptr<RawSession>> silent;
  {
    const ThreadUid as(65534, {kGroup});
    for (int i = 0; i < 21; ++i) silent.push_back(std::make_unique<RawSession>(daemon.socket()));
  }
  const RawSession::EndReason refused = silent.back()->WaitForEnd();
  CHECK(refused.status == MLPO_E_QUOTA);
  CHECK(refused.text.find("65534") != std::string::npos);
  silent.front()->SendHello(SmallArena("first"));  // what it has is as good as ever
  REQUIRE(silent.front()->Receive());
  CHECK(silent.front()->type() == MLPO_FRAME_WELCOME);
  const auto comes_in = [&](uid_t uid) {
    const ThreadUid as(uid, {kGroup});
    RawSession session(daemon.socket());
    return session.SendHello(SmallArena("later")) && session.Receive() && session.type() == MLPO_FRAME_WELCOME;
  };
  CHECK(comes_in(4000));
  { const RawSession root(daemon.socket(), SmallArena("root")); }
  silent.clear();
  CHECK(Eventually([&] { return comes_in(65534); }));
}

TEST_CASE("Hostile.DescriptorsThatNobodyAskedFor") {
  DaemonProcess daemon;
  Witness witness(daemon);
  const int descriptors = daemon.SettledDescriptors();
  const std::vector<int> eight(8, STDIN_FILENO), many(200, STDIN_FILENO);
  for (int round = 0; round < 10; ++round) {
    RawSession(daemon.socket()).Send(SmallArena("raw"), eight);
    RawSession(daemon.socket()).Send(SmallArena("raw"), many);
    RawSession(daemon.socket()).SendBytes("", 0, eight);  // an empty message can bring some, too
    RawSession session(daemon.socket(), SmallArena("raw"));
    session.Send(Begin(100), eight);
    CHECK(session.WaitForEnd().status == MLPO_E_PROTOCOL);
    RawSession empty(daemon.socket(), SmallArena("raw"));
    empty.SendBytes("", 0, eight);
    empty.WaitForEnd();
  }
  REQUIRE(witness.Alone());
  CHECK(daemon.SettledDescriptors() == descriptors);
  CHECK(witness.Complaint() == "");
}

TEST_CASE("Hostile.BrokenFramesEndTheSessionAndAreCounted") {
  DaemonProcess daemon;
  Witness witness(daemon);
  uint64_t errors = witness.ProtocolErrors();
  std::vector<std::vector<std::byte>> frames;
  auto add = [&](auto frame, size_t bytes, const std::function<void(mlpo_frame*)>& change = {}) {
    std::vector<std::byte> raw(std::max(bytes, sizeof frame));
    std::memcpy(raw.data(), &frame, sizeof frame);
    if (change) change(reinterpret_cast<mlpo_frame*>(raw.data()));
    raw.resize(bytes);
    frames.push_back(raw);
  };
  const auto begin = Begin(100);
  add(begin, 3);                                                                // shorter than a header
  add(begin, sizeof begin - 1);                                                 // truncated
  add(begin, sizeof begin, [](mlpo_frame* f) { f->magic ^= 1; });               // not ours
  add(begin, sizeof begin, [](mlpo_frame* f) { f->bytes += 8; });               // lies about its length
  add(begin, sizeof begin, [](mlpo_frame* f) { f->reserved = 1; });             // reserved field
  add(begin, sizeof begin, [](mlpo_frame* f) { f->type = 99; });                // unknown
  add(begin, sizeof begin, [](mlpo_frame* f) { f->type = MLPO_FRAME_HELLO; });  // out of order
  add(begin, sizeof begin, [](mlpo_frame* f) { f->type = MLPO_FRAME_READY; });
  add(begin, sizeof begin, [](mlpo_frame* f) { f->type = MLPO_FRAME_MAPPED; });
  add(begin, sizeof begin + 8, [](mlpo_frame* f) { f->bytes += 8; });  // too long for its type
  add(begin, 100'000, [](mlpo_frame* f) { f->bytes = 100'000; });      // longer than a frame may be
  add(FrameOf<mlpo_frame>(MLPO_FRAME_REGISTER_END), sizeof(mlpo_frame));
  add(Tensor(5), sizeof(OneTensor));  // without REGISTER_BEGIN
  for (const auto& frame : frames) {
    CAPTURE(frame.size());
    RawSession session(daemon.socket(), SmallArena("raw"));
    session.SendBytes(frame.data(), frame.size());
    CHECK(session.WaitForEnd().status == MLPO_E_PROTOCOL);
    CHECK(witness.ProtocolErrors() == ++errors);
  }
  // In the place of HELLO, and of READY.
  RawSession first(daemon.socket());
  first.Send(begin);
  CHECK(first.WaitForEnd().status == MLPO_E_PROTOCOL);
  RawSession second(daemon.socket());
  second.SendHello(SmallArena("raw"));
  second.Send(begin);
  CHECK(second.WaitForEnd().status == MLPO_E_PROTOCOL);
  CHECK(witness.ProtocolErrors() == errors + 2);
  CHECK(witness.Complaint() == "");
}

TEST_CASE("Hostile.RandomFrames") {
  DaemonProcess daemon;
  Witness witness(daemon);
  std::mt19937_64 random(3);
  for (int i = 0; i < (LongForm() ? 20'000 : 300); ++i) {
    RawSession session(daemon.socket(), SmallArena("raw"));
    for (int k = 0; k < 5; ++k) {
      std::vector<uint64_t> words((16 + random() % 1200) / 8);
      for (uint64_t& word : words) word = random() % 3 == 0 ? random() : random() % 4;
      const mlpo_frame header = {MLPO_MAGIC, static_cast<uint16_t>(4 + random() % 8), 0,
                                 static_cast<uint32_t>(words.size() * 8), static_cast<uint32_t>(1 + random() % 3)};
      std::memcpy(words.data(), &header, sizeof header);
      if (!session.SendBytes(words.data(), words.size() * 8)) break;
    }
  }
  REQUIRE(witness.Alone());
  CHECK(witness.Complaint() == "");
}

TEST_CASE("C30_RegistrationsOfImpossibleSizesAreRefusedAndTheSessionLives") {
  DaemonProcess daemon;
  Witness witness(daemon);
  RawSession session(daemon.socket(), SmallArena("raw"));
  const uint64_t huge = uint64_t{1} << 63;
  auto refuse = [&](const mlpo_register_begin& begin, const OneTensor& tensor, int status) {
    RawSession raw(daemon.socket(), SmallArena("raw2"));
    raw.Send(begin);
    raw.Send(tensor);
    raw.SendBare(MLPO_FRAME_REGISTER_END, 1);
    const mlpo_error error = Refusal(raw);
    CAPTURE(error.text);
    CHECK(error.status == status);
    CHECK(std::strlen(error.text) > 10);
  };
  refuse(Begin(huge), Tensor(huge), MLPO_E_QUOTA);
  refuse(Begin(~uint64_t{0}), Tensor(~uint64_t{0}), MLPO_E_QUOTA);
  refuse(Begin(uint64_t{1} << 40), Tensor(uint64_t{1} << 40), MLPO_E_QUOTA);  // of the arena
  refuse(Begin(10, 0), Tensor(10), MLPO_E_QUOTA);
  refuse(Begin(10, 0xffffffff), Tensor(10), MLPO_E_QUOTA);
  refuse(Begin(10, 2), Tensor(10), -EINVAL);
  refuse(Begin(10), Tensor(11), -EINVAL);
  refuse(Begin(10), Tensor(9), -EINVAL);
  OneTensor shaped = Tensor(10);
  shaped.record.ndim = 2;
  shaped.record.shape[0] = shaped.record.shape[1] = uint64_t{1} << 32;  // their product is 2^64 = 0
  shaped.record.global_shape[0] = shaped.record.global_shape[1] = uint64_t{1} << 32;
  refuse(Begin(10), shaped, -EINVAL);
  shaped.record.shape[0] = 10;
  shaped.record.shape[1] = 1;
  shaped.record.offsets[0] = ~uint64_t{0} - 5;  // offset + shape wraps
  refuse(Begin(10), shaped, -EINVAL);
  OneTensor flat = Tensor(10);
  flat.record.flags = MLPO_TENSOR_FLAT;
  flat.record.ndim = 1;
  flat.record.global_shape[0] = 20;
  flat.record.flat_first = ~uint64_t{0} - 3;
  refuse(Begin(10), flat, -EINVAL);
  // More than the arena that HELLO asked for, and a staging area without end: figures, not a kill.
  session.SendRegistration("large", 1 << 20, MLPO_FLOAT32, 5);
  CHECK(Refusal(session).status == MLPO_E_QUOTA);
  CHECK(witness.Complaint() == "");
}

// A kernel that has SO_PEERPIDFD tells the daemon whose socket it is, and what the client sends is not looked at.
TEST_CASE("Hostile.PidfdOfAnotherProcessOrNone") {
  DaemonProcess daemon;
  Witness witness(daemon);
  const uint64_t errors = witness.ProtocolErrors();
  const bool from_kernel = KernelGivesPidfd();
  int ends[2];
  REQUIRE(::pipe2(ends, O_CLOEXEC) == 0);
  const int other = OpenPidfd(daemon.pid());
  const int null = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  const int path_only = ::open("/", O_PATH | O_CLOEXEC);
  const int descriptors = daemon.SettledDescriptors();
  for (const int fd : {other, ends[0], null, path_only}) {
    CAPTURE(fd);
    RawSession session(daemon.socket());
    session.Send(SmallArena("raw"), {&fd, 1});
    if (from_kernel) {
      REQUIRE(session.Receive());
      CHECK(session.type() == MLPO_FRAME_WELCOME);
      continue;
    }
    const RawSession::EndReason reason = session.WaitForEnd();
    CHECK(reason.status == MLPO_E_PROTOCOL);
    if (fd == other) CHECK(reason.text.find(std::to_string(daemon.pid())) != std::string::npos);
  }
  RawSession none(daemon.socket());
  none.Send(MakeHello("raw"));
  CHECK(none.WaitForEnd().status == MLPO_E_PROTOCOL);
  for (const int fd : {other, ends[0], ends[1], null, path_only}) ::close(fd);
  REQUIRE(witness.Alone());
  CHECK(daemon.SettledDescriptors() == descriptors);
  CHECK(witness.ProtocolErrors() == errors + (from_kernel ? 1 : 5));
  CHECK(witness.Complaint() == "");
}

// A forked child (a data loader's worker) keeps the socket open after its parent was killed: the session ends by the
// pidfd, and the rank may come again at once.
TEST_CASE("Hostile.OrphanHoldsTheSocketOfADeadParent") {
  DaemonProcess daemon;
  Witness witness(daemon);
  int ready[2], orphan_lives[2];
  REQUIRE(::pipe2(ready, O_CLOEXEC) == 0);
  REQUIRE(::pipe2(orphan_lives, O_CLOEXEC) == 0);
  const pid_t parent = ::fork();
  REQUIRE(parent >= 0);
  if (parent == 0) {
    ::close(orphan_lives[1]);
    try {
      RawSession session(daemon.socket(), SmallArena("forked"));
      session.Register("k", 5000);
      if (::fork() == 0) {
        char byte;
        (void)!::read(orphan_lives[0], &byte, 1);  // until the test lets it go
        ::_exit(0);
      }
      (void)!::write(ready[1], "r", 1);
      for (;;) ::pause();
    } catch (const std::exception&) {
      ::_exit(1);
    }
  }
  ::close(ready[1]);
  char byte;
  REQUIRE(::read(ready[0], &byte, 1) == 1);
  CHECK(witness.Sessions() == 2);
  ::kill(parent, SIGKILL);
  ::waitpid(parent, nullptr, 0);
  { RawSession again(daemon.socket(), SmallArena("forked")); }
  CHECK(witness.Alone());
  ::close(orphan_lives[1]);
  ::close(orphan_lives[0]);
  ::close(ready[0]);
  CHECK(witness.Complaint() == "");
}
