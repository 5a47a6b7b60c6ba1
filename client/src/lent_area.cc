#include "client/src/lent_area.h"

#include <stdlib.h>
#include <string.h>

#include "client/src/error.h"
#include "client/src/session.h"
#include "client/src/subgroup.h"
#include "proto/abi.h"
#include "proto/control.h"
#include "proto/status.h"

namespace mlpo::client {

int LentArea::Open(mlpo_client* client, Deadline deadline) {
  SessionSocket& socket = client->socket;
  if (int code = socket.Drain(deadline); code != 0) return code;
  if (bytes_ != 0) return 0;
  if (socket.lent().bytes == 0) {
    mlpo_staging ask = {};  // all that is left
    uint32_t seq;
    if (int code = socket.Begin(deadline, &seq); code != 0) return code;
    SetHeader(&ask, MLPO_FRAME_LEND, seq);
    if (int code = socket.Send(&ask, sizeof ask, deadline); code != 0) return code;
    ReceivedFrame answer;
    if (int code = socket.Await(MLPO_FRAME_LENT, &answer, deadline); code != 0) return code;
  }
  const mlpo_staged& lent = socket.lent();
  data_ = socket.ArenaBytes(lent.arena, lent.offset, lent.bytes);
  if (data_ == nullptr || lent.reserved != 0 || lent.bytes == 0 || lent.offset % MLPO_ALIGN != 0)
    return socket.EndSession(Fail(MLPO_E_PROTOCOL, "the daemon sent a malformed LENT frame"));
  bytes_ = lent.bytes;
  return 0;
}

bool LentArea::Take(mlpo_subgroup* subgroup) {
  if (subgroup->slot != nullptr) return true;
  uint64_t offset = 0;
  mlpo_subgroup** link = &first_;
  for (; *link != nullptr && (*link)->slot_offset - offset < subgroup->slot_bytes; link = &(*link)->next_lent)
    offset = (*link)->slot_offset + (*link)->slot_bytes;
  if (bytes_ - offset < subgroup->slot_bytes) return false;
  subgroup->next_lent = *link;
  *link = subgroup;
  subgroup->slot_offset = offset;
  subgroup->slot = data_ + offset;
  subgroup->header = subgroup->slot;
  subgroup->grad = subgroup->param = subgroup->slot + MLPO_SLOT_HEADER_BYTES;
  subgroup->holds_param = subgroup->window_over = false;
  memset(subgroup->header, 0, MLPO_SLOT_HEADER_BYTES);  // the epoch there was another subgroup's
  ++slots_;
  lent_bytes_ += subgroup->slot_bytes;
  return true;
}

void LentArea::GiveBack(mlpo_subgroup* subgroup) {
  mlpo_subgroup** link = &first_;
  while (*link != subgroup) link = &(*link)->next_lent;
  *link = subgroup->next_lent;
  subgroup->next_lent = nullptr;
  subgroup->slot = subgroup->header = subgroup->grad = subgroup->param = nullptr;
  subgroup->holds_param = subgroup->window_over = false;
  --slots_;
  lent_bytes_ -= subgroup->slot_bytes;
}

void LentArea::WindowsDiscarded() {
  for (mlpo_subgroup* subgroup = first_; subgroup != nullptr;) {
    mlpo_subgroup* next = subgroup->next_lent;
    subgroup->WindowDiscarded();
    subgroup->SettleSlot();
    subgroup = next;
  }
}

void LentArea::Close() {
  while (first_ != nullptr) {
    mlpo_subgroup* subgroup = first_;
    GiveBack(subgroup);
    subgroup->window_open = false;
    subgroup->FreeIfUnused();
  }
}

}  // namespace mlpo::client
