// The cursors of a single-producer single-consumer ring in shared memory; both ends of both rings use them.
//
// Each end keeps size, mask and its own index privately and stores the index for the peer to see. What it loads from
// the peer's index is only ever used as a distance, which is checked: a peer that lies is found, never believed.
// Threads: one thread at a time per end (the client holds a process-private lock, the daemon's data thread owns its
// ends). Memory is borrowed and must outlive the cursor.
//
// Sleeping. The consumer announces that it sleeps, then looks at the tail again; the producer publishes the tail, then
// looks at the announcement. All four are seq_cst, so that at least one of the two sees the other (no fences:
// ThreadSanitizer and model checkers do not follow those):
//     producer: store tail (P1)   load sleeping (P2)
//     consumer: store sleeping (C1)   load tail (C2)
// P1 before P2 and C1 before C2 in the single total order: either C2 sees the tail, or P2 sees the announcement.
#ifndef MLPO_PROTO_SPSC_RING_HPP_
#define MLPO_PROTO_SPSC_RING_HPP_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace mlpo {

// How shared words are read and written; a model checker puts its own in place.
struct SharedWords {
  static uint32_t Load(const uint32_t* word, std::memory_order order) {
    return std::atomic_ref<uint32_t>(*const_cast<uint32_t*>(word)).load(order);
  }
  static void Store(uint32_t* word, uint32_t value, std::memory_order order) {
    std::atomic_ref<uint32_t>(*word).store(value, order);
  }
  static uint64_t LoadPart(const uint64_t* part) {
    return std::atomic_ref<uint64_t>(*const_cast<uint64_t*>(part)).load(std::memory_order_relaxed);
  }
  static void StorePart(uint64_t* part, uint64_t value) {
    std::atomic_ref<uint64_t>(*part).store(value, std::memory_order_relaxed);
  }
};

// Copies one entry out of or into shared memory, each byte read or written once, whatever the peer does meanwhile.
template <class Entry, class Words = SharedWords>
Entry CopyOut(const Entry* shared) {
  static_assert(std::is_trivially_copyable_v<Entry> && sizeof(Entry) % 8 == 0 && alignof(Entry) == 8);
  uint64_t parts[sizeof(Entry) / 8];
  for (size_t i = 0; i < sizeof(Entry) / 8; ++i)
    parts[i] = Words::LoadPart(reinterpret_cast<const uint64_t*>(shared) + i);
  Entry entry;
  std::memcpy(&entry, parts, sizeof entry);
  return entry;
}
template <class Entry, class Words = SharedWords>
void CopyIn(Entry* shared, const Entry& entry) {
  static_assert(std::is_trivially_copyable_v<Entry> && sizeof(Entry) % 8 == 0 && alignof(Entry) == 8);
  uint64_t parts[sizeof(Entry) / 8];
  std::memcpy(parts, &entry, sizeof entry);
  for (size_t i = 0; i < sizeof(Entry) / 8; ++i) Words::StorePart(reinterpret_cast<uint64_t*>(shared) + i, parts[i]);
}

template <class Entry, class Words = SharedWords>
class SpscProducer {
 public:
  SpscProducer() = default;
  // `entries` has `size` places, a power of two. Both indices start at 0.
  SpscProducer(Entry* entries, uint32_t size, uint32_t* tail, const uint32_t* head)
      : entries_(entries), size_(size), tail_(tail), head_(head) {}

  // Places that are free, or -1 if the peer's index is impossible. Never blocks.
  int64_t Free() {
    const uint32_t head = Words::Load(head_, std::memory_order_acquire);  // pairs with Consumer::Release
    const uint32_t used = next_ - head;
    if (used > size_) return -1;
    seen_head_ = head;
    return static_cast<int64_t>(size_ - used);
  }
  // The same, but without fetching the peer's index, whose cache line is in the peer's core, while what was seen of it
  // leaves `wanted` places.
  int64_t FreeFor(int64_t wanted) {
    const int64_t free = static_cast<int64_t>(size_) - (next_ - seen_head_);
    return free >= wanted ? free : Free();
  }
  // The place that the next Push fills: index into tables that run beside the ring.
  uint32_t next_place() const { return next_ & (size_ - 1); }
  // Writes an entry that Publish() will show. The caller has seen that one is free.
  void Push(const Entry& entry) { CopyIn<Entry, Words>(&entries_[next_++ & (size_ - 1)], entry); }
  // Shows everything pushed so far (P1).
  void Publish() { Words::Store(tail_, next_, std::memory_order_seq_cst); }
  // Whether the consumer has announced that it sleeps (P2); asked after Publish().
  static bool ConsumerSleeps(const uint32_t* sleeping) { return Words::Load(sleeping, std::memory_order_seq_cst) != 0; }

 private:
  Entry* entries_ = nullptr;
  uint32_t size_ = 0;
  uint32_t next_ = 0;
  uint32_t seen_head_ = 0;
  uint32_t* tail_ = nullptr;
  const uint32_t* head_ = nullptr;
};

template <class Entry, class Words = SharedWords>
class SpscConsumer {
 public:
  SpscConsumer() = default;
  SpscConsumer(const Entry* entries, uint32_t size, const uint32_t* tail, uint32_t* head)
      : entries_(entries), size_(size), tail_(tail), head_(head) {}

  // Entries that wait, or -1 if the peer's index is impossible (further ahead than the ring is long, or behind).
  int64_t Available() const { return Distance(Words::Load(tail_, std::memory_order_acquire)); }  // pairs with Publish
  // The same, as the last look before sleeping (C2); asked after the announcement (C1) was stored seq_cst.
  int64_t AvailableBeforeSleep() const { return Distance(Words::Load(tail_, std::memory_order_seq_cst)); }
  // The place of the next entry: index into tables that run beside the ring.
  uint32_t next_place() const { return next_ & (size_ - 1); }
  // Copies the next entry out. The caller has seen Available() > 0.
  Entry Pop() { return CopyOut<Entry, Words>(&entries_[next_++ & (size_ - 1)]); }
  // Gives the places of everything popped so far back to the producer.
  void Release() { Words::Store(head_, next_, std::memory_order_release); }
  // The tail value that means "empty": what a futex wait compares with.
  uint32_t empty_tail() const { return next_; }

 private:
  int64_t Distance(uint32_t tail) const {
    const uint32_t distance = tail - next_;
    return distance > size_ ? -1 : static_cast<int64_t>(distance);
  }

  const Entry* entries_ = nullptr;
  uint32_t size_ = 0;
  uint32_t next_ = 0;
  const uint32_t* tail_ = nullptr;
  uint32_t* head_ = nullptr;
};

}  // namespace mlpo

#endif  // MLPO_PROTO_SPSC_RING_HPP_
