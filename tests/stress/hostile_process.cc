// Clients that do with their process, socket and shared memory what no library does: stop, fork, half-close, never
// read, flip indices all the time, storm the doorbell, use slots that the daemon has, pass descriptors that hang. Only
// they have the harm; a good client beside them keeps its bits, and the daemon ends in order.
#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "proto/status.h"
#include "tests/support/catch.h"
#include "tests/support/fault_fs.h"
#include "tests/support/raw_session.h"
#include "tests/support/slow_close.h"
#include "tests/support/witness.h"

using namespace mlpo::test;

namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kNumel = 9'000;  // three blocks
constexpr uint64_t kLent = 1 << 20;
constexpr mlpo_hyper kHyper = {1e-3, 0.9, 0.999, 1e-8, 0.01, 1, MLPO_ADAMW, 0, 0};

mlpo_hello SmallArena(const std::string& job = "raw") {
  mlpo_hello hello = MakeHello(job);
  hello.arena_bytes = 4 << 20;
  return hello;
}

mlpo_staging Staging(uint64_t bytes, uint32_t seq = 1) {
  mlpo_staging staging = {};
  staging.frame = {MLPO_MAGIC, MLPO_FRAME_STAGING, 0, sizeof staging, seq};
  staging.bytes = bytes;
  return staging;
}

mlpo_submission Submission(uint16_t op, uint32_t subgroup = 0) {
  mlpo_submission submission = {};
  submission.op = op;
  submission.subgroup = subgroup;
  return submission;
}

// A child process that does something and then stops itself (SIGSTOP); killed at the end of its life.
class StoppedClient {
 public:
  explicit StoppedClient(const std::function<void()>& until) : pid_(::fork()) {
    REQUIRE(pid_ >= 0);
    if (pid_ == 0) {
      try {
        until();
        ::raise(SIGSTOP);
        for (;;) ::pause();
      } catch (...) {  // nothing of it may go on with the tests of its parent
        ::_exit(1);
      }
    }
    int status = 0;
    REQUIRE(::waitpid(pid_, &status, WUNTRACED) == pid_);
    REQUIRE(WIFSTOPPED(status));
  }
  ~StoppedClient() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  StoppedClient(const StoppedClient&) = delete;
  StoppedClient& operator=(const StoppedClient&) = delete;
  void Continue() const { ::kill(pid_, SIGCONT); }

 private:
  const pid_t pid_;
};

// In a child: more submissions than are reaped, so that the daemon stops at a full ring of answers. Never more at once
// than the ring has places, which would end the session.
void FillRing(RawSession& session) {
  for (int part = 0; part < 3; ++part) {
    for (uint32_t i = 0; i < session.entries() / 2; ++i) session.Push(Submission(MLPO_OP_NOP));
    std::this_thread::sleep_for(std::chrono::milliseconds(100));  // until the daemon has taken what it can answer
  }
}

double SecondsOf(const std::function<void()>& act) {
  const auto from = Clock::now();
  act();
  return std::chrono::duration<double>(Clock::now() - from).count();
}

}  // namespace

// ---- Sockets ----

TEST_CASE("Hostile.HalfClosedSockets") {
  DaemonProcess daemon;
  Witness witness(daemon);
  const int descriptors = daemon.SettledDescriptors();
  for (int round = 0; round < 10; ++round) {
    RawSession deaf(daemon.socket(), SmallArena("deaf"));
    REQUIRE(::shutdown(deaf.socket(), SHUT_RD) == 0);
    deaf.Send(Staging(4096));  // its answer goes nowhere
    RawSession mute(daemon.socket(), SmallArena("mute"));
    REQUIRE(::shutdown(mute.socket(), SHUT_WR) == 0);
    RawSession half_greeted(daemon.socket());
    half_greeted.SendHello(SmallArena("half"));
    REQUIRE(::shutdown(half_greeted.socket(), SHUT_RD) == 0);
    half_greeted.SendBare(MLPO_FRAME_READY);
    witness.Step();
  }
  REQUIRE(witness.Alone());
  CHECK(daemon.SettledDescriptors() == descriptors);
  CHECK(witness.Complaint() == "");
}

// Its answers fill the socket; then the daemon neither waits for it nor keeps them.
TEST_CASE("Hostile.NeverReadsItsAnswers") {
  DaemonProcess daemon;
  Witness witness(daemon);
  RawSession raw(daemon.socket(), SmallArena());
  const uint64_t before = daemon.ResidentBytes();
  for (uint32_t i = 0; i < 20'000; ++i) {
    if (!raw.Send(Staging(0, 1 + i))) break;  // refused: an area of 0 bytes
  }
  CHECK(SecondsOf([&] { witness.Step(); }) < 10);
  CHECK(daemon.ResidentBytes() < before + (uint64_t{64} << 20));
  raw.Close();
  REQUIRE(witness.Alone());
  CHECK(witness.Complaint() == "");
}

TEST_CASE("Hostile.DescriptorsWithEveryFrame") {
  DaemonProcess daemon;
  Witness witness(daemon);
  const int descriptors = daemon.SettledDescriptors();
  // A socket whose own end is on its way through it: nobody but the kernel can ever free that.
  int cycle[2];
  REQUIRE(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, cycle) == 0);
  const std::vector<int> gifts = {cycle[0], cycle[1], STDIN_FILENO};
  const auto bare = [](uint16_t type) { return mlpo_frame{MLPO_MAGIC, type, 0, sizeof(mlpo_frame), 1}; };
  for (const uint16_t type : {MLPO_FRAME_READY, MLPO_FRAME_MAPPED, MLPO_FRAME_BYE, MLPO_FRAME_REGISTER_END,
                              MLPO_FRAME_REGISTER_KEEP, MLPO_FRAME_LEND, MLPO_FRAME_STAGING}) {
    CAPTURE(type);
    RawSession session(daemon.socket(), SmallArena());
    session.Send(bare(type), gifts);
    CHECK(session.WaitForEnd().status == MLPO_E_PROTOCOL);
  }
  RawSession early(daemon.socket());
  early.SendHello(SmallArena());
  early.Send(bare(MLPO_FRAME_READY), gifts);
  CHECK(early.WaitForEnd().status == MLPO_E_PROTOCOL);
  for (const int fd : cycle) ::close(fd);
  REQUIRE(witness.Alone());
  CHECK(daemon.SettledDescriptors() == descriptors);
  CHECK(witness.Complaint() == "");
}

// Closing a descriptor calls the file system that it is of, and this one does not answer.
TEST_CASE("Hostile.DescriptorOfAHungFileSystem") {
  FaultFs fs;
  if (!fs.ok()) {
    WARN("skipped: " << fs.reason());
    return;
  }
  DaemonProcess daemon;
  Witness witness(daemon);
  const int descriptors = daemon.SettledDescriptors();
  const int fd = ::open((fs.point() + "/file").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  REQUIRE(fd >= 0);
  RawSession running(daemon.socket(), SmallArena("running"));
  fs.Rule("flush hang");
  running.Send(Staging(4096), std::vector<int>(8, fd));
  RawSession greeting(daemon.socket());
  greeting.Send(SmallArena("greeting"), {&fd, 1});  // instead of a pidfd
  RawSession saving(daemon.socket(), SmallArena("saving"));
  mlpo_checkpoint save = {};
  save.frame = {MLPO_MAGIC, MLPO_FRAME_CHECKPOINT, 0, sizeof save, 1};
  save.flags = MLPO_CHECKPOINT_FILES;
  save.tag_bytes = 1;
  save.tag[0] = 't';
  saving.Send(save, std::vector<int>(2, fd));  // one file twice: refused
  RawSession restoring(daemon.socket(), SmallArena("restoring"));
  mlpo_restore restore = {};
  restore.frame = {MLPO_MAGIC, MLPO_FRAME_RESTORE, 0, sizeof restore, 1};
  restore.files = 3;
  restoring.Send(restore);
  mlpo_restore_files two = {};
  two.frame = {MLPO_MAGIC, MLPO_FRAME_RESTORE_FILES, 0, sizeof two, 1};
  two.count = 2;
  restoring.Send(two, std::vector<int>(2, fd));
  restoring.Close();
  CHECK(SecondsOf([&] { (void)DaemonStatus(daemon.socket()); }) < 5);
  CHECK(SecondsOf([&] { witness.Step(); }) < 5);
  CHECK(SecondsOf([&] { RawSession(daemon.socket(), SmallArena("another")); }) < 5);
  fs.Clear();
  ::close(fd);
  for (RawSession* session : {&running, &greeting, &saving}) session->Close();
  REQUIRE(witness.Alone());
  CHECK(Eventually([&] { return daemon.OpenDescriptors() == descriptors; }));
  CHECK(witness.Complaint() == "");
}

// So does closing a socket that lingers, whoever lets go of it last: also the kernel, of what was not taken or not
// read.
TEST_CASE("Hostile.DescriptorsThatLinger") {
  DaemonProcess daemon;
  Witness witness(daemon);
  const int descriptors = daemon.SettledDescriptors();
  std::vector<std::unique_ptr<SlowClose>> slow;
  const mlpo_frame ready = {MLPO_MAGIC, MLPO_FRAME_READY, 0, sizeof ready, 1};
  // The daemon has the last of each: ours are closed before it looks.
  const auto passes = [&](size_t count, const std::function<void(RawSession&)>& before) {
    RawSession session(daemon.socket(), SmallArena("lingering" + std::to_string(slow.size())));
    daemon.Signal(SIGSTOP);
    before(session);
    {
      std::vector<mlpo::UniqueFd> own;
      std::vector<int> fds;
      for (size_t i = 0; i < count; ++i) {
        slow.push_back(std::make_unique<SlowClose>());
        own.push_back(slow.back()->Take());
        fds.push_back(own.back().get());
      }
      session.Send(ready, fds);
    }
    session.Close();
    daemon.Signal(SIGCONT);
    CHECK(SecondsOf([&] { (void)DaemonStatus(daemon.socket()); }) < 5);
    CHECK(SecondsOf([&] { witness.Step(); }) < 5);
  };
  passes(1, [](RawSession&) {});
  passes(MLPO_MAX_FRAME_FDS + 4, [](RawSession&) {});
  passes(2, [](RawSession& session) { session.SendBare(0xffff); });  // which ends it before the next one is read
  for (const auto& one : slow) one->Release();
  REQUIRE(witness.Alone());
  CHECK(Eventually([&] { return daemon.OpenDescriptors() == descriptors; }));
  CHECK(witness.Complaint() == "");
}

// ---- Processes ----

TEST_CASE("Hostile.StoppedInTheHandshakeOrARegistration") {
  DaemonProcess daemon;
  Witness witness(daemon);
  const int descriptors = daemon.SettledDescriptors();
  {
    const StoppedClient connected([&] { static RawSession session(daemon.socket()); });
    const StoppedClient greeted([&] {
      static RawSession session(daemon.socket());
      session.SendHello(SmallArena("greeted"));
      if (!session.Receive()) ::_exit(2);  // READY never comes
    });
    const StoppedClient unmapped([&] {
      static RawSession session(daemon.socket(), SmallArena("unmapped"));
      session.SendRegistration("k", kNumel, MLPO_FLOAT32, 1);
      if (!session.Receive() || session.type() != MLPO_FRAME_ARENA) ::_exit(2);  // MAPPED never comes
    });
    CHECK(SecondsOf([&] { witness.Step(); }) < 10);
    // The handshake has 5 s; a registration a minute, in which the session counts as one.
    CHECK(Eventually([&] { return daemon.log().find("handshake was not finished") != std::string::npos; }, 15));
    CHECK(witness.Sessions() == 2);
    CHECK(witness.Complaint() == "");
  }
  REQUIRE(witness.Alone());
  CHECK(daemon.SettledDescriptors() == descriptors);
}

TEST_CASE("Hostile.StoppedWithAFullRingHoldsNeitherOthersNorTheEndUp") {
  DaemonProcess daemon;
  auto witness = std::make_unique<Witness>(daemon);
  const StoppedClient stopped([&] {
    static RawSession session(daemon.socket(), SmallArena("stopped"));
    static const uint32_t handle = session.Register("k", kNumel).subgroup;
    mlpo_submission grad = Submission(MLPO_OP_GRAD, handle);
    grad.arg = MLPO_PIECE_VALUE;
    grad.count = kNumel;
    grad.epoch = 1;
    session.Push(grad);
    mlpo_submission update = Submission(MLPO_OP_UPDATE, handle);
    update.epoch = 1;
    session.Push(update, &kHyper);
    FillRing(session);
  });
  for (int i = 0; i < 3; ++i) CHECK(SecondsOf([&] { witness->Step(); }) < 10);
  CHECK(witness->Sessions() == 2);  // a stopped client is not dead
  CHECK(witness->Complaint() == "");
  witness.reset();
  daemon.Signal(SIGTERM);
  CHECK(daemon.WaitForEnd(20) == 0);
}

TEST_CASE("C26_StoppedAndKilledIsNoticedWithin2s") {
  DaemonProcess daemon;
  Witness witness(daemon);
  auto stopped = std::make_unique<StoppedClient>([&] {
    static RawSession session(daemon.socket(), SmallArena("stopped"));
    FillRing(session);
  });
  CHECK(witness.Sessions() == 2);
  const auto killed = Clock::now();
  stopped.reset();
  REQUIRE(witness.Alone());
  CHECK(Clock::now() - killed < std::chrono::seconds(2));
  CHECK(witness.Complaint() == "");
}

// A forked child has the socket and the mapped ring of its parent: both may write what they like.
TEST_CASE("C28_TwoProcessesOnOneSession") {
  DaemonProcess daemon;
  Witness witness(daemon);
  const int descriptors = daemon.SettledDescriptors();
  for (int round = 0; round < (LongForm() ? 200 : 10); ++round) {
    RawSession session(daemon.socket(), SmallArena());
    session.Register("k", kNumel);
    const pid_t child = ::fork();
    REQUIRE(child >= 0);
    std::mt19937_64 random(static_cast<uint64_t>(round) * 2 + (child == 0));
    const auto meddle = [&] {
      for (int i = 0; i < 200; ++i) {
        if (random() % 8 == 0) session.ShowTail(session.tail() + static_cast<uint32_t>(random() % 2));
        session.Push(Submission(static_cast<uint16_t>(random() % 3 ? uint64_t{MLPO_OP_NOP} : random() % 16)));
        if (random() % 50 == 0) session.SendBare(static_cast<uint16_t>(random() % 17), 1);
        (void)session.Reap(0);
      }
    };
    if (child == 0) {
      try {
        meddle();
      } catch (const std::exception&) {  // the daemon has ended the session
      }
      ::_exit(0);
    }
    try {
      meddle();
    } catch (const std::exception&) {
    }
    REQUIRE(::waitpid(child, nullptr, 0) == child);
    witness.Step();
  }
  REQUIRE(witness.Alone());
  CHECK(daemon.SettledDescriptors() == descriptors);
  CHECK(witness.Complaint() == "");
}

TEST_CASE("C28_AChildThatKeepsTheSocketDoesNotKeepTheRank") {
  DaemonProcess daemon;
  Witness witness(daemon);
  for (int round = 0; round < 5; ++round) {
    RawSession session(daemon.socket(), SmallArena());
    const StoppedClient child([] {});
    session.SendBare(MLPO_FRAME_BYE);  // the child's copy of the socket stays open
    session.Close();
    RawSession again(daemon.socket(), SmallArena());
    CHECK(again.Register("k", kNumel).subgroup != 0);
    again.SendBare(MLPO_FRAME_BYE);
  }
  REQUIRE(witness.Alone());
  CHECK(witness.ProtocolErrors() == 0);
  CHECK(witness.Complaint() == "");
}

// ---- Shared memory ----

TEST_CASE("C31_IndicesFlipAllTheTime") {
  DaemonProcess daemon;
  Witness witness(daemon);
  const int descriptors = daemon.SettledDescriptors();
  for (int round = 0; round < (LongForm() ? 500 : 25); ++round) {
    RawSession session(daemon.socket(), SmallArena());
    std::atomic<bool> stop{false};
    std::thread flipper([&, seed = static_cast<uint64_t>(round)] {
      std::mt19937_64 random(seed);
      uint32_t* const words[] = {&session.client_lines()->submission_tail, &session.client_lines()->completion_head,
                                 &session.client_lines()->completion_sleepers};
      while (!stop) {
        std::atomic_ref<uint32_t> word(*words[random() % 3]);
        const uint32_t was = word.load();
        // Mostly back again: what is seen for a moment is the hardest.
        word.store(random() % 2 ? was + static_cast<uint32_t>(random() % 4) : static_cast<uint32_t>(random()));
        if (random() % 4) word.store(was);
      }
    });
    const auto until = Clock::now() + std::chrono::milliseconds(100);
    while (Clock::now() < until) {
      session.Push(Submission(MLPO_OP_NOP));
      (void)session.Reap(0);
    }
    stop = true;
    flipper.join();
    if (round % 5 == 0) CHECK(SecondsOf([&] { witness.Step(); }) < 10);
  }
  REQUIRE(witness.Alone());
  CHECK(daemon.SettledDescriptors() == descriptors);
  CHECK(witness.ProtocolErrors() > 0);
  CHECK(witness.Complaint() == "");
}

// The doorbell is an eventfd that both ends have: full, read by the client, blocking, and written without end.
TEST_CASE("Hostile.DoorbellStorms") {
  DaemonProcess daemon;
  auto witness = std::make_unique<Witness>(daemon);
  RawSession session(daemon.socket(), SmallArena());
  REQUIRE(::fcntl(session.doorbell(), F_SETFL, 0) == 0);  // O_NONBLOCK is of the file, which the daemon shares
  const uint64_t full = ~uint64_t{0} - 1;
  REQUIRE(::write(session.doorbell(), &full, sizeof full) == static_cast<ssize_t>(sizeof full));
  CHECK(SecondsOf([&] { witness->Step(); }) < 10);
  std::atomic<bool> stop{false};
  std::thread storm([&] {
    uint64_t count;
    const uint64_t one = 1;
    while (!stop) {
      (void)!::read(session.doorbell(), &count, sizeof count);
      for (int i = 0; i < 100; ++i) (void)!::write(session.doorbell(), &one, sizeof one);
    }
  });
  for (int i = 0; i < 5; ++i) CHECK(SecondsOf([&] { witness->Step(); }) < 10);
  CHECK(witness->Complaint() == "");
  witness.reset();
  daemon.Signal(SIGTERM);
  CHECK(daemon.WaitForEnd(20) == 0);
  stop = true;
  storm.join();
}

// A gradient is overwritten while the daemon reads it, a slot is used by two subgroups, and everything is submitted
// again and again while it runs: each submission has its answer, whatever it says, and nobody else notices.
TEST_CASE("Hostile.SlotsAreUsedWhileTheDaemonHasThem") {
  DaemonProcess daemon({.paths = 2, .memory = "512KiB"});
  Witness witness(daemon);
  for (int round = 0; round < (LongForm() ? 100 : 5); ++round) {
    RawSession session(daemon.socket(), SmallArena());
    const mlpo_registered own = session.Register("own", kNumel);
    const mlpo_staged area = session.Lend(kLent);
    const uint32_t lent[] = {session.Register("a", kNumel, MLPO_FLOAT32, true).subgroup,
                             session.Register("b", kNumel, MLPO_FLOAT32, true).subgroup};
    std::byte* const slots[] = {session.arena(own.arena) + own.grad_offset, session.arena(area.arena) + area.offset};
    std::atomic<bool> stop{false};
    std::thread writer([&] {
      std::mt19937_64 random(7);
      while (!stop) {
        auto* words = reinterpret_cast<uint64_t*>(slots[random() % 2]);
        const uint64_t word = random() % 8 ? 0x3c003c003c003c00 : random();  // small values, and any
        std::atomic_ref<uint64_t>(words[random() % (kNumel / 2)]).store(word, std::memory_order_relaxed);
      }
    });
    std::mt19937_64 random(static_cast<uint64_t>(round));
    uint32_t pushed = 0, reaped = 0;
    for (int i = 0; i < 400; ++i) {
      const uint32_t which = static_cast<uint32_t>(random() % 3);
      static constexpr uint16_t kOps[] = {MLPO_OP_GRAD, MLPO_OP_GRAD, MLPO_OP_UPDATE, MLPO_OP_UPDATE, MLPO_OP_DISCARD};
      mlpo_submission submission = Submission(kOps[random() % 5], which == 0 ? own.subgroup : lent[which - 1]);
      submission.epoch = 1 + static_cast<uint32_t>(random() % 3);
      if (submission.op == MLPO_OP_GRAD) {
        submission.arg = MLPO_PIECE_VALUE;
        submission.count = kNumel;
      }
      if (which > 0 && submission.op != MLPO_OP_DISCARD) {  // one slot for both
        submission.flags = submission.op == MLPO_OP_GRAD ? MLPO_GRAD_KEEP : MLPO_UPDATE_OUTPUT;
      }
      session.Push(submission, &kHyper);
      ++pushed;
      while (pushed - reaped == session.entries() || (random() % 4 == 0 && reaped < pushed)) {
        REQUIRE(session.Reap());
        ++reaped;
      }
    }
    for (; reaped < pushed; ++reaped) REQUIRE(session.Reap());
    CHECK(!session.Reap(1));  // one answer each
    stop = true;
    writer.join();
    witness.Step();
  }
  REQUIRE(witness.Alone());
  CHECK(witness.ProtocolErrors() == 0);
  CHECK(witness.Complaint() == "");
}
