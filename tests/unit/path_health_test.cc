// A path's states: each failure by its kind, and healing by probes alone. The random walk compares with a second
// statement of the rules that looks at the whole history instead of keeping a state.
#include "daemon/scheduler/path_health.h"

#include <cerrno>
#include <random>
#include <string>
#include <vector>

#include "tests/support/catch.h"

using namespace mlpo;

namespace {

constexpr int64_t kSecond = 1'000'000'000;

std::string StateOf(const PathHealth& health) { return Name(health.state()); }

// The probe that is due, at its time.
void Probe(PathHealth& health, int error) {
  const int64_t due_ns = health.probe_ns();
  REQUIRE(due_ns != PathHealth::kNever);
  health.ProbeBegins();
  health.ProbeEnds(error, due_ns);
}

}  // namespace

TEST_CASE("PathHealth.EachFailureHasItsStateAndItsPause") {
  struct Case {
    int error;
    const char* state;
    int64_t pause_s;
    uint64_t rewrite_end;
  };
  constexpr uint64_t kAnywhere = PathHealth::kAnywhere;
  for (const Case& c : {Case{EIO, "suspect", 1, 0}, Case{ENODEV, "suspect", 1, 0}, Case{ESTALE, "suspect", 1, 0},
                        Case{ENOSPC, "full", 1, kAnywhere}, Case{EDQUOT, "full", 1, kAnywhere},
                        Case{EFBIG, "full", 1, 4095}, Case{EROFS, "read_only", 5, 0}}) {
    CAPTURE(c.error);
    PathHealth health;
    CHECK(StateOf(health) == "healthy");
    CHECK((health.MayWrite() && health.rewrite_end() == PathHealth::kAnywhere && !health.ailing()));
    CHECK(health.probe_ns() == PathHealth::kNever);
    health.WriteFailed(c.error, 4096, false, 100 * kSecond);
    CHECK(StateOf(health) == c.state);
    CHECK(health.error() == c.error);
    CHECK(health.since_ns() == 100 * kSecond);
    CHECK_FALSE(health.MayWrite());
    CHECK(health.rewrite_end() == c.rewrite_end);
    CHECK_FALSE(health.unreadable());
    CHECK(health.probe_ns() == (100 + c.pause_s) * kSecond);
    Probe(health, 0);
    CHECK(StateOf(health) == "healthy");
    CHECK((health.MayWrite() && health.error() == 0 && !health.ailing()));
  }
}

TEST_CASE("PathHealth.TheThirdFailureInARowIsQuarantineAndPausesGrow") {
  PathHealth health;
  health.WriteFailed(EIO, 0, false, 0);
  int64_t now_ns = 0;
  const std::vector<int64_t> pauses_s = {1, 2, 4, 8, 16, 32, 60, 60, 60};
  for (size_t failed = 0; failed < pauses_s.size(); ++failed) {
    CAPTURE(failed);
    CHECK(StateOf(health) == (failed < 2 ? "suspect" : "quarantined"));
    CHECK(health.probe_ns() == now_ns + pauses_s[failed] * kSecond);
    now_ns = health.probe_ns();
    health.ProbeBegins();
    CHECK(StateOf(health) == "probing");
    CHECK(health.probe_ns() == PathHealth::kNever);
    health.ProbeEnds(EIO, now_ns);
  }
  CHECK(health.probes() == pauses_s.size());
  CHECK(health.failed_probes() == pauses_s.size());
}

TEST_CASE("PathHealth.WhatSomebodyWaitsForIsProbedSooner") {
  PathHealth health;
  CHECK(health.probe_ns(/*urgent=*/true) == PathHealth::kNever);
  health.WriteFailed(EIO, 0, false, 0);
  CHECK(health.probe_ns(true) == kSecond);  // that is sooner still
  for (int i = 0; i < 6; ++i) Probe(health, EIO);
  const int64_t last_ns = (1 + 2 + 4 + 8 + 16 + 32) * kSecond;
  CHECK(health.probe_ns() == last_ns + 60 * kSecond);
  CHECK(health.probe_ns(true) == last_ns + 2 * kSecond);
  health.ProbeBegins();
  CHECK(health.probe_ns(true) == PathHealth::kNever);
}

TEST_CASE("PathHealth.ARowOfFailuresIsOverAfterAMinuteOfHealth") {
  for (const bool soon : {true, false}) {
    PathHealth health;
    health.WriteFailed(EIO, 0, false, 0);
    Probe(health, EIO);
    Probe(health, 0);
    const int64_t well_ns = health.since_ns();
    health.WriteFailed(EIO, 0, false, well_ns + (soon ? 59 : 60) * kSecond);
    CHECK(StateOf(health) == (soon ? "quarantined" : "suspect"));
  }
}

TEST_CASE("PathHealth.TransfersThatFailTogetherAreOneFailure") {
  PathHealth health;
  for (int i = 0; i < 20; ++i) health.WriteFailed(EIO, 0, false, i);
  CHECK(StateOf(health) == "suspect");
  CHECK(health.probe_ns() == kSecond);
}

TEST_CASE("PathHealth.WhatCannotBeReadIsUnreadableUntilAProbeIsGood") {
  PathHealth health;
  health.ReadFailed(EIO, 0);
  CHECK((health.unreadable() && !health.MayWrite() && health.rewrite_end() == 0));
  CHECK(StateOf(health) == "suspect");
  Probe(health, ENOSPC);  // that there is no room either does not make it readable
  CHECK((health.unreadable() && StateOf(health) == "suspect"));
  Probe(health, EROFS);
  CHECK((health.unreadable() && StateOf(health) == "quarantined"));
  Probe(health, 0);
  CHECK((!health.unreadable() && health.MayWrite()));
}

TEST_CASE("PathHealth.AProbeSaysWhatIsWrongNow") {
  PathHealth health;
  health.WriteFailed(ENOSPC, 4096, false, 0);
  Probe(health, EIO);
  CHECK(StateOf(health) == "suspect");
  CHECK(health.error() == EIO);
  Probe(health, EROFS);
  CHECK(StateOf(health) == "read_only");
  Probe(health, ENOSPC);
  CHECK(StateOf(health) == "full");
  Probe(health, 0);
  CHECK(StateOf(health) == "healthy");
}

TEST_CASE("PathHealth.AFullPathIsRewrittenUntilThatFailsToo") {
  PathHealth health;
  health.WriteFailed(ENOSPC, 8192, false, 0);
  CHECK((health.write_end() == 0 && health.rewrite_end() == PathHealth::kAnywhere));
  health.WriteFailed(ENOSPC, 4096, true, 1);
  CHECK(health.rewrite_end() == 0);
  CHECK(StateOf(health) == "full");
  Probe(health, ENOSPC);
  CHECK(health.rewrite_end() == 0);
  Probe(health, 0);
  health.WriteFailed(ENOSPC, 8192, false, 10 * kSecond);
  CHECK(health.rewrite_end() == PathHealth::kAnywhere);
}

// A limit of a file's length says nothing of what ends before it.
TEST_CASE("PathHealth.WhereFilesMayNotBeSoLongTheirBeginningIsWritten") {
  PathHealth health;
  CHECK(health.write_end() == PathHealth::kAnywhere);
  health.WriteFailed(EFBIG, 9000, false, 0);
  CHECK((health.write_end() == 8999 && health.rewrite_end() == 8999));
  health.WriteFailed(EFBIG, 5000, true, 1);
  health.WriteFailed(EFBIG, 7000, true, 2);
  CHECK((health.write_end() == 4999 && health.rewrite_end() == 4999));
  Probe(health, EFBIG);
  CHECK((health.write_end() == 4999 && health.rewrite_end() == 4999));
  health.WriteFailed(ENOSPC, 4000, false, 3 * kSecond);  // nor is there room
  CHECK((health.write_end() == 0 && health.rewrite_end() == 4999));
  health.WriteFailed(EDQUOT, 4000, true, 3 * kSecond);
  CHECK((health.write_end() == 0 && health.rewrite_end() == 0));
  Probe(health, 0);
  CHECK((health.write_end() == PathHealth::kAnywhere && health.rewrite_end() == PathHealth::kAnywhere));
  // Where the limit is said by a probe alone, nobody knows where it is.
  health.WriteFailed(EIO, 4096, false, 10 * kSecond);
  Probe(health, EFBIG);
  CHECK(StateOf(health) == "full");
  CHECK((health.write_end() == 0 && health.rewrite_end() == PathHealth::kAnywhere));
}

TEST_CASE("PathHealth.TheProbeEndsWhereTheFirstWriteDidNotFit") {
  PathHealth health;
  CHECK(health.probe_end() == 0);
  health.WriteFailed(EFBIG, 9000, false, 0);
  health.WriteFailed(EFBIG, 5000, false, 0);
  health.WriteFailed(EFBIG, 7000, false, 0);
  CHECK(health.probe_end() == 5000);
  Probe(health, EFBIG);
  CHECK(health.probe_end() == 5000);
  Probe(health, 0);
  CHECK(health.probe_end() == 0);
}

TEST_CASE("PathHealth.AFailureDuringAProbeMakesItsAnswerOld") {
  PathHealth health;
  health.WriteFailed(EIO, 0, false, 0);
  health.ProbeBegins();
  health.ReadFailed(EIO, kSecond);
  health.ProbeEnds(0, 2 * kSecond);
  CHECK(health.unreadable());
  CHECK_FALSE(health.MayWrite());
  CHECK(health.probe_ns() == 3 * kSecond);
  Probe(health, 0);
  CHECK(StateOf(health) == "healthy");
}

TEST_CASE("PathHealth.DisabledGoesOverAllAndEnablingProbes") {
  for (const int before : {0, EIO, ENOSPC, EROFS}) {
    CAPTURE(before);
    PathHealth health;
    if (before != 0) health.WriteFailed(before, 4096, false, 0);
    health.Disable(kSecond);
    CHECK(StateOf(health) == "disabled");
    CHECK((!health.MayWrite() && health.write_end() == 0 && health.rewrite_end() == 0 && !health.ailing()));
    CHECK(health.probe_ns() == PathHealth::kNever);
    health.ReadFailed(EIO, 2 * kSecond);  // it is still read
    CHECK(StateOf(health) == "disabled");
    CHECK(health.unreadable());
    health.Enable(3 * kSecond);
    CHECK_FALSE(health.MayWrite());
    CHECK(health.probe_ns() == 3 * kSecond);
    Probe(health, 0);
    CHECK(StateOf(health) == "healthy");
    CHECK_FALSE(health.unreadable());
  }
}

TEST_CASE("PathHealth.DisabledWhileProbed") {
  PathHealth health;
  health.WriteFailed(EIO, 0, false, 0);
  health.ProbeBegins();
  health.Disable(kSecond);
  health.ProbeEnds(0, 2 * kSecond);
  CHECK(StateOf(health) == "disabled");
  health.Enable(3 * kSecond);
  CHECK_FALSE(health.MayWrite());  // that probe was of before
  Probe(health, 0);
  CHECK(health.MayWrite());
}

TEST_CASE("PathHealth.OneThatHungForLongIsProbedFirst") {
  PathHealth health;
  health.Returned(kSecond);
  CHECK(StateOf(health) == "probing");
  CHECK(health.error() == ETIMEDOUT);
  CHECK_FALSE(health.MayWrite());
  CHECK(health.probe_ns() == kSecond);
  Probe(health, 0);
  CHECK(health.MayWrite());
}

// Whatever comes in whatever order: it is written to only if the last probe was good and began after the last failure
// and the last command; a probe is due whenever it is neither healthy nor disabled nor being probed.
TEST_CASE("PathHealth.RandomWalk") {
  constexpr int kErrors[] = {EIO, ENOSPC, EDQUOT, EFBIG, EROFS, ENODEV};
  for (uint64_t seed = 1; seed <= 2000; ++seed) {
    CAPTURE(seed);
    std::mt19937_64 random(seed);
    PathHealth health;
    int64_t now_ns = 1;
    // The history: the number of the event at which each thing last happened.
    int events = 0, failed = 0, failed_read = 0, enabled = 0, probe_began = 0, good = 0;
    bool disabled = false, probing = false;
    for (int i = 0; i < 60; ++i) {
      now_ns += static_cast<int64_t>(random() % (20 * kSecond));
      ++events;
      switch (random() % 7) {
        case 0:
          health.WriteFailed(kErrors[random() % 6], 4096 * (1 + random() % 9), random() % 2 == 0, now_ns);
          failed = events;
          break;
        case 1:
          health.ReadFailed(EIO, now_ns);
          failed = failed_read = events;
          break;
        case 2:
          health.Disable(now_ns);
          disabled = true;
          break;
        case 3:
          health.Enable(now_ns);
          disabled = false;
          enabled = events;
          break;
        default:
          if (probing) {
            const int error = random() % 2 == 0 ? 0 : kErrors[random() % 6];
            health.ProbeEnds(error, now_ns);
            probing = false;
            if (error == 0 && !disabled && probe_began > failed && probe_began > enabled) good = probe_began;
          } else if (now_ns >= health.probe_ns()) {
            health.ProbeBegins();
            probing = true;
            probe_began = events;
          }
      }
      const bool well = good >= failed && good >= enabled;
      REQUIRE(health.MayWrite() == (well && !disabled));
      REQUIRE(health.ailing() == (!well && !disabled));
      REQUIRE(health.unreadable() == (failed_read > good));
      REQUIRE((health.probe_ns() != PathHealth::kNever) == (!well && !disabled && !probing));
      if (health.probe_ns() != PathHealth::kNever) REQUIRE(health.probe_ns() <= now_ns + 60 * kSecond);
      REQUIRE((StateOf(health) == "disabled") == disabled);
      REQUIRE((StateOf(health) == "healthy") == (well && !disabled));
      REQUIRE((health.error() == 0 || !well));
      REQUIRE(health.write_end() <= health.rewrite_end());
      if (StateOf(health) != "healthy" && StateOf(health) != "full") REQUIRE(health.rewrite_end() == 0);
    }
  }
}
