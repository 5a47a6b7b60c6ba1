#include "client/src/staging.h"

#include <errno.h>

#include "client/src/error.h"
#include "client/src/session.h"
#include "proto/control.h"
#include "proto/status.h"

namespace mlpo::client {
namespace {

constexpr uint64_t kSmallestBytes = 2 * MLPO_ALIGN;

uint64_t RoundUp(uint64_t bytes) { return (bytes + MLPO_ALIGN - 1) / MLPO_ALIGN * MLPO_ALIGN; }

}  // namespace

int Staging::Open(mlpo_client* client, Deadline deadline, uint64_t most_bytes) {
  if (half_bytes_ != 0) return AwaitUnused(deadline);
  // Made once, so of the size that serves large transfers even if this one is small: master, first and second moments
  // of a block.
  uint64_t wanted = RoundUp(uint64_t{3} * 4 * client->block_elements);
  if (wanted > most_bytes) wanted = RoundUp(most_bytes);
  TurnHolder socket_turn(client->socket.turn(), deadline);
  if (!socket_turn.held()) return Fail(-ETIMEDOUT, "another thread's registration still runs");
  if (int code = client->socket.Drain(deadline); code != 0) return code;
  if (client->socket.staged().bytes == 0) {
    int code = Ask(client, wanted < kSmallestBytes ? kSmallestBytes : wanted, deadline);
    if (code == MLPO_E_QUOTA && wanted > kSmallestBytes) code = Ask(client, kSmallestBytes, deadline);
    if (code != 0) return code;
  }
  return Take(client);
}

int Staging::Ask(mlpo_client* client, uint64_t bytes, Deadline deadline) {
  mlpo_staging ask = {};
  uint32_t seq;
  if (int code = client->socket.Begin(deadline, &seq); code != 0) return code;
  SetHeader(&ask, MLPO_FRAME_STAGING, seq);
  ask.bytes = bytes;
  if (int code = client->socket.Send(&ask, sizeof ask, deadline); code != 0) return code;
  ReceivedFrame answer;
  return client->socket.Await(MLPO_FRAME_STAGED, &answer, deadline);
}

int Staging::Take(mlpo_client* client) {
  const mlpo_staged& staged = client->socket.staged();
  std::byte* data = client->socket.ArenaBytes(staged.arena, staged.offset, staged.bytes);
  if (data == nullptr || staged.reserved != 0 || staged.bytes < kSmallestBytes || staged.offset % MLPO_ALIGN != 0)
    return client->socket.EndSession(Fail(MLPO_E_PROTOCOL, "the daemon sent a malformed STAGED frame"));
  half_bytes_ = staged.bytes / 2 / MLPO_ALIGN * MLPO_ALIGN;
  halves_[0] = {data, 0, nullptr};
  halves_[1] = {data + half_bytes_, half_bytes_, nullptr};
  return 0;
}

// A chunk whose caller gave up: how it ended is nobody's any more, but that it has is.
int Staging::AwaitUnused(Deadline deadline) {
  for (Half& half : halves_) {
    const int code = Settle(&half, deadline);
    if (half.pending != nullptr) return code;
  }
  return 0;
}

int Staging::Settle(Half* half, Deadline deadline, uint64_t* value) {
  if (half->pending == nullptr) return 0;
  mlpo_result result = {};
  result.struct_size = sizeof result;
  const int code = mlpo_request_wait(half->pending, deadline.LeftNs(), &result);
  if (mlpo_request_done(half->pending) != 1) return code;
  mlpo_request_free(half->pending);
  half->pending = nullptr;
  if (code == 0 && value != nullptr) *value = result.value;
  return code;
}

void Staging::Close() {
  for (Half& half : halves_) {
    mlpo_request_free(half.pending);
    half.pending = nullptr;
  }
}

}  // namespace mlpo::client
