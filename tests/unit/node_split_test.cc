// What nodes take of a shared path: against the closed form, a search by bisection, and what a device does that serves
// all who ask alike.
#include "daemon/scheduler/node_split.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "tests/support/catch.h"

using namespace mlpo;

namespace {

double StepS(const NodeFigures& node, double bytes_per_s) {
  return node.step_bytes / (node.others_bytes_per_s + bytes_per_s);
}

// The shortest step of the slowest node, by bisection: is B enough for all to be done in that time?
double ShortestStepS(const std::vector<NodeFigures>& nodes, double total_bytes_per_s) {
  double low = 0, high = 1e9;
  for (int i = 0; i < 200; ++i) {
    const double step_s = (low + high) / 2;
    double needed = 0;
    for (const NodeFigures& node : nodes) needed += std::max(0.0, node.step_bytes / step_s - node.others_bytes_per_s);
    (needed > total_bytes_per_s ? low : high) = step_s;
  }
  return high;
}

// A step of nodes that share a path which serves those who use it alike, each with its own paths beside it and so much
// of its bytes on the shared one: until when each used it, and what it got meanwhile.
std::vector<NodeFigures> Seen(std::vector<NodeFigures> nodes, double total_bytes_per_s,
                              const std::vector<double>& placed_bytes) {
  std::vector<double> left = placed_bytes;
  double now_s = 0;
  for (;;) {
    size_t users = 0;
    double next_s = 1e18;
    for (const double bytes : left) users += bytes > 0;
    if (users == 0) break;
    const double each = total_bytes_per_s / static_cast<double>(users);
    for (const double bytes : left) {
      if (bytes > 0) next_s = std::min(next_s, bytes / each);
    }
    now_s += next_s;
    for (size_t i = 0; i < left.size(); ++i) {
      if (left[i] <= 0) continue;
      left[i] = left[i] - each * next_s < 1 ? 0 : left[i] - each * next_s;
      if (left[i] == 0) {
        nodes[i].busy_s = now_s;
        nodes[i].seen_bytes_per_s = placed_bytes[i] / now_s;
      }
    }
  }
  return nodes;
}

}  // namespace

TEST_CASE("NodeSplit.EqualNodesTakeEqualParts") {
  for (const size_t count : {1u, 2u, 3u, 4u, 1000u}) {
    const std::vector<NodeFigures> nodes(count, NodeFigures{3.6e9 / static_cast<double>(count), 10, 5.3e9, 4e11});
    const PathSplit split = SplitPath(nodes);
    CHECK(split.total_bytes_per_s == Approx(3.6e9));
    REQUIRE(split.bytes_per_s.size() == count);
    for (const double part : split.bytes_per_s) CHECK(part == Approx(3.6e9 / static_cast<double>(count)));
  }
}

TEST_CASE("NodeSplit.TheNodeWithSlowPathsOfItsOwnTakesMore") {
  // 265 and 100 MB/s of their own, 180 shared: (2 S) / (265 + 100 + 180) is the step, 7.5 and 172.5 are the parts.
  const PathSplit split = SplitPath({{90e6, 4, 265e6, 288e6}, {90e6, 4, 100e6, 288e6}});
  REQUIRE(split.bytes_per_s.size() == 2);
  CHECK(split.bytes_per_s[0] == Approx(7.5e6));
  CHECK(split.bytes_per_s[1] == Approx(172.5e6));
}

TEST_CASE("NodeSplit.NoOtherSplitIsFaster") {
  std::mt19937_64 random(7);
  const auto draw = [&](double least, double most) {
    return std::exp(std::uniform_real_distribution<double>(std::log(least), std::log(most))(random));
  };
  int left_out = 0;
  for (int round = 0; round < 2000; ++round) {
    std::vector<NodeFigures> nodes(1 + random() % 8);
    for (NodeFigures& node : nodes) {
      node = {draw(1e8, 1e10), draw(0.1, 100), random() % 4 == 0 ? 0 : draw(1e8, 1e11), draw(1e9, 1e12)};
      if (random() % 8 == 0) node.step_bytes = 0;
    }
    const PathSplit split = SplitPath(nodes);
    const bool any = std::any_of(nodes.begin(), nodes.end(), [](const NodeFigures& n) { return n.step_bytes > 0; });
    REQUIRE(split.bytes_per_s.size() == (any ? nodes.size() : 0));
    if (!any) continue;
    const double best_s = ShortestStepS(nodes, split.total_bytes_per_s);
    const double least = 0.02 * split.total_bytes_per_s / static_cast<double>(nodes.size());
    double taken = 0;
    for (size_t i = 0; i < nodes.size(); ++i) {
      CHECK(split.bytes_per_s[i] >= least);
      if (nodes[i].step_bytes > 0) CHECK(StepS(nodes[i], split.bytes_per_s[i]) <= best_s * (1 + 1e-6));
      if (split.bytes_per_s[i] > least) taken += split.bytes_per_s[i];
      left_out += split.bytes_per_s[i] <= least;
    }
    CHECK(taken <= split.total_bytes_per_s * (1 + 1e-6));
  }
  CHECK(left_out > 100);  // or the test has not been where that matters
}

TEST_CASE("NodeSplit.WhatNodesSeeOfAFairDeviceAddsUpToWhatItDoes") {
  // Whatever they place there: one that is done early leaves the device to the other, which sees that.
  const std::vector<NodeFigures> nodes = {{0, 0, 265e6, 288e6}, {0, 0, 100e6, 288e6}, {0, 0, 50e6, 500e6}};
  for (const std::vector<double>& placed :
       {std::vector<double>{100e6, 100e6, 100e6}, {8e6, 172e6, 250e6}, {250e6, 3e6, 90e6}, {1e6, 1e6, 250e6}}) {
    const PathSplit split = SplitPath(Seen(nodes, 180e6, placed));
    CHECK(split.total_bytes_per_s == Approx(180e6).epsilon(1e-3));
  }
}

TEST_CASE("NodeSplit.FiguresThatSayNothingGiveNothing") {
  CHECK(SplitPath({}).bytes_per_s.empty());
  CHECK(SplitPath({{1e9, 0, 1e9, 1e9}, {1e9, 0, 1e9, 1e9}}).bytes_per_s.empty());  // nobody has used it
  CHECK(SplitPath({{1e9, 1, 1e9, 1e9}, {0, 1, 1e9, 1e9}}).bytes_per_s.empty());    // one has not learned what it does
  CHECK(SplitPath({{1e9, 1, 1e9, 0}, {1e9, 1, 1e9, 0}}).bytes_per_s.empty());      // all is in memory
  // One that has not used it, and wants to.
  const PathSplit split = SplitPath({{1e9, 1, 1e9, 1e9}, {0, 0, 0, 1e9}});
  REQUIRE(split.bytes_per_s.size() == 2);
  CHECK(split.bytes_per_s[0] == Approx(0.01e9));  // 2 % of an equal part
  CHECK(split.bytes_per_s[1] == Approx(1e9));
}
