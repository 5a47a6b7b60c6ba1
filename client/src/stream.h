// Stream: one call's arrays on their way between the caller and the daemon, in chunks through the two halves of the
// staging area.
#pragma once

#include <cstddef>
#include <cstdint>

#include "client/src/clock.h"
#include "client/src/staging.h"
#include "mlpo/client.h"
#include "proto/command.h"

namespace mlpo::client {

// The caller's arrays, of one length: up to three of FP32, or one of int64 steps or of bytes.
struct StreamArrays {
  std::byte* parts[3] = {};  // only read from when writing
  uint32_t count = 0;
  uint32_t mask = 0;
  uint64_t item_bytes = 4;

  void Add(uint32_t part, const void* array) {
    if (array == nullptr) return;
    parts[count++] = const_cast<std::byte*>(static_cast<const std::byte*>(array));
    mask |= part;
  }
};

// The staging turn is held, and the area is open.
class Stream {
 public:
  // `each`: what the chunks' submissions have in common, with the first one's `first`. `count`: items. `subgroup` may
  // be nullptr.
  Stream(mlpo_client* client, mlpo_subgroup* subgroup, const StreamArrays& arrays, const mlpo_submission& each,
         uint64_t count, bool write, Deadline deadline);

  // Returns when the daemon is out of both halves, but for what the deadline left behind; the first failure is told.
  int Run();

 private:
  struct Chunk {
    uint64_t done = 0;   // items that come before it
    uint64_t items = 0;  // 0: none
  };

  int Finish(int turn);
  int Begin(int turn, const Chunk& chunk);
  void Copy(const Staging::Half& half, const Chunk& chunk, bool into_staging) const;

  mlpo_client* const client_;
  mlpo_subgroup* const subgroup_;
  Staging& staging_;
  const StreamArrays& arrays_;
  const mlpo_submission each_;
  const uint64_t count_;
  const bool write_;
  const Deadline deadline_;
  Chunk chunks_[2];
};

}  // namespace mlpo::client
