#include "client/src/stream.h"

#include <string.h>

#include "client/src/error.h"
#include "client/src/session.h"
#include "client/src/submit.h"

namespace mlpo::client {

Stream::Stream(mlpo_client* client, mlpo_subgroup* subgroup, const StreamArrays& arrays, const mlpo_submission& each,
               uint64_t count, bool write, Deadline deadline)
    : client_(client),
      subgroup_(subgroup),
      staging_(client->staging),
      arrays_(arrays),
      each_(each),
      count_(count),
      write_(write),
      deadline_(deadline) {}

int Stream::Run() {
  const uint64_t most = staging_.half_bytes() / (arrays_.count * arrays_.item_bytes);
  int code = 0;
  int turn = 0;
  for (uint64_t done = 0; done < count_ && code == 0; ++turn) {
    code = Finish(turn);  // what used this half before
    if (code != 0) break;
    const Chunk chunk = {done, count_ - done < most ? count_ - done : most};
    code = Begin(turn, chunk);
    done += chunk.items;
  }
  // Both halves, whatever happened: the daemon is to be out of them, and the first failure is told.
  Failure first;
  if (code != 0) first.SetFromLast(code);
  for (int i = 0; i < 2; ++i, ++turn) {
    const int ended = Finish(turn);
    if (first.code == 0 && ended != 0) first.SetFromLast(ended);
  }
  return first.code == 0 ? 0 : first.Report();
}

// Waits for the half's chunk of this call and copies what it brought.
int Stream::Finish(int turn) {
  Staging::Half& half = staging_.half(turn);
  Chunk& chunk = chunks_[turn & 1];
  if (half.pending == nullptr) return 0;
  const int code = Staging::Settle(&half, deadline_);
  if (code == 0 && !write_) Copy(half, chunk, /*into_staging=*/false);
  chunk.items = 0;
  return code;
}

int Stream::Begin(int turn, const Chunk& chunk) {
  Staging::Half& half = staging_.half(turn);
  if (write_) Copy(half, chunk, /*into_staging=*/true);
  mlpo_submission submission = each_;
  submission.first = each_.first + chunk.done;
  submission.count = chunk.items;
  submission.staging_offset = half.offset;
  chunks_[turn & 1] = chunk;
  return Submit(client_, subgroup_, submission, deadline_, &half.pending);
}

void Stream::Copy(const Staging::Half& half, const Chunk& chunk, bool into_staging) const {
  const uint64_t bytes = chunk.items * arrays_.item_bytes;
  for (uint32_t i = 0; i < arrays_.count; ++i) {
    std::byte* staged = half.data + i * bytes;
    std::byte* array = arrays_.parts[i] + chunk.done * arrays_.item_bytes;
    memcpy(into_staging ? staged : array, into_staging ? array : staged, bytes);
  }
}

}  // namespace mlpo::client
