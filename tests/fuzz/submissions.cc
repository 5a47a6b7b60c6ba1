// Submissions of a client that writes what it likes: through the daemon's end of the ring, and what passes there
// through the scheduler, on a tier in memory and in virtual time (FakeTier). An input is a list of actions, see Act().
// What the ring lets through is inside its objects, each accepted submission is answered once, blocks are never mixed
// up and never used when they were read wrong, and in the end nothing is left.
#include <sys/mman.h>

#include <memory>
#include <optional>

#include "daemon/session/areas.h"
#include "daemon/session/ring_reader.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/support/fake_tier.h"
#include "tests/support/simulated_training.h"

namespace {

using namespace mlpo;
using mlpo::test::FakeTier;
using mlpo::test::FuzzInput;

constexpr SessionId kSession = 1;
constexpr uint32_t kEntries = 8;
constexpr uint64_t kNumel = 2'500;  // three blocks
constexpr uint64_t kLentBytes = 64 * 1024;
constexpr uint64_t kStagingBytes = 64 * 1024;
constexpr SubgroupId kPlain = 1, kOther = 2, kLent = 3;
constexpr int64_t kSecond = 1'000'000'000;

// Exact, where the ring's own checks must not wrap.
bool Inside(uint64_t first, uint64_t count, uint64_t size) {
  return static_cast<unsigned __int128>(first) + count <= size;
}

class Scene {
 public:
  Scene() : tier_(Options(), Speeds()) {
    Result<std::unique_ptr<Areas>> areas = Areas::Create(kEntries);
    FUZZ_CHECK(areas.ok(), areas.status().message());
    areas_ = std::move(*areas);
    areas_->Describe(&layout_);
    void* mapped =
        ::mmap(nullptr, layout_.client_area_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, areas_->client_area_fd(), 0);
    FUZZ_CHECK(mapped != MAP_FAILED, "mapping the client's area");
    client_ = static_cast<std::byte*>(mapped);
    staging_.resize(kStagingBytes);
    reader_.emplace(kSession, areas_.get());
    reader_->SetStaging(staging_.data(), staging_.size());
    tier_.most_room_bytes = 4 << 20;  // as on a path that is small
    tier_.AddSession(kSession);
    tier_.AddSubgroup(kSession, kPlain, {kNumel - 1, 1});
    tier_.AddSubgroup(kSession, kOther, {10});
    for (const SubgroupId id : {kPlain, kOther, kLent}) AddToReader(id);
    for (PathIndex path = 0; path < 2; ++path) {
      tier_.SetFault(path, [this, path](const Transfer& transfer) {
        return transfer.direction == Direction::kRead ? read_errors_[path] : write_errors_[path];
      });
      tier_.SetFlip(path, [this, path](const Transfer&, bool again) { return flips_[path] > (again ? 1 : 0); });
    }
    for (uint32_t i = 0; i < kEntries; ++i) Hypers()[i] = {1e-3, 0.9, 0.999, 1e-8, 0.01, 1, MLPO_ADAMW, 0, 0};
  }
  ~Scene() { ::munmap(client_, layout_.client_area_bytes); }
  Scene(const Scene&) = delete;
  Scene& operator=(const Scene&) = delete;

  // False when the session would have been ended.
  bool Act(FuzzInput* input) {
    const uint8_t action = input->Byte();
    switch (action % 8) {
      case 0:
      case 1:
      case 2:
        return Submit(Likely(input));
      case 3:
        return Submit(input->Take<mlpo_submission>());
      case 4:
        Hypers()[input->Byte() % kEntries] = input->Take<mlpo_hyper>();
        return true;
      case 5:
        for (int steps = input->Byte() % 32; steps > 0 && tier_.Step(); --steps) {
        }
        return true;
      case 6: {
        static constexpr int kErrors[] = {0, EIO, ENOSPC, EROFS};
        const uint8_t where = input->Byte();
        (where & 1 ? read_errors_ : write_errors_)[where >> 1 & 1] = kErrors[where >> 2 & 3];
        flips_[where >> 1 & 1] = where >> 4 & 3;  // 1: what is read is wrong the first time
        return true;
      }
      default:
        Lines()->submission_tail = input->Take<uint32_t>();
        return Take();
    }
  }

  void End() {
    for (int* errors : {read_errors_, write_errors_, flips_}) errors[0] = errors[1] = 0;
    // Paths that were left alone are tried again; deadlines pass.
    for (int i = 0; i < 20 && !tier_.scheduler().idle(); ++i) tier_.Wait(100 * kSecond);
    FUZZ_CHECK(tier_.scheduler().idle(), "work is left after all time that it may take");
    FUZZ_CHECK(tier_.violation().empty(), tier_.violation());
    for (uint64_t number = 1; number <= accepted_; ++number)
      FUZZ_CHECK(tier_.answered(number), "submission " + std::to_string(number) + " was not answered");
    tier_.EndSession(kSession);
    tier_.RunUntilQuiet();
    FUZZ_CHECK(tier_.gone(kSession), "the session's end has not come");
    FUZZ_CHECK(tier_.scratch_bytes() == 0, "extents are left");
    FUZZ_CHECK(tier_.violation().empty(), tier_.violation());
  }

 private:
  static std::vector<FakeTier::PathSpeed> Speeds() { return {{400'000, 300'000, 1, 0}, {200'000, 200'000, 1, 0}}; }
  static Scheduler::Options Options() {
    Scheduler::Options options = test::SimulatedOptions(4, Speeds());
    options.integrity = true;
    return options;
  }
  mlpo_client_lines* Lines() { return reinterpret_cast<mlpo_client_lines*>(client_); }
  mlpo_submission* Submissions() { return reinterpret_cast<mlpo_submission*>(client_ + layout_.submissions_offset); }
  mlpo_hyper* Hypers() { return reinterpret_cast<mlpo_hyper*>(client_ + layout_.hyper_offset); }

  void AddToReader(SubgroupId id) {
    SubgroupSpec spec;
    spec.id = id;
    spec.numel = id == kOther ? 10 : kNumel;
    spec.tensors.resize(id == kPlain ? 2 : 1);
    if (id == kLent) {
      spec.slot_bytes = MLPO_SLOT_HEADER_BYTES + kNumel * 4;
      spec.lent_bytes = kLentBytes;
    }
    reader_->AddSubgroup(spec);
  }

  // One that an honest client might send, from few bytes.
  static mlpo_submission Likely(FuzzInput* input) {
    static constexpr uint16_t kOps[] = {MLPO_OP_GRAD,        MLPO_OP_UPDATE, MLPO_OP_DISCARD, MLPO_OP_READ_STATE,
                                        MLPO_OP_WRITE_STATE, MLPO_OP_FETCH,  MLPO_OP_FLUSH,   MLPO_OP_DELETE,
                                        MLPO_OP_STAT,        MLPO_OP_NOP};
    mlpo_submission submission = {};
    submission.op = kOps[input->Byte() % std::size(kOps)];
    const uint8_t who = input->Byte();
    submission.subgroup = 1 + who % 4;
    submission.epoch = who >> 2 & 7;
    submission.arg = who >> 5;
    submission.flags = input->Byte() & 3;
    submission.first = input->Take<uint16_t>();
    submission.count = input->Take<uint16_t>();
    submission.staging_offset = 8 * input->Take<uint16_t>();
    if (submission.count == 0xffff) submission.count = kNumel - submission.first;
    return submission;
  }

  bool Submit(const mlpo_submission& submission) {
    Submissions()[tail_ % kEntries] = submission;
    std::atomic_ref<uint32_t>(Lines()->submission_tail).store(++tail_, std::memory_order_release);
    return Take();
  }

  // As the data thread does.
  bool Take() {
    const int64_t waiting = reader_->Waiting();
    if (waiting < 0) return false;
    FUZZ_CHECK(waiting <= kEntries, "more than the ring has");
    for (int64_t i = 0; i < waiting; ++i) {
      Request request;
      const std::string wrong = reader_->Next(&request);
      if (!wrong.empty()) return false;
      Check(request);
      if (request.submission.subgroup == kLent && IsOfSubgroup(request.submission)) continue;  // no tier has its slots
      const uint64_t number = tier_.Submit(request);
      FUZZ_CHECK(number == ++accepted_, "numbers are those of FakeTier");
    }
    reader_->Release();
    tail_ = Lines()->submission_tail;
    return true;
  }

  static bool IsOfSubgroup(const mlpo_submission& s) {
    return s.op == MLPO_OP_GRAD || s.op == MLPO_OP_UPDATE || s.op == MLPO_OP_DISCARD || s.op == MLPO_OP_READ_STATE ||
           s.op == MLPO_OP_WRITE_STATE || s.op == MLPO_OP_STAT;
  }

  // What nobody behind the ring looks at again.
  static void Check(const Request& request) {
    const mlpo_submission& s = request.submission;
    const uint64_t numel = s.subgroup == kOther ? 10 : kNumel;
    const uint64_t tensors = s.subgroup == kPlain ? 2 : 1;
    switch (s.op) {
      case MLPO_OP_GRAD:
        FUZZ_CHECK(s.subgroup >= kPlain && s.subgroup <= kLent && Inside(s.first, s.count, numel), "GRAD");
        break;
      case MLPO_OP_UPDATE:
        FUZZ_CHECK(s.subgroup >= kPlain && s.subgroup <= kLent, "UPDATE");
        FUZZ_CHECK(request.hyper.beta1 >= 0 && request.hyper.beta1 < 1 && request.hyper.lr >= 0, "hyper-parameters");
        break;
      case MLPO_OP_READ_STATE:
      case MLPO_OP_WRITE_STATE: {
        const bool steps = s.arg == MLPO_PART_STEP;
        const auto parts = static_cast<uint64_t>(__builtin_popcount(s.arg));
        FUZZ_CHECK(Inside(s.first, s.count, steps ? tensors : numel), "state");
        FUZZ_CHECK(Inside(s.staging_offset, s.count * (steps ? 8 : 4 * parts), kStagingBytes), "staging area");
        break;
      }
      case MLPO_OP_FETCH:
      case MLPO_OP_FLUSH:
      case MLPO_OP_DELETE:
        FUZZ_CHECK(request.name.size() <= MLPO_MAX_OBJECT_NAME, "name");
        if (s.arg == MLPO_OBJECT_PIECE) FUZZ_CHECK(Inside(s.staging_offset, s.count, kStagingBytes), "staging area");
        break;
      default:
        break;
    }
    if (s.subgroup == kLent && (s.op == MLPO_OP_GRAD || s.op == MLPO_OP_UPDATE))
      FUZZ_CHECK(Inside(s.staging_offset, MLPO_SLOT_HEADER_BYTES + kNumel * 4, kLentBytes), "lent area");
  }

  FakeTier tier_;
  std::unique_ptr<Areas> areas_;
  mlpo_welcome layout_ = {};
  std::byte* client_ = nullptr;
  std::vector<std::byte> staging_;
  std::optional<RingReader> reader_;
  uint32_t tail_ = 0;
  uint64_t accepted_ = 0;
  int read_errors_[2] = {}, write_errors_[2] = {}, flips_[2] = {};
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Scene scene;
  FuzzInput input(data, size);
  for (int actions = 0; actions < 300 && !input.empty(); ++actions) {
    if (!scene.Act(&input)) break;
  }
  scene.End();
  return 0;
}

std::vector<std::string> mlpo::test::FuzzSeeds() {
  const auto raw = [](uint16_t op, uint32_t subgroup, uint32_t epoch, uint32_t arg, uint64_t first, uint64_t count) {
    mlpo_submission s = {};
    s.op = op;
    s.subgroup = subgroup;
    s.epoch = epoch;
    s.arg = arg;
    s.first = first;
    s.count = count;
    std::string action = "\3";
    Put(&action, s);
    return action;
  };
  const std::string pass = "\5\37";
  std::string steps, objects, faults, flips, state;
  for (uint32_t epoch = 1; epoch <= 3; ++epoch) {
    steps += raw(MLPO_OP_GRAD, kPlain, epoch, MLPO_PIECE_VALUE, 0, 1'000);
    steps += raw(MLPO_OP_GRAD, kPlain, epoch, MLPO_PIECE_ZERO, 1'000, kNumel - 1'000) + pass;
    steps += raw(MLPO_OP_UPDATE, kPlain, epoch, 0, 0, 0) + pass;
    faults += raw(MLPO_OP_GRAD, kPlain, epoch, MLPO_PIECE_VALUE, 0, kNumel) + "\6\5" + pass;
    faults += raw(MLPO_OP_UPDATE, kPlain, epoch, 0, 0, 0) + pass + std::string("\6\1", 2);
    flips += raw(MLPO_OP_GRAD, kPlain, epoch, MLPO_PIECE_VALUE, 0, kNumel) + (epoch == 3 ? "\6\40" : "\6\20") + pass;
    flips += raw(MLPO_OP_UPDATE, kPlain, epoch, 0, 0, 0) + pass + "\6\22";
  }
  state = raw(MLPO_OP_WRITE_STATE, kPlain, 0, MLPO_PART_STATE, 0, kNumel) + pass +
          raw(MLPO_OP_READ_STATE, kPlain, 0, MLPO_PART_EXP_AVG, 10, 100) + pass +
          raw(MLPO_OP_DISCARD, MLPO_ALL_SUBGROUPS, 0, 1, 0, 0) + raw(MLPO_OP_STAT, kOther, 0, 0, 0, 0) + pass;
  objects = raw(MLPO_OP_FLUSH, 1, 0, MLPO_OBJECT_OPEN, 5, 40'000);
  for (uint64_t at = 0; at < 40'000; at += 20'000)
    objects += raw(MLPO_OP_FLUSH, 1, 0, MLPO_OBJECT_PIECE, at, 20'000) + pass;
  objects += raw(MLPO_OP_FLUSH, 1, 0, MLPO_OBJECT_COMMIT, 0, 0) + pass +
             raw(MLPO_OP_FETCH, 2, 0, MLPO_OBJECT_OPEN, 5, 0) +
             raw(MLPO_OP_FETCH, 2, 0, MLPO_OBJECT_PIECE, 100, 30'000) + pass +
             raw(MLPO_OP_FETCH, 2, 0, MLPO_OBJECT_CLOSE, 0, 0) + raw(MLPO_OP_FETCH, 0, 0, MLPO_OBJECT_SIZE, 5, 0) +
             raw(MLPO_OP_DELETE, 0, 0, 0, 5, 0) + pass;
  return {steps, faults, flips, state, objects, "\7\377\377\377\177", std::string(8, '\3')};
}
