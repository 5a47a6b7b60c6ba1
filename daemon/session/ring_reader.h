// RingReader: the daemon's end of a session's submission ring: copies each submission once, validates the copy, makes a
// Request of it. Nothing is read from the ring twice.
//
// What honest software cannot send ends the session, with the reason; what it can is left to the scheduler, whose
// answer is a completion. Owner and only user: the data thread. Memory of the areas is borrowed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>

#include "daemon/session/areas.h"
#include "daemon/types/request.h"
#include "daemon/types/subgroup_spec.h"
#include "proto/spsc_ring.hpp"

namespace mlpo {

class RingReader {
 public:
  RingReader(SessionId session, const Areas* areas);

  void AddSubgroup(const SubgroupSpec& spec);
  // The session's staging area, mapped as long as the session is.
  void SetStaging(const std::byte* data, uint64_t bytes) {
    staging_ = data;
    staging_bytes_ = bytes;
  }

  // How many submissions wait; -1 if the client's index is impossible.
  int64_t Waiting() const { return ring_.Available(); }
  // Takes the next of those that Waiting() has counted. What is wrong with it, or empty; then *request has it.
  std::string Next(Request* request);
  // Gives the places of what was taken back to the client.
  void Release() { ring_.Release(); }
  // Whether something waits; the last look before sleeping.
  bool WaitsBeforeSleep() const { return ring_.AvailableBeforeSleep() != 0; }

 private:
  struct Limits {
    uint64_t numel = 0;
    uint64_t tensors = 0;
    uint64_t slot_bytes = 0;  // 0: it has a slot of its own
    uint64_t lent_bytes = 0;  // of the area that slots are in
  };
  std::string Check(const mlpo_submission& submission) const;
  std::string CheckLent(const mlpo_submission& submission, const Limits& limits) const;
  std::string CheckState(const mlpo_submission& submission, const Limits& limits) const;
  std::string CheckObject(const mlpo_submission& submission) const;

  const SessionId session_;
  const Areas* const areas_;
  SpscConsumer<mlpo_submission> ring_;
  std::unordered_map<SubgroupId, Limits> subgroups_;
  const std::byte* staging_ = nullptr;
  uint64_t staging_bytes_ = 0;
};

// Empty if the record may be used, else which value is out of range.
std::string CheckHyper(const mlpo_hyper& hyper);

}  // namespace mlpo
