// A path, a pool and a queue on it, and waiting for results with a deadline.
#pragma once

#include <poll.h>

#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "daemon/base/clock.h"
#include "daemon/io/io.h"
#include "tests/support/catch.h"

namespace mlpo::test {

inline constexpr int64_t kDeadlineNs = 60 * kNsPerS;

// The byte that belongs at `offset` of a file, for a version of its contents.
inline uint64_t PatternWord(uint64_t version, uint64_t offset) {
  uint64_t x = offset * 0x9e3779b97f4a7c15u + version * 0xbf58476d1ce4e5b9u + 1;
  x ^= x >> 29;
  return x * 0x94d049bb133111ebu;
}

inline void FillPattern(std::byte* data, size_t bytes, uint64_t version, uint64_t offset) {
  for (size_t i = 0; i < bytes; i += 8) {
    const uint64_t word = PatternWord(version, offset + i);
    std::memcpy(data + i, &word, 8);
  }
}

inline bool HasPattern(const std::byte* data, size_t bytes, uint64_t version, uint64_t offset) {
  for (size_t i = 0; i < bytes; i += 8) {
    const uint64_t word = PatternWord(version, offset + i);
    if (std::memcmp(data + i, &word, 8) != 0) return false;
  }
  return true;
}

class QueueFixture {
 public:
  struct Setup {
    std::string directory;
    std::string engine = "auto";
    uint64_t buffer_bytes = 64 << 10;
    uint32_t buffers = 8;
    uint32_t piece_bytes = 16 << 10;
    uint32_t depth = 16;
    bool direct = true;
    IoFaults* faults = nullptr;
  };

  explicit QueueFixture(const Setup& setup) {
    PathConfig config;
    config.directory = setup.directory;
    config.direct = setup.direct;
    Result<std::unique_ptr<Path>> opened = Path::Open(config, "test", "node");
    INFO(opened.status().message());
    REQUIRE(opened.ok());
    path = std::move(*opened);
    BufferPool::Options pool_options;
    pool_options.pool_bytes = setup.buffers * setup.buffer_bytes;
    pool_options.buffer_bytes = setup.buffer_bytes;
    Result<std::unique_ptr<BufferPool>> made = BufferPool::Create(pool_options);
    INFO(made.status().message());
    REQUIRE(made.ok());
    pool = std::move(*made);
    options.engine = setup.engine;
    options.piece_bytes = setup.piece_bytes;
    options.depth = setup.depth;
    options.faults = setup.faults;
    Restart();
    Result<FileId> created = path->CreateFile({1000, "job", 0, 1});
    INFO(created.status().message());
    REQUIRE(created.ok());
    file = *created;
  }

  void Restart() {
    Result<std::unique_ptr<PathQueue>> started = PathQueue::Start(options, path.get(), pool.get(), &results);
    INFO(started.status().message());
    REQUIRE(started.ok());
    queue = std::move(*started);
  }

  uint64_t Submit(Direction direction, BufferIndex buffer, uint64_t offset, uint64_t bytes) {
    Transfer transfer;
    transfer.id = next_id++;
    transfer.direction = direction;
    transfer.file = file;
    transfer.buffer = buffer;
    transfer.offset = offset;
    transfer.bytes = bytes;
    queue->Submit(transfer);
    return transfer.id;
  }

  // At least the next `count` results, by id; each id at most once.
  std::map<uint64_t, TransferResult> Await(size_t count) {
    std::map<uint64_t, TransferResult> found;
    const int64_t deadline = NowNs() + kDeadlineNs;
    while (found.size() < count) {
      pollfd event{results.event_fd(), POLLIN, 0};
      const int64_t left_ms = (deadline - NowNs()) / kNsPerMs;
      REQUIRE(left_ms > 0);
      REQUIRE(::poll(&event, 1, static_cast<int>(left_ms)) == 1);
      std::vector<TransferResult> taken;
      results.TakeAll(&taken);
      for (const TransferResult& result : taken) {
        const bool first = found.emplace(result.id, result).second;
        REQUIRE(first);
      }
    }
    return found;
  }
  TransferResult Do(Direction direction, BufferIndex buffer, uint64_t offset, uint64_t bytes) {
    const uint64_t id = Submit(direction, buffer, offset, bytes);
    const std::map<uint64_t, TransferResult> found = Await(1);
    REQUIRE(found.size() == 1);
    REQUIRE(found.count(id) == 1);
    return found.at(id);
  }

  std::unique_ptr<Path> path;
  std::unique_ptr<BufferPool> pool;
  TransferResults results;
  PathQueue::Options options;
  std::unique_ptr<PathQueue> queue;
  FileId file = 0;
  uint64_t next_id = 1;
};

}  // namespace mlpo::test
