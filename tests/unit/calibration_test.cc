// Calibration in virtual time: it finds what the simulated paths were made with, and reads only what it wrote.
#include "daemon/scheduler/calibration.h"

#include <cerrno>
#include <set>

#include "tests/support/simulated_path.h"
//
#include "tests/support/catch.h"

using namespace mlpo;
using mlpo::test::SimulatedPath;

namespace {

constexpr uint64_t kBlockBytes = 12u << 20;
constexpr uint64_t kFileBlocks = 64;

class Bench {
 public:
  explicit Bench(const std::vector<SimulatedPath::Speed>& speeds, uint32_t buffers = 128) : buffers_(buffers) {
    Calibration::Options options;
    for (const SimulatedPath::Speed& speed : speeds) {
      paths_.emplace_back(speed);
      options.paths.push_back(static_cast<PathIndex>(options.paths.size()));
      options.files.push_back(7);
    }
    for (uint32_t i = 0; i < buffers; ++i) options.buffers.push_back(i);
    options.block_bytes = kBlockBytes;
    options.offset_bytes = 4096;
    options.file_blocks = kFileBlocks;
    calibration_ = std::make_unique<Calibration>(options, [this](const Transfer& t) { Start(t); });
  }

  Calibration& calibration() { return *calibration_; }
  SimulatedPath& path(size_t index) { return paths_[index]; }
  double now_s() const { return static_cast<double>(now_ns_) / 1e9; }
  void FailWrites(int error) { write_error_ = error; }
  uint32_t most_in_flight() const { return most_in_flight_; }
  const std::string& violation() const { return violation_; }

  void Begin() { calibration_->Begin(now_ns_); }
  bool Step() {
    if (calibration_->ended()) return false;
    int64_t next_ns = next_tick_ns_;
    for (const SimulatedPath& path : paths_) next_ns = std::min(next_ns, path.next_ns());
    for (const auto& [at_ns, transfer] : ending_) next_ns = std::min(next_ns, at_ns);
    now_ns_ = next_ns;
    for (SimulatedPath& path : paths_) {
      if (path.next_ns() > now_ns_) continue;
      for (const auto& [transfer, end_ns] : path.Advance(now_ns_)) ending_.insert({end_ns, transfer});
    }
    while (!ending_.empty() && ending_.begin()->first <= now_ns_) {
      const Transfer transfer = ending_.begin()->second;
      ending_.erase(ending_.begin());
      End(transfer);
    }
    if (now_ns_ >= next_tick_ns_) {
      next_tick_ns_ = now_ns_ + 100'000'000;
      calibration_->Tick(now_ns_);
    }
    return true;
  }
  void Run() {
    Begin();
    while (Step()) {
    }
  }

 private:
  void Start(const Transfer& transfer) {
    if (!in_use_.insert(transfer.buffer).second || transfer.buffer >= buffers_) violation_ = "a buffer is used twice";
    most_in_flight_ = std::max(most_in_flight_, static_cast<uint32_t>(in_use_.size()));
    const std::pair<PathIndex, uint64_t> place(transfer.path, transfer.offset);
    if (transfer.direction == Direction::kRead && !written_.contains(place))
      violation_ = "what was not written is read";
    if (transfer.offset < 4096 || transfer.offset + transfer.bytes > 4096 + kFileBlocks * kBlockBytes)
      violation_ = "beyond the file";
    paths_[transfer.path].Start(transfer, now_ns_);
  }
  void End(const Transfer& transfer) {
    in_use_.erase(transfer.buffer);
    TransferResult result;
    result.id = transfer.id;
    result.path = transfer.path;
    result.bytes = transfer.bytes;
    if (transfer.direction == Direction::kWrite) {
      result.error = write_error_;
      if (result.error == 0) written_.insert({transfer.path, transfer.offset});
    }
    calibration_->TransferDone(result, now_ns_);
  }

  const uint32_t buffers_;
  std::vector<SimulatedPath> paths_;
  std::unique_ptr<Calibration> calibration_;
  int64_t now_ns_ = 1;
  int64_t next_tick_ns_ = 100'000'000;
  struct Earlier {
    bool operator()(const std::pair<int64_t, Transfer>& a, const std::pair<int64_t, Transfer>& b) const {
      return a.first != b.first ? a.first < b.first : a.second.id < b.second.id;
    }
  };
  std::set<std::pair<int64_t, Transfer>, Earlier> ending_;
  std::set<BufferIndex> in_use_;
  std::set<std::pair<PathIndex, uint64_t>> written_;
  int write_error_ = 0;
  uint32_t most_in_flight_ = 0;
  std::string violation_;
};

}  // namespace

TEST_CASE("Calibration.FindsSpeedsAndDuplexOfEachPath") {
  for (const double duplex : {0.5, 1.0, 1.5}) {
    Bench bench({{345e6, 265e6, duplex}, {180e6, 180e6, 0.5}});
    bench.Run();
    INFO("d " << duplex);
    REQUIRE(bench.calibration().error() == "");
    CHECK(bench.violation() == "");
    const std::vector<PathMeasurement>& found = bench.calibration().results();
    REQUIRE(found.size() == 2);
    CHECK(found[0].read_bytes_per_s == Approx(345e6).epsilon(0.02));
    CHECK(found[0].write_bytes_per_s == Approx(265e6).epsilon(0.02));
    CHECK(found[0].duplex == Approx(duplex).epsilon(0.08));
    CHECK(found[1].read_bytes_per_s == Approx(180e6).epsilon(0.02));
    CHECK(found[1].write_bytes_per_s == Approx(180e6).epsilon(0.02));
    // Devices of their own do together what they did alone.
    CHECK(found[0].together_bytes_per_s == Approx(found[0].mixed_bytes_per_s).epsilon(0.08));
    CHECK(found[1].together_bytes_per_s == Approx(360e6).epsilon(0.08));
    CHECK(bench.now_s() < 40);
  }
}

TEST_CASE("Calibration.GoesAsDeepAsItGains") {
  // 2 GB/s and 20 ms: one block of 12 MiB in flight shows 480 MB/s; from five on it is all there.
  Bench bench({{2e9, 2e9, 0.5, 20'000'000}});
  bench.Run();
  REQUIRE(bench.calibration().error() == "");
  const PathMeasurement& found = bench.calibration().results()[0];
  CHECK(found.read_bytes_per_s == Approx(2e9).epsilon(0.03));
  CHECK(found.read_depth_bytes >= 4 * kBlockBytes);
  CHECK(found.read_depth_bytes <= 8 * kBlockBytes);
  // A device without latency gains nothing from more than one.
  Bench near({{2e9, 2e9, 0.5}});
  near.Run();
  CHECK(near.calibration().results()[0].write_depth_bytes == kBlockBytes);
  // No more than the buffers that it was lent, for both directions.
  Bench few({{20e9, 20e9, 0.5, 20'000'000}}, 8);
  few.Run();
  CHECK(few.calibration().results()[0].read_depth_bytes == 4 * kBlockBytes);
  CHECK(few.most_in_flight() <= 8);
}

TEST_CASE("Calibration.AFailureOrAHungPathEndsIt") {
  Bench full({{345e6, 265e6, 0.5}});
  full.FailWrites(ENOSPC);
  full.Run();
  CHECK(full.calibration().error() == "writing: No space left on device");
  CHECK(full.calibration().failed_path() == 0);
  CHECK(full.now_s() < 1);
  Bench slow({{345e6, 265e6, 0.5}});
  slow.path(0).ChangeSpeed(500'000'000, {100, 100, 0.5}, 1);
  slow.path(0).ChangeSpeed(30'000'000'000, {345e6, 265e6, 0.5}, 1);
  slow.Run();  // ends when what is in flight has ended
  CHECK(slow.calibration().error().find("not done after 20 s") != std::string::npos);
  CHECK(slow.now_s() == Approx(30).epsilon(0.02));
}

TEST_CASE("Calibration.CanBeCancelledAtAnyMoment") {
  for (const int steps : {0, 1, 7, 50, 200}) {
    Bench bench({{345e6, 265e6, 0.5}, {180e6, 180e6, 0.5}});
    if (steps == 0) {
      bench.calibration().Cancel("enough");
      CHECK(bench.calibration().ended());
      continue;
    }
    bench.Begin();
    for (int i = 0; i < steps; ++i) bench.Step();
    const double before_s = bench.now_s();
    bench.calibration().Cancel("enough");
    while (bench.Step()) {
    }
    CHECK(bench.calibration().ended());
    CHECK(bench.calibration().error() == "enough");
    CHECK(bench.now_s() < before_s + 1);
  }
}
