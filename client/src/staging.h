// Staging: the session's staging area, through which state and named objects stream in chunks.
//
// Threads: everything is guarded by turn(). The area has two halves, so that one is copied while the daemon works on
// the other. A chunk whose caller gave up (deadline) keeps its half until it has ended: the daemon may still touch it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "client/src/lock.h"
#include "mlpo/client.h"

namespace mlpo::client {

class Staging {
 public:
  struct Half {
    std::byte* data = nullptr;
    uint64_t offset = 0;              // bytes in the staging area
    mlpo_request* pending = nullptr;  // the chunk that uses it
  };

  Turn& turn() { return turn_; }
  // Asks the daemon for the area at first use, of `most_bytes` at most, and waits until nothing uses it any more.
  int Open(mlpo_client* client, Deadline deadline, uint64_t most_bytes = UINT64_MAX);
  Half& half(int index) { return halves_[index & 1]; }
  uint64_t half_bytes() const { return half_bytes_; }
  // Waits until nothing uses the half. Returns what its chunk ended with, its value in *value if that is not nullptr;
  // or -ETIMEDOUT.
  static int Settle(Half* half, Deadline deadline, uint64_t* value = nullptr);
  // A number for an object to be opened, never 0, and none that the daemon may still know.
  uint32_t NextHandle() { return next_handle_ == UINT32_MAX ? next_handle_ = 1 : ++next_handle_; }
  // Frees the requests; with no other thread inside.
  void Close();

 private:
  int Ask(mlpo_client* client, uint64_t bytes, Deadline deadline);
  int Take(mlpo_client* client);
  int AwaitUnused(Deadline deadline);

  Turn turn_;
  Half halves_[2];
  uint64_t half_bytes_ = 0;  // 0: not asked for yet
  uint32_t next_handle_ = 0;
};

}  // namespace mlpo::client
