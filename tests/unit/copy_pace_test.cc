// How fast copies of a checkpoint go, in virtual time.
#include <cstdint>

#include "daemon/scheduler/copy_pace.h"
#include "tests/support/catch.h"

namespace mlpo::test {
namespace {

constexpr uint64_t kBlock = 12 << 20;
constexpr int64_t kMs = 1'000'000;
constexpr int64_t kS = 1'000 * kMs;

}  // namespace

TEST_CASE("CopyPace.PressedOnAllSidesItGetsItsShareOfTheTarget") {
  // A target of 265 MB/s, of which 5 % are 13.25 MB/s: in 1000 s 13.25 GB, give or take two blocks.
  CopyPace pace({0.05, 265e6, 2 * kBlock}, 0);
  uint64_t copied = 0;
  for (int64_t now = 0; now < 1000 * kS; now += 7 * kMs) {
    if (!pace.MayPress(kBlock, now)) continue;
    pace.Begun(kBlock, now);
    copied += kBlock;
  }
  CHECK(copied <= 13'250'000'000 + 2 * kBlock);
  CHECK(copied >= 13'250'000'000 - 2 * kBlock);
  CHECK(pace.BoundSeconds(13'250'000'000) == Approx(1000));
}

TEST_CASE("CopyPace.NothingIsSavedUpBeyondTwoBlocks") {
  CopyPace pace({0.05, 265e6, 2 * kBlock}, 0);
  const int64_t late = 3600 * kS;
  int begun = 0;
  while (pace.MayPress(kBlock, late)) {
    pace.Begun(kBlock, late);
    ++begun;
  }
  CHECK(begun == 2);
}

TEST_CASE("CopyPace.CopiesThatNobodyMindedMakeNoDebt") {
  CopyPace pace({0.05, 240e6, 2 * kBlock}, 0);  // 12 MB/s: a block in a little more than a second
  for (int i = 0; i < 100; ++i) pace.Begun(kBlock, i * kMs);
  CHECK(!pace.MayPress(kBlock, 100 * kMs));
  const int64_t due = pace.PressNs(kBlock, 100 * kMs);
  CHECK(due < 2 * kS);
  CHECK(!pace.MayPress(kBlock, due - 2 * kMs));
  CHECK(pace.MayPress(kBlock, due));
}

TEST_CASE("CopyPace.ABlockLargerThanWhatIsSavedUpStillGoes") {
  CopyPace pace({0.05, 100e6, kBlock}, 0);
  CHECK(!pace.MayPress(10 * kBlock, kS));
  CHECK(pace.MayPress(10 * kBlock, 10 * kS));
}

TEST_CASE("CopyPace.AnUnknownTargetIsLearned") {
  CopyPace pace({0.05, 0, 2 * kBlock}, 0);
  // Two writes at a time, each of a block in 0.1 s.
  for (int i = 0; i < 30; ++i) pace.Ended(kBlock, 100 * kMs, 2);
  CHECK(pace.write_bytes_per_s() == Approx(2 * 10 * kBlock).epsilon(0.01));
  for (int i = 0; i < 60; ++i) pace.Ended(kBlock, 3600 * kS, 1);
  CHECK(pace.write_bytes_per_s() == Approx(1e6));
  CHECK(pace.BoundSeconds(1'000'000) == Approx(20));
  CopyPace known({0.05, 100e6, 2 * kBlock}, 0);
  known.Ended(kBlock, kMs, 1);
  CHECK(known.write_bytes_per_s() == 100e6);
}

}  // namespace mlpo::test
