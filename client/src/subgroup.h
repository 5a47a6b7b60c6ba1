// mlpo_subgroup: a registered subgroup and its slot.
//
// What registration gave never changes. The rest is guarded by the ring's lock. Memory: lives until the caller has
// freed the handle and none of its submissions is in flight.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "mlpo/client.h"

struct mlpo_subgroup {
  mlpo_client* client = nullptr;  // holds a reference
  uint32_t handle = 0;
  uint32_t tensor_count = 0;
  uint64_t numel = 0;
  int32_t dtype = 0;
  int32_t grad_dtype = 0;
  std::byte* header = nullptr;  // and below: nullptr while no slot is lent, guarded then by the ring's lock
  std::byte* grad = nullptr;
  std::byte* param = nullptr;
  uint64_t slot_bytes = 0;  // of a slot of the lent area; 0: it has a slot of its own

  uint32_t epoch = 0;               // of the last UPDATE that was seen to succeed
  bool update_outstanding = false;  // submitted and not seen to end: the daemon has the slot
  bool freed = false;               // by the caller
  bool holds_param = false;         // the slot's parameters are of `epoch`, or of a restore since
  uint32_t flights = 0;             // submissions that have not ended
  uint32_t unposted = 0;            // prepared requests that were neither posted nor abandoned
  uint64_t updates_ended = 0;
  // With slot_bytes only.
  std::byte* slot = nullptr;  // that is lent
  uint64_t slot_offset = 0;   // in the lent area
  mlpo_subgroup* next_lent = nullptr;
  uint32_t grad_flights = 0;  // GRADs that have not ended
  bool window_open = false;   // the daemon may need the slot
  bool window_over = false;   // nothing that was put into the slot is needed any more
  uint64_t* watch = nullptr;  // the caller's word, nullptr if none

  // A gradient is being put where the parameters are.
  void GradOverwrites() {
    if (grad == param) holds_param = false;
  }
  void GradBegins() {
    GradOverwrites();
    window_open = true;
    window_over = false;
  }
  // Every element is covered and every GRAD has ended: a gradient that is kept has left the slot.
  void WindowComplete() {
    window_open = false;
    window_over = !update_outstanding && !holds_param;
  }
  void WindowDiscarded() {
    if (update_outstanding || !window_open) return;
    window_open = false;
    window_over = true;
  }
  bool MayGiveSlotBack() const { return !window_open && !update_outstanding && grad_flights == 0 && unposted == 0; }
  // Gives the slot back if nothing that is in it is needed.
  void SettleSlot();
  // It leaves the rounded parameters in a slot of the subgroup's own.
  void RestoreEnded(int32_t status) { holds_param = status == 0 && slot_bytes == 0; }
  void UpdateEnded(int32_t status) {
    update_outstanding = false;
    holds_param = status == 0;
    window_open = status != 0;  // it may be torn
    if (status == 0) ++epoch;
    ++updates_ended;
    ShowEnded();
  }
  void ShowEnded() {
    // Release: what the daemon wrote is seen before the word, which a GPU may read.
    if (watch != nullptr) std::atomic_ref<uint64_t>(*watch).store(updates_ended, std::memory_order_release);
  }
  // Neither in flight nor prepared.
  void FreeIfUnused();
};
