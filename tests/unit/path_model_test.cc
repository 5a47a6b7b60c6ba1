// The path model against closed forms, and learning from a device whose speed is known.
#include "daemon/scheduler/path_model.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <functional>
#include <limits>
#include <random>

#include "tests/support/catch.h"

using namespace mlpo;

namespace {

constexpr uint64_t kBlockBytes = 12u << 20;
constexpr double kAnyRoom = std::numeric_limits<double>::infinity();

PathParameters Known(double read, double write, double duplex, bool duplex_known) {
  PathParameters path;
  path.read_bytes_per_s = read;
  path.write_bytes_per_s = write;
  path.duplex = duplex;
  path.duplex_known = duplex_known;
  return path;
}

PathModel MakeModel(std::vector<PathParameters> paths, Policy policy = Policy::kAdaptive) {
  return PathModel({.policy = policy, .seed = 1, .block_bytes = kBlockBytes, .buffers = 64, .paths = std::move(paths)});
}

// A device that serves each direction in order: alone at its speed; both at once each at 1/(2d) of it.
class Device {
 public:
  Device(PathModel* model, PathIndex path) : model_(model), path_(path) {}

  double read = 345e6, write = 265e6, duplex = 0.5;
  std::function<double(double now_s)> factor = [](double) { return 1.0; };  // of the speeds
  double latency_s = 0;                                                     // of each transfer, before its bytes move

  // Keeps so many blocks in flight each way, for `seconds`; writes only as far as reads have gone ahead by at most
  // `lead` blocks, and the other way round: what is written has been read before.
  void Run(double seconds, uint32_t reads, uint32_t writes, double lead = 1e9) {
    constexpr double kStep = 0.0005;
    for (double end = now_ + seconds; now_ < end; now_ += kStep) {
      const std::array<uint32_t, 2> wanted = {reads, writes};
      for (size_t i = 0; i < 2; ++i) {
        const double ahead = i == 0 ? done_[0] - done_[1] : done_[1] - done_[0];
        while (queue_[i].size() < wanted[i] && ahead + static_cast<double>(queue_[i].size()) < lead) {
          queue_[i].push_back({static_cast<double>(kBlockBytes), now_ + latency_s});
          model_->Started(path_, static_cast<Direction>(i), Ns());
        }
      }
      const bool both = !queue_[0].empty() && !queue_[1].empty();
      for (size_t i = 0; i < 2; ++i) {
        double move = kStep * (i == 0 ? read : write) * factor(now_) / (both ? 2 * duplex : 1);
        while (move > 0 && !queue_[i].empty() && queue_[i].front().from_s <= now_) {
          const double taken = std::min(move, queue_[i].front().bytes);
          queue_[i].front().bytes -= taken;
          move -= taken;
          if (queue_[i].front().bytes > 0) break;
          queue_[i].pop_front();
          ++done_[i];
          model_->Ended(path_, static_cast<Direction>(i), kBlockBytes, true, Ns());
          if (queue_[i].size() < wanted[i] && lead == 1e9) {
            queue_[i].push_back({static_cast<double>(kBlockBytes), now_ + latency_s});
            model_->Started(path_, static_cast<Direction>(i), Ns());
          }
        }
      }
    }
  }
  double read_bytes() const { return done_[0] * static_cast<double>(kBlockBytes); }
  void Pause(double seconds) { now_ += seconds; }
  int64_t Ns() const { return static_cast<int64_t>(now_ * 1e9); }

 private:
  struct Transfer {
    double bytes;
    double from_s;
  };
  PathModel* const model_;
  const PathIndex path_;
  double now_ = 1;
  std::array<std::deque<Transfer>, 2> queue_;
  std::array<double, 2> done_{};
};

}  // namespace

TEST_CASE("PathModel.WorthAndSharesAreTheClosedForms") {
  // e = 1/max(1/r, 1/w, d(1/r+1/w)): 265 and 180 MB/s of 445 on the reference testbed.
  CHECK(PathWorth({345e6, 265e6, 0.5, 0}) == Approx(265e6));
  CHECK(PathWorth({180e6, 180e6, 0.5, 0}) == Approx(180e6));
  CHECK(PathWorth({345e6, 265e6, 1, 0}) == Approx(1 / (1 / 345e6 + 1 / 265e6)));
  CHECK(PathWorth({345e6, 265e6, 2, 0}) == Approx(0.5 / (1 / 345e6 + 1 / 265e6)));
  CHECK(PathWorth({0, 265e6, 0.5, 0}) == Approx(265e6));  // of the other direction nothing is known
  CHECK(PathWorth(PathParameters{}) == 0);
  const std::vector<double> shares = PathShares({{345e6, 265e6, 0.5, 0}, {180e6, 180e6, 0.5, 0}});
  CHECK(shares[0] == Approx(265.0 / 445));
  const std::vector<double> equal = PathShares({PathParameters{}, PathParameters{}, PathParameters{}});
  CHECK(equal[1] == Approx(1.0 / 3));
  // One that nothing is known of counts as the mean of the others.
  const std::vector<double> mixed = PathShares({{300, 300, 0.5, 0}, {100, 100, 0.5, 0}, PathParameters{}});
  CHECK(mixed[2] == Approx(1.0 / 3));
  // A budget of 8.64 TB a day is 100 MB/s.
  PathParameters worn = Known(345e6, 265e6, 0.5, true);
  worn.write_budget_bytes_per_s = 8.64e12 / 86400;
  CHECK(PathWorth(worn) == Approx(100e6));
}

TEST_CASE("PathModel.PoliciesShareByWhatTheySay") {
  // crossed: one reads fast, the other writes fast. Half duplex counts for worth only.
  std::vector<PathParameters> paths = {Known(337.5e6, 120e6, 0.5, true), Known(173e6, 343e6, 1, true)};
  const double worth = 1 / (1 / 173e6 + 1 / 343e6);
  CHECK(PathShares(paths, Policy::kAdaptive)[0] == Approx(120e6 / (120e6 + worth)));
  CHECK(PathShares(paths, Policy::kProportional)[0] == Approx(120.0 / 293));
  paths[0].weight = 3;
  CHECK(PathShares(paths, Policy::kRatio)[0] == Approx(0.75));
  // Fixed: what is learned moves only adaptive shares.
  for (const Policy policy : {Policy::kAdaptive, Policy::kProportional, Policy::kRatio}) {
    PathModel model = MakeModel({Known(345e6, 265e6, 0.5, true), Known(180e6, 180e6, 0.5, true)}, policy);
    const double before = model.share(0);
    Device device(&model, 0);
    device.factor = [](double) { return 0.5; };
    device.Run(15, 2, 2);
    CHECK(model.worth(0) == Approx(132.5e6).epsilon(0.03));
    CHECK((model.share(0) == before) == (policy != Policy::kAdaptive));
  }
}

TEST_CASE("PathModel.WhatAPathIsGrantedCapsItsWorthAndNothingElse") {
  PathModel model = MakeModel({Known(345e6, 265e6, 0.5, true), Known(180e6, 180e6, 0.5, true)});
  model.Grant(1, 60e6);
  CHECK(model.worth(1) == Approx(60e6));
  CHECK(model.seen_worth(1) == Approx(180e6));
  CHECK(model.share(1) == Approx(60.0 / 325));
  CHECK(model.path(1).read_bytes_per_s == 180e6);
  model.Grant(1, 60.6e6);  // within the dead band
  CHECK(model.worth(1) == Approx(60e6));
  // More than the path does is no more than it does.
  model.Grant(1, 1e9);
  CHECK(model.worth(1) == Approx(180e6));
  // It stays when the path's speeds are said anew, and is learned under.
  model.Grant(1, 60e6);
  model.SetPath(1, Known(90e6, 90e6, 0.5, true));
  CHECK(model.worth(1) == Approx(60e6));
  CHECK(model.seen_worth(1) == Approx(90e6));
  Device device(&model, 1);
  device.read = device.write = 45e6;
  device.Run(40, 3, 3);
  CHECK(model.seen_worth(1) == Approx(45e6).epsilon(0.05));
  CHECK(model.worth(1) == Approx(model.seen_worth(1)));
  model.Grant(1, 0);
  CHECK(model.share(1) == Approx(model.seen_worth(1) / (265e6 + model.seen_worth(1))));
}

TEST_CASE("PathModel.WhatIsAssumedGivesWayToWhatWasLearned") {
  PathModel model = MakeModel({Known(345e6, 265e6, 0.5, true), Known(180e6, 180e6, 0.5, true)});
  model.Assume(1, Known(90e6, 90e6, 0.5, true));
  CHECK(model.worth(1) == Approx(90e6));
  Device device(&model, 1);
  device.read = device.write = 45e6;
  device.Run(40, 3, 3);
  const double learned = model.worth(1);
  CHECK(learned == Approx(45e6).epsilon(0.05));
  model.Assume(1, Known(90e6, 90e6, 0.5, true));
  CHECK(model.worth(1) == learned);
}

TEST_CASE("PathModel.WhatOnePathCannotTakeGoesToTheOthers") {
  PathModel model = MakeModel({Known(300e6, 300e6, 0.5, true), Known(200e6, 200e6, 0.5, true),
                               Known(100e6, 100e6, 0.5, true), Known(1e6, 1e6, 0.5, true)});
  const double block = static_cast<double>(kBlockBytes);
  const double total = 602 * block;
  const auto targets = [&](std::vector<double> room) { return model.Targets(total, room); };
  std::vector<double> all = targets({kAnyRoom, kAnyRoom, kAnyRoom, kAnyRoom});
  // Three by worth; the slow one, far below 2 %, keeps two blocks to be seen by.
  CHECK(all[3] == Approx(2 * block));
  CHECK(all[0] == Approx(300 * block));
  CHECK(all[1] == Approx(200 * block));
  // The first is filled at 50; 550 among 200 and 100, and 300 of these are too much for the second.
  std::vector<double> filled = targets({50 * block, 300 * block, kAnyRoom, 0});
  CHECK(filled[0] == Approx(50 * block));
  CHECK(filled[1] == Approx(300 * block));
  CHECK(filled[2] == Approx(252 * block));
  CHECK(filled[3] == 0);
}

TEST_CASE("PathModel.BlocksInFlightFollowSpeedAndMeasurement") {
  PathParameters measured = Known(20e9, 20e9, 0.5, true);
  measured.read_depth_bytes = 32 * kBlockBytes;
  PathModel model({.block_bytes = kBlockBytes,
                   .buffers = 60,
                   .paths = {Known(180e6, 180e6, 0.5, true), Known(7e9, 4e9, 0.5, true), PathParameters{}, measured}});
  CHECK(model.QueueBlocks(0, Direction::kRead) == 3);
  CHECK(model.QueueBlocks(1, Direction::kRead) == 4);
  CHECK(model.QueueBlocks(1, Direction::kWrite) == 4);
  CHECK(model.QueueBlocks(2, Direction::kRead) == 4);
  CHECK(model.QueueBlocks(3, Direction::kRead) == 12);  // of 32: the pool's bound
  CHECK(model.path_blocks() == 12);
  PathModel set({.block_bytes = kBlockBytes, .buffers = 60, .queue_blocks = 7, .paths = {Known(1e6, 1e6, 1, true)}});
  CHECK(set.QueueBlocks(0, Direction::kWrite) == 7);
}

TEST_CASE("PathModel.ADirectionThatWaitsForTheOtherDoesNotSeemSlow") {
  for (const bool duplex_known : {true, false}) {
    PathModel model = MakeModel({Known(345e6, 265e6, 0.5, duplex_known)});
    Device device(&model, 0);
    device.Run(60, 2, 2, /*lead=*/4);  // reads wait for writes a quarter of the time
    CHECK(model.path(0).read_bytes_per_s == Approx(345e6).epsilon(0.03));
    CHECK(model.path(0).write_bytes_per_s == Approx(265e6).epsilon(0.03));
    CHECK(model.worth(0) == Approx(265e6).epsilon(0.03));
  }
}

TEST_CASE("PathModel.AHalvedPathIsKnownWithinTwoStepsAndARestoredOneToo") {
  struct Case {
    double read, write, duplex;
    bool known;
  };
  for (const Case& c : {Case{180e6, 180e6, 0.5, true}, Case{180e6, 180e6, 0.5, false}, Case{345e6, 265e6, 0.5, true},
                        Case{345e6, 265e6, 0.5, false}, Case{345e6, 265e6, 1, true}, Case{345e6, 265e6, 1, false},
                        Case{337e6, 120e6, 0.5, true}, Case{173e6, 343e6, 0.5, false}}) {
    INFO("read " << c.read << " write " << c.write << " d " << c.duplex << " known " << c.known);
    PathModel model = MakeModel({Known(c.read, c.write, c.duplex, c.known)});
    const double worth = PathWorth(Known(c.read, c.write, c.duplex, true));
    Device device(&model, 0);
    device.read = c.read;
    device.write = c.write;
    device.duplex = c.duplex;
    double speed = 1;
    device.factor = [&](double) { return speed; };
    device.Run(20, 2, 2, 4);
    CHECK(model.worth(0) == Approx(worth).epsilon(0.03));
    speed = 0.5;
    device.Run(20, 2, 2, 4);
    CHECK(model.worth(0) == Approx(worth / 2).epsilon(0.06));
    device.Run(20, 2, 2, 4);
    CHECK(model.worth(0) == Approx(worth / 2).epsilon(0.03));
    speed = 1;
    device.Run(10, 2, 2, 4);
    CHECK(model.worth(0) == Approx(worth).epsilon(c.duplex > 0.5 ? 0.11 : 0.06));
    device.Run(20, 2, 2, 4);
    CHECK(model.worth(0) == Approx(worth).epsilon(0.03));
  }
}

TEST_CASE("PathModel.LearnsAPathThatNothingIsKnownOf") {
  for (const double duplex : {0.5, 1.0, 1.5}) {
    INFO("d " << duplex);
    PathModel model = MakeModel({PathParameters{}});
    Device device(&model, 0);
    device.duplex = duplex;
    CHECK(model.path(0).origin == SpeedOrigin::kDefault);
    device.Run(3, 0, 2);  // registration writes
    CHECK(model.path(0).write_bytes_per_s == Approx(265e6).epsilon(0.02));
    CHECK(model.path(0).origin == SpeedOrigin::kLearned);
    device.Run(20, 2, 2, 4);
    const double before = device.read_bytes();
    device.Run(20, 2, 2, 4);
    const double moved = (device.read_bytes() - before) / 20;  // and written
    CHECK(model.worth(0) == Approx(moved).epsilon(0.05));      // what 16 s cannot tell from the path being ahead
    CHECK(moved == Approx(PathWorth(Known(345e6, 265e6, duplex, true))).epsilon(0.05));
    // And what it can alone does not make it forget the mix.
    device.Run(5, 2, 0);
    device.Run(5, 0, 2);
    CHECK(model.worth(0) == Approx(moved).epsilon(0.15));
  }
}

// A throttle, or a cache, that has saved up while nothing was asked of it gives a block at once.
TEST_CASE("PathModel.WhatAPathSavedUpInAPauseIsNotItsSpeed") {
  for (const bool limits : {false, true}) {
    PathModel model = MakeModel({Known(345e6, limits ? 690e6 : 265e6, 0.5, true)});
    int64_t now_ns = 1'000'000'000;
    const auto read = [&](int64_t pause_ns, int64_t takes_ns) {
      model.Started(0, Direction::kRead, now_ns += pause_ns);
      model.Ended(0, Direction::kRead, kBlockBytes, true, now_ns += takes_ns);
    };
    // 15 ms a block where 36 are needed; in all, what the path can do.
    for (int i = 0; i < 200; ++i) read(21'500'000, 15'000'000);
    // It is faster only if more speed is of use, and then more to do shows what is true.
    if (!limits) CHECK(model.path(0).read_bytes_per_s == 345e6);
    for (int i = 0; i < 200; ++i) read(0, 36'500'000);
    CHECK(model.path(0).read_bytes_per_s == Approx(345e6).epsilon(0.03));
    // Without pauses it is speed.
    for (int i = 0; i < 400; ++i) read(0, 15'000'000);
    CHECK(model.path(0).read_bytes_per_s == Approx(static_cast<double>(kBlockBytes) / 0.015).epsilon(0.05));
  }
}

TEST_CASE("PathModel.TooLittleInFlightRaisesAndNeverLowers") {
  // 20 GB/s with 20 ms of latency, as a parallel file system: one block at a time shows 600 MB/s.
  PathParameters pfs = Known(20e9, 20e9, 0.5, true);
  pfs.read_depth_bytes = pfs.write_depth_bytes = 32 * kBlockBytes;
  PathModel model({.seed = 1, .block_bytes = kBlockBytes, .buffers = 200, .paths = {pfs}});
  Device device(&model, 0);
  device.read = device.write = 20e9;
  device.latency_s = 0.02;
  device.Run(5, 1, 1);
  CHECK(model.worth(0) == 20e9);
  PathParameters slow = Known(100e6, 100e6, 0.5, true);
  slow.read_depth_bytes = slow.write_depth_bytes = 32 * kBlockBytes;
  PathModel raised({.seed = 1, .block_bytes = kBlockBytes, .buffers = 200, .paths = {slow}});
  Device faster(&raised, 0);
  faster.Run(20, 1, 1);
  CHECK(raised.worth(0) == Approx(265e6).epsilon(0.05));
}

// As one direction alone may not: both together fill what the path may have in flight.
TEST_CASE("PathModel.ADeepPathIsLearnedSlowerWhereBothDirectionsShareTheBuffers") {
  PathParameters pfs = Known(690e6, 530e6, 0.5, true);
  pfs.read_depth_bytes = pfs.write_depth_bytes = 32 * kBlockBytes;
  PathModel model({.seed = 1, .block_bytes = kBlockBytes, .buffers = 40, .paths = {pfs}});
  REQUIRE(model.path_blocks() == 20);
  Device device(&model, 0);
  SECTION("a block that ends is replaced at once") { device.Run(20, 10, 10); }
  // By the next look: the others in flight keep the path as busy meanwhile.
  SECTION("or a little later") { device.Run(20, 10, 10, /*lead=*/1e8); }
  CHECK(model.worth(0) == Approx(265e6).epsilon(0.05));
}

TEST_CASE("PathModel.NoiseWithinTheDeadBandMovesNothing") {
  PathModel model = MakeModel({Known(345e6, 265e6, 0.5, true), Known(180e6, 180e6, 0.5, true)});
  Device device(&model, 0);
  std::mt19937_64 random(3);
  std::uniform_real_distribution<double> noise(0.985, 1.015);
  device.factor = [&](double) { return noise(random); };
  device.Run(60, 2, 2);
  CHECK(model.path(0).read_bytes_per_s == 345e6);
  CHECK(model.path(0).write_bytes_per_s == 265e6);
  CHECK(model.share(0) == Approx(265.0 / 445));
}

TEST_CASE("PathModel.AStallNowAndThenDoesNotSwingTheShares") {
  // A tenth of the speed for half a second every five: 0.91 of it in the mean.
  PathModel model = MakeModel({Known(345e6, 265e6, 0.5, true), Known(180e6, 180e6, 0.5, true)});
  Device device(&model, 1);
  device.read = device.write = 180e6;
  device.factor = [](double now_s) { return std::fmod(now_s, 5) < 0.5 ? 0.1 : 1.0; };
  double lowest = 1, highest = 0, sum = 0;
  constexpr int kSeconds = 120;
  device.Run(20, 2, 2);
  for (int i = 0; i < kSeconds; ++i) {
    device.Run(1, 2, 2);
    lowest = std::min(lowest, model.share(1));
    highest = std::max(highest, model.share(1));
    sum += model.share(1);
  }
  const double fair = 0.91 * 180 / (0.91 * 180 + 265);
  CHECK(sum / kSeconds == Approx(fair).margin(0.02));
  CHECK(lowest > fair - 0.05);
  CHECK(highest < fair + 0.05);
}

// A throttle that gives too much and takes it back, or a device that tidies up: in the long run it is as fast as
// believed.
TEST_CASE("PathModel.WhatComesTooEarlyAndThenTooLateIsNotAnotherSpeed") {
  struct Case {
    double duplex, half_period_s;
    uint64_t depth_blocks;  // more than is in flight: nothing may lower a speed, but a burst could raise it
  };
  for (const Case& c : {Case{0.5, 0.15, 0}, Case{1, 0.8, 0}, Case{0.5, 0.15, 8}}) {
    INFO("d " << c.duplex << ", depth " << c.depth_blocks);
    PathParameters path = Known(345e6, 265e6, c.duplex, true);
    path.read_depth_bytes = path.write_depth_bytes = c.depth_blocks * kBlockBytes;
    PathModel model = MakeModel({path, Known(180e6, 180e6, 0.5, true)});
    Device device(&model, 0);
    device.duplex = c.duplex;
    device.factor = [&](double now_s) { return std::fmod(now_s, 2 * c.half_period_s) < c.half_period_s ? 1.5 : 0.5; };
    for (int i = 0; i < 60; ++i) {
      device.Run(1, 3, 3);
      REQUIRE(model.path(0).read_bytes_per_s == Approx(345e6).epsilon(0.05));
      REQUIRE(model.path(0).write_bytes_per_s == Approx(265e6).epsilon(0.05));
    }
  }
}

// A device that does one transfer after the other, of either direction.
TEST_CASE("PathModel.WhatADirectionWaitsForIsTheOthersWork") {
  const PathParameters half = Known(345e6, 265e6, 1, true);
  const auto ns = [](double bytes, double speed) { return static_cast<int64_t>(bytes / speed * 1e9); };
  const double block = static_cast<double>(kBlockBytes);
  PathModel model = MakeModel({half});
  int64_t now_ns = 1'000'000'000;
  const auto end = [&](Direction direction, double bytes) {
    now_ns += ns(bytes, direction == Direction::kRead ? 345e6 : 265e6);
    model.Ended(0, direction, static_cast<uint64_t>(bytes), true, now_ns);
  };
  const auto as_before = [&] {
    return model.path(0).read_bytes_per_s == Approx(345e6).epsilon(0.03) &&
           model.path(0).write_bytes_per_s == Approx(265e6).epsilon(0.03);
  };
  SECTION("for seconds") {  // as while a device tidies up
    for (int i = 0; i < 20; ++i) {
      model.Started(0, Direction::kRead, now_ns);
      for (int written = 0; written < 60; ++written) {
        model.Started(0, Direction::kWrite, now_ns);
        end(Direction::kWrite, block);
      }
      end(Direction::kRead, block);
      REQUIRE(as_before());
    }
  }
  SECTION("for parts of blocks") {
    model.Started(0, Direction::kRead, now_ns);
    model.Started(0, Direction::kWrite, now_ns);
    for (int i = 0; i < 2000; ++i) {
      const Direction direction = i % 2 == 0 ? Direction::kRead : Direction::kWrite;
      end(direction, direction == Direction::kRead ? block / 3 : block);
      model.Started(0, direction, now_ns);
      REQUIRE(as_before());
    }
  }
}

TEST_CASE("PathModel.OneDirectionThatIsSlowForAWhileDoesNotMakeAPathFullDuplex") {
  PathModel model = MakeModel({Known(200e6, 200e6, 1, false)});
  Device device(&model, 0);
  device.read = device.write = 200e6;
  device.duplex = 1;
  device.Run(20, 2, 2, 4);
  CHECK(model.worth(0) == Approx(100e6).epsilon(0.05));
  device.write = 40e6;  // a cache is full, and nothing but writes
  device.Run(30, 0, 2);
  device.write = 200e6;
  device.Run(40, 2, 2, 4);
  CHECK(model.worth(0) == Approx(100e6).epsilon(0.06));
  device.read = device.write = 100e6;  // and what both do is still what counts
  device.Run(20, 2, 2, 4);
  CHECK(model.worth(0) == Approx(50e6).epsilon(0.06));
}

TEST_CASE("PathModel.APathThatHungIsNotSlowButOneThatCrawlsIs") {
  PathModel model = MakeModel({Known(345e6, 265e6, 0.5, true), Known(180e6, 180e6, 0.5, true)});
  Device device(&model, 0);
  device.Run(3, 3, 3);
  for (const double hang_s : {6.0, 60.0}) {
    device.factor = [](double) { return 0.0; };
    device.Run(4.9, 3, 3);
    CHECK_FALSE(model.IsHanging(0, device.Ns()));
    device.Run(hang_s - 4.9, 3, 3);
    CHECK(model.IsHanging(0, device.Ns()));
    CHECK_FALSE(model.IsHanging(1, device.Ns()));
    device.factor = [](double) { return 1.0; };
    device.Run(3, 3, 3);
    CHECK_FALSE(model.IsHanging(0, device.Ns()));
    CHECK(model.path(0).read_bytes_per_s == Approx(345e6).epsilon(0.02));
    CHECK(model.path(0).write_bytes_per_s == Approx(265e6).epsilon(0.02));
  }
  device.factor = [](double) { return 0.007; };  // a block read takes 5.2 s, one written 6.8 s
  device.Run(300, 3, 3);
  CHECK(model.path(0).read_bytes_per_s < 5e6);
  CHECK(model.path(0).write_bytes_per_s < 5e6);
}

TEST_CASE("PathModel.LearningCanBeOff") {
  PathModel model(
      {.learn = false, .block_bytes = kBlockBytes, .buffers = 64, .paths = {Known(345e6, 265e6, 0.5, true)}});
  Device device(&model, 0);
  device.factor = [](double) { return 0.5; };
  device.Run(20, 2, 2);
  CHECK(model.worth(0) == Approx(265e6));
}

TEST_CASE("PathModel.SmallTransfersAndFailuresTeachNothing") {
  PathModel model = MakeModel({Known(345e6, 265e6, 0.5, true)});
  int64_t now_ns = 1;
  for (int i = 0; i < 1000; ++i) {
    for (const bool fails : {false, true}) {
      model.Started(0, Direction::kRead, now_ns);
      now_ns += 20'000'000;
      model.Ended(0, Direction::kRead, fails ? kBlockBytes : 65536, !fails, now_ns);
    }
  }
  CHECK(model.path(0).read_bytes_per_s == 345e6);
}

TEST_CASE("PathModel.ATrainerThatStopsTeachesNothing") {
  PathModel model = MakeModel({Known(345e6, 265e6, 0.5, true)});
  Device device(&model, 0);
  for (int i = 0; i < 20; ++i) {
    device.Run(0.7, 2, 2);
    device.Run(0.5, 0, 0);  // what is in flight ends
    device.Pause(30);
  }
  CHECK(model.worth(0) == Approx(265e6).epsilon(0.03));
}
