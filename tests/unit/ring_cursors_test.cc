// The cursors of proto/spsc_ring.hpp, one end at a time.
#include <cstring>
#include <vector>

#include "proto/command.h"
#include "proto/spsc_ring.hpp"
#include "tests/support/catch.h"

namespace {

struct Entry {
  uint64_t value;
};

// A ring whose shared indices stand at `start`, as if so much had gone through it.
struct Ring {
  explicit Ring(uint32_t size, uint32_t start = 0)
      : entries(size), producer(entries.data(), size, &tail, &head), consumer(entries.data(), size, &tail, &head) {
    // Brings the private indices there the only way there is: by use.
    for (uint32_t i = 0; i < start; ++i) {
      producer.Push({i});
      producer.Publish();
      (void)consumer.Pop();
      consumer.Release();
    }
  }
  std::vector<Entry> entries;
  uint32_t tail = 0, head = 0;
  mlpo::SpscProducer<Entry> producer;
  mlpo::SpscConsumer<Entry> consumer;
};

}  // namespace

TEST_CASE("Ring.FillsAndEmpties") {
  for (const uint32_t size : {8u, 64u}) {
    Ring ring(size, 5);
    CHECK(ring.producer.Free() == size);
    CHECK(ring.consumer.Available() == 0);
    for (uint32_t i = 0; i < size; ++i) {
      CHECK(ring.producer.Free() == static_cast<int64_t>(size - i));
      CHECK(ring.producer.next_place() == (5 + i) % size);
      ring.producer.Push({100 + i});
    }
    // Nothing is seen before it is published.
    CHECK(ring.consumer.Available() == 0);
    CHECK(ring.consumer.empty_tail() == ring.tail);
    ring.producer.Publish();
    CHECK(ring.producer.Free() == 0);
    CHECK(ring.consumer.Available() == size);
    CHECK(ring.consumer.AvailableBeforeSleep() == size);
    for (uint32_t i = 0; i < size; ++i) {
      CHECK(ring.consumer.next_place() == (5 + i) % size);
      CHECK(ring.consumer.Pop().value == 100 + i);
    }
    // Places come back with Release and not before.
    CHECK(ring.producer.Free() == 0);
    CHECK(ring.producer.FreeFor(1) == 0);
    ring.consumer.Release();
    CHECK(ring.producer.FreeFor(0) == 0);  // what was seen is enough
    CHECK(ring.producer.FreeFor(1) == size);
    CHECK(ring.producer.Free() == size);
    CHECK(ring.consumer.Available() == 0);
  }
}

TEST_CASE("Ring.IndicesWrapAtTwoToTheThirtyTwo") {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  WARN("skipped: 2^32 entries take minutes under a sanitizer; the build without one runs this");
  return;
#endif
  uint32_t tail = 0, head = 0;
  std::vector<Entry> entries(8);
  mlpo::SpscProducer<Entry> producer(entries.data(), 8, &tail, &head);
  mlpo::SpscConsumer<Entry> consumer(entries.data(), 8, &tail, &head);
  uint64_t pushed = 0, popped = 0;
  // The cursors start at 0, so the only way to the wrap is through it: 2^32 + 1000 entries, about 1 ns each.
  const uint64_t target = (uint64_t{1} << 32) + 1000;
  uint64_t wrong = 0;
  while (popped < target) {
    for (int i = 0; i < 8; ++i) producer.Push({pushed++});
    producer.Publish();
    wrong += consumer.Available() != 8;
    wrong += producer.Free() != 0;
    for (int i = 0; i < 8; ++i) wrong += consumer.Pop().value != popped++;
    consumer.Release();
  }
  CHECK(wrong == 0);
  CHECK(tail == static_cast<uint32_t>(pushed));
  CHECK(tail < 2000);  // it did wrap
}

TEST_CASE("Ring.DistanceThatCannotBeIsFound") {
  for (const uint32_t lie : {9u, 1u << 31, 0xffffffffu, 0x7fffffffu}) {
    Ring ring(8, 20);
    ring.tail = 20 + lie;
    CHECK(ring.consumer.Available() == -1);
    CHECK(ring.consumer.AvailableBeforeSleep() == -1);
    ring.tail = 20;
    ring.head = 20 - lie;
    CHECK(ring.producer.Free() == -1);
    CHECK(ring.producer.FreeFor(9) == -1);
    ring.head = 20 + 1;  // a consumer ahead of its producer
    CHECK(ring.producer.Free() == -1);
  }
  Ring ring(8, 20);
  ring.tail = 28;  // exactly full is possible
  CHECK(ring.consumer.Available() == 8);
}

TEST_CASE("Ring.CopiesAreWholeForEveryEntryType") {
  alignas(8) unsigned char bytes[256];
  for (size_t i = 0; i < sizeof bytes; ++i) bytes[i] = static_cast<unsigned char>(i * 7 + 1);
  const auto check = [&]<class T>(T) {
    T out = mlpo::CopyOut(reinterpret_cast<const T*>(bytes));
    CHECK(std::memcmp(&out, bytes, sizeof out) == 0);
    alignas(8) unsigned char target[sizeof(T) + 16];
    std::memset(target, 0xee, sizeof target);
    mlpo::CopyIn(reinterpret_cast<T*>(target + 8), out);
    CHECK(std::memcmp(target + 8, bytes, sizeof out) == 0);
    for (size_t i = 0; i < 8; ++i) CHECK((target[i] == 0xee && target[8 + sizeof(T) + i] == 0xee));
  };
  check(mlpo_submission{});
  check(mlpo_completion{});
  check(mlpo_hyper{});
  check(mlpo_error_record{});
}
