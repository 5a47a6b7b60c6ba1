#include "daemon/scheduler/path_health.h"

#include <algorithm>
#include <cerrno>

#include "daemon/base/check.h"
#include "daemon/base/clock.h"

namespace mlpo {
namespace {

constexpr int64_t kSpacePauseNs = kNsPerS;         // somebody may delete a file at any time
constexpr int64_t kReadOnlyPauseNs = 5 * kNsPerS;  // an administrator has to act
constexpr uint32_t kLongestPauseS = 60;

}  // namespace

const char* Name(PathHealth::State state) {
  switch (state) {
    case PathHealth::State::kHealthy:
      return "healthy";
    case PathHealth::State::kSuspect:
      return "suspect";
    case PathHealth::State::kQuarantined:
      return "quarantined";
    case PathHealth::State::kProbing:
      return "probing";
    case PathHealth::State::kFull:
      return "full";
    case PathHealth::State::kReadOnly:
      return "read_only";
    case PathHealth::State::kDisabled:
      break;
  }
  return "disabled";
}

PathHealth::Cause PathHealth::CauseOf(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
      return Cause::kSpace;
    case EROFS:
      return Cause::kReadOnly;
    default:
      return Cause::kDevice;
  }
}

PathHealth::State PathHealth::state() const {
  if (disabled_) return State::kDisabled;
  switch (cause_) {
    case Cause::kWell:
      return State::kHealthy;
    case Cause::kUnproven:
      return State::kProbing;
    case Cause::kSpace:
      return State::kFull;
    case Cause::kReadOnly:
      return State::kReadOnly;
    case Cause::kDevice:
      break;
  }
  if (probing_) return State::kProbing;
  return failures_ < kQuarantineAfter ? State::kSuspect : State::kQuarantined;
}

void PathHealth::SetProbe(int64_t now_ns) {
  tried_ns_ = now_ns;
  switch (cause_) {
    case Cause::kWell:
      probe_ns_ = kNever;
      return;
    case Cause::kUnproven:
      probe_ns_ = now_ns;
      return;
    case Cause::kSpace:
      probe_ns_ = now_ns + kSpacePauseNs;
      return;
    case Cause::kReadOnly:
      probe_ns_ = now_ns + kReadOnlyPauseNs;
      return;
    case Cause::kDevice:
      break;
  }
  const uint32_t doubled = std::min(failures_ - 1, 6u);
  probe_ns_ = now_ns + std::min(kLongestPauseS, 1u << doubled) * kNsPerS;
}

// Several transfers that were in flight together fail for one reason: that is one failure.
void PathHealth::Fail(Cause cause, int error, int64_t now_ns) {
  failed_meanwhile_ = true;
  if (cause <= cause_) return;
  if (cause_ == Cause::kWell && now_ns - healthy_ns_ >= kForgetNs) failures_ = 0;
  if (cause == Cause::kDevice) ++failures_;
  cause_ = cause;
  error_ = error;
  since_ns_ = now_ns;
  SetProbe(now_ns);
}

void PathHealth::WriteFailed(int error, uint64_t end, bool rewrite, int64_t now_ns) {
  const Cause cause = CauseOf(error);
  if (cause == Cause::kSpace) {
    if (error == EFBIG) {
      write_end_ = std::min(write_end_, end - 1);
      rewrite_end_ = std::min(rewrite_end_, end - 1);
    } else {
      write_end_ = 0;
      if (rewrite) rewrite_end_ = 0;  // there is no room even for what has its place
    }
    // The nearest end that did not fit: if that fits, something has come free.
    probe_end_ = probe_end_ == 0 ? end : std::min(probe_end_, end);
  }
  Fail(cause, error, now_ns);
}

void PathHealth::ReadFailed(int error, int64_t now_ns) {
  unreadable_ = true;
  Fail(Cause::kDevice, error, now_ns);
}

void PathHealth::Returned(int64_t now_ns) { Fail(Cause::kUnproven, ETIMEDOUT, now_ns); }

void PathHealth::Disable(int64_t now_ns) {
  if (disabled_) return;
  disabled_ = true;
  since_ns_ = now_ns;
}

void PathHealth::Enable(int64_t now_ns) {
  disabled_ = false;
  failed_meanwhile_ = true;  // a probe that is under way began before what was done about the path
  if (cause_ == Cause::kWell) {
    cause_ = Cause::kUnproven;
    error_ = 0;
  }
  since_ns_ = now_ns;
  probe_ns_ = now_ns;
}

void PathHealth::ProbeBegins() {
  MLPO_CHECK(!probing_);
  probing_ = true;
  failed_meanwhile_ = false;
  ++probes_;
}

void PathHealth::ProbeEnds(int error, int64_t now_ns) {
  MLPO_CHECK(probing_);
  probing_ = false;
  failed_probes_ += error != 0;
  if (disabled_ || cause_ == Cause::kWell) return;
  if (error == 0 && !failed_meanwhile_) {
    cause_ = Cause::kWell;
    error_ = 0;
    unreadable_ = false;
    write_end_ = rewrite_end_ = kAnywhere;
    probe_end_ = 0;
    healthy_ns_ = since_ns_ = now_ns;
  } else if (error != 0) {
    // It says what is wrong now; but what could not be read is not well before it can be.
    const Cause cause = unreadable_ ? Cause::kDevice : CauseOf(error);
    if (cause == Cause::kDevice) ++failures_;
    if (cause != cause_) since_ns_ = now_ns;
    if (cause != Cause::kSpace) probe_end_ = 0;
    if (error != EFBIG || write_end_ == kAnywhere) write_end_ = 0;
    cause_ = cause;
    error_ = error;
  }
  SetProbe(now_ns);
}

}  // namespace mlpo
