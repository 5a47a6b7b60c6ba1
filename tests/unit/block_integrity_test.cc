// Bits that flip in a path's file, or on the way from it: each is found before anything is made of it, wherever it is,
// and what is not lost is right to the bit. Real files, engines and workers; what is right is said by the scalar
// reference on arrays of the test's own, and the bits are flipped by the test, past the daemon.
//
// MLPO_LONG=1 flips 10^4 bits in files instead of 160 an engine.
#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <optional>
#include <vector>

#include "daemon/base/unique_fd.h"
#include "daemon/checkpoint/block_hash.h"
#include "daemon/io/io_faults.h"
#include "tests/support/block_tier.h"
#include "tests/unit/adam_arrays.h"

using namespace mlpo;
using namespace mlpo::test;
using mlpo::testing::LongTests;
using mlpo::testing::Random;
using mlpo::testing::TypicalHyper;

namespace {

constexpr uint64_t kBlock = 65536 + 1000;   // elements: a piece of 256 KiB, and one of 4000 bytes and padding
constexpr uint64_t kPartBytes = 65 * 4096;  // of a block
constexpr uint64_t kPieceEnd = 64 * 4096;   // of the first one
constexpr uint64_t kDataEnd = 4 * kBlock;   // then padding
constexpr uint64_t kBlocks = 7;
constexpr uint64_t kNumel = kBlocks * kBlock;  // pool: three blocks
static_assert(kDataEnd > kPieceEnd && kDataEnd < kPartBytes);

// What the subgroup must be.
class Model {
 public:
  explicit Model(uint64_t seed) : random_(seed), p_(kNumel), m_(kNumel), v_(kNumel), expected_(2 * kNumel) {
    for (uint64_t i = 0; i < kNumel; ++i) {
      p_[i] = static_cast<float>(random_.Uniform(-1, 1));
      m_[i] = static_cast<float>(random_.Uniform(-0.1, 0.1));
      v_[i] = static_cast<float>(random_.Uniform(0, 0.01));
    }
  }
  BlockTier::Floats State(uint64_t first, uint64_t count) const {
    BlockTier::Floats parts;
    for (const std::vector<float>* part : {&p_, &m_, &v_}) {
      const auto begin = part->begin() + static_cast<ptrdiff_t>(first);
      parts.insert(parts.end(), begin, begin + static_cast<ptrdiff_t>(count));
    }
    return parts;
  }
  // A step's gradient into the slot.
  void WriteGradient(BlockTier::Bytes* slot) {
    grad_.resize(2 * kNumel);
    for (uint64_t i = 0; i < kNumel; ++i) {
      reference::StoreElement(grad_.data(), MLPO_BFLOAT16, i, static_cast<float>(random_.Uniform(-0.01, 0.01)));
    }
    std::memcpy(slot->data(), grad_.data(), grad_.size());
  }
  const BlockTier::Bytes& grad() const { return grad_; }
  const BlockTier::Bytes& parameters() const { return expected_; }
  void Step(int64_t step) {
    AdamRange range;
    range.p = p_.data();
    range.m = m_.data();
    range.v = v_.data();
    range.grad = grad_.data();
    range.param = expected_.data();
    range.n = kNumel;
    range.grad_dtype = range.dtype = MLPO_BFLOAT16;
    reference::Adam(MakeScalars(TypicalHyper(), step), range);
  }

 private:
  Random random_;
  std::vector<float> p_, m_, v_;
  BlockTier::Bytes grad_, expected_;
};

BlockTier::Setup SetupFor(const std::string& engine, IoFaults* faults = nullptr, bool integrity = true) {
  BlockTier::Setup setup;
  setup.block_elements = kBlock;
  setup.engine = engine;
  setup.integrity = integrity;
  setup.faults = faults;
  return setup;
}

bool SameBits(const BlockTier::Floats& a, const BlockTier::Floats& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void CheckState(BlockTier& tier, const Model& model) {
  BlockTier::Floats parts;
  REQUIRE(tier.ReadState(1, 0, kNumel, &parts).failure.status == 0);
  CHECK(SameBits(parts, model.State(0, kNumel)));
}

void Begin(BlockTier& tier, const Model& model, std::optional<mlpo_dtype> kept_as = std::nullopt) {
  tier.AddSubgroup(1, kNumel, kept_as);
  REQUIRE(tier.WriteState(1, 0, model.State(0, kNumel)).failure.status == 0);
  tier.Settle();
}

// Of those that are on the path only, the one with this number, counted round.
const Block& BlockAway(const BlockTier& tier, uint64_t number) {
  std::vector<const Block*> away;
  for (const Block& block : tier.subgroup(1).blocks) {
    if (block.state == BlockState::kAway && block.extent.path != kNone) away.push_back(&block);
  }
  REQUIRE(!away.empty());
  return *away[number % away.size()];
}

// Bytes of a part in which a fault is likely to go unseen, and any one.
uint64_t ByteOfPart(uint64_t kind, uint64_t random) {
  constexpr uint64_t kPlaces[] = {0, kPieceEnd - 1, kPieceEnd, kDataEnd - 1, kDataEnd, kPartBytes - 1};
  return kind % 8 < 6 ? kPlaces[kind % 8] : random % kPartBytes;
}

void CheckWrong(const Completion& completion, const Block& block, const std::string& array) {
  const Failure& failure = completion.failure;
  CAPTURE(failure.text);
  CHECK(failure.status == MLPO_E_IO);
  CHECK(failure.os_errno == EBADMSG);
  CHECK(failure.path == 0);
  CHECK(failure.block == block.index);
  CHECK(failure.text.find(array + " in block " + std::to_string(block.index) + " of subgroup 'subgroup1'") == 0);
  CHECK(failure.text.find("path 'nvme'") != std::string::npos);
}

// One bit in one read that contains a byte of the file; then no more.
class FlipOnTheWay : public IoFaults {
 public:
  void Arm(uint64_t offset, int bit) {
    bit_ = bit;
    offset_ = offset;
  }
  bool armed() const { return offset_ != 0; }
  void DataRead(uint64_t at, std::byte* data, size_t bytes) override {
    uint64_t wanted = offset_.load();
    if (wanted < at || wanted - at >= bytes || !offset_.compare_exchange_strong(wanted, 0)) return;
    data[wanted - at] ^= std::byte{static_cast<unsigned char>(1u << bit_)};
  }

 private:
  std::atomic<uint64_t> offset_{0};  // of the byte; 0: none
  std::atomic<int> bit_{0};
};

class TwoFlipsOnTheWay : public IoFaults {
 public:
  FlipOnTheWay one, other;
  void DataRead(uint64_t at, std::byte* data, size_t bytes) override {
    one.DataRead(at, data, bytes);
    other.DataRead(at, data, bytes);
  }
};

}  // namespace

TEST_CASE("BlockIntegrity.AFlippedBitInTheFileIsFound") {
  const std::string engine = GENERATE("io_uring", "threads");
  constexpr const char* kArrays[] = {"master", "exp_avg", "exp_avg_sq"};
  constexpr uint64_t kUpdateEvery = 16;
  const uint64_t trials = LongTests() ? 5000 : 160;
  Model model(1);
  Random random(2);
  BlockTier tier(SetupFor(engine));
  Begin(tier, model);
  REQUIRE(tier.engine() == engine);
  uint32_t epoch = 0;
  for (uint64_t trial = 0; trial < trials; ++trial) {
    const Block& block = BlockAway(tier, random.Next());
    const uint64_t array = trial % 3, kind = random.Next(), byte = ByteOfPart(kind, random.Next());
    const uint64_t offset = tier.FileOffset(block, array * kPartBytes + byte);
    const int bit = static_cast<int>(random.Next() % 8);
    CAPTURE(trial, block.index, array, byte, bit);
    tier.Flip(tier.file(), offset, bit);
    if (trial % kUpdateEvery != kUpdateEvery - 1) {
      // An element elsewhere in the block: the block is given out whole or not at all.
      const uint64_t element = block.first + random.Next() % block.count;
      BlockTier::Floats parts = model.State(element, 1);
      const bool write = trial % 4 == 3;
      CheckWrong(write ? tier.WriteState(1, element, parts) : tier.ReadState(1, element, 1, &parts), block,
                 kArrays[array]);
      tier.Flip(tier.file(), offset, bit);  // as if it had been a fault of the drive's electronics
      REQUIRE(tier.ReadState(1, element, 1, &parts).failure.status == 0);
      REQUIRE(SameBits(parts, model.State(element, 1)));
      continue;
    }
    // The gradient of the piece that is wrong is still in its slot; all of the state written, all is right again.
    model.WriteGradient(&tier.slot(1));
    REQUIRE(tier.Grad(1, epoch + 1).failure.status == 0);
    CheckWrong(tier.Update(1, epoch + 1, TypicalHyper()), block, kArrays[array]);
    const uint64_t begin = 2 * (block.first + (byte < kPieceEnd ? 0 : 65536));
    const uint64_t end = 2 * (byte < kPieceEnd ? block.first + 65536 : block.first + block.count);
    CHECK(std::memcmp(tier.slot(1).data() + begin, model.grad().data() + begin, end - begin) == 0);
    BlockTier::Floats parts;
    CHECK(tier.ReadState(1, block.first, 1, &parts).failure.status == MLPO_E_IO);
    REQUIRE(tier.WriteState(1, 0, model.State(0, kNumel)).failure.status == 0);
    CheckState(tier, model);
    tier.Settle();
  }
  CHECK(tier.path().checksum_errors == trials);
  CHECK(tier.path().checksum_mismatches == trials);
  // What it has been through has left nothing behind.
  for (int step = 1; step <= 2; ++step) {
    model.WriteGradient(&tier.slot(1));
    REQUIRE(tier.Grad(1, ++epoch).failure.status == 0);
    REQUIRE(tier.Update(1, epoch, TypicalHyper()).failure.status == 0);
    model.Step(tier.subgroup(1).spec.tensors.front().step);
    CHECK(tier.slot(1) == model.parameters());
  }
  CheckState(tier, model);
  CHECK(tier.path().checksum_errors == trials);
}

// Without integrity the same bits arrive: so it is the checksums that find them.
TEST_CASE("BlockIntegrity.WithoutItFlippedBitsArrive") {
  Model model(1);
  BlockTier tier(SetupFor("auto", nullptr, false));
  Begin(tier, model);
  const Block& block = BlockAway(tier, 0);
  tier.Flip(tier.file(), tier.FileOffset(block, 2), 5);
  BlockTier::Floats parts;
  REQUIRE(tier.ReadState(1, block.first, 1, &parts).failure.status == 0);
  CHECK_FALSE(SameBits(parts, model.State(block.first, 1)));
  CHECK(tier.path().checksum_mismatches == 0);
}

// A piece that is written over as a whole may have been anything; its padding is zero again.
TEST_CASE("BlockIntegrity.AWrongPieceThatIsWrittenOverIsRight") {
  Model model(1);
  BlockTier tier(SetupFor("auto"));
  Begin(tier, model);
  const Block& block = BlockAway(tier, 0);
  for (const uint64_t byte : {kPieceEnd + 5, kDataEnd + 5}) tier.Flip(tier.file(), tier.FileOffset(block, byte), 3);
  // Three blocks that must be flushed for the next one; the last one to be used goes first.
  for (uint64_t i = 1; i <= 2; ++i) {
    const uint64_t other = (block.index + i) % kBlocks * kBlock;
    REQUIRE(tier.WriteState(1, other, model.State(other, kBlock)).failure.status == 0);
  }
  const uint64_t first = block.first + 65536;
  REQUIRE(tier.WriteState(1, first, model.State(first, kBlock - 65536)).failure.status == 0);
  CheckState(tier, model);
  tier.Settle();
  CHECK(tier.path().checksum_mismatches == 0);
  // Which blocks are still in the pool depends on what the disk did first: those of others take the place of this one.
  BlockTier::Floats parts;
  for (int round = 0; block.extent.path == kNone && round < 10; ++round) {
    for (uint64_t i = 1; i < kBlocks; ++i) {
      const uint64_t other = (block.index + i) % kBlocks * kBlock;
      REQUIRE(tier.ReadState(1, other, 1, &parts).failure.status == 0);
    }
    tier.Settle();
  }
  REQUIRE(block.extent.path != kNone);
  std::vector<char> padding(kPartBytes - kDataEnd, 1);
  const int fd = ::open(tier.StateFile().c_str(), O_RDONLY | O_CLOEXEC);
  REQUIRE(fd >= 0);
  const auto at = static_cast<off_t>(tier.FileOffset(block, kDataEnd));
  const bool read = ::pread(fd, padding.data(), padding.size(), at) == static_cast<ssize_t>(padding.size());
  ::close(fd);
  REQUIRE(read);
  CHECK(padding == std::vector<char>(padding.size(), 0));
}

// What a checkpoint says of a block without reading it is the hash of what is stored: of odd sizes and exact pieces, of
// master parameters alone, and behind a gradient that is kept.
TEST_CASE("BlockIntegrity.ChecksumsMakeUpTheHashOfAStoredBlock") {
  constexpr uint64_t kPiece = 65536;
  BlockTier::Setup setup = SetupFor("auto");
  setup.block_elements = 2 * kPiece + 4096;
  BlockTier tier(setup);
  std::map<SubgroupId, bool> master_only;
  Random random(3);
  for (const uint64_t numel : {uint64_t{1}, uint64_t{1023}, kPiece, kPiece + 1, 2 * kPiece, 3 * kPiece + 4465}) {
    for (const bool moments : {false, true}) {
      for (const bool kept : {false, true}) {
        const auto id = static_cast<SubgroupId>(master_only.size() + 1);
        CAPTURE(numel, moments, kept);
        master_only[id] = !moments;
        tier.AddSubgroup(id, numel, kept ? std::optional(MLPO_BFLOAT16) : std::nullopt);
        BlockTier::Floats values((moments ? 3 : 1) * numel);
        for (float& value : values) value = static_cast<float>(random.Next() % 1000 + 1);
        const Completion written =
            moments ? tier.WriteState(id, 0, values) : tier.WritePart(id, MLPO_PART_MASTER, 0, values);
        REQUIRE(written.failure.status == 0);
      }
    }
  }
  const std::vector<Pin> pins = tier.TakeState();
  size_t blocks = 0;
  for (const auto& [id, master] : master_only) blocks += tier.subgroup(id).blocks.size();
  REQUIRE(pins.size() == blocks);
  const UniqueFd fd(::open(tier.StateFile().c_str(), O_RDONLY | O_CLOEXEC));
  REQUIRE(fd);
  for (const Pin& pin : pins) {
    CAPTURE(pin.subgroup, pin.index, pin.count);
    const uint32_t arrays = master_only.at(pin.subgroup) ? 1 : 3;
    const uint64_t array_bytes = (pin.count * 4 + 4095) / 4096 * 4096;
    REQUIRE(pin.hashed);
    REQUIRE(pin.bytes == arrays * array_bytes);
    std::vector<std::byte> stored(pin.bytes);
    const uint64_t at = Path::kFileHeaderBytes + pin.extent.offset + pin.first_byte;
    REQUIRE(::pread(fd.get(), stored.data(), stored.size(), static_cast<off_t>(at)) ==
            static_cast<ssize_t>(stored.size()));
    CHECK(pin.hash == BlockHash(stored.data(), arrays, array_bytes));
  }
}

// Zeros that were never written by anybody, but lie in the extent before what was.
TEST_CASE("BlockIntegrity.MasterParametersThatAreZeroAreComparedWithTheMoments") {
  BlockTier tier(SetupFor("auto"));
  tier.AddSubgroup(1, kNumel);
  BlockTier::Floats moments(kNumel, 0.5f);
  REQUIRE(tier.WritePart(1, MLPO_PART_EXP_AVG, 0, moments).failure.status == 0);
  tier.Settle();
  const Block& block = BlockAway(tier, 0);
  const uint64_t offset = tier.FileOffset(block, 3);
  BlockTier::Floats parts;
  tier.Flip(tier.file(), offset, 6);
  CheckWrong(tier.ReadState(1, block.first, 1, &parts), block, "master");
  tier.Flip(tier.file(), offset, 6);
  REQUIRE(tier.ReadState(1, block.first, 1, &parts).failure.status == 0);
  CHECK(parts == BlockTier::Floats{0, 0.5f, 0});
}

// A write that never arrived: the extent has what was there before, with all its bits.
TEST_CASE("C10_OldContentOfAnExtentIsNotGivenOut") {
  constexpr uint64_t kExtentBytes = 3 * kPartBytes;
  Model model(1);
  BlockTier tier(SetupFor("auto"));
  Begin(tier, model);
  const UniqueFd fd(::open(tier.StateFile().c_str(), O_RDWR | O_CLOEXEC));
  REQUIRE(fd);
  std::vector<char> before(16 * kExtentBytes), written(kExtentBytes);
  const auto all = static_cast<ssize_t>(before.size()), one = static_cast<ssize_t>(written.size());
  REQUIRE(::pread(fd.get(), before.data(), before.size(), Path::kFileHeaderBytes) == all);
  // An update gives each block another place.
  model.WriteGradient(&tier.slot(1));
  REQUIRE(tier.Grad(1, 1).failure.status == 0);
  REQUIRE(tier.Update(1, 1, TypicalHyper()).failure.status == 0);
  tier.Settle();
  const Block& block = BlockAway(tier, 0);
  const uint64_t offset = tier.FileOffset(block, 0), in_extents = offset - Path::kFileHeaderBytes;
  REQUIRE(in_extents + kExtentBytes <= before.size());
  const char* const old = before.data() + in_extents;
  REQUIRE(::pread(fd.get(), written.data(), written.size(), static_cast<off_t>(offset)) == one);
  REQUIRE(std::memcmp(written.data(), old, written.size()) != 0);
  REQUIRE(::pwrite(fd.get(), old, written.size(), static_cast<off_t>(offset)) == one);
  REQUIRE(::fsync(fd.get()) == 0);
  BlockTier::Floats parts;
  CheckWrong(tier.ReadState(1, block.first, 1, &parts), block, "master, exp_avg, exp_avg_sq");
  CHECK(tier.path().checksum_mismatches == 6);
}

// One that went elsewhere.
TEST_CASE("C10_ContentOfAnotherBlockIsNotGivenOut") {
  Model model(1);
  BlockTier tier(SetupFor("auto"));
  Begin(tier, model);
  const Block& one = BlockAway(tier, 0);
  const Block& other = BlockAway(tier, 1);
  REQUIRE(one.index != other.index);
  // What another block has, as a whole.
  const int fd = ::open((tier.StateFile()).c_str(), O_RDWR | O_CLOEXEC);
  REQUIRE(fd >= 0);
  std::vector<char> content(3 * kPartBytes);
  const auto size = static_cast<ssize_t>(content.size());
  const bool copied =
      ::pread(fd, content.data(), content.size(), static_cast<off_t>(tier.FileOffset(other, 0))) == size &&
      ::pwrite(fd, content.data(), content.size(), static_cast<off_t>(tier.FileOffset(one, 0))) == size &&
      ::fsync(fd) == 0;
  ::close(fd);
  REQUIRE(copied);
  BlockTier::Floats parts;
  CheckWrong(tier.ReadState(1, one.first, 1, &parts), one, "master, exp_avg, exp_avg_sq");
  CHECK(tier.path().checksum_mismatches == 6);
}

TEST_CASE("BlockIntegrity.ABitFlippedOnTheWayIsReadAgain") {
  const std::string engine = GENERATE("io_uring", "threads");
  const std::optional<mlpo_dtype> kept_as =
      GENERATE(std::optional<mlpo_dtype>(), std::optional(MLPO_BFLOAT16), std::optional(MLPO_FLOAT32));
  FlipOnTheWay faults;
  Model model(3);
  Random random(4);
  BlockTier tier(SetupFor(engine, &faults));
  Begin(tier, model, kept_as);
  uint64_t flips = 0;
  for (uint32_t epoch = 1; epoch <= 24; ++epoch) {
    model.WriteGradient(&tier.slot(1));
    REQUIRE(tier.Grad(1, epoch).failure.status == 0);
    tier.Settle();
    const Block& block = BlockAway(tier, random.Next());
    const BlockLayout layout = Scheduler::LayoutOf(block);  // with gradients blocks are smaller
    const uint64_t bytes = layout.gradient_bytes + 3 * layout.part_bytes;
    faults.Arm(tier.FileOffset(block, random.Next() % bytes), static_cast<int>(random.Next() % 8));
    REQUIRE(tier.Update(1, epoch, TypicalHyper()).failure.status == 0);
    model.Step(epoch);
    CHECK(tier.slot(1) == model.parameters());
    CHECK_FALSE(faults.armed());
    ++flips;
    tier.Settle();
  }
  CheckState(tier, model);
  CHECK(tier.path().checksum_mismatches == flips);
  CHECK(tier.path().checksum_errors == 0);
}

// Across the border of two arrays, in one transfer and into their places.
TEST_CASE("BlockIntegrity.WrongPiecesThatTouchAreReadAgainTogether") {
  const std::string engine = GENERATE("io_uring", "threads");
  TwoFlipsOnTheWay faults;
  Model model(7);
  BlockTier tier(SetupFor(engine, &faults));
  Begin(tier, model);
  model.WriteGradient(&tier.slot(1));
  REQUIRE(tier.Grad(1, 1).failure.status == 0);
  tier.Settle();
  const Block& block = BlockAway(tier, 0);
  const uint64_t last_of_master = tier.FileOffset(block, kPieceEnd);
  const uint64_t first_of_moments = tier.FileOffset(block, kPartBytes);
  faults.one.Arm(last_of_master + 5, 3);
  faults.other.Arm(first_of_moments + 7, 2);
  const auto reads = static_cast<ptrdiff_t>(tier.reads().size());
  REQUIRE(tier.Update(1, 1, TypicalHyper()).failure.status == 0);
  model.Step(1);
  CHECK(tier.slot(1) == model.parameters());
  CHECK_FALSE(faults.one.armed());
  CHECK_FALSE(faults.other.armed());
  const auto is_again = [&](const Transfer& read) { return read.offset == last_of_master; };
  const auto again = std::find_if(tier.reads().begin() + reads, tier.reads().end(), is_again);
  REQUIRE(again != tier.reads().end());
  CHECK(again->bytes == (kPartBytes - kPieceEnd) + kPieceEnd);
  CHECK(again->buffer_offset == kPieceEnd);
  const auto meets = [&](const Transfer& read) { return read.offset == first_of_moments; };
  CHECK(std::none_of(tier.reads().begin() + reads, tier.reads().end(), meets));
  tier.Settle();
  CheckState(tier, model);
  CHECK(tier.path().checksum_mismatches == 2);
  CHECK(tier.path().checksum_errors == 0);
}

TEST_CASE("BlockIntegrity.AKeptGradientThatIsWrongFailsItsUpdate") {
  Model model(5);
  BlockTier tier(SetupFor("auto"));
  Begin(tier, model, MLPO_BFLOAT16);
  // Blocks are cut smaller, so that the gradient fits: their sizes are the tier's.
  model.WriteGradient(&tier.slot(1));
  REQUIRE(tier.Grad(1, 1).failure.status == 0);
  tier.Settle();
  std::memset(tier.slot(1).data(), 0, tier.slot(1).size());  // it is not read from there any more
  const Block& block = BlockAway(tier, 0);
  REQUIRE(block.grad_saved);
  const uint64_t offset = tier.FileOffset(block, 2 * block.count - 1);  // the last byte of its gradient
  tier.Flip(tier.file(), offset, 0);
  CheckWrong(tier.Update(1, 1, TypicalHyper()), block, "gradient");
  // If nothing of the block was changed, the same update goes on when the bit is back; else all is written again.
  tier.Flip(tier.file(), offset, 0);
  if (block.damaged) {
    REQUIRE(tier.WriteState(1, 0, model.State(0, kNumel)).failure.status == 0);
    CheckState(tier, model);
  } else {
    REQUIRE(tier.Update(1, 1, TypicalHyper()).failure.status == 0);
    model.Step(1);
    CHECK(tier.slot(1) == model.parameters());
    CheckState(tier, model);
  }
}

TEST_CASE("BlockIntegrity.AnObjectThatIsWrongIsNotGivenOut") {
  BlockTier tier(SetupFor("auto"));
  Random random(6);
  constexpr uint64_t kBytes = 5 * 3 * kPartBytes + 777;  // six blocks; the last one is of a page
  BlockTier::Bytes bytes(kBytes);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random.Next());
  REQUIRE(tier.Flush("thing", bytes).failure.status == 0);
  tier.Settle();
  REQUIRE_FALSE(tier.writes().empty());
  BlockTier::Bytes got(kBytes);
  const auto is_right = [&] {
    const bool right = tier.Fetch("thing", &got).failure.status == 0 && got == bytes;
    tier.Settle();
    return right;
  };
  // Another object of six blocks takes every buffer whose block is elsewhere, too.
  REQUIRE(tier.Flush("other", BlockTier::Bytes(kBytes)).failure.status == 0);
  const auto evict = [&] {
    BlockTier::Bytes other(kBytes);
    const bool read = tier.Fetch("other", &other).failure.status == 0;
    tier.Settle();
    return read;
  };
  uint64_t found = 0;
  for (uint64_t trial = 0; trial < 6; ++trial) {
    for (const uint64_t place : {uint64_t{0}, uint64_t{262143}, uint64_t{262144}, UINT64_MAX}) {
      // What was in memory when a read was wrong gets another place: where blocks lie is known from how they are read.
      REQUIRE(evict());
      const size_t before = tier.reads().size();
      REQUIRE(is_right());
      REQUIRE(tier.reads().size() > before);
      const Transfer block = tier.reads()[before + trial % (tier.reads().size() - before)];
      const uint64_t at = std::min(place, block.bytes - 1);
      CAPTURE(block.offset, at);
      REQUIRE(evict());
      tier.Flip(tier.objects_file(), block.offset + at, 3);
      const Completion completion = tier.Fetch("thing", &got);
      ++found;
      CAPTURE(completion.failure.text);
      CHECK(completion.failure.status == MLPO_E_IO);
      CHECK(completion.failure.os_errno == EBADMSG);
      CHECK(completion.failure.text.find("of object 'thing' is not what was written to path 'nvme'") !=
            std::string::npos);
      CHECK(tier.path().checksum_errors == found);
      tier.Flip(tier.objects_file(), block.offset + at, 3);
      tier.Settle();
    }
  }
  CHECK(is_right());
  CHECK(tier.path().checksum_errors == found);
}
