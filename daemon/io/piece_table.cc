#include "daemon/io/piece_table.h"

#include <algorithm>
#include <cerrno>

#include "daemon/base/check.h"
#include "daemon/base/clock.h"
#include "proto/abi.h"

namespace mlpo {
namespace {

constexpr int64_t kFirstPauseNs = 50'000;
constexpr int64_t kLongestPauseNs = 100 * kNsPerMs;

}  // namespace

PieceTable::PieceTable(Options options) : options_(std::move(options)), log_limit_(kNsPerS) {
  MLPO_CHECK(options_.depth > 0 && options_.piece_bytes > 0 && options_.piece_bytes % MLPO_ALIGN == 0);
  slots_.resize(options_.depth);
  free_slots_.reserve(options_.depth);
  for (uint32_t i = options_.depth; i > 0; --i) free_slots_.push_back(i - 1);
}

uint32_t PieceTable::TakeActive() {
  if (free_active_ == kEnd) {
    actives_.emplace_back();
    return static_cast<uint32_t>(actives_.size() - 1);
  }
  const uint32_t index = free_active_;
  free_active_ = actives_[index].next;
  actives_[index] = Active();
  return index;
}

std::optional<TransferResult> PieceTable::Add(const Transfer& transfer, int fd, std::byte* data, int64_t now_ns) {
  MLPO_CHECK(transfer.offset % MLPO_ALIGN == 0 && transfer.bytes % MLPO_ALIGN == 0);
  if (fd < 0 || transfer.bytes == 0)
    return TransferResult{transfer.id, options_.path, fd < 0 ? EBADF : 0, 0, now_ns, now_ns};
  const uint32_t index = TakeActive();
  Active& active = actives_[index];
  active.transfer = transfer;
  active.fd = fd;
  active.data = data;
  active.uncut = true;
  if (uncut_tail_ == kEnd) {
    uncut_head_ = index;
  } else {
    actives_[uncut_tail_].next = index;
  }
  uncut_tail_ = index;
  ++active_;
  return std::nullopt;
}

// Takes a transfer out of the list of those with bytes left to cut: normally the head, elsewhere only after an error.
void PieceTable::LeaveUncut(Active& active) {
  const auto index = static_cast<uint32_t>(&active - actives_.data());
  uint32_t before = kEnd;
  for (uint32_t at = uncut_head_; at != index; at = actives_[at].next) before = at;
  (before == kEnd ? uncut_head_ : actives_[before].next) = active.next;
  if (uncut_tail_ == index) uncut_tail_ = before;
  active.next = kEnd;
  active.uncut = false;
}

PieceTable::Operation PieceTable::Issue(uint32_t slot_index, int64_t now_ns) {
  Slot& slot = slots_[slot_index];
  Active& active = actives_[slot.active];
  if (++slot.generation == 0) slot.generation = 1;  // no token is 0
  slot.state = SlotState::kIssued;
  ++in_flight_;
  if (active.started_ns == 0) active.started_ns = now_ns;
  const uint64_t at = slot.start + slot.done;
  slot.operation = {uint64_t{slot.generation} << 32 | slot_index,
                    active.transfer.direction,
                    active.fd,
                    active.transfer.buffer,
                    active.data + at,
                    slot.bytes - slot.done,
                    active.transfer.offset + at};
  return slot.operation;
}

std::optional<PieceTable::Operation> PieceTable::Next(int64_t now_ns) {
  if (waiting_ > 0) {
    for (uint32_t i = 0; i < slots_.size(); ++i) {
      if (slots_[i].state != SlotState::kWaiting || slots_[i].not_before_ns > now_ns) continue;
      --waiting_;
      return Issue(i, now_ns);
    }
  }
  if (uncut_head_ == kEnd || free_slots_.empty()) return std::nullopt;
  const uint32_t slot_index = free_slots_.back();
  free_slots_.pop_back();
  Slot& slot = slots_[slot_index];
  slot.active = uncut_head_;
  Active& active = actives_[slot.active];
  slot.start = active.cut_bytes;
  slot.bytes = std::min<uint64_t>(options_.piece_bytes, active.transfer.bytes - active.cut_bytes);
  slot.done = 0;
  slot.attempts = 0;
  active.cut_bytes += slot.bytes;
  ++active.pieces;
  if (active.cut_bytes == active.transfer.bytes) LeaveUncut(active);
  return Issue(slot_index, now_ns);
}

const PieceTable::Operation* PieceTable::Find(uint64_t token) const {
  const auto index = static_cast<uint32_t>(token);
  if (index >= slots_.size()) return nullptr;
  const Slot& slot = slots_[index];
  return slot.state == SlotState::kIssued && slot.operation.token == token ? &slot.operation : nullptr;
}

void PieceTable::Retry(Slot& slot, int64_t not_before_ns) {
  slot.state = SlotState::kWaiting;
  slot.not_before_ns = not_before_ns;
  ++waiting_;
}

void PieceTable::Fail(Slot& slot, int error, const char* reason, int64_t now_ns) {
  Active& active = actives_[slot.active];
  if (active.error == 0) active.error = error;
  if (active.uncut) LeaveUncut(active);
  uint64_t suppressed = 0;
  if (!log_limit_.Allow(now_ns, &suppressed)) return;
  spdlog::warn("event=io_error path={} direction={} file={} offset={} bytes={} errno={} reason=\"{}\" suppressed={}",
               options_.path_name, active.transfer.direction == Direction::kRead ? "read" : "write",
               active.transfer.file, active.transfer.offset + slot.start + slot.done, slot.bytes - slot.done, error,
               reason, suppressed);
}

std::optional<TransferResult> PieceTable::EndPiece(uint32_t slot_index, int64_t now_ns) {
  Slot& slot = slots_[slot_index];
  const uint32_t index = slot.active;
  Active& active = actives_[index];
  active.done_bytes += slot.done;
  slot.state = SlotState::kFree;
  slot.active = kEnd;
  free_slots_.push_back(slot_index);
  if (--active.pieces > 0 || active.uncut) return std::nullopt;
  const TransferResult result{active.transfer.id, options_.path,     active.error,
                              active.done_bytes,  active.started_ns, now_ns};
  active.next = free_active_;
  free_active_ = index;
  --active_;
  return result;
}

std::optional<TransferResult> PieceTable::Complete(uint64_t token, int64_t result, int64_t now_ns) {
  if (Find(token) == nullptr) {  // never for another request's: this one does not exist
    spdlog::error("event=stray_completion path={} token={} result={}", options_.path_name, token, result);
    return std::nullopt;
  }
  const auto slot_index = static_cast<uint32_t>(token);
  Slot& slot = slots_[slot_index];
  --in_flight_;
  const uint64_t asked = slot.operation.bytes;
  const bool failed_already = actives_[slot.active].error != 0;  // then nothing is tried again
  if (failed_already && result < static_cast<int64_t>(asked)) {
    if (result > 0) slot.done += static_cast<uint64_t>(result) / options_.alignment * options_.alignment;
  } else if (result == -EINTR || result == -EAGAIN) {
    if (++slot.attempts < kMaxAttempts) {
      const int64_t pause = std::min(kFirstPauseNs << slot.attempts, kLongestPauseNs);
      Retry(slot, result == -EAGAIN ? now_ns + pause : 0);
      return std::nullopt;
    }
    Fail(slot, static_cast<int>(-result), "tried again too often", now_ns);
  } else if (result < 0) {
    Fail(slot, static_cast<int>(-result), "the kernel refused it", now_ns);
  } else if (result == 0) {
    Fail(slot, EIO, slot.operation.direction == Direction::kRead ? "end of file" : "the write took no bytes", now_ns);
  } else if (static_cast<uint64_t>(result) > asked) {
    Fail(slot, EIO, "more bytes than asked for", now_ns);
  } else if (static_cast<uint64_t>(result) == asked) {
    slot.done = slot.bytes;
  } else {
    const uint64_t whole = static_cast<uint64_t>(result) / options_.alignment * options_.alignment;
    slot.done += whole;
    slot.attempts = whole > 0 ? 0 : slot.attempts + 1;
    if (slot.attempts < kMaxAttempts) {
      Retry(slot, 0);
      return std::nullopt;
    }
    Fail(slot, EIO, "short again and again", now_ns);
  }
  return EndPiece(slot_index, now_ns);
}

int64_t PieceTable::next_retry_ns() const {
  int64_t first = INT64_MAX;
  if (waiting_ == 0) return first;
  for (const Slot& slot : slots_)
    if (slot.state == SlotState::kWaiting) first = std::min(first, slot.not_before_ns);
  return first;
}

bool PieceTable::HasWork(int64_t now_ns) const {
  return (uncut_head_ != kEnd && !free_slots_.empty()) || (waiting_ > 0 && next_retry_ns() <= now_ns);
}

}  // namespace mlpo
