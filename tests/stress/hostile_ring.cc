// Clients that write what they like into their ring areas: values out of range, indices that jump, fields that change
// after they were published, floods. Their session ends, counted; a good client beside them does not notice.
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <thread>

#include "proto/status.h"
#include "tests/support/catch.h"
#include "tests/support/raw_session.h"
#include "tests/support/witness.h"

using namespace mlpo::test;

namespace {

constexpr uint64_t kNumel = 9'000;  // three blocks
constexpr mlpo_hyper kHyper = {1e-3, 0.9, 0.999, 1e-8, 0.01, 1, MLPO_ADAMW, 0, 0};

mlpo_hello SmallArena() {
  mlpo_hello hello = MakeHello("raw");
  hello.arena_bytes = 4 << 20;
  return hello;
}

mlpo_submission Submission(uint16_t op, uint32_t subgroup = 0) {
  mlpo_submission submission = {};
  submission.op = op;
  submission.subgroup = subgroup;
  return submission;
}

constexpr uint64_t kLent = 1 << 20;

// A registered subgroup and a staging area.
struct Registered {
  explicit Registered(const std::string& socket) : session(socket, SmallArena()) {
    handle = session.Register("k", kNumel).subgroup;
    staging_bytes = session.Stage(kNumel * 12).bytes;
  }
  // With a lent area, and a subgroup whose gradients and parameters are there.
  void AddKept() {
    const mlpo_staged area = session.Lend(kLent);
    lent = session.arena(area.arena) + area.offset;
    kept = session.Register("kept", kNumel, MLPO_FLOAT32, true).subgroup;
  }
  mlpo_submission Grad(uint64_t first, uint64_t count, uint32_t epoch = 1) const {
    mlpo_submission submission = Submission(MLPO_OP_GRAD, handle);
    submission.arg = MLPO_PIECE_VALUE;
    submission.first = first;
    submission.count = count;
    submission.epoch = epoch;
    return submission;
  }
  mlpo_submission State(uint16_t op, uint64_t first, uint64_t count, uint64_t offset = 0) const {
    mlpo_submission submission = Submission(op, handle);
    submission.arg = MLPO_PART_STATE;
    submission.first = first;
    submission.count = count;
    submission.staging_offset = offset;
    return submission;
  }
  // FETCH, FLUSH or DELETE.
  mlpo_submission Object(uint16_t op, uint32_t step, uint32_t open, uint64_t first, uint64_t count,
                         uint64_t offset = 0) const {
    mlpo_submission submission = Submission(op, open);
    submission.arg = step;
    submission.first = first;
    submission.count = count;
    submission.staging_offset = offset;
    return submission;
  }
  RawSession session;
  uint32_t handle = 0;
  uint64_t staging_bytes = 0;
  uint32_t kept = 0;
  std::byte* lent = nullptr;
};

}  // namespace

TEST_CASE("C31_ValuesOutOfRangeEndTheSessionAndAreCounted") {
  DaemonProcess daemon;
  Witness witness(daemon);
  uint64_t errors = witness.ProtocolErrors();
  auto breaks = [&](const char* what, const std::function<void(Registered&)>& act) {
    CAPTURE(what);
    Registered raw(daemon.socket());
    act(raw);
    const RawSession::EndReason reason = raw.session.WaitForEnd();
    CHECK(reason.status == MLPO_E_PROTOCOL);
    CHECK(reason.text.size() > 10);
    CHECK(Eventually([&] { return witness.ProtocolErrors() == errors + 1; }));
    ++errors;
  };
  auto submits = [&](const char* what, const std::function<mlpo_submission(Registered&)>& make) {
    breaks(what, [&](Registered& raw) { raw.session.Push(make(raw), &kHyper); });
  };
  breaks("tail 2^31 ahead", [](Registered& raw) { raw.session.ShowTail(0x80000000u); });
  breaks("tail one more than the ring", [](Registered& raw) { raw.session.ShowTail(raw.session.entries() + 1); });
  breaks("tail behind", [](Registered& raw) { raw.session.ShowTail(0xffffffffu); });
  breaks("head 2^31 ahead", [](Registered& raw) {
    raw.session.client_lines()->completion_head = 0x80000000u;
    raw.session.Push(Submission(MLPO_OP_NOP));
  });
  submits("offset 2^64-4096, length 8192", [](Registered& raw) { return raw.Grad(-uint64_t{4096}, 8192); });
  submits("count 2^64-1", [](Registered& raw) { return raw.Grad(1, ~uint64_t{0}); });
  submits("one element too many", [](Registered& raw) { return raw.Grad(1, kNumel); });
  submits("unknown piece", [](Registered& raw) {
    mlpo_submission submission = raw.Grad(0, 1);
    submission.arg = 4;
    return submission;
  });
  submits("foreign handle", [](Registered& raw) { return Submission(MLPO_OP_STAT, raw.handle + 1); });
  submits("handle 0", [](Registered&) { return Submission(MLPO_OP_STAT, 0); });
  submits("handle 2^32-1", [](Registered&) { return Submission(MLPO_OP_UPDATE, 0xffffffffu); });
  submits("reserved field", [](Registered&) {
    mlpo_submission submission = Submission(MLPO_OP_NOP);
    submission.reserved[1] = 1;
    return submission;
  });
  for (const uint16_t op : {MLPO_OP_SNAPSHOT, MLPO_OP_RESTORE}) {
    submits("a field that it has no meaning for", [op](Registered&) {
      mlpo_submission submission = Submission(op);
      submission.count = 1;
      return submission;
    });
  }
  submits("unknown flag", [](Registered&) {
    mlpo_submission submission = Submission(MLPO_OP_NOP);
    submission.flags = 0x8000;
    return submission;
  });
  submits("staging offset 2^64-4096",
          [](Registered& raw) { return raw.State(MLPO_OP_WRITE_STATE, 0, 2048, -uint64_t{4096}); });
  submits("staging range past the end",
          [](Registered& raw) { return raw.State(MLPO_OP_READ_STATE, 0, kNumel, raw.staging_bytes - 8); });
  submits("unaligned staging offset", [](Registered& raw) { return raw.State(MLPO_OP_READ_STATE, 0, 1, 4); });
  submits("unknown state part", [](Registered& raw) {
    mlpo_submission submission = raw.State(MLPO_OP_READ_STATE, 0, 1);
    submission.arg = 0x10;
    return submission;
  });
  submits("unknown discard reason", [](Registered& raw) {
    mlpo_submission submission = Submission(MLPO_OP_DISCARD, raw.handle);
    submission.arg = 2;
    return submission;
  });
  const auto kept = [&](const char* what, uint16_t op, uint16_t flags, uint64_t offset) {
    breaks(what, [&](Registered& raw) {
      raw.session.Lend(kLent);
      mlpo_submission submission = raw.Grad(0, kNumel);
      submission.op = op;
      submission.arg = op == MLPO_OP_GRAD ? MLPO_PIECE_VALUE : 0;
      submission.subgroup = raw.session.Register("kept", kNumel, MLPO_FLOAT32, true).subgroup;
      submission.flags = flags;
      submission.staging_offset = offset;
      raw.session.Push(submission, &kHyper);
    });
  };
  constexpr uint64_t kLast = (kLent - 128 - kNumel * 4) / 64 * 64;
  kept("GRAD without a slot", MLPO_OP_GRAD, 0, 0);
  kept("UPDATE without a slot", MLPO_OP_UPDATE, 0, 0);
  kept("UPDATE with KEEP's flag", MLPO_OP_UPDATE, MLPO_GRAD_KEEP, 0);
  kept("slot past the end", MLPO_OP_GRAD, MLPO_GRAD_KEEP, kLast + 64);
  kept("output past the end", MLPO_OP_UPDATE, MLPO_UPDATE_OUTPUT, kLast + 64);
  kept("slot at 2^64-64", MLPO_OP_GRAD, MLPO_GRAD_KEEP, -uint64_t{64});
  kept("output at 2^64-4096", MLPO_OP_UPDATE, MLPO_UPDATE_OUTPUT, -uint64_t{4096});
  kept("misaligned slot", MLPO_OP_GRAD, MLPO_GRAD_KEEP, 32);
  kept("misaligned output", MLPO_OP_UPDATE, MLPO_UPDATE_OUTPUT, 1);
  submits("a lent slot for a subgroup that has one", [](Registered& raw) {
    raw.session.Lend(kLent);
    mlpo_submission submission = raw.Grad(0, kNumel);
    submission.flags = MLPO_GRAD_KEEP;
    return submission;
  });
  breaks("REGISTER_KEEP twice", [](Registered& raw) {
    raw.session.Lend(kLent);
    raw.session.SendRegistration("kept", kNumel, MLPO_FLOAT32, 77, 2);
  });
  breaks("REGISTER_KEEP alone", [](Registered& raw) { raw.session.SendBare(MLPO_FRAME_REGISTER_KEEP, 77); });
  breaks("LEND of the wrong length", [](Registered& raw) { raw.session.SendBare(MLPO_FRAME_LEND, 77); });
  const auto object = [&](const char* what, uint16_t op, uint32_t step, uint32_t open, uint64_t first, uint64_t count,
                          uint64_t offset) {
    submits(what, [=](Registered& raw) { return raw.Object(op, step, open, first, count, offset); });
  };
  object("unknown step of FETCH", MLPO_OP_FETCH, MLPO_OBJECT_COMMIT, 1, 1, 1, 0);
  object("unknown step of FLUSH", MLPO_OP_FLUSH, MLPO_OBJECT_SIZE, 1, 1, 1, 0);
  object("step 0", MLPO_OP_FETCH, 0, 1, 1, 1, 0);
  object("step of DELETE", MLPO_OP_DELETE, 1, 0, 1, 0, 0);
  object("object's handle 0", MLPO_OP_FLUSH, MLPO_OBJECT_PIECE, 0, 0, 1, 0);
  object("name of no bytes", MLPO_OP_FETCH, MLPO_OBJECT_OPEN, 1, 0, 0, 0);
  object("name of 257 bytes", MLPO_OP_DELETE, 0, 0, 257, 0, 0);
  object("name past the end", MLPO_OP_FLUSH, MLPO_OBJECT_OPEN, 1, 256, 0, kNumel * 12 / 4096 * 4096 + 4096 - 8);
  object("name at 2^64-8", MLPO_OP_FETCH, MLPO_OBJECT_SIZE, 0, 16, 0, -uint64_t{8});
  object("unaligned name", MLPO_OP_DELETE, 0, 0, 1, 0, 1);
  object("piece past the end", MLPO_OP_FETCH, MLPO_OBJECT_PIECE, 1, 0, ~uint64_t{0}, 8);
  object("unaligned piece", MLPO_OP_FLUSH, MLPO_OBJECT_PIECE, 1, 0, 8, 4);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (double mlpo_hyper::*field : {&mlpo_hyper::lr, &mlpo_hyper::beta1, &mlpo_hyper::beta2, &mlpo_hyper::eps,
                                    &mlpo_hyper::weight_decay, &mlpo_hyper::grad_scale}) {
    breaks("NaN hyper-parameter", [&](Registered& raw) {
      mlpo_hyper hyper = kHyper;
      hyper.*field = nan;
      mlpo_submission update = Submission(MLPO_OP_UPDATE, raw.handle);
      update.epoch = 1;
      raw.session.Push(update, &hyper);
    });
  }
  CHECK(witness.Alone());
  CHECK(witness.Complaint() == "");
}

TEST_CASE("Hostile.WhatIsOnlyWrongIsACompletionAndTheSessionGoesOn") {
  DaemonProcess daemon;
  Witness witness(daemon);
  Registered raw(daemon.socket());
  auto status = [&](mlpo_submission submission) {
    submission.user_data = 0x1122334455667788 + raw.session.tail();
    raw.session.Push(submission, &kHyper);
    const std::optional<mlpo_completion> completion = raw.session.Reap();
    REQUIRE(completion);
    CHECK(completion->user_data == submission.user_data);
    return completion->status;
  };
  for (const uint16_t op : {10, 11, 500, 65535}) {
    CAPTURE(op);
    CHECK(status(Submission(op)) == -EOPNOTSUPP);
  }
  for (const uint16_t op : {MLPO_OP_SNAPSHOT, MLPO_OP_RESTORE}) {
    for (const uint64_t handle : {uint64_t{0}, uint64_t{1}, uint64_t{1} << 32}) {
      mlpo_submission submission = Submission(op);
      submission.first = handle;
      submission.arg = MLPO_SNAPSHOT_TAKE;
      CHECK(status(submission) == -EBADF);  // nothing has been begun
    }
  }
  for (const uint16_t op : {MLPO_OP_FETCH, MLPO_OP_FLUSH}) {
    for (const uint32_t step : {MLPO_OBJECT_PIECE, MLPO_OBJECT_CLOSE}) {
      CHECK(status(raw.Object(op, step, 77, 0, 1)) == -EBADF);  // nothing is open
    }
  }
  CHECK(status(raw.Object(MLPO_OP_FETCH, MLPO_OBJECT_OPEN, 1, 256, 0)) == -ENOENT);
  CHECK(status(raw.Object(MLPO_OP_FETCH, MLPO_OBJECT_SIZE, 0, 256, 0)) == -ENOENT);
  CHECK(status(raw.Object(MLPO_OP_DELETE, 0, 0, 1, 0)) == -ENOENT);
  CHECK(status(raw.Object(MLPO_OP_FLUSH, MLPO_OBJECT_OPEN, 1, 1, uint64_t{1} << 48)) == -ENOSPC);
  CHECK(status(raw.Object(MLPO_OP_FLUSH, MLPO_OBJECT_OPEN, 1, 1, ~uint64_t{0})) == -EFBIG);
  CHECK(status(raw.Object(MLPO_OP_FLUSH, MLPO_OBJECT_COMMIT, 1, 0, 0)) == -EBADF);
  CHECK(status(raw.Grad(0, 10, 7)) == MLPO_E_EPOCH);
  mlpo_submission update = Submission(MLPO_OP_UPDATE, raw.handle);
  update.epoch = 1;
  CHECK(status(update) == MLPO_E_COVERAGE);
  CHECK(status(raw.Grad(0, 10)) == 0);
  CHECK(status(raw.Grad(9, 10)) == MLPO_E_COVERAGE);  // an element twice
  CHECK(status(raw.Grad(10, kNumel - 10)) == 0);
  CHECK(status(update) == 0);
  CHECK(status(update) == MLPO_E_EPOCH);  // repeated
  CHECK(witness.ProtocolErrors() == 0);
  CHECK(witness.Complaint() == "");
}

// Nothing is reaped: the daemon stops reading that ring, and sleeps.
TEST_CASE("Hostile.FloodWithoutReaping") {
  DaemonProcess daemon;
  Witness witness(daemon);
  Registered raw(daemon.socket());
  for (uint32_t i = 0; i < 2 * raw.session.entries(); ++i) {
    const uint32_t head = raw.session.daemon_lines()->submission_head;
    if (raw.session.tail() - head < raw.session.entries()) raw.session.Push(Submission(MLPO_OP_NOP));
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  CHECK(raw.session.daemon_lines()->completion_tail == raw.session.entries());
  const double before = daemon.CpuSeconds();
  std::this_thread::sleep_for(std::chrono::seconds(2));
  CHECK(daemon.CpuSeconds() - before < 0.2);
  CHECK(witness.Complaint() == "");
  // It reaps after all: what waits is answered, one by one and in order.
  for (uint32_t i = 0; i < raw.session.tail(); ++i) REQUIRE(raw.session.Reap());
  const nlohmann::json status = DaemonStatus(daemon.socket());
  CHECK(status.at("lost_wakeups") == 0);
  CHECK(status.at("protocol_errors") == 0);
}

// A flood that does not end holds neither the others nor SIGTERM up.
TEST_CASE("Hostile.FloodDoesNotHoldUpTheOthersNorTheEnd") {
  DaemonProcess daemon;
  auto witness = std::make_unique<Witness>(daemon);
  Registered raw(daemon.socket());
  std::atomic<bool> stop{false};
  std::thread flood([&] {
    uint32_t pushed = 0;
    while (!stop) {
      auto* lines = raw.session.client_lines();
      const auto* theirs = raw.session.daemon_lines();
      std::atomic_ref<uint32_t>(lines->completion_head).store(theirs->completion_tail);
      raw.session.submissions()[pushed % raw.session.entries()] = Submission(MLPO_OP_NOP);
      if (pushed - theirs->submission_head < raw.session.entries() / 2) raw.session.ShowTail(++pushed);
    }
  });
  for (int i = 0; i < 5; ++i) witness->Step();
  CHECK(witness->Complaint() == "");
  daemon.Signal(SIGTERM);
  const int code = daemon.WaitForEnd(20);
  stop = true;
  flood.join();
  CHECK(code == 0);
}

namespace {

// Submissions that are mostly well-formed, so that they get far, and then changed in one of many ways.
class Mutator {
 public:
  Mutator(uint64_t seed, const Registered& raw) : random_(seed), raw_(raw) {}

  mlpo_submission Next() {
    static constexpr uint16_t kOps[] = {
        MLPO_OP_NOP,     MLPO_OP_GRAD,  MLPO_OP_GRAD,       MLPO_OP_GRAD,        MLPO_OP_UPDATE,   MLPO_OP_UPDATE,
        MLPO_OP_DISCARD, MLPO_OP_STAT,  MLPO_OP_READ_STATE, MLPO_OP_WRITE_STATE, MLPO_OP_CANCEL,   MLPO_OP_FETCH,
        MLPO_OP_FETCH,   MLPO_OP_FLUSH, MLPO_OP_FLUSH,      MLPO_OP_DELETE,      MLPO_OP_SNAPSHOT, MLPO_OP_RESTORE};
    mlpo_submission submission = Submission(kOps[Below(std::size(kOps))], raw_.handle);
    submission.user_data = random_() & ~kKeptMask;
    submission.epoch = static_cast<uint32_t>(1 + Below(4));
    submission.arg = static_cast<uint32_t>(1 + Below(submission.op == MLPO_OP_GRAD ? 2 : 8));
    if (submission.op == MLPO_OP_DISCARD) submission.arg &= 1;
    if (submission.op == MLPO_OP_DISCARD && Below(2)) submission.subgroup = MLPO_ALL_SUBGROUPS;
    submission.first = Below(3) ? 0 : Below(kNumel);
    submission.count = Below(3) ? kNumel - submission.first : Below(kNumel - submission.first);
    if (submission.op == MLPO_OP_UPDATE) submission.flags = static_cast<uint16_t>(Below(2));
    if (submission.subgroup == raw_.handle && Below(2)) UseKept(&submission);
    if ((submission.op == MLPO_OP_READ_STATE || submission.op == MLPO_OP_WRITE_STATE) && submission.arg >= 8) {
      submission.first = 0;
      submission.count = Below(2);
    }
    if (submission.op == MLPO_OP_FETCH || submission.op == MLPO_OP_FLUSH || submission.op == MLPO_OP_DELETE) {
      MakeObject(&submission);
    }
    if (submission.op == MLPO_OP_SNAPSHOT || submission.op == MLPO_OP_RESTORE) {
      submission.epoch = 0;
      submission.first = Below(3);
      submission.count = submission.staging_offset = 0;
      submission.flags = 0;
    }
    if (Below(40) == 0) Damage(&submission, sizeof submission);
    return submission;
  }
  mlpo_hyper Hyper() {
    mlpo_hyper hyper = kHyper;
    hyper.mode = static_cast<uint32_t>(1 + Below(2));
    hyper.flags = static_cast<uint32_t>(Below(2));
    if (Below(4) == 0) hyper.lr = std::numeric_limits<double>::max();
    if (Below(4) == 0) hyper.eps = 0;
    if (Below(4) == 0) hyper.grad_scale = -1e300;
    if (Below(80) == 0) Damage(&hyper, sizeof hyper);
    return hyper;
  }
  // Successes of operations with a lent slot.
  struct Kept {
    uint64_t grads = 0, updates = 0;
  };
  const Kept& kept() const { return kept_; }
  void Answered(const mlpo_completion& completion) {
    if (completion.status != 0) return;
    kept_.grads += (completion.user_data & kKeptMask) == kKeptGrad;
    kept_.updates += (completion.user_data & kKeptMask) == kKeptUpdate;
  }
  uint64_t Below(uint64_t n) { return n == 0 ? 0 : random_() % n; }
  uint64_t Word() { return random_(); }

 private:
  static constexpr uint64_t kKeptGrad = 1, kKeptUpdate = 2, kKeptMask = 3;  // of user_data

  // Mostly where the last one was: a window has to go on where it began.
  void UseKept(mlpo_submission* submission) {
    submission->subgroup = raw_.kept;
    if (submission->op != MLPO_OP_GRAD && submission->op != MLPO_OP_UPDATE) return;
    submission->flags |= submission->op == MLPO_OP_GRAD ? MLPO_GRAD_KEEP : MLPO_UPDATE_OUTPUT;
    if (Below(8) == 0) slot_ = 64 * Below(kLent / 64 - (128 + kNumel * 4) / 64);
    submission->staging_offset = Below(64) ? slot_ : Word() & ~uint64_t{63};
    if (Below(4)) submission->epoch = static_cast<uint32_t>(1 + kept_.updates);
    submission->user_data |= submission->op == MLPO_OP_GRAD ? kKeptGrad : kKeptUpdate;
  }
  // Few handles, few names (all that lie where the arena was filled), pieces that mostly follow each other.
  void MakeObject(mlpo_submission* submission) {
    static constexpr uint32_t kFetch[] = {MLPO_OBJECT_OPEN, MLPO_OBJECT_PIECE, MLPO_OBJECT_CLOSE, MLPO_OBJECT_SIZE};
    static constexpr uint64_t kBytes[] = {0, 10, 20'000, 200'000, uint64_t{1} << 47};
    const bool fetch = submission->op == MLPO_OP_FETCH;
    submission->subgroup = static_cast<uint32_t>(1 + Below(4));
    submission->arg = submission->op == MLPO_OP_DELETE ? 0
                      : fetch                          ? kFetch[Below(4)]
                                                       : static_cast<uint32_t>(1 + Below(4));
    submission->staging_offset = 8 * Below(4);
    if (submission->arg == MLPO_OBJECT_PIECE) {
      submission->first = fetch ? Below(20'000) : next_piece_;
      submission->count = Below(raw_.staging_bytes - 64);
      next_piece_ = fetch ? next_piece_ : next_piece_ + submission->count;
    } else {
      submission->first = 1 + Below(3);
      submission->count = kBytes[Below(std::size(kBytes))];
      if (!fetch) next_piece_ = 0;
    }
  }
  // All of it random, or one word.
  void Damage(void* bytes, size_t count) {
    auto* words = static_cast<std::byte*>(bytes);
    if (Below(2)) {
      for (size_t i = 0; i < count; i += 8) Put(words + i, Word());
    } else {
      static constexpr uint64_t kEdges[] = {0, 1, ~uint64_t{0}, uint64_t{1} << 63, -uint64_t{4096}, kNumel + 1};
      Put(words + 8 * Below(count / 8), kEdges[Below(std::size(kEdges))]);
    }
  }
  static void Put(std::byte* at, uint64_t word) { std::memcpy(at, &word, sizeof word); }

  std::mt19937_64 random_;
  const Registered& raw_;
  uint64_t next_piece_ = 0;
  uint64_t slot_ = 0;
  Kept kept_;
};

// Submits until the session ends or `budget` is used up; `flip`: a second thread changes what was published. Returns
// what succeeded with a lent slot.
Mutator::Kept Attack(const std::string& socket, uint64_t seed, bool flip, int64_t* budget) {
  Registered raw(socket);
  raw.AddKept();
  Mutator mutator(seed, raw);
  RawSession& session = raw.session;
  auto* arena = reinterpret_cast<uint64_t*>(session.arena(0));
  for (uint64_t i = 0; i < session.arena_bytes(0) / 8; i += 1 + mutator.Below(16)) arena[i] = mutator.Word();
  auto* lent = reinterpret_cast<uint64_t*>(raw.lent);
  for (uint64_t i = 0; i < kLent / 8; i += 1 + mutator.Below(1024)) lent[i] = mutator.Word();
  std::atomic<bool> stop{false};
  std::thread flipper;
  if (flip) {
    flipper = std::thread([&] {
      std::mt19937_64 random(seed + 1);
      while (!stop) {
        const uint32_t place = random() % session.entries();
        const bool hyper = random() % 4 == 0;
        auto* word = hyper ? reinterpret_cast<uint64_t*>(&session.hypers()[place]) + random() % 8
                           : reinterpret_cast<uint64_t*>(&session.submissions()[place]) + random() % 8;
        const uint64_t was = std::atomic_ref<uint64_t>(*word).load(std::memory_order_relaxed);
        std::atomic_ref<uint64_t>(*word).store(random() % 2 ? random() : ~uint64_t{0}, std::memory_order_relaxed);
        std::atomic_ref<uint64_t>(*word).store(was, std::memory_order_relaxed);  // back: the session lives longer
      }
    });
  }
  const bool reaps = mutator.Below(8) != 0;
  uint32_t reaped = 0;
  const auto reap = [&](int milliseconds) {
    const std::optional<mlpo_completion> completion = session.Reap(milliseconds);
    if (!completion) return false;
    ++reaped;
    mutator.Answered(*completion);
    return true;
  };
  while (*budget > 0) {
    --*budget;
    if (session.tail() - session.daemon_lines()->submission_head >= session.entries()) {
      if (!reaps || !reap(200)) break;
    }
    const mlpo_hyper hyper = mutator.Hyper();
    session.Push(mutator.Next(), &hyper);
    if (mutator.Below(500) == 0) session.ShowTail(static_cast<uint32_t>(mutator.Word()));
    if (mutator.Below(500) == 0) session.client_lines()->completion_head = static_cast<uint32_t>(mutator.Word());
    const bool waits = mutator.Below(16) == 0;  // until all is answered, which is seldom before the session has ended
    while (reaps && (waits ? session.tail() : session.daemon_lines()->completion_tail) != reaped) {
      if (!reap(waits ? 200 : 0)) break;
    }
  }
  stop = true;
  if (flipper.joinable()) flipper.join();
  return mutator.kept();
}

void Storm(bool flip, int64_t submissions) {
  DaemonProcess daemon({.paths = 2, .memory = "512KiB"});
  Witness witness(daemon);
  { Registered warm_up(daemon.socket()); }
  REQUIRE(witness.Alone());
  const int descriptors = daemon.SettledDescriptors();
  int64_t left = submissions;
  uint64_t sessions = 0;
  Mutator::Kept kept;
  while (left > 0) {
    REQUIRE(daemon.running());
    const Mutator::Kept more = Attack(daemon.socket(), ++sessions, flip, &left);
    kept.grads += more.grads;
    kept.updates += more.updates;
    if (sessions % 16 == 0) witness.Step();
  }
  REQUIRE(witness.Alone());
  CHECK(daemon.SettledDescriptors() == descriptors);
  const uint64_t errors = witness.ProtocolErrors();
  std::printf("%lld submissions in %llu sessions, %llu protocol errors; %llu GRADs and %llu UPDATEs with a lent slot\n",
              static_cast<long long>(submissions), static_cast<unsigned long long>(sessions),
              static_cast<unsigned long long>(errors), static_cast<unsigned long long>(kept.grads),
              static_cast<unsigned long long>(kept.updates));
  CHECK(kept.grads > sessions / 4);  // most is refused, but some is to get far
  CHECK(kept.updates > 0);
  CHECK(errors > sessions / 4);
  CHECK(witness.Complaint() == "");
}

}  // namespace

TEST_CASE("C31_RandomBytesInTheRing") { Storm(false, LongForm() ? 1'000'000 : 20'000); }
TEST_CASE("C31_FieldsChangeAfterTheyWerePublished") { Storm(true, LongForm() ? 1'000'000 : 20'000); }
