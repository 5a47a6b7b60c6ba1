// LentArea: the part of the arena that subgroups registered with `keep` take their slots from.
//
// Threads: Open() has the socket's turn; everything else the ring's lock. A slot goes to the first place that it fits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "client/src/clock.h"

struct mlpo_client;
struct mlpo_subgroup;

namespace mlpo::client {

class LentArea {
 public:
  // Asks the daemon for the area at first use. The socket's turn is held.
  int Open(mlpo_client* client, Deadline deadline);
  uint64_t bytes() const { return bytes_; }

  // Lends the subgroup a slot; true if it has one then.
  bool Take(mlpo_subgroup* subgroup);
  void GiveBack(mlpo_subgroup* subgroup);
  // All open windows have ended.
  void WindowsDiscarded();
  uint32_t slots() const { return slots_; }
  uint64_t lent_bytes() const { return lent_bytes_; }
  // Frees subgroups whose slots the daemon had to the end; with no other thread inside.
  void Close();

 private:
  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;              // 0: not asked for yet
  mlpo_subgroup* first_ = nullptr;  // of those that have a slot, by offset
  uint32_t slots_ = 0;
  uint64_t lent_bytes_ = 0;
};

}  // namespace mlpo::client
