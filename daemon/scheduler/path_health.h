// PathHealth: whether a path may be written to, and when it is to be probed, from what came of its transfers and
// probes.
//
//     healthy --error of the device--> suspect --third in a row--> quarantined
//             --no room--------------> full
//             --EROFS----------------> read_only
//     each of them --probe is due--> probing (full and read_only keep their names) --good--> healthy
//     disabled: by command, over all others
//
// Only a probe heals: it writes a block of its own and reads it back. What a transfer that was in flight already comes
// to says nothing, and a device that takes writes and loses them would look well. Reads are never refused here: what is
// there and asked for is tried.
//
// A path that is full may have the extents rewritten that were written before, until one of them fails, too. Where
// files may only not be so long (EFBIG: a limit of the process or the file system), what ends before is written as
// ever.
//
// Owner: the data thread. Time is an argument, monotonic, in ns.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

namespace mlpo {

class PathHealth {
 public:
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
  static constexpr uint64_t kAnywhere = std::numeric_limits<uint64_t>::max();
  static constexpr int64_t kForgetNs = 60'000'000'000;  // so long well: the row of failures is over
  static constexpr uint32_t kQuarantineAfter = 3;       // failures in a row
  static constexpr int64_t kUrgentNs = 2'000'000'000;   // between probes that somebody waits for

  enum class State : uint8_t { kHealthy, kSuspect, kQuarantined, kProbing, kFull, kReadOnly, kDisabled };

  // A write has failed. `end`: of its bytes in the file. `rewrite`: of an extent that had been written before.
  void WriteFailed(int error, uint64_t end, bool rewrite, int64_t now_ns);
  // A read has failed, or what it gave was wrong.
  void ReadFailed(int error, int64_t now_ns);
  // It moves again after it has hung for long: nobody knows what became of what it had.
  void Returned(int64_t now_ns);
  void Disable(int64_t now_ns);
  // Probed before it is used, whatever it was.
  void Enable(int64_t now_ns);

  State state() const;
  // Anything, anywhere.
  bool MayWrite() const { return cause_ == Cause::kWell && !disabled_; }
  // What ends here in its file, or before; 0: nothing.
  uint64_t write_end() const { return MayWrite() ? kAnywhere : full() && !disabled_ ? write_end_ : 0; }
  // The same where something was written before: never less.
  uint64_t rewrite_end() const { return MayWrite() ? kAnywhere : full() && !disabled_ ? rewrite_end_ : 0; }
  // What it holds may not be had again: what is in memory of it is to be kept there until it is elsewhere.
  bool unreadable() const { return unreadable_; }
  bool disabled() const { return disabled_; }
  // Neither healthy nor disabled: something is to come of it by itself.
  bool ailing() const { return cause_ != Cause::kWell && !disabled_; }
  bool full() const { return cause_ == Cause::kSpace; }
  // Something is wrong with the device, or may be, rather than that there is no room on it.
  bool doubtful() const { return cause_ == Cause::kDevice || cause_ == Cause::kUnproven; }
  // Nothing has failed: only the probe is still to come.
  bool unproven() const { return cause_ == Cause::kUnproven; }
  int error() const { return error_; }            // errno of the last failure, 0 while it is healthy
  int64_t since_ns() const { return since_ns_; }  // when the state became what it is, but for probes; 0: the start

  // When the next probe is due; kNever while one is under way, or none is to come. `urgent`: nothing can go on without.
  int64_t probe_ns(bool urgent = false) const {
    if (probing_ || !ailing()) return kNever;
    return urgent ? std::min(probe_ns_, tried_ns_ + kUrgentNs) : probe_ns_;
  }
  // Where it ends in its file: a limit may depend on that. 0: anywhere.
  uint64_t probe_end() const { return probe_end_; }
  void ProbeBegins();
  // 0: what was written was read back.
  void ProbeEnds(int error, int64_t now_ns);
  uint64_t probes() const { return probes_; }
  uint64_t failed_probes() const { return failed_probes_; }

 private:
  // The later ones are worse, and stay until a probe is good or says otherwise.
  enum class Cause : uint8_t { kWell, kUnproven, kSpace, kReadOnly, kDevice };

  static Cause CauseOf(int error);
  void Fail(Cause cause, int error, int64_t now_ns);
  void SetProbe(int64_t now_ns);

  Cause cause_ = Cause::kWell;
  int error_ = 0;
  bool disabled_ = false;
  bool unreadable_ = false;
  bool probing_ = false;
  bool failed_meanwhile_ = false;  // something did since the probe under way began: its answer is of before
  uint32_t failures_ = 0;          // of the device, in a row
  int64_t healthy_ns_ = 0;         // when it last became healthy
  int64_t since_ns_ = 0;
  int64_t probe_ns_ = kNever;
  int64_t tried_ns_ = 0;  // when it last failed, or was probed
  uint64_t probe_end_ = 0;
  uint64_t write_end_ = kAnywhere;    // while it is full
  uint64_t rewrite_end_ = kAnywhere;  // likewise
  uint64_t probes_ = 0;
  uint64_t failed_probes_ = 0;
};

// As status tells it.
const char* Name(PathHealth::State state);

}  // namespace mlpo
